"""Encoding the bodies of events when they are sent, and decoding them when they are read: compression, encryption.

The standard property `content_encoding` of an event names what its body is encoded with, in the order in which the
codecs were applied, as HTTP's header of that name does. A reader decodes what it has codecs for, from the last name
on, and delivers every other event as it is: old and new events can be in one hub.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Final, TypeAlias

from eventpump.errors import ConfigurationError, DecodeError, EventError
from eventpump.eventhubs.events import EventData, ReceivedEvent, copy_of, no_event, received_events
from eventpump.texts import excerpt

_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""A token of HTTP."""


@dataclass(frozen=True, slots=True)
class PayloadCodec:
    """An encoding of the bodies of events, such as `PayloadCodec("gzip", gzip.compress, gzip.decompress)`.

    Give it as `encode` to producers, and as `decode` to hosts and readers. Both functions are called in the event loop,
    and must not wait for anything.

    What `decode` returns has no limit but its own, and is in no bound of memory (`max_buffered_bytes` and the like):
    these count events as they were received. A megabyte can be decompressed to a gigabyte, so where not every sender is
    trusted, let it raise above a size::

        def gunzip(body: bytes, limit: int = 16 * 1024 * 1024) -> bytes:
            stream = zlib.decompressobj(wbits=31)
            found = stream.decompress(body, limit)
            if not stream.eof:
                raise ValueError(f"it is cut off, or more than {limit} bytes")
            return found

    Args:
        content_encoding: The name that marks an encoded event, as its property `content_encoding`: letters, digits and
            ``!#$%&'*+.^_`|~-``. For a key of encryption that changes, use one name per key, and give readers a codec
            for each.
        encode: Called with the body of an event; returns the body that is sent.
        decode: Called with the body of a received event; returns what `encode` was called with.

    Raises:
        ConfigurationError: The name is not of this form, or a function is not one that can be called.
    """

    content_encoding: str
    encode: Callable[[bytes], bytes]
    decode: Callable[[bytes], bytes]

    def __post_init__(self) -> None:
        name: object = self.content_encoding
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError("content_encoding", "must be a name such as gzip, of letters, digits and - . _")
        for option in ("encode", "decode"):
            function = getattr(self, option)
            if not callable(function) or inspect.iscoroutinefunction(function):
                raise ConfigurationError(option, "must be a plain function that is called with bytes and returns bytes")

    def __repr__(self) -> str:
        return f"PayloadCodec({self.content_encoding!r})"


EventEncoding: TypeAlias = PayloadCodec | Sequence[PayloadCodec] | Callable[[EventData], EventData]
"""How events are encoded: by a codec, by several in this order, or by a function that returns the event to send."""

EventDecoding: TypeAlias = PayloadCodec | Sequence[PayloadCodec]
"""How events are decoded: by a codec, or by those of several that an event names."""


def codecs_of(option: str, given: object) -> tuple[PayloadCodec, ...]:
    """Return the codecs that an option has.

    Raises:
        ConfigurationError: It is none of these, or two have the same name.
    """
    if given is None:
        return ()
    several = (given,) if isinstance(given, PayloadCodec) else given
    if not isinstance(several, Sequence) or not all(isinstance(each, PayloadCodec) for each in several):
        raise ConfigurationError(option, f"must be a PayloadCodec or a list of them, not {type(given).__name__}")
    names = [each.content_encoding.lower() for each in several]
    if len(set(names)) < len(names):
        raise ConfigurationError(option, "two of its codecs have the same content_encoding")
    return tuple(several)


def encoder(given: object) -> Callable[[EventData], EventData] | None:
    """Return a function that makes the event to send of the one given; None if they are the same.

    The function raises `EventError` if the event cannot be encoded. It does not change the given event.

    Raises:
        ConfigurationError: It is neither a codec nor a plain function.
    """
    if given is None or (isinstance(given, Sequence) and not given):
        return None
    if isinstance(given, PayloadCodec | Sequence):
        return _ByCodecs(codecs_of("encode", given))
    if not callable(given) or inspect.iscoroutinefunction(given):
        problem = "must be a PayloadCodec, a list of them, or a plain function that returns the event to send"
        raise ConfigurationError("encode", problem)
    return _ByFunction(given)


