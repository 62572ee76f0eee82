"""The models of other SDKs' members in random histories decide as the published packages do."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import pytest
from azure.eventhub import LoadBalancingStrategy
from azure.eventhub.aio._eventprocessor._ownership_manager import OwnershipManager

from tests.faults.histories.official import Ownership, Pace, javascript_claims, python_claims
from tests.support.node import install_npm_package, node_binary

_STRATEGY = """
const { GreedyLoadBalancingStrategy } = await import(process.argv[1]);
Math.random = () => 0;
const cases = JSON.parse(await new Response(process.stdin).text());
const strategy = new GreedyLoadBalancingStrategy(60000);
const claims = cases.map(({ ids, listed }) => {
  const owned = listed.map(([partitionId, ownerId, age]) => [
    partitionId, { partitionId, ownerId, lastModifiedTimeInMs: Date.now() - age * 1000 },
  ]);
  return strategy.getPartitionsToClaim("me", new Map(owned), ids);
});
console.log(JSON.stringify(claims));
"""


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "balanced"])
def test_model_of_python_claims_what_the_package_claims(*, is_greedy: bool) -> None:
    """For any ownership, the same partitions under the same random numbers."""
    strategy = LoadBalancingStrategy.GREEDY if is_greedy else LoadBalancingStrategy.BALANCED
    client: Any = _Client()
    manager = OwnershipManager(client, "$Default", "me", None, 180.0, strategy, None)
    for seed in range(400):
        now = time.time()
        ids, listed = _ownership_of(seed, now)
        random.seed(seed)
        official = manager._balance_ownership([_as_listed(each) for each in listed], ids)
        rng = random.Random(seed)
        ours = python_claims(listed, ids, "me", now, Pace(30.0, 180.0, is_greedy), rng)
        assert [(each.partition_id, each.etag, each.owner) for each in ours] == [
            (each["partition_id"], each.get("etag"), each["owner_id"]) for each in official
        ], seed


def test_model_of_javascript_claims_what_the_package_claims() -> None:
    """For any ownership, the same partitions if each draw is the first of those that are left."""
    package = install_npm_package("@azure/event-hubs", "6.0.4")
    module = package / "dist" / "esm" / "loadBalancerStrategies" / "greedyStrategy.js"
    cases = [_ownership_of(seed, 0.0) for seed in range(400)]
    named = [(ids, [each for each in listed if each.owner]) for ids, listed in cases]
    given = [
        {"ids": ids, "listed": [(each.partition_id, each.owner, -each.changed_at) for each in listed]}
        for ids, listed in named
    ]
    run = subprocess.run(
        [node_binary(), "--input-type=module", "-e", _STRATEGY, module.as_uri()],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
        timeout=60.0,
    )
    pace = Pace(10.0, 60.0, is_greedy=True)
    for (ids, listed), official in zip(named, json.loads(run.stdout), strict=True):
        assert javascript_claims(listed, ids, "me", 0.0, pace, _First()) == official, (ids, listed)


class _First(random.Random):
    """Draws what comes first."""

    def sample(self, population: Sequence[Any], k: int, *, counts: Any = None) -> list[Any]:
        return list(population[:k])


def _ownership_of(seed: int, now: float) -> tuple[list[str], list[Ownership]]:
    rng = random.Random(seed)
    ids = [str(number) for number in range(rng.randint(1, 20))]
    names = ["me", "a", "b", "c", ""][rng.randint(0, 2) :]
    ages = rng.choice(((1.0,), (1.0, 100.0, 500.0)))
    listed = [
        Ownership(each, rng.choice(names), now - rng.choice(ages), f"etag {each}") for each in ids if rng.random() < 0.9
    ]
    return ids, listed


class _Client:
    eventhub_name = "hub"

    class _address:  # noqa: N801 - named as in the package
        hostname = "ns.example.net"


def _as_listed(ownership: Ownership) -> dict[str, Any]:
    return {
        "partition_id": ownership.partition_id,
        "owner_id": ownership.owner,
        "last_modified_time": ownership.changed_at,
        "etag": ownership.etag,
    }
