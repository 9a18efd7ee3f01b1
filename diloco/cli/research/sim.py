"""`diloco sim`: predict a run before paying for it."""

from __future__ import annotations

import typer

from diloco.cli.research import sim_goodput, sim_utilization, sim_validate
from diloco.cli.terminal.section_flags import section_command

sim = typer.Typer(
    help="Predict utilisation, bandwidth and goodput: the real machines under a virtual clock.",
    no_args_is_help=True,
)
sim.command(cls=section_command(sim_goodput.section))(sim_goodput.goodput)
sim.command()(sim_goodput.check)
_OF_SCENARIO = section_command(sim_utilization.section, {"bits": ("bits_up", "bits_down")})
sim.command(cls=_OF_SCENARIO)(sim_utilization.utilization)
sim.command(cls=_OF_SCENARIO)(sim_utilization.bandwidth)
sim.command()(sim_validate.trace)
sim.command()(sim_validate.validate)
