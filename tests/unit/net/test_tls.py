"""TLS on a stream in memory, whose other end is OpenSSL's server: cut anywhere, ended in every way, on virtual time."""

from __future__ import annotations

import asyncio
import random
import ssl
from contextlib import suppress
from typing import Any, Self, cast

import pytest

from eventpump.net import tls
from eventpump.net.tls import HANDSHAKE_TIMEOUT, SHUTDOWN_TIMEOUT, TlsTransport, secure
from eventpump.testing.clock import VirtualClock
from tests.authority import Authority
from tests.support.seeds import seeds

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
MOST = tls.PIECE + tls.RECORD + tls.PIECE + tls.RECORD
"""No more is handed on at once."""


class Below(asyncio.Transport):
    """The stream under TLS. What the peer sends comes in such pieces as a test says, and only while it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.inbox = bytearray(), bytearray()
        self.has_eof = self.is_read = self.is_reported = False
        self.ended: str | None = None
        self.protocol: Any = None
        self.is_tls = False
        """Whether it is TLS itself, which gives bytes that it has decrypted, as that to a proxy."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self.protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert type(data) is bytes
        assert data
        if self.ended is None:
            self.written += data

    def pause_reading(self) -> None:
        assert self.is_read
        self.is_read = False

    def resume_reading(self) -> None:
        assert not self.is_read
        self.is_read = True

    def is_closing(self) -> bool:
        return self.ended is not None

    def close(self) -> None:
        self.end("close", None)

    def abort(self) -> None:
        self.end("abort", None)

    def end(self, how: str, error: Exception | None) -> None:
        if self.ended is None:
            self.ended = how
        if self.protocol is not None and not self.is_reported:
            self.is_reported = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = high, low

    def get_write_buffer_size(self) -> int:
        return 7

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5671)}.get(name, default)

    def bring(self, most: int = 1 << 30) -> None:
        """Let come what the peer has sent, up to a number of bytes; then the end, if it has ended."""
        while most and self.inbox and self.is_read and self.ended is None:
            if self.is_tls:
                given = bytes(self.inbox[:most])
                del self.inbox[: len(given)]
                most -= len(given)
                self.protocol.data_received(given)
                continue
            buffer = self.protocol.get_buffer(-1)
            size = min(most, len(buffer), len(self.inbox))
            buffer[:size] = self.inbox[:size]
            del self.inbox[:size]
            most -= size
            self.protocol.buffer_updated(size)
            buffer[:size] = b"\xee" * size  # what was handed on is the protocol's
        if self.has_eof and not self.inbox and self.is_read and self.ended is None:
            self.has_eof = self.is_read = False
            if not self.protocol.eof_received():
                self.close()


class Peer:
    """OpenSSL's server at the other end of a stream."""

    def __init__(self, below: Below, context: ssl.SSLContext) -> None:
        self.below = below
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.sent, self.got = bytearray(), bytearray()
        self.is_secure = self.has_close = self.has_closed = False
        self.answers_close = True

    def write(self, data: bytes) -> None:
        if self.is_secure and not self.has_closed and data:
            self.tls.write(data)
            self.sent += data
            self.below.inbox += self.outgoing.read()

    def close(self) -> None:
        """Send close_notify."""
        if not self.has_closed:
            self.has_closed = True
            with suppress(ssl.SSLError):
                self.tls.unwrap()
            self.below.inbox += self.outgoing.read()

    def take(self) -> None:
        """Read what was written to it, and answer it."""
        self.incoming.write(self.below.written)
        self.below.written.clear()
        try:
            if not self.is_secure:
                self.tls.do_handshake()
                self.is_secure = True
            while data := self.tls.read(1 << 16):
                self.got += data
            self.has_close = True
        except ssl.SSLZeroReturnError:
            self.has_close = True
        except ssl.SSLError:  # it waits for more, or the client has refused it
            pass
        self.below.inbox += self.outgoing.read()
        if self.has_close and self.answers_close:
            self.close()


