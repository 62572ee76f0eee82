"""The weight of a host, as part of its name in the leases: the only thing that hosts know of each other."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from eventpump.errors import ConfigurationError

UNIT: Final = 1000
"""What `weight_of` returns for a host without a weight in its name."""

_SUFFIX: Final = re.compile(r";weight=([0-9]{1,4}(?:\.[0-9]{1,3})?)\Z")


def with_weight(owner_id: str, weight: float) -> str:
    """Return a host's name in the leases, with its weight unless that is 1: "worker-1;weight=2.5", to three decimal
    places."""
    if _SUFFIX.search(owner_id):
        problem = f"{owner_id!r} contains a weight: remove it from the name, or do not give the option weight"
        raise ConfigurationError("owner_id", problem)
    text = f"{weight:.3f}".rstrip("0").rstrip(".")
    return owner_id if text == "1" else f"{owner_id};weight={text}"


@lru_cache(maxsize=4096)
def weight_of(owner: str) -> int:
    """Return the weight in a host's name, in thousandths. The same on every host, whatever names there are.

    A name without a weight, such as those of other programs that share the leases, has the weight 1, and so has one
    with the weight 0.
    """
    found = _SUFFIX.search(owner)
    return UNIT if found is None else round(float(found[1]) * UNIT) or UNIT
