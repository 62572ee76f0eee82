"""What uamqp's own live samples demand of the service, where the emulator once failed them.

The samples are not in its source distribution: each of the three causes of failures is repeated here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from eventpump import Emulator
from tests.authority import Authority
from tests.interop.peers.uamqp import converse_by_uamqp
from tests.ways import need_uamqp

pytestmark = pytest.mark.asyncio(loop_scope="session")

HUB = "telemetry"


@pytest_asyncio.fixture(loop_scope="session")
async def service(authority: Authority) -> AsyncIterator[Emulator]:
    """Serve a hub over TLS."""
    need_uamqp()
    async with Emulator({HUB: 1}, tls=authority.server("127.0.0.1")) as started:
        yield started


async def test_uamqp_signature_as_a_jwt(service: Emulator, authority: Authority) -> None:
    """A token of type "jwt" that holds a shared access signature is accepted, by sender and receiver."""
    (found,) = await converse_by_uamqp(service, authority, HUB, [b"x"], 1, is_jwt=True)
    assert bytes.fromhex(found["body"]) == b"x"


async def test_uamqp_selector_of_the_former_name(service: Emulator, authority: Authority) -> None:
    """A filter by the former name of the enqueued time is one by that time."""
    selector = "amqp.annotation.x-opt-enqueuedtimeutc > '0'"
    found = await converse_by_uamqp(service, authority, HUB, [b"a", b"b"], 2, selector=selector)
    assert [bytes.fromhex(each["body"]) for each in found] == [b"a", b"b"]


async def test_uamqp_attributes_of_a_message(service: Emulator, authority: Authority) -> None:
    """Delivery annotations and a footer of the sender are accepted, and come to the reader beside its annotations."""
    sections = {name: {"name": f"of the {name}"} for name in ("delivery_annotations", "annotations", "footer")}
    (found,) = await converse_by_uamqp(service, authority, HUB, [b"x"], 1, **sections)
    assert bytes.fromhex(found["body"]) == b"x"
    for name, section in sections.items():
        assert found[name].items() >= section.items(), name
