"""The files of Event Hubs Capture: their names, and events as Avro records. The only import of fastavro, an extra."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, BinaryIO, Final

from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.types import Symbol, Timestamp
from eventpump.errors import CaptureFileError, ConfigurationError
from eventpump.eventhubs.events import STANDARD_PROPERTIES
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, SEQUENCE_NUMBER, SEQUENCE_NUMBER_EPOCH

DEFAULT_PATTERN: Final = "{Namespace}/{EventHub}/{PartitionId}/{Year}/{Month}/{Day}/{Hour}/{Minute}/{Second}"
"""The service's own pattern of file names, to which `.avro` is added."""

SUFFIX: Final = ".avro"

SCHEMA: Final[Mapping[str, Any]] = {
    "type": "record",
    "name": "EventData",
    "namespace": "Microsoft.ServiceBus.Messaging",
    "fields": [
        {"name": "SequenceNumber", "type": "long"},
        {"name": "Offset", "type": "string"},
        {"name": "EnqueuedTimeUtc", "type": "string"},
        {"name": "SystemProperties", "type": {"type": "map", "values": ["long", "double", "string", "bytes"]}},
        {"name": "Properties", "type": {"type": "map", "values": ["long", "double", "string", "bytes", "null"]}},
        {"name": "Body", "type": ["null", "bytes"]},
    ],
}
"""The form of a record, as the service writes it."""

_REQUIRED: Final = frozenset({"SequenceNumber", "Offset", "EnqueuedTimeUtc", "Body"})

_PARTS: Final[Mapping[str, str]] = {
    "Namespace": r"[^/]+?",
    "EventHub": r".+?",
    "PartitionId": r"[0-9]+",
    "Year": r"[0-9]{4}",
    "Month": r"[0-9]{2}",
    "Day": r"[0-9]{2}",
    "Hour": r"[0-9]{2}",
    "Minute": r"[0-9]{2}",
    "Second": r"[0-9]{2}",
}
_TIME_PARTS: Final = ("Year", "Month", "Day", "Hour", "Minute", "Second")

_US_TIME: Final = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4}) (\d{1,2}):(\d{2}):(\d{2})(?:\.(\d{1,7}))? ?([AaPp][Mm])?")
_ISO_DIGITS: Final = re.compile(r"(\.\d{6})\d+")

_STANDARD_NAMES: Final = {name.replace("_", "-"): name for name in STANDARD_PROPERTIES}
_TIMES: Final = frozenset({"absolute_expiry_time", "creation_time"})


@dataclass(frozen=True, slots=True, order=True)
class CaptureName:
    """What a file's name says. Files of a partition are ordered by it.

    Args:
        began: When the file's window began.
        namespace: The namespace, without the domain.
    """

    began: datetime
    name: str
    namespace: str
    hub: str
    partition_id: str


class NamePattern:
    """How Capture names files: a text with `{Namespace}`, `{EventHub}`, `{PartitionId}`, and the parts of a UTC time.

    Args:
        text: The pattern, as it is configured at the hub; without the suffix `.avro`.

    Raises:
        ConfigurationError: A part is missing, is there twice, or is unknown.
    """

    def __init__(self, text: str = DEFAULT_PATTERN) -> None:
        found = re.findall(r"\{(\w*)\}", text)
        if sorted(found) != sorted(_PARTS):
            expected = ", ".join(f"{{{part}}}" for part in _PARTS)
            raise ConfigurationError("pattern", f"must have each of {expected} once, and no other part: {text!r}")
        self.text = text
        pieces = re.split(r"\{(\w+)\}", text)
        form = "".join(
            f"(?P<{piece}>{_PARTS[piece]})" if number % 2 else re.escape(piece) for number, piece in enumerate(pieces)
        )
        self._form = re.compile(form + re.escape(SUFFIX))

    def name(self, namespace: str, hub: str, partition_id: str, began: datetime) -> str:
        """Return the name of the file of a window."""
        moment = began.astimezone(UTC)
        values = {"Namespace": namespace, "EventHub": hub, "PartitionId": partition_id, "Year": f"{moment.year:04}"}
        values |= {part: f"{getattr(moment, part.lower()):02}" for part in _TIME_PARTS[1:]}
        return self.text.format(**values) + SUFFIX

    def match(self, name: str) -> CaptureName | None:
        """Return what a name says; None if it is not of this pattern."""
        found = self._form.fullmatch(name)
        if found is None:
            return None
        try:
            began = datetime(*(int(found[part]) for part in _TIME_PARTS), tzinfo=UTC)  # type: ignore[arg-type,misc]  # six
        except ValueError:
            return None
        return CaptureName(began, name, found["Namespace"], found["EventHub"], found["PartitionId"])


# ----------------------------------------------------------------------------------------------- events as records


def record_of(raw: bytes) -> dict[str, Any]:
    """Return the record of an event.

    Annotations and standard properties are the system properties, under their AMQP names. Of a value that the form does
    not have, such as a UUID, it holds the text; a time is milliseconds since the Unix epoch. A body that is not data is
    JSON if it can be, and else text.
    """
    message = Message.decode(raw)
    annotations = {str(name): value for name, value in (message.message_annotations or {}).items()}
    number, offset = annotations.pop(SEQUENCE_NUMBER), annotations.pop(OFFSET)
    annotations.pop(SEQUENCE_NUMBER_EPOCH, None)  # of the number, which has a field of its own
    enqueued = annotations[ENQUEUED_TIME]
    assert isinstance(enqueued, Timestamp)
    system = {name: _value(value) for name, value in annotations.items() if value is not None}
    if message.properties is not None:
        for name in STANDARD_PROPERTIES:
            value = getattr(message.properties, name)
            if value is not None:
                system[name.replace("_", "-")] = _value(value)
    return {
        "SequenceNumber": number,
        "Offset": str(offset),
        "EnqueuedTimeUtc": _us_time(enqueued.to_datetime()),
        "SystemProperties": system,
        "Properties": {str(name): _value(value) for name, value in (message.application_properties or {}).items()},
        "Body": _body(message),
    }


