"""Samples of seeds: by which a test runs in a normal run, and that the long form leaves none out."""

from __future__ import annotations

import pytest

from tests.support.seeds import RUN_VARIABLE, seeds, seeds_of

MARK = seeds(3, of=200, always=[48]).mark


def test_seeds_of_a_run_are_the_same_in_every_worker_and_others_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that collected different tests would be refused; and runs together get to all seeds."""
    reached: set[int] = set()
    for run in range(1000):
        monkeypatch.setenv(RUN_VARIABLE, str(run))
        sample = seeds_of(MARK, "test_a", is_long=False)
        assert sample == seeds_of(MARK, "test_a", is_long=False)
        assert len({*sample} - {48}) in (2, 3)
        assert 48 in sample
        reached.update(sample)
    assert reached == set(range(200))


def test_seeds_of_the_long_form_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--long` each seed is run."""
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    assert list(seeds_of(MARK, "test_a", is_long=True)) == list(range(200))


@pytest.mark.parametrize("number", range(3))
@seeds(2, of=2)
def test_seeds_are_the_parameter_of_a_test_with_the_mark(seed: int, number: int) -> None:
    """Beside the test's other parameters."""
    assert seed in (0, 1)
    assert number in (0, 1, 2)
