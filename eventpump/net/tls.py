"""TLS on a client's stream: `ssl.SSLObject` between a protocol and the transport under it.

Whatever is cryptography, certificates or messages of TLS (RFC 8446, RFC 5246) is OpenSSL's; here bytes are handed on.
asyncio has such a layer too, of which each small read takes thirteen more calls and an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from typing import Any, Final, cast

HANDSHAKE_TIMEOUT: Final = 60.0
"""Seconds that a handshake may take."""
SHUTDOWN_TIMEOUT: Final = 30.0
"""Seconds that a stream may take to close, until it is cut off."""
_BUFFER: Final = 256 * 1024
"""Bytes of the buffer for reads of what is under TLS: as many as asyncio and uvloop read at once."""
RECORD: Final = 16 * 1024
"""The most bytes of a TLS record (RFC 8446, 5.1; RFC 5246, 6.2.1)."""
PIECE: Final = 64 * 1024
"""Bytes that are handed on at once, at least, where there are more.

Larger objects would be given back to the system each time. All pieces of a read have as many, the last one too: fewer
say that the socket is empty (`stream._FEW_BYTES`).
"""


async def secure(
    stream: asyncio.Transport, protocol: asyncio.BaseProtocol, context: ssl.SSLContext, server_hostname: str
) -> TlsTransport:
    """Begin TLS on a stream that is paused. On failure or cancellation the stream is closed.

    Returns:
        The transport for the protocol, whose `connection_made` is the caller's to call, at once. It is read then.

    Raises:
        ssl.SSLError: The handshake failed; `ssl.SSLCertVerificationError` where the certificate was refused.
        OSError: The stream ended in it, or it took longer than `HANDSHAKE_TIMEOUT`.
    """
    timeout = asyncio.timeout(HANDSHAKE_TIMEOUT)
    try:
        transport = TlsTransport(stream, protocol, context, server_hostname)
        async with timeout:
            await transport.handshake()
        transport.begin()
    except ssl.SSLError:
        stream.close()  # once the peer has been sent what is wrong
        raise
    except TimeoutError:
        stream.abort()
        if not timeout.expired():  # it was the stream's
            raise
        raise ConnectionAbortedError(f"the TLS handshake took longer than {HANDSHAKE_TIMEOUT:g} s") from None
    except BaseException:
        stream.abort()
        raise
    return transport


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """The transport of a protocol, and the protocol of the transport under TLS. Made by `secure`."""

    def __init__(
        self,
        under: asyncio.Transport,
        protocol: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        server_hostname: str,
    ) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_hostname)
        self._under = under
        self._buffer = memoryview(bytearray(_BUFFER))
        self._unwritten: deque[bytes] = deque()  # in order, while OpenSSL takes nothing
        self._loop = asyncio.get_running_loop()
        self._handshake: asyncio.Future[None] = self._loop.create_future()
        self._has_begun = False
        self._has_rest = True  # something that came waits for the protocol, and so does what comes after it
        self._has_eof = False
        self._is_paused = False
        self._is_closing = False
        self._is_under_read = False
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.set_protocol(protocol)

    async def handshake(self) -> None:
        """Take over the transport under TLS, and wait until the handshake is over."""
        self._under.set_protocol(self)
        self._go_on_with_handshake()
        self._read_under(on=True)
        await self._handshake

    def begin(self) -> None:
        """Let the protocol have what comes, from the next turn of the event loop on."""
        if self._is_closing:
            raise self._error or ConnectionResetError()
        self._has_begun = True
        self._loop.call_soon(self._read_rest)

    def _go_on_with_handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._end_handshake(error)
        else:
            self._end_handshake(None)
        self._flush()

    def _end_handshake(self, error: Exception | None) -> None:
        self._read_under(on=False)  # what comes now is for the protocol, which is not connected yet
        if self._handshake.done():
            return
        if error is None:
            self._handshake.set_result(None)
        else:
            self._handshake.set_exception(error)

    # ------------------------------------------------------------------------------------ what is read

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        incoming = self._incoming
        incoming.write(self._buffer[:nbytes])
        if nbytes > RECORD or self._has_rest or self._is_paused or self._is_closing:
            self._take()
            return
        try:
            data = self._tls.read(nbytes)
        except ssl.SSLError as error:
            self._after_read(error)
            return
        if data and len(data) < nbytes and not incoming.pending:
            self._receive(data)  # it is all that came, as with most small reads: no record is left, nor a part of one
        else:
            self._read_on(data)
        if self._outgoing.pending or self._unwritten:
            self._flush()

    def data_received(self, data: bytes) -> None:
        """Take what TLS under this TLS has decrypted: that of a proxy."""
        self._incoming.write(data)
        self._take()

    def _take(self) -> None:
        if not self._handshake.done():
            self._go_on_with_handshake()
        elif self._is_closing:
            self._shut_down()
        elif not self._has_rest:
            self._read_on()

    def _read_on(self, data: bytes | None = None) -> None:
        """Hand on all that came, in pieces, until the protocol pauses or ends the stream.

        Args:
            data: What was decrypted of it already; empty where the peer has closed.
        """
        pieces: list[bytes] = []
        size = 0
        error: ssl.SSLError | None = None
        self._has_rest = True
        while not self._is_paused and not self._is_closing:
            if data is None:
                try:
                    data = self._tls.read(RECORD)
                except ssl.SSLError as failed:
                    error = failed
                    if not isinstance(failed, ssl.SSLWantReadError):
                        self._error = failed  # before the protocol writes something, which fails for another reason
            if data:
                pieces.append(data)
                size += len(data)
                data = None
                # The rest is another piece, or belongs to this one.
                if size < PIECE or self._incoming.pending < PIECE + RECORD:
                    continue
            if pieces:
                self._receive(pieces[0] if len(pieces) == 1 else b"".join(pieces))
                pieces.clear()
                size = 0
            if data is not None or error is not None:
                break
        if self._is_closing:
            return
        if error is not None:
            self._after_read(error)
        elif data is not None and not self._is_paused:
            self._end()
        else:
            self._flush()
        self._steer()

    def _after_read(self, error: ssl.SSLError) -> None:
        """Go on after OpenSSL has decrypted all that it can, or has failed."""
        if not isinstance(error, ssl.SSLWantReadError):
            self._fail(error)
        elif not self._has_eof:
            self._has_rest = False
            self._flush()
        elif not self._is_paused:
            self._end()

    def _read_rest(self) -> None:
        try:
            if self._has_rest and not self._is_closing:
                self._read_on()
        except Exception as error:  # the protocol's
            self._fail(error)
            raise

    def _end(self) -> None:
        """Report the end of the stream to the protocol, and close: a TLS stream is not kept half open."""
        self._protocol.eof_received()
        self.close()

    def _steer(self) -> None:
        """Read what is under TLS only while all that came was handed on."""
        if not self._is_closing:
            self._read_under(on=not self._is_paused and not self._has_rest)

    def _read_under(self, *, on: bool) -> None:
        if on is not self._is_under_read and not self._has_eof:
            self._is_under_read = on
            if on:
                self._under.resume_reading()
            else:
                self._under.pause_reading()

    def eof_received(self) -> bool:
        self._has_eof = True
        if not self._handshake.done():
            self._end_handshake(ConnectionResetError())
        elif self._is_closing:
            self._shut_down()
        elif self._has_begun and not self._has_rest:
            self._read_on()
        return True  # it is closed here, once the protocol has everything

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._unwritten.clear()
        if self._timer is not None:
            self._timer.cancel()
        error = self._error = self._error or exc
        if not self._handshake.done():
            self._handshake.set_exception(error or ConnectionResetError())
        elif self._has_begun:
            self._protocol.connection_lost(error)

    # ---------------------------------------------------------------------------------- what is written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not data:
            return
        if not self._unwritten:
            try:
                self._tls.write(data)
            except ssl.SSLWantReadError:  # it renegotiates (RFC 5246, 7.4.1.1)
                self._unwritten.append(bytes(data))
            except ssl.SSLError as error:
                self._fail(error)
                return
        else:
            self._unwritten.append(bytes(data))
        self._send()

    def _flush(self) -> None:
        """Encrypt what waits, and send it, and what OpenSSL has to say by itself."""
        try:
            while self._unwritten:
                self._tls.write(self._unwritten[0])
                self._unwritten.popleft()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._send()

    def _send(self) -> None:
        if self._outgoing.pending:
            self._under.write(self._outgoing.read())

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._under.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._under.get_write_buffer_size() + sum(map(len, self._unwritten))

    def can_write_eof(self) -> bool:
        return False

    def write_eof(self) -> None:
        raise NotImplementedError("a TLS stream has no end of one side")

    # ------------------------------------------------------------------------------------- how it ends

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._timer = self._loop.call_later(SHUTDOWN_TIMEOUT, self._under.abort)
            self._read_under(on=True)
            self._shut_down()

    def _shut_down(self) -> None:
        """Send what waits, then that this side closes; end what is under TLS once the peer has said so too."""
        is_over = self._has_eof
        try:
            while self._tls.read(RECORD):
                pass  # it is dropped: OpenSSL takes no answer to a close behind data that was not read
            is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            is_over = True
        self._flush()
        if not self._unwritten and not self._has_eof:
            with contextlib.suppress(ssl.SSLError):  # it wants to read the peer's close
                self._tls.unwrap()
            self._send()
        if is_over:
            self._under.close()

    def abort(self) -> None:
        self._is_closing = True
        self._under.abort()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._send()  # says why
        self.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._under.is_closing()

    # ------------------------------------------------------------------------------- asyncio.Transport

    def pause_reading(self) -> None:
        self._is_paused = True
        self._steer()

    def resume_reading(self) -> None:
        if self._is_paused and not self._is_closing:
            self._is_paused = False
            if self._has_rest:
                self._loop.call_soon(self._read_rest)  # not within the protocol's own call
            else:
                self._steer()

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast("asyncio.Protocol", protocol)
        self._receive = self._protocol.data_received  # without a look-up for each read

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "ssl_object":
                return self._tls
            case "sslcontext":
                return self._tls.context
            case "peercert":
                return self._tls.getpeercert()
            case "cipher":
                return self._tls.cipher()
            case "compression":
                return self._tls.compression()
        return self._under.get_extra_info(name, default)
