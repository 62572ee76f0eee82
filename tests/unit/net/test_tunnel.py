"""CONNECT through a proxy, without a socket: the requests, and the outcome of every answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.errors import AuthenticationError, ConnectionLostError, Recovery, ServiceError
from eventpump.net.tunnel import TunnelHandshake, TunnelProtocol, refusal
from eventpump.options.connection import ProxySettings

ANSWER = b"HTTP/1.1 200 Connection established\r\nVia: 1.1 gateway\r\n\r\n"


def handshake(proxy: str = "proxy.test:3128", host: str = "ns.test", port: int = 443) -> TunnelHandshake:
    return TunnelHandshake(ProxySettings.parse(proxy), host, port)


def test_connect_request_names_the_service() -> None:
    """The request names the service, and carries no credentials where none were given."""
    assert handshake().request() == b"CONNECT ns.test:443 HTTP/1.1\r\nHost: ns.test:443\r\n\r\n"
    assert handshake(host="::1").request().startswith(b"CONNECT [::1]:443 HTTP/1.1\r\nHost: [::1]:443\r\n")


def test_connect_request_has_credentials_as_basic_authentication() -> None:
    """A username and password go as basic authentication, decoded from the URL and in UTF-8 (RFC 7617)."""
    request = handshake("http://j%C3%BCrgen:p%40ss:w@proxy.test").request().decode()
    token = base64.b64encode("jürgen:p@ss:w".encode()).decode()
    assert f"\r\nProxy-Authorization: Basic {token}\r\n\r\n" in request


@given(st.sampled_from([ANSWER, b"HTTP/1.0 200 OK\n\n", b"HTTP/1.1 299\r\n\r\n"]), st.data())
def test_tunnel_opens_when_the_answer_is_whole(answer: bytes, data: st.DataObject) -> None:
    """However an answer of success is cut, the tunnel is open with its last byte, and not before."""
    tunnel = handshake()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1))))
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert [tunnel.receive(piece) for piece in pieces] == [False] * len(cuts) + [True]


@pytest.mark.parametrize(
    ("status", "recovery"),
    [
        (301, Recovery.GIVE_UP),
        (400, Recovery.GIVE_UP),
        (403, Recovery.GIVE_UP),
        (404, Recovery.GIVE_UP),
        (408, Recovery.RECONNECT),
        (429, Recovery.RECONNECT),
        (500, Recovery.RECONNECT),
        (502, Recovery.RECONNECT),
        (503, Recovery.RECONNECT),
        (504, Recovery.RECONNECT),
        (599, Recovery.RECONNECT),
    ],
)
def test_tunnel_refused_by_the_proxy_is_final_or_retried(status: int, recovery: Recovery) -> None:
    """What a proxy holds against the request is final, and what may pass is worth another try; both name it."""
    with pytest.raises(ConnectionLostError, match=f"^the proxy proxy.test:3128 answered {status}") as caught:
        handshake().receive(b"HTTP/1.1 %d Whatever\r\nContent-Length: 3\r\n\r\nno\n" % status)
    assert caught.value.recovery is recovery
    assert str(refusal("who", status)).startswith(f"who answered {status}")


@pytest.mark.parametrize(
    ("proxy", "says"),
    [("proxy.test:3128", "asks for a username and password"), ("me:S3CRET@proxy.test:3128", "refused the credentials")],
)
def test_tunnel_refused_with_407_is_an_authentication_error(proxy: str, says: str) -> None:
    """407 is a permanent authentication error: credentials are missing or wrong, and are not shown."""
    with pytest.raises(AuthenticationError, match=says) as caught:
        handshake(proxy).receive(b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n")
    assert caught.value.recovery is Recovery.GIVE_UP
    assert "S3CRET" not in str(caught.value)
    assert base64.b64encode(b"me:S3CRET").decode() not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x16", "does not answer in HTTP"),
        (b"AMQP\x03\x01\x00\x00", "does not answer in HTTP"),
        (b"HTTP/2", "does not answer in HTTP"),
        (b"HTTP/1.1 OK\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 2000\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 200 " + b"x" * 70_000, "does not answer in HTTP"),
        (ANSWER + b"A", "more than an answer"),
    ],
)
def test_tunnel_answer_of_garbage_may_be_retried(data: bytes, says: str) -> None:
    """What is no answer of a proxy is reported as such at once, and is worth another try."""
    with pytest.raises(ConnectionLostError, match=f"^the proxy proxy.test:3128 .*{says}") as caught:
        handshake().receive(data)
    assert caught.value.recovery is Recovery.RECONNECT


def test_tunnel_without_an_answer_is_reported() -> None:
    """A proxy that hangs up is reported as such."""
    tunnel = handshake()
    assert not tunnel.receive(ANSWER[:-1])
    assert "closed the connection" in str(tunnel.receive_eof())


class Stream(asyncio.Transport):
    """A stream to a proxy that takes every byte."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads: list[str] = []
        self.is_cut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.reads.append("pause")

    def abort(self) -> None:
        self.is_cut = True


