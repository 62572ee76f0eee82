"""The compiled core does what its references do, value or error, on sound, damaged and hostile bytes.

One seed is one case: the seeds begin at the day's number, as those of `tests/fuzz` do. The long form has a million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from eventpump import compiled
from eventpump.amqp import receiver
from eventpump.amqp.performatives import Transfer, decode_performative
from eventpump.amqp.receiver import Form, form_of
from tests.fuzz.entry import seed_of_today

core: Any = compiled.core
pytestmark = pytest.mark.skipif(core is None, reason="this is the build without the compiled core")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Iterator[int]:
    """The seeds of the cases of one test."""
    first = seed_of_today()
    return iter(range(first, first + (1_000_000 if request.config.getoption("--long") else 4_000)))


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns with its type, or the type and text of its error."""
    try:
        found = call(*arguments)
    except Exception as error:
        return type(error), str(error)
    return type(found), found


def damage(random: Random, raw: bytes, reach: int) -> bytes:
    """Change, remove, insert or cut bytes of the first `reach`; return the bytes as they are a quarter of the time."""
    damaged = bytearray(raw)
    for _ in range(random.choice((0, 1, 1, 3))):
        at = random.randrange(min(len(damaged), reach) + 1)
        match random.randrange(5):
            case 0 if at < len(damaged):
                damaged[at] = random.choice((0, 1, 0x53, 0x72, 0x7F, 0x80, 0xA0, 0xB0, 0xC1, 0xD1, 0xFF))
            case 1 if at < len(damaged):
                damaged[at] ^= 1 << random.randrange(8)
            case 2:
                del damaged[at : at + random.choice((1, 1, 2, 4, 30))]
            case 3:
                damaged[at:at] = random.randbytes(random.choice((1, 2, 4)))
            case _:
                del damaged[random.randrange(len(damaged) + 1) :]
    return bytes(damaged)


# --------------------------------------------------------------------------------------------------------- take_run


def frame(transfer: Transfer, payload: bytes) -> bytes:
    """Return a transfer as a frame on channel 0."""
    body = transfer.encode() + payload
    return (len(body) + 8).to_bytes(4, "big") + b"\x02\x00\x00\x00" + body


def form_of_frame(data: bytes) -> Form | None:
    """Return the form of the first frame."""
    size = int.from_bytes(data[:4], "big")
    transfer, payload = decode_performative(data, 8, size)
    return form_of(transfer, data, 0, payload, 0)


def stream(random: Random) -> bytes:
    """Return transfers as a peer may write them, of one form or of several."""
    tag = bytes(random.choice((0, 1, 4, 32)))
    first = random.choice((0, 5, 250, 2**32 - 3))
    frames = []
    for number in range(random.randrange(1, 9)):
        is_other = random.random() < 0.1
        transfer = Transfer(
            handle=1 if is_other else 0,
            delivery_id=(first + number) % 2**32,
            delivery_tag=tag,
            message_format=0,
            settled=True,
            more=random.random() < 0.05,
        )
        frames.append(frame(transfer, random.randbytes(random.choice((0, 1, 7, 300)))))
    return b"".join(frames)


def test_run_is_that_of_the_reference(seeds: Iterator[int]) -> None:
    """The same payloads, and the same end, from wherever the run begins and however little may be taken."""
    taken = 0
    for seed in seeds:
        random = Random(seed)
        sound = stream(random)
        form = form_of_frame(sound)
        data = damage(random, sound, len(sound))
        if form is None:
            continue
        pos = random.choice((0, 0, 0, random.randrange(len(data) + 5)))
        largest = random.choice((2**20, 2**20, 2**62, 300, form.payload_at, 0))
        room = random.choice((5, 2048, 1, 0, -1))
        found, expected = [b"before"], [b"before"]
        end = core.take_run(form, data, pos, largest, room, found)
        assert end == receiver.take_run_in_python(form, data, pos, largest, room, expected), seed
        assert found == expected, seed
        taken += len(found) - 1
    assert taken > 1000


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": b"\x02" * 5000},
        {"rest": b"x" * 5000},
        {"tag_mark": b"x" * 5000},
        {"id_at": -1},
        {"tag_at": -9},
        {"tag_at": 2**40},
        {"rest_at": 2**62},
        {"payload_at": 0},
        {"payload_at": 2**62},
    ],
)
def test_form_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    """No place is taken from a form that does not agree with its bytes."""
    data = frame(Transfer(handle=0, delivery_id=0, delivery_tag=b"1234", message_format=0, settled=True), b"x")
    form = form_of_frame(data)
    assert form is not None
    with pytest.raises(ValueError, match="form"):
        core.take_run(form._replace(**change), data, 0, 2**20, 5, [])


@pytest.mark.parametrize(("place", "given"), [(0, None), (1, None), (1, bytearray(90)), (2, -1), (2, 2**80), (5, None)])
def test_run_of_wrong_arguments_is_refused(place: int, given: Any) -> None:
    """An error, and nothing is read."""
    data = frame(Transfer(handle=0, delivery_id=0, delivery_tag=b"1234", message_format=0, settled=True), b"x")
    arguments: list[Any] = [form_of_frame(data), data, 0, 2**20, 5, []]
    arguments[place] = given
    with pytest.raises((TypeError, ValueError, OverflowError)):
        core.take_run(*arguments)
