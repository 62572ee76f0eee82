"""Options of hosts and readers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, PlainValidator

from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.starts import OnDataLoss
from eventpump.eventhubs.events import LATEST_OFFSET, EventPosition
from eventpump.options.base import HubName, Name, RetryOptions, Seconds, SettingsModel, completed_by

StartPosition: TypeAlias = str | int | datetime | EventPosition
"""Where to begin: an offset ("-1" is the start, "@latest" the end), a sequence number, a time, or a position."""


def start_position(value: object) -> EventPosition:
    """Return the position that a value given by the user stands for.

    Raises:
        ValueError: The value is of another type.
    """
    match value:
        case EventPosition():
            return value
        case str():
            return EventPosition.at_offset(value)
        case bool():
            pass
        case int():
            return EventPosition.at_sequence_number(value)
        case datetime():
            return EventPosition.at_enqueued_time(value)
    raise ValueError("must be an offset, a sequence number, a datetime with a time zone, or an EventPosition")


def _host_start(value: object) -> EventPosition:
    position = start_position(value)
    if position.offset == LATEST_OFFSET and position.inclusive:
        # A host stores its start as a checkpoint, which cannot express this.
        raise ValueError('"@latest" cannot be inclusive here')
    return position


def _check_initial_position(value: object) -> Mapping[str, EventPosition] | EventPosition:
    if not isinstance(value, Mapping):
        return _host_start(value)
    positions: dict[str, EventPosition] = {}
    for partition_id, position in value.items():
        if not isinstance(partition_id, str):
            raise ValueError("its keys must be partition ids, which are text")
        positions[partition_id] = _host_start(position)
    return positions


def _check_end(value: object) -> EventPosition | None:
    if value is None:
        return None
    position = start_position(value)
    if position.offset not in {None, "@latest"}:
        raise ValueError('an offset has no order: only "@latest" can be an end')
    return position if isinstance(value, EventPosition) else replace(position, inclusive=True)


LINK_RETRY: Final = RetryOptions(max_retries=None, base_delay=0.2, max_delay=30.0)
HANDLER_RETRY: Final = RetryOptions(max_retries=None, base_delay=0.5, max_delay=30.0)


class FeedSettings(SettingsModel):
    """How a partition's events are read ahead.

    Args:
        hub: The event hub's name.
        consumer_group: The consumer group to read with.
        prefetch_events: The most events that are received ahead of their delivery, per partition.
        prefetch_bytes: The most bytes that are received ahead, per partition. Credit is granted by estimated sizes:
            larger messages than before that are already under way come on top, and so does the batch that is being
            processed.
        strict_prefetch_bytes: Whether credit is granted by `max_message_size`, so that `prefetch_bytes` is never
            exceeded. Fewer events are then received at a time.
        track_last_enqueued: Whether the service adds to every event the number, offset and time of the partition's
            newest event. Without it, lag is known only for silent partitions.
        max_message_size: The largest message that a receive link accepts, in bytes.
        link_retry: The delays, in seconds, before a failed link is opened again. After a lost connection the delay does
            not grow and no retry is counted: only attempts to connect are delayed then, by 5 s at most. With a
            `max_retries`, reading ends with the error of the last link; a host then leaves the partition and takes it
            again later.
        startup_timeout: Seconds to keep trying to reach the service, and a host's store, at the start. After the first
            success there is no limit.
    """

    hub: HubName
    consumer_group: Name = "$Default"
    prefetch_events: int = Field(default=3000, ge=1, le=1_000_000)
    prefetch_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    strict_prefetch_bytes: bool = False
    track_last_enqueued: bool = False
    max_message_size: int = Field(default=20 * 1024 * 1024, ge=1024)
    link_retry: Annotated[RetryOptions, completed_by(LINK_RETRY)] = LINK_RETRY
    startup_timeout: Seconds = 60.0


class ReaderSettings(FeedSettings):
    """What a reader reads.

    Args:
        partition_id: The partition to read, such as "0".
        position: Where to begin: an offset ("-1" is the start, "@latest" the end), a sequence number, a datetime with a
            time zone, or an `EventPosition`. Reading begins after the event at the position, or, if it is inclusive,
            with it.
        end: Where to end: a sequence number, a datetime with a time zone, or "@latest" for the newest event at the
            start, each of them included; or an `EventPosition`, included if it is inclusive. None to read forever.
        owner_level: The owner level (epoch) of an exclusive reader, 0 or more: the service disconnects readers with a
            lower one or none. None to share the partition.
        receiver_name: A name that the service shows in the error texts of other readers; None for no name.
        on_data_loss: What to do if events that were to be read are gone: "earliest" and "latest" log a warning and
            continue at the oldest retained event or at the partition's end; "fail" raises `DataLossError`. None means
            "earliest" if retention has removed them, and "fail" if the hub was deleted and recreated while it was read.
    """

    partition_id: Name
    position: Annotated[EventPosition, PlainValidator(start_position)] = EventPosition.earliest()
    end: Annotated[EventPosition | None, PlainValidator(_check_end)] = None
    owner_level: int | None = Field(default=None, ge=0, lt=2**63)
    receiver_name: Name | None = None
    on_data_loss: OnDataLoss | None = None


class HostSettings(FeedSettings):
    """How a host processes a hub.

    Args:
        checkpoint_policy: When checkpoints are written without a call of `context.checkpoint()`.
        initial_position: Where a partition without a checkpoint begins: an offset ("-1" is the start, "@latest" the
            end), a sequence number, a datetime with a time zone, or an `EventPosition`; or a mapping of partition ids
            to these, and partitions that it does not name begin at the start. The first host of a consumer group
            records it in the lease store, and the record is valid for all later hosts. "@latest" is the end of the
            partition when it is first opened. A partition that is added to the hub later always begins at its start.
        owner_id: The host's name in the leases, unique among the hosts. None for a name made of the machine's name, the
            process id and random digits.
        max_batch_size: The most events that `process_events` receives in one call.
        max_wait_time: Seconds without an event after which the host checks that the partition's link is alive and that
            the hub is not ahead of it, and after which it checks again (at least 1). The lag of a partition that was
            silent for so long is unknown until then.
        call_when_idle: Whether `process_events` is called with an empty sequence after `max_wait_time` without an
            event.
        renew_interval: Seconds between renewals of a lease; less than the store's lease duration. None for a third of
            that.
        close_timeout: Seconds that closing a partition, or the host, may take: then running handlers are cancelled, and
            a handler that still does not return is reported.
        ownership_lost_grace: Seconds that a handler may continue after ownership of its partition was lost, at most
            three quarters of `close_timeout`. Then it is cancelled.
        failure_policy: What to do if the processor raises: "retry" the same events, or "stop" the host.
        handler_retry: The delays, in seconds, before a failed batch is given to the processor again. After
            `max_retries` retries, if there is such a limit, the host stops, as with the policy "stop".
        on_data_loss: What to do if events after a checkpoint are gone: continue at the oldest retained event
            ("earliest") or at the partition's end ("latest"); or "fail": leave the partition with a `DataLossError` and
            try again later, while other partitions continue. None means "earliest" if retention has removed them, and
            "fail" if the hub was deleted and recreated, or the checkpoint lies beyond the partition's end. It is
            reported in each case.
        handler_timeout: Seconds after which a method of the processor that has not returned is reported, and again
            whenever that time has doubled.
        on_handler_timeout: What to do beyond that: nothing ("report"), or "cancel" the method, which counts as if it
            had raised `TimeoutError`. A method that blocks the event loop can be neither reported nor cancelled before
            it returns.
    """

    checkpoint_policy: CheckpointPolicy = CheckpointPolicy.manual()
    initial_position: Annotated[Any, PlainValidator(_check_initial_position)] = EventPosition.earliest()
    owner_id: Name | None = None
    max_batch_size: int = Field(default=300, ge=1, le=100_000)
    max_wait_time: Seconds = 30.0
    call_when_idle: bool = False
    renew_interval: Seconds | None = None
    close_timeout: Seconds = 20.0
    ownership_lost_grace: float = Field(default=5.0, ge=0, le=86_400)
    failure_policy: Literal["retry", "stop"] = "retry"
    handler_retry: Annotated[RetryOptions, completed_by(HANDLER_RETRY)] = HANDLER_RETRY
    on_data_loss: OnDataLoss | None = None
    handler_timeout: Seconds = 60.0
    on_handler_timeout: Literal["report", "cancel"] = "report"

    def positions_without_partition(self, partition_ids: Collection[str]) -> list[str]:
        """Return the partitions that `initial_position` names and the hub does not have."""
        configured = self.initial_position
        return [] if isinstance(configured, EventPosition) else sorted(set(configured) - set(partition_ids))