class _ByFunction:
    """Calls a function of the user's, and checks what it does."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[EventData], Any]) -> None:
        self._function = function

    def __call__(self, event: EventData) -> EventData:
        if not isinstance(event, EventData):
            raise no_event(event)
        try:
            made = self._function(event)
        except Exception as error:
            raise _encode_raised("`encode`", error) from error
        if not isinstance(made, EventData):
            raise EventError(f"`encode` returns an EventData, not {type(made).__name__}")
        return made


class _ByCodecs:
    """Applies codecs to the body of an event, one after the other."""

    __slots__ = ("_codecs",)

    def __init__(self, codecs: tuple[PayloadCodec, ...]) -> None:
        self._codecs = codecs

    def __call__(self, event: EventData) -> EventData:
        if not isinstance(event, EventData):
            raise no_event(event)
        standard = dict(event.standard or ())
        before = standard.get("content_encoding")
        if before is not None and not isinstance(before, str):
            raise EventError("content_encoding must be text")
        # A body that is not bytes is an error: it would be sent unencrypted.
        made = EventData(encoded(self._codecs, event.body), properties=event.properties or None)
        made.standard = {**standard, "content_encoding": marked(self._codecs, before)}
        return made


def encoded(codecs: Sequence[PayloadCodec], body: bytes) -> bytes:
    """Return an encoded body. Raises `EventError` if a codec raised, or did not return bytes."""
    for codec in codecs:
        what = f"`encode` of the codec {codec.content_encoding}"
        try:
            made: object = codec.encode(body)
        except Exception as error:
            raise _encode_raised(what, error) from error
        if not isinstance(made, bytes | bytearray | memoryview):
            raise EventError(f"{what} must return bytes, not {type(made).__name__}; the event was not sent")
        body = bytes(made)
    return body


def marked(codecs: Sequence[PayloadCodec], before: str | None = None) -> str:
    """Return the content encoding of what codecs have encoded, in this order, of an event that had one `before`."""
    names = [each.content_encoding for each in codecs]
    return ", ".join([before, *names] if before else names)


def _encode_raised(what: str, error: Exception) -> EventError:
    return EventError(f"{what} raised {type(error).__name__}: {excerpt(str(error))}; the event was not sent")


class DecodedEvents:
    """Makes events of received messages, decoded by codecs when their body is accessed for the first time."""

    __slots__ = ("_by_name", "partition_id")

    def __init__(self, codecs: Sequence[PayloadCodec], partition_id: str | None) -> None:
        self._by_name = {each.content_encoding.lower(): each for each in codecs}
        self.partition_id = partition_id

    def __call__(self, raw: bytes, origin: object = None) -> ReceivedEvent:
        """Return the event of a message."""
        return _DecodedEvent(raw, origin, self)

    def decoded(self, given: str, read: Callable[[], bytes | None]) -> tuple[bytes, str | None] | None:
        """Return the decoded body of an event, and the rest of its content encoding; None if it is not encoded.

        Raises:
            _FailedError: A codec failed.
        """
        names = [each.strip() for each in given.split(",")]
        body: bytes | None = None
        while names and (codec := self._by_name.get(names[-1].lower())) is not None:
            if body is None:
                body = read()
                if body is None:
                    raise _FailedError(f"its content encoding is {excerpt(given)}, but its body is not bytes")
            what = f"`decode` of the codec {codec.content_encoding}"
            try:
                made: object = codec.decode(body)
            except Exception as error:
                raise _FailedError(f"{what} raised {type(error).__name__}: {excerpt(str(error))}") from error
            if not isinstance(made, bytes | bytearray | memoryview):
                raise _FailedError(f"{what} must return bytes, not {type(made).__name__}")
            body = bytes(made)
            names.pop()
        return None if body is None else (body, ", ".join(names) or None)


class _FailedError(Exception):
    """An event cannot be decoded. Kept, and raised as `DecodeError` each time."""


def event_maker(codecs: Sequence[PayloadCodec], partition_id: str | None) -> Callable[[bytes, object], ReceivedEvent]:
    """Return what makes events of received messages and their origin; without codecs it is the class itself."""
    return DecodedEvents(codecs, partition_id) if codecs else ReceivedEvent


def events_maker(
    codecs: Sequence[PayloadCodec], partition_id: str | None, origin: object
) -> Callable[[list[bytes]], list[ReceivedEvent]]:
    """Return what makes the events of received messages, all of one origin."""
    if not codecs:
        return partial(received_events, origin)
    made = DecodedEvents(codecs, partition_id)
    return lambda messages: list(map(made, messages, repeat(origin)))


class _DecodedEvent(ReceivedEvent):
    """An event whose body is decoded, once, when it is first accessed.

    Everything but the body is that of the message as it was received; so are `raw` and `raw_message`.
    """

    __slots__ = ("_decoder", "_failure", "_found", "_is_looked_at")

    def __init__(self, raw: bytes, origin: object, decoder: DecodedEvents) -> None:
        super().__init__(raw, origin)
        self._decoder = decoder
        self._found: tuple[bytes, str | None] | None = None
        self._failure: _FailedError | None = None
        self._is_looked_at = False

    def _payload(self) -> bytes | None:
        """Return the decoded body; None if the event is not encoded. Raises `DecodeError` if a codec failed."""
        if not self._is_looked_at:
            given = self._content_encoding
            try:
                if given is not None:
                    self._found = self._decoder.decoded(given, self._bytes)
            except _FailedError as error:
                self._failure = error
            if self._found is not None:
                self._body = None  # of an event that several subscriptions hold, the decoded body is enough
            self._is_looked_at = True
        if self._failure is not None:
            problem = str(self._failure)
            raise DecodeError(self._decoder.partition_id, self.sequence_number, problem) from self._failure.__cause__
        return None if self._found is None else self._found[0]

    @property
    def body(self) -> bytes:
        """The decoded body; as of `ReceivedEvent` if the event is not encoded.

        Raises:
            DecodeError: A codec failed.
        """
        payload = self._payload()
        return super().body if payload is None else payload

    @property
    def body_type(self) -> str:
        return super().body_type if self._payload() is None else "data"

    @property
    def value(self) -> Any:
        """See `ReceivedEvent.value`; for an encoded event, the decoded body."""
        payload = self._payload()
        return super().value if payload is None else payload

    def to_event_data(self) -> EventData:
        """See `ReceivedEvent.to_event_data`: with the decoded body, and a content encoding without what was decoded."""
        copy = copy_of(self)
        if self._payload() is None:
            return copy
        assert self._found is not None
        body, rest = self._found
        made = EventData(body, properties=copy.properties or None)
        made.standard = {**(copy.standard or {}), "content_encoding": rest}
        if rest is None:
            del made.standard["content_encoding"]
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        # Codecs need not be known in another process: what it gets is decoded.
        self._payload()
        return _unpickled, (self._raw, self._origin, self._decoder.partition_id, self._found)


def _unpickled(
    raw: bytes, origin: object, partition_id: str | None, found: tuple[bytes, str | None] | None
) -> _DecodedEvent:
    event = _DecodedEvent(raw, origin, DecodedEvents((), partition_id))
    event._found, event._is_looked_at = found, True  # noqa: SLF001 - it is of this module
    return event
