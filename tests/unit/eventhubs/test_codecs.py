"""Codecs of payloads: what a producer encodes a reader decodes, once, and what fails is one clear error."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.errors import ConfigurationError, DecodeError, EventError
from eventpump.eventhubs.cloudevents import CloudEvent
from eventpump.eventhubs.codecs import PayloadCodec, codecs_of, encoder, event_maker, events_maker, marked
from eventpump.eventhubs.decoding import PAYLOADS
from eventpump.eventhubs.events import EventData, ReceivedEvent
from tests.support.codecs import DEFLATE, GZIP, NEW_KEY, OLD_KEY

NOW = datetime(2030, 1, 1, tzinfo=UTC)
CODECS = (GZIP, DEFLATE, OLD_KEY, NEW_KEY)


class _Struct(msgspec.Struct):
    """A model of msgspec."""

    a: int


def stored(event: EventData, number: int = 7) -> bytes:
    """Return the message of an event as the service delivers it."""
    return ReceivedEvent.build(
        event.body if event.body_type == "data" else None,
        value=event.value if event.body_type == "value" else None,
        properties=event.properties,
        offset=str(number),
        sequence_number=number,
        enqueued_time=NOW,
        **(event.standard or {}),
    ).raw


def received(event: EventData, *codecs: PayloadCodec) -> ReceivedEvent:
    return event_maker(codecs, "3")(stored(event), None)


BODIES = st.binary(max_size=2000) | st.binary(min_size=1, max_size=4).map(lambda part: part * 500)
ORDERS = st.lists(st.sampled_from(CODECS), unique=True, max_size=4)


@given(
    BODIES,
    ORDERS,
    ORDERS,
    st.sampled_from([None, "utf-8"]),
    st.dictionaries(st.text(max_size=5), st.integers(0, 2**40)),
)
def test_what_is_encoded_is_decoded(
    body: bytes,
    applied: list[PayloadCodec],
    known: list[PayloadCodec],
    before: str | None,
    properties: dict[str, int],
) -> None:
    """Up to the last codec that the reader does not have; body, properties and content encoding are those given."""
    standard = {"subject": "s", **({} if before is None else {"content_encoding": before})}
    given_event = EventData(body, properties=properties, **standard)
    encode = encoder(applied)
    sent = given_event if encode is None else encode(given_event)
    assert (given_event.body, given_event.standard) == (body, standard)  # what the program has is not changed

    rest, expected = list(applied), sent.body
    while rest and rest[-1] in known:
        expected = rest.pop().decode(expected)
    event = received(sent, *known)
    assert (event.body, event.value, event.body_type) == (expected, expected, "data")
    if len(rest) == 0:
        assert event.body == body
    names = [*([] if before is None else [before]), *(each.content_encoding for each in rest)]
    copy = event.to_event_data()
    assert (copy.body, copy.properties) == (expected, properties)
    assert copy.standard == {"subject": "s", **({"content_encoding": ", ".join(names)} if names else {})}
    assert (event.sequence_number, event.properties, event.raw) == (7, properties, stored(sent))


def test_old_and_new_events_are_readable_side_by_side() -> None:
    """Plain ones, those of another program's content encoding, and those of an older codec or key."""
    plain, foreign = EventData("1", content_encoding=None), EventData("2", content_encoding="utf-8")
    by = [encoder(codec) for codec in (GZIP, OLD_KEY, [GZIP, NEW_KEY])]
    events = [plain, foreign, *(encode(EventData(str(number))) for number, encode in enumerate(by, 3) if encode)]
    assert [received(event, *CODECS).body for event in events] == [b"1", b"2", b"3", b"4", b"5"]
    assert [received(event).body for event in events[:2]] == [b"1", b"2"]
    assert received(events[4], GZIP).body == events[4].body  # encrypted last, and the key is not there
    assert received(EventData(gzip.compress(b"6"), content_encoding="GZIP"), GZIP).body == b"6"


def test_event_is_decoded_when_its_body_is_read_and_once() -> None:
    """However many subscriptions share it, and however often each looks at it; its place needs no decoding."""
    calls: list[bytes] = []

    def decode(body: bytes) -> bytes:
        calls.append(body)
        return gzip.decompress(body)

    encode = encoder(GZIP)
    assert encode is not None
    event = received(encode(EventData('{"a": 1}')), PayloadCodec("gzip", gzip.compress, decode))
    assert (event.sequence_number, event.offset, event.properties, len(calls)) == (7, "7", {}, 0)
    assert (event.body_as_json(), event.body_as_str(), event.body) == ({"a": 1}, '{"a": 1}', b'{"a": 1}')
    assert len(calls) == 1


class _OddError(Exception):
    pass


def _raises(error: BaseException) -> Callable[[bytes], bytes]:
    def function(body: bytes) -> bytes:
        raise error

    return function


