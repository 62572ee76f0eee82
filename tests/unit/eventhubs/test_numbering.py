"""Published sequence numbers go around: after the largest comes 0."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eventpump.eventhubs.numbering import NUMBERS, advance, distance


@given(st.integers(0, NUMBERS - 1), st.integers(1, NUMBERS - 1))
def test_distance_is_how_far_a_number_was_advanced(number: int, by: int) -> None:
    """Across the wrap, too."""
    assert 0 <= advance(number, by) < NUMBERS
    assert distance(number, advance(number, by)) == by


def test_first_number_follows_nothing_and_the_largest() -> None:
    """-1 stands for nothing."""
    assert advance(-1) == advance(NUMBERS - 1) == 0
