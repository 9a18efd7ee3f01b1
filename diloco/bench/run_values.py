"""The runs of benches: what they have in common of a run file, and two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: 9,933,696 and 49,957,632 parameters.
MODEL_10M = {"dim": 384, "num_layers": 6, "num_heads": 6, "num_kv_heads": 3, "ffn_dim": 1024}
MODEL_50M = {"dim": 768, "num_layers": 8, "num_heads": 12, "num_kv_heads": 6, "ffn_dim": 1920}

#: The only island of a run of one.
ISLAND = "bench"
#: For runs that start no outer loop.
NO_OUTER = {"preset": "classic", "inner_steps_per_round": 1}


def run_values(
    name: str,
    model: Mapping[str, Any],
    outer: Mapping[str, Any],
    *,
    inner_steps: int = 1000,
    sequence_length: int = 32,
    tokens: int = 32,
    islands: Sequence[str] = (ISLAND,),
    island: Mapping[str, Any] | None = None,
    state_dir: str | Path = "unused",
    **sections: Any,
) -> dict[str, Any]:
    """Write a run file's sections, JSON values.

    Args:
        name: Of the run.
        model: Section [model].
        outer: Section [outer].
        inner_steps: Of the run.
        sequence_length: Tokens.
        tokens: Of an island and inner step.
        islands: Their names; all alike.
        island: What each has besides tokens and one rank.
        state_dir: Of the coordinator.
        sections: In place of those written here, or besides them; any values.
    """
    each = {"ranks": 1, "tokens_per_inner_step": tokens, **(island or {})}
    return {
        "run": {"name": name, "seed": 1, "inner_steps": inner_steps},
        "model": dict(model),
        "data": {"sequence_length": sequence_length},
        "inner": {"optimizer": {"lr": 1e-3, "schedule": "constant"}},
        "outer": dict(outer),
        "coordinator": {"state_dir": str(state_dir)},
        "evaluation": {"num_sequences": 1},
        "islands": dict.fromkeys(islands, each),
        **sections,
    }
