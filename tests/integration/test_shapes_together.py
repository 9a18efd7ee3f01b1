"""Islands of different shape in one run, real processes and real gRPC, against islands of one rank.

Everything is float32 on two rounds with H = 4, so differences come from the layout of the inner
training alone: parameters may differ by 1e-4 and losses by 5e-6 (layout parity). An island's ending
digests are hashes of its own parameters, read back from all its ranks. With int4, and besides an
island of one rank, the shapes train in test_export_of_a_run.py; in the default suite that run and
tests/trainer/test_layouts.py hold what is held here.
"""

from pathlib import Path

import pytest
import torch

from tests.run_files import (
    FFN_DIM_OF_LANES,
    FinishedRun,
    assert_all_ranks_carry_lanes,
    run_to_end,
    write_run,
)

SHAPES = {"fsdp": "dp_shard = 2", "tp": "tp = 2"}
GRIDS = {"fsdp-tp": "dp_shard = 2, tp = 2", "hsdp": "dp_replicate = 2, dp_shard = 2"}

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def held_by_every_island(run: FinishedRun) -> torch.Tensor:
    """Parameters of each island of the run: their digests are those of the records."""
    assert run.ending_digests() == {tuple(r.digest.hex() for r in run.last_records())}
    return torch.cat([lane.published for record in run.last_records() for lane in record.lanes])


def evaluated(run: FinishedRun, island: str, parameters: str) -> float:
    """Held-out loss at the end, of an island's own parameters or of the published ones."""
    events = run.of_kind(island, "evaluated")
    (loss,) = {e["nats_per_byte"] for e in events if e["parameters"] == parameters}
    return float(loss)


@pytest.mark.parametrize(
    ("shapes", "num_ranks"),
    [(SHAPES, 2), (GRIDS, 4)],
    ids=["2-ranks", "4-ranks"],
)
def test_shapes_together_equal_islands_of_one_rank(
    shapes: dict[str, str], num_ranks: int, tmp_path: Path
) -> None:
    mixed = run_to_end(
        write_run(tmp_path / "mixed", shapes, codec="float32", ffn_dim=FFN_DIM_OF_LANES)
    )
    single = run_to_end(
        write_run(
            tmp_path / "single",
            dict.fromkeys(shapes, ""),
            codec="float32",
            ffn_dim=FFN_DIM_OF_LANES,
        )
    )

    assert_all_ranks_carry_lanes(mixed, shapes, num_ranks)
    torch.testing.assert_close(
        held_by_every_island(mixed), held_by_every_island(single), rtol=0, atol=1e-4
    )
    for island in shapes:
        differences = [
            abs(a - b) for a, b in zip(mixed.losses(island), single.losses(island), strict=True)
        ]
        assert len(differences) == 8
        assert max(differences) <= 5e-6, f"{island}: {differences}"
        for parameters in ("local", "published"):
            one, other = evaluated(mixed, island, parameters), evaluated(single, island, parameters)
            assert one == pytest.approx(other, rel=0, abs=5e-6)
        merged = mixed.of_kind(island, "fragment_merged")
        assert {event["version"] for event in merged} >= {1, 2}, "two rounds and the flush"
