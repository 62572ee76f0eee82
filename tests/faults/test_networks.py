"""Networks in the way: proxies that drop, refuse or babble, certificates that are wrong, WebSockets that end anywhere.

What each comes to, and within which time, stands in `docs/networks.md`.
"""

from __future__ import annotations

import asyncio
import datetime
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from eventpump import (
    AuthenticationError,
    ConfigurationError,
    Emulator,
    EventData,
    EventProducer,
    EventPumpError,
    PartitionReader,
    RetryOptions,
)
from eventpump.errors import ConnectionLostError, Recovery
from eventpump.reports import LinkFailed
from eventpump.testing.proxy import FaultProxy
from tests.authority import Authority
from tests.faults.connect_proxy import BAD_GATEWAY, GARBAGE, ConnectProxy
from tests.faults.programs import (
    CONNECTION,
    HUB,
    IDLE_TIMEOUT,
    RECONNECT,
    RETRY,
    Publisher,
    Stage,
    emulator_of,
    run_for,
)

RECOVERY = 3.0
"""Seconds within which events flow again after a failure that is noticed at once, once the way is free again."""
REFUSAL = 2.0
"""Seconds within which an error comes that trying again would not mend."""

KINDS = ["tcp", "websocket"]


@pytest.fixture
async def emulator(nothing_left: None) -> AsyncIterator[Emulator]:
    """The service, with WebSockets beside TCP."""
    async with emulator_of(4, ws_port=0) as started:
        yield started


@pytest.fixture
async def proxy(nothing_left: None) -> AsyncIterator[ConnectProxy]:
    """A proxy without credentials, in a process of its own."""
    async with ConnectProxy() as started:
        yield started


@pytest.fixture
async def strict_proxy(nothing_left: None) -> AsyncIterator[ConnectProxy]:
    """A proxy that asks for credentials."""
    async with ConnectProxy(credentials="jürgen:p@ss:w") as started:
        yield started


def port_of(emulator: Emulator, kind: str) -> int:
    port = emulator.port if kind == "tcp" else emulator.ws_port
    assert port is not None
    return port


def way_to(emulator: Emulator, kind: str, **options: Any) -> dict[str, Any]:
    """Return the options of a client that connects that way."""
    return {
        **CONNECTION,
        "transport_type": kind,
        "custom_endpoint_address": f"127.0.0.1:{port_of(emulator, kind)}",
        **options,
    }


async def use(emulator: Emulator, options: dict[str, Any]) -> None:
    """Send an event and read it back."""
    async with EventProducer(emulator.connection_string, HUB, **{"retry": RETRY, **options}) as producer:
        await producer.send([EventData(b"there"), EventData(b"x" * 200_000)], partition_id="0")
    async with PartitionReader(emulator.connection_string, HUB, partition_id="0", end="@latest", **options) as reader:
        assert [event.body async for event in reader][-2:] == [b"there", b"x" * 200_000]


