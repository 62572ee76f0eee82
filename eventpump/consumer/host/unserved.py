"""Reports the subscriptions that a host has no processor for, with their lag on the partitions that it owns."""

from __future__ import annotations

from collections.abc import Collection

from eventpump.aio.tasks import gather
from eventpump.cancellation import is_failure
from eventpump.consumer.lease.services import HostServices
from eventpump.consumer.record.checkpoints import store_error
from eventpump.consumer.record.subscriptions import Subscriptions
from eventpump.core.starts import lag_after, start_of
from eventpump.errors import EventPumpError, ServiceError
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import HubProperties
from eventpump.reports import ServiceFailed, StoreFailed, SubscriptionWithoutProcessor
from eventpump.storage.scope_form import SubscriptionRecord

_ASKED_AT_ONCE = 16
_LISTED_EVERY = 30
"""Cycles of a host without subscriptions of its own after which it looks for those of other hosts again."""


class UnservedSubscriptions:
    """Reports each such subscription when it is found, and when the host owns a partition more."""

    def __init__(self, services: HostServices, subscriptions: Subscriptions) -> None:
        self._services = services
        self._subscriptions = subscriptions
        self._reported: dict[str, frozenset[str]] = {}
        self._found: set[str] = set()
        self._owned: frozenset[str] = frozenset()
        self._cycles = 0

    def is_listing_due(self, owned: Collection[str]) -> bool:
        """Return whether to list the subscriptions in this cycle. Called once in each.

        A host with subscriptions of its own starts and ends its pumps by them. Without, it lists them to report those
        of other hosts: at first, while there is something to report, and else so rarely that it costs next to nothing.
        """
        self._cycles += 1
        is_new = bool(self._found - self._reported.keys()) or not self._owned.issuperset(owned)
        return self._subscriptions.has_own or is_new or self._cycles % _LISTED_EVERY == 1

    async def report(self, owned: Collection[str]) -> None:
        """Report what is new. Called after each listing of the subscriptions."""
        unserved = {stored.record.key: stored.record for stored in self._subscriptions.unserved}
        self._reported = {key: each for key, each in self._reported.items() if key in unserved}
        # A host that has just started waits for its first partitions, and one that gets none reports it without them.
        found, self._found = self._found, set(unserved)
        now = self._owned = frozenset(owned)
        for key, record in unserved.items():
            known = self._reported.get(key)
            if now - known if known is not None else now or key in found:
                lags = await self._lags(record, sorted(now, key=partition_order))
                owner = self._services.owner_id
                self._services.reporter.report(
                    SubscriptionWithoutProcessor(owner, None, lags, subscription=record.name)
                )
                self._reported[key] = now
            elif known is not None:
                # One that is lost and acquired again is reported again.
                self._reported[key] = known & now

    async def _lags(self, record: SubscriptionRecord, partition_ids: Collection[str]) -> dict[str, int | None]:
        if not partition_ids:
            return {}
        services = self._services
        try:
            hub = await services.directory.get_hub_properties(services.scope.hub)
        except EventPumpError as error:
            operation = f"reading the properties of hub {services.scope.hub}"
            services.reporter.report(ServiceFailed(services.owner_id, None, operation, error, subscription=record.name))
            return dict.fromkeys(partition_ids)
        lags = await gather((self._lag(record, hub, each) for each in partition_ids), at_once=_ASKED_AT_ONCE)
        return dict(zip(partition_ids, lags, strict=True))

    async def _lag(self, record: SubscriptionRecord, hub: HubProperties, partition_id: str) -> int | None:
        """Return how many events of a partition wait for the subscription; None if that is not known."""
        if record.hub_created_at != hub.created_at:
            return None
        services, operation = self._services, "read checkpoint"
        try:
            stored = await services.group.read_checkpoint(partition_id, record.key)
            facts = await services.directory.get_partition_properties(services.scope.hub, partition_id)
            return lag_after(stored, start_of(record, partition_id), facts)
        except BaseException as error:
            if not is_failure(error):
                raise
            if isinstance(error, ServiceError):
                operation = f"reading the properties of hub {services.scope.hub}"
                failed = ServiceFailed(services.owner_id, partition_id, operation, error, subscription=record.name)
                services.reporter.report(failed)
            else:
                failure = store_error(error, operation, partition_id, services.store_timeout)
                services.reporter.report(
                    StoreFailed(services.owner_id, partition_id, operation, failure, subscription=record.name)
                )
            return None