class Talker(asyncio.Protocol):
    """Keeps what it gets, and checks that it comes when it may."""

    def __init__(self) -> None:
        self.got, self.sent = bytearray(), bytearray()
        self.pieces: list[int] = []
        self.eofs = self.calls = 0
        self.is_paused = False
        self.ended: str | None = None
        self.lost: list[Exception | None] = []
        self.stream: TlsTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.stream = cast("TlsTransport", transport)

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes
        assert 0 < len(data) <= MOST
        assert not self.lost
        assert not self.is_paused
        assert not self.ended
        assert not self.eofs
        assert not self.calls, "called within its own call"
        self.got += data
        self.pieces.append(len(data))
        self.calls += 1
        self.act()
        self.calls -= 1

    def act(self) -> None:
        """Do something within a call."""

    def eof_received(self) -> None:
        assert not self.eofs
        assert not self.lost
        assert not self.is_paused
        assert not self.ended
        self.eofs += 1
        self.write(b"last words")

    def connection_lost(self, exc: Exception | None) -> None:
        assert not self.calls
        self.lost.append(exc)

    def write(self, data: bytes) -> None:
        if not self.ended and not self.lost:
            self.sent += data
        self.stream.write(data)

    def pause(self) -> None:
        self.is_paused = True
        self.stream.pause_reading()

    def resume(self) -> None:
        self.is_paused = False
        self.stream.resume_reading()

    def close(self) -> None:
        self.ended = self.ended or "close"
        self.stream.close()

    def abort(self) -> None:
        self.ended = "abort"
        self.stream.abort()


class Fickle(Talker):
    """Does something by chance whenever it is called."""

    def __init__(self, rng: random.Random, *, ends: bool) -> None:
        super().__init__()
        self.rng = rng
        self.ends = ends

    def act(self) -> None:
        rng = self.rng
        match rng.randrange(12):
            case 0 | 1:
                self.pause()
            case 2:
                self.pause()
                self.resume()
            case 3 | 4:
                self.write(rng.randbytes(rng.choice([1, 500, 40_000])))
            case 5:
                self.pause()
                asyncio.get_running_loop().call_soon(self.resume)
            case 6 if self.ends and rng.random() < 0.3:
                rng.choice([self.close, self.abort])()
            case _:
                pass


