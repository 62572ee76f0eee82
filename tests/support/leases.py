"""Leases for calls of a store, what is stored with them in memory, and the records of a consumer group in any store."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from weakref import WeakKeyDictionary

from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.lease import LeaseSnapshot
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, LeaseStore, StoredRecord
from eventpump.storage.checkpoint_form import CheckpointRecord
from eventpump.storage.groups import CHECKPOINTS, SCOPE_RECORD, GroupRecords, StoredScopeRecord
from eventpump.storage.leases.memory import MemoryLeases
from eventpump.storage.scope_form import HubNames, ScopeRecord, encode_named_record, parse_named_record

SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")

_GROUPS: WeakKeyDictionary[LeaseStore, GroupRecords] = WeakKeyDictionary()


def unheld(partition_id: str) -> LeaseSnapshot:
    """Return a lease as a listing shows it that no host has acquired."""
    return LeaseSnapshot(partition_id, None, False)


def group(store: LeaseStore, scope: ConsumerScope = SCOPE) -> GroupRecords:
    """Return the records of a consumer group in a store, the same ones for the same store."""
    return _GROUPS.setdefault(store, GroupRecords(store, scope))


def unnamed_record(record: ScopeRecord) -> bytes:
    """Return the body of a scope record from before it named its hub."""
    members = json.loads(encode_named_record(HubNames("", ""), record, ""))
    return json.dumps(
        {key: members[key] for key in members.keys() - {"namespace", "hub", "id"}} | {"version": 1}
    ).encode()


class SharedLeases(MemoryLeases):
    """Leases in memory, whose checkpoints and scope records a test reads and replaces."""

    def checkpoints(self, scope: ConsumerScope) -> MutableMapping[tuple[str, str], Checkpoint]:
        """The checkpoints of a consumer group, by partition and subscription."""
        return _Checkpoints(self, scope)

    def scope_record(self, scope: ConsumerScope) -> ScopeRecord:
        """Return the record of a consumer group."""
        record = parse_named_record(self.records[place(scope) + SCOPE_RECORD].body).record
        assert record is not None
        return record

    def put_scope_record(self, scope: ConsumerScope, stored: StoredScopeRecord) -> None:
        """Replace the record of a consumer group."""
        body = encode_named_record(HubNames.of(scope), stored.record, "")
        self.records[place(scope) + SCOPE_RECORD] = StoredRecord(body, stored.version)


def place(scope: ConsumerScope) -> str:
    """Return what the names of a consumer group's records begin with in memory."""
    return f"{scope.fully_qualified_namespace}/{scope.hub}/{scope.consumer_group}/".lower()


class _Checkpoints(MutableMapping[tuple[str, str], Checkpoint]):
    def __init__(self, leases: SharedLeases, scope: ConsumerScope) -> None:
        self._rows, self._records, self._place = leases.leases(scope), leases.records, place(scope) + CHECKPOINTS

    def _all(self) -> dict[tuple[str, str], Checkpoint]:
        found = {
            (partition_id, DEFAULT_SUBSCRIPTION): row.checkpoint
            for partition_id, row in self._rows.items()
            if row.checkpoint is not None
        }
        for name, stored in self._records.items():
            if name.startswith(self._place):
                key, partition_id = name.removeprefix(self._place).split("/")
                checkpoint = CheckpointRecord.decode(stored.body, partition_id).checkpoint
                if checkpoint is not None:
                    found[partition_id, key] = checkpoint
        return found

    def __getitem__(self, key: tuple[str, str]) -> Checkpoint:
        return self._all()[key]

    def __setitem__(self, key: tuple[str, str], checkpoint: Checkpoint) -> None:
        assert key[1] == DEFAULT_SUBSCRIPTION
        self._rows[key[0]].checkpoint = checkpoint

    def __delitem__(self, key: tuple[str, str]) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