@pytest.mark.parametrize("wrong", [_raises(_OddError("key")), lambda _: "text", lambda _: None, lambda: b""])
def test_decode_that_fails_is_one_error_that_names_the_event(wrong: Any) -> None:
    """Each access raises it again, the codec is called once, and what surrounds the body stays readable."""
    calls: list[int] = []

    def decode(body: bytes) -> bytes:
        calls.append(len(body))
        made: bytes = wrong(body)
        return made

    event = received(EventData(b"x", content_encoding="odd", properties={"a": 1}), PayloadCodec("odd", bytes, decode))
    for read in (lambda: event.body, event.body_as_json, lambda: event.value, event.to_event_data):
        with pytest.raises(DecodeError, match=r"^partition 3, event 7: .*codec odd") as caught:
            read()
        assert (caught.value.partition_id, caught.value.sequence_number) == ("3", 7)
        assert not caught.value.is_retryable
        assert not str(caught.value).endswith("key") or isinstance(caught.value.__cause__, _OddError)
    assert len(calls) == 1
    assert (event.sequence_number, event.properties, event.raw_message.application_properties) == (
        7,
        {"a": 1},
        {"a": 1},
    )


def test_marked_event_without_bytes_cannot_be_decoded() -> None:
    """An AMQP value under the name of a codec was not encoded by it."""
    event = received(EventData(value=5, content_encoding="gzip"), GZIP)
    with pytest.raises(DecodeError, match="its body is not bytes"):
        _ = event.body
    assert received(EventData(value="text"), GZIP).body_as_str() == "text"


@pytest.mark.parametrize("wrong", [_raises(_OddError("no key")), lambda _: "text", lambda _: None])
def test_encode_that_fails_is_an_error_that_names_the_codec(wrong: Any) -> None:
    """It is an `EventError`, whatever the codec raised or returned."""
    encode = encoder([GZIP, PayloadCodec("odd", wrong, bytes)])
    assert encode is not None
    with pytest.raises(EventError, match=r"`encode` of the codec odd .*; the event was not sent"):
        encode(EventData(b"x"))


def test_errors_show_an_excerpt_of_what_a_codec_raised() -> None:
    """A codec may quote the body, which may be a megabyte."""
    codec = PayloadCodec("odd", _raises(_OddError("x" * 10_000)), _raises(_OddError("x" * 10_000)))
    with pytest.raises(DecodeError) as caught:
        _ = received(EventData(b"body", content_encoding="odd"), codec).body
    assert len(str(caught.value)) < 500
    encode = encoder(codec)
    assert encode is not None
    with pytest.raises(EventError) as refused:
        encode(EventData(b"body"))
    assert len(str(refused.value)) < 500
    with pytest.raises(DecodeError) as unknown:
        _ = received(EventData(value=1, content_encoding=f"{'x' * 10_000}, odd"), codec).body
    assert len(str(unknown.value)) < 500


@pytest.mark.parametrize("kind", [bytes, str, dict, CloudEvent, _Struct])
def test_failed_codec_is_the_error_of_every_decoder(kind: Any) -> None:
    """Not a problem within a problem: the event is named once, and what the codec raised is chained."""
    sent = CloudEvent(id="1", source="s", type="t", data={"a": 1}).to_event_data()
    assert sent.standard is not None
    sent.standard["content_encoding"] = "odd"
    event = received(sent, PayloadCodec("odd", bytes, _raises(_OddError("key"))))
    with pytest.raises(DecodeError) as caught:
        PAYLOADS.decoder_for(kind)(event)
    assert (caught.value.partition_id, caught.value.sequence_number, caught.value.wanted) == ("3", 7, None)
    assert isinstance(caught.value.__cause__, _OddError)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_interruptions_pass_through(interruption: type[BaseException]) -> None:
    """They end the program, and are no failure of the event, which is decoded when it is read again."""
    answers: list[Callable[[bytes], bytes]] = [_raises(interruption()), gzip.decompress]
    codec = PayloadCodec("gzip", gzip.compress, lambda body: answers.pop(0)(body))
    event = received(EventData(gzip.compress(b"x"), content_encoding="gzip"), codec)
    with pytest.raises(interruption):
        _ = event.body
    assert event.body == b"x"
    encode = encoder(PayloadCodec("odd", _raises(interruption()), bytes))
    assert encode is not None
    with pytest.raises(interruption):
        encode(EventData(b"x"))


def test_body_that_is_not_bytes_is_not_sent_unencrypted() -> None:
    """A codec is for bytes: an AMQP value is refused."""
    encode = encoder(NEW_KEY)
    assert encode is not None
    with pytest.raises(EventError, match="the body is not data"):
        encode(EventData(value=5))
    with pytest.raises(EventError, match="EventData, not str"):
        encode("text")  # type: ignore[arg-type]  # the error is the point


