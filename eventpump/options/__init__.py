"""Options as types, for programs that pass them on, and the settings of a connection."""

from typing import TYPE_CHECKING

from eventpump import homes

if TYPE_CHECKING:
    from eventpump.eventhubs.codecs import EventDecoding as EventDecoding
    from eventpump.eventhubs.codecs import EventEncoding as EventEncoding
    from eventpump.options.connection import ClientOptions as ClientOptions
    from eventpump.options.connection import ConnectionOptions as ConnectionOptions
    from eventpump.options.connection import ConnectionSettings as ConnectionSettings
    from eventpump.options.connection import TransportName as TransportName
    from eventpump.options.connection import TransportType as TransportType
    from eventpump.options.connection import connection_settings as connection_settings
    from eventpump.options.consumer import FeedOptions as FeedOptions
    from eventpump.options.consumer import HostOptions as HostOptions
    from eventpump.options.consumer import ReaderOptions as ReaderOptions
    from eventpump.options.consumer import StartPosition as StartPosition
    from eventpump.options.consumer import SubscriberOptions as SubscriberOptions
    from eventpump.options.consumer import SubscriptionOptions as SubscriptionOptions
    from eventpump.options.producer import BufferedOptions as BufferedOptions
    from eventpump.options.producer import OnError as OnError
    from eventpump.options.producer import OnSuccess as OnSuccess
    from eventpump.options.producer import PartitionPublishingOptions as PartitionPublishingOptions
    from eventpump.options.producer import PartitionPublishingProperties as PartitionPublishingProperties
    from eventpump.options.producer import ProducerOptions as ProducerOptions
else:  # to checkers it would mean that every name exists
    __all__, __getattr__, __dir__ = homes.public(
        __name__,
        {
            "eventhubs.codecs": "EventDecoding EventEncoding",
            "options.connection": (
                "ClientOptions ConnectionOptions ConnectionSettings TransportName TransportType connection_settings"
            ),
            "options.consumer": (
                "FeedOptions HostOptions ReaderOptions StartPosition SubscriberOptions SubscriptionOptions"
            ),
            "options.producer": (
                "BufferedOptions OnError OnSuccess PartitionPublishingOptions PartitionPublishingProperties "
                "ProducerOptions"
            ),
        },
    )
