"""The order of partition ids, and how they are named in texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_RUN: Final = 3
"""So many partitions in a row are named by the first and the last."""


def partition_order(partition_id: str) -> tuple[int, str]:
    """Return the key that sorts partition ids by number: "9" before "10". The service numbers them from "0" on."""
    return len(partition_id), partition_id


def named_partitions(partition_ids: Sequence[str]) -> str:
    """Return partitions, at least one, in order, as a text, such as "partitions 0 to 5, 7"."""
    runs: list[list[str]] = []
    for each in partition_ids:
        if runs and each.isdecimal() and runs[-1][-1].isdecimal() and int(each) == int(runs[-1][-1]) + 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    shown = (", ".join(run) if len(run) < _RUN else f"{run[0]} to {run[-1]}" for run in runs)
    return f"partition{'' if len(partition_ids) == 1 else 's'} {', '.join(shown)}"
