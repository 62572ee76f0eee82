"""A blob store at a distance: Azurite, behind a relay in a process of its own that delays each request.

The relay passes bytes on as they are. A client of HTTP/1.1 sends a request when the answer to the one before has come,
so the first bytes after an answer begin a request.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from benchmarks.processes import START_TIMEOUT, Process
from tests.support.azurite import Azurite

DELAY = 0.010
"""Seconds, about what a request takes to a storage account in the same region."""
_CHUNK = 1 << 20


@contextmanager
def slow_blobs(delay: float = DELAY) -> Iterator[str]:
    """Run a blob store at a distance; yield the connection string of its account."""
    with Azurite() as azurite:
        port = urlsplit(azurite.blob_endpoint).port
        with Process("benchmarks.slow_store", str(port), str(delay)) as relay:
            yield azurite.connection_string.replace(f":{port}/", f":{relay.line(START_TIMEOUT)}/")


async def _relay(port: int, delay: float) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_store, to_store = await asyncio.open_connection("127.0.0.1", port)
        is_answered = True

        async def answer() -> None:
            nonlocal is_answered
            while answered := await from_store.read(_CHUNK):
                is_answered = True
                writer.write(answered)
                await writer.drain()
            writer.close()

        answering = asyncio.create_task(answer())
        try:
            while asked := await reader.read(_CHUNK):
                if is_answered:
                    is_answered = False
                    await asyncio.sleep(delay)
                to_store.write(asked)
                await to_store.drain()
        except ConnectionError:
            pass  # the client has ended
        finally:
            answering.cancel()
            to_store.close()
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(_relay(int(sys.argv[1]), float(sys.argv[2])))
