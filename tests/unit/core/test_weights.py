"""Weights in the names of hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.weights import UNIT, weight_of, with_weight
from eventpump.errors import ConfigurationError


@given(st.sampled_from(["", "host", "host-7", ";", "weight=", "\u00e4;weight"]), st.integers(1, 9_999_999))
def test_weight_of_a_name_is_the_one_it_was_given(name: str, thousandths: int) -> None:
    """Every host reads what one has written."""
    assert weight_of(with_weight(name, thousandths / UNIT)) == thousandths


def test_name_without_a_weight_has_the_weight_1() -> None:
    """Other programs that share the leases name themselves as they like."""
    for name in ("", "host", "host;weight=", "host;weight=-2", "host;weight=1e9", "host;weight=0", "w;weight=2;x"):
        assert weight_of(name) == UNIT
    assert with_weight("host", 1.0) == "host"
    assert with_weight("host", 2.5) == "host;weight=2.5"
    assert with_weight("host", 20) == "host;weight=20"


def test_name_that_has_a_weight_is_given_no_other() -> None:
    """Which of the two would count?"""
    with pytest.raises(ConfigurationError, match="contains a weight"):
        with_weight("host;weight=2", 3)
