"""The lease store answers 503, or not at all, for one partition: a real blob service behind a proxy that fails."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from eventpump import BlobLeaseStore, StoreError
from eventpump.reports import LeaseLost, LeaseTaken, StoreFailed
from tests.faults.programs import Publisher, Stage, run_for
from tests.faults.storage_proxy import Answer, StorageProxy
from tests.support.azurite import Azurite

LEASE_DURATION = 15
"""Seconds; blob leases last no shorter."""
RENEW_INTERVAL = 1.0
"""Seconds; shorter than in use, for many requests in a short test."""
BACK = 8.0
"""Seconds within which the partition flows once its blob is served: the end of a call, one cycle, a back-off."""


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    """A real blob service."""
    with Azurite() as server:
        yield server


@pytest.fixture
async def storage(azurite: Azurite, nothing_left: None, stage: Stage) -> AsyncIterator[StorageProxy]:
    """A connection to it that can be made to fail."""
    async with StorageProxy(azurite.blob_endpoint, stage.progress.changed) as proxy:
        yield proxy


def _store(azurite: Azurite, storage: StorageProxy, container: str) -> BlobLeaseStore:
    connection_string = azurite.connection_string.replace(azurite.blob_endpoint, storage.endpoint)
    return BlobLeaseStore(
        container, connection_string=connection_string, lease_duration=LEASE_DURATION, call_timeout=1.0, create=True
    )


@pytest.mark.parametrize("answer", list(Answer))
async def test_store_that_fails_for_one_partition_affects_no_other(
    stage: Stage, azurite: Azurite, storage: StorageProxy, answer: Answer
) -> None:
    """*No loss*, *no duplicate*, *recovery*: others are taken, renewed and checkpointed; this one is when it can be."""
    container = f"leases-{uuid.uuid4().hex}"
    processor = stage.processor("host", checkpoint_every=1)
    storage.fail("1", answer)
    others = ["0", "2", "3"]
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def fails() -> None:
            # It cannot even be made; the others are.
            await stage.progress.until_flowing(others, 20.0)
            await stage.progress.until(lambda: stage.count(StoreFailed) >= 2, 10.0)
            assert stage.count(LeaseTaken, "1") == 0
            storage.restore()
            await stage.progress.until_flowing(publisher.partitions, BACK)
            # Now it fails for a partition that is owned: nothing of the others waits for it.
            storage.fail("0", answer)
            failed = stage.count(StoreFailed, "0")
            renewed = dict(storage.leased)
            await stage.progress.until(lambda: stage.count(StoreFailed, "0") >= failed + 2, 10.0)
            await stage.progress.until(
                lambda: all(storage.leased[each] > renewed[each] + 2 for each in ("1", "2", "3")), 5.0
            )
            await stage.progress.until_flowing(["1", "2", "3"], 2.0)
            storage.restore()
            await stage.progress.until_flowing(publisher.partitions, BACK)
            await publisher.stop()
            evidence = await stage.verify(publisher)
            assert all(isinstance(error, StoreError) for _, error in processor.errors)
            # Tried again after a checkpoint failed: the same batch, and nothing else.
            assert evidence.duplicates <= 20 * len(processor.errors)

        host = stage.host("host", processor, leases=_store(azurite, storage, container), renew_interval=RENEW_INTERVAL)
        await run_for(host, fails)
    assert stage.count(LeaseLost) == 0
    assert sorted(processor.opened) == publisher.partitions


async def test_partition_whose_lease_cannot_be_renewed_is_left_in_time(
    stage: Stage, azurite: Azurite, storage: StorageProxy, request: pytest.FixtureRequest
) -> None:
    """*One reader*, *recovery*: no answer for a whole lease, and the host stops by itself."""
    answers = list(Answer) if request.config.getoption("--long") else [Answer.NONE]
    container = f"leases-{uuid.uuid4().hex}"
    processor = stage.processor("host", checkpoint_every=0)
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def fails() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            for count, answer in enumerate(answers, 1):
                storage.fail("0", answer)
                await stage.progress.until(lambda count=count: stage.count(LeaseLost, "0") == count, LEASE_DURATION + 1)  # type: ignore[misc]  # the default is the type
                epoch, reached = stage.progress.owner["0"][1], stage.progress.reached["0"]
                await stage.progress.until_flowing(["1", "2", "3"], 2.0)
                assert stage.progress.reached["0"] == reached
                storage.restore()
                await stage.progress.until_flowing(["0"], LEASE_DURATION + BACK)
                assert stage.progress.owner["0"][1] == epoch + 1
            await publisher.stop()
            await stage.verify(publisher)

        host = stage.host("host", processor, leases=_store(azurite, storage, container), renew_interval=RENEW_INTERVAL)
        await run_for(host, fails)
    assert {report.partition_id for report in stage.reports if isinstance(report, LeaseLost)} == {"0"}
