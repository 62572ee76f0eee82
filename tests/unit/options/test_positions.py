"""The one vocabulary of positions: readers, hosts and subscriptions take the same words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import EventPosition
from eventpump.options.consumer import HostSettings, ReaderSettings, SubscriptionSettings
from eventpump.reports import StartIgnored
from tests.support.fleet import Fleet

MOMENT = datetime(2024, 5, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "position"),
    [
        ("earliest", EventPosition.earliest()),
        ("-1", EventPosition.earliest()),
        ("latest", EventPosition.latest()),
        ("@latest", EventPosition.latest()),
        ("512", EventPosition.at_offset("512")),
        ("1:7:512", EventPosition.at_offset("1:7:512")),
        (17, EventPosition.at_sequence_number(17)),
        (MOMENT, EventPosition.at_enqueued_time(MOMENT)),
        (EventPosition.at_offset("x"), EventPosition.at_offset("x")),
    ],
)
def test_position_means_the_same_everywhere(given: Any, position: EventPosition) -> None:
    """For a reader, a host, a host's partition and a subscription."""
    assert ReaderSettings(hub="h", partition_id="0", position=given).position == position
    assert HostSettings(hub="h", initial_position=given).initial_position == position
    assert HostSettings(hub="h", initial_position={"0": given}).initial_position == {"0": position}
    assert SubscriptionSettings(name="s", start=given, catch_up="shared").start == position


def test_timedelta_is_a_time_back_from_now() -> None:
    """With either sign: nothing can be read from the future."""
    given: Any
    for given in (timedelta(hours=1), timedelta(hours=-1)):
        moment = ReaderSettings(hub="h", partition_id="0", position=given).position.enqueued_time
        assert moment is not None
        assert timedelta(0) <= datetime.now(UTC) - timedelta(hours=1) - moment < timedelta(minutes=1)


@pytest.mark.parametrize(
    "given", ["", "erliest", "now", "start", "@end", True, 1.5, b"512", None, datetime(2024, 1, 1)]
)
def test_what_is_no_position_is_refused_when_it_is_given(given: Any) -> None:
    """A misspelled word is no offset: the service would refuse it when it is read with."""
    for make in (
        lambda: ReaderSettings(hub="h", partition_id="0", position=given),
        lambda: HostSettings(hub="h", initial_position=given),
        lambda: SubscriptionSettings(name="s", start=given, catch_up="shared"),
    ):
        with pytest.raises(ConfigurationError):
            make()


async def test_relative_start_is_not_another_one_at_each_start() -> None:
    """Hosts that give the same timedelta agree, although each of them means another moment."""
    async with Fleet() as fleet:
        for name in ("a", "b"):
            await fleet.start(name, initial_position=timedelta(hours=1))
            await fleet.until(lambda name=name: len(fleet.hosts[name].partitions) > 0, 60)  # type: ignore[misc]
        await fleet.start("c", initial_position="latest")
        await fleet.until(lambda: bool(fleet.reported("c", StartIgnored)), 60)
        assert fleet.reported("b", StartIgnored) == []


async def test_by_default_checkpoints_are_written_every_few_seconds_and_at_the_end() -> None:
    """A processor without a checkpoint of its own repeats some seconds of work at most."""
    async with Fleet() as fleet:
        policy = HostSettings(hub="h").checkpoint_policy
        assert policy == CheckpointPolicy.automatic()

        async def process(context: object, events: object) -> None:
            pass

        host = await fleet.start("a", process, checkpoint_policy=policy)
        fleet.hub.publish("0", count=5)
        await fleet.until(lambda: fleet.checkpoint("0") == 4, 6)
        fleet.hub.publish("0", count=5)
        await fleet.until(lambda: host.partitions[0].last_sequence_number == 9, 2)
        assert fleet.checkpoint("0") == 4
        await host.aclose()
        assert fleet.checkpoint("0") == 9
