"""Serves operators: each command is decided, recorded with its caller, then done.

Source: PROTOCOL.md, "Operators and live policy".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.config.schema import Config
from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.membership import Change, Membership
from diloco.protocol.run.operations import Decision, decide
from diloco.protos.control_pb2 import OperateReply, OperateRequest
from diloco.transport.contracts import Handlers, IncomingCall, Reply
from diloco.transport.errors import FrameError

logger = logging.getLogger(__name__)

#: Characters of an operator's command with its arguments.
_MOST_COMMAND = 4096


@dataclass(slots=True)
class Operations:
    """What an operator's commands need of the process around the coordinator.

    Args:
        config: In force.
        on_config: Hears in a thread, after it became durable, what is in force from now on.
        backup: Copies the run's state, as the arguments say; returns what it did, in words.
    """

    config: Config
    on_config: Callable[[Config], None]
    backup: Callable[[Mapping[str, str]], Awaitable[str]]


class OperatorService:
    """Answers the operators of one run."""

    def __init__(
        self,
        membership: Membership,
        operations: Operations | None,
        *,
        unix_clock: Callable[[], float],
        change: Change,
        apply_config: Callable[[Config], None],
        halt: Callable[[], None],
        end_if_over: Callable[[], Awaitable[None]],
    ) -> None:
        """Assign only.

        Args:
            membership: Of the run.
            operations: What commands need; None: none is taken.
            unix_clock: By which it is noted when something was done.
            change: Makes what is decided durable, then true.
            apply_config: Puts another configuration in force.
            halt: Ends everything, with nothing lost.
            end_if_over: Ends the run where what was done has ended it.
        """
        self._membership = membership
        self._operations = operations
        self._unix_clock = unix_clock
        self._change = change
        self._apply_config = apply_config
        self._halt = halt
        self._end_if_over = end_if_over
        self._at_work = asyncio.Lock()

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {"control.operate": self._operate}

    async def _operate(self, call: IncomingCall) -> Reply:
        request = OperateRequest.FromString(call.header)
        operations, arguments = self._operations, dict(request.arguments)
        size = len(request.command) + sum(len(k) + len(v) for k, v in arguments.items())
        if size > _MOST_COMMAND:
            raise FrameError(f"a command of {size} characters; {_MOST_COMMAND} are allowed")
        if operations is None:
            return Reply.of(OperateReply(message="this coordinator takes no commands"))
        if request.command == "backup":
            return Reply.of(await self._back_up(operations, call, arguments))
        async with self._at_work:  # what is set goes by the configuration that is in force
            decision = await self._decided(operations, call, request.command, arguments)
        return Reply.of(OperateReply(is_done=decision.is_done, message=decision.message))

    async def _decided(
        self, operations: Operations, call: IncomingCall, command: str, arguments: dict[str, str]
    ) -> Decision:
        """Decide, have it durable, and do it."""
        decision: Decision

        def entries(membership: Membership) -> Entries:
            nonlocal decision
            decision = decide(command, arguments, membership, operations.config)
            if not (decision.entries or decision.is_halting):
                return ()
            noted = self._noted(call, command, arguments, decision.message)
            return decision.entries + membership.settings.operated(noted)

        try:
            await self._change(entries)
        except DiskFull:  # the journal has said so, and that is no reason to go on
            if not decision.is_halting:
                raise
        if decision.entries or decision.is_halting:
            logger.info("operator %s: %s %s", _by(call), command, arguments)
        if decision.config is not None:
            operations.config = decision.config
            self._apply_config(decision.config)
            await asyncio.to_thread(operations.on_config, decision.config)
        if decision.is_halting:
            self._halt()
        await self._end_if_over()
        return decision

    async def _back_up(
        self, operations: Operations, call: IncomingCall, arguments: dict[str, str]
    ) -> OperateReply:
        """Copy the state; that somebody takes it away is durable before anything is copied.

        A copy that has taken the last room is still answered: made again it would find itself.
        """
        with_secret = "with" if arguments.get("with_secret") else "without"
        begun = f"copying to {arguments.get('directory', '')!r}, {with_secret} the run secret"
        await self._note_backup(call, arguments, begun)
        try:
            message, is_done = await operations.backup(arguments), True
        except ConfigError as error:
            message, is_done = str(error), False
        with contextlib.suppress(DiskFull):  # the journal has said so
            await self._note_backup(call, arguments, message)
        return OperateReply(is_done=is_done, message=message)

    async def _note_backup(
        self, call: IncomingCall, arguments: Mapping[str, str], message: str
    ) -> None:
        logger.info("operator %s: backup %s", _by(call), arguments)
        noted = self._noted(call, "backup", arguments, message)
        await self._change(lambda m: m.settings.operated(noted))

    def _noted(
        self, call: IncomingCall, command: str, arguments: Mapping[str, str], message: str
    ) -> dict[str, Any]:
        """Say, as JSON values, what an operator does, and who it is."""
        what = {"command": command, "arguments": dict(arguments), "message": message}
        return {"by": _by(call), **what, "unix_s": self._unix_clock()}


def _by(call: IncomingCall) -> str:
    """Name an operator by certificate or token, else from where."""
    return call.peer if call.caller is None else call.caller.short
