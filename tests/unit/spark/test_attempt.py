"""One attempt of a task at a partition of a batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.errors import InvalidClientStateError, ProducerDisconnectedError, ServiceTimeoutError
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.spark.sink.attempt import PartitionWork, WorkStep
from eventpump.spark.sink.records import LossReason, PartitionPlan, StateLost
from tests.unit.spark.plans import entry


def step(work: PartitionWork) -> WorkStep:
    """Read the step anew: a checker would think that no call changes it."""
    return work.step


def working(each: PartitionPlan, last: int | None = None, **options: Any) -> PartitionWork:
    """Make an attempt with all its rows, which has looked."""
    work = PartitionWork(each, **options)
    work.received(each.count)
    if last is not None:
        work.looked(last)
    return work


def ten(**values: Any) -> PartitionPlan:
    """Plan ten rows."""
    return entry(**{"count": 10, **values})


def test_attempt_looks_before_it_sends() -> None:
    """The first step is to ask the service, rows or none."""
    work = PartitionWork(ten())
    assert (step(work), work.needed) == (WorkStep.LOOK, None)
    work.looked(20)
    assert (step(work), work.needed) == (WorkStep.REST, 0)
    work.received(1)
    assert step(work) is WorkStep.SEND


def test_attempt_needs_no_rows_that_are_stored() -> None:
    """Rows before the position are not waited for; at the last one the attempt ends without any."""
    work = PartitionWork(ten())
    work.looked(24)
    assert (step(work), work.needed) == (WorkStep.REST, 4)
    work.received(7)
    assert step(work) is WorkStep.SEND
    work.published(25, 3)
    assert (step(work), work.needed) == (WorkStep.REST, 7)
    done = PartitionWork(ten())
    done.looked(30)
    assert step(done) is WorkStep.END


@pytest.mark.parametrize(("last", "position"), [(20, 0), (21, 1), (29, 9)])
def test_attempt_goes_on_after_what_is_stored(last: int, position: int) -> None:
    """The first row sent is the one after the last number the service knows."""
    work = working(ten(), last=last)
    assert (step(work), work.position, work.found) == (WorkStep.SEND, position, position)
    work.published(entry().number_of(position), 10 - position)
    made = work.receipt()
    assert (made.count, made.first_number, made.next_number, made.last_number) == (10, 21, 31, 30)


def test_attempt_numbers_wrap_to_zero() -> None:
    """After 2147483647 comes 0, for rows and for what the service answers."""
    each = ten(next_number=NUMBERS - 2, nothing=-1)
    assert [each.number_of(row) for row in range(4)] == [NUMBERS - 2, NUMBERS - 1, 0, 1]
    assert working(each, last=0).position == 3
    assert working(each, last=NUMBERS - 1).position == 2
    assert working(each, last=7).step is WorkStep.END


@pytest.mark.parametrize("last", [19, 1, 0, -1])
def test_attempt_at_a_number_before_the_batch_is_a_loss(last: int) -> None:
    """A service that is behind the batch's first number has forgotten: nothing is sent."""
    work = working(ten(), last=last)
    assert step(work) is WorkStep.LOST
    assert work.loss == StateLost(partition_id="0", reason=LossReason.BELOW, stored=0)


@pytest.mark.parametrize("nothing", [-1, 0])
def test_attempt_at_the_answer_for_nothing_is_a_loss_across_the_wrap(nothing: int) -> None:
    """Where the batch's numbers go across 2^31, the answer for nothing published is never a row's number."""
    work = working(ten(next_number=NUMBERS - 3, nothing=nothing), last=nothing)
    assert step(work) is WorkStep.LOST


def test_attempt_at_fewer_than_were_stored_is_a_loss() -> None:
    """A service that is behind what it accepted has lost events: nothing more is sent."""
    work = working(ten(), last=20)
    work.published(21, 5)
    assert work.troubled(ServiceTimeoutError("slow"))
    work.looked(24)
    assert step(work) is WorkStep.LOST
    assert work.loss == StateLost(partition_id="0", reason=LossReason.REGRESSED, stored=5)


def test_attempt_of_an_unknown_producer_is_a_loss() -> None:
    """A service that does not know the producer has forgotten it."""
    work = working(ten())
    work.unknown_producer()
    assert work.loss is not None
    assert work.loss.reason is LossReason.UNKNOWN


