"""Stream through Azure Event Hubs: an asyncio AMQP 1.0 partition pump, with a local service to run it on."""

from typing import TYPE_CHECKING, Any

from eventpump.clients import BufferedProducer, EventProcessorHost, EventProducer, PartitionReader
from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.claim import PublisherIntent, PublisherState, StoredPublisherState
from eventpump.emulator.server import Emulator
from eventpump.errors import (
    AuthenticationError,
    BufferFullError,
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    ConsumerDisconnectedError,
    DataLossError,
    EntityNotFoundError,
    EventError,
    EventPumpError,
    EventTooLargeError,
    InvalidClientStateError,
    LinkDetachedError,
    OwnershipLostError,
    ProcessorFailedError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    ProtocolError,
    PublishOutcomeUnknownError,
    QuotaExceededError,
    Recovery,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceTimeoutError,
    StoreError,
)
from eventpump.eventhubs.events import Checkpoint, EventData, EventPosition, LastEnqueued, ReceivedEvent
from eventpump.interfaces import HubProperties, PartitionProperties, PublisherStateStore
from eventpump.options.base import RetryOptions
from eventpump.options.credentials import SharedKey, SharedSignature
from eventpump.producer.batch import BatchState, EventBatch
from eventpump.producer.buffered import DeliveryReceipt, SendResult
from eventpump.producer.targets import PartitionPublishingOptions, PartitionPublishingProperties
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.storage.leases.sqlite import SqliteLeaseStore
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
from eventpump.storage.publisher_states.sqlite import SqlitePublisherStateStore

if TYPE_CHECKING:
    from eventpump.storage.leases.blob import BlobLeaseStore
    from eventpump.storage.publisher_states.blob import BlobPublisherStateStore

__all__ = [
    "AuthenticationError",
    "BatchState",
    "BlobLeaseStore",
    "BlobPublisherStateStore",
    "BufferFullError",
    "BufferedProducer",
    "Checkpoint",
    "CheckpointPolicy",
    "CloseReason",
    "ClosedError",
    "ConfigurationError",
    "ConnectionLostError",
    "ConsumerDisconnectedError",
    "DataLossError",
    "DeliveryReceipt",
    "Emulator",
    "EntityNotFoundError",
    "EventBatch",
    "EventData",
    "EventError",
    "EventPosition",
    "EventProcessor",
    "EventProcessorHost",
    "EventProducer",
    "EventPumpError",
    "EventTooLargeError",
    "HubProperties",
    "InvalidClientStateError",
    "LastEnqueued",
    "LinkDetachedError",
    "MemoryLeaseStore",
    "MemoryLeases",
    "MemoryPublisherStateStore",
    "OwnershipLostError",
    "PartitionContext",
    "PartitionProperties",
    "PartitionPublishingOptions",
    "PartitionPublishingProperties",
    "PartitionReader",
    "ProcessorFailedError",
    "ProducerDisconnectedError",
    "ProducerStateLostError",
    "ProtocolError",
    "PublishOutcomeUnknownError",
    "PublisherIntent",
    "PublisherState",
    "PublisherStateStore",
    "QuotaExceededError",
    "ReceivedEvent",
    "Recovery",
    "RequestRefusedError",
    "RetryOptions",
    "SendResult",
    "ServiceBusyError",
    "ServiceError",
    "ServiceTimeoutError",
    "SharedKey",
    "SharedSignature",
    "SqliteLeaseStore",
    "SqlitePublisherStateStore",
    "StoreError",
    "StoredPublisherState",
]


def __getattr__(name: str) -> Any:
    # The storage SDK takes 40 MiB and most of the import's time; only those who use blobs pay for it.
    if name == "BlobLeaseStore":
        from eventpump.storage.leases.blob import BlobLeaseStore

        return BlobLeaseStore
    if name == "BlobPublisherStateStore":
        from eventpump.storage.publisher_states.blob import BlobPublisherStateStore

        return BlobPublisherStateStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
