"""Peers in processes of their own, controlled by JSON lines: one command a line, one answer a line."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.processes import ChildProcess
from tests.support.waiting import Changes

PATIENCE = 30.0
"""Seconds to wait for what must come."""

WS_VERSION = "8.18.0"
"""Of the npm package that the JavaScript peers speak AMQP over WebSockets with."""

ROOT = Path(__file__).parents[3]


class PeerError(Exception):
    """The peer raised.

    Args:
        kind: Its error's class, name or condition.
        text: What it said.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class LinePeer:
    """A peer's process. An async context manager; left, the peer ends with its standard input, or is killed.

    A command is `{"id": n, "do": name, ...}`, its answer `{"id": n, "result": ...}` or
    `{"id": n, "error": [kind, text]}`.
    What happens by itself comes as `{"note": kind, ...}`, and goes to `take`.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._changes = Changes()
        self._ending: asyncio.Task[None] | None = None
        self.child: ChildProcess
        """The process."""

    async def command(self) -> tuple[str, ...]:
        """Return the program and its arguments, installed by now."""
        raise NotImplementedError

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables the process has beside those of this one."""
        return {}

    def take(self, note: dict[str, Any]) -> None:
        """Handle an unsolicited note."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self.child = ChildProcess(
            *await self.command(), on_line=self._line, directory=ROOT, environment=self.environment
        )
        await self.child.start()
        self._ending = asyncio.create_task(self._ended(), name="peer's end")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.end_input()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self.child.wait()
        finally:
            await self.child.kill()
            assert self._ending is not None
            await self._ending

    @property
    def stderr(self) -> str:
        """What it wrote to stderr."""
        return self.child.stderr

    async def call(self, verb: str, patience: float = PATIENCE, **arguments: Any) -> Any:
        """Have something done.

        Raises:
            PeerError: The peer raised, or ended.
            TimeoutError: No answer.
        """
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.child.tell(json.dumps({"id": number, "do": verb, **arguments}))
        return await asyncio.wait_for(answer, patience)

    async def until(self, is_so: Callable[[], bool], seen: Callable[[], str], patience: float = PATIENCE) -> None:
        """Wait for notes.

        Args:
            seen: Returns what came, for the failure.
        """
        try:
            await self._changes.until(is_so, patience)
        except TimeoutError:
            raise AssertionError(f"not within {patience:.0f} s: {seen()}") from None

    def _line(self, text: str) -> None:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            return  # it was killed while it spoke
        if "note" in line:
            self.take(line)
            self._changes.happened()
            return
        answer = self._answers.pop(line["id"])
        if answer.done():
            return
        if "error" in line:
            answer.set_exception(PeerError(*line["error"]))
        else:
            answer.set_result(line["result"])

    async def _ended(self) -> None:
        await self.child.wait()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PeerError("EOFError", "the peer ended"))