async def test_tunnel_that_is_open_is_not_read() -> None:
    """From the answer on, nothing is read, not even an end, until the stream is taken over."""
    stream, tunnel = Stream(), TunnelProtocol(handshake())
    tunnel.connection_made(stream)
    assert stream.written == handshake().request()
    tunnel.data_received(ANSWER[:20])
    assert stream.reads == []
    tunnel.data_received(ANSWER[20:])
    assert stream.reads == ["pause"]
    assert await tunnel.opened() is stream
    assert not stream.is_cut


@pytest.mark.parametrize("answer", [b"garbage", b""])
async def test_tunnel_that_failed_is_cut(answer: bytes) -> None:
    """A stream on which no tunnel was opened is dropped."""
    stream, tunnel = Stream(), TunnelProtocol(handshake())
    tunnel.connection_made(stream)
    if answer:
        tunnel.data_received(answer)
    else:
        tunnel.connection_lost(None)
    with pytest.raises(ConnectionLostError):
        await tunnel.opened()
    assert stream.is_cut


@given(st.lists(st.one_of(st.binary(), st.sampled_from([b"HTTP/1.1 ", b"200", b"\r\n", b"\r\n\r\n", b" "]))))
def test_tunnel_answer_of_any_bytes_has_a_verdict(pieces: list[bytes]) -> None:
    """Whatever a proxy sends, the verdict is a tunnel, an error of ours, or to wait for more."""
    tunnel = handshake()
    with contextlib.suppress(ServiceError):
        while pieces and not tunnel.receive(pieces.pop(0)):
            pass


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("interim", [INTERIM, b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n", b"HTTP/1.0 102\n\n"])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_tunnel_answer_after_interim_ones_is_read(interim: bytes, step: int) -> None:
    """1xx answers (RFC 9110, 15.2) before the final one are no answer, however they are cut."""
    tunnel, data = handshake(), interim * 3 + ANSWER
    verdicts = [tunnel.receive(data[at : at + step]) for at in range(0, len(data), step)]
    assert verdicts == [False] * (len(verdicts) - 1) + [True]


def test_tunnel_refused_after_interim_answers_raises() -> None:
    """What follows an interim answer is judged as ever."""
    with pytest.raises(ConnectionLostError, match="answered 403 Forbidden"):
        handshake().receive(INTERIM + b"HTTP/1.1 403 Forbidden\r\n\r\n")
    with pytest.raises(ConnectionLostError, match="does not answer in HTTP"):
        handshake().receive(INTERIM + b"SSH-2.0")
    with pytest.raises(ConnectionLostError, match="answered 101"):
        handshake().receive(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")


def test_tunnel_with_endless_interim_answers_is_given_up() -> None:
    """A proxy that sends nothing but interim answers is given up after 16, and tried again."""
    tunnel = handshake()
    assert not tunnel.receive(INTERIM * 16)
    with pytest.raises(ConnectionLostError, match="17 interim answers") as caught:
        tunnel.receive(INTERIM)
    assert caught.value.recovery is Recovery.RECONNECT
