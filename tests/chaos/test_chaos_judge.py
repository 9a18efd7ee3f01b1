"""The judge: it is content with a run as it should be, and finds every violation planted in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from diloco.chaos.evidence import Evidence, Newest, Recomputed, island_back_s
from diloco.chaos.fault_log import FaultHistory, RunHistory, read_fault_log
from diloco.chaos.figures import accident_figures, island_figures, next_publication_s
from diloco.chaos.judge import accounts_of, headers_by_version, judge
from diloco.chaos.plan import COORDINATOR, JudgeConfig, Kind, TimedFault
from diloco.chaos.report import is_alone, report_on

TOKENS = 10
ISLANDS = ("east", "west")
KILL = TimedFault(0, Kind.KILL, "west", 3.0, 0.0, 0)
NUM_VERSIONS = 4
H = 2


def digest(version: int) -> str:
    return f"{version:064x}"


@dataclass
class Run:
    """Two islands, one fragment, a version every two inner steps; west returns after its second.

    What west had trained since was lost, and so was what it had just sent: the attempt expired.
    """

    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    headers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def good(cls) -> Run:
        run = cls({island: [] for island in ISLANDS})
        run.header(0, {})
        for round_ in range(NUM_VERSIONS):
            for island in ISLANDS:
                is_back = island == "west" and round_ >= 2
                start = 2 if is_back else 1
                if is_back and round_ == 2:
                    run.crash()
                for step in range(round_ * H + 1, round_ * H + H + 1):
                    run.tell(island, start, "inner_step", step, num_tokens=TOKENS, duration_s=1.0)
                run.send(island, start, round_)
                run.merge(island, start, round_)
            run.header(round_ + 1, {"east": 1, "west": 1 if round_ < 2 else 2})
        for island in ISLANDS:
            start = 2 if island == "west" else 1
            last = NUM_VERSIONS * H
            run.tell(island, start, "evaluated", last, parameters="published", nats_per_byte=2.0)
            run.tell(island, start, "island_ended", last, digests=[digest(NUM_VERSIONS)])
        return run

    def crash(self) -> None:
        """West trains one step for nothing and dies."""
        self.tell("west", 1, "inner_step", 5, num_tokens=TOKENS, duration_s=1.0)
        self.send("west", 1, 2, inner_step=5, tokens=TOKENS)

    def tell(self, island: str, start: int, kind: str, inner_step: int, **values: object) -> None:
        event = {
            "kind": kind,
            "island": island,
            "island_rank": 0,
            "incarnation": start,
            "inner_step": inner_step,
            "unix_s": 1000.0 + inner_step + (2.0 if start == 2 else 0.0),
            **values,
        }
        self.events[island].append(event)

    def send(
        self, island: str, start: int, version: int, inner_step: int = 0, tokens: int = H * TOKENS
    ) -> None:
        self.tell(
            island, start, "fragment_sent", inner_step or (version + 1) * H,
            fragment_id=0, version=version, attempt=0, weight_tokens=tokens,
            weight_steps=tokens // TOKENS, declined="",
        )  # fmt: skip

    def merge(self, island: str, start: int, version: int) -> None:
        self.tell(
            island, start, "fragment_merged", (version + 1) * H,
            fragment_id=0, version=version + 1, outcome="included", staleness_steps=0,
            digest=digest(version + 1),
        )  # fmt: skip

    def header(self, version: int, starts: dict[str, int]) -> None:
        contributors = [
            {"island": island, "incarnation": start, "weight_tokens": H * TOKENS}
            for island, start in starts.items()
        ]
        self.headers.append(
            {
                "fragment_id": 0,
                "version": version,
                "attempt": 0,
                "digest": digest(version),
                "contributors": contributors,
            }
        )

    def counts_again(self, island: str, version: int) -> None:
        """Let the audit log name an island that sent nothing for a version and merged it so."""
        sent, merged = (
            self.of(island, f"fragment_{what}")[version - 1] for what in ("sent", "merged")
        )
        self.events[island].remove(sent)
        merged["outcome"] = "absent"

    def of(self, island: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events[island] if event["kind"] == kind]

    def evidence(self, **values: Any) -> Evidence:
        history = RunHistory(
            [FaultHistory(KILL, began_s=3.0, began_unix_s=1004.5, ended_s=3.0, fired=True)]
        )
        return Evidence(
            history=history,
            events=self.events,
            headers=[
                *self.headers,
                *copy.deepcopy(self.headers[-2:]),
            ],  # audit log and store overlap
            newest={0: Newest(NUM_VERSIONS, digest(NUM_VERSIONS))},
            recomputed=[Recomputed(0, NUM_VERSIONS)],
            exit_codes=dict.fromkeys(ISLANDS, 0),
            **values,
        )


def broken(evidence: Evidence) -> list[str]:
    return [finding.invariant for finding in judge(evidence) if not finding.holds]


def test_a_run_as_it_should_be_holds_everything() -> None:
    findings = judge(Run.good().evidence())

    assert [finding.text for finding in findings if not finding.holds] == []
    assert len(findings) == 12


@pytest.mark.parametrize(
    ("is_same", "killed", "is_broken"),
    [(True, "", False), (False, "", True), (False, "coordinator", False), (False, "west", True)],
    ids=["it lives", "it ended", "its coordinator was killed", "another was killed"],
)
def test_a_process_that_ends_under_a_storm_was_ended_by_it(
    is_same: bool, killed: str, is_broken: bool
) -> None:
    evidence = Run.good().evidence()
    storm = replace(KILL, kind=Kind.CONNECT_STORM, target="syncer", lasts_s=4.0)
    evidence.history.faults.append(
        FaultHistory(storm, began_s=10.0, ended_s=14.0, fired=True, is_same=is_same)
    )
    if killed:
        kill = replace(KILL, target=killed)
        evidence.history.faults.append(FaultHistory(kill, began_s=12.0, ended_s=12.0))

    expected = ["strangers end no process"] if is_broken else []
    assert broken(evidence) == expected


@pytest.mark.parametrize("is_met", [False, True], ids=["alone", "with another fault"])
@pytest.mark.parametrize(
    ("problem", "is_excused"),
    [
        ("", True),
        ("ended and started again", True),
        ("was waited for until a round expired", True),
        ("kept the run from every version for 2.0 s", True),
        ("none of its 2 contributions afterwards was included", False),
        ("moved 600 bytes for 200 of contributions", False),
    ],
)
def test_a_thin_line_costs_time_alone(problem: str, is_excused: bool, is_met: bool) -> None:
    run = Run.good()
    # It lasts from 1003 to 1005; sends are at 1002, 1004, 1006 and 1008.
    run.tell("east", 1, "bytes_moved", 1, bytes_up=100)
    run.tell("east", 1, "bytes_moved", 5, bytes_up=700 if "600" in problem else 400)
    if "started" in problem:
        run.tell("east", 2, "bytes_moved", 2, bytes_up=0)
    if "expired" in problem:
        run.tell("east", 1, "round_expired", 4, fragment_id=0, version=9, attempt=0)
    if "included" in problem:
        for merged in run.of("east", "fragment_merged")[2:]:
            merged["outcome"] = "not_included"
    evidence = run.evidence(contribution_bytes={0: 100})
    thin = replace(KILL, kind=Kind.THIN_LINE, target="east", lasts_s=2.0)
    line = FaultHistory(thin, began_s=100.0, began_unix_s=1003.0, ended_s=104.0, fired=True)
    evidence.history.faults.append(line)
    evidence.history.published = [] if "version" in problem else [(101.0, 0, 2)]
    if is_met:
        freeze = replace(KILL, kind=Kind.FREEZE, target="syncer", lasts_s=1.0)
        evidence.history.faults.append(
            FaultHistory(freeze, began_s=101.0, ended_s=102.0, fired=True)
        )

    (finding,) = (f for f in judge(evidence) if f.invariant == "a thin line costs time alone")

    assert finding.holds == (not problem or (is_met and is_excused))
    assert finding.holds or finding.evidence.endswith(problem)


def _set(events: list[dict[str, Any]], index: int, **values: object) -> None:
    events[index].update(values)


DIGESTS = "a version has one digest everywhere"


@pytest.mark.parametrize(("of", "is_found"), [(2, False), (3, True)])
def test_what_an_island_on_arrival_staged_is_that_very_version(of: int, is_found: bool) -> None:
    run = Run.good()
    run.tell("east", 1, "fragment_staged", 4, fragment_id=0, version=2, digest=digest(of))

    assert broken(run.evidence(is_on_arrival=True)) == ([DIGESTS] if is_found else [])


@pytest.mark.parametrize("kind", [Kind.FLIP_BIT, Kind.POISON])
def test_who_returns_to_what_is_published_was_spoilt_or_is_blamed_wrongly(kind: Kind) -> None:
    run = Run.good()
    # After its last send, and before the merge of it, one step more is made and given up.
    run.tell("east", 1, "published_taken", 3, reason="far off", dropped_tokens=[TOKENS])
    sent = run.of("east", "fragment_sent")[1]
    sent["weight_tokens"] = TOKENS
    run.headers[2]["contributors"][0]["weight_tokens"] = TOKENS
    evidence = run.evidence()
    corrupted = FaultHistory(replace(KILL, kind=kind, target="east"), fired=True)

    assert broken(evidence) == ["nobody is blamed for what he did not do"]
    history = RunHistory([*evidence.history.faults, corrupted])
    assert broken(replace(evidence, history=history)) == []
    (account,) = (
        a
        for (name, _), a in accounts_of(evidence, headers_by_version(evidence.headers)[0]).items()
        if name == "east"
    )
    assert account.dropped == TOKENS and not account.problems


VERSIONS = "every version is published exactly once"
OUTCOMES = "every contribution has exactly one outcome"
ACCOUNTS = "every token is accounted for"
EXITS = "no island ends unasked"


@pytest.mark.parametrize(
    ("plant", "invariants"),
    [
        pytest.param(
            lambda run: _set(run.of("west", "fragment_merged"), 1, digest=digest(99)),
            [DIGESTS],
            id="an-island-merged-other-values",
        ),
        pytest.param(
            lambda run: _set(run.of("east", "island_ended"), 0, digests=[digest(3)]),
            [DIGESTS],
            id="an-island-ended-with-other-values",
        ),
        pytest.param(
            lambda run: run.headers.append({**run.headers[2], "digest": digest(99)}),
            [DIGESTS],
            id="a-version-was-made-twice",
        ),
        pytest.param(
            lambda run: run.tell("east", 1, "digest_mismatch", 2, fragment_id=0, version=1),
            [DIGESTS],
            id="a-lane-was-damaged-and-nobody-did-it",
        ),
        pytest.param(
            lambda run: run.headers.pop(1),
            [DIGESTS, VERSIONS, OUTCOMES, ACCOUNTS],
            id="a-version-is-missing",
        ),
        pytest.param(
            lambda run: run.header(NUM_VERSIONS + 1, {}),
            [VERSIONS],
            id="a-published-version-is-lost",
        ),
        pytest.param(
            lambda run: run.events["east"].remove(run.of("east", "fragment_merged")[1]),
            [VERSIONS, OUTCOMES, ACCOUNTS],
            id="an-island-jumped-over-a-version",
        ),
        pytest.param(
            lambda run: run.headers[3]["contributors"].append(run.headers[3]["contributors"][0]),
            [OUTCOMES],
            id="a-contribution-counts-twice",
        ),
        pytest.param(
            lambda run: _set(run.of("east", "fragment_merged"), 2, outcome="not_included"),
            [OUTCOMES, ACCOUNTS],
            id="an-included-contribution-was-answered-not-included",
        ),
        pytest.param(
            lambda run: run.headers[2]["contributors"].pop(),
            [OUTCOMES, ACCOUNTS],
            id="an-included-contribution-is-not-in-the-audit-log",
        ),
        pytest.param(
            lambda run: _set(run.of("east", "fragment_sent"), 1, declined="not finite"),
            [OUTCOMES],
            id="a-decline-was-counted",
        ),
        pytest.param(
            lambda run: _set(run.of("east", "fragment_merged"), 1, outcome="mislaid"),
            [OUTCOMES, ACCOUNTS],
            id="an-outcome-that-is-none",
        ),
        pytest.param(
            lambda run: _set(run.of("west", "fragment_sent"), 0, weight_tokens=99),
            [ACCOUNTS],
            id="more-tokens-were-sent-than-trained",
        ),
        pytest.param(
            lambda run: run.headers[2]["contributors"][0].update(weight_tokens=99),
            [ACCOUNTS],
            id="more-tokens-were-counted-than-sent",
        ),
        pytest.param(
            lambda run: run.counts_again("east", 3),
            [ACCOUNTS],
            id="a-contribution-was-counted-again-that-nobody-sent",
        ),
        pytest.param(
            lambda run: run.headers[1]["contributors"].append(
                {"island": "west", "incarnation": 2, "weight_tokens": 0}
            ),
            [OUTCOMES, ACCOUNTS],
            id="what-nobody-sent-is-counted-with-no-tokens",
        ),
        pytest.param(
            lambda run: run.tell("east", 2, "inner_step", 8, num_tokens=0, duration_s=0.0),
            [EXITS],
            id="an-island-started-again-unasked",
        ),
    ],
)
def test_a_planted_violation_is_found(
    plant: Callable[[Run], object], invariants: list[str]
) -> None:
    run = Run.good()

    plant(run)

    assert broken(run.evidence()) == invariants


def test_what_a_contribution_may_not_count_waits_for_the_next() -> None:
    run = Run.good()
    for round_, steps in ((0, 1), (1, 3)):
        sent = run.of("east", "fragment_sent")[round_]
        sent.update(weight_tokens=steps * TOKENS, weight_steps=steps)
        run.headers[round_ + 1]["contributors"][0]["weight_tokens"] = steps * TOKENS

    assert broken(run.evidence(most_steps=1)) == []
    assert broken(run.evidence()) == [ACCOUNTS]


def test_what_the_run_itself_says_is_judged() -> None:
    evidence = Run.good().evidence()

    assert broken(replace(evidence, exit_codes={"east": 50, "west": None})) == [EXITS]
    assert broken(replace(evidence, problem="it goes on")) == ["the run comes to its end"]
    wrong = [Recomputed(0, 3, "comes to other digests")]
    assert broken(replace(evidence, recomputed=wrong)) == [
        "retained versions are recomputed to the bit"
    ]


def test_what_the_object_store_holds_and_what_was_said_of_it_is_judged() -> None:
    evidence = Run.good().evidence()
    cut = replace(KILL, kind=Kind.CUT, target="bucket", lasts_s=20.0)
    there, older = Newest(NUM_VERSIONS, digest(NUM_VERSIONS)), Newest(3, digest(3))
    stored = "what is published is in the object store"

    def said(*, is_told: bool) -> Evidence:
        fault = FaultHistory(cut, began_s=1.0, fired=True, is_told=is_told)
        return replace(evidence, history=RunHistory([*evidence.history.faults, fault]))

    assert broken(replace(evidence, stored={0: there})) == broken(said(is_told=True)) == []
    assert broken(replace(evidence, stored={0: older})) == [stored]
    assert broken(replace(evidence, stored={})) == [stored]
    assert broken(said(is_told=False)) == [
        "an object store that takes nothing is said in the status"
    ]


def test_only_the_islands_whose_links_were_corrupted_are_excused() -> None:
    run = Run.good()
    run.tell("east", 1, "digest_mismatch", 2, fragment_id=0, version=1)

    def corrupted(island: str, *, fired: bool) -> Evidence:
        fault = replace(KILL, kind=Kind.CORRUPT, target=island)
        evidence = run.evidence()
        faults = [*evidence.history.faults, FaultHistory(fault, began_s=1.0, fired=fired)]
        return replace(evidence, history=RunHistory(faults))

    assert broken(corrupted("east", fired=True)) == []
    assert broken(corrupted("east", fired=False)) == [DIGESTS]
    assert broken(corrupted("west", fired=True)) == [DIGESTS]


def test_a_newest_version_that_was_torn_has_to_be_taken_back_and_is_the_same_version() -> None:
    run = Run.good()
    run.headers.append({**run.headers[3], "repaired": "east"})
    evidence = run.evidence()
    fault = replace(KILL, kind=Kind.TORN_NEWEST, target="syncer")
    history = RunHistory([*evidence.history.faults, FaultHistory(fault, began_s=1.0, fired=True)])
    assert broken(replace(evidence, history=history)) == ["every version is published exactly once"]
    assert broken(replace(evidence, history=history, repaired=[(0, 3)])) == []


def test_an_island_that_was_starting_again_when_the_run_ended_did_not_end_unasked() -> None:
    run = Run.good()
    # West was killed after its second version, and is not back when east has flushed.
    run.events["west"] = [e for e in run.events["west"] if e["incarnation"] == 1]
    for version in (3, 4):
        run.headers[version]["contributors"] = run.headers[version]["contributors"][:1]

    def ended(code: int | None, **values: Any) -> list[str]:
        return broken(replace(run.evidence(**values), exit_codes={"east": 0, "west": code}))

    assert ended(None, is_on_arrival=True) == []
    assert ended(None) == [EXITS], "all wait for it"
    assert ended(30, is_on_arrival=True) == [EXITS]
    assert EXITS in ended(None, is_on_arrival=True, problem="it goes on")
    run.tell("west", 2, "inner_step", 6, num_tokens=0, duration_s=1.0)
    assert EXITS in ended(None, is_on_arrival=True), "it was back, and the run waits for it"


def test_an_island_on_arrival_may_jump_and_drop_what_came_too_late() -> None:
    run = Run.good()
    # East was late for version 3: it merges 4 alone, and what it sent for 3 was not counted.
    run.events["east"].remove(run.of("east", "fragment_sent")[3])
    run.events["east"].remove(run.of("east", "fragment_merged")[3])
    _set(
        run.of("east", "fragment_merged"), 2,
        outcome="not_included", version=4, inner_step=8, staleness_steps=2, digest=digest(4),
    )  # fmt: skip
    for version in (3, 4):
        run.headers[version]["contributors"] = run.headers[version]["contributors"][1:]

    assert broken(run.evidence(is_on_arrival=True)) == []
    assert VERSIONS in broken(run.evidence())
    assert island_figures(run.evidence(is_on_arrival=True))[0].dropped_tokens == 2 * H * TOKENS


def test_an_island_on_arrival_may_merge_while_nothing_is_outstanding() -> None:
    run = Run.good()
    run.events["east"].remove(run.of("east", "fragment_sent")[3])
    _set(run.of("east", "fragment_merged"), 3, outcome="absent")
    run.headers[4]["contributors"] = run.headers[4]["contributors"][1:]

    assert broken(run.evidence(is_on_arrival=True)) == []
    assert island_figures(run.evidence(is_on_arrival=True))[0].dropped_tokens == H * TOKENS


def test_a_contribution_that_only_the_audit_log_knows_is_not_lost() -> None:
    run = Run.good()
    # The leader was killed after its contribution had left, before its event was written; and one
    # whose outcome came too late.
    run.events["west"] = [
        event
        for event in run.events["west"]
        if not (event["incarnation"] == 1 and event["inner_step"] > 2)
        or event["kind"] == "inner_step"
    ]
    assert broken(run.evidence()) == []


def test_figures_are_of_what_was_done() -> None:
    lines = [
        {"what": "training", "t": 1.0, "unix_s": 1001.0},
        {"what": "begun", "t": 4.0, "unix_s": 1004.5, "number": 0, "note": "process 1"},
        {"what": "published", "t": 4.5, "unix_s": 1005.0, "fragment": 0, "version": 3},
        {"what": "published", "t": 7.0, "unix_s": 1007.5, "fragment": 1, "version": 3},
        {
            "what": "ended",
            "t": 4.1,
            "unix_s": 1004.6,
            "number": 0,
            "fired": True,
            "note": "",
            "is_same": True,
            "is_told": True,
            "had_chance": True,
            "kept_s": 0.0,
        },
        {"what": "back", "t": 6.0, "unix_s": 1006.5, "number": 0, "seconds": 2.0},
        {"what": "over", "t": 9.0, "unix_s": 1009.5},
    ]

    history = read_fault_log(lines, [KILL])

    fault = history.faults[0]
    assert (fault.began_s, fault.fired, fault.back_s, fault.note) == (4.0, True, 2.0, "process 1")
    assert next_publication_s(fault, history) == 3.0
    assert history.over_s == 9.0
    assert [fault.fired for fault in history.faults] == [True]
    # Its first step after the kill is that of inner step 5: 1007 in unix time.
    assert island_back_s(fault, Run.good().events["west"]) == 2.5
    assert next_publication_s(FaultHistory(KILL), history) is None


def test_what_a_kill_costs_the_others_and_the_island_is_measured() -> None:
    (accident,) = accident_figures(Run.good().evidence())

    # Killed at 1004.5; the other's steps take 1 s all along, and its next merge is that of 1006.
    assert (accident.kind, accident.target) == ("kill", "west")
    assert accident.longest_step == pytest.approx(1.0 / 1.07)
    assert (accident.slower, accident.next_merge_s, accident.num_expired) == (0.0, 1.5, 0)
    # It begins again with inner step 5, at 1007, and is included after two of them.
    assert (accident.back_s, accident.own_steps) == (2.5, 2)


def test_an_island_that_is_never_included_again_has_no_figure_and_misses_its_bar() -> None:
    run = Run.good()
    for merged in run.of("west", "fragment_merged"):
        if merged["incarnation"] == 2:
            merged["outcome"] = "expired"

    bars = JudgeConfig(others_slower=0.03)
    report = report_on(run.evidence(), bars, import_s=0.0, undisturbed=None)

    assert report.accidents[0].own_steps is None
    assert [missed.what for missed in report.missed] == [
        "own steps until it is included again, after a fault of an island"
    ]


def test_a_kill_that_meets_another_fault_is_not_alone() -> None:
    def kill(began_s: float, back_s: float | None) -> FaultHistory:
        return FaultHistory(KILL, began_s=began_s, fired=True, back_s=back_s)

    faults = [
        kill(1.0, 2.0), kill(2.0, 1.5), kill(4.0, 1.0), kill(7.0, None), kill(8.0, 1.0),
        FaultHistory(KILL), kill(11.0, None),
    ]  # fmt: skip

    assert [is_alone(history, faults) for history in faults if history.began_s is not None] == [
        False, False, True, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("over_s", "is_met"),
    [(30.0, False), (None, False), (9.5, True)],
    ids=["end", "none", "too-soon"],
)
def test_a_coordinator_that_never_came_back_misses_its_bar(
    over_s: float | None, is_met: bool
) -> None:
    coordinator = replace(KILL, target=COORDINATOR)
    kills = [
        FaultHistory(coordinator, began_s=began_s, fired=True, back_s=back_s)
        for began_s, back_s in ((1.0, 0.5), (5.0, 0.6), (9.0, None))
    ]
    evidence = replace(Run.good().evidence(), history=RunHistory(kills, over_s=over_s))

    report = report_on(evidence, JudgeConfig(coordinator_back="2s"), import_s=0.0, undisturbed=None)

    assert [each.is_met for each in report.requirements] == [True, is_met]
