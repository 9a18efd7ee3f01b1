"""What a contribution may count: bounds of the run's own plan; what is beyond them is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.protocol.island.ledger import FragmentLedger, Verdict
from diloco.protocol.rounds import state
from diloco.protocol.rounds.terms import MOST_NUMBER, MOST_ROUNDS, OutcomeKind, Weights
from diloco.protocol.run.peer_bounds import most_step_tokens_of, weights_of
from diloco.protos import fragment_pb2 as wire
from diloco.transport.calls.loopback import run_virtual
from tests.raw_island import KEY, NUMEL, RawIsland, founded
from tests.run_files import write_run
from tests.virtual_run import Setting

H = 4
WEIGHTS = Weights(H, 100)
SOUND = {"tokens": 8, "steps": 4, "sent_at": 4, "step_tokens": 2}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting({"w": [0.0] * NUMEL}, lambda *_: None, tmp_path, inner_steps=8)


def test_who_declares_no_batch_counts_no_more_than_the_largest_that_may_be_declared(
    tmp_path: Path,
) -> None:
    config = load_config(write_run(tmp_path / "run", {"east": "", "west": ""}))
    most, weights = most_step_tokens_of(config), weights_of(config)

    problem = weights.problem(tokens=4 * most + 1, steps=4, sent_at=4, step_tokens=0)

    assert f"at most {most} tokens a step are counted, the most of an island that said" in problem
    assert not weights.problem(tokens=4 * most, steps=4, sent_at=4, step_tokens=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"tokens": 16}, ""),
        ({"tokens": 0, "steps": 0}, ""),
        ({"steps": 64, "sent_at": 64}, ""),
        ({"tokens": 17}, "weight_tokens = 17 in 4 inner steps: at most 4 tokens a step"),
        ({"tokens": 1, "steps": 0}, "weight_tokens = 1 in 0 inner steps"),
        ({"tokens": 2**64 - 1}, f"at most {MOST_NUMBER} are counted"),
        ({"steps": 5}, "weight_steps = 5: a contribution counts at most 4 inner steps"),
        ({"steps": 65, "sent_at": 65}, f"no more than {MOST_ROUNDS} rounds of 4"),
        ({"sent_at": 101}, "sent_at_inner_step = 101: the run has 100 inner steps"),
        ({"tokens": 10**15, "step_tokens": 0}, "at most 1073741824 tokens a step"),
    ],
)
def test_a_contribution_counts_what_its_island_can_have_made(
    changes: dict[str, int], words: str
) -> None:
    problem = WEIGHTS.problem(**{**SOUND, **changes})

    assert (words in problem) if words else not problem


@pytest.mark.parametrize("tokens", [2**64 - 1, 2**53 + 1, 10**15])
def test_who_counts_too_much_is_refused_and_the_round_goes_on(
    setting: Setting, tokens: int
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(replace(setting, weights=Weights(H, 8)))
        for island in (a, b):
            island.grant.tokens_per_inner_step = 1
        await a.contribute()

        reply = await b.submit(weight_tokens=tokens)

        assert reply.status == wire.SUBMIT_STATUS_OUTCOME
        assert reply.outcome.kind == wire.OUTCOME_KIND_REFUSED
        assert f"weight_tokens = {tokens}" in reply.outcome.reason
        assert [(each.island, each.cause) for each in run.syncer.refusals] == [("b", "weight")]
        state = (await a.poll(KEY)).fragments[0]
        assert (state.version, state.merged_tokens, list(state.contributors)) == (1, 4, ["a"])
        assert await b.end() is OutcomeKind.REFUSED
        await run.kill_syncer()
        await run.start_syncer()
        assert (await RawIsland(run, "a", 2).poll()).fragments[0].version == 1

    run_virtual(scenario())


def test_a_record_that_believed_what_an_island_said_is_refused_with_the_way_out(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with monkeypatch.context() as before:  # as of a release without bounds
            believe: Any = lambda self, lane: ""  # noqa: E731
            before.setattr(state.FragmentRounds, "weight_problem", believe)
            run, (a, b) = await founded(setting)
            await a.contribute()
            await b.submit(weight_tokens=2**64 - 1)
            await b.submit(lane_id=1, weight_tokens=2**64 - 1)
        await run.kill_syncer()

        with pytest.raises(
            ConfigError,
            match=r"version 1 of fragment 0 has weight_tokens of island 'b' = 18446744073709551615"
            r".*--resume --at CHECKPOINT",
        ):
            await run.start_syncer()

    run_virtual(scenario())


def test_an_island_that_has_made_more_than_counts_sends_the_rest_with_the_next() -> None:
    ledger = FragmentLedger(0, 0)
    for _ in range(100):
        ledger.count(3)

    sent = ledger.send(100, is_flush=False, most_steps=WEIGHTS.most_steps)

    weight = {"tokens": sent.weight_tokens, "steps": sent.weight_steps}
    assert weight == {"tokens": 192, "steps": 64}
    assert not WEIGHTS.problem(**weight, sent_at=100, step_tokens=3)
    ledger.settle(Verdict.INCLUDED, attempt=0, local_mix=0.0)
    sent = ledger.send(100, is_flush=False, most_steps=WEIGHTS.most_steps)
    assert (sent.weight_tokens, sent.weight_steps) == (108, 36)


def test_what_a_merge_replaced_counts_as_one_round_at_most() -> None:
    ledger = FragmentLedger(0, 0)
    for _ in range(H):
        ledger.count(3)
    ledger.send(H, is_flush=False)
    for _ in range(10 * H):  # the syncer was away
        ledger.count(3)

    settled = ledger.settle(Verdict.INCLUDED, attempt=0, local_mix=0.0, most_kept=H)

    assert settled.dropped_tokens == 3 * 9 * H
    sent = ledger.send(11 * H, is_flush=False)
    assert (sent.weight_tokens, sent.weight_steps) == (3 * H, H)
