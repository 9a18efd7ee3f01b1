"""A link between two islands that a bench measures on, shaped in the process or emulated."""

from __future__ import annotations

from dataclasses import dataclass

#: The two of them.
ISLANDS = ("east", "west")


@dataclass(frozen=True, slots=True)
class LinkRow:
    """A link between two islands, the same both ways.

    Attributes:
        name: What --rows chooses by.
        bandwidth: Such as "100Mbit/s".
        rtt_ms: Round trip.
        is_judged: Whether figures on it have bars that those on others have not.
        loss: Share of packets that the network loses.
    """

    name: str
    bandwidth: str
    rtt_ms: float
    is_judged: bool = False
    loss: float = 0.0

    @property
    def toml(self) -> str:
        """Write the file of the emulated network: long fat paths need buffers and no idle start."""
        lost = f", loss = {self.loss:g}" if self.loss else ""
        way = f'{{ bandwidth = "{self.bandwidth}", delay = "{self.rtt_ms / 2:g}ms"{lost} }}'
        sites = "".join(f"[islands.{island}]\n" for island in ISLANDS)
        return (
            f'topology = "mesh"\ncoordinator_at = "{ISLANDS[0]}"\nlink = "measured"\n'
            f'[tcp]\ncongestion_control = "cubic"\nmax_buffer = "64MiB"\n'
            f"slow_start_after_idle = false\n"
            f'[links.measured]\nsource = "diloco bench"\n'
            f"up = {way}\ndown = {way}\n{sites}"
        )
