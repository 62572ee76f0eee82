"""Random histories by seed: the normal run takes a sample of the seeds, another one in each run; `--long` takes all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random
from typing import TypeVar

import pytest

T = TypeVar("T")

RUN_VARIABLE = "TESTS_SEED"
"""The environment variable with the number that a run's samples, and the hash seeds of its programs, are made of."""


def seeds(short: int, *, of: int, always: Sequence[int] = ()) -> pytest.MarkDecorator:
    """Run a test with a parameter `seed` by several seeds.

    Args:
        short: How many seeds a normal run takes.
        of: How many there are, from 0 on; `--long` takes all.
        always: Those that every run takes too, since they once found something.
    """
    return pytest.mark.seeds(short=short, of=of, always=tuple(always))


def seeds_of(mark: pytest.Mark, test: str, *, is_long: bool) -> Sequence[int]:
    """Return the seeds that a test with such a mark runs by, the same ones in every worker of a run."""
    every = range(mark.kwargs["of"])
    return every if is_long else sorted({*sample(every, mark.kwargs["short"], test), *mark.kwargs["always"]})


def sample(every: Sequence[T], count: int, test: str) -> list[T]:
    """Return some of them by chance, the same ones in every worker of a run, and others in the next run."""
    return Random(f"{os.environ[RUN_VARIABLE]} {test}").sample(every, count)
