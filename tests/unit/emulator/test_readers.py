"""Who may read a partition (protocol.md 5.4)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eventpump.emulator.readers import MAX_SHARED_READERS, Reader, ReaderTable, Refusal
from eventpump.eventhubs.conditions import LINK_STOLEN, RESOURCE_LIMIT_EXCEEDED


def reader(key: int, epoch: int | None = None, name: str | None = None) -> Reader:
    return Reader(key, name, epoch)


def test_admit_a_sixth_shared_reader_is_refused() -> None:
    """The sixth reader without an epoch is refused with the names of the five; one that leaves makes room."""
    table = ReaderTable()
    for key in range(5):
        assert table.admit(reader(key, name="me" if key == 3 else None)) == []
    refused = table.admit(reader(5))
    assert isinstance(refused, Refusal)
    assert refused.condition == RESOURCE_LIMIT_EXCEEDED
    assert "which is 5" in refused.description
    assert "nil, nil, nil, me, nil" in refused.description
    table.leave(0)
    assert table.admit(reader(5)) == []


def test_admit_with_an_epoch_evicts_shared_readers() -> None:
    """An exclusive reader evicts all who shared; while it is there, no reader may share."""
    table = ReaderTable()
    table.admit(reader(0))
    table.admit(reader(1))
    evicted = table.admit(reader(2, 0, "new"))
    assert isinstance(evicted, list)
    assert [each.reader.key for each in evicted] == [0, 1]
    assert {each.refusal.condition for each in evicted} == {LINK_STOLEN}
    refused = table.admit(reader(3))
    assert isinstance(refused, Refusal)
    assert refused.condition == LINK_STOLEN
    assert "epoch of '0'" in refused.description


def test_admit_with_an_equal_epoch_evicts_the_holder() -> None:
    """The newest of equal epochs has the partition."""
    table = ReaderTable()
    table.admit(reader(0, 4, "old"))
    evicted = table.admit(reader(1, 4, "new"))
    assert isinstance(evicted, list)
    assert [each.reader.key for each in evicted] == [0]
    assert "'new' with higher epoch of '4'" in evicted[0].refusal.description
    assert "'old' with epoch '4'" in evicted[0].refusal.description


def test_admit_with_a_lower_epoch_is_refused() -> None:
    """The holder stays, and the text names its epoch."""
    table = ReaderTable()
    table.admit(reader(0, 4))
    refused = table.admit(reader(1, 3))
    assert isinstance(refused, Refusal)
    assert refused.condition == LINK_STOLEN
    assert "higher epoch '4' already exists" in refused.description


def test_leave_forgets_the_epoch() -> None:
    """An epoch is forgotten with its link."""
    table = ReaderTable()
    table.admit(reader(0, 9))
    table.leave(0)
    assert table.admit(reader(1, 1)) == []
    table.leave(1)
    assert table.admit(reader(2)) == []


@given(st.lists(st.tuples(st.booleans(), st.none() | st.integers(0, 3)), max_size=30))
def test_readers_never_have_two_holders_in_any_history(steps: list[tuple[bool, int | None]]) -> None:
    """After any history there is one exclusive reader alone, or at most five that share."""
    table = ReaderTable()
    inside: dict[int, int | None] = {}
    for key, (leaves, epoch) in enumerate(steps):
        if leaves and inside:
            gone = next(iter(inside))
            table.leave(gone)
            del inside[gone]
            continue
        answer = table.admit(reader(key, epoch))
        if not isinstance(answer, Refusal):
            for each in answer:
                del inside[each.reader.key]  # type: ignore[arg-type]  # keys here are ints
            inside[key] = epoch
        assert len(table) == len(inside) <= MAX_SHARED_READERS
        assert len(inside) == 1 or all(each is None for each in inside.values())
