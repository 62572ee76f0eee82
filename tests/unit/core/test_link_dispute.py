"""Whether to attach again to a partition whose link another reader took, and not its lease."""

from __future__ import annotations

import pytest

from eventpump.core.link_dispute import TIMES, LinkDispute


def test_attaches_again_until_the_times_of_the_period_are_used_up() -> None:
    """And again when the period has passed."""
    dispute = LinkDispute(60.0)
    assert [dispute.attaches_again(float(at), 0) for at in range(TIMES + 1)] == [True] * TIMES + [False]
    assert dispute.attaches_again(61.5, 0)


@pytest.mark.parametrize("owner_level", [1, 386])
def test_link_with_a_level_of_its_own_is_not_attached_again(owner_level: int) -> None:
    """A higher one took it, and would refuse it."""
    assert not LinkDispute(60.0).attaches_again(0.0, owner_level)