class Pausing(Talker):
    """Is paused as it is connected."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.pause()


def client_context(authority: Authority, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.ca.configure_trust(context)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


@pytest.fixture(scope="module")
def server(authority: Authority) -> ssl.SSLContext:
    """The settings of a server of localhost."""
    return authority.server("localhost")


def connect(
    below: Below, talker: Talker, context: ssl.SSLContext, name: str = "localhost"
) -> asyncio.Task[TlsTransport]:
    """Begin to connect a protocol."""

    async def connecting() -> TlsTransport:
        transport = await secure(below, talker, context, name)
        talker.connection_made(transport)
        return transport

    return asyncio.create_task(connecting())


async def shake(below: Below, peer: Peer, securing: asyncio.Task[TlsTransport], most: int = 1 << 30) -> None:
    """Carry what both ends say until the handshake is over, so many bytes at once."""
    for _ in range(20_000):
        await asyncio.sleep(0)
        if securing.done():
            return
        peer.take()
        below.bring(most)
    raise AssertionError("the handshake never ended")


async def secured(
    authority: Authority, server: ssl.SSLContext, talker: Talker, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> tuple[Below, Peer]:
    """Connect a protocol over TLS."""
    below = Below()
    peer = Peer(below, server)
    context = client_context(authority, version)
    securing = connect(below, talker, context)
    await shake(below, peer, securing)
    await securing
    peer.take()
    await asyncio.sleep(0)
    below.bring()
    assert peer.is_secure
    return below, peer


async def gone(talker: Talker, below: Below, peer: Peer) -> None:
    """Go on until the stream has ended."""
    for _ in range(2000):
        if talker.lost:
            return
        peer.take()
        below.bring()
        if talker.is_paused:
            talker.resume()
        await asyncio.sleep(0)
    raise AssertionError("the stream never ended")


@seeds(200, of=4000)
async def test_every_byte_comes_once_and_in_order_until_the_end(
    authority: Authority, server: ssl.SSLContext, seed: int
) -> None:
    """Both ways, however it is cut, paused and ended; nothing comes after the end, which is reported once."""
    rng = random.Random(seed)
    below, talker = Below(), Fickle(rng, ends=rng.random() < 0.5)
    below.is_tls = rng.random() < 0.2
    peer = Peer(below, server)
    securing = connect(below, talker, client_context(authority, rng.choice(VERSIONS)))
    await shake(below, peer, securing, rng.choice([1, 50, 1000, 100_000]))
    await securing
    if rng.random() < 0.2:
        talker.pause()
    largest = rng.choice([1, 200, 20_000, 300_000])
    for _ in range(rng.randrange(80)):
        match rng.randrange(8):
            case 0 | 1:
                peer.write(rng.randbytes(rng.randrange(largest + 1)))
            case 2 | 3:
                below.bring(rng.randrange(1, 2 * largest + 100))
            case 4:
                peer.take()
            case 5:
                talker.write(rng.randbytes(rng.choice([0, 1, 300, 70_000])))
            case 6 if talker.is_paused:
                talker.resume()
            case _:
                await asyncio.sleep(0)
        if talker.lost:
            break
    end = rng.choice(["close", "eof", "corrupt", "own close", "own close unanswered", "abort", "reset"])
    whole = len(peer.sent)
    peer.take()
    while not peer.is_secure:  # the handshake's last words to it may be on their way
        below.bring()
        peer.take()
    had_closed = peer.has_closed
    match end:
        case "close":
            peer.close()
        case "eof":
            if rng.random() < 0.5:
                before = len(below.inbox)
                peer.write(b"x" * 1000)
                if not peer.has_closed and len(below.inbox) > before:
                    del below.inbox[-rng.randrange(1, 1000) :]  # a part of a record is no data
            below.has_eof = True
        case "corrupt":
            peer.write(b"x" * 1000)
            if not had_closed:
                below.inbox[-rng.randrange(1, 900)] ^= 1 << rng.randrange(8)
        case "own close":
            talker.close()
        case "own close unanswered":
            peer.answers_close = False
            talker.close()
        case "abort":
            talker.abort()
        case _:
            below.end("reset", ConnectionResetError("reset"))
    own = talker.ended is not None
    if end == "own close unanswered" and below.ended is None:
        for _ in range(20):
            peer.take()
            below.bring()
            await asyncio.sleep(0)
        if not peer.has_closed:
            await asyncio.sleep(SHUTDOWN_TIMEOUT - 1)
            assert not talker.lost
            await asyncio.sleep(2)
    await gone(talker, below, peer)
    peer.take()
    has_closed = talker.ended is not None
    assert len(talker.lost) == 1
    assert talker.got == peer.sent[: len(talker.got)]
    assert peer.got == talker.sent[: len(peer.got)]
    error = talker.lost[0]
    if end == "reset" and below.ended == "reset":
        assert type(error) is ConnectionResetError
    elif end == "corrupt" and not has_closed and not had_closed:
        assert isinstance(error, ssl.SSLError)
        assert below.ended == "abort"
    elif end == "corrupt" and not had_closed:
        assert error is None or isinstance(error, ssl.SSLError)  # it was seen before the protocol closed, or not
    else:
        assert error is None
    if end in ("close", "eof", "corrupt") and not has_closed:
        assert len(talker.got) >= whole
        assert talker.got == (peer.sent if end == "close" else peer.sent[:whole])
        assert talker.eofs == (end != "corrupt" or had_closed)
    if (end == "close" and not has_closed) or (end == "own close" and own and talker.ended == "close"):
        assert peer.got == talker.sent
        assert peer.has_close
        assert below.ended == "close"
    before = len(below.written)
    talker.stream.write(b"late")
    talker.pause()
    talker.resume()
    talker.close()
    talker.abort()
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(talker.lost) == 1
    assert len(below.written) == before
    assert talker.stream.is_closing()
    assert not talker.stream.is_reading()


@pytest.mark.parametrize("version", VERSIONS)
async def test_data_in_the_segment_that_ends_the_handshake_comes_once_the_protocol_is_connected(
    authority: Authority, server: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    """It is not lost, and does not come before `connection_made`; a protocol that pauses there gets it later."""
    for pauses in (False, True):
        below, talker = Below(), Pausing() if pauses else Talker()
        peer = Peer(below, server)
        securing = connect(below, talker, client_context(authority, version))
        while not peer.is_secure:
            await asyncio.sleep(0)
            below.bring()
            peer.take()
        peer.write(b"at once")
        below.bring()
        await securing
        for _ in range(3):
            await asyncio.sleep(0)
            below.bring()
        if pauses:
            assert not talker.got
            talker.resume()
            assert not talker.got
        for _ in range(3):
            await asyncio.sleep(0)
            below.bring()
        assert talker.got == b"at once"
        talker.abort()
        await gone(talker, below, peer)


async def test_small_read_is_one_call_of_openssl(
    authority: Authority, server: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that comes whole is read by one call, without an exception; it is what the layer is for."""
    talker = Talker()
    below, peer = await secured(authority, server, talker)
    reads: list[int] = []
    inner = ssl.SSLObject.read

    def read(self: ssl.SSLObject, size: int) -> bytes:
        data: bytes = inner(self, size)
        reads.append(len(data))
        return data

    for size in (1, 300, 5000):
        peer.write(bytes(size))
        with monkeypatch.context() as patch:
            patch.setattr(ssl.SSLObject, "read", read)
            below.bring()
    assert reads == [1, 300, 5000] == talker.pieces
    talker.abort()
    await gone(talker, below, peer)


