"""Directories whose files outlive a loss of power, for the stores that keep something in one."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from eventpump.errors import StoreError

_T = TypeVar("_T")


def make_directory(path: Path, kind: str) -> None:
    """Create a directory and those above it where they do not exist, and sync their names. Raises `OSError`."""
    if path.is_dir():
        return
    make_directory(path.parent, kind)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        problem = f"{path} is not a directory; a {kind} is one, created if necessary"
        raise NotADirectoryError(errno.ENOTDIR, problem) from None
    synchronize_directory(path.parent)


def synchronize_directory(path: Path) -> None:
    """Write the names in a directory to the disk. Raises `OSError`."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no directories
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def in_thread(operation: str, work: Callable[[], _T]) -> _T:
    """Call a function of files in a thread. Raises `StoreError` if it raised OSError."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise StoreError(operation, error.strerror or type(error).__name__) from error
