"""Stream through Azure Event Hubs: an asyncio AMQP 1.0 partition pump, with a local service to run it on.

Here are the names that most programs need. The rest has one home each: `eventpump.errors`, `eventpump.reports`,
`eventpump.interfaces`, `eventpump.options`, `eventpump.credentials`, `eventpump.spark` and `eventpump.testing`.

A public name is imported from its module when it is first used, so that a program loads what it uses: the emulator,
SQLite and the storage SDK take most of the time and memory that all of it would.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from eventpump import homes as _homes

if TYPE_CHECKING:
    from eventpump import credentials as credentials
    from eventpump import errors as errors
    from eventpump import interfaces as interfaces
    from eventpump import options as options
    from eventpump import reports as reports
    from eventpump.app.application import EventHubsApp as EventHubsApp
    from eventpump.clients.connection import make_transport as make_transport
    from eventpump.clients.consumers import EventHubSource as EventHubSource
    from eventpump.clients.consumers import EventProcessorHost as EventProcessorHost
    from eventpump.clients.consumers import PartitionReader as PartitionReader
    from eventpump.clients.producers import BufferedProducer as BufferedProducer
    from eventpump.clients.producers import EventProducer as EventProducer
    from eventpump.consumer.keyed import KeyedProcessor as KeyedProcessor
    from eventpump.consumer.processor import CloseReason as CloseReason
    from eventpump.consumer.processor import EventProcessor as EventProcessor
    from eventpump.consumer.processor import PartitionContext as PartitionContext
    from eventpump.consumer.pump.batches import ReceivedBatch as ReceivedBatch
    from eventpump.core.balancers import FairBalancer as FairBalancer
    from eventpump.core.balancers import GreedyBalancer as GreedyBalancer
    from eventpump.core.balancers import RingBalancer as RingBalancer
    from eventpump.core.balancers import StaticAssignment as StaticAssignment
    from eventpump.core.checkpoint import CheckpointPolicy as CheckpointPolicy
    from eventpump.core.router import HashRouter as HashRouter
    from eventpump.core.router import RingRouter as RingRouter
    from eventpump.core.router import RoundRobinRouter as RoundRobinRouter
    from eventpump.core.router import StickyRouter as StickyRouter
    from eventpump.emulator.server import Emulator as Emulator
    from eventpump.errors import AuthenticationError as AuthenticationError
    from eventpump.errors import BufferFullError as BufferFullError
    from eventpump.errors import ConfigurationError as ConfigurationError
    from eventpump.errors import DataLossError as DataLossError
    from eventpump.errors import DecodeError as DecodeError
    from eventpump.errors import EntityNotFoundError as EntityNotFoundError
    from eventpump.errors import EventError as EventError
    from eventpump.errors import EventPumpError as EventPumpError
    from eventpump.errors import EventTooLargeError as EventTooLargeError
    from eventpump.errors import ProducerDisconnectedError as ProducerDisconnectedError
    from eventpump.errors import PublishOutcomeUnknownError as PublishOutcomeUnknownError
    from eventpump.errors import ServiceError as ServiceError
    from eventpump.errors import StoreError as StoreError
    from eventpump.eventhubs.cloudevents import CloudEvent as CloudEvent
    from eventpump.eventhubs.codecs import PayloadCodec as PayloadCodec
    from eventpump.eventhubs.decoding import PayloadDecoder as PayloadDecoder
    from eventpump.eventhubs.events import EventData as EventData
    from eventpump.eventhubs.events import EventPosition as EventPosition
    from eventpump.eventhubs.events import ReceivedEvent as ReceivedEvent
    from eventpump.options.base import RetryOptions as RetryOptions
    from eventpump.options.consumer import Park as Park
    from eventpump.producer.batch import EventBatch as EventBatch
    from eventpump.producer.intake import DeliveryReceipt as DeliveryReceipt
    from eventpump.producer.intake import SendResult as SendResult
    from eventpump.sources.capture import CaptureSource as CaptureSource
    from eventpump.sources.files import CaptureContainer as CaptureContainer
    from eventpump.sources.files import CaptureFiles as CaptureFiles
    from eventpump.sources.generator import GeneratorSource as GeneratorSource
    from eventpump.sources.memory import MemorySource as MemorySource
    from eventpump.storage.leases.blob import BlobLeaseStore as BlobLeaseStore
    from eventpump.storage.leases.memory import MemoryLeases as MemoryLeases
    from eventpump.storage.leases.memory import MemoryLeaseStore as MemoryLeaseStore
    from eventpump.storage.leases.ownership import BlobOwnershipStore as BlobOwnershipStore
    from eventpump.storage.leases.sqlite import SqliteLeaseStore as SqliteLeaseStore
    from eventpump.storage.publisher_states.blob import BlobPublisherStateStore as BlobPublisherStateStore
    from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore as MemoryPublisherStateStore
    from eventpump.storage.publisher_states.sqlite import SqlitePublisherStateStore as SqlitePublisherStateStore

    __version__: str

_PACKAGES: Final = (
    *("checkpoints", "credentials", "errors", "health", "interfaces", "lag", "options", "reports", "spark"),
    *("telemetry", "testing"),
)
"""The public modules beside this one."""

if not TYPE_CHECKING:  # to checkers it would mean that every name exists
    # What checkers read is the imports above.
    __all__, _find, _ = _homes.public(
        __name__,
        {
            "app.application": "EventHubsApp",
            "clients.connection": "make_transport",
            "clients.consumers": "EventHubSource EventProcessorHost PartitionReader",
            "clients.producers": "BufferedProducer EventProducer",
            "consumer.keyed": "KeyedProcessor",
            "consumer.processor": "CloseReason EventProcessor PartitionContext",
            "consumer.pump.batches": "ReceivedBatch",
            "core.balancers": "FairBalancer GreedyBalancer RingBalancer StaticAssignment",
            "core.checkpoint": "CheckpointPolicy",
            "core.router": "HashRouter RingRouter RoundRobinRouter StickyRouter",
            "emulator.server": "Emulator",
            "errors": (
                "AuthenticationError BufferFullError ConfigurationError DataLossError DecodeError EntityNotFoundError "
                "EventError EventPumpError EventTooLargeError ProducerDisconnectedError PublishOutcomeUnknownError "
                "ServiceError StoreError"
            ),
            "eventhubs.cloudevents": "CloudEvent",
            "eventhubs.codecs": "PayloadCodec",
            "eventhubs.decoding": "PayloadDecoder",
            "eventhubs.events": "EventData EventPosition ReceivedEvent",
            "options.base": "RetryOptions",
            "options.consumer": "Park",
            "producer.batch": "EventBatch",
            "producer.intake": "DeliveryReceipt SendResult",
            "sources.capture": "CaptureSource",
            "sources.files": "CaptureContainer CaptureFiles",
            "sources.generator": "GeneratorSource",
            "sources.memory": "MemorySource",
            "storage.leases.blob": "BlobLeaseStore",
            "storage.leases.memory": "MemoryLeaseStore MemoryLeases",
            "storage.leases.ownership": "BlobOwnershipStore",
            "storage.leases.sqlite": "SqliteLeaseStore",
            "storage.publisher_states.blob": "BlobPublisherStateStore",
            "storage.publisher_states.memory": "MemoryPublisherStateStore",
            "storage.publisher_states.sqlite": "SqlitePublisherStateStore",
        },
    )

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata

            return metadata.version(__name__)
        return import_module(f"{__name__}.{name}") if name in _PACKAGES else _find(name)

    def __dir__() -> list[str]:
        return sorted((*__all__, *_PACKAGES, "__version__"))
