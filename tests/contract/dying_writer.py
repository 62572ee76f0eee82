"""Writes a record of a ledger, or an object of rows, in a process that dies at each step of it: each child forked gets
STEP calls further.

Usage: dying_writer.py ledger|rows DIRECTORY STEP. Prints "killed" for each child that was, and at last what the one
that was not called.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.rows.directory import DirectoryRowStore

BODY = b"0123456789abcdef" * 4096


class Dying:
    """Counts what the thread that writes calls outside Python, and dies at the last call it is given."""

    def __init__(self, calls: int) -> None:
        self.left = calls
        self.names: list[str] = []

    def __call__(self, frame: FrameType, event: str, function: object) -> None:
        if event not in ("c_call", "c_return"):
            return
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        if event == "c_call":
            self.names.append(str(getattr(function, "__name__", function)))


async def write(kind: str, path: Path, name: str, dying: Dying) -> None:
    """Write, dying on the way if there are calls enough."""
    store = DirectoryLedger(path) if kind == "ledger" else DirectoryRowStore(path)
    await store.open()
    if isinstance(store, DirectoryRowStore):
        await store.begin("sink/run")
    # It is for threads that start now.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    threading.setprofile(dying)
    if isinstance(store, DirectoryRowStore):
        await store.write(name, (BODY[:100], memoryview(BODY)[100:]))
    else:
        await store.create(name, BODY)


def main() -> None:
    """Fork until a child gets through."""
    kind, path, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    calls = 0
    while True:
        child = os.fork()
        if child == 0:
            dying = Dying(calls)
            asyncio.run(write(kind, path, f"sink/{calls:06d}", dying))
            sys.stdout.write(" ".join(dying.names) + "\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return
        sys.stdout.write("killed\n")
        sys.stdout.flush()
        calls += step


if __name__ == "__main__":
    main()