def message_of(record: Mapping[str, Any]) -> bytes:
    """Return the event of a record, as an encoded message."""
    number, offset = record["SequenceNumber"], record["Offset"]
    system = dict(record.get("SystemProperties") or {})
    enqueued = system.pop(ENQUEUED_TIME, None)
    # The annotation is exact; the text has seconds only in the files of some years.
    moment = (
        Timestamp(enqueued)
        if isinstance(enqueued, int)
        else Timestamp.from_datetime(parse_time(record["EnqueuedTimeUtc"]))
    )
    annotations: dict[Any, Any] = {SEQUENCE_NUMBER: number, OFFSET: offset, ENQUEUED_TIME: moment}
    standard: dict[str, Any] = {}
    for name, value in system.items():
        known = _STANDARD_NAMES.get(name)
        if known is None:
            annotations[Symbol(name)] = value
        else:
            standard[known] = _standard(known, value)
    body = record["Body"]
    message = Message(body=None if body is None else Data((body,)), message_annotations=annotations)
    if record.get("Properties"):
        message.application_properties = dict(record["Properties"])
    if standard:
        message.properties = Properties(**standard)
    return message.encode()


def parse_time(text: str) -> datetime:
    """Parse the time of a record: in the local format of the United States, or ISO 8601. Without a zone it is UTC."""
    found = _US_TIME.fullmatch(text.strip())
    if found is None:
        moment = datetime.fromisoformat(_ISO_DIGITS.sub(r"\1", text.strip()))
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    month, day, year, hour, minute, second = map(int, found.groups()[:6])
    fraction = (found[7] or "").ljust(6, "0")[:6]
    if found[8] is not None:
        hour = hour % 12 + (12 if found[8].lower() == "pm" else 0)
    return datetime(year, month, day, hour, minute, second, int(fraction), tzinfo=UTC)


def _us_time(moment: datetime) -> str:
    hour = moment.hour % 12 or 12
    half = "AM" if moment.hour < 12 else "PM"
    return f"{moment.month}/{moment.day}/{moment.year} {hour}:{moment:%M:%S} {half}"


def _value(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, Timestamp):
        return int(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return str(int(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return bytes(value) if isinstance(value, bytes) else None if value is None else str(value)


def _standard(name: str, value: Any) -> Any:
    if name in _TIMES and isinstance(value, int):
        return Timestamp(value)
    if name in ("content_type", "content_encoding") and isinstance(value, str):
        return Symbol(value)
    if name == "user_id" and isinstance(value, str):
        return value.encode()
    return value


def _body(message: Message) -> bytes | None:
    body = message.body
    if body is None:
        return None
    if isinstance(body, Data):
        return b"".join(body.parts)
    value = body.value if isinstance(body, AmqpValue) else [item for each in body.parts for item in each]
    if isinstance(value, bytes):
        return bytes(value)
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    return text.encode()


# --------------------------------------------------------------------------------------------------------- the files


def write_file(file: BinaryIO, payloads: Iterable[bytes]) -> None:
    """Write a file with the events of encoded messages. Raises `ConfigurationError` if fastavro is not installed."""
    _fastavro().writer(file, _parsed_schema(), map(record_of, payloads))


def read_blocks(file: BinaryIO, name: str) -> Iterator[list[tuple[int, bytes]]]:
    """Read a file, block by block.

    Returns:
        An iterator over lists of events: their sequence numbers, which ascend, and encoded messages. A file without
        events has none.

    Raises:
        CaptureFileError: The file is truncated, or is not one of Capture, or its numbers do not ascend. Events before
            the fault were returned.
        ConfigurationError: fastavro is not installed.
    """
    fastavro = _fastavro()
    last = -1
    try:
        blocks = fastavro.block_reader(file)
        schema = blocks.writer_schema
        fields = (
            {field["name"] for field in schema["fields"]} if isinstance(schema, dict) and "fields" in schema else set()
        )
        if missing := sorted(_REQUIRED - fields):
            raise CaptureFileError(name, f"its records have no {', '.join(missing)}: it is not a file of Capture")
        for block in blocks:
            events: list[tuple[int, bytes]] = []
            try:
                for record in block:
                    number = record["SequenceNumber"]
                    if number <= last:
                        raise CaptureFileError(name, f"event {number} follows event {last}: the numbers must ascend")
                    events.append((number, message_of(record)))
                    last = number
            except Exception:
                if events:
                    yield events  # what precedes the fault in its block
                raise
            if events:
                yield events
    except CaptureFileError:
        raise
    except Exception as error:
        # A damaged file can make fastavro raise anything.
        after = "" if last < 0 else f" after event {last}"
        what = str(error) or type(error).__name__
        raise CaptureFileError(name, f"it is truncated or not an Avro file{after} ({what})") from error


@lru_cache(maxsize=1)
def _parsed_schema() -> Any:
    return _fastavro().parse_schema(dict(SCHEMA))


def _fastavro() -> Any:
    try:
        import fastavro
    except ImportError:
        raise ConfigurationError("capture", "requires fastavro: pip install 'eventpump[capture]'") from None
    return fastavro
