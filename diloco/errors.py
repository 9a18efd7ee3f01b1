"""Errors of the product and the exit codes they end a process with.

    DilocoError                     .island_id, .round, .history
      RunStopped                    0    joined a run whose graceful stop is complete
      ConfigError                   2    the user's configuration, flag or file
      PlanMismatch                  10   join refused: another plan
      FingerprintMismatch           10   join refused: another identity configuration or start
      CodecError, AggregationError  20   own numerics broken three times in a row
      CoordinatorUnavailable        30   control or data plane unreachable for too long
      RunHalted                     31   stopped by the operator while the run is not over
      IslandFailed                  40   a rank of the island died
      Fenced                        41   another start of the island, or a resume, took its place;
                                         of a coordinator or syncer: another machine has the run
      RunReturned                   42   the run went back to a checkpoint by itself: start again
      QuorumLost                    50   three EXPIRED attempts in a row of one fragment, or a stop
                                         that an island stayed away from

A message says what was attempted, with which values, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco.refusals import Cause


class DilocoError(Exception):
    """Base of all errors that this product raises on purpose."""

    exit_code = 1

    def __init__(
        self, message: str, *, island_id: str = "", round: str = "", history: Sequence[str] = ()
    ) -> None:
        """Keep the island, the round and the last events of that round, where known."""
        super().__init__(message)
        self.island_id = island_id
        self.round = round
        self.history = tuple(history)


class RunStopped(DilocoError):
    """The run is stopped, with this island's checkpoint: there is nothing left to do."""

    exit_code = 0


class ConfigError(DilocoError):
    """The user's configuration, flag or file cannot be used."""

    exit_code = 2


class PlanMismatch(DilocoError):
    """The plan manifest differs from the run's."""

    exit_code = 10


class FingerprintMismatch(DilocoError):
    """The identity configuration or the initial parameters differ from the run's."""

    exit_code = 10


class CodecError(DilocoError):
    """A payload cannot be encoded or decoded."""

    exit_code = 20


class PayloadRefused(CodecError):
    """A payload that arrived cannot be counted; `cause` is what is wrong with it."""

    def __init__(self, cause: Cause, message: str) -> None:
        """Keep the cause, by which it is counted."""
        super().__init__(message)
        self.cause = cause


class AggregationError(DilocoError):
    """Contributions cannot be averaged, or their result is not finite."""

    exit_code = 20


class CoordinatorUnavailable(DilocoError):
    """Coordinator or syncer could not be reached within the retry budget."""

    exit_code = 30


class RunHalted(DilocoError):
    """The operator has stopped the run without a checkpoint; it can be started again."""

    exit_code = 31


class IslandFailed(DilocoError):
    """A rank of the island died; the others were stopped."""

    exit_code = 40


class Fenced(DilocoError):
    """This start of an island is not the current one; the same start again would not be either."""

    exit_code = 41


class RunReturned(DilocoError):
    """The run went back to an earlier checkpoint by itself; another start goes on from there."""

    exit_code = 42


class QuorumLost(DilocoError):
    """A fragment's rounds expired too often in a row, or an island stayed away from a stop."""

    exit_code = 50


def error_of_exit_code(exit_code: int) -> type[DilocoError]:
    """Return the error with which a process ends that another process told to end."""
    kinds = (
        CodecError,
        CoordinatorUnavailable,
        RunHalted,
        FingerprintMismatch,
        IslandFailed,
        Fenced,
        RunReturned,
        QuorumLost,
    )
    return {kind.exit_code: kind for kind in kinds}.get(exit_code, DilocoError)


#: After these a supervisor starts neither a coordinator nor an island again: it would end the same
#: way, or somebody has asked for the end. All others, a kill among them, are worth another start.
FINAL_EXIT_CODES = frozenset(
    kind.exit_code
    for kind in (
        ConfigError,
        PlanMismatch,
        FingerprintMismatch,
        AggregationError,
        RunHalted,
        Fenced,
        QuorumLost,
    )
)
