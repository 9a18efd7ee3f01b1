"""Lists, verifies, reads and removes the checkpoints of an island.

    CHECKPOINT_DIR/ISLAND/step-000000000120/parts-0001/rank-00000-of-00002.safetensors
                                                       rank-00001-of-00002.safetensors
                                                       plan.json
                                            manifest.json
    CHECKPOINT_DIR/ISLAND/cut-000000000003/    where islands merge on arrival: by the cut's number
    CHECKPOINT_DIR/ISLAND/abandoned-before-timeline-0001-after-000000000100/step-000000000120/

A rank's file holds the lanes that the rank carries, so together the files have every lane once, and
an island of any layout can read them. The manifest is written last, and names the directory of the
other files and their digests: a checkpoint is valid if and only if its manifest is there and every
digest is right. A step that is written once more gets another directory, and the one rename that
replaces the manifest swaps the old checkpoint for the new: whenever the writer is killed, one of
them is whole. What no manifest names is removed with the next checkpoint.

What a resume abandons is kept until a checkpoint of the new timeline is complete, or until the next
resume.

    model/P/L  exp_avg/P/L  exp_avg_sq/P/L    lane L of fragment P, float32
    outer/...                                 what `DiLoCo.state_dict` gave

Imports no torch: a resume must find its checkpoints without loading it.

Source: PROTOCOL.md, "Run checkpoints and pins".
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from diloco.durable import sync_directory
from diloco.errors import ConfigError, PlanMismatch
from diloco.outer.fragments import Plan

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

FORMAT = 4
MANIFEST = "manifest.json"
PLAN = "plan.json"
#: Before the names of the outer loop's state.
OUTER = "outer/"

_STEP = re.compile(r"(?:step|cut)-(\d{12,})")
_ABANDONED = re.compile(r"abandoned-before-timeline-\d+-after-(\d{12,})")
_PIECE_BYTES = 1 << 24
#: Of 100,000 ranks a manifest has 15 MiB.
MOST_MANIFEST_BYTES = 1 << 26
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def step_directory(directory: Path, island: str, step: int, *, is_cut: bool = False) -> Path:
    """Where the checkpoint of an inner step, or of the cut of that number, is or will be."""
    return directory / island / f"{'cut' if is_cut else 'step'}-{step:012d}"


def found_directory(directory: Path, island: str, step: int, *, is_cut: bool = False) -> Path:
    """Where the checkpoint of an inner step or cut is; of neither, where it would be.

    A run has checkpoints of one kind; `is_cut` says which, where that is known.
    """
    nowhere = step_directory(directory, island, step, is_cut=is_cut)
    return _steps(directory, island).get(step, nowhere)


def step_of(name: str) -> int | None:
    """Inner step or cut of a checkpoint's directory, by its name; None: it is no checkpoint's."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def rank_file(island_rank: int, num_ranks: int) -> str:
    """Name of a rank's file."""
    return f"rank-{island_rank:05d}-of-{num_ranks:05d}.safetensors"


def lane_key(section: str, fragment_id: int, lane_id: int) -> str:
    """Name of one lane in a rank's file."""
    return f"{section}/{fragment_id}/{lane_id}"


def written_steps(directory: Path, island: str) -> list[int]:
    """Return the inner steps of an island's checkpoints that were completed, ascending.

    Reads none of them: what was damaged since then is among them.
    """
    paths = _steps(directory, island)
    return [step for step, path in paths.items() if (path / MANIFEST).exists()]


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint in `path`; its files are not looked at.

    Raises:
        ConfigError: If there is none, or it is damaged.
    """
    try:
        return parse_manifest(_manifest_text(path / MANIFEST), str(path / MANIFEST))
    except FileNotFoundError:
        raise ConfigError(f"{path} has no {MANIFEST}: it was not completed") from None
    except OSError as error:
        raise ConfigError(f"{path / MANIFEST} cannot be read: {error.strerror or error}") from error


def _manifest_text(path: Path) -> bytes:
    if (size := _size(path)) <= MOST_MANIFEST_BYTES:
        return path.read_bytes()
    raise ConfigError(f"{path} is damaged: it has {size} bytes; {MOST_MANIFEST_BYTES} are allowed")


def _size(path: Path) -> int:
    """Return the bytes of what may be anything: a pipe has no end, nor has a device."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is damaged: it is no regular file")
    return found.st_size


