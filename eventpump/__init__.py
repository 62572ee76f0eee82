"""Stream through Azure Event Hubs: an asyncio AMQP 1.0 partition pump, with a local service to run it on."""

from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, get_type_hints, is_typeddict

from eventpump.clients import (
    BufferedOptions,
    BufferedProducer,
    ClientOptions,
    ConnectionOptions,
    EventHubSource,
    EventProcessorHost,
    EventProducer,
    FeedOptions,
    HostOptions,
    PartitionReader,
    ProducerOptions,
    ReaderOptions,
    make_transport,
)
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.owned import PartitionStatus
from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext
from eventpump.core.balancer import LeasePlan
from eventpump.core.balancers import FairBalancer, GreedyBalancer, RingBalancer, StaticAssignment
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.claim import PublisherIntent, PublisherState, StoredPublisherState
from eventpump.core.fleet import FleetView, PartitionBalancer
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.core.pump_state import PumpState
from eventpump.core.router import HashRouter, PartitionRouter, RingRouter, RoundRobinRouter, StickyRouter
from eventpump.core.sharing import LinkState, PressureState
from eventpump.core.starts import Loss, LossKind
from eventpump.emulator.capture import CaptureSettings
from eventpump.emulator.server import Emulator
from eventpump.errors import (
    AuthenticationError,
    BufferFullError,
    CaptureFileError,
    CaptureGapError,
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
    SourceEndedError,
    StoreError,
)
from eventpump.eventhubs.events import Checkpoint, EventData, EventPosition, LastEnqueued, ReceivedEvent
from eventpump.interfaces import (
    CheckpointClaim,
    CheckpointStore,
    Clock,
    ConsumerScope,
    EventSender,
    EventSource,
    HubDirectory,
    HubProperties,
    LeaseStore,
    MachineClock,
    PartitionProperties,
    ProbedSourceLink,
    PublisherStateStore,
    ReceiveLink,
    ReceiveLinkSpec,
    ReceiveSink,
    ScopeRecord,
    SendLink,
    SendLinkOpener,
    SendLinkSpec,
    SourceLink,
    StoredScopeRecord,
    StoredSubscription,
    SubscriptionRecord,
    Transport,
)
from eventpump.options.base import RetryOptions
from eventpump.options.connection import ConnectionSettings, TransportName, TransportType, connection_settings
from eventpump.options.consumer import Park, StartPosition, SubscriptionOptions
from eventpump.options.credentials import (
    AccessToken,
    Credential,
    NamedKey,
    NamedKeyCredential,
    SasCredential,
    SharedKey,
    SharedSignature,
    TokenCredential,
)
from eventpump.producer.batch import BatchState, EventBatch
from eventpump.producer.buffered import DeliveryReceipt, OnError, OnSuccess, SendResult
from eventpump.producer.targets import PartitionPublishingOptions, PartitionPublishingProperties
from eventpump.reports import (
    BalancerFailed,
    CheckpointDropped,
    CheckpointWritten,
    DataLost,
    EventParked,
    EventSkipped,
    HandlerSlow,
    Hook,
    HostReport,
    LeaseLost,
    LeaseReleased,
    LeaseTaken,
    LinkFailed,
    LinkRewound,
    LinkStalled,
    LinkStateChanged,
    LoopBlocked,
    OutsideReader,
    PartitionFailed,
    PartitionsFound,
    PositionSought,
    ProcessorFailed,
    PumpClosed,
    PumpOverdue,
    PumpStarted,
    RangeReplayed,
    ServiceFailed,
    StartIgnored,
    StoreFailed,
    SubscriptionSlow,
    SubscriptionWithoutProcessor,
    UnexpectedFailure,
)
from eventpump.sources.capture import CaptureSource
from eventpump.sources.files import CaptureContainer, CaptureFiles
from eventpump.sources.generator import GeneratorSource
from eventpump.sources.memory import MemorySource
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.storage.leases.sqlite import SqliteLeaseStore
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
from eventpump.storage.publisher_states.sqlite import SqlitePublisherStateStore

if TYPE_CHECKING:
    from eventpump.storage.leases.blob import BlobLeaseStore
    from eventpump.storage.publisher_states.blob import BlobPublisherStateStore

