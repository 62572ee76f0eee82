"""What uamqp's thread waits for."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from eventpump.transport.uamqp.watch import Watch, open_sockets

FOR_EVER = 60.0
"""Seconds: longer than a test may take."""


class _Timer:
    """Wakes a watch from another thread, in a moment.

    Attributes:
        is_over: Whether it has begun to.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.is_over = False
        threading.Timer(0.05, self._wake).start()

    def _wake(self) -> None:
        self.is_over = True
        self._watch.wake()


def is_watching(watch: Watch) -> bool:
    return watch._stream is not None


def waited(watch: Watch) -> bool:
    """Wait, and return whether something ended the wait before its time was over."""
    began = time.monotonic()
    watch.wait(FOR_EVER)
    return time.monotonic() - began < FOR_EVER / 2


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


def test_wake_ends_a_wait(watch: Watch) -> None:
    """A wake from another thread ends the wait, one before it ends the next, and many are as one."""
    wake_soon = _Timer(watch)
    assert waited(watch)
    assert wake_soon.is_over
    for _ in range(100_000):
        watch.wake()
    assert waited(watch)
    wake_soon = _Timer(watch)
    assert waited(watch)
    assert wake_soon.is_over


def test_socket_that_is_readable_ends_a_wait(watch: Watch, ends: tuple[socket.socket, socket.socket]) -> None:
    """The socket that leads to the port is found among others, sends without delay, and ends waits when read from."""
    client, accepted = ends
    read, write = os.pipe()
    with socket.socket() as other:
        watch.found({client.fileno(), other.fileno(), read}, client.getpeername()[1])
    os.close(read)
    os.close(write)
    assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    began = time.monotonic()
    watch.wait(0.05)
    assert time.monotonic() - began >= 0.04
    accepted.send(b"x")
    assert waited(watch)
    client.recv(1)
    client.close()  # it has a duplicate of its own
    accepted.send(b"y")
    assert waited(watch)


def test_socket_that_is_ambiguous_is_not_watched(watch: Watch, ends: tuple[socket.socket, socket.socket]) -> None:
    """Where it cannot be decided which socket is uamqp's, neither is waited for."""
    client, accepted = ends
    twin = client.dup()
    with twin:
        watch.found({client.fileno(), twin.fileno()}, client.getpeername()[1])
    accepted.send(b"x")
    assert not is_watching(watch)
    watch.wait(0.0)


def test_socket_that_is_not_read_is_not_watched_any_more(
    watch: Watch, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Readable look after look, with nothing to report, a socket is not waited for any more: no busy loop."""
    client, accepted = ends
    watch.found({client.fileno()}, client.getpeername()[1])
    accepted.send(b"x")
    for _ in range(100):
        watch.wait(0.0)
        watch.looked(found=False)
    assert not is_watching(watch)


def test_socket_that_is_read_stays_watched(watch: Watch, ends: tuple[socket.socket, socket.socket]) -> None:
    """Heartbeats, of which there is nothing to report, with quiet between them, release nothing."""
    client, accepted = ends
    watch.found({client.fileno()}, client.getpeername()[1])
    for _ in range(100):
        accepted.send(b"x")
        watch.wait(FOR_EVER)
        client.recv(1)
        watch.looked(found=False)
        watch.wait(0.0)
        watch.looked(found=False)
    assert is_watching(watch)


def test_wake_after_close_does_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    """Waking one that is closed does nothing; its duplicate of the socket is gone with it."""
    client, _ = ends
    before = open_sockets()
    watch = Watch()
    watch.found({client.fileno()}, client.getpeername()[1])
    watch.close()
    watch.wake()
    assert open_sockets() == before
