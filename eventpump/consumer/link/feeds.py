"""Makes the feeds of one owned partition, each with an origin of its own and a check that the hub is still the same."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime

from eventpump.consumer.link.feed import PartitionFeed
from eventpump.consumer.record.continuity import check_hub
from eventpump.core.budget import Account, BufferBudget
from eventpump.eventhubs.codecs import events_maker
from eventpump.eventhubs.events import EventPosition, ReceivedEvent, number_of
from eventpump.interfaces import ConsumerScope, HubProperties, ReceiveLinkSpec, Transport
from eventpump.options.consumer import FeedSettings


class FeedMaker:
    """Makes the feeds of one owned partition.

    Args:
        spec: The link; its position is replaced.
        hub: Reads the hub's properties, before each link but the first.
        budget: The bytes that all links of the host may hold; None if each is bounded on its own only.
    """

    def __init__(
        self,
        transport: Transport,
        spec: ReceiveLinkSpec,
        settings: FeedSettings,
        *,
        scope: ConsumerScope,
        rng: random.Random,
        hub: Callable[[], Awaitable[HubProperties]],
        budget: BufferBudget | None = None,
    ) -> None:
        self._transport = transport
        self.spec = spec
        """The link."""
        self.settings = settings
        """How far to read ahead."""
        self._scope = scope
        self._rng = rng
        self._hub = hub
        self._budget = budget
        self._accounts: list[Account] = []
        self.made = 0
        """How many feeds were made. Links in place of failed ones do not count. Each event's origin ends with
        the count before its own feed."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes received over all their links that are not processed yet."""
        return sum(account.held for account in self._accounts)

    def make(
        self,
        position: EventPosition,
        hub_created_at: datetime,
        *,
        consumer_group: str | None = None,
        limit: int | None = None,
        checks_hub: bool = False,
        on_attached: Callable[[], None] | None = None,
        on_trouble: Callable[[Exception, float | None], None],
    ) -> PartitionFeed[ReceivedEvent]:
        """Make a feed, which is not started.

        Args:
            hub_created_at: The hub that its events are of. If that was deleted and recreated, the feed ends.
            consumer_group: Another consumer group than that of the link, and then without its owner level.
            checks_hub: Whether the hub is compared before the first link, too.
        """
        origin = (self._scope, self.spec.partition_id, hub_created_at, self.made)
        self.made += 1
        was_located = checks_hub

        async def locate(position: EventPosition) -> EventPosition:
            # Not before the first link: that the hub is this one was found out just now.
            nonlocal was_located
            if was_located:
                check_hub(await self._hub(), hub_created_at, self.spec.partition_id)
            was_located = True
            return position

        spec = replace(self.spec, position=position)
        if consumer_group is not None:
            spec = replace(spec, consumer_group=consumer_group, owner_level=None)
        feed: PartitionFeed[ReceivedEvent] = PartitionFeed(
            self._transport,
            spec,
            self.settings,
            wrap=events_maker(self.settings.decode or (), spec.partition_id, origin),
            number=number_of,
            rng=self._rng,
            budget=self._budget,
            limit=limit,
            locate=locate,
            on_attached=on_attached,
            on_trouble=on_trouble,
        )
        if feed.account is not None:
            self._accounts = [each for each in self._accounts if each.held or not each.is_closed]
            self._accounts.append(feed.account)
        return feed
