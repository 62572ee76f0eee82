"""Idempotent producers whose state at the service has expired for lack of use."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from eventpump import (
    Emulator,
    EventData,
    EventProducer,
    PartitionReader,
    PublishOutcomeUnknownError,
    SqlitePublisherStateStore,
)
from eventpump.emulator.ledger import ProducerRetention
from eventpump.errors import ProducerStateLostError, RequestRefusedError

HUB = "telemetry"
ONE = ProducerRetention(count=1)


def producer_of(emulator: Emulator, store: Path | None, **options: Any) -> EventProducer:
    if store is not None:
        options |= {"name": "feed", "state_store": SqlitePublisherStateStore(store)}
    return EventProducer(emulator.connection_string, HUB, idempotent=True, **options)


async def send(producer: EventProducer, body: str) -> None:
    await producer.send([EventData(body)], partition_id="0")


async def crowd_out(emulator: Emulator) -> None:
    """Publish as another producer, which takes the one place there is."""
    async with producer_of(emulator, None) as other:
        await send(other, "other")


async def bodies(emulator: Emulator) -> list[str]:
    async with PartitionReader(emulator.connection_string, HUB, partition_id="0", end="@latest") as reader:
        return [event.body_as_str() async for event in reader]


@pytest.mark.parametrize("cut", [False, True], ids=["on its link", "after a cut"])
@pytest.mark.parametrize("has_store", [False, True], ids=["unnamed", "named"])
async def test_send_after_the_state_expired_raises_producer_state_lost(
    tmp_path: Path, cut: bool, has_store: bool
) -> None:
    """It fails with `ProducerStateLostError` once it has asked by attaching, and nothing more of it is stored.

    A link that lives gets the refusal of its message first, which is not stored either.
    """
    store = tmp_path / "states.sqlite" if has_store else None
    async with Emulator({HUB: 1}, producer_retention=ONE) as emulator:
        producer = producer_of(emulator, store)
        await send(producer, "0")
        await crowd_out(emulator)
        if cut:
            emulator.drop_connections()
        if not cut:
            with pytest.raises(RequestRefusedError, match=r"not known to this partition.*the events are not stored"):
                await send(producer, "1")
        for _ in range(2):
            with pytest.raises(ProducerStateLostError):
                await send(producer, "1")
        # What was sent on a connection that was cut stays in doubt: the state to settle it is gone.
        with contextlib.suppress(PublishOutcomeUnknownError) if cut else contextlib.nullcontext():
            await producer.aclose()
        assert await bodies(emulator) == ["0", "other"]


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
async def test_start_after_the_state_expired_needs_a_new_id(tmp_path: Path, on_disk: bool) -> None:
    """A start with the stored state fails until it may take a new id; then it goes on counting from its mark."""
    store = tmp_path / "states.sqlite"
    data = tmp_path / "hubs" if on_disk else None
    async with Emulator({HUB: 1}, producer_retention=ONE, data=data) as emulator:
        async with producer_of(emulator, store) as producer:
            await send(producer, "0")
            await send(producer, "1")
        await crowd_out(emulator)
        if on_disk:
            await emulator.restart()
        with pytest.raises(ProducerStateLostError):
            async with producer_of(emulator, store) as producer:
                await send(producer, "2")
        async with producer_of(emulator, store, on_state_lost="new") as producer:
            known = await producer.get_partition_publishing_properties("0")
            assert known.events_published == 2
            await send(producer, "2")
        assert await bodies(emulator) == ["0", "1", "other", "2"]
