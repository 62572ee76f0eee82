"""What an entry is, which errors each reader may raise, and how a string of a seed is run."""

from __future__ import annotations

import contextlib
import datetime
import sys
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Any, ClassVar, Final, ParamSpec, TypeVar

from eventpump.amqp.codec import AmqpDecodeError, EncodeError
from eventpump.errors import ClosedError, EventError, EventTooLargeError, ProtocolError, ServiceError
from eventpump.eventhubs.requests import BadRequestError
from tests.support.memory import traced_memory

_P = ParamSpec("_P")
_T = TypeVar("_T")

DOCUMENTED: Final[dict[str, tuple[type[Exception], ...]]] = {
    "codec.decode": (AmqpDecodeError,),
    "codec.skip": (AmqpDecodeError,),
    "codec.encode": (EncodeError,),
    "Message.decode": (AmqpDecodeError,),
    "Message.encode": (EncodeError,),
    "message.section_spans": (AmqpDecodeError,),
    "message.scan_event": (AmqpDecodeError,),
    "ReceivedEvent": (EventError,),
    "Connection.receive": (),
    "Connection.begin": (ClosedError, ProtocolError),
    "Session.attach": (ClosedError,),
    "Link.send": (ClosedError, EventTooLargeError),
    "stamp": (AmqpDecodeError,),
    "add_delivery_annotations": (),
    "decode_batch": (AmqpDecodeError,),
    "partition_key_of": (AmqpDecodeError,),
    "run_of": (AmqpDecodeError,),
    "RowEncoder.encode": (EventError,),
    "cbs.parse_put_token": (BadRequestError,),
    "check_answer": (ServiceError, ProtocolError),
    "management.parse_request": (BadRequestError,),
    "management.parse_hub_response": (ServiceError, ProtocolError),
    "management.parse_partition_response": (ServiceError, ProtocolError),
    "TunnelHandshake.receive": (ServiceError,),
    "KeyRing.check_plain": (),
    "KeyRing.check_token": (),
    "parse_address": (ValueError,),
    "websocket.connect": (ServiceError,),
}
"""The errors that each reader documents; every other one is a breach. An empty row: none at all."""

MEASURED_EVERY: Final = 16
"""Of so many strings the memory of one is measured: measuring takes several times as long as running."""
_PER_BYTE: Final = 1024
"""Bytes of memory that a byte of a string may cost at most. A list of empty lists costs 80, an array whose values are
described over and over 240, and an entry holds what it compares up to four times."""


class BreachError(AssertionError):
    """Something did not hold. The text has no byte of the string: the command makes it again."""


def attempt(reader: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | Exception:
    """Call a reader.

    Returns:
        What it returns, or an error that it documents; every other one is raised.
    """
    try:
        return call(*args, **kwargs)
    except DOCUMENTED[reader] as error:
        return error


def require(*, holds: bool, what: str) -> None:
    """Raise where something does not hold."""
    if not holds:
        raise BreachError(what)


def same(first: Any, second: Any, what: str) -> None:
    """Raise where two things differ, with the part of their texts that does."""
    if first == second:
        return
    texts = repr(first), repr(second)
    at = next((at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 0)
    shown = " and ".join(repr(text[max(at - 40, 0) : at + 80]) for text in texts)
    raise BreachError(f"{what} differ: {shown}")


class Entry(ABC):
    """A reader, the strings that it is given, and what must hold of them.

    :cvar gate: strings in the gate; `long`: with `--long`, all entries together a million.
    :cvar overhead: bytes of memory that a string may cost beside what its own bytes do.
    """

    name: ClassVar[str]
    gate: ClassVar[int]
    long: ClassVar[int]
    overhead: ClassVar[int] = 128 * 1024

    @abstractmethod
    def make(self, rng: Random) -> Any:
        """Make a string: bytes, or several that belong together."""

    @abstractmethod
    def run(self, string: Any, rng: Random) -> None:
        """Run a string. Raises where something does not hold; an error that is not documented is let through."""

    def close(self) -> None:  # noqa: B027 - most entries hold nothing
        """Free what the entry holds."""


def size_of(string: Any) -> int:
    """Return the bytes of a string."""
    return len(string) if isinstance(string, bytes) else sum(map(size_of, string))


def command_of(entry: str, seed: int) -> str:
    """Return the command that makes a string again."""
    return f"python -m tests.fuzz {entry} {seed}"


def seed_of_today() -> int:
    """Return the first seed of this day. Those of the next day begin a million later."""
    return datetime.date.today().toordinal() * 1_000_000


def run_string(entry: Entry, string: Any, rng: Random, *, is_measured: bool) -> None:
    """Run one string.

    Raises:
        BreachError: Something did not hold.
    """
    peak = 0
    with traced_memory() if is_measured else contextlib.nullcontext():
        try:
            entry.run(string, rng)
        except BreachError:
            raise
        except Exception as error:
            # Not the error's text: it may quote what was sent, a token say.
            raise BreachError(f"{type(error).__name__} is no documented error") from error
        finally:
            if is_measured:
                peak = tracemalloc.get_traced_memory()[1]
    allowed = entry.overhead + _PER_BYTE * size_of(string)
    require(holds=peak <= allowed, what=f"{peak} bytes of memory for {size_of(string)} bytes; {allowed} are allowed")


def run_seed(entry: Entry, seed: int) -> None:
    """Run the string of a seed.

    Raises:
        BreachError: Something did not hold; it says how to make the string again.
    """
    rng = Random(f"{entry.name} {seed}")
    string = entry.make(rng)
    try:
        run_string(entry, string, rng, is_measured=seed % MEASURED_EVERY == 0 and not _is_traced())
    except BreachError as breach:
        raise BreachError(f"{breach}\n  {command_of(entry.name, seed)}") from breach.__cause__


def _is_traced() -> bool:
    """Whether something else, a tool that measures coverage say, makes memory a matter of its own."""
    return tracemalloc.is_tracing() or sys.gettrace() is not None