async def test_large_read_comes_in_pieces_none_of_which_is_small(authority: Authority, server: ssl.SSLContext) -> None:
    """A small one would say that the socket is empty."""
    talker = Talker()
    below, peer = await secured(authority, server, talker)
    for size in (100_000, 200_000, 261_000):
        talker.pieces.clear()
        peer.write(bytes(size))
        below.bring()
        assert sum(talker.pieces) == size
        assert min(talker.pieces) >= tls.PIECE
        assert max(talker.pieces) <= MOST
    assert len(talker.pieces) > 1
    talker.abort()
    await gone(talker, below, peer)


async def test_wrong_authority_and_wrong_name_are_refused_and_the_server_is_told(authority: Authority) -> None:
    """The certificate's error comes from `secure`; the server gets the alert, then the end of the stream."""
    for context, name, words in (
        (ssl.create_default_context(), "localhost", "local issuer certificate"),
        (client_context(authority), "elsewhere.test", "Hostname mismatch"),
    ):
        below, talker = Below(), Talker()
        peer = Peer(below, authority.server("localhost"))
        securing = connect(below, talker, context, name)
        await shake(below, peer, securing)
        with pytest.raises(ssl.SSLCertVerificationError, match=words):
            await securing
        assert below.ended == "close"
        peer.incoming.write(below.written)
        with pytest.raises(ssl.SSLError, match="ALERT"):
            peer.tls.do_handshake()
        await asyncio.sleep(0)
        assert not talker.lost


async def test_bytes_that_are_not_tls_fail_the_handshake(authority: Authority) -> None:
    """Such as those of a server without TLS."""
    below = Below()
    securing = connect(below, Talker(), client_context(authority))
    await asyncio.sleep(0)
    below.inbox += b"AMQP\x03\x01\x00\x00" * 4
    below.bring()
    with pytest.raises(ssl.SSLError):
        await securing
    assert below.ended == "close"


@pytest.mark.parametrize("at", [0, 1, 700])
@pytest.mark.parametrize("how", ["eof", "reset"])
async def test_stream_that_ends_in_the_handshake_is_a_reset(
    authority: Authority, server: ssl.SSLContext, at: int, how: str
) -> None:
    """By its end there is no reason, and by an error of the stream that is the reason; it is closed in any case."""
    below, talker = Below(), Talker()
    peer = Peer(below, server)
    securing = connect(below, talker, client_context(authority))
    await asyncio.sleep(0)
    peer.take()
    del below.inbox[at:]
    below.has_eof = how == "eof"
    below.bring()
    if how == "reset":
        below.end("reset", ConnectionResetError(104, "reset by peer"))
    with pytest.raises(ConnectionResetError) as caught:
        await securing
    assert caught.value.args == (() if how == "eof" else (104, "reset by peer"))
    assert below.ended is not None
    await asyncio.sleep(0)
    assert not talker.lost


async def test_stream_that_is_lost_as_the_handshake_ends_is_an_error_of_it(
    authority: Authority, server: ssl.SSLContext
) -> None:
    """The protocol is not connected to a stream that is gone, and hears nothing of it."""
    below, talker = Below(), Talker()
    peer = Peer(below, server)
    securing = connect(below, talker, client_context(authority))
    await asyncio.sleep(0)
    peer.take()
    below.bring()
    below.protocol.connection_lost(BrokenPipeError("gone"))
    with pytest.raises(BrokenPipeError):
        await securing
    assert not talker.lost


async def test_cancelled_handshake_leaves_no_stream(authority: Authority) -> None:
    """The stream is aborted, and its end is not reported to a protocol that was never connected."""
    below, talker = Below(), Talker()
    securing = connect(below, talker, client_context(authority))
    await asyncio.sleep(0)
    securing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await securing
    assert below.ended == "abort"
    await asyncio.sleep(0)
    assert not talker.lost


