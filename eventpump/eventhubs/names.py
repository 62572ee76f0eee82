"""The names Event Hubs puts on the wire (protocol.md 1, 3, 5, 6, 7, 8)."""

from __future__ import annotations

from typing import Final

from eventpump.amqp.types import Symbol, ULong

VENDOR: Final = "com.microsoft:"

CBS_NODE: Final = "$cbs"
MANAGEMENT_NODE: Final = "$management"
DEFAULT_CONSUMER_GROUP: Final = "$Default"

# ------------------------------------------------------------------------------- link properties, capabilities

EPOCH: Final = Symbol(VENDOR + "epoch")
"""Receiver link property, long: the owner level."""
RECEIVER_NAME: Final = Symbol(VENDOR + "receiver-name")

RUNTIME_METRIC: Final = Symbol(VENDOR + "enable-receiver-runtime-metric")
"""Capability: annotate every event with its partition's newest one."""
GEOREPLICATION: Final = Symbol(VENDOR + "georeplication")
"""Capability: offsets that are no numbers are understood."""
TIMEOUT: Final = Symbol(VENDOR + "timeout")
"""A link's, in ms or (Python) in seconds; the service answers with its own."""
TRACKING_ID: Final = Symbol(VENDOR + "tracking-id")
IDEMPOTENT_PRODUCER: Final = Symbol(VENDOR + "idempotent-producer")

PRODUCER_ID: Final = Symbol(VENDOR + "producer-id")
"""long; link property and message annotation, as the next two are."""
PRODUCER_EPOCH: Final = Symbol(VENDOR + "producer-epoch")
"""short."""
PRODUCER_SEQUENCE_NUMBER: Final = Symbol(VENDOR + "producer-sequence-number")
"""int."""

# ------------------------------------------------------------------------------------------------- annotations

# Those that events are read and written with are imported above; the LAST_ENQUEUED_ ones are keys of a partition
# read's answer too.
PUBLISHER: Final = Symbol("x-opt-publisher")

# ----------------------------------------------------------------------------------------------------- filters

SELECTOR_FILTER: Final = Symbol("apache.org:selector-filter:string")
"""The key of the filter map, and the descriptor we send."""
SELECTOR_CODE: Final = ULong(0x0000_0013_7000_000A)
"""The descriptor that the service answers with (protocol.md 5.1)."""
ENQUEUED_TIME_BEFORE: Final = "x-opt-enqueuedtimeutc"
"""What the enqueued time was called in selectors of old clients."""

# ---------------------------------------------------------------------------------------------------- messages

BATCH_MESSAGE_FORMAT: Final = 0x8001_3700

# -------------------------------------------------------------------------------- requests to $cbs and $management

OPERATION: Final = "operation"
PUT_TOKEN: Final = "put-token"  # noqa: S105 - a word of the protocol
READ: Final = "READ"
TYPE: Final = "type"
NAME: Final = "name"
EXPIRATION: Final = "expiration"
PARTITION: Final = "partition"
SECURITY_TOKEN: Final = "security_token"  # noqa: S105 - a word of the protocol
STATUS_CODE: Final = "status-code"
STATUS_DESCRIPTION: Final = "status-description"
ERROR_CONDITION: Final = "error-condition"

SAS_TOKEN_TYPE: Final = "servicebus.windows.net:sastoken"  # noqa: S105 - a word of the protocol
JWT_TOKEN_TYPE: Final = "jwt"  # noqa: S105 - a word of the protocol
JWT_SCOPE: Final = "https://eventhubs.azure.net//.default"
"""The scope to ask Entra ID for. The double slash is meant."""

HUB_TYPE: Final = VENDOR + "eventhub"
PARTITION_TYPE: Final = VENDOR + "partition"

# --------------------------------------------------------------------------- annotations of what the service stored

SEQUENCE_NUMBER: Final = Symbol("x-opt-sequence-number")
SEQUENCE_NUMBER_EPOCH: Final = Symbol("x-opt-sequence-number-epoch")
"""int; -1 where nothing is replicated."""
OFFSET: Final = Symbol("x-opt-offset")
ENQUEUED_TIME: Final = Symbol("x-opt-enqueued-time")
PARTITION_KEY: Final = Symbol("x-opt-partition-key")
"""The message annotations the service adds (protocol.md 6.1)."""

BEGIN_SEQUENCE_NUMBER_EPOCH: Final = "begin_sequence_number_epoch"
LAST_ENQUEUED_SEQUENCE_NUMBER_EPOCH: Final = Symbol("last_enqueued_sequence_number_epoch")
"""int, as the annotation; beside the numbers of a partition (4.2, 6.3)."""

LAST_ENQUEUED_SEQUENCE_NUMBER: Final = Symbol("last_enqueued_sequence_number")
LAST_ENQUEUED_OFFSET: Final = Symbol("last_enqueued_offset")
LAST_ENQUEUED_TIME: Final = Symbol("last_enqueued_time_utc")
RUNTIME_INFO_RETRIEVAL_TIME: Final = Symbol("runtime_info_retrieval_time_utc")
"""The delivery annotations of a link with runtime metrics (6.3)."""
