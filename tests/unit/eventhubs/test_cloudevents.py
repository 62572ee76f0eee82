"""CloudEvents: both modes there and back, what is refused, and that other implementations read the same."""

from __future__ import annotations

import encodings
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from time import thread_time
from typing import Any

import pytest
from azure.core.messaging import CloudEvent as AzureCloudEvent
from hypothesis import example, given
from hypothesis import strategies as st

from eventpump.amqp.message import Data, Message
from eventpump.amqp.types import Timestamp
from eventpump.errors import DecodeError, EventError
from eventpump.eventhubs.cloudevents import CloudEvent
from eventpump.eventhubs.events import EventData, ReceivedEvent

NOON = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


def _received(sent: EventData) -> ReceivedEvent:
    """What a receiver gets of it."""
    properties, body = dict(sent.properties), sent.body
    standard = dict(sent.standard or {})
    return ReceivedEvent.build(
        body, offset="7", sequence_number=7, enqueued_time=NOON, properties=properties or None, **standard
    )


def _bare(body: bytes = b"", *, content_type: str | None = None, **properties: Any) -> ReceivedEvent:
    named = {name.replace("__", ":"): value for name, value in properties.items()}
    standard: dict[str, Any] = {} if content_type is None else {"content_type": content_type}
    return ReceivedEvent.build(
        body, offset="7", sequence_number=7, enqueued_time=NOON, properties=named or None, **standard
    )


def _event(**changes: Any) -> CloudEvent:
    return CloudEvent(**{"id": "1", "source": "/sensors/7", "type": "reading", **changes})


_TEXT = st.text(st.characters(codec="utf-8"), min_size=1)
_JSON = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)
_DATA = st.one_of(
    st.tuples(st.none(), st.none()),
    st.tuples(_JSON, st.sampled_from(["application/json", "application/vnd.a+json; charset=utf-8"])),
    st.tuples(st.binary(min_size=1), st.sampled_from(["application/octet-stream", "image/png"])),
    st.tuples(_TEXT, st.sampled_from(["text/plain", "text/xml; charset=utf-8"])),
)
_NAMES = st.from_regex(r"ext[a-z0-9]{1,10}", fullmatch=True)
_VALUES = _TEXT | st.booleans() | st.integers(-(2**31), 2**31 - 1)


@given(
    texts=st.tuples(_TEXT, _TEXT, _TEXT),
    subject=st.none() | _TEXT,
    time=st.none() | st.datetimes(timezones=st.just(UTC)),
    extensions=st.dictionaries(_NAMES, _VALUES, max_size=3),
    data=_DATA,
    mode=st.sampled_from(["binary", "structured"]),
)
def test_what_is_sent_is_what_is_read(
    texts: tuple[str, str, str],
    subject: str | None,
    time: datetime | None,
    extensions: dict[str, Any],
    data: tuple[Any, str | None],
    mode: Any,
) -> None:
    """In either mode, with every kind of data and attribute."""
    made = CloudEvent(
        id=texts[0],
        source=texts[1],
        type=texts[2],
        subject=subject,
        time=time,
        extensions=extensions,
        data=data[0],
        datacontenttype=data[1],
    )
    assert CloudEvent.from_event(_received(made.to_event_data(mode))) == made


def test_binary_mode_is_properties_and_the_body() -> None:
    """The data as it is, its type as the content type, the rest as application properties."""
    sent = _event(data={"celsius": 21.5}, time=NOON, subject="a", extensions={"traceparent": "00-1"}).to_event_data()
    assert sent.body == b'{"celsius":21.5}'
    assert sent.standard == {"content_type": "application/json"}
    assert sent.properties == {
        "cloudEvents:specversion": "1.0",
        "cloudEvents:id": "1",
        "cloudEvents:source": "/sensors/7",
        "cloudEvents:type": "reading",
        "cloudEvents:subject": "a",
        "cloudEvents:time": "2026-01-31T12:00:00.123456Z",
        "cloudEvents:traceparent": "00-1",
    }


