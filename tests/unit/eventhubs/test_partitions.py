"""The order of partition ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eventpump.eventhubs.partitions import named_partitions, partition_order


def test_partitions_are_ordered_by_number() -> None:
    """Partition 10 comes after partition 9."""
    assert sorted(["10", "9", "0", "100"], key=partition_order) == ["0", "9", "10", "100"]


@given(st.lists(st.integers(0, 2000)))
def test_order_is_that_of_the_numbers(numbers: list[int]) -> None:
    """Ids as the service gives them are in the order of their numbers."""
    assert sorted(map(str, numbers), key=partition_order) == [str(number) for number in sorted(numbers)]


def test_partitions_in_a_row_are_named_by_the_first_and_the_last() -> None:
    """From three on."""
    assert named_partitions(["3"]) == "partition 3"
    assert named_partitions(["0", "1", "4", "5", "6", "9"]) == "partitions 0, 1, 4 to 6, 9"
    assert named_partitions(["a", "1", "2"]) == "partitions a, 1, 2"
