"""What the service appends to its texts for its support: ids, systems and times (protocol.md 2.5)."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime


class Tracking:
    """Makes the endings of one namespace's texts. The ids mean nothing here."""

    def __init__(self, authority: str, now: float) -> None:
        self._host = authority if authority.startswith("[") else authority.partition(":")[0]
        self._namespace = self._host.partition(".")[0] if self._host[:1].isalpha() else self._host
        self._time = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S")

    def of_gateway(self) -> str:
        """Return the ending of a refusal by the gateway."""
        return f" TrackingId:{uuid.uuid4()}_G5, SystemTracker:gateway5, Timestamp:{self._time}"

    def of_entity(self, hub: str) -> str:
        """Return the ending where a hub was looked for."""
        return f" TrackingId:{uuid.uuid4()}_G2, SystemTracker:{self._host}:{hub}, Timestamp:{self._time}"

    def of_position(self, hub: str, group: str) -> str:
        """Return the ending of a refused position, which went through two brokers and the gateway."""
        system = f"{self._namespace}:eventhub:{hub}~32766"
        first = f" TrackingId:{uuid.uuid4()}_B14, SystemTracker:{system}, Timestamp:{self._time}"
        second = f"TrackingId:{uuid.uuid4()}_B14, SystemTracker:{system}|{group.lower()}, Timestamp:{self._time}"
        return f"{first} Reference:{uuid.uuid4()}, {second}{self.of_gateway()}"

    def of_reader(self, hub: str, group: str) -> str:
        """Return the ending of a reader's disconnection."""
        system = f"{self._namespace}:eventhub:{hub}~16383|{group.lower()}"
        return f" TrackingId:{uuid.uuid4().hex}_G5_B31, SystemTracker:{system}, Timestamp:{self._time}"


def link_tracking_id() -> str:
    """Return the value of a link's property `names.TRACKING_ID`."""
    return f"{uuid.uuid4().hex.upper()}_G5"
