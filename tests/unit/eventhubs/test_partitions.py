"""The order of partition ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eventpump.eventhubs.partitions import partition_order


def test_partitions_are_ordered_by_number() -> None:
    """Partition 10 comes after partition 9."""
    assert sorted(["10", "9", "0", "100"], key=partition_order) == ["0", "9", "10", "100"]


@given(st.lists(st.integers(0, 2000)))
def test_order_is_that_of_the_numbers(numbers: list[int]) -> None:
    """Ids as the service gives them are in the order of their numbers."""
    assert sorted(map(str, numbers), key=partition_order) == [str(number) for number in sorted(numbers)]
