"""Which times of a host go together with those of the other SDKs' members."""

from __future__ import annotations

import inspect

import pytest

from eventpump.storage.leases.ownership import BlobOwnershipStore
from eventpump.storage.leases.terms import MEMBERS, TRIES, find_conflicts

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(BlobOwnershipStore).parameters.items()}


def test_defaults_live_with_every_sdk() -> None:
    """Three renewals fit into the shortest expiry, and three of the slowest member into ours."""
    duration, timeout = DEFAULTS["lease_duration"], DEFAULTS["owner_timeout"]
    assert find_conflicts(duration, timeout, duration / 3) == []
    assert all(TRIES * duration / 3 <= each.expires_after for each in MEMBERS)
    assert all(TRIES * each.renewed_within <= timeout for each in MEMBERS)


@pytest.mark.parametrize(
    ("duration", "timeout", "interval", "words"),
    [
        (60.0, 120.0, 25.0, ["renew_interval of 25 s", "JavaScript and Go", "at most 20 s"]),
        (90.0, 120.0, 20.0, ["lease_duration of 90 s", "JavaScript and Go", "at most 60 s"]),
        (60.0, 60.0, 20.0, ["owner_timeout of 60 s", ".NET, Java and Python", "at least 108 s"]),
    ],
)
def test_times_that_do_not_go_together_are_named(
    duration: float, timeout: float, interval: float, words: list[str]
) -> None:
    """With the members that take partitions, or lose them, and what to give instead."""
    (problem,) = find_conflicts(duration, timeout, interval)
    assert all(word in problem for word in words), problem
