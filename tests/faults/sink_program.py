"""A driver of the idempotent sink, and its tasks, in a process that kills itself.

Arguments: connection string, directory, number of batches, the point to die at, or -1, and who publishes batches.
Points are counted through the whole run: before and after each record that is created, each object with rows that is
written, and each message that is sent; after it means that the service has stored it and the answer is not read.
What Spark keeps in its checkpoint (the number of the next batch) is the file `committed` in the directory.
Prints `point N` at the end, where N is how many points there were.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from eventpump.interfaces import PostedMessage, SendLink, SendLinkSpec
from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.rows.directory import DirectoryRowStore
from tests.faults.sinking import PATHS, PlainTransport, query_of


class Points:
    """Counts points, and dies at one."""

    def __init__(self, deadly: int) -> None:
        self.count = 0
        self._deadly = deadly

    def __call__(self) -> None:
        if self.count == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


class DyingLink:
    """A link with a point before and after each message."""

    def __init__(self, link: SendLink, point: Points) -> None:
        self._link = link
        self._point = point
        self.max_message_size = link.max_message_size
        self.properties = link.properties

    @property
    def is_attached(self) -> bool:
        return self._link.is_attached

    async def send(self, message: bytes, *, message_format: int = 0, on_sent: Callable[[], None] | None = None) -> None:
        self._point()
        await self._link.send(message, message_format=message_format, on_sent=on_sent)
        self._point()

    def post(
        self,
        message: bytes,
        on_outcome: Callable[[BaseException | None], None],
        *,
        message_format: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> PostedMessage:
        self._point()

        def ended(error: BaseException | None) -> None:
            self._point()
            on_outcome(error)

        return self._link.post(message, ended, message_format=message_format, on_sent=on_sent)

    async def aclose(self) -> None:
        await self._link.aclose()


class DyingTransport(PlainTransport):
    """A transport of such links."""

    point: Points

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        return DyingLink(await self._transport.open_send_link(spec), self.point)


class DyingLedger(DirectoryLedger):
    """A ledger with a point before and after each record."""

    point: Points

    async def create(self, name: str, body: bytes) -> bool:
        self.point()
        created = await super().create(name, body)
        self.point()
        return created


class DyingRows(DirectoryRowStore):
    """A row store with a point before and after each object, and before the objects of a batch are deleted."""

    point: Points

    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        self.point()
        name = await super().write(stem, parts)
        self.point()
        return name

    async def delete(self, names: Sequence[str]) -> None:
        self.point()
        await super().delete(names)


async def main() -> None:
    """Run the query from where it is committed."""
    connection_string, directory, batches, deadly = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    paths = PATHS[sys.argv[5]](random.Random(deadly))
    point = Points(deadly)
    committed = directory / "committed"
    async with query_of(connection_string, directory / "ledger", paths=paths) as query:
        query.transport = transport = DyingTransport(query.transport)
        query.store = store = DyingLedger(directory / "ledger")
        query.rows = rows = DyingRows(directory / "ledger" / "rows~")
        transport.point = store.point = rows.point = point
        await store.open()
        await rows.open()
        for batch_id in range(int(committed.read_text()) if committed.exists() else 0, batches):
            await query.run(batch_id)
            committed.write_text(str(batch_id + 1))
    sys.stdout.write(f"point {point.count}\n")


if __name__ == "__main__":
    asyncio.run(main())
