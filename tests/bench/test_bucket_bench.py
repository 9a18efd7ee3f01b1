"""What `diloco bench bucket` makes of the counters of the syncer's line."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.bench.network import bucket


@pytest.mark.parametrize(("kept", "differs"), [(True, False), (False, False), (True, True)])
def test_what_a_syncer_sends_by_bucket_is_judged_by_all_bytes_of_its_line(
    monkeypatch: pytest.MonkeyPatch, kept: bool, differs: bool
) -> None:
    def measured(_: Any, islands: int, payloads: str, rounds: int, __: Any) -> dict[str, Any]:
        a_round = islands * 10**6 if payloads == "direct" else 10**6 + islands * 10**4 * (not kept)
        up = {"bytes": 5 * 10**6 + rounds * a_round, "ack_bytes": rounds * islands * 10**3}
        carried = {"up": up, "down": {"bytes": rounds * islands * 10**6, "ack_bytes": 0}}
        published = [payloads if differs and islands == 16 else "digest"]
        return {"carried": carried, "down": 500_000, "published": published}

    monkeypatch.setattr(bucket, "_measured", measured)

    report = bucket.run(lambda what, done, total: None)

    sent = {(r["payloads"], r["islands"]): r["out_mb"] for r in report.rows}
    assert sent["direct", 2] == pytest.approx(2) and sent["direct", 16] == pytest.approx(16)
    assert [row["ack_mb"] for row in report.rows] == pytest.approx([0.002, 0.016] * 2)
    ratio, differing = report.requirements
    assert ratio.figure == pytest.approx(1.0 if kept else 1.16 / 1.02)
    assert (ratio.is_met, differing.is_met) == (kept, not differs)