async def _coroutine(body: Any) -> Any:
    return body


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: PayloadCodec("", bytes, bytes), "content_encoding"),
        (lambda: PayloadCodec("a, b", bytes, bytes), "content_encoding"),
        (lambda: PayloadCodec(5, bytes, bytes), "content_encoding"),  # type: ignore[arg-type]  # likewise
        (lambda: PayloadCodec("a", None, bytes), "encode"),  # type: ignore[arg-type]  # likewise
        (lambda: PayloadCodec("a", bytes, _coroutine), "decode"),  # type: ignore[arg-type]  # likewise
        (lambda: encoder("gzip"), "encode"),
        (lambda: encoder(5), "encode"),
        (lambda: encoder([GZIP, 5]), "encode"),
        (lambda: encoder(_coroutine), "encode"),
        (lambda: codecs_of("decode", gzip.decompress), "decode"),
        (lambda: codecs_of("decode", "gzip"), "decode"),
        (lambda: codecs_of("decode", [GZIP, PayloadCodec("GZip", bytes, bytes)]), "decode"),
    ],
)
def test_what_cannot_be_a_codec_is_refused(make: Callable[[], object], field: str) -> None:
    """When it is given, not at the first event."""
    with pytest.raises(ConfigurationError, match=f"^{field}: "):
        make()


def test_without_codecs_nothing_stands_between() -> None:
    """No function per event, and the class of events itself."""
    assert encoder(None) is encoder([]) is None
    assert event_maker((), "0") is ReceivedEvent
    assert marked([GZIP], None) == "gzip"


def test_decoded_event_travels_between_processes() -> None:
    """Decoded: what a codec is made of need not be known there, nor be something that can be pickled."""
    codec = PayloadCodec("gzip", gzip.compress, lambda body: gzip.decompress(body))
    event = event_maker([codec], "3")(stored(EventData(gzip.compress(b"x"), content_encoding="gzip")), ("ns", "3", 0))
    other = pickle.loads(pickle.dumps(event))
    assert (other.body, other.origin, other.sequence_number) == (b"x", ("ns", "3", 0), 7)
    bad = event_maker([codec], "3")(stored(EventData(b"no gzip", content_encoding="gzip")), None)
    with pytest.raises(DecodeError):
        pickle.dumps(bad)


@pytest.mark.parametrize("made", [None, b"x", "x", 3])
def test_encode_function_that_returns_no_event_is_a_clear_error(made: object) -> None:
    """The event is not sent as it was."""
    encode = encoder(lambda event: made)
    assert encode is not None
    with pytest.raises(EventError, match=f"`encode` returns an EventData, not {type(made).__name__}"):
        encode(EventData("x"))


def test_encode_function_that_raises_is_a_clear_error() -> None:
    """With the cause; and what is no event does not reach the function."""

    def odd(event: EventData) -> EventData:
        raise _OddError("odd")

    encode = encoder(odd)
    assert encode is not None
    with pytest.raises(EventError, match=r"`encode` raised _OddError: odd") as caught:
        encode(EventData("x"))
    assert isinstance(caught.value.__cause__, _OddError)
    for codec in (encode, encoder(GZIP)):
        assert codec is not None
        with pytest.raises(EventError, match="an event to send is an EventData, not bytes"):
            codec(b"x")  # type: ignore[arg-type]  # as a user without a checker may


def test_options_without_codecs_encode_and_decode_nothing() -> None:
    """None and an empty list."""
    assert codecs_of("decode", None) == ()
    assert encoder(None) is encoder([]) is None
    assert repr(GZIP) == "PayloadCodec('gzip')"


def test_content_encoding_that_is_no_text_is_refused() -> None:
    """A codec's name could not be added to it."""
    encode = encoder(GZIP)
    assert encode is not None
    with pytest.raises(EventError, match="content_encoding must be text"):
        encode(EventData(b"x", content_encoding=3))


def test_encoded_message_that_is_damaged_is_an_event_error() -> None:
    """As without codecs."""
    event = event_maker([GZIP], "3")(stored(EventData(b"x"))[:-1], None)
    with pytest.raises(EventError, match="the event cannot be decoded"):
        _ = event.body


def test_plain_event_is_sent_on_as_it_is() -> None:
    """A reader with codecs gets events that nothing has encoded, too."""
    event = received(EventData(b"x", properties={"a": 1}), GZIP)
    copied = event.to_event_data()
    assert (copied.body, copied.properties) == (b"x", {"a": 1})


@pytest.mark.parametrize("codecs", [(), (GZIP,)], ids=["without codecs", "with codecs"])
def test_events_of_a_read_are_those_of_each_message(codecs: tuple[PayloadCodec, ...]) -> None:
    """They have the origin that is given, and are decoded where there are codecs, in the order of the messages."""
    messages = [stored(EventData(gzip.compress(b"%d" % each), content_encoding="gzip")) for each in range(3)]
    made = events_maker(codecs, "3", ("ns", "3", 0))(messages)
    alone = [event_maker(codecs, "3")(each, ("ns", "3", 0)) for each in messages]
    assert [(type(each), each.raw, each.origin) for each in made] == [(type(e), e.raw, e.origin) for e in alone]
    assert [each.body for each in made] == [each.body for each in alone]
    assert (made[2].body == b"2") is bool(codecs)
    assert events_maker(codecs, "3", None)([]) == []