@pytest.mark.parametrize("nothing", [-1, 0])
def test_attempt_of_a_fresh_producer_checks_the_tail(nothing: int) -> None:
    """A service that forgot the first rows says what one says that never had any: the tail distinguishes them."""
    each = ten(next_number=nothing + 1, nothing=nothing, is_fresh=True)
    work = working(each, last=nothing)
    assert step(work) is WorkStep.SCAN
    work.scanned(is_stored=False)
    assert (step(work), work.position) == (WorkStep.SEND, 0)
    work.troubled(ServiceTimeoutError("slow"))
    work.looked(nothing)
    assert step(work) is WorkStep.SCAN, "it may have been stored, and forgotten, since"
    work.scanned(is_stored=True)
    assert step(work) is WorkStep.LOOK
    work.looked(nothing)
    assert work.loss is not None
    assert work.loss.reason is LossReason.UNCOUNTED


def test_attempt_with_a_rival_that_was_first_is_no_loss() -> None:
    """A row that is stored between the look and the scan shows at the next look."""
    work = working(ten(next_number=1, is_fresh=True), last=0)
    work.scanned(is_stored=True)
    work.looked(4)
    assert (step(work), work.position) == (WorkStep.SEND, 4)


def test_attempt_waits_for_the_row_that_it_scans_for() -> None:
    """A scan waits for the row it looks for; where every row was stored before a take-over there is nothing to find."""
    work = PartitionWork(ten(next_number=1, is_fresh=True, offset=2))
    work.looked(0)
    assert (step(work), work.needed) == (WorkStep.REST, 2)
    work.received(3)
    assert step(work) is WorkStep.SCAN
    whole = PartitionWork(ten(next_number=1, is_fresh=True, offset=10))
    whole.looked(0)
    assert step(whole) is WorkStep.END
    assert (whole.receipt().first_number, whole.receipt().next_number) == (None, 1)


def test_attempt_whose_numbers_are_used_beyond_its_rows_is_refused() -> None:
    """A service that has more under the numbers of the batch than it has rows stored a later batch: nothing is sent."""
    for each, last in ((ten(), 31), (ten(offset=5), 26)):
        work = working(each, last=last)
        assert step(work) is WorkStep.FAIL
        assert isinstance(work.error(), InvalidClientStateError)
        assert "11 rows are stored under the numbers of this batch, which has 10" in str(work.error())


def test_attempt_gives_up_after_failures_without_progress() -> None:
    """Trouble makes it look again; it gives up when no row got stored for too long, by whomever."""
    work = working(ten(), last=20, max_tries=2)
    slow = ServiceTimeoutError("slow")
    for last in (20, 22, 22, 23):
        assert work.troubled(slow)
        assert step(work) is WorkStep.LOOK
        work.looked(last)
    assert work.troubled(slow)
    work.looked(23)
    assert work.troubled(slow)
    assert not work.troubled(slow)
    assert work.error() is slow


def test_attempt_that_was_fenced_never_sends_again() -> None:
    """A fenced attempt never sends again."""
    work = working(ten(), last=20)
    error = ProducerDisconnectedError("stolen")
    work.fenced(error)
    assert step(work) is WorkStep.FAIL
    assert work.error() is error


def test_attempt_after_a_take_over_counts_rows_from_its_offset() -> None:
    """Rows before the offset are stored; row `offset` has the first number of the new producer."""
    each = ten(next_number=1, is_fresh=True, offset=3)
    work = working(each, last=0)
    work.scanned(is_stored=False)
    assert work.position == 3
    work.published(1, 7)
    made = work.receipt()
    assert (made.count, made.offset, made.first_number, made.next_number, made.found) == (10, 3, 1, 8, 3)


def test_attempt_checks_the_numbers_of_its_rows() -> None:
    """A mistake in numbering is caught before it is believed."""
    work = working(ten(), last=20)
    with pytest.raises(AssertionError, match="numbers of other rows"):
        work.published(22, 1)


@given(st.integers(0, NUMBERS - 1), st.integers(0, 100), st.integers(0, 100), st.randoms())
def test_attempt_takes_any_answer_within_the_batch_as_a_position(
    first: int, stored: int, rows: int, rng: random.Random
) -> None:
    """For every first number, the answer after k rows is row k, but where it may mean that nothing is published."""
    nothing = rng.choice([-1, 0])
    each = ten(next_number=first, nothing=nothing, count=rows)
    work = PartitionWork(each)
    work.received(rows)
    last = (each.last_number + stored) % NUMBERS
    work.looked(last)
    if last == nothing:
        assert step(work) is WorkStep.LOST
    else:
        assert work.position == stored
        is_over = WorkStep.END if stored == rows else WorkStep.FAIL
        assert step(work) is (WorkStep.SEND if stored < rows else is_over)
