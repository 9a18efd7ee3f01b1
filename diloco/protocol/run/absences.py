"""Says which islands do not take part in a run, and what comes of it: pure.

The coordinator says it to its operator and, in the answers to their reports, to the other islands.

Source: PROTOCOL.md, "Leases and clocks".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diloco.errors import QuorumLost
from diloco.protocol.run.leases import Lease
from diloco.protocol.run.members import Member
from diloco.protocol.run.membership import Membership

#: Seconds without a report, of which one comes a second, after which an island is said to be away;
#: half a lease where that is shorter.
AWAY_S = 10.0
#: Islands of which a sentence each is said; of more, one of all others.
MOST_NAMED = 8
#: Said of those; it does not change with their number, or it would be news again and again.
OTHERS = "more islands are away: diloco status HOST:PORT lists them"
#: Said where islands come and go, and all have gone.
NOBODY = (
    "no island is at work: all that joined have left, and the run waits for the next. Start one, "
    "or end the run: diloco stop HOST:PORT"
)
#: Said once nobody is away any more.
ALL_BACK = "no island is away any more"


def away_texts(
    membership: Membership, silent_s: Callable[[str], float], lease_s: float
) -> list[str]:
    """Say a sentence about each island that is away; the same one for as long as it holds.

    All islands hear it: of a thousand that lose the coordinator at once, `MOST_NAMED` are named.

    Args:
        membership: Of the run.
        silent_s: Gives the seconds since the last word of an island.
        lease_s: Seconds after which an island that is silent loses its lease.
    """
    longest_s = min(AWAY_S, lease_s / 2)
    texts = []
    for island, member in membership.members.items():
        if member.incarnation == 0 or member.timeline != membership.timeline:
            continue
        if membership.members.lease_of(island) is Lease.KICKED:
            texts.append(
                f"island {island} is out of the run, and the others go on without it: "
                f"{member.reason}"
            )
        elif (why := _why_away(member, silent_s(island) > longest_s, longest_s)) is not None:
            texts.append(
                f"island {island} is away: {why}. {_outcome(membership, lease_s)}. To bring it "
                f"back start it again, as it was started"
            )
        if len(texts) > MOST_NAMED:
            texts[MOST_NAMED:] = [OTHERS]
            break
    members = membership.members
    is_empty = membership.has_been_joined and not (members.holders or members.away)
    return [NOBODY] if membership.rules.is_elastic and is_empty else texts


def _why_away(member: Member, is_silent: bool, longest_s: float) -> str | None:
    if member.exit_code:
        return f"it failed with exit code {member.exit_code}"
    if member.exit_code is None and is_silent:
        return f"no report for more than {longest_s:g} s"
    return None


def _outcome(membership: Membership, lease_s: float) -> str:
    """Say what the others do without it."""
    rules = membership.rules
    if rules.is_elastic:
        return "Rounds go on without it, and no island waits for it"
    since = f"{lease_s:g} s after its last report (coordinator.lease)"
    match rules.on_member_lost:
        case "wait":
            then = "for as long as it takes (outer.on_member_lost = wait)"
        case "shrink":
            then = f"until {since}, then they go on without it (outer.on_member_lost = shrink)"
        case "stop":
            then = (
                f"until {since}, then the run ends with exit code {QuorumLost.exit_code} "
                f"(outer.on_member_lost = stop)"
            )
    return f"Every round waits for it {then}; three attempts in a row without it end the run sooner"


def news_of_away(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Give what has to be said where other islands are away than before."""
    if before and not now:
        return [ALL_BACK]
    return [text for text in now if text not in before]
