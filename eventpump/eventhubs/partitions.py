"""The order of partition ids."""

from __future__ import annotations


def partition_order(partition_id: str) -> tuple[int, str]:
    """Return the key that sorts partition ids by number: "9" before "10". The service numbers them from "0" on."""
    return len(partition_id), partition_id