async def refused(
    emulator: Emulator,
    options: dict[str, Any],
    kind: type[EventPumpError] = ConnectionLostError,
    within: float = REFUSAL,
) -> str:
    """Try to send.

    Returns:
        The text of the error it ended with, in time.
    """
    async with EventProducer(emulator.connection_string, HUB, **options) as producer:
        with pytest.raises(kind) as caught:
            await asyncio.wait_for(producer.send(EventData(b"x"), partition_id="0"), within)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------- proxies


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_by_proxy_connects_to_nothing_else(
    emulator: Emulator, proxy: ConnectProxy, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named, a proxy is all that the client connects to, and it is asked for the service."""
    addresses: list[str] = []
    connect = socket.socket.connect

    def connecting(self: socket.socket, address: tuple[str, int]) -> None:
        addresses.append(f"{address[0]}:{address[1]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connecting)
    await use(emulator, way_to(emulator, kind, proxy=proxy.url))
    assert addresses == [proxy.address] * 2
    assert proxy.requests == [f"127.0.0.1:{port_of(emulator, kind)} 200"] * 2


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_by_proxy_sends_its_credentials(
    emulator: Emulator, strict_proxy: ConnectProxy, kind: str
) -> None:
    """A username and password in the proxy's URL open it, whatever characters they have."""
    await use(emulator, way_to(emulator, kind, proxy=strict_proxy.url_for("j%C3%BCrgen:p%40ss%3Aw")))
    assert strict_proxy.requests == [f"127.0.0.1:{port_of(emulator, kind)} 200"] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("credentials", "says"), [(None, "asks for a username and password"), ("j:S3CRET", "refused the credentials")]
)
async def test_connect_by_proxy_that_answers_407_gives_up(
    emulator: Emulator, strict_proxy: ConnectProxy, kind: str, credentials: str | None, says: str
) -> None:
    """A proxy that answers 407 is asked once, and the error says what it misses, without the password."""
    url = strict_proxy.url if credentials is None else strict_proxy.url_for(credentials)
    text = await refused(emulator, way_to(emulator, kind, proxy=url, retry=RETRY), AuthenticationError)
    assert text == f"the proxy {strict_proxy.address} {says} (407 Proxy Authentication Required)"
    assert len(strict_proxy.requests) == 1


async def test_host_by_proxy_that_answers_407_ends(
    stage: Stage, emulator: Emulator, strict_proxy: ConnectProxy
) -> None:
    """A host whose proxy does not let it through ends with that error, and does not go on trying."""
    host = stage.host("alone", stage.processor("alone"), **way_to(emulator, "websocket", proxy=strict_proxy.url))
    async with host:
        with pytest.raises(AuthenticationError, match="407"):
            await asyncio.wait_for(host.run(), REFUSAL)


