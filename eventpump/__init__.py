"""Stream through Azure Event Hubs: an asyncio AMQP 1.0 partition pump, with a local service to run it on.

A public name is imported from its module when it is first used, so that a program loads what it uses: the emulator,
SQLite and the storage SDK take most of the time and memory that all of it would.
"""

import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, get_type_hints, is_typeddict

if TYPE_CHECKING:
    from eventpump.app.application import EventHubsApp
    from eventpump.app.hubs import AppHub, AppHubs
    from eventpump.clients.connection import make_transport
    from eventpump.clients.consumers import EventHubSource, EventProcessorHost, PartitionReader
    from eventpump.clients.producers import BufferedProducer, EventProducer
    from eventpump.compiled import BuildInfo, build_info
    from eventpump.consumer.keyed import KeyedProcessor
    from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext
    from eventpump.consumer.pump.batches import BatchIterator, ReceivedBatch
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
    from eventpump.core.status import BatchState, ProducerStats, SendCount
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
        DecodeError,
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
    from eventpump.eventhubs.cloudevents import CloudEvent
    from eventpump.eventhubs.codecs import EventDecoding, EventEncoding, PayloadCodec
    from eventpump.eventhubs.decoding import Decoder, PayloadDecoder
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
    from eventpump.options.connection import (
        ClientOptions,
        ConnectionOptions,
        ConnectionSettings,
        TransportName,
        TransportType,
        connection_settings,
    )
    from eventpump.options.consumer import (
        FeedOptions,
        HostOptions,
        Park,
        ReaderOptions,
        StartPosition,
        SubscriberOptions,
        SubscriptionOptions,
    )
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
    from eventpump.options.producer import (
        BufferedOptions,
        OnError,
        OnSuccess,
        PartitionPublishingOptions,
        PartitionPublishingProperties,
        ProducerOptions,
    )
    from eventpump.producer.batch import EventBatch
    from eventpump.producer.intake import DeliveryReceipt, SendResult
    from eventpump.reports import (
        BalancerFailed,
        BatchNotTaken,
        CheckpointDropped,
        CheckpointWritten,
        DataLost,
        EventParked,
        EventRange,
        EventSkipped,
        HandlerSlow,
        Hook,
        HostReport,
        LeaseLost,
        LeaseReleased,
        LeaseStoreEmpty,
        LeaseTaken,
        LinkFailed,
        LinkRestored,
        LinkRewound,
        LinkStalled,
        LinkStateChanged,
        LoopBlocked,
        OutsideReader,
        PartitionFailed,
        PartitionsFound,
        PartitionStatus,
        PositionSought,
        ProcessorFailed,
        PumpClosed,
        PumpOverdue,
        PumpStarted,
        RangeReplayed,
        ServiceFailed,
        StartIgnored,
        StoreFailed,
        StoreRestored,
        SubscriptionSlow,
        SubscriptionWithoutProcessor,
        UnexpectedFailure,
    )
    from eventpump.sources.capture import CaptureSource
    from eventpump.sources.files import CaptureContainer, CaptureFiles
    from eventpump.sources.generator import GeneratorSource
    from eventpump.sources.memory import MemorySource
    from eventpump.storage.leases.blob import BlobLeaseStore
    from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
    from eventpump.storage.leases.sqlite import SqliteLeaseStore
    from eventpump.storage.publisher_states.blob import BlobPublisherStateStore
    from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
    from eventpump.storage.publisher_states.sqlite import SqlitePublisherStateStore

    __version__: str

__all__ = [
    "AccessToken",
    "AppHub",
    "AppHubs",
    "AuthenticationError",
    "BalancerFailed",
    "BatchIterator",
    "BatchNotTaken",
    "BatchState",
    "BlobLeaseStore",
    "BlobPublisherStateStore",
    "BufferFullError",
    "BufferedOptions",
    "BufferedProducer",
    "BuildInfo",
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
    "CloudEvent",
    "ConfigurationError",
    "ConnectionLostError",
    "ConnectionOptions",
    "ConnectionSettings",
    "ConsumerDisconnectedError",
    "ConsumerScope",
    "Credential",
    "DataLossError",
    "DataLost",
    "DecodeError",
    "Decoder",
    "DeliveryReceipt",
    "Emulator",
    "EntityNotFoundError",
    "EventBatch",
    "EventData",
    "EventDecoding",
    "EventEncoding",
    "EventError",
    "EventHubSource",
    "EventHubsApp",
    "EventParked",
    "EventPosition",
    "EventProcessor",
    "EventProcessorHost",
    "EventProducer",
    "EventPumpError",
    "EventRange",
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
    "LeaseStoreEmpty",
    "LeaseTaken",
    "LinkDetachedError",
    "LinkFailed",
    "LinkRestored",
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
    "PayloadCodec",
    "PayloadDecoder",
    "PositionSought",
    "PressureState",
    "ProbedSourceLink",
    "ProcessorFailed",
    "ProcessorFailedError",
    "ProducerDisconnectedError",
    "ProducerOptions",
    "ProducerStateLostError",
    "ProducerStats",
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
    "ReceivedBatch",
    "ReceivedEvent",
    "Recovery",
    "RequestRefusedError",
    "RetryOptions",
    "RingBalancer",
    "RingRouter",
    "RoundRobinRouter",
    "SasCredential",
    "ScopeRecord",
    "SendCount",
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
    "StoreRestored",
    "StoredPublisherState",
    "StoredScopeRecord",
    "StoredSubscription",
    "SubscriberOptions",
    "SubscriptionOptions",
    "SubscriptionRecord",
    "SubscriptionSlow",
    "SubscriptionWithoutProcessor",
    "TokenCredential",
    "Transport",
    "TransportName",
    "TransportType",
    "UnexpectedFailure",
    "build_info",
    "connection_settings",
    "make_transport",
]