async def test_settings_that_openssl_refuses_leave_no_stream(authority: Authority) -> None:
    """Such as a name that is none."""
    below = Below()
    with pytest.raises(ValueError, match="server_hostname"):
        await secure(below, Talker(), client_context(authority), "")
    assert below.ended == "abort"


async def test_silent_peer_has_a_minute_for_the_handshake(authority: Authority, clock: VirtualClock) -> None:
    """Then the stream is aborted, with the error that asyncio's TLS has."""
    below = Below()
    began = clock.monotonic()
    with pytest.raises(ConnectionAbortedError, match="TLS handshake took longer than 60 s"):
        await secure(below, Talker(), client_context(authority), "localhost")
    assert clock.monotonic() == pytest.approx(began + HANDSHAKE_TIMEOUT)
    assert below.ended == "abort"


async def test_time_out_of_the_stream_in_the_handshake_is_its_own(authority: Authority) -> None:
    """What the system says of a peer that is gone is not taken for the handshake's time."""
    below = Below()
    securing = connect(below, Talker(), client_context(authority))
    await asyncio.sleep(0)
    below.end("reset", TimeoutError(110, "timed out"))
    with pytest.raises(TimeoutError, match="timed out"):
        await securing


async def test_close_drops_what_still_comes_and_waits_for_the_peer(
    authority: Authority, server: ssl.SSLContext
) -> None:
    """The peer gets all that was written, then the close; the stream under TLS ends after the peer's own."""
    talker = Talker()
    below, peer = await secured(authority, server, talker)
    peer.answers_close = False
    peer.write(bytes(200_000))
    talker.pause()
    talker.write(b"the last")
    talker.close()
    assert talker.stream.is_closing()
    for _ in range(5):
        below.bring()
        peer.take()
        peer.write(bytes(50_000))
        await asyncio.sleep(0)
    assert (bytes(peer.got), peer.has_close, talker.got) == (b"the last", True, bytearray())
    peer.close()
    below.bring()
    assert below.ended == "close"
    assert not talker.lost
    await gone(talker, below, peer)
    assert talker.lost == [None]


class Stubborn:
    """OpenSSL's settings and client in one, which takes no data while it renegotiates: here, as long as a test says."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.is_stubborn = False

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *, server_hostname: str) -> Self:
        self.tls = self.context.wrap_bio(incoming, outgoing, server_hostname=server_hostname)
        return self

    def write(self, data: bytes) -> int:
        assert data, "nothing need be encrypted"
        if self.is_stubborn:
            raise ssl.SSLWantReadError
        return self.tls.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tls, name)


@pytest.mark.parametrize("comes", ["record", "part", "much"])
async def test_what_openssl_does_not_take_waits_in_order_and_goes_after_the_next_read(
    authority: Authority, server: ssl.SSLContext, comes: str
) -> None:
    """It counts as unsent; whatever that read brings. A close waits behind it."""
    talker, below = Talker(), Below()
    peer = Peer(below, server)
    stubborn = Stubborn(client_context(authority))
    await shake(below, peer, connect(below, talker, cast("ssl.SSLContext", stubborn)))
    peer.take()
    await asyncio.sleep(0)
    below.bring()
    stubborn.is_stubborn = True
    talker.write(b"first ")
    talker.write(b"second ")
    talker.write(b"")
    peer.write(bytes(3))
    below.bring()
    peer.take()
    assert (bytes(peer.got), talker.stream.get_write_buffer_size()) == (b"", 7 + 13)
    stubborn.is_stubborn = False
    talker.write(b"third ")
    peer.write(bytes(100_000 if comes == "much" else 10))
    below.bring(5 if comes == "part" else 1 << 30)
    peer.take()
    assert (bytes(peer.got), talker.stream.get_write_buffer_size()) == (b"first second third ", 7)
    below.bring()
    stubborn.is_stubborn = True
    talker.write(b"last")
    talker.close()
    talker.write(b"too late")
    seen = []
    for _ in range(2):
        peer.take()
        seen.append((bytes(peer.got[-5:]), peer.has_close))
        stubborn.is_stubborn = False
        peer.write(bytes(10))
        below.bring()
    assert seen == [(b"hird ", False), (b" last", True)]
    await gone(talker, below, peer)
    assert talker.lost == [None]


async def test_broken_record_is_the_reason_and_the_peer_is_told(authority: Authority, server: ssl.SSLContext) -> None:
    """What came before it is handed on; what that makes the protocol write fails, which is not the reason."""
    talker = Talker()
    below, peer = await secured(authority, server, talker)
    talker.act = lambda: talker.write(b"an answer")  # type: ignore[method-assign]
    peer.write(bytes(20_000))
    below.inbox[-5] ^= 1
    below.bring()
    assert len(talker.got) == tls.RECORD
    await asyncio.sleep(0)
    (error,) = talker.lost
    assert isinstance(error, ssl.SSLError)
    assert error.reason == "DECRYPTION_FAILED_OR_BAD_RECORD_MAC"
    assert below.ended == "abort"
    peer.incoming.write(below.written)
    with pytest.raises(ssl.SSLError, match="ALERT_BAD_RECORD_MAC"):
        peer.tls.read(1)


async def test_end_of_the_stream_waits_for_a_protocol_that_pauses(authority: Authority, server: ssl.SSLContext) -> None:
    """Until it has all that came before, and takes more."""
    talker = Talker()
    below, peer = await secured(authority, server, talker)
    talker.act = talker.pause  # type: ignore[method-assign]
    peer.write(bytes(250_000))
    below.bring()
    assert below.protocol.eof_received(), "the stream is closed, though not all is handed on"
    while talker.is_paused:
        assert not talker.eofs
        talker.resume()
        await asyncio.sleep(0)
    assert (len(talker.got), talker.eofs, below.ended) == (250_000, 1, "close")
    await gone(talker, below, peer)
    assert talker.lost == [None]


async def test_protocol_that_fails_cuts_the_stream(
    authority: Authority, server: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where what it gets was kept while it was paused: as asyncio's own streams do, with the error as reason."""
    loop, seen, failing = asyncio.get_running_loop(), [], Talker()
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
    below, peer = await secured(authority, server, failing)
    peer.write(bytes(250_000))
    failing.act = failing.pause  # type: ignore[method-assign]
    below.bring()
    failing.act = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    failing.resume()
    await asyncio.sleep(0)
    failing.calls = 0
    await gone(failing, below, peer)
    assert [type(each) for each in (*seen, *failing.lost)] == [ZeroDivisionError, ZeroDivisionError]
    assert below.ended == "abort"


