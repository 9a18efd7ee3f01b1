"""Saves a workspace of W&B that compares the islands of a run: losses, pace, exchange, memory.

    pip install wandb-workspaces
    python configs/monitoring/wandb_workspace.py ENTITY PROJECT RUN

RUN is `run.name`: the group that its islands are in. Prints where the workspace is.
"""

from __future__ import annotations

import sys

import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as workspaces
from wandb_workspaces.expr import And

TOKENS, STEPS = "n_tokens_seen", "inner_step"
#: Section -> panels: title, axis, scalars; `diloco/telemetry/metrics.py` has all of these.
SECTIONS = {
    "Does it learn": [
        ("training loss by tokens", TOKENS, ["loss_metrics/global_avg_loss"]),
        ("held-out loss by tokens", TOKENS, ["validation_metrics/published_nats_per_byte"]),
        ("gradient norm", STEPS, ["grad_norm"]),
        ("learning rate", STEPS, ["lr"]),
    ],
    "Is it fast": [
        ("tokens a second", STEPS, ["throughput(tps)"]),
        ("seconds an inner step", STEPS, ["time_metrics/inner_step(s)"]),
        ("MFU, %", STEPS, ["mfu(%)"]),
        ("seconds blocked by the outer loop", STEPS, ["time_metrics/blocked(s)"]),
    ],
    "Do islands exchange": [
        ("islands in a version", STEPS, ["num_peers"]),
        ("staleness, inner steps", STEPS, ["outer/staleness(steps)"]),
        ("bytes sent and received", STEPS, ["outer/uplink_bytes", "outer/downlink_bytes"]),
        ("contributions in no version", STEPS, ["outer/not_included", "events/declined"]),
    ],
    "What it takes": [
        ("memory of the device, GiB", STEPS, ["memory/max_active(GiB)"]),
        ("resident memory, GiB", STEPS, ["memory/resident(GiB)"]),
        ("checkpoint, seconds blocked", STEPS, ["checkpoint/blocked(s)"]),
    ],
}


def workspace(entity: str, project: str, run: str) -> workspaces.Workspace:
    """Make the workspace; nothing is saved yet."""
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"diloco: islands of {run}",
        sections=[
            workspaces.Section(
                name=name,
                is_open=True,
                panels=[
                    panels.LinePlot(title=title, x=axis, y=scalars)
                    for title, axis, scalars in shown
                ],
            )
            for name, shown in SECTIONS.items()
        ],
        runset_settings=workspaces.RunsetSettings(
            filters=And(workspaces.Metric("Group") == run),
            order=[workspaces.Ordering(workspaces.Metric("displayName"), ascending=True)],
        ),
    )


def main() -> None:
    """Save the workspace that the command line names."""
    try:
        entity, project, run = sys.argv[1:]
    except ValueError:
        sys.exit(__doc__)
    sys.stdout.write(f"{workspace(entity, project, run).save().url}\n")


if __name__ == "__main__":
    main()
