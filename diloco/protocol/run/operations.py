"""Decides what the command of an operator does to a run: pure.

Each command is checked whole, says what it does and what comes next, and asked again changes
nothing. Its effect comes back as entries, so that it is durable before it is answered.

Source: PROTOCOL.md, "Operators and live policy".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco.bounded_text import bounded_text
from diloco.config.classes import ConfigClass, class_of, field_at, policy_json
from diloco.config.load import with_setting
from diloco.config.schema import Config
from diloco.errors import ConfigError, Fenced, RunHalted
from diloco.outer.assignment import deal_fragments
from diloco.outer.fragments import Plan
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.leases import Lease
from diloco.protocol.run.membership import Membership
from diloco.transport.identity import Identity
from diloco.transport.units import format_bytes

#: The syncer asks so often.
_HEARD = "the syncer hears it within 2 s"
#: Keys that count while the run is under way, and from when on.
_AT_SYNCER = f"{_HEARD}, and it counts from each fragment's next opening on, as the records say"
_HERE = "it counts from now on"
LIVE_KEYS: Mapping[str, str] = {
    "outer.optimizer.lr": _AT_SYNCER,
    "outer.optimizer.momentum": _AT_SYNCER,
    "outer.optimizer.momentum_ramp_rounds": _AT_SYNCER,
    "outer.weighting": _AT_SYNCER,
    "outer.clip_norm_ratio": _AT_SYNCER,
    "outer.guard": _AT_SYNCER,
    "outer.min_contributions": _AT_SYNCER,
    "outer.grace": _AT_SYNCER,
    "outer.grace_share": _AT_SYNCER,
    "outer.grace_cap": _AT_SYNCER,
    "outer.round_deadline": _AT_SYNCER,
    "outer.on_member_lost": _HERE,
    "run.min_islands": _HERE,
    "run.open": _HERE,
    "coordinator.lease": _HERE,
    "checkpoint.every_tokens": _HERE,
}
_RESTART = (
    "To change it, stop the run with a checkpoint (diloco stop HOST:PORT), change the "
    "coordinator's file, and diloco coordinator RUN.toml --resume"
)
_HALTING = (
    f"stopping: every island is told to end at its next report, with exit code "
    f"{RunHalted.exit_code}; then coordinator and syncer end. Nothing published is lost; what was "
    f"not yet merged is. The run goes on where it was: diloco coordinator RUN.toml, then every "
    f"island"
)
_ANOTHER_RUN = (
    "It cannot be set: with another value it is another run. Give that a coordinator.state_dir of "
    "its own and start it, diloco coordinator RUN.toml; run.warm_start takes what diloco export "
    "wrote of this one"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from a command.

    Args:
        message: For the operator: what was done, and what comes next; or why not, and what to do.
        is_done: Whether it was done, or was so already.
        entries: To write before it is answered; none: nothing changes.
        config: In force from now on; None: as it was.
        is_halting: Whether every island is to end at once.
    """

    message: str
    is_done: bool = True
    entries: Entries = ()
    config: Config | None = None
    is_halting: bool = False


def decide(
    command: str, arguments: Mapping[str, str], membership: Membership, config: Config
) -> Decision:
    """Decide what follows from a command of an operator.

    Args:
        command: Its name.
        arguments: By name.
        membership: Of the run.
        config: In force.
    """
    known = _COMMANDS.get(command)
    if known is None:
        return _refused(f"there is no command {bounded_text(command)!r}: {', '.join(_COMMANDS)}")
    decide_it, names = known
    if odd := arguments.keys() - names:
        return _refused(f"{command} takes no {bounded_text(min(odd))!r}: install one version")
    return decide_it(arguments, membership, config)