def test_both_prefixes_and_native_types_are_read() -> None:
    """Other senders write `cloudEvents_`, timestamps, numbers and bytes."""
    milliseconds = int(NOON.timestamp() * 1000)
    for time in (Timestamp(milliseconds), milliseconds, "2026-01-31T12:00:00.123Z", "2026-01-31t13:00:00.123+01:00"):
        found = CloudEvent.from_event(
            _bare(
                b"x",
                content_type="image/png",
                cloudEvents_specversion="1.0",
                cloudEvents_id="1",
                cloudEvents_source="/s",
                cloudEvents_type="t",
                cloudEvents_time=time,
                cloudEvents_number=3,
                cloudEvents_yes=True,
                cloudEvents_raw=b"\0",
                other=1,
            )
        )
        assert found.time == NOON.replace(microsecond=123000)
        assert found.extensions == {"number": 3, "yes": True, "raw": b"\0"}
        assert (found.data, found.datacontenttype) == (b"x", "image/png")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id": ""}, "id must be text"),
        ({"source": None}, "source must be text"),
        ({"type": 5}, "type must be text"),
        ({"subject": ""}, "subject must be text"),
        ({"time": datetime(2026, 1, 1)}, "time zone"),
        ({"extensions": {"Trace": "x"}}, "lower-case"),
        ({"extensions": {"data": "x"}}, "not an extension"),
        ({"extensions": {"number": 1 << 31}}, "32 bits"),
        ({"extensions": {"rate": 1.5}}, "rate must be"),
        ({"data": {1}}, "no form in JSON"),
        ({"data": float("nan")}, "no form in JSON"),
        ({"data": {"a": 1}, "datacontenttype": "image/png"}, "must be bytes or text"),
    ],
)
def test_what_is_no_cloudevent_is_refused_where_it_is_made(changes: dict[str, Any], problem: str) -> None:
    """With the attribute and what is wrong with it."""
    with pytest.raises(EventError, match=problem):
        _event(**changes)


def test_mode_that_there_is_not_is_refused() -> None:
    """Batched mode is not for single events."""
    with pytest.raises(EventError, match="the mode must be"):
        _event().to_event_data("batched")  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (_bare(b"{}"), "no application property"),
        (_bare(cloudEvents__id="1", cloudEvents_source="/"), "both prefixes"),
        (_bare(cloudEvents__id="1"), "no specversion"),
        (_bare(cloudEvents__specversion="0.3"), "'0.3' is not 1.0"),
        (_bare(cloudEvents__specversion="1.0", cloudEvents__id="1"), "no source"),
        (
            _bare(
                cloudEvents__specversion="1.0", cloudEvents__id="1", cloudEvents__source="/", cloudEvents__type="t",
                cloudEvents__time="noon",
            ),
            "time is neither",
        ),
        (_bare(b"[]", content_type="application/cloudevents+json"), "not an object"),
        (_bare(b"{", content_type="application/cloudevents+json"), "not valid JSON"),
        (_bare(b"{}", content_type="application/cloudevents-batch+json"), "cannot be read"),
        (_bare(b'{"data": 1, "data_base64": ""}', content_type="application/cloudevents+json"), "both data"),
        (_bare(b'{"data_base64": "?"}', content_type="application/cloudevents+json"), "base64"),
        (_bare(b'{"specversion": "1.0"}', content_type="APPLICATION/CLOUDEVENTS+JSON; charset=utf-8"), "no id"),
    ],
)  # fmt: skip
def test_what_is_received_and_no_cloudevent_is_a_decode_error(event: ReceivedEvent, problem: str) -> None:
    """It has the number of the event, and is not to be retried."""
    with pytest.raises(DecodeError, match=problem) as raised:
        CloudEvent.from_event(event)
    assert raised.value.sequence_number == 7
    assert not raised.value.is_retryable


# ------------------------------------------------------------------------------------------------- what others read


