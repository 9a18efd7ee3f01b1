"""Islands of different shape in one run, real processes and real gRPC, against islands of one rank.

Everything is float32 on two rounds with H = 4, so differences come from the layout of the inner
training alone: parameters may differ by 1e-4 and losses by 5e-6 (layout parity). An island's ending
digests are hashes of its own parameters, read back from all its ranks.
"""

from pathlib import Path

import pytest
import torch

from tests.run_files import FinishedRun, run_to_end, write_run

SHAPES = {"fsdp": "dp_shard = 2", "one": "", "tp": "tp = 2"}
SINGLE = dict.fromkeys(SHAPES, "")
#: Makes 4 or 5 lanes of every fragment.
FFN_DIM = 768

pytestmark = pytest.mark.timeout(300)


def assert_both_ranks_carry_lanes(run: FinishedRun) -> None:
    assert all(len(fragment.lanes) >= 3 for fragment in run.plan.fragments)
    for island in ("fsdp", "tp"):
        sent = run.of_kind(island, "fragment_sent")
        carried = {(e["fragment_id"], e["island_rank"]) for e in sent if e["lanes_norm"] > 0}
        assert carried == {(f.fragment_id, r) for f in run.plan.fragments for r in (0, 1)}


def held_by_every_island(run: FinishedRun) -> torch.Tensor:
    """Parameters of each island of the run: their digests are those of the records."""
    assert run.ending_digests() == {tuple(r.digest.hex() for r in run.last_records())}
    return torch.cat([lane.published for record in run.last_records() for lane in record.lanes])


def evaluated(run: FinishedRun, island: str, parameters: str) -> float:
    """Held-out loss at the end, of an island's own parameters or of the published ones."""
    events = run.of_kind(island, "evaluated")
    (loss,) = {e["nats_per_byte"] for e in events if e["parameters"] == parameters}
    return float(loss)


def test_shapes_together_equal_islands_of_one_rank(tmp_path: Path) -> None:
    mixed = run_to_end(write_run(tmp_path / "mixed", SHAPES, codec="float32", ffn_dim=FFN_DIM))
    single = run_to_end(write_run(tmp_path / "single", SINGLE, codec="float32", ffn_dim=FFN_DIM))

    assert_both_ranks_carry_lanes(mixed)
    torch.testing.assert_close(
        held_by_every_island(mixed), held_by_every_island(single), rtol=0, atol=1e-4
    )
    for island in SHAPES:
        differences = [
            abs(a - b) for a, b in zip(mixed.losses(island), single.losses(island), strict=True)
        ]
        assert len(differences) == 8
        assert max(differences) <= 5e-6, f"{island}: {differences}"
        for parameters in ("local", "published"):
            one, other = evaluated(mixed, island, parameters), evaluated(single, island, parameters)
            assert one == pytest.approx(other, rel=0, abs=5e-6)
    versions = {island: mixed.of_kind(island, "fragment_merged") for island in SHAPES}
    assert {event["version"] for event in versions["tp"]} >= {1, 2}, "two rounds and the flush"


def test_shapes_together_with_int4_hold_the_same_bytes(tmp_path: Path) -> None:
    run = run_to_end(write_run(tmp_path, SHAPES, codec="int4", tied=True, ffn_dim=FFN_DIM))

    assert_both_ranks_carry_lanes(run)
    assert run.ending_digests() == {tuple(r.digest.hex() for r in run.last_records())}
