"""Host memory that is used again, but by nobody as long as somebody holds some of it."""

from __future__ import annotations

import torch

from diloco.pinned_memory import PinnedRooms


def test_memory_is_used_again_once_nobody_holds_a_view_of_it() -> None:
    rooms = PinnedRooms(torch.device("cpu"))
    first = rooms.take(1000).fill_(7.0)
    address, part = first.data_ptr(), first[10:20]
    del first

    second = rooms.take(1000).fill_(8.0)
    assert part.tolist() == [7.0] * 10
    assert second.data_ptr() != address

    del part
    assert rooms.take(999).data_ptr() != address
    assert rooms.take(1000).data_ptr() == address

    rooms.release()
    assert not any(rooms._free.values())
    assert second.tolist() == [8.0] * 1000
