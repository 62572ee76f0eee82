"""Every entry, by its name."""

from __future__ import annotations

from typing import Final

from tests.fuzz.engines import ClientEngineEntry, SaslClientEntry, SaslServiceEntry, ServiceEngineEntry
from tests.fuzz.entry import Entry
from tests.fuzz.rows import RowsEntry
from tests.fuzz.services import AttachEntry, CbsEntry, ConversationEntry, ManagementEntry, PublishEntry
from tests.fuzz.values import AnswersEntry, CodecEntry, ConnectEntry, MessageEntry, ScanEntry, StampEntry
from tests.fuzz.websockets import WebSocketClientEntry, WebSocketServerEntry

_ALL: Final[tuple[type[Entry], ...]] = (
    CodecEntry,
    MessageEntry,
    ScanEntry,
    StampEntry,
    AnswersEntry,
    ConnectEntry,
    RowsEntry,
    ServiceEngineEntry,
    ClientEngineEntry,
    SaslServiceEntry,
    SaslClientEntry,
    ConversationEntry,
    AttachEntry,
    CbsEntry,
    ManagementEntry,
    PublishEntry,
    WebSocketServerEntry,
    WebSocketClientEntry,
)
ENTRIES: Final[dict[str, type[Entry]]] = {entry.name: entry for entry in _ALL}
