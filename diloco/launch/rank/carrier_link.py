"""A carrier's part of the link of its island.

Ranks are processes and cannot share one `LinkState`, so the parts are fixed from the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from diloco.transport.shaping.link import LinkProfile


def carrier_link(profile: LinkProfile, carriers: Iterable[int]) -> LinkProfile:
    """Give each carrier an equal, fixed part of the island's bandwidth; the delay is everybody's.

    A carrier whose siblings are silent does not get their part: somewhat slower than the real link,
    never faster.

    Args:
        profile: The island's link.
        carriers: Carrier of each lane of the plan, at least one.
    """
    num_carriers = len(set(carriers))
    up, down = (
        replace(link, bandwidth_bps=link.bandwidth_bps / num_carriers)
        for link in (profile.up, profile.down)
    )
    return replace(profile, up=up, down=down)
