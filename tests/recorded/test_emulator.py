"""The emulator answers the recorded client's frames as the service did, but for what licences.toml allows."""

from __future__ import annotations

import pytest

from tests.recorded import exchanges
from tests.recorded.frames import Difference
from tests.recorded.licences import WHOLE, Licence, licences, unlicensed
from tests.recorded.player import replayed, scenes
from tests.recorded.test_clients import UNFIT

MOST_LICENCES = 12


@pytest.mark.parametrize("kind", sorted({each.kind for each in exchanges()}))
def test_emulator_answers_as_recorded(kind: str) -> None:
    """Every frame of the emulator is the recorded one in all fields that a recording distinguishes, its payload byte
    for byte but for times and offsets, in the recorded order, and where the service was silent it is silent."""
    found = [each for exchange in exchanges() if exchange.kind == kind for each in replayed()[exchange.name]]
    left, _ = unlicensed(found, licences())
    assert [str(each) for each in left] == []


def test_every_exchange_is_replayed() -> None:
    """At least 150 exchanges are played in either direction; one that is not played is named with its reason."""
    assert scenes().keys() == {each.name for each in exchanges()}
    both = [each.name for each in exchanges() if each.name not in UNFIT]
    assert (len(scenes()), len(both)) == (152, 148)


def test_licences_are_few_and_used() -> None:
    """There are at most twelve licences; each has a reason and names a field, none a whole frame, and each recording
    in it needs it."""
    assert len(licences()) <= MOST_LICENCES
    assert all(each.reason and each.field not in WHOLE for each in licences())
    _, used = unlicensed([each for found in replayed().values() for each in found], licences())
    assert {(each.frame, each.field, name) for each in licences() for name in each.recordings} == used


def test_a_licence_covers_its_field_in_its_recordings_only() -> None:
    """The same field of another recording, and another field of the same frame, are not covered."""
    name, other = exchanges()[0], next(each for each in exchanges() if each.recordings[0] != "auth-token-1")
    allowed = [Licence("open", "idle_time_out", ("auth-token-1",), "a reason")]
    covered = Difference(name.name, 1, "open", "idle_time_out", 1, 2)
    outside = [
        Difference(other.name, 1, "open", "idle_time_out", 1, 2),
        Difference(name.name, 1, "open", "channel_max", 1, 2),
        Difference(name.name, 1, "begin", "idle_time_out", 1, 2),
    ]
    assert unlicensed([covered, *outside], allowed)[0] == outside
