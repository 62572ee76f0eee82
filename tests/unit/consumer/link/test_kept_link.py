"""A link that is kept open, over the links of a hub in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from eventpump.consumer.link.kept_link import KeptLink, LinkFacts
from eventpump.core.kept_link import KeptLinkState
from eventpump.errors import ClosedError, EventPumpError, LinkDetachedError, RequestRefusedError
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveLink, ReceiveLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.testing.transport import FakeHub, FakeTransport

STATES = KeptLinkState


class _User:
    """Records what a link calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: list[Exception] = []
        self.link: KeptLink | None = None

    def _called(self, name: str) -> None:
        assert self.link is not None
        self.calls.append(f"{name} while {self.link.state.value}")

    def messages(self, batch: list[bytes]) -> None:
        raise AssertionError("the link has no credit")

    def detached(self, error: EventPumpError) -> None:
        assert self.link is not None
        self.link.detached(error)

    def link_opening(self) -> None:
        self._called("opening")

    def link_attached(self, _link: ReceiveLink) -> None:
        self._called("attached")

    def link_closed(self) -> None:
        self._called("closed")

    def link_ended(self, error: Exception) -> None:
        self.errors.append(error)


def _state(link: KeptLink) -> KeptLinkState:
    """Return the state: read anew each time, also for a type checker."""
    return link.state


@asynccontextmanager
async def _kept(hub: FakeHub) -> AsyncIterator[tuple[KeptLink, _User]]:
    user = _User()
    spec = ReceiveLinkSpec(hub.name, "$Default", "0", EventPosition.earliest())
    retry = RetryOptions(base_delay=10.0, max_delay=10.0, mode="fixed")
    link = user.link = KeptLink(
        FakeTransport(hub),
        spec,
        user,
        LinkFacts(),
        retry,
        rng=random.Random(1),
        startup_timeout=None,
        locate=None,
        on_trouble=None,
    )
    try:
        yield link, user
    finally:
        await link.aclose(ClosedError("link"), 1.0)


async def test_kept_link_goes_through_its_states() -> None:
    """Closed, opening, attached, waiting after a failure, and so again; its user is called at each of them."""
    hub = FakeHub(latency=1.0)
    async with _kept(hub) as (link, user):
        assert _state(link) is STATES.CLOSED
        link.start()
        assert _state(link) is STATES.OPENING
        for _ in range(2):
            await asyncio.sleep(5)
            assert _state(link) is STATES.ATTACHED
            hub.detach("0", LinkDetachedError("detached"))
            await asyncio.sleep(5)
            assert (_state(link), link.link) == (STATES.WAITING, None)
            await asyncio.sleep(10)
        every = ["opening while opening", "attached while attached", "closed while attached"]
        assert user.calls == every * 2 + every[:2]
        assert not user.errors


async def test_reopen_closes_the_link_and_opens_another() -> None:
    """The link is not attached from the call on; without a link, the call does nothing."""
    hub = FakeHub()
    async with _kept(hub) as (link, _):
        link.reopen(LinkDetachedError("too early"))
        assert _state(link) is STATES.CLOSED
        link.start()
        await asyncio.sleep(1)
        link.reopen(LinkDetachedError("silent"))
        assert (_state(link), link.link) == (STATES.WAITING, None)
        link.reopen(LinkDetachedError("again"))
        await asyncio.sleep(30)
        assert _state(link) is STATES.ATTACHED
        assert len(hub.attached) == 2
        assert len(hub.credit("0")) == 1, "the first one is detached"


async def test_parked_link_that_ends_is_not_opened_again() -> None:
    """Resumed in time it is kept open as before."""
    hub = FakeHub()
    async with _kept(hub) as (link, user):
        link.start()
        await asyncio.sleep(1)
        link.park()
        link.resume()
        hub.detach("0", LinkDetachedError("first"))
        await asyncio.sleep(30)
        assert _state(link) is STATES.ATTACHED
        link.park()
        assert _state(link) is STATES.PARKED
        hub.detach("0", LinkDetachedError("second"))
        await asyncio.sleep(30)
        assert _state(link) is STATES.ENDED
        assert [str(each) for each in user.errors] == ["second"]
        assert len(hub.attached) == 2


async def test_end_is_final_in_every_state() -> None:
    """Closed or failed while closed, opening, attached, waiting or parked, no further link follows, and none stays."""
    for state in STATES:
        for fails in (False, True):
            hub = FakeHub(latency=1.0)
            async with _kept(hub) as (link, user):
                if state is not STATES.CLOSED:
                    link.start()
                if state in (STATES.ATTACHED, STATES.WAITING, STATES.PARKED):
                    await asyncio.sleep(5)
                if state is STATES.WAITING:
                    hub.detach("0", LinkDetachedError("detached"))
                    await asyncio.sleep(2)
                if state is STATES.PARKED:
                    link.park()
                if state is STATES.ENDED:
                    link.fail(RequestRefusedError("before"))
                assert _state(link) is state
                attached = len(hub.attached)
                if fails:
                    link.fail(RequestRefusedError("refused"))
                else:
                    await link.aclose(ClosedError("link"), 1.0)
                assert _state(link) is STATES.ENDED
                await asyncio.sleep(60)
                assert _state(link) is STATES.ENDED
                assert link.link is None
                assert len(hub.attached) == attached
                assert hub.credit("0") == []
                assert all(isinstance(each, RequestRefusedError) for each in user.errors)
