"""azure-eventhub against what goes wrong: keys, names, lost links and connections (protocol.md 2.4, 3.3, 9, 10)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from eventpump import Emulator, EventData, EventProducer, PartitionReader
from eventpump.emulator.faults import CloseConnection, DetachLink, DropConnection, LinkRole
from tests.interop.peers.driver import AzurePeer, event
from tests.interop.peers.lines import PeerError
from tests.interop.reading import PARTITIONS
from tests.support.reading import read_partition

pytestmark = pytest.mark.asyncio(loop_scope="session")

# What is refused stays refused: its four tries with 12 s of back-off between them would only take time.
ONCE: dict[str, Any] = {"retry_total": 0, "retry_backoff_factor": 0}


async def refusal(doing: Awaitable[object]) -> PeerError:
    with pytest.raises(PeerError) as raised:
        await doing
    return raised.value


async def test_azure_with_a_wrong_key_raises_authentication_error(
    emulator: Emulator, azure: AzurePeer, hub: str
) -> None:
    """With a wrong key, or one of no rule, everything raises AuthenticationError, and no key is in it."""
    wrong = emulator.connection_string_for("RootManageSharedAccessKey", "WRONG_KEY_VALUE")
    nobody = emulator.connection_string_for("Nobody", "SAS_KEY_VALUE")
    producer = await azure.producer(wrong, hub, **ONCE)
    consumer = await azure.consumer(wrong, hub, client=ONCE, partition_id="0")
    unknown = await azure.producer(nobody, hub, **ONCE)
    errors = await asyncio.gather(
        refusal(producer.hub_properties()),
        refusal(producer.send([event(b"x")], "event")),
        refusal(unknown.hub_properties()),
        consumer.error(),
    )
    for error in errors:
        assert error.kind == "AuthenticationError", error
        assert "WRONG_KEY_VALUE" not in error.text
        assert "SAS_KEY_VALUE" not in error.text
    assert [await read_partition(emulator.connection_string, hub, partition) for partition in PARTITIONS] == [[]] * 4


async def test_azure_with_unknown_names_raises_an_error(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """An unknown hub is refused at the token (put-token-unknown-hub), an unknown partition when it is asked for."""
    nowhere = await azure.producer(emulator.connection_string, "nowhere", **ONCE)
    reader = await azure.consumer(emulator.connection_string, "nowhere", client=ONCE, partition_id="0")
    right = await azure.producer(emulator.connection_string, hub, **ONCE)
    *unknown_hub, partition = await asyncio.gather(
        refusal(nowhere.send([event(b"x")], "event")),
        refusal(nowhere.hub_properties()),
        reader.error(),
        refusal(right.partition_properties("9")),
    )
    # As its live tests expect it of the service. The SDK drops the description of a refused token.
    for error in unknown_hub:
        assert error.kind == "AuthenticationError", error
    assert (partition.kind, "Status code: 400" in partition.text) == ("ConnectError", True)


HARM: dict[str, Callable[[Emulator], object]] = {
    "all cut": lambda emulator: emulator.drop_connections(),
    "link detached": lambda emulator: emulator.faults.add(DetachLink(), role=LinkRole.CONSUMER),
    "connection closed": lambda emulator: emulator.faults.add(CloseConnection(), role=LinkRole.CONSUMER),
    "cut at a delivery": lambda emulator: emulator.faults.add(DropConnection(), role=LinkRole.CONSUMER, after=5),
}


async def test_azure_consumer_recovers_from_a_lost_link(azure: AzurePeer) -> None:
    """After a lost link or connection its consumer reads on after what it gave its user: nothing lost or twice."""

    async def recover(harm: str) -> None:
        async with (
            Emulator({"telemetry": 1}) as emulator,
            EventProducer(emulator.connection_string, "telemetry") as producer,
        ):
            await producer.send([EventData(f"{n}") for n in range(10)], partition_id="0")
            consumer = await azure.consumer(
                emulator.connection_string, "telemetry", partition_id="0", starting_position="-1"
            )
            await consumer.receive(10)
            HARM[harm](emulator)
            await producer.send([EventData(f"{n}") for n in range(10, 20)], partition_id="0")
            received = await consumer.receive(20)
            assert [each.data.decode() for each in received] == [f"{n}" for n in range(20)], harm
            assert consumer.notes.errors == [], harm

    await asyncio.gather(*map(recover, HARM))


async def test_azure_producer_recovers_from_cut_connections(own_emulator: Emulator, azure: AzurePeer) -> None:
    """After all connections are cut its producer sends again on a new one."""
    producer = await azure.producer(own_emulator.connection_string, "telemetry")
    await producer.send([event("before")], "event", partition_id="0")
    own_emulator.drop_connections()
    await producer.send([event("after")], "event", partition_id="0")
    stored = [received.body for received in await read_partition(own_emulator.connection_string, "telemetry", "0")]
    assert stored == [b"before", b"after"]


async def test_azure_send_whose_acknowledgement_is_lost_is_repeated(own_emulator: Emulator, azure: AzurePeer) -> None:
    """Where the connection is cut after storing and before the answer, the SDK's retry stores the event twice."""
    producer = await azure.producer(own_emulator.connection_string, "telemetry")
    await producer.send([event("before")], "event", partition_id="0")
    own_emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER)
    await producer.send([event("twice")], "event", partition_id="0")
    stored = [received.body for received in await read_partition(own_emulator.connection_string, "telemetry", "0")]
    assert stored == [b"before", b"twice", b"twice"]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[ssl.SSLContext, str]:
    """A server certificate for this machine, and the file of the authority that signed it."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return context, str(path)


async def test_azure_connects_over_tls(azure: AzurePeer, certificate: tuple[ssl.SSLContext, str]) -> None:
    """Over TLS, with its verification on, it sends and receives; and our reader too."""
    context, authority = certificate
    async with Emulator({"telemetry": 1}, tls=context) as emulator:
        # It takes a port other than 5671 only so, where TLS is on.
        over_tls: dict[str, Any] = {
            "connection_verify": authority,
            "custom_endpoint_address": f"sb://127.0.0.1:{emulator.port}",
            "transport_type": "Amqp",
        }
        producer = await azure.producer(emulator.connection_string, "telemetry", **over_tls)
        await producer.send([event(b"x" * 200_000)], "event", partition_id="0")
        consumer = await azure.consumer(
            emulator.connection_string,
            "telemetry",
            client=over_tls,
            partition_id="0",
            starting_position="-1",
        )
        (received,) = await consumer.receive(1)
        assert received.data == b"x" * 200_000
        async with PartitionReader(
            emulator.connection_string, "telemetry", partition_id="0", ca_file=authority
        ) as reader:
            assert [each.body for each in await reader.read()] == [b"x" * 200_000]