def test_azure_core_reads_the_structured_mode() -> None:
    """Its `CloudEvent`, and what it means, is ours."""
    made = _event(data={"celsius": 21.5}, time=NOON, subject="a", dataschema="urn:x", extensions={"ext": "1"})
    read: AzureCloudEvent[Any] = AzureCloudEvent.from_json(made.to_event_data("structured").body)
    assert (read.id, read.source, read.type, read.subject) == ("1", "/sensors/7", "reading", "a")
    assert (read.data, read.time, read.dataschema) == ({"celsius": 21.5}, NOON, "urn:x")
    assert read.extensions == {"ext": "1"}
    raw: AzureCloudEvent[Any] = AzureCloudEvent.from_json(_event(data=b"\0\1").to_event_data("structured").body)
    assert raw.data == b"\0\1"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/plain; charset=iso-8859-1", b"caf\xe9"),
        ('text/plain; Charset = "ISO-8859-1"; format=flowed', b"caf\xe9"),
        ("text/xml;charset=utf-16-le", "café".encode("utf-16-le")),
        ("text/plain; charset=utf-8", "café".encode()),
        ("text/plain", "café".encode()),
        ("text/plain; format=flowed", "café".encode()),
    ],
)
def test_text_has_the_charset_of_its_type(content_type: str, body: bytes) -> None:
    """Read and written alike; in JSON, text is text."""
    made = _event(data="café", datacontenttype=content_type)
    sent = made.to_event_data()
    assert sent.body == body
    assert CloudEvent.from_event(_received(sent)) == made
    assert CloudEvent.from_event(_received(made.to_event_data("structured"))) == made


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ('text/plain; title="; charset=utf-16"; charset=iso-8859-1', b"caf\xe9"),
        (r'text/plain; a="\"; charset=x"; charset="iso\-8859-1"', b"caf\xe9"),
        ("text/plain; charset=windows-1252; charset=utf-16", b"caf\xe9"),
        ('text/plain; x-charset=ascii; flag; other="a;b" c;;charset=latin1 ;', b"caf\xe9"),
        ("text/plain; charset=gb18030", "café".encode("gb18030")),
        ("text/plain; charset=windows-1252", b"caf\xe9"),
        ("text/plain; charset=ISO-2022-JP-2", "café".encode("iso2022_jp_2")),
    ],
)
def test_charset_is_that_of_the_parameter(content_type: str, body: bytes) -> None:
    """Parameters are read one after the other: what another one quotes is not a parameter."""
    sent = _event(data="café", datacontenttype=content_type).to_event_data()
    assert sent.body == body
    assert CloudEvent.from_event(_received(sent)).data == "café"


def test_parameter_whose_quotes_do_not_end_is_refused() -> None:
    """What follows it may be within the quotes or not."""
    made = _event(data="text", datacontenttype='text/plain; title="a; charset=utf-16')
    with pytest.raises(EventError, match="does not end"):
        made.to_event_data()
    sent = _event(data=b"text", datacontenttype=made.datacontenttype).to_event_data()
    with pytest.raises(DecodeError, match="does not end"):
        CloudEvent.from_event(_received(sent))


@pytest.mark.parametrize("part", [";", '"', "; a", '; a="', ' ; "\\', "\\", "; charset", "= "])
def test_parameters_take_linear_time(part: str) -> None:
    """A type of a megabyte, of a sender that means harm, takes part of a second."""
    sent = _event(data=b"text", datacontenttype="text/plain;" + part * (1_000_000 // len(part))).to_event_data()
    began = thread_time()
    with suppress(DecodeError):
        CloudEvent.from_event(_received(sent))
    assert thread_time() - began < 5  # quadratic time would be minutes


@given(
    content_type=st.lists(
        st.sampled_from(["text/x", "application/json", ";", " ", "charset=", '"', "\\", "utf-8", "utf-16", "idna"])
        | st.text(st.characters(codec="ascii"), max_size=3),
        max_size=8,
    ).map("".join),
    body=st.binary(max_size=20),
    text=st.text(st.characters(), max_size=20),
    time=st.none() | st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=14))])),
    mode=st.sampled_from(["binary", "structured"]),
)
@example("text/plain; charset=utf-8\0", b"x", "x", None, "binary")
@example("text/plain; charset=idna", b"xn--a", "a" * 70 + ".é", None, "binary")
@example("text/plain", b"", "\ud800", None, "structured")
@example("text/plain", b"", "x", datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))), "binary")
def test_only_its_own_errors_are_raised(
    content_type: str, body: bytes, text: str, time: datetime | None, mode: Any
) -> None:
    """An `EventError` where it is sent, a `DecodeError` where it is received; whatever the type, text and time."""
    with suppress(EventError):
        _event(data=text, datacontenttype=content_type, time=time).to_event_data(mode)
    sent = _event(data=body).to_event_data()
    received = _bare(
        body, content_type=content_type, **{name.replace(":", "__"): v for name, v in sent.properties.items()}
    )
    with suppress(DecodeError):
        CloudEvent.from_event(received)


