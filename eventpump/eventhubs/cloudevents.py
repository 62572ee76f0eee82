"""CloudEvents 1.0 over AMQP, in binary and in structured mode."""

from __future__ import annotations

import base64
import binascii
import encodings
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from encodings.aliases import aliases
from typing import Any, Final, Literal

from eventpump.amqp.types import Timestamp
from eventpump.errors import DecodeError, EventError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.texts import excerpt

_STRUCTURED: Final = "application/cloudevents"
_JSON_FORMAT: Final = "application/cloudevents+json"
_PREFIXES: Final = ("cloudEvents_", "cloudEvents:")
_PREFIX_SIZE: Final = 12
_PARAMETER: Final = re.compile(
    r';\s*+(?:([^\s=;"]++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*+)))?(?:[^;"]|"(?:[^"\\]|\\.)*+")*+', re.DOTALL
)
"""A parameter of a media type: its name, and its value, quoted or not. What is neither is skipped."""
_CHARSET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_CHARSETS: Final = frozenset(
    (
        *("ascii", "utf_8", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le"),
        *("latin_1", *(f"iso8859_{part}" for part in (*range(2, 12), *range(13, 17))), "koi8_r", "koi8_u", "tis_620"),
        *(f"cp{page}" for page in (437, 850, 852, 855, 866, 874, 932, 949, 950, *range(1250, 1259))),
        *("big5", "big5hkscs", "gb2312", "gbk", "gb18030", "shift_jis", "shift_jis_2004", "shift_jisx0213"),
        *("euc_jp", "euc_jis_2004", "euc_jisx0213", "euc_kr", "iso2022_jp", "iso2022_jp_1", "iso2022_jp_2"),
        *("iso2022_jp_3", "iso2022_jp_ext", "iso2022_kr"),
    )
)
"""Python's names of the charsets that text can have. Other codecs are no charsets, or slow on bad input (punycode)."""
_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_NAME: Final = re.compile(r"[a-z0-9]+")
_NAMED: Final = ("id", "source", "type", "datacontenttype", "dataschema", "subject", "time", "specversion")
_INTEGER: Final = range(-(1 << 31), 1 << 31)


class _InvalidError(ValueError):
    """What is wrong with an event or a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEvent:
    """A CloudEvent 1.0. As the type of a handler's parameter, it is decoded from either mode.

    ::

        made = CloudEvent(id="7", source="/sensors/7", type="reading", data={"celsius": 21.5})
        await producer.send(made.to_event_data())
        ...
        found = CloudEvent.from_event(event)

    Args:
        id: Identifies the event among those of its source.
        source: Where it happened, a URI reference.
        type: The kind of event.
        data: What happened: bytes; what has a form in JSON, if `datacontenttype` is that of JSON or None; or text, if
            it is not. Default: None, no data.
        datacontenttype: The media type of the data; None stands for JSON, unless the data is bytes. Its `charset` is
            that of text in binary mode, UTF-8 without one; JSON is in UTF-8. Default: None.
        dataschema: The URI of the schema of the data. Default: None.
        subject: What of the source it is about. Default: None.
        time: When it happened, with a time zone. Default: None.
        extensions: Further attributes: names of lower-case letters and digits, values that are text, truth values,
            whole numbers of 32 bits, bytes or times. Default: none.

    Raises:
        EventError: An attribute is missing, or is not valid.
    """

    id: str
    source: str
    type: str
    data: Any = None
    datacontenttype: str | None = None
    dataschema: str | None = None
    subject: str | None = None
    time: datetime | None = None
    extensions: Mapping[str, str | bool | int | bytes | datetime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self._check()
        except _InvalidError as problem:
            raise EventError(f"not a CloudEvent: {problem}") from None

    def _check(self) -> None:
        for name in ("id", "source", "type"):
            if not _is_text(getattr(self, name)):
                raise _InvalidError(f"{name} must be text, and not empty")
        for name in ("datacontenttype", "dataschema", "subject"):
            if getattr(self, name) is not None and not _is_text(getattr(self, name)):
                raise _InvalidError(f"{name} must be text, and not empty; leave it out for none")
        time: Any = self.time
        if time is not None and (not isinstance(time, datetime) or time.tzinfo is None):
            raise _InvalidError("time must be a datetime with a time zone")
        given: Mapping[Any, Any] = self.extensions  # which nothing has checked yet
        for name, value in given.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise _InvalidError(f"an extension's name has lower-case letters and digits only, not {name!r:.40}")
            if name in _NAMED or name in ("data", "data_base64"):
                raise _InvalidError(
                    f"{name} is not an extension attribute but part of every CloudEvent; pass it as its own argument"
                )
            if not isinstance(value, str | bool | int | bytes | datetime):
                raise _InvalidError(f"the extension {name} must be text, a number, a truth value, bytes or a time")
            if isinstance(value, int) and value not in _INTEGER:
                raise _InvalidError(f"the extension {name} must be a number of 32 bits; give larger ones as text")
            if isinstance(value, datetime) and value.tzinfo is None:
                raise _InvalidError(f"the extension {name} must have a time zone")
        media = self.datacontenttype
        if not isinstance(self.data, str) or media is None or _is_json(media):
            _body(self.data, media)  # other text has a form in each mode, unless its charset lacks one in binary mode

    @property
    def attributes(self) -> dict[str, Any]:
        """All attributes that are set, by their names, `specversion` included."""
        named = {name: getattr(self, name) for name in _NAMED if name != "specversion"}
        return {
            "specversion": "1.0",
            **{name: value for name, value in named.items() if value is not None},
            **self.extensions,
        }

    def to_event_data(self, mode: Literal["binary", "structured"] = "binary") -> EventData:
        """Return an event to send.

        Args:
            mode: "binary": the data is the body, its media type the content type, and the other attributes are
                application properties `cloudEvents:` and the name. "structured": the body is all of it in JSON.
                Default: "binary".

        Raises:
            EventError: There is no such mode, or an attribute or the data has no form in it: for example, the charset
                of the data's type has not all characters of the text.
        """
        if mode not in ("binary", "structured"):
            raise EventError('the mode must be "binary" or "structured"')
        try:
            return self._structured() if mode == "structured" else self._binary()
        except _InvalidError as problem:
            raise EventError(str(problem)) from None

    def _structured(self) -> EventData:
        whole = {name: _canonical(value) for name, value in self.attributes.items()}
        if isinstance(self.data, bytes):
            whole["data_base64"] = base64.b64encode(self.data).decode()
        elif self.data is not None:
            whole["data"] = self.data
        return EventData(_dumped(whole), content_type=f"{_JSON_FORMAT}; charset=utf-8")

    def _binary(self) -> EventData:
        body, content_type = _body(self.data, self.datacontenttype)
        properties = {
            # A time as text, because an AMQP timestamp is cut to milliseconds.
            f"cloudEvents:{name}": _canonical(value) if isinstance(value, datetime) else value
            for name, value in self.attributes.items()
            if name != "datacontenttype"
        }
        standard = {} if content_type is None else {"content_type": content_type}
        return EventData(body, properties=properties, **standard)

    @classmethod
    def from_event(cls, event: ReceivedEvent) -> CloudEvent:
        """Return the CloudEvent in a received event, of either mode.

        The prefixes `cloudEvents:` and `cloudEvents_` are both read, and attributes in AMQP's own types or as text.

        Raises:
            DecodeError: It is not a CloudEvent 1.0.
        """
        try:
            if (event.content_type or "").lower().startswith(_STRUCTURED):
                return _from_structured(event)
            return _from_binary(event)
        except DecodeError:
            raise  # of a codec: it names the event, and has the codec's own error chained
        except (EventError, _InvalidError) as problem:
            raise decode_error(event, "a CloudEvent", str(problem)) from None


def decode_error(event: ReceivedEvent, wanted: str, problem: str) -> DecodeError:
    """Return the error for an event that is not what it should be."""
    origin = event.origin
    partition_id = origin[1] if isinstance(origin, tuple) and len(origin) > 1 else None
    try:
        number: int | None = event.sequence_number
    except EventError:
        number = None
    named = partition_id if isinstance(partition_id, str) else None
    return DecodeError(named, number, excerpt(problem), wanted)


def _from_structured(event: ReceivedEvent) -> CloudEvent:
    media = (event.content_type or "").lower().partition(";")[0].strip()
    if media != _JSON_FORMAT:
        raise _InvalidError(f"the structured format {media} cannot be read; only {_JSON_FORMAT} can")
    whole = event.body_as_json()
    if not isinstance(whole, dict):
        raise _InvalidError("the JSON is not an object")
    attributes = {name: value for name, value in whole.items() if value is not None}
    data = attributes.pop("data", None)
    encoded = attributes.pop("data_base64", None)
    if encoded is not None:
        if data is not None:
            raise _InvalidError("it has both data and data_base64")
        try:
            data = base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise _InvalidError("data_base64 is not in base64") from None
    return _made(attributes, data)


def _from_binary(event: ReceivedEvent) -> CloudEvent:
    properties: Mapping[Any, Any] = event.properties  # a sender's names may be of any type
    named = [name for name in properties if isinstance(name, str) and name.startswith(_PREFIXES)]
    if not named:
        raise _InvalidError("it has no application property cloudEvents:specversion, and is not in structured mode")
    if len({name[:_PREFIX_SIZE] for name in named}) > 1:
        raise _InvalidError("its application properties have both prefixes, cloudEvents: and cloudEvents_")
    attributes = {name[_PREFIX_SIZE:]: value for name in named if (value := properties[name]) is not None}
    content_type, body = event.content_type, event.body
    if content_type is not None:
        attributes["datacontenttype"] = content_type
    data: Any = body
    if not body:
        data = None
    elif content_type is not None and _is_json(content_type):
        data = event.body_as_json()
    elif content_type is not None and content_type.lower().startswith("text/"):
        data = event.body_as_str(_charset(content_type))
    return _made(attributes, data)


def _made(attributes: dict[str, Any], data: Any) -> CloudEvent:
    version = attributes.pop("specversion", None)
    if version != "1.0":
        raise _InvalidError(
            "it has no specversion" if version is None else f"its specversion {version!r:.20} is not 1.0"
        )
    for name in ("id", "source", "type"):
        if name not in attributes:
            raise _InvalidError(f"it has no {name}")
    time = attributes.pop("time", None)
    named = {name: attributes.pop(name) for name in _NAMED if name in attributes}
    extensions = {name: _native(value) for name, value in attributes.items()}
    return CloudEvent(**named, time=None if time is None else _moment(time), data=data, extensions=extensions)


def _native(value: Any) -> Any:
    """Return the value of an extension without AMQP's or JSON's own types."""
    if isinstance(value, Timestamp):
        return _moment(value)
    if isinstance(value, bool | bytes | str):
        return value
    return int(value) if isinstance(value, int) else value


def _moment(value: Any) -> datetime:
    try:
        if isinstance(value, Timestamp):
            return value.to_datetime()
        if isinstance(value, int) and not isinstance(value, bool):
            # The official Python package sends milliseconds as a plain number.
            return Timestamp(value).to_datetime()
        if isinstance(value, str):
            found = datetime.fromisoformat(value.upper())
            if found.tzinfo is not None:
                return found
    except (ValueError, OverflowError):
        pass
    raise _InvalidError("time is neither a timestamp nor text as in 2026-01-31T12:00:00Z")


def _canonical(value: Any) -> Any:
    """Return an attribute as it is in JSON."""
    if isinstance(value, datetime):
        try:
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        except OverflowError:
            raise _InvalidError("a time must be in the years 1 to 9999 in UTC too") from None
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _body(data: Any, content_type: str | None) -> tuple[bytes, str | None]:
    """Return data as a body, with its media type."""
    if data is None:
        return b"", content_type
    if isinstance(data, bytes):
        return data, content_type
    if content_type is None or _is_json(content_type):
        return _dumped(data).encode(), content_type or "application/json"
    if isinstance(data, str):
        try:
            return data.encode(_charset(content_type)), content_type
        except UnicodeError as error:
            raise _InvalidError(
                f"the data cannot be written as {excerpt(content_type, 80)}: {error.args[-1]}"
            ) from None
    raise _InvalidError(
        f"data of the type {excerpt(content_type, 80)} must be bytes or text, not {type(data).__name__}"
    )


def _dumped(value: Any) -> str:
    try:
        text = _JSON.encode(value)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _InvalidError(f"data has no form in JSON: {error}") from None
    return text


def _charset(content_type: str) -> str:
    """Return the encoding of text of a media type. Raises `_InvalidError` if there is none of that name."""
    place = content_type.find(";")
    while 0 <= place < len(content_type):
        found = _PARAMETER.match(content_type, place)
        if found is None:  # a quoted string that does not end
            raise _InvalidError("its type has no clear charset: a quoted parameter does not end; read `event.body`")
        if found[1] is not None and found[1].lower() == "charset":
            name = found[3] if found[2] is None else re.sub(r"\\(.)", r"\1", found[2], flags=re.DOTALL)
            if _CHARSET_NAME.fullmatch(name):
                # Not by `codecs.lookup`, which remembers every name that it does not know.
                normal = encodings.normalize_encoding(name).lower()
                known = aliases.get(normal, normal.replace("windows_", "cp"))
                if known in _CHARSETS:
                    return known
            raise _InvalidError(f"the charset {excerpt(name, 40)!r} of its type is not known; read `event.body`")
        place = found.end()
    return "utf-8"


def _is_json(content_type: str) -> bool:
    if content_type == "application/json":
        return True
    media = content_type.lower().partition(";")[0].strip()
    return media.endswith(("/json", "+json"))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
