"""The file of a link profile: a named path in both directions, seen from the side that calls.

Profiles are TOML files named ``<name>.toml``, the name stating the round trip:

    source = "where the figures come from"
    [up]
    bandwidth = "5Mbit/s"
    delay = "30ms"                # one way; jitter = "2ms" and loss = 0.001 may follow
    [down]
    ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

from diloco.config.classes import Section
from diloco.config.fields import Duration, Rate, Time
from diloco.config.load import load_section
from diloco.errors import ConfigError
from diloco.transport.shaping.link import Link, LinkProfile


class DirectionConfig(Section):
    """One direction of a link."""

    bandwidth: Rate = Field(description='Rate of IP packets, such as "100Mbit/s"')
    delay: Time = Field(description='One way, half of the round trip, such as "30ms"')
    jitter: Time = Field(
        default=Duration("0s"), description="A packet takes up to this much longer, order kept"
    )
    loss: float = Field(default=0.0, ge=0, lt=1, description="Share of the packets that are lost")

    @property
    def link(self) -> Link:
        """The direction in base units."""
        return Link(self.bandwidth.bps, self.delay.seconds, self.jitter.seconds, self.loss)


class LinkConfig(Section):
    """A link in both directions."""

    source: str = Field(min_length=1, description="Where the figures come from")
    up: DirectionConfig = Field(description="Away from the island")
    down: DirectionConfig = Field(description="Towards the island")

    def profile(self, name: str) -> LinkProfile:
        """Give the link in base units, under a name."""
        return LinkProfile(name, self.up.link, self.down.link, self.source)


def find_profile(name: str, directory: Path | None = None) -> LinkProfile:
    """Load the profile called `name`.

    Args:
        name: Such as ``thin-5M-60ms``.
        directory: Where the profiles are; None looks in ``configs/links`` of the current
            directory, then where they are installed.

    Raises:
        ConfigError: If there is none of that name, with those found and where; or it cannot be
            read.
    """
    roots = (Path.cwd(), Path(__file__).resolve().parents[1])
    directories = [directory] if directory else [root / "configs" / "links" for root in roots]
    paths = {path.stem: path for place in reversed(directories) for path in place.glob("*.toml")}
    if name not in paths:
        places = " or ".join(str(place) for place in dict.fromkeys(directories))
        raise ConfigError(f"no link profile {name!r} in {places}; there are {sorted(paths)}")
    return load_section(paths[name], LinkConfig).profile(name)


def _check_name(value: str) -> str:
    try:
        if value:
            find_profile(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


#: Name of a profile that there is; empty: none.
ProfileName: TypeAlias = Annotated[str, AfterValidator(_check_name)]
