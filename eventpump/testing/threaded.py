"""The emulator for synchronous code: on a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from eventpump.emulator.faults import Action, Fault
from eventpump.emulator.server import Emulator

_T = TypeVar("_T")


class EmulatorThread:
    """An emulator that any thread may use. A synchronous context manager.

    ::

        with EmulatorThread({"telemetry": 4}) as service:
            client = SomeClient(service.connection_string, "telemetry")

    Args:
        emulator: The parameters of `Emulator`.
        options: Likewise.
    """

    def __init__(self, *emulator: Any, **options: Any) -> None:
        self.emulator = Emulator(*emulator, **options)
        """The emulator: used only on its own loop, through `run` and `call`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="emulator", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self.emulator.start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self.emulator.aclose())
        finally:
            self._end()

    @property
    def connection_string(self) -> str:
        """The connection string for clients. It contains the key."""
        return self.emulator.connection_string

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the emulator's loop, and wait for it. If this is interrupted, the coroutine is cancelled.

        Returns:
            Its result.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function on the emulator's loop, and wait for it.

        Returns:
            What it returns.
        """

        async def on_loop() -> _T:
            return function()

        return self.run(on_loop())

    def add_fault(self, action: Action, **where: Any) -> Fault:
        """Add a fault, with the parameters of `Faults.add`; `call(fault.remove)` ends it."""
        return self.call(lambda: self.emulator.faults.add(action, **where))

    def clear_faults(self) -> None:
        """Remove every fault."""
        self.call(lambda: self.emulator.faults.clear())

    def add_partitions(self, hub: str, count: int) -> None:
        """Add partitions to a hub.

        Raises:
            ConfigurationError: The hub does not exist, or would have too many partitions.
        """
        self.run(self.emulator.add_partitions(hub, count))

    def restart(self) -> None:
        """Stop, and start again on the same port, with whatever is on disk. Faults are gone."""
        self.run(self.emulator.restart())

    def drop_connections(self) -> None:
        """Drop every connection without a close."""
        self.call(self.emulator.drop_connections)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