def parse_manifest(text: bytes, where: str) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says; `where` is its place, in words.

    It names plain files of one directory: the plan, and those of all ranks.

    Raises:
        ConfigError: If it is damaged.
    """
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise ConfigError(f"{where} is of another version of diloco")
        files = {
            str(name): {"bytes": int(expected["bytes"]), "blake3": str(expected["blake3"])}
            for name, expected in dict(manifest["files"]).items()
        }
        numbers = [manifest["inner_step"], *manifest.get("versions", ())]
        numbers += [manifest.get(name, 0) for name in ("cut", "timeline", "optimizer_step")]
        if not isinstance(manifest.get("text", {}), dict):
            raise ValueError("its text is no object")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"not all of its steps and versions are whole numbers: {numbers}")
        parts = str(manifest["parts"])
        for name in (parts, *files):
            if not _PLAIN.fullmatch(name):
                raise ValueError(f"it names {name!r}, which is no plain name")
        num_ranks = len(files) - 1
        expected_names = {PLAN, *(rank_file(rank, num_ranks) for rank in range(num_ranks))}
        if not num_ranks or files.keys() != expected_names:
            raise ValueError("it does not name the plan and the files of all ranks")
        return {**manifest, "files": files, "parts": parts}
    except KeyError as error:
        raise ConfigError(f"{where} is damaged: it has no {error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where} is damaged: {error}") from error


def timeline_of(text: bytes) -> int:
    """Return in which timeline a checkpoint was written, by a manifest of any version; -1: none."""
    try:
        return int(json.loads(text)["timeline"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1


def verify_sizes(path: Path) -> None:
    """Hold the names and sizes of a checkpoint's files against its manifest; reads only that.

    Raises:
        ConfigError: Saying what is missing or differs.
    """
    manifest = read_manifest(path)
    for name, expected in sorted(manifest["files"].items()):
        _verify_size(path / manifest["parts"] / name, expected["bytes"])


def verify(
    path: Path,
    *,
    share: tuple[int, int] = (0, 1),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Hold the files of a checkpoint against its manifest, and return the manifest.

    Args:
        path: From `step_directory`.
        share: (i, n): of all files, look only at the i-th, (i+n)-th and so on: n callers together
            verify it.
        on_progress: Told (bytes read, bytes to read) on the way.

    Raises:
        ConfigError: Saying what is missing or differs.
    """
    manifest = read_manifest(path)
    files = sorted(manifest["files"].items())[share[0] :: share[1]]
    done, total = 0, sum(expected["bytes"] for _, expected in files)
    for name, expected in files:
        file_path, hasher = path / manifest["parts"] / name, blake3()
        _verify_size(file_path, expected["bytes"])
        try:
            with file_path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    hasher.update(piece)
                    done += len(piece)
                    on_progress(done, total)
        except OSError as error:
            raise ConfigError(f"{file_path} cannot be read: {error.strerror or error}") from error
        if hasher.hexdigest() != expected["blake3"]:
            raise ConfigError(f"{file_path} is damaged: its digest is not that of the manifest")
    return manifest


