"""A batch of events, filled to what one message holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eventpump.compiled import based_on_core, core
from eventpump.core.status import BatchState
from eventpump.errors import EventError
from eventpump.eventhubs.envelope import envelope_head
from eventpump.eventhubs.events import EventData, no_event
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.eventhubs.sealing import SealedBatch, pieces, pieces_of
from eventpump.eventhubs.stamps import with_room
from eventpump.options.predecessor import BATCH, answers
from eventpump.producer.packing import BatchPacker

_OPEN = BatchState.OPEN  # a module's name costs less than the attribute of an enumeration


if core is not None:
    core.fill_batches(_OPEN)


@based_on_core("PlainBatch")
@answers(BATCH)
class EventBatch:
    """Events for one message to one target. Made by a producer's `create_batch`.

    Args:
        encode: Called with each event that is added, and returns the event to pack in its place; None to pack events as
            they are.

    Attributes:
        max_size_in_bytes: Bytes.
        partition_id: The partition it is for, given or chosen by the producer's router; None for another target.
        partition_key: The key its events share, None for none.
        is_idempotent: Whether its size counts the room for numbers. Default: False.
        is_list: Whether it was made of a list given to `send`, whose events get their numbers.
        is_stamped: Whether its events are sent with stamps, and its size counts them. Default: False.
        was_in_doubt: Whether a `send` of it has ended with its outcome unknown.
    """

    __slots__ = (
        "_add",
        "_encode",
        "_events",
        "_first",
        "_packer",
        "_refused",
        "_sealed",
        "_state",
        "is_idempotent",
        "is_list",
        "is_stamped",
        "max_size_in_bytes",
        "partition_id",
        "partition_key",
        "was_in_doubt",
    )

    def __init__(
        self,
        max_size_in_bytes: int,
        *,
        partition_id: str | None = None,
        partition_key: str | None = None,
        is_idempotent: bool = False,
        is_stamped: bool = False,
        encode: Callable[[EventData], EventData] | None = None,
    ) -> None:
        self.max_size_in_bytes = max_size_in_bytes
        self.partition_id = partition_id
        self.partition_key = partition_key
        self.is_idempotent = is_idempotent
        self.is_list = False
        self.is_stamped = is_stamped
        self.was_in_doubt = False
        self._state = BatchState.OPEN
        self._first: int | None = None
        self._events: list[EventData] = []
        # To a partition that a router has chosen, each event takes its key along, and the message has none.
        self._packer = BatchPacker(
            max_size_in_bytes,
            partition_key=partition_key if partition_id is None else None,
            idempotent=is_idempotent,
            stamped=is_stamped,
        )
        self._add = self._packer.add  # bound once, because it is called for every event
        self._encode = encode
        self._refused: tuple[bytes, bytes] | None = None
        self._sealed: SealedBatch | None = None

    def try_add(self, event: EventData) -> bool:
        """Add an event.

        Returns:
            Whether it was added; False if it does not fit any more.

        Raises:
            EventTooLargeError: It would not fit an empty batch either.
            EventError: It is not an `EventData`, cannot be encoded, or has a number already; or the batch is on its way
                or published. The batch is as it was before.
        """
        if not isinstance(event, EventData):
            raise no_event(event)
        if self._state is not _OPEN and (self.is_under_way or self._state is BatchState.PUBLISHED):
            raise EventError(f"the batch is {self._state.value}, and takes no more events")
        if self.is_idempotent and event.published_sequence_number is not None:
            raise EventError("the event is published already, and carries a number")
        sent = event if self._encode is None else self._encode(event)
        head, rest = _pieces(sent, self.partition_key, idempotent=self.is_idempotent, stamped=self.is_stamped)
        if not self._add(head, rest):
            self._refused = head, rest
            return False
        if self.is_idempotent:
            self._events.append(event)
        self._sealed = None
        return True

    def take_refused(self, event: EventData, other: EventBatch) -> None:
        """Add the event that did not fit another batch of the same kind: it is not encoded again.

        Raises:
            EventTooLargeError: It does not fit an empty batch.
        """
        assert other._refused is not None
        self._add(*other._refused)
        other._refused = None
        if self.is_idempotent:
            self._events.append(event)

    @property
    def encode(self) -> Callable[[EventData], EventData] | None:
        """Makes the event to pack of one that is added; None if events are packed as they are."""
        return self._encode

    @property
    def state(self) -> BatchState:
        """See `BatchState`. Its producer changes it."""
        return self._state

    @property
    def starting_published_sequence_number(self) -> int | None:
        """The number of its first event, once it is published with numbers; else None."""
        return self._first

    @property
    def events(self) -> tuple[EventData, ...]:
        """The events of a batch of an idempotent producer; no other keeps them."""
        return tuple(self._events)

    def begun(self) -> None:
        """Called by its producer when a send of it begins."""
        assert self._state is not BatchState.PUBLISHED
        self._state = BatchState.IN_FLIGHT

    def left_in_doubt(self) -> None:
        """Called by its producer when a send of it ends with its outcome unknown."""
        assert self.is_under_way
        self._state = BatchState.IN_DOUBT
        self.was_in_doubt = True

    def ended(self, first: int | None) -> None:
        """Called by its producer when its outcome is known.

        Args:
            first: The number of its first event; None if it is refused.
        """
        assert self.is_under_way
        self._first = first
        self._state = BatchState.REFUSED if first is None else BatchState.PUBLISHED
        if first is not None and self.is_list:
            for index, event in enumerate(self._events):
                event._published_number = (first + index) % NUMBERS  # noqa: SLF001 - read-only to all but what publishes it

    @property
    def count(self) -> int:
        """How many events it holds."""
        return self._packer.count

    @property
    def size(self) -> int:
        """Its size on the wire, in bytes."""
        return self._packer.size

    @property
    def is_under_way(self) -> bool:
        """Whether it was sent, and its outcome is not known yet."""
        return self._state in (BatchState.IN_FLIGHT, BatchState.IN_DOUBT)

    def seal(self) -> SealedBatch:
        """Encode it, once for all sends of the same events."""
        if self._sealed is None:
            self._sealed = self._packer.seal()
        return self._sealed

    def __len__(self) -> int:
        return self._packer.count

    def __repr__(self) -> str:
        return f"EventBatch({self.count} events, {self.size} of {self.max_size_in_bytes} bytes, {self.state.value})"


def seal_alone(
    event: EventData, *, partition_key: str | None, encode: Callable[[EventData], EventData] | None
) -> SealedBatch:
    """Return the message of one event, without numbers, as a batch that has only this event would."""
    sent = event if encode is None else encode(event)
    return SealedBatch(_pieces(sent, partition_key), partition_key=partition_key)


def _pieces(
    event: EventData, partition_key: str | None, *, idempotent: bool = False, stamped: bool = False
) -> tuple[bytes, bytes]:
    """Encode an event with its key, in the two pieces in which it stands in a batch; see `pieces_of`."""
    if partition_key is None:
        return pieces_of(event, idempotent=idempotent, stamped=stamped)
    if type(event) is EventData and not stamped:
        return pieces_of(event, idempotent=idempotent, before=envelope_head(partition_key))
    encoded = event.encode(partition_key)
    return pieces(with_room(encoded) if stamped else encoded, idempotent=idempotent)


def fill(events: Iterable[EventData], new_batch: Callable[[], EventBatch]) -> list[EventBatch]:
    """Put events into as few batches as they take, in order.

    Raises:
        EventTooLargeError: An event does not fit an empty batch.
        EventError: As of `EventBatch.try_add`.
    """
    batches = [new_batch()]
    for event in events:
        if not batches[-1].try_add(event):
            full = batches[-1]
            batches.append(new_batch())
            batches[-1].take_refused(event, full)
    return batches
