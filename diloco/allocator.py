"""The C library's allocator, told that vectors of the same sizes come and go all the time."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

#: Parameters of mallopt(3), glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 1 << 30
_LARGEST_MMAP_THRESHOLD = 32 << 20
_LEAST_MMAP_THRESHOLD = 64 << 10
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def keep_freed_memory() -> None:
    """Have freed memory, up to 1 GiB, used again by any thread instead of given back at once.

    For the start of a process: threads that there are already keep heaps of their own, and what is
    freed in one of them serves no other.

    A merge allocates a version's vectors again, as large as those that the last one let go. Given
    back and taken again, every page of them is cleared by the kernel: on two threads a third of a
    merge's CPU time. Vectors over 32 MiB are given back all the same. Elsewhere than under glibc
    nothing is changed, and results never are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    wanted = (
        (_ARENA_MAX, 1),
        (_TRIM_THRESHOLD, _KEPT_BYTES),
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
    )
    if mallopt is None or not all(mallopt(*setting) for setting in wanted):
        logger.info("freed memory is given back at once: merges take longer")


def give_back_at_once() -> None:
    """Give vectors pages of their own, so that what a process has resident is what it uses.

    For a measurement, at the start of a process. Elsewhere than under glibc nothing is done.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, _LEAST_MMAP_THRESHOLD)


def give_back_holes() -> None:
    """Give back whatever is free now, in whole pages, also between what is in use.

    For anyone who has let go of much that lay scattered: larger vectors do not fit there, and take
    memory again. What is allocated there next has its pages cleared again. Takes milliseconds a
    gigabyte. Elsewhere than under glibc nothing is done.
    """
    if _TRIM is not None:
        _TRIM(0)