async def test_transport_says_what_asyncios_says(authority: Authority, server: ssl.SSLContext) -> None:
    """TLS and certificate, the socket's names, limits and sizes; a protocol may be replaced; secrets are in no text."""
    talker, second = Talker(), Talker()
    below, peer = await secured(authority, server, talker, ssl.TLSVersion.TLSv1_2)
    stream = talker.stream
    assert stream.get_extra_info("ssl_object").version() == "TLSv1.2"
    assert stream.get_extra_info("sslcontext").maximum_version is ssl.TLSVersion.TLSv1_2
    assert stream.get_extra_info("peercert")["subjectAltName"] == (("DNS", "localhost"),)
    assert stream.get_extra_info("cipher")[1] == "TLSv1.2"
    assert stream.get_extra_info("compression", "none") is None
    assert stream.get_extra_info("peername") == ("127.0.0.1", 5671)
    assert stream.get_extra_info("nothing", 5) == 5
    assert not stream.can_write_eof()
    with pytest.raises(NotImplementedError):
        stream.write_eof()
    stream.set_write_buffer_limits(100, 10)
    assert below.limits == (100, 10)
    assert stream.get_write_buffer_size() == 7
    assert stream.get_protocol() is talker
    assert stream.is_reading()
    stream.pause_reading()
    stream.pause_reading()
    assert (stream.is_reading(), below.is_read) == (False, False), "the socket is read on"
    stream.resume_reading()
    stream.resume_reading()
    assert (stream.is_reading(), below.is_read) == (True, True)
    stream.set_protocol(second)
    second.connection_made(stream)
    for data in (b"a", bytearray(b"b"), memoryview(b"c")):
        stream.write(data)
    stream.writelines([b"d", b"e"])
    stream.write(b"")
    peer.take()
    assert peer.got == b"abcde"
    peer.write(b"x")
    below.bring()
    assert (bytes(talker.got), bytes(second.got)) == (b"", b"x")
    called: list[str] = []
    second.pause_writing = lambda: called.append("pause")  # type: ignore[method-assign]
    second.resume_writing = lambda: called.append("resume")  # type: ignore[method-assign]
    below.protocol.pause_writing()
    below.protocol.resume_writing()
    assert called == ["pause", "resume"]
    assert "localhost" not in repr(stream)
    second.abort()
    await gone(second, below, peer)
    assert not talker.lost