__all__ = [
    "AccessToken",
    "AuthenticationError",
    "BalancerFailed",
    "BatchState",
    "BlobLeaseStore",
    "BlobPublisherStateStore",
    "BufferFullError",
    "BufferedOptions",
    "BufferedProducer",
    "CaptureContainer",
    "CaptureFileError",
    "CaptureFiles",
    "CaptureGapError",
    "CaptureSettings",
    "CaptureSource",
    "Checkpoint",
    "CheckpointClaim",
    "CheckpointDropped",
    "CheckpointPolicy",
    "CheckpointStore",
    "CheckpointWritten",
    "ClientOptions",
    "Clock",
    "CloseReason",
    "ClosedError",
    "ConfigurationError",
    "ConnectionLostError",
    "ConnectionOptions",
    "ConnectionSettings",
    "ConsumerDisconnectedError",
    "ConsumerScope",
    "Credential",
    "DataLossError",
    "DataLost",
    "DeliveryReceipt",
    "Emulator",
    "EntityNotFoundError",
    "EventBatch",
    "EventData",
    "EventError",
    "EventHubSource",
    "EventParked",
    "EventPosition",
    "EventProcessor",
    "EventProcessorHost",
    "EventProducer",
    "EventPumpError",
    "EventSender",
    "EventSkipped",
    "EventSource",
    "EventTooLargeError",
    "FairBalancer",
    "FeedOptions",
    "FleetView",
    "GeneratorSource",
    "GreedyBalancer",
    "HandlerSlow",
    "HashRouter",
    "Hook",
    "HostOptions",
    "HostReport",
    "HubDirectory",
    "HubProperties",
    "InvalidClientStateError",
    "KeyedProcessor",
    "LastEnqueued",
    "LeaseLost",
    "LeasePlan",
    "LeaseReleased",
    "LeaseSnapshot",
    "LeaseStore",
    "LeaseTaken",
    "LinkDetachedError",
    "LinkFailed",
    "LinkRewound",
    "LinkStalled",
    "LinkState",
    "LinkStateChanged",
    "LoopBlocked",
    "Loss",
    "LossKind",
    "MachineClock",
    "MemoryLeaseStore",
    "MemoryLeases",
    "MemoryPublisherStateStore",
    "MemorySource",
    "NamedKey",
    "NamedKeyCredential",
    "OnError",
    "OnSuccess",
    "OutsideReader",
    "OwnershipLostError",
    "Park",
    "PartitionBalancer",
    "PartitionContext",
    "PartitionFailed",
    "PartitionLease",
    "PartitionProperties",
    "PartitionPublishingOptions",
    "PartitionPublishingProperties",
    "PartitionReader",
    "PartitionRouter",
    "PartitionStatus",
    "PartitionsFound",
    "PositionSought",
    "PressureState",
    "ProbedSourceLink",
    "ProcessorFailed",
    "ProcessorFailedError",
    "ProducerDisconnectedError",
    "ProducerOptions",
    "ProducerStateLostError",
    "ProtocolError",
    "PublishOutcomeUnknownError",
    "PublisherIntent",
    "PublisherState",
    "PublisherStateStore",
    "PumpClosed",
    "PumpOverdue",
    "PumpStarted",
    "PumpState",
    "QuotaExceededError",
    "RangeReplayed",
    "ReaderOptions",
    "ReceiveLink",
    "ReceiveLinkSpec",
    "ReceiveSink",
    "ReceivedEvent",
    "Recovery",
    "RequestRefusedError",
    "RetryOptions",
    "RingBalancer",
    "RingRouter",
    "RoundRobinRouter",
    "SasCredential",
    "ScopeRecord",
    "SendLink",
    "SendLinkOpener",
    "SendLinkSpec",
    "SendResult",
    "ServiceBusyError",
    "ServiceError",
    "ServiceFailed",
    "ServiceTimeoutError",
    "SharedKey",
    "SharedSignature",
    "SourceEndedError",
    "SourceLink",
    "SqliteLeaseStore",
    "SqlitePublisherStateStore",
    "StartIgnored",
    "StartPosition",
    "StaticAssignment",
    "StickyRouter",
    "StoreError",
    "StoreFailed",
    "StoredPublisherState",
    "StoredScopeRecord",
    "StoredSubscription",
    "SubscriptionOptions",
    "SubscriptionRecord",
    "SubscriptionSlow",
    "SubscriptionWithoutProcessor",
    "TokenCredential",
    "Transport",
    "TransportName",
    "TransportType",
    "UnexpectedFailure",
    "connection_settings",
    "make_transport",
]


def _public(made: Any) -> Any:
    """Show what is public under its public name, in errors, reprs and documentation; pickle finds it there too."""
    if isinstance(made, type | FunctionType):
        if "__annotations__" in vars(made) and isinstance(made, type) and not is_typeddict(made):
            # They are text, which dataclasses' and pydantic's users could not evaluate in another module than theirs.
            with suppress(NameError):  # imported for checkers only
                kinds = get_type_hints(made, include_extras=True)
                made.__annotations__.update((name, kinds[name]) for name in made.__annotations__)
                for field in fields(made) if is_dataclass(made) else ():
                    field.type = kinds[field.name]
        made.__module__ = __name__
    return made


def __getattr__(name: str) -> Any:
    # The storage SDK takes 40 MiB and most of the import's time; only those who use blobs pay for it.
    if name == "BlobLeaseStore":
        from eventpump.storage.leases.blob import BlobLeaseStore

        return _public(BlobLeaseStore)
    if name == "BlobPublisherStateStore":
        from eventpump.storage.publisher_states.blob import BlobPublisherStateStore

        return _public(BlobPublisherStateStore)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _name in __all__:
    _public(globals().get(_name))