def _verify_size(path: Path, expected_bytes: int) -> None:
    try:
        size = _size(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if size != expected_bytes:
        raise ConfigError(f"{path} has {size} bytes, not {expected_bytes}")


def valid_steps(directory: Path, island: str) -> list[int]:
    """Return the inner steps of an island's whole checkpoints, ascending; reads every byte of them.

    Torn and damaged ones are skipped, with a warning that says what is wrong.
    """
    steps = []
    for step, path in _steps(directory, island).items():
        try:
            verify(path)
        except ConfigError as error:
            logger.warning("checkpoint skipped, island=%s step=%d: %s", island, step, error)
        else:
            steps.append(step)
    return steps


class Checkpoint:
    """A whole checkpoint of an island; `open` verifies it.

    Attributes:
        step: Completed inner steps, or the cut's number.
        manifest: What `manifest.json` says.
        plan: Fragments and lanes of the run that wrote it.
    """

    def __init__(self, parts: Path, step: int, manifest: Mapping[str, Any], plan: Plan) -> None:
        """Assign only."""
        self.step = step
        self.manifest = manifest
        self.plan = plan
        self._parts = parts
        self._holders: dict[str, Any] = {}  # name of a tensor -> its open file, of no public type

    @classmethod
    def open(
        cls,
        directory: Path,
        island: str,
        step: int,
        *,
        share: tuple[int, int] = (0, 1),
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Checkpoint:
        """Verify a checkpoint and open it.

        Args:
            directory: Of this site's checkpoints.
            island: Whose.
            step: Completed inner steps.
            share: As for `verify`; callers that share must learn of each other's failures before
                they go on.
            on_progress: As for `verify`.

        Raises:
            ConfigError: If it is not there or, as far as was looked at, not whole.
        """
        path = found_directory(directory, island, step)
        try:
            manifest = verify(path, share=share, on_progress=on_progress)
            parts = path / manifest["parts"]
            plan = _read_plan(parts / PLAN)
        except ConfigError as error:
            of = "cut" if path.name.startswith("cut") else "inner step"
            raise ConfigError(
                f"island {island} cannot load its checkpoint of {of} {step}: {error}"
            ) from error
        return cls(parts, step, manifest, plan)

    @property
    def inner_step(self) -> int:
        """Completed inner steps."""
        return int(self.manifest["inner_step"])

    def check_owner(self, run: str, island: str) -> None:
        """Refuse what was written for another run, island or step, and copied here.

        Its files are whole, but its text would be drawn twice, or its moments be another's.

        Raises:
            ConfigError: Saying whose it is.
        """
        said = self.manifest
        step = said.get("cut") or self.inner_step
        found = said.get("run", run), said.get("island", island), step
        if found != (run, island, self.step):
            raise ConfigError(
                f"{self._parts.parent} is not the checkpoint of {self.step} of island {island} in "
                f"run {run!r}: it was written as that of {step} of island {found[1]} in run "
                f"{found[0]!r}. Bring its own back from a copy or mirror, or resume another: "
                f"diloco coordinator RUN.toml --resume --at STEP"
            )

    def read(self, section: str, name: str) -> Tensor:
        """Return a parameter, moment or published value by canonical name.

        Args:
            section: "model", "exp_avg", "exp_avg_sq", or "anchor" for what was published.
            name: Name of a parameter of the plan.

        Returns:
            The unsharded tensor, float32, CPU, freshly allocated.

        Raises:
            KeyError: If the plan has no such parameter.
        """
        import torch

        shape = {spec.name: spec.shape for spec in self.plan.tensors}[name]
        values = torch.empty(shape)
        flat = values.view(-1)
        prefix = OUTER if section == "anchor" else ""
        for fragment in self.plan.fragments:
            for entry in (entry for entry in fragment.entries if entry.name == name):
                for lane in fragment.lanes:
                    first = max(entry.offset, lane.start)
                    last = min(entry.offset + entry.end - entry.start, lane.end)
                    if first >= last:
                        continue
                    key = prefix + lane_key(section, fragment.fragment_id, lane.lane_id)
                    part = self._file_of(key).get_slice(key)[first - lane.start : last - lane.start]
                    at = entry.start - entry.offset
                    flat[first + at : last + at] = part
        return values

    def lane(self, section: str, fragment_id: int, lane_id: int) -> Tensor:
        """Return one lane of a parameter or moment: float32 [lane.numel], CPU."""
        key = lane_key(section, fragment_id, lane_id)
        values: Tensor = self._file_of(key).get_tensor(key)
        return values

    def outer_state(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the outer loop's state under the given names, those that are there."""
        self._index()
        return {
            name: self._holders[OUTER + name].get_tensor(OUTER + name)
            for name in names
            if OUTER + name in self._holders
        }

    def _file_of(self, key: str) -> Any:
        self._index()
        return self._holders[key]

    def _index(self) -> None:
        """Open all files, once, and learn which holds what."""
        if self._holders:
            return
        from safetensors import safe_open

        for name in sorted(self.manifest["files"]):
            if name.endswith(".safetensors"):
                file: Any = safe_open(self._parts / name, framework="pt")
                self._holders |= dict.fromkeys(file.keys(), file)


def remove_old(
    directory: Path,
    island: str,
    *,
    newest: int,
    needed: Collection[int],
    num_unsure: int,
    in_use: Collection[int] = (),
) -> list[int]:
    """Remove what no resume can need, after the checkpoint of inner step `newest` was written.

    A run is resumed from a checkpoint that every island has. Those that are known to be complete
    are `needed`; a newer one may become so, since islands are not equally far.

    Args:
        directory: Of this site's checkpoints.
        island: Whose.
        newest: Inner step just written; later ones, of another history, are left alone.
        needed: Inner steps to keep in any case. What was abandoned by a resume from before the last
            of them is removed.
        in_use: Inner steps that somebody reads just now: they stay, and say nothing of the others.
        num_unsure: Newest checkpoints, after the last needed one, to keep as well; at least 1.

    Returns:
        Inner steps of the whole checkpoints that are left, up to `newest`, ascending.
    """
    last_needed = max(needed, default=-1)
    whole = [step for step in written_steps(directory, island) if step <= newest]
    unsure = [step for step in whole if step > last_needed]
    kept = [step for step in whole if step in {*needed, *unsure[-num_unsure:], *in_use}]
    for step, path in _steps(directory, island).items():
        if step > newest or step in kept:
            continue
        (path / MANIFEST).unlink(missing_ok=True)  # first: what is half removed must not be whole
        sync_directory(path)
        shutil.rmtree(path)
    for aside, resumed_step in _abandoned(directory / island):
        if last_needed > resumed_step:
            shutil.rmtree(aside)
    return kept


def abandon_later(directory: Path, island: str, *, step: int, timeline: int) -> None:
    """Move aside what earlier timelines wrote after inner step `step`: it was abandoned.

    What an earlier resume had moved aside is removed.

    Args:
        directory: Of this site's checkpoints.
        island: Whose.
        step: Inner step that the run was resumed at.
        timeline: Of the resumed run; its own checkpoints stay, should it be resumed once more.
    """
    aside = directory / island / f"abandoned-before-timeline-{timeline:04d}-after-{step:012d}"
    for earlier, _ in _abandoned(directory / island):
        if earlier != aside:
            shutil.rmtree(earlier)
    for later, path in _steps(directory, island).items():
        if later <= step:
            continue
        with contextlib.suppress(OSError, ConfigError):  # what is not whole goes, too
            if timeline_of(_manifest_text(path / MANIFEST)) >= timeline:
                continue
        aside.mkdir(exist_ok=True)
        if (aside / path.name).exists():
            shutil.rmtree(aside / path.name)
        path.rename(aside / path.name)
        logger.info("abandoned, island=%s step=%d: moved to %s", island, later, aside)
    if (directory / island).is_dir():
        sync_directory(directory / island)


def _read_plan(path: Path) -> Plan:
    """Read a plan that may be in the share of another caller, and damaged."""
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PlanMismatch) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _steps(directory: Path, island: str) -> dict[int, Path]:
    """Inner steps or cuts that have a directory, whole or not, ascending."""
    paths = [path for path in (directory / island).glob("*-*") if path.is_dir()]
    found = {step: path for path in paths if (step := step_of(path.name)) is not None}
    return dict(sorted(found.items()))


def _abandoned(directory: Path) -> list[tuple[Path, int]]:
    """What resumes moved aside, and the inner step that each of them went back to."""
    found = ((path, _ABANDONED.fullmatch(path.name)) for path in directory.glob("abandoned-*"))
    return [(path, int(match[1])) for path, match in found if match]
