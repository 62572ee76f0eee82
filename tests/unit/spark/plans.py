"""Plans of the sink's batches, as the tests of its modules make them."""

from __future__ import annotations

import json
from typing import Any

from eventpump.spark.sink.records import PackingLimits, PartitionPlan, Plan, encode_record
from tests.unit.spark.sinking import SINK


def entry(partition_id: str = "0", **values: Any) -> PartitionPlan:
    every: dict[str, Any] = {
        "partition_id": partition_id,
        "producer_id": 7,
        "owner_level": 3,
        "next_number": 21,
        "nothing": 0,
        "is_fresh": False,
        "tail": 9,
    }
    return PartitionPlan(**{**every, **values})


def plan(batch_id: int = 1, *partitions: PartitionPlan, **values: Any) -> Plan:
    every: dict[str, Any] = {
        "sink": SINK,
        "query_id": "query",
        "run_id": "earlier",
        "batch_id": batch_id,
        "partitions": partitions or (entry("0"), entry("1")),
        "limits": PackingLimits(),
        "is_stamped": False,
    }
    return Plan(**{**every, **values})


def changed(**values: object) -> bytes:
    """Spell a plan with other values; ... leaves one out."""
    found = json.loads(encode_record(plan())) | values
    return json.dumps({key: value for key, value in found.items() if value is not ...}).encode()
