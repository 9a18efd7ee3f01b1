"""Lines about long work: none for what is quick, then one every few seconds."""

from __future__ import annotations

from diloco.launch.process.progress import INTERVAL_S, progress_bar


def test_quick_work_says_nothing_and_long_work_a_line_now_and_then() -> None:
    now_s = 0.0
    lines: list[str] = []
    show = progress_bar("verifying", lines.append, clock=lambda: now_s)

    for quarter in range(1, 5):
        now_s += 0.6 * INTERVAL_S
        show(quarter * 256 * 1024**2, 1024**3)

    assert lines == [
        "verifying [##########----------] 50%, 512 MiB of 1 GiB",
        "verifying [####################] 100%, 1 GiB of 1 GiB",
    ]
    now_s += INTERVAL_S
    show(0, 0)
    assert lines[2] == "verifying [--------------------] 0%, 0 B of 0 B"
