"""Waiting for requests to uamqp's thread, and for uamqp's socket, which uamqp does not expose."""

from __future__ import annotations

import os
import selectors
import socket
import stat
import threading
from collections.abc import Iterable
from typing import Final

_STRIKES: Final = 10
"""How often in a row a socket may be readable while uamqp has nothing to report."""


class Watch:
    """Waits until it is woken, until something comes in, or until a time is over.

    `wake` may be called from any thread and never blocks; the rest belongs to one thread.
    """

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._near, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._is_closed = False
        self._stream: socket.socket | None = None
        self._was_readable = False
        self._strikes = 0

    def found(self, descriptors: Iterable[int], port: int) -> None:
        """Register the sockets that appeared while uamqp connected to a port; one of them is its own.

        They get TCP_NODELAY: uamqp writes a frame in pieces, and without that the second one waits until the service
        has acknowledged the first, 40 ms and more per flow. The option does no harm to other sockets.
        """
        streams = []
        for descriptor in descriptors:
            try:
                # A duplicate: uamqp closes its descriptor when it likes, and another file may get the number.
                stream = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            try:
                is_leading_there = stream.getpeername()[1] == port
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except (OSError, IndexError):
                is_leading_there = False
            if is_leading_there:
                streams.append(stream)
            else:
                stream.close()
        if len(streams) == 1:
            self._stream = streams[0]
            self._selector.register(self._stream, selectors.EVENT_READ)
            return
        for stream in streams:
            stream.close()  # uamqp's cannot be identified: polling alone has to do

    def wake(self) -> None:
        """End a wait, or the next one."""
        with self._lock:
            if self._is_closed:
                return
            try:
                self._far.send(b"x")
            except BlockingIOError:
                return  # it has been woken often enough

    def wait(self, seconds: float) -> None:
        """Wait."""
        readable = [key.fileobj for key, _ in self._selector.select(seconds)]
        self._was_readable = self._stream in readable
        if self._near in readable:
            self._near.recv(65_536)

    def looked(self, *, found: bool) -> None:
        """Record whether uamqp had something to report after a wait.

        A socket that stays readable all the same is one that uamqp does not read any more: it is not waited for.
        """
        self._strikes = self._strikes + 1 if self._was_readable and not found else 0
        self._was_readable = False
        if self._strikes >= _STRIKES and self._stream is not None:
            self._selector.unregister(self._stream)
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            self._is_closed = True
        self._selector.close()
        for each in (self._near, self._far, self._stream):
            if each is not None:
                each.close()


def open_sockets() -> set[int]:
    """Return the descriptors of the sockets this process has open; none if the system does not list them."""
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return set()
    return {descriptor for descriptor in map(int, names) if _is_socket(descriptor)}


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False  # what the listing itself was read through is among the names, and closed by now
