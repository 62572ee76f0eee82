"""Payloads as Python objects: decoded by the type that a handler wants, and encoded by what it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args, runtime_checkable

from eventpump.errors import ConfigurationError, DecodeError, EventError
from eventpump.eventhubs.cloudevents import CloudEvent, decode_error
from eventpump.eventhubs.events import EventData, ReceivedEvent

if TYPE_CHECKING:
    from pydantic import ValidationError

Decode = Callable[[ReceivedEvent], Any]
"""Decodes an event."""


@runtime_checkable
class Decoder(Protocol):
    """Decodes the payloads of events: for `EventHubsApp(decoder=...)`. `PayloadDecoder` is the default."""

    def decoder_for(self, kind: Any) -> Callable[[ReceivedEvent], Any]:
        """Return a function that decodes an event as a type. Called once per handler, when it is decorated.

        What the function raises reaches the failure policy as a `DecodeError`, which is not retried.

        Args:
            kind: The annotation of the handler's parameter.

        Raises:
            ConfigurationError: It cannot decode events as this type.
        """


class PayloadDecoder:
    """Decodes by the type that is wanted.

    `bytes` and `str` (UTF-8) are the body as it is; `ReceivedEvent` the event itself; `CloudEvent` either mode of it; a
    `msgspec.Struct`, or a type with one in it, is decoded by msgspec. Every other type is what JSON is validated as by
    pydantic: `dict`, `list[int]`, models, dataclasses, typed dictionaries, unions. A body that is an AMQP value or
    sequence and not data is validated as the Python object that it is.
    """

    def decoder_for(self, kind: Any) -> Callable[[ReceivedEvent], Any]:
        """Return a function that decodes an event as a type; it raises `DecodeError`.

        Raises:
            ConfigurationError: Events cannot be decoded as this type.
        """
        if kind is ReceivedEvent:
            return _itself
        if kind is CloudEvent:
            return CloudEvent.from_event
        if kind is bytes:
            return _checked("bytes", lambda event: event.body)
        if kind is str:
            return _checked("text", lambda event: event.body_as_str())
        return _by_msgspec(kind) if _has_struct(kind) else _by_pydantic(kind)

    def __repr__(self) -> str:
        return "PayloadDecoder()"


PAYLOADS: Final = PayloadDecoder()


def name_of(kind: Any) -> str:
    """Return the name of a type, for an error."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def guarded(decode: Decode, kind: Any) -> Decode:
    """Return a function that decodes as another one does, and raises `DecodeError` for all its failures."""

    def run(event: ReceivedEvent) -> Any:
        try:
            return decode(event)
        except DecodeError:
            raise
        except Exception as error:
            raise decode_error(event, name_of(kind), f"{type(error).__name__}: {error}") from error

    return run


def encoded(value: Any, *, mode: str = "binary") -> EventData:
    """Return an event to send for a value: what `PayloadDecoder` decodes as the type of it.

    Args:
        value: An `EventData`, a `ReceivedEvent`, bytes, text, a `CloudEvent`, a `msgspec.Struct`, or what pydantic can
            write as JSON.

    Raises:
        EventError: It has no form as an event.
    """
    match value:
        case EventData():
            return value
        case ReceivedEvent():
            return value.to_event_data()
        case bytes() | bytearray() | memoryview() | str():
            return EventData(value)
        case CloudEvent():
            return value.to_event_data(mode)  # type: ignore[arg-type]  # it refuses an invalid mode
    if _has_struct(type(value)):
        import msgspec

        return EventData(msgspec.json.encode(value), content_type="application/json")
    from pydantic_core import PydanticSerializationError, to_json

    try:
        return EventData(to_json(value, inf_nan_mode="strings"), content_type="application/json")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise EventError(f"a {type(value).__name__} cannot be published: it has no form in JSON ({error})") from None


def _itself(event: ReceivedEvent) -> ReceivedEvent:
    return event


def _checked(wanted: str, decode: Decode) -> Decode:
    def run(event: ReceivedEvent) -> Any:
        try:
            return decode(event)
        except DecodeError:
            raise  # of a codec: it names the event, and has the codec's own error chained
        except EventError as error:
            raise decode_error(event, wanted, str(error)) from None

    return run


def _has_struct(kind: Any) -> bool:
    """Return whether a type is a `msgspec.Struct`, or has one among its arguments. Does not import msgspec."""
    msgspec = sys.modules.get("msgspec")
    if msgspec is None:
        return False
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return True
    return any(_has_struct(each) for each in get_args(kind))


def _by_msgspec(kind: Any) -> Decode:
    import msgspec

    try:
        decoder = msgspec.json.Decoder(kind)
    except TypeError as error:
        raise ConfigurationError("decoder", f"msgspec cannot decode as {name_of(kind)}: {error}") from error

    def run(event: ReceivedEvent) -> Any:
        try:
            if event.body_type == "data":
                return decoder.decode(event.body)
            return msgspec.convert(event.value, kind)
        except DecodeError:
            raise
        except (EventError, msgspec.MsgspecError) as error:
            raise decode_error(event, name_of(kind), str(error)) from None

    return run


def _by_pydantic(kind: Any) -> Decode:
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
    except PydanticUserError as error:
        problem = f"no event can be decoded as {name_of(kind)}: {str(error).splitlines()[0]}"
        raise ConfigurationError("decoder", problem) from error

    def run(event: ReceivedEvent) -> Any:
        try:
            if event.body_type == "data":
                return adapter.validate_json(event.body)
            return adapter.validate_python(event.value)
        except ValidationError as error:
            raise decode_error(event, name_of(kind), _problems(error)) from None
        except DecodeError:
            raise
        except EventError as error:
            raise decode_error(event, name_of(kind), str(error)) from None

    return run


def _problems(error: ValidationError) -> str:
    """Return what is wrong, without the input, which would be the payload."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"]
        for each in error.errors(include_input=False, include_url=False, include_context=False)[:5]
    )
