"""Streams in memory, and a watch on unhandled errors of a loop or a logger."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from aiohttp.http_exceptions import HttpProcessingError

from tests.fuzz.entry import BreachError

_TURNS: Final = 4
"""Turns of the loop in which everything that is due is done."""


class MemoryTransport(asyncio.Transport):
    """A stream whose other end is the test: what is written stays here."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self.written = bytearray()
        self.was_aborted = False
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self.written += data

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.was_aborted = self.was_aborted or not self._is_closing
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_reading(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def settle(turns: int = _TURNS) -> None:
    """Let the loop do what is due."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Unhandled(logging.Handler):
    """Keeps what was logged as an error, and the loop's unhandled errors."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *loggers: str) -> None:
        super().__init__(logging.ERROR)
        self._loggers = [logging.getLogger(name) for name in loggers]
        for logger in self._loggers:
            logger.addHandler(self)
        self._found: list[tuple[str, BaseException | None]] = []
        loop.set_exception_handler(self._on_exception)

    def _on_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._found.append((str(context.get("message")), context.get("exception")))

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            return  # aiohttp logs each request that is no HTTP, and answers it with a status
        self._found.append((str(record.msg), record.exc_info[1] if record.exc_info else None))

    def check(self) -> None:
        """Raise where there was anything."""
        found, self._found = self._found, []
        if found:
            text, error = found[0]
            kind = "" if error is None else f" ({type(error).__name__})"
            raise BreachError(f"an unhandled error: {text[:100]}{kind}") from error

    def close(self) -> None:
        """Listen no longer."""
        for logger in self._loggers:
            logger.removeHandler(self)
        super().close()
