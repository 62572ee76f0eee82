"""A sink is called once for a batch in each run of its query."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack, suppress

import pytest

from eventpump.errors import ConfigurationError
from eventpump.spark.sink.calls import BatchCalls
from eventpump.spark.sink.records import Sink
from tests.unit.spark.sinking import SINK

OTHER = SINK.model_copy(update={"sink_id": "other"})


def test_call_again_in_one_run_is_refused_with_what_to_do() -> None:
    """*No loss*: the rows of a second call would be dropped. The next batch, sink or run is another call."""
    calls = BatchCalls()
    for sink, run_id, batch_id in ((SINK, "a", 5), (OTHER, "a", 5), (SINK, "a", 6), (SINK, "b", 6)):
        with calls.call(sink, run_id, batch_id):
            pass
    for _ in range(2):
        with (
            pytest.raises(ConfigurationError, match=r"'sink' is called for batch 6 a second time.*unionByName"),
            calls.call(SINK, "b", 6),
        ):
            raise AssertionError("nothing is sent")


def test_call_after_one_that_failed_may_be_made() -> None:
    """A function that tries a batch again goes on with it."""
    calls = BatchCalls()
    with pytest.raises(OSError, match="an outage"), calls.call(SINK, "a", 5):
        raise OSError("an outage")
    with calls.call(SINK, "a", 5):
        pass
    with pytest.raises(ConfigurationError), calls.call(SINK, "a", 5):
        pass


@pytest.mark.parametrize("is_second", [False, True])
def test_call_after_one_whose_error_was_swallowed_is_refused(is_second: bool) -> None:
    """*No loss*: if a function goes on after the error of a call, each later call of the run raises."""
    calls = BatchCalls()
    with calls.call(SINK, "a", 4):
        pass
    if is_second:
        with calls.call(SINK, "a", 5):
            pass
    with suppress(OSError, ConfigurationError), calls.call(SINK, "a", 5):
        raise OSError("an outage")
    for batch_id in (6, 7):
        with (
            pytest.raises(ConfigurationError, match=f"batch {batch_id}, but a call for batch 5 has failed in this run"),
            calls.call(SINK, "a", batch_id),
        ):
            raise AssertionError("nothing is sent")
    for sink, run_id in ((OTHER, "a"), (SINK, "b")):
        with calls.call(sink, run_id, 6):
            pass


def test_calls_at_the_same_time_are_refused() -> None:
    """*No loss*: two frames would share the batch's numbers; of threads that call at once, one publishes."""
    calls, barrier = BatchCalls(), threading.Barrier(8)
    published, refused, refusals = [], [], threading.Semaphore(0)

    def call(number: int) -> None:
        barrier.wait()
        try:
            with calls.call(SINK, "a", 5):
                published.append(number)
                for _ in range(7):
                    refusals.acquire()
        except ConfigurationError:
            refused.append(number)
            refusals.release()

    threads = [threading.Thread(target=call, args=(each,)) for each in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (len(published), len(refused)) == (1, 7)


def test_calls_in_random_histories_publish_a_batch_once_in_a_run() -> None:
    """A call is refused only after one of its run that has ended well, or beside one, and where rows of another batch
    are missing in its run."""
    refused = 0
    for seed in range(200):
        rng = random.Random(seed)
        calls = BatchCalls()
        running: list[tuple[tuple[Sink, int, int], ExitStack]] = []
        ended: dict[Sink, tuple[Sink, int, int]] = {}
        missing: dict[Sink, tuple[Sink, int, int]] = {}
        stale: list[ExitStack] = []
        run, batch_id = 0, 0
        for _ in range(40):
            chance = rng.random()
            if stale and rng.random() < 0.3:
                stale.pop().close()
            if chance < 0.1:
                run += 1  # what still runs of the run before ends some time
            elif chance < 0.2:
                batch_id += 1
            elif chance < 0.6 or not running:
                sink = rng.choice([SINK, OTHER])
                mine = (sink, run, batch_id)
                stack = ExitStack()
                is_refused = ended.get(sink) == mine or any(each == mine for each, _ in running)
                is_behind = sink in missing and missing[sink][1] == run and missing[sink] != mine
                try:
                    stack.enter_context(calls.call(sink, str(run), batch_id))
                except ConfigurationError:
                    assert is_refused or is_behind, seed
                    refused += 1
                    missing.setdefault(sink, mine)
                    continue
                assert not is_refused, seed
                assert not is_behind, seed
                missing.pop(sink, None)
                stale += [theirs for each, theirs in running if each[0] == sink]
                running = [(each, theirs) for each, theirs in running if each[0] != sink] + [(mine, stack)]
                ended.pop(sink, None)
            else:
                mine, stack = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.7:
                    stack.close()
                    ended[mine[0]] = mine
                else:
                    stack.__exit__(OSError, OSError("an outage"), None)
                    if mine[1] == run:
                        missing[mine[0]] = mine
    assert refused > 200