_MODULES: Final = {
    "app.application": "EventHubsApp",
    "app.hubs": "AppHub AppHubs",
    "clients.connection": "make_transport",
    "clients.consumers": "EventHubSource EventProcessorHost PartitionReader",
    "clients.producers": "BufferedProducer EventProducer",
    "compiled": "BuildInfo build_info",
    "consumer.pump.batches": "BatchIterator ReceivedBatch",
    "consumer.keyed": "KeyedProcessor",
    "consumer.processor": "CloseReason EventProcessor PartitionContext",
    "core.balancer": "LeasePlan",
    "core.balancers": "FairBalancer GreedyBalancer RingBalancer StaticAssignment",
    "core.checkpoint": "CheckpointPolicy",
    "core.claim": "PublisherIntent PublisherState StoredPublisherState",
    "core.fleet": "FleetView PartitionBalancer",
    "core.lease": "LeaseSnapshot PartitionLease",
    "core.pump_state": "PumpState",
    "core.router": "HashRouter PartitionRouter RingRouter RoundRobinRouter StickyRouter",
    "core.sharing": "LinkState PressureState",
    "core.starts": "Loss LossKind",
    "core.status": "BatchState ProducerStats SendCount",
    "emulator.capture": "CaptureSettings",
    "emulator.server": "Emulator",
    "errors": (
        "AuthenticationError BufferFullError CaptureFileError CaptureGapError ClosedError ConfigurationError "
        "ConnectionLostError ConsumerDisconnectedError DataLossError DecodeError EntityNotFoundError EventError "
        "EventPumpError EventTooLargeError InvalidClientStateError LinkDetachedError OwnershipLostError "
        "ProcessorFailedError ProducerDisconnectedError ProducerStateLostError ProtocolError "
        "PublishOutcomeUnknownError QuotaExceededError Recovery RequestRefusedError ServiceBusyError ServiceError "
        "ServiceTimeoutError SourceEndedError StoreError"
    ),
    "eventhubs.cloudevents": "CloudEvent",
    "eventhubs.codecs": "EventDecoding EventEncoding PayloadCodec",
    "eventhubs.decoding": "Decoder PayloadDecoder",
    "eventhubs.events": "Checkpoint EventData EventPosition LastEnqueued ReceivedEvent",
    "interfaces": (
        "CheckpointClaim CheckpointStore Clock ConsumerScope EventSender EventSource HubDirectory HubProperties "
        "LeaseStore MachineClock PartitionProperties ProbedSourceLink PublisherStateStore ReceiveLink "
        "ReceiveLinkSpec ReceiveSink ScopeRecord SendLink SendLinkOpener SendLinkSpec SourceLink StoredScopeRecord "
        "StoredSubscription SubscriptionRecord Transport"
    ),
    "options.base": "RetryOptions",
    "options.connection": (
        "ClientOptions ConnectionOptions ConnectionSettings TransportName TransportType connection_settings"
    ),
    "options.consumer": (
        "FeedOptions HostOptions Park ReaderOptions StartPosition SubscriberOptions SubscriptionOptions"
    ),
    "options.credentials": (
        "AccessToken Credential NamedKey NamedKeyCredential SasCredential SharedKey SharedSignature TokenCredential"
    ),
    "options.producer": (
        "BufferedOptions OnError OnSuccess PartitionPublishingOptions PartitionPublishingProperties ProducerOptions"
    ),
    "producer.batch": "EventBatch",
    "producer.intake": "DeliveryReceipt SendResult",
    "reports": (
        "BalancerFailed BatchNotTaken CheckpointDropped CheckpointWritten DataLost EventParked EventRange "
        "EventSkipped HandlerSlow Hook HostReport LeaseLost LeaseReleased LeaseStoreEmpty LeaseTaken LinkFailed "
        "LinkRestored LinkRewound LinkStalled LinkStateChanged LoopBlocked OutsideReader PartitionFailed "
        "PartitionStatus PartitionsFound PositionSought ProcessorFailed PumpClosed PumpOverdue PumpStarted "
        "RangeReplayed ServiceFailed StartIgnored StoreFailed StoreRestored SubscriptionSlow "
        "SubscriptionWithoutProcessor UnexpectedFailure"
    ),
    "sources.capture": "CaptureSource",
    "sources.files": "CaptureContainer CaptureFiles",
    "sources.generator": "GeneratorSource",
    "sources.memory": "MemorySource",
    "storage.leases.blob": "BlobLeaseStore",
    "storage.leases.memory": "MemoryLeaseStore MemoryLeases",
    "storage.leases.sqlite": "SqliteLeaseStore",
    "storage.publisher_states.blob": "BlobPublisherStateStore",
    "storage.publisher_states.memory": "MemoryPublisherStateStore",
    "storage.publisher_states.sqlite": "SqlitePublisherStateStore",
}
"""The public names of each module. What checkers read is the imports above."""

_HOMES: Final = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}


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


def _publish() -> None:
    """Make the names of all modules that are loaded attributes of this one.

    Not only the one that was asked for: an error is printed under its public name by a program that never mentions it.
    """
    for name, home in _HOMES.items():
        module = sys.modules.get(home)
        if name in globals() or module is None or getattr(module.__spec__, "_initializing", False):
            continue
        globals()[name] = _public(getattr(module, name))


if not TYPE_CHECKING:  # to checkers it would mean that every name exists

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata

            return metadata.version(__name__)
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        made = getattr(import_module(_HOMES[name]), name)
        _publish()
        # A module that another thread is importing is published later.
        return globals().get(name, made)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
