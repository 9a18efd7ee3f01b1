"""Islands that may take part in the next rounds of a fragment, and members of the present attempt.

Source: PROTOCOL.md, "Members", "Contributions" and "Fencing".
"""

from __future__ import annotations

from collections.abc import Collection, Set

from diloco.protocol.rounds.terms import Contribution, LaneArrival, Roster, RoundRules


class Participants:
    """Live islands, the newest start of each, and the starts that the coordinator has fenced."""

    def __init__(self, members: tuple[str, ...]) -> None:
        """Know of no start yet; `members` are the islands of the configuration."""
        self.live = members
        self.incarnations: dict[str, int] = {}
        self._configured = members
        self._roster = Roster(members)
        self._least: dict[str, int] = {}
        self._eligible: tuple[str, ...] | None = None  # as last asked for: each poll asks twice

    def newest(self, island: str) -> int:
        """Return the incarnation below which starts of an island are fenced."""
        return max(self.incarnations.get(island, 0), self._least.get(island, 0))

    def is_fenced(self, island: str, incarnation: int) -> bool:
        """Whether a newer start of `island` is known, or the coordinator asks for one."""
        return incarnation < self.newest(island)

    @property
    def fenced(self) -> set[str]:
        """Islands of which the coordinator waits for a newer start than any that is known."""
        return {i for i in self._least if self.is_fenced(i, self.incarnations.get(i, 0))}

    def granted(self, island: str, incarnation: int) -> None:
        """Know of a newer start of an island."""
        self.incarnations[island] = incarnation
        self._eligible = None

    def set_roster(self, roster: Roster, *, has_fixed_members: bool) -> None:
        """Set the live islands, and the starts that count no more."""
        self._roster, self._eligible = roster, None
        for island, least in roster.fenced.items():
            self._least[island] = max(least, self._least.get(island, 0))
        if has_fixed_members:
            self.live = tuple(name for name in self._configured if name in roster.live)
        else:
            self.live = tuple(sorted(set(roster.live)))

    def eligible(self) -> tuple[str, ...]:
        """Return the live islands that are here with a start that counts."""
        if self._eligible is None:
            starts = self.incarnations
            self._eligible = tuple(
                island
                for island in self.live
                if island in starts and not self.is_fenced(island, starts[island])
            )
        return self._eligible

    def can_open(self, rules: RoundRules) -> bool:
        """Whether enough islands are here for a round."""
        roster, eligible = self._roster, self.eligible()
        if roster.is_paused or roster.is_gathering:
            return False
        if rules.min_members is None:
            return bool(eligible) and eligible == rules.members
        least = roster.min_islands or rules.min_members
        return len(eligible) >= max(least, rules.min_contributions or 1, 1)


class Attempt:
    """Members, contributions, and the members that left; empty while no attempt is under way.

    `left` says of members that are out of it why; `takes_flush` whether it takes flushes only.
    """

    def __init__(self, num_lanes: int) -> None:
        """Have no members; a contribution has `num_lanes` lanes."""
        self.members: tuple[str, ...] = ()
        self.contributions: dict[str, Contribution] = {}
        self.left: dict[str, str] = {}
        self.takes_flush = False
        self._num_lanes = num_lanes
        #: Island -> what is here of it and not verified yet, by identity: of a lane that came twice
        #: each is on its own.
        self._arrived: dict[str, dict[int, LaneArrival]] = {}

    def clear(self) -> None:
        """Have no members again."""
        self.members, self.contributions, self.left, self._arrived = (), {}, {}, {}

    def arrived(self, lane: LaneArrival) -> None:
        """Note that all of a lane is here, and is being verified."""
        self._arrived.setdefault(lane.island, {})[id(lane)] = lane

    def verified(self, lane: LaneArrival) -> bool:
        """Note that a lane is being verified no more; returns whether it was."""
        lanes = self._arrived.get(lane.island, {})
        was_here = lanes.pop(id(lane), None) is not None
        if not lanes:  # of a thousand islands few have anything being verified
            self._arrived.pop(lane.island, None)
        return was_here

    def forget_arrived(self, island: str) -> bool:
        """Forget what an island has being verified; returns if it had any."""
        return bool(self._arrived.pop(island, None))

    def drop_incomplete(self) -> None:
        """Forget the contributions of which lanes are missing, and what is being verified."""
        self.contributions = {c.island: c for c in self.complete}
        self._arrived = {}

    def is_complete(self, contribution: Contribution) -> bool:
        """Whether every lane of a contribution was verified."""
        return len(contribution.lanes) == self._num_lanes

    @property
    def complete(self) -> list[Contribution]:
        """Contributions of which every lane was verified."""
        return [c for c in self.contributions.values() if self.is_complete(c)]

    def has_whole(self, island: str, incarnation: int) -> bool:
        """Whether it has all of the contribution of a start."""
        held = self.contributions.get(island)
        return held is not None and held.incarnation == incarnation and self.is_complete(held)

    def awaited(self, live: Collection[str]) -> list[str]:
        """Members whose contributions are there or may come: not those who left or lapsed."""
        live = set(live)
        return [m for m in self.members if m not in self.left and (m in live or self._is_here(m))]

    def absent(self) -> tuple[str, ...]:
        """Members that have neither left nor contributed."""
        done = {c.island for c in self.complete}
        return tuple(m for m in self.members if m not in done and m not in self.left)

    @property
    def is_held_up(self) -> bool:
        """Whether a contribution that came whole, and in time, is still being verified."""
        return any(
            self._is_here(island)
            and any(lane.lane_id not in self._verified(island) for lane in lanes.values())
            for island, lanes in self._arrived.items()
        )

    def _is_here(self, island: str) -> bool:
        """Whether every lane of the contribution of an island is here, verified or not yet."""
        verified, lanes = self._verified(island), self._arrived.get(island, {})
        if len(verified) + len(lanes) < self._num_lanes:  # mostly, and asked after each lane
            return False
        return len(verified | {lane.lane_id for lane in lanes.values()}) == self._num_lanes

    def _verified(self, island: str) -> Set[int]:
        held = self.contributions.get(island)
        return held.lanes.keys() if held is not None else set()
