"""The names of OpenTelemetry's conventions for messaging, and the library's own, as they are recorded.

The conventions for messaging are in development. These are those of the schema that `SCHEMA_URL` names.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
SCOPE: Final = "eventpump"

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
MESSAGE_COUNT: Final = "messaging.batch.message_count"
GROUP: Final = "messaging.consumer.group.name"
CLIENT_ID: Final = "messaging.client.id"
MESSAGE_ID: Final = "messaging.message.id"
CONVERSATION_ID: Final = "messaging.message.conversation_id"
ENQUEUED_TIME: Final = "messaging.eventhubs.message.enqueued_time"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
PEER_ADDRESS: Final = "network.peer.address"
PEER_PORT: Final = "network.peer.port"
ERROR_TYPE: Final = "error.type"

AZURE_NAMESPACE: Final = "az.namespace"
"""By this attribute of a span, and the next one of a link, Azure Monitor shows what belongs to Event Hubs."""
AZURE_ENQUEUED_TIME: Final = "enqueuedTime"

EVENT_HUBS: Final = "eventhubs"
AZURE_EVENT_HUBS: Final = "Microsoft.EventHub"


class Operation(NamedTuple):
    """What a span or a measurement is about; its type is None where the conventions have none."""

    name: str
    type: str | None


CREATE: Final = Operation("create", "create")
SEND: Final = Operation("send", "send")
RECEIVE: Final = Operation("receive", "receive")
PROCESS: Final = Operation("process", "process")
CHECKPOINT: Final = Operation("checkpoint", "settle")
GET_HUB: Final = Operation("get_event_hub_properties", None)
GET_PARTITION: Final = Operation("get_partition_properties", None)


class Instrument(NamedTuple):
    """A metric; its unit is in the form of UCUM."""

    name: str
    unit: str
    description: str


BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds that the conventions give for both durations, in seconds."""

OPERATION_DURATION: Final = Instrument(
    "messaging.client.operation.duration", "s", "How long a send, a receive, a checkpoint or a management read took."
)
SENT_MESSAGES: Final = Instrument(
    "messaging.client.sent.messages", "{message}", "Events that were sent to the hub, or could not be."
)
CONSUMED_MESSAGES: Final = Instrument(
    "messaging.client.consumed.messages", "{message}", "Events that were passed to the program."
)
PROCESS_DURATION: Final = Instrument("messaging.process.duration", "s", "How long the program processed a batch.")
CONSUMER_LAG: Final = Instrument(
    "messaging.eventhubs.consumer.lag", "s", "How long ago the first event of a batch was enqueued."
)
PARTITION_LAG: Final = Instrument(
    "eventpump.partition.lag", "{event}", "How many events of a partition are not delivered, or not checkpointed."
)
PARTITION_OWNED: Final = Instrument("eventpump.partition.owned", "{partition}", "The partitions that this host runs.")
PARTITION_MOVES: Final = Instrument(
    "eventpump.partition.moves", "{move}", "Leases that this host acquired, stole, lost or released."
)
HANDLER_FAILURES: Final = Instrument("eventpump.handler.failures", "{failure}", "Failures of the program's processor.")
LINK_REOPENS: Final = Instrument("eventpump.link.reopens", "{reopen}", "Receive links that failed and are reopened.")
STORE_FAILURES: Final = Instrument("eventpump.store.failures", "{failure}", "Calls of the lease store that failed.")
LOOP_BLOCKED: Final = Instrument("eventpump.loop.blocked", "s", "How long the event loop was blocked.")
CACHE_SIZE: Final = Instrument("eventpump.cache.size", "By", "Bytes of events received and not processed yet.")
PRODUCER_BUFFER: Final = Instrument("eventpump.producer.buffer", "By", "Bytes of events accepted and not sent yet.")
PRODUCER_IN_DOUBT: Final = Instrument(
    "eventpump.producer.in_doubt", "{message}", "Events of idempotent sends whose outcome is not known."
)

SUBSCRIPTION: Final = "eventpump.subscription"
"""Of the lag of a subscription beside that of the host's own processor, which would have the same attributes."""
POSITION: Final = "position"
STATE: Final = "state"
REASON: Final = "reason"
OUTCOME: Final = "outcome"
OPERATION: Final = "operation"