@pytest.mark.parametrize(
    "charset",
    [
        "klingon", "", "base64", "undefined", "../os", "a\0b", "x" * 5000, "utf-8\0", "utf+8", "punycode", "idna",
        "unicode_escape", "raw-unicode-escape", "charmap", "utf-7", "mbcs", "rot13", "hex",
    ],
)  # fmt: skip
def test_text_of_an_unknown_charset_is_refused(charset: str) -> None:
    """By an error that names it, or its beginning; nothing is guessed, and no name is kept."""
    sent = _event(data=b"text", datacontenttype=f"text/plain; charset={charset}").to_event_data()
    cache: dict[str, object] = encodings._cache  # what `codecs.lookup` remembers
    known = set(cache)
    with pytest.raises(DecodeError, match="charset") as raised:
        CloudEvent.from_event(_received(sent))
    assert len(str(raised.value)) < 300
    assert set(cache) <= known
    assert "klingon" not in cache
    text = _event(data="text", datacontenttype=f"text/plain; charset={charset}")
    with pytest.raises(EventError, match="charset"):
        text.to_event_data()
    assert text.to_event_data("structured").body


def test_text_that_its_charset_lacks_is_refused() -> None:
    """When it is sent, and when it is received."""
    with pytest.raises(EventError, match="cannot be written as text/plain; charset=ascii"):
        _event(data="café", datacontenttype="text/plain; charset=ascii").to_event_data()
    with pytest.raises(DecodeError, match="not valid ascii"):
        CloudEvent.from_event(
            _received(_event(data=b"\xe9", datacontenttype="text/plain; charset=ascii").to_event_data())
        )


@pytest.mark.parametrize("mode", ["binary", "structured"])
@pytest.mark.parametrize(
    ("data", "content_type"), [({"a": [1, "é"]}, "application/json"), (b"\xff\0", "image/png"), ("text", "text/plain")]
)
def test_official_package_reads_what_is_sent_and_the_other_way_round(mode: Any, data: Any, content_type: str) -> None:
    """The package `cloudevents`, whose AMQP binding is written by the authors of the specification."""
    peer = pytest.importorskip("cloudevents.core.bindings.amqp", reason="needs cloudevents 2")
    official = pytest.importorskip("cloudevents.core.v1.event")
    moment = NOON.replace(microsecond=123000)
    made = _event(data=data, datacontenttype=content_type, time=moment, subject="s", extensions={"ext": "1"})
    sent = made.to_event_data(mode)
    message = peer.AMQPMessage(
        {"content-type": (sent.standard or {})["content_type"]}, dict(sent.properties), sent.body
    )
    read = peer.from_amqp_event(message)
    assert read.get_attributes() == {**made.attributes, "time": moment}
    assert read.get_data() == data
    written = (peer.to_binary_event if mode == "binary" else peer.to_structured_event)(
        official.CloudEvent({**made.attributes, "time": moment.astimezone(timezone(timedelta(hours=1)))}, data)
    )
    back = ReceivedEvent.build(
        written.application_data,
        offset="7",
        sequence_number=7,
        enqueued_time=NOON,
        properties=written.application_properties or None,
        content_type=written.properties["content-type"],
    )
    assert CloudEvent.from_event(back) == made


def test_from_event_of_an_event_with_a_name_that_is_no_text_is_a_decode_error() -> None:
    """Names of properties may be of any AMQP type: such a property is no attribute."""
    with pytest.raises(DecodeError, match="specversion"):
        CloudEvent.from_event(ReceivedEvent(Message(application_properties={5: 1}, body=Data((b"x",))).encode()))
