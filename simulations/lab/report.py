"""What a laboratory shows: loss against tokens, time and bytes; points side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.report.rows import Column, machine
from diloco.report.statistics import Spread
from diloco.simulations.lab.run import Result

#: Of the readings of one run.
READING_COLUMNS = (
    Column("tokens", "tokens", ",d"),
    Column("virtual_s", "virtual s", ",.1f"),
    Column("megabytes", "MB moved", ",.2f"),
    Column("train_loss", "train, nats", ".4f"),
    Column("loss", "held out, nats/byte", ".4f"),
)

#: Keys of a summary that a run has only if it came to its end.
_FIGURES = (
    "loss", "deviation", "virtual_s", "megabytes", "busy_percent", "failures", "dropped_percent",
)  # fmt: skip


def reading_rows(result: Result) -> list[dict[str, Any]]:
    """Give the readings of a point as rows."""
    return [
        {**reading, "megabytes": (reading["bytes_up"] + reading["bytes_down"]) / 1e6}
        for reading in result["readings"]
    ]


def point_columns(results: Sequence[Result]) -> list[Column]:
    """Give the columns of `point_rows`: a column a swept key, then figures."""
    keys = list(results[0]["swept"])
    columns = [Column(key, short_key(key, keys)) for key in keys]
    return [
        *columns,
        Column("seeds", "seeds", "d"),
        Column("loss", "nats/byte", ".4f"),
        Column("deviation", "+-", ".4f"),
        Column("virtual_s", "virtual s", ",.0f"),
        Column("megabytes", "MB moved", ",.1f"),
        Column("busy_percent", "busy, %", ".1f"),
        Column("failures", "failures", ".1f"),
        Column("dropped_percent", "dropped, %", ".1f"),
        Column("ended", "ended by"),
    ]


def short_key(key: str, keys: Sequence[str]) -> str:
    """Give the last part of a key that no other one of `keys` ends with."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in keys) > 1 else last


def point_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Give a row a point of the sweep: means over its seeds, those that ended early left out."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(repr(result["swept"]), []).append(result)
    return [summary(group) | dict(group[0]["swept"]) for group in groups.values()]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Take means over seeds; a run that ended early has no figures, and says why."""
    whole = [result for result in results if not result["ended"]]
    ended = "; ".join(sorted({r["ended"].partition(":")[0] for r in results if r["ended"]}))
    if not whole:
        return {**dict.fromkeys(_FIGURES), "seeds": 0, "losses": {}, "ended": ended}
    loss = Spread.of([result["loss"] for result in whole])

    def mean(of: Any) -> float:
        return Spread.of([of(result) for result in whole]).mean

    return {
        "seeds": len(whole),
        "loss": loss.mean,
        "deviation": loss.deviation,
        "virtual_s": mean(lambda result: result["virtual_s"]),
        "megabytes": mean(lambda result: (result["bytes_up"] + result["bytes_down"]) / 1e6),
        "busy_percent": 100 * mean(lambda result: min(result["busy"].values())),
        "failures": mean(lambda result: result["failures"] + result["syncer_failures"]),
        "dropped_percent": 100 * mean(lambda result: result["dropped_tokens"] / result["tokens"]),
        "losses": {str(result["seed"]): result["loss"] for result in whole},
        "ended": ended,
    }


def as_json(
    lab: Mapping[str, Any], results: Sequence[Result], num_cached: int, wall_s: float
) -> dict[str, Any]:
    """Give everything as JSON values."""
    return {
        "lab": dict(lab),
        "machine": machine(),
        "points": [dict(result) for result in results],
        "rows": point_rows(results),
        "cached": num_cached,
        "wall_s": wall_s,
    }