@pytest.mark.parametrize("kind", KINDS)
async def test_proxy_of_the_environment_counts_with_trust_env(
    emulator: Emulator, strict_proxy: ConnectProxy, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`HTTPS_PROXY` counts with `trust_env`, and only then; not for what `NO_PROXY` has, nor where `proxy` is given."""
    monkeypatch.setenv("HTTPS_PROXY", strict_proxy.url_for("j%C3%BCrgen:p%40ss%3Aw"))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    await use(emulator, way_to(emulator, kind))
    assert strict_proxy.requests == []
    await use(emulator, way_to(emulator, kind, trust_env=True))
    assert strict_proxy.requests == [f"127.0.0.1:{port_of(emulator, kind)} 200"] * 2
    assert "407" in await refused(
        emulator, way_to(emulator, kind, trust_env=True, proxy=strict_proxy.url), AuthenticationError
    )
    monkeypatch.setenv("NO_PROXY", "elsewhere.test,127.0.0.1")
    await use(emulator, way_to(emulator, kind, trust_env=True))
    assert len(strict_proxy.requests) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (BAD_GATEWAY, "answered 502 Bad Gateway"),
        (GARBAGE, "does not answer in HTTP"),
        ("", "closed the connection instead of answering CONNECT"),
    ],
    ids=["502", "garbage", "hung up"],
)
async def test_connect_by_proxy_that_fails_is_retried(
    emulator: Emulator, proxy: ConnectProxy, kind: str, answer: str, says: str
) -> None:
    """502, garbage or no answer: passing, it delays what is sent; lasting, it is one error once the tries are over."""
    await proxy.say(answer, times=3)
    await asyncio.wait_for(use(emulator, way_to(emulator, kind, proxy=proxy.url)), RECOVERY)
    assert [each.split()[-1] for each in proxy.requests] == ["-", "-", "-", "200", "200"]
    await proxy.say(answer)
    retry = RetryOptions(max_retries=2, base_delay=0.01, max_delay=0.02)
    text = await refused(emulator, way_to(emulator, kind, proxy=proxy.url, retry=retry))
    assert text.startswith(f"the proxy {proxy.address} {says}")
    # More where a try came before its delay was over: such a try does not count.
    assert len(proxy.requests) >= 5 + 3


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_by_proxy_that_answers_403_gives_up(emulator: Emulator, proxy: ConnectProxy, kind: str) -> None:
    """403 is a policy: it is final."""
    await proxy.say("HTTP/1.1 403 Forbidden\r\n\r\n")
    text = await refused(emulator, way_to(emulator, kind, proxy=proxy.url, retry=RETRY))
    assert text == f"the proxy {proxy.address} answered 403 Forbidden"
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_by_proxy_that_is_silent_ends_in_time(emulator: Emulator, proxy: ConnectProxy, kind: str) -> None:
    """A proxy that never answers is an error within the operation time-out, which names it."""
    await proxy.say(None)
    options = way_to(emulator, kind, proxy=proxy.url, operation_timeout=0.4, retry=RetryOptions(max_retries=0))
    text = await refused(emulator, options, within=0.4 + REFUSAL)
    service = f"127.0.0.1:{port_of(emulator, kind)}"
    assert text == f"no answer from {service} through the proxy {proxy.address} within 0.4 s"


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_by_proxy_that_does_not_run_names_it(emulator: Emulator, proxy: ConnectProxy, kind: str) -> None:
    """A proxy that does not run is an error that names it, and the service behind one that does is its 502."""
    retry = RetryOptions(max_retries=0)
    nowhere = {**way_to(emulator, kind, proxy=proxy.url, retry=retry), "custom_endpoint_address": "127.0.0.1:1"}
    assert await refused(emulator, nowhere) == f"the proxy {proxy.address} answered 502 Bad Gateway"
    await proxy.kill()
    text = await refused(emulator, way_to(emulator, kind, proxy=proxy.url, retry=retry))
    assert text == f"cannot connect to the proxy {proxy.address}: Connection refused"


# --------------------------------------------------------------------------- connections that end on the way


@pytest.mark.parametrize("kind", KINDS)
async def test_host_by_proxy_that_is_killed_goes_on(
    stage: Stage, emulator: Emulator, proxy: ConnectProxy, kind: str
) -> None:
    """*No loss*, *no duplicate*, *recovery*: a proxy is killed with all it carries; by the next the host goes on."""
    processor = stage.processor("alone")
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def drops() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            for _ in range(2):
                failed = stage.count(LinkFailed)
                await proxy.kill()
                await stage.progress.until(lambda failed=failed: stage.count(LinkFailed) >= failed + 8, RECOVERY)  # type: ignore[misc]  # the default is the type
                await proxy.start()
                await stage.progress.until_flowing(publisher.partitions, RECOVERY)
            await publisher.stop()
            (await stage.verify(publisher)).check_no_duplicate()

        await run_for(stage.host("alone", processor, **way_to(emulator, kind, proxy=proxy.url)), drops)
    assert len(processor.opened) == 4


@pytest.mark.parametrize("kind", KINDS)
async def test_host_by_proxy_with_a_half_open_connection_goes_on(
    stage: Stage, emulator: Emulator, proxy: ConnectProxy, kind: str
) -> None:
    """*Recovery*, *no loss*: the proxy is there, and nothing comes through it: dropped in time, and opened again."""
    processor = stage.processor("alone")
    async with FaultProxy(port_of(emulator, kind)) as behind, Publisher(stage, 4) as publisher:
        publisher.start()
        options = {**way_to(emulator, kind, proxy=proxy.url), "custom_endpoint_address": behind.address}

        async def silence() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            behind.half_open()
            failed = stage.count(LinkFailed)
            await stage.progress.until(lambda: stage.count(LinkFailed) >= failed + 4, IDLE_TIMEOUT + 1.5)
            behind.restore()
            await stage.progress.until_flowing(publisher.partitions, RECONNECT)
            await publisher.stop()
            (await stage.verify(publisher)).check_no_duplicate()

        await run_for(stage.host("alone", processor, **options), silence)
    assert len(processor.opened) == 4


async def test_host_over_websocket_cut_in_a_frame_goes_on(
    stage: Stage, emulator: Emulator, seed: int, request: pytest.FixtureRequest
) -> None:
    """*No loss*, *no duplicate and no reorder*, *recovery*: cut in its handshake or any frame, the host goes on."""
    rng = random.Random(seed)
    processor = stage.processor("alone")
    async with FaultProxy(port_of(emulator, "websocket")) as way, Publisher(stage, 4) as publisher:
        publisher.start()
        options = {**way_to(emulator, "websocket"), "custom_endpoint_address": way.address}

        async def cuts() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            for number in range(20 if request.config.getoption("--long") else 4):
                accepted = way.connections_accepted
                if number == 1:
                    # Within the answer to the next handshake.
                    way.cut()
                    way.cut_after(rng.randrange(1, 100))
                    await asyncio.wait_for(way.until_accepted(accepted + 2), RECOVERY)
                else:
                    way.cut_after(rng.randrange(1, 20_000))
                    await asyncio.wait_for(way.until_accepted(accepted + 1), RECOVERY)
                await stage.progress.until_flowing(publisher.partitions, RECOVERY)
            await publisher.stop()
            (await stage.verify(publisher)).check_no_duplicate()

        await run_for(stage.host("alone", processor, **options), cuts)
    assert len(processor.opened) == 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(20 if metafunc.config.getoption("--long") else 1))


# ---------------------------------------------------------------------------------------------- certificates


def certificate(authority: Authority, folder: Path, *names: str) -> tuple[Path, Path]:
    """Issue a certificate.

    Returns:
        The files of it and its key.
    """
    made = authority.ca.issue_cert(*names)
    cert, key = folder / f"{names[0]}.pem", folder / f"{names[0]}.key"
    cert.write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    return cert, key


def _wrong_host(authority: Authority, _: Path) -> ssl.SSLContext:
    return authority.server("elsewhere.test")


def _expired(authority: Authority, _: Path) -> ssl.SSLContext:
    return authority.server("127.0.0.1", not_after=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))


def _self_signed(_: Authority, folder: Path) -> ssl.SSLContext:
    own = trustme.CA()
    own.cert_pem.write_to_path(str(folder / "own.pem"))
    own.private_key_pem.write_to_path(str(folder / "own.key"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "own.pem", folder / "own.key")
    return context


WRONG = pytest.mark.parametrize(
    ("make", "says"),
    [
        (_wrong_host, "IP address mismatch|not valid for '127.0.0.1'"),
        (_expired, "certificate has expired"),
        (_self_signed, "self-signed certificate|self signed certificate|unable to get local issuer"),
    ],
    ids=["wrong host", "expired", "self-signed"],
)


async def check_refused(tls: ssl.SSLContext, says: str, kind: str, **options: Any) -> None:
    """Check that a service's certificate is refused, once and for all."""
    async with emulator_of(1, ws_port=0, tls=tls) as emulator:
        way = way_to(emulator, kind, retry=RETRY, **options)
        async with EventProducer(emulator.connection_string, HUB, **way) as producer:
            with pytest.raises(ConnectionLostError, match=says) as caught:
                await asyncio.wait_for(producer.send(EventData(b"x"), partition_id="0"), REFUSAL)
        assert caught.value.recovery is Recovery.GIVE_UP
        assert str(caught.value).startswith(f"the certificate of 127.0.0.1:{port_of(emulator, kind)}")


@WRONG
@pytest.mark.parametrize("kind", KINDS)
async def test_connect_with_an_invalid_certificate_gives_up(
    authority: Authority, tmp_path: Path, make: Callable[[Authority, Path], ssl.SSLContext], says: str, kind: str
) -> None:
    """A certificate for another host, expired or self-signed is one error to give up on."""
    await check_refused(make(authority, tmp_path), says, kind, ca_file=authority.file)


@WRONG
async def test_connect_by_proxy_with_an_invalid_certificate_gives_up(
    authority: Authority,
    tmp_path: Path,
    make: Callable[[Authority, Path], ssl.SSLContext],
    says: str,
    proxy: ConnectProxy,
) -> None:
    """The same behind a proxy: it is the service's certificate that counts."""
    await check_refused(make(authority, tmp_path), says, "tcp", ca_file=authority.file, proxy=proxy.url)
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_by_proxy_has_tls_to_the_service(
    authority: Authority, strict_proxy: ConnectProxy, kind: str
) -> None:
    """Behind a proxy, TLS reaches from the client to the service."""
    async with emulator_of(1, ws_port=0, tls=authority.server("127.0.0.1")) as emulator:
        url = strict_proxy.url_for("j%C3%BCrgen:p%40ss%3Aw")
        await use(emulator, way_to(emulator, kind, ca_file=authority.file, proxy=url))
    assert len(strict_proxy.requests) == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_by_proxy_over_tls_verifies_the_proxy(
    authority: Authority, tmp_path: Path, nothing_left: None, kind: str
) -> None:
    """A proxy may be reached over TLS itself; its certificate is verified as the service's is, and distinguished."""
    tls = authority.server("127.0.0.1")
    async with emulator_of(1, ws_port=0, tls=tls) as emulator:
        options = way_to(emulator, kind, ca_file=authority.file, retry=RETRY)
        async with ConnectProxy(tls=certificate(authority, tmp_path, "127.0.0.1")) as good:
            await use(emulator, {**options, "proxy": good.url})
            assert len(good.requests) == 2
        async with ConnectProxy(tls=certificate(authority, tmp_path, "other.test")) as wrong:
            text = await refused(emulator, {**options, "proxy": wrong.url})
            assert text.startswith(f"the certificate of the proxy {wrong.address} was refused: ")
            assert wrong.requests == []


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_with_a_client_certificate(
    authority: Authority, tmp_path: Path, nothing_left: None, kind: str
) -> None:
    """A service that asks for a certificate gets it; nothing gets by it without one."""
    tls = authority.server("127.0.0.1")
    tls.verify_mode = ssl.CERT_REQUIRED
    authority.ca.configure_trust(tls)
    cert, key = certificate(authority, tmp_path, "client.test")
    async with emulator_of(1, ws_port=0, tls=tls) as emulator:
        options = way_to(emulator, kind, ca_file=authority.file)
        await use(emulator, {**options, "client_cert_file": cert, "client_key_file": key})
        retry = RetryOptions(max_retries=1, base_delay=0.01)
        await refused(emulator, {**options, "retry": retry})


async def test_connect_with_an_encrypted_client_key(authority: Authority, tmp_path: Path, nothing_left: None) -> None:
    """The key of a client's certificate may be encrypted; a password that does not fit is reported, and not shown."""
    tls = authority.server("127.0.0.1")
    tls.verify_mode = ssl.CERT_REQUIRED
    authority.ca.configure_trust(tls)
    cert, key = certificate(authority, tmp_path, "client.test")
    key.write_bytes(
        serialization.load_pem_private_key(key.read_bytes(), None).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"S3CRET"),
        )
    )
    async with emulator_of(1, ws_port=0, tls=tls) as emulator:
        options = way_to(emulator, "tcp", ca_file=authority.file, client_cert_file=cert, client_key_file=key)
        for wrong in ({}, {"client_key_password": "S3CRETX"}):
            text = await refused(emulator, {**options, **wrong}, ConfigurationError)
            assert text.startswith("client_cert_file: cannot be used with its key")
            assert "S3CRET" not in text
        await use(emulator, {**options, "client_key_password": "S3CRET"})
