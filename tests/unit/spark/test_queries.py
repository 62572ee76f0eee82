"""Which query calls a sink under Spark Connect."""

from __future__ import annotations

import random

from eventpump.spark.sink.queries import ActiveQuery, find_query


def test_query_that_calls_is_found_among_others() -> None:
    """It is the one that is within a trigger, and whose run has ended the batch before, or none."""
    others = [ActiveQuery("idle", False, 6), ActiveQuery("ahead", True, 8), ActiveQuery("behind", True, 5)]
    for newest_batch in (None, 6, 7):
        assert find_query([*others, ActiveQuery("mine", True, newest_batch)], 7) == "mine"


def test_query_is_not_named_after_another_one() -> None:
    """One that was stopped is not taken for another that is active, and of two that may have called, for neither."""
    assert find_query([], 7) is None
    assert find_query([ActiveQuery("other", True, 5)], 7) is None
    assert find_query([ActiveQuery("other", False, 6)], 7) is None
    assert find_query([ActiveQuery("one", True, 6), ActiveQuery("two", True, None)], 7) is None


def test_query_is_found_right_or_not_at_all_in_random_histories() -> None:
    """Queries start, go from batch to batch, and stop; what is found for a call of one that runs is that one."""
    found = 0
    for seed in range(500):
        rng = random.Random(seed)
        runs: dict[str, tuple[int, bool, int | None]] = {}
        for step in range(60):
            if not runs or rng.random() < 0.1:
                runs[f"query {step}"] = (rng.choice([0, 0, 5]), False, None)
            name = rng.choice([*runs])
            batch_id, is_running, newest = runs[name]
            if rng.random() < 0.05:
                del runs[name]
            elif is_running:
                active = [ActiveQuery(each, running, last) for each, (_, running, last) in runs.items()]
                asked = find_query(active, batch_id)
                assert asked in (None, name)
                found += asked == name
                runs[name] = (batch_id + 1, False, batch_id)
            else:
                runs[name] = (batch_id, True, rng.choice([newest, batch_id if newest is not None else None]))
    assert found > 1000
