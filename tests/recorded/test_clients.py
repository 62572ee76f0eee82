"""Our client, and azure-eventhub, make of recorded frames what the service meant: the other direction of the replay."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from azure.eventhub import EventData as AzureEventData
from azure.eventhub.aio import EventHubConsumerClient, EventHubProducerClient
from azure.eventhub.exceptions import EventHubError

from eventpump.clients.connection import make_transport
from eventpump.options.connection import connection_settings
from tests.recorded import FOLDER, Exchange, exchanges
from tests.recorded.clients import Outcome, made_of, reported
from tests.recorded.frames import HUB
from tests.recorded.service import TIME_MS, RecordedService
from tests.ways import Way, over_both

_DOCUMENT = tomllib.loads((FOLDER / "reported.toml").read_text(encoding="utf-8"))
ERRORS: Mapping[str, Mapping[str, Any]] = {name: row for row in _DOCUMENT["error"] for name in row["exchanges"]}
UNFIT: Mapping[str, Mapping[str, Any]] = {row["exchange"]: row for row in _DOCUMENT["unfit"]}
PATIENCE = 20.0
BY_SDK = ("put-token-wrong-signature", "put-token-unknown-hub", "stolen")
"""One exchange for each error that azure-eventhub reports; it takes a second for each."""


def connection_string(service: RecordedService, *, is_tls: bool = False) -> str:
    text = f"Endpoint=sb://127.0.0.1:{service.port};SharedAccessKeyName=name;SharedAccessKey=c2VjcmV0"
    return text if is_tls else f"{text};UseDevelopmentEmulator=true"


def fitting(way: str) -> list[Exchange]:
    """Return the exchanges that can be played to our client."""
    return [each for each in exchanges() if way not in UNFIT.get(each.name, {}).get("ways", ())]


async def played(exchange: Exchange, way: Way) -> tuple[Outcome, RecordedService]:
    async with RecordedService.serve(exchange, way.tls) as service:
        text = connection_string(service, is_tls=way.tls is not None)
        transport = make_transport(connection_settings(text, HUB, **way.options))
        try:
            async with asyncio.timeout(PATIENCE):
                return await made_of(exchange, transport), service
        finally:
            await transport.aclose()


def problems_of(exchange: Exchange, outcome: Outcome, service: RecordedService) -> list[str]:
    """Return in what the outcome is not what was meant."""
    found = [f"{exchange.name}: {error!r}" for error in service.problems]
    if service.left:
        found.append(f"{exchange.name}: {[frame.name for frame in service.left]} of the service were not played")
    row = ERRORS.get(exchange.name)
    if row is None:
        if outcome.error is not None:
            found.append(f"{exchange.name}: {outcome.error}")
    elif outcome.error is None or outcome.error[0] != row["ours"] or not outcome.error[1].startswith(row["text"]):
        found.append(f"{exchange.name}: {outcome.error} in place of {row['ours']}: {row['text']}")
    for ours, theirs in zip(outcome.events, reported(exchange), strict=True):
        found += [
            f"{exchange.name}: {key} is {ours[key]!r}, for azure-eventhub {theirs[key]!r}"
            for key in theirs
            if ours[key] != theirs[key]
        ]
    facts = outcome.facts or {}
    wanted = FACTS.get("partition_id" if "partition_id" in facts else "name" if "name" in facts else "", {})
    found += [f"{exchange.name}: {key} is {facts.get(key)!r}" for key in wanted if str(facts.get(key)) != wanted[key]]
    if facts.get("max_message_size", 1_048_576) != 1_048_576:
        found.append(f"{exchange.name}: at most {facts['max_message_size']} bytes")
    return found


FACTS: Mapping[str, Mapping[str, str]] = {
    "name": {"name": HUB, "created_at": "2025-05-01 12:00:00+00:00", "partition_ids": "('0', '1')"},
    "partition_id": {
        "hub": HUB,
        "partition_id": "0",
        "beginning_sequence_number": "-1",
        "last_enqueued_sequence_number": "-1",
        "last_enqueued_offset": "-1",
        "is_empty": "True",
    },
}
"""What the recorded answers of $management say, as azure-eventhub names it."""


@over_both()
@pytest.mark.parametrize("kind", sorted({each.kind for each in exchanges()}))
async def test_our_client_reads_recorded_frames_as_the_sdk_does(kind: str, way: Way) -> None:
    """Played the service's frames of an exchange, our client takes all of them: it succeeds, or fails with the error
    and the text that the service meant, and has of each event, of the hub and of the partition what azure-eventhub
    has."""
    found: list[str] = []
    for exchange in fitting(way.name):
        if exchange.kind == kind:
            found += problems_of(exchange, *await played(exchange, way))
    assert found == []


def test_what_does_not_fit_is_named_with_its_reason() -> None:
    """An exchange that is not played is named with the ways and the reason; each named one is an exchange."""
    names = {each.name for each in exchanges()}
    assert UNFIT.keys() <= names
    assert ERRORS.keys() <= names
    assert all(row["why"] and set(row["ways"]) <= {"native", "uamqp"} for row in UNFIT.values())
    assert len(fitting("native")) >= 150
    assert len(fitting("uamqp")) >= 148


@pytest.mark.parametrize("name", BY_SDK)
async def test_the_sdk_reports_what_is_written_down(name: str) -> None:
    """azure-eventhub itself, played the same frames, raises what the data says of it."""
    exchange = next(each for each in exchanges() if each.name == name)
    row = ERRORS[name]
    async with RecordedService.serve(exchange) as service, asyncio.timeout(PATIENCE):
        if name == "stolen":
            error = await _stolen(connection_string(service))
        else:
            producer = EventHubProducerClient.from_connection_string(
                connection_string(service), eventhub_name=HUB, retry_total=0
            )
            async with producer:
                with pytest.raises(EventHubError) as caught:
                    await producer.send_batch([AzureEventData("x")])
            error = caught.value
    assert type(error).__name__ == row["sdk"]
    assert re.match(re.escape(row.get("sdk_text", row["text"])), str(error))


async def _stolen(text: str) -> Exception:
    """Return the error of a consumer that loses its partition."""
    consumer = EventHubConsumerClient.from_connection_string(text, "$Default", eventhub_name=HUB, retry_total=0)
    ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def on_event(*_: object) -> None:
        """No event comes."""

    async def on_error(_: object, error: Exception) -> None:
        if not ended.done():
            ended.set_result(error)

    async with consumer:
        receiving = asyncio.create_task(consumer.receive(on_event, partition_id="0", on_error=on_error))
        error = await ended
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
    return error


def test_times_of_payloads_are_one_moment() -> None:
    """The moment that the recorded times are replaced by is the one that facts and events are compared with."""
    assert str(TIME_MS) == "1746100800000"