def _pause(_: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    if membership.members.is_paused:
        return Decision("the run is paused already; it goes on with diloco unpause HOST:PORT")
    if membership.is_stopping:
        return _refused("the run is stopping, and needs rounds to come to its end: let it")
    waiting = (
        "islands train on, and merge when it goes on"
        if membership.rules.is_elastic
        else "islands wait at their next merge"
    )
    return Decision(
        f"paused: {_HEARD}, and opens no round from then on. Those that are open end as ever, and "
        f"{waiting}. It stays so over restarts; it goes on with diloco unpause HOST:PORT",
        entries=membership.members.paused(True),
    )


def _unpause(_: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    if not membership.members.is_paused:
        return Decision("the run is not paused")
    return Decision(f"rounds open again: {_HEARD}", entries=membership.members.paused(False))


def _drain(arguments: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    island = arguments.get("island", "")
    if (refusal := _unknown(island, membership)) is not None:
        return refusal
    if not membership.rules.is_elastic:
        return _refused(
            f"the islands of a scheduled run are fixed, and every round waits for {island}. "
            f"diloco kick HOST:PORT {island} takes it out of all rounds, without what it has not "
            f"sent; diloco stop HOST:PORT stops all of them"
        )
    match membership.members.lease_of(island):
        case Lease.ABSENT:
            return _refused(f"{island} has not joined: there is nothing to drain")
        case Lease.KICKED:
            return _refused(f"nothing to drain: {membership.members.kicked_text(island)}")
        case Lease.LEFT:
            return Decision(f"{island} has left already")
        case Lease.DRAINING:
            return Decision(f"{island} drains already; diloco status HOST:PORT says when it left")
        case Lease.LAPSED:
            what = "is not there and counts as left; should it return, it is told to leave"
        case _:
            what = "sends and merges what is outstanding, and leaves with exit code 0"
    return Decision(
        f"{island} {what}. No round opens with it from now on; another start of it is welcome"
        + _least(membership, island),
        entries=membership.members.drained(island),
    )


def _kick(arguments: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    island = arguments.get("island", "")
    if (refusal := _unknown(island, membership)) is not None:
        return refusal
    is_out = membership.members.lease_of(island) is Lease.KICKED
    if arguments.get("undo"):
        if not is_out:
            return Decision(f"{island} is not out of the run")
        waits = "" if membership.rules.is_elastic else ", and every round waits for it again"
        return Decision(
            f"{island} may join again{waits}: start it with diloco island RUN.toml --island "
            f"{island}. Its starts until now stay fenced",
            entries=membership.members.readmitted(island),
        )
    if is_out:
        return Decision(f"out already: {membership.members.kicked_text(island)}")
    if not membership.rules.is_elastic and membership.members.live == (island,):
        return _refused(f"{island} is the last island: stop the run, diloco stop HOST:PORT")
    words = bounded_text(arguments.get("reason", ""))
    reason = "kicked by an operator" + (f": {words}" if words else "")
    return Decision(
        f"{island} is out: incarnation {membership.members[island].incarnation} and those before "
        f"are fenced, {_HEARD}, what is in open rounds of it does not count, and it ends with exit "
        f"code {Fenced.exit_code} at its next report. Its starts are refused until diloco kick "
        f"HOST:PORT {island} --undo" + _least(membership, island),
        entries=membership.members.kicked([island], reason),
    )


def _revoke(arguments: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    name = arguments.get("identity", "")
    try:
        identity = Identity.from_short(membership.run, name)
        serials = [int(serial, 16) for serial in arguments.get("serials", "").split(",")]
    except ValueError as error:
        return _refused(f"revoke: {bounded_text(str(error))}")
    entries = membership.settings.revoked(name, serials)
    message = f"{len(serials)} certificates of {name} are refused from now on"
    if arguments.get("earlier"):
        return Decision(f"{message}; its newest one is not", entries=entries)
    if identity.name in membership.members:
        arguments = {"island": identity.name, "reason": "its certificates were revoked"}
        kick = _kick(arguments, membership, config)
        message, entries = f"{message}. {kick.message}", entries + kick.entries
    return Decision(message, entries=entries)


def _set(arguments: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    key, value = arguments.get("key", ""), arguments.get("value", "")
    field = field_at(Config, tuple(key.split(".")))
    if field is not None and key not in LIVE_KEYS:  # whatever the value: none would do
        return _refused(_fixed_text(key, class_of(field)))
    try:
        changed = with_setting(config, f"{key}={value}")
    except ConfigError as error:
        return _refused(str(error))
    before, after = (json.loads(policy_json(each))[key] for each in (config, changed))
    if before == after:
        return Decision(f"{key} = {json.dumps(after)} already")
    revision = membership.settings.revision + 1
    return Decision(
        f"{key} = {json.dumps(after)} (before: {json.dumps(before)}), revision {revision}: "
        f"{LIVE_KEYS[key]}. It stays so over restarts, whatever the run file says",
        entries=membership.settings.changed(key, after),
        config=changed,
    )


def _stop(arguments: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    if arguments.get("now"):
        return Decision(_HALTING, is_halting=True)
    if membership.is_stopping:
        return Decision("the run is stopping with a checkpoint already")
    if not (entries := membership.request_stop()):
        if membership.repairs.against_stop:
            return _refused(membership.repairs.against_stop)
        why = "no island could write a checkpoint: not all have joined, or all have left"
        return Decision(f"{why}. {_HALTING}", is_halting=True)
    again = ", and the pause is over, for that needs rounds" if membership.members.is_paused else ""
    how = "" if membership.rules.is_elastic else " goes on to one inner step,"
    return Decision(
        f"stopping: every island{how} writes its checkpoint and leaves"
        f"{again}. diloco coordinator RUN.toml --resume goes on from there",
        entries=entries + membership.members.paused(False),
    )


def _repair(arguments: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    island, number = arguments.get("island", ""), arguments.get("fragment", "")
    damaged = membership.repairs.damaged
    if not number.isdecimal() or int(number) not in damaged:
        names = ", ".join(map(str, sorted(damaged)))
        return _refused(
            f"fragment {bounded_text(number)} is not damaged, as far as its syncer says; damaged: "
            f"{names or 'none'} (diloco status HOST:PORT)"
        )
    if (refusal := _unknown(island, membership)) is not None:
        return refusal
    if membership.members.lease_of(island) is not Lease.ACTIVE:
        at_work = ", ".join(membership.members.holders) or "none"
        return _refused(f"{island} is not at work, and cannot give anything; at work: {at_work}")
    if refusal_text := membership.repairs.refusal(int(number), island):
        return _refused(refusal_text)
    return Decision(
        f"version {damaged[int(number)].version} of fragment {number} is asked of {island}: "
        f"{_HEARD}, and takes it from there if its digest is the one that was published",
        entries=membership.repairs.ask(int(number), island),
    )


def _move(arguments: Mapping[str, str], membership: Membership, config: Config) -> Decision:
    """Move the fragments that are named, or all of a syncer, to one syncer or to all others."""
    assignment, names = membership.assignment, sorted(config.syncers)
    if len(names) < 2:
        return _refused(
            "fragments move between syncers with tables of their own, [syncers.NAME], two at least "
            "(see diloco/coordinator/README.md, Syncers at sites)"
        )
    if not assignment.fragments:
        return _refused("no island has joined: no syncer has fragments yet")
    source, target = arguments.get("from", ""), arguments.get("to", "")
    numbers = [each.strip() for each in arguments.get("fragments", "").split(",") if each.strip()]
    for name in filter(None, (source, target)):
        if name not in names:
            there = ", ".join(names)
            return _refused(
                f"there is no syncer {bounded_text(name)!r} in this run; it has {there}"
            )
    if bool(numbers) == bool(source) or (numbers and not target) or (source and source == target):
        return _refused(
            "name what moves where: --fragments 3,4 --to NAME, or --from NAME (all that it has, "
            "over all others) and perhaps --to ANOTHER"
        )
    plan = Plan.from_json(membership.plan_json)
    if unknown := [n for n in numbers if not n.isdecimal() or int(n) >= len(plan.fragments)]:
        return _refused(
            f"there is no fragment {bounded_text(unknown[0])}; the run has 0 to "
            f"{len(plan.fragments) - 1}"
        )
    asked = set(map(int, numbers)) or assignment.coming_to(names.index(source))
    if damaged := sorted(asked & membership.repairs.damaged.keys()):
        return _refused(f"fragment {damaged[0]} is damaged, and moves once it is repaired")
    to = [names.index(target)] if target else [
        n for n, name in enumerate(names) if name != source and not assignment.is_given_up(n)
    ]  # fmt: skip
    moving = {p for p in asked if assignment.destination(p) not in to}
    if not moving:
        return Decision("nothing to move: they are there, or on their way, already")
    if not to:
        return _refused("all other syncers are given up, too: name one of these with --to")
    shares = tuple(assignment.shares.values())
    dealt = deal_fragments(plan, shares, assignment.fragments, moving, to)
    sizes = {p: format_bytes(4 * plan.fragments[p].numel) for p in dealt}
    said = ", ".join(
        f"fragment {p} ({sizes[p]}) from {names[assignment.owner(p)]} to {names[dealt[p]]}"
        for p in sorted(dealt)
    )
    again = sorted(p for p in dealt if p in assignment.moves)
    before = ", ".join(f"fragment {p} to {names[assignment.destination(p)]}" for p in again)
    return Decision(
        f"moving, with what belongs to it in the object store, {said}: each is copied while it is "
        f"served where it is, then served by one of the two at any moment or by none, islands go "
        f"on, and diloco status HOST:PORT says how far it is. A syncer of which all moves is taken "
        f"for lost 15 s after its last word"
        + (f"; so is one that takes no more what was moving to it: {before}" if again else ""),
        entries=assignment.moving(dealt),
    )


_Decide = Callable[[Mapping[str, str], Membership, Config], Decision]
_COMMANDS: Mapping[str, tuple[_Decide, frozenset[str]]] = {
    "pause": (_pause, frozenset()),
    "unpause": (_unpause, frozenset()),
    "drain": (_drain, frozenset({"island"})),
    "kick": (_kick, frozenset({"island", "reason", "undo"})),
    "revoke": (_revoke, frozenset({"identity", "serials", "earlier"})),
    "move": (_move, frozenset({"fragments", "from", "to"})),
    "repair": (_repair, frozenset({"fragment", "island"})),
    "set": (_set, frozenset({"key", "value"})),
    "stop": (_stop, frozenset({"now"})),
}


def _refused(message: str) -> Decision:
    return Decision(message, is_done=False)


def _unknown(island: str, membership: Membership) -> Decision | None:
    if island in membership.members:
        return None
    names = ", ".join(membership.members)
    return _refused(f"there is no island {bounded_text(island)!r} in this run; it has {names}")


def _least(membership: Membership, without: str) -> str:
    """Warn of rounds that do not open any more."""
    rules, live = membership.rules, [i for i in membership.members.live if i != without]
    if not rules.is_elastic or len(live) >= rules.min_islands:
        return ""
    return (
        f". Warning: {len(live)} islands are at work without it, and run.min_islands = "
        f"{rules.min_islands}: no round opens until another joins"
    )


def _fixed_text(key: str, config_class: ConfigClass | None) -> str:
    match config_class:
        case ConfigClass.LOCAL if key.endswith(".preset"):  # a site's own name for what is not
            why = f"stands for keys that are the same for the whole run. {_ANOTHER_RUN}"
        case ConfigClass.IDENTITY:
            why = f"is the same for the whole run. {_ANOTHER_RUN}"
        case ConfigClass.LOCAL:
            why = "is a site's own: change it in that site's file, and start that process again"
        case ConfigClass.POLICY:
            why = f"is read when the run is started. {_RESTART}"
        case _:
            why = "is a table: name one of its keys"
    return f"{key} {why}. Under way can be set: {', '.join(sorted(LIVE_KEYS))}"
