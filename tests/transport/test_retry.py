import asyncio
import itertools
import random

import pytest

from diloco.transport.calls.loopback import VirtualClockLoop, run_virtual
from diloco.transport.errors import ConnectError, HandlerFailed, PeerReset, TransportError
from diloco.transport.retry import RetryPolicy, retry


class Highest(random.Random):
    """Draws the cap itself, so that waits are known."""

    def uniform(self, a: float, b: float) -> float:
        return b


def attempts_of(
    failures: list[TransportError | None], policy: RetryPolicy, rng: random.Random
) -> tuple[list[float], TransportError | None]:
    """Times at which attempts began, and the error that ended them."""
    times: list[float] = []
    remaining = iter(failures)

    async def attempt() -> str:
        times.append(asyncio.get_running_loop().time())
        failure = next(remaining)
        if failure is not None:
            raise failure
        return "answer"

    async def run() -> TransportError | None:
        try:
            assert await retry(attempt, policy, rng) == "answer"
        except TransportError as error:
            return error
        return None

    return times, run_virtual(run())


def test_caps_double_up_to_the_largest() -> None:
    policy = RetryPolicy(first_wait_s=0.1, max_wait_s=0.5, budget_s=100.0)

    times, error = attempts_of([ConnectError("no")] * 5 + [None], policy, Highest())

    assert error is None
    assert times == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.2, 1.7])


def test_waits_are_jittered_over_the_whole_range() -> None:
    policy = RetryPolicy(first_wait_s=1.0, max_wait_s=1.0, budget_s=1e6)

    times, _ = attempts_of([ConnectError("no")] * 1000 + [None], policy, random.Random(3))

    waits = [after - before for before, after in itertools.pairwise(times)]
    # Mean of 1000 uniform draws: 0.5 +- 0.009; their range misses either end by about 0.001.
    assert sum(waits) / len(waits) == pytest.approx(0.5, abs=0.05)
    assert min(waits) < 0.02 and max(waits) > 0.98


def test_what_cannot_help_is_not_tried_again() -> None:
    failure = HandlerFailed("no")

    times, error = attempts_of([failure], RetryPolicy(budget_s=10.0), random.Random(0))

    assert times == [0.0]
    assert error is failure


def test_the_last_error_names_attempts_and_seconds() -> None:
    failure = PeerReset("cut", peer="hub", method="submit")

    times, error = attempts_of([failure] * 9, RetryPolicy(budget_s=1.0), Highest())

    assert times == pytest.approx([0.0, 0.1, 0.3, 0.7])
    assert type(error) is PeerReset
    assert (error.peer, error.method, error.__cause__) == ("hub", "submit", failure)
    assert "gave up after 4 attempts in 0.7 s" in str(error)
    assert str(error).endswith("cut [submit -> hub]")


def test_no_budget_is_one_attempt() -> None:
    times, error = attempts_of([ConnectError("no")], RetryPolicy(budget_s=0.0), random.Random(0))

    assert times == [0.0]
    assert "1 attempts in 0.0 s" in str(error)


@pytest.mark.parametrize(
    "values",
    [
        {"budget_s": -1.0},
        {"budget_s": float("nan")},
        {"budget_s": float("inf")},
        {"budget_s": 1.0, "first_wait_s": 0.0},
        {"budget_s": 1.0, "first_wait_s": 2.0, "max_wait_s": 1.0},
        {"budget_s": 1.0, "max_wait_s": float("nan")},
    ],
)
def test_a_policy_that_cannot_be_waited_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RetryPolicy(**values)


def test_time_in_which_this_process_had_no_turn_is_not_of_the_budget() -> None:
    """As of a machine that slept: the peer may be as well as ever."""

    async def run() -> int:
        num_attempts, loop = 0, asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)

        async def attempt() -> int:
            nonlocal num_attempts
            num_attempts += 1
            if num_attempts < 4:
                loop._jumping.now += 3600.0
                raise PeerReset("the connection did not outlive it")
            return num_attempts

        return await retry(attempt, RetryPolicy(budget_s=60.0), Highest(), attempt_s=5.0)

    assert run_virtual(run()) == 4
