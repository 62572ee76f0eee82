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
"""A place to begin at: an offset ("-1" the start, "@latest" the end), a sequence number, a time, or a position."""


def start_position(value: object) -> EventPosition:
    """Make a position of what a user gives for one.

    Raises:
        ValueError: It is none.
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
        # No checkpoint can say so, and a host pins its start by one.
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
        prefetch_events: Events received and not delivered yet, per partition.
        prefetch_bytes: The same in bytes. Credit is granted by estimated sizes, so what is on its way when larger
            messages than before arrive comes on top; the batch in the handler's hands does too.
        strict_prefetch_bytes: Grant credit by the link's maximum message size, so that `prefetch_bytes` holds exactly.
        track_last_enqueued: Have every event tell of the partition's newest one; lag is known only with it, or where a
            silent partition was looked at.
        link_retry: The delays before a failed link is opened again; by default 0.2 s to 30 s, without a limit. After a
            lost connection the delay does not grow, and nothing counts as a retry: only attempts to connect are spaced
            then, by 5 s at most. With a limit, reading ends with the error of the last link; a host then leaves the
            partition, and takes it again later.
        startup_timeout: Seconds to go on trying to reach the service, and a host's store, at the start; what was
            reached once is tried for ever.
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
        position: Where it begins.
        end: Where it ends, itself only included where it says so: a sequence number, an enqueued time, or "@latest" for
            the newest event at the start. None for never. Text and numbers given here include themselves.
        owner_level: The epoch of an exclusive reader; None shares the partition.
        receiver_name: Shown by the service in the texts of other readers' errors.
        on_data_loss: What follows where events that were to be read are gone: "earliest" and "latest" log a warning and
            go on at the oldest event kept or at the partition's end; "fail" raises `DataLossError`. None is "earliest"
            where retention has dropped them, and "fail" where the hub was made again while the reader read it.
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
        checkpoint_policy: When checkpoints are written unasked; by default never.
        initial_position: Where a partition without a checkpoint begins; a mapping gives it per partition id, and what
            it lacks begins at the start of the stream. The first host of a consumer group records it with the leases,
            and what is recorded counts for every later one. "@latest" is the end of the partition when it is first
            opened. A partition that is added to the hub later begins at its beginning in any case.
        owner_id: The owner's name in leases; None for one made of machine, process and chance.
        max_batch_size: The most events `process_events` gets at once.
        max_wait_time: Seconds without an event after which the partition's link is checked, and again while there is
            none (1 at the least): is it alive, and is the hub ahead of it? Silent for so long, its lag is not known.
        call_when_idle: Call `process_events` with no event at that moment.
        renew_interval: Seconds between renewals; None for a third of the lease duration.
        close_timeout: Seconds a partition's end may take before it is reported.
        ownership_lost_grace: Seconds a handler may go on after ownership was lost, within three quarters of
            `close_timeout`.
        failure_policy: What follows when the processor raises: "retry" the same events, or "stop" the host.
        handler_retry: The delays before a failed batch is given to the processor again; by default 0.5 s to 30 s,
            without a limit. After the last retry of a limit the host stops, as with the policy "stop".
        on_data_loss: What follows where events after a checkpoint are gone: go on at the oldest event kept ("earliest")
            or at the partition's end ("latest"), or "fail": the partition is left with a `DataLossError` and tried
            again, while the others go on. None is "earliest" where retention has dropped them, and "fail" where the hub
            was deleted and made again, or the checkpoint lies beyond the partition's end. Reported in any case.
        handler_timeout: Seconds after which a method of the processor that has not returned is reported, and again each
            time that doubles.
        on_handler_timeout: What follows beside: "report" for nothing, or "cancel" it, which counts as raising
            `TimeoutError`, under the failure policy. A method that blocks the event loop can be neither reported nor
            cancelled before it returns.
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
