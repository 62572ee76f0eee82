"""`eventpump lag` as a process, over an emulator whose truth is known."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import pytest

from eventpump import ConfigurationError, Emulator, EventData, EventProducer, SqliteLeaseStore, StoreError
from eventpump.emulator.config import HubSpec
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.lag import GroupCheckpoints, GroupLag, LagReader, SqliteCheckpointReader
from eventpump.testing.fixtures import EmulatorFactory, eventpump_emulator, eventpump_emulators
from tests.integration.test_cli_send_tail import run, started
from tests.support.leases import unheld

__all__ = ["eventpump_emulator", "eventpump_emulators"]

SENT = {"0": 10, "1": 0, "2": 20, "3": 5}


class Failing(SqliteCheckpointReader):
    """Checkpoints in a file system that comes and goes."""

    fails = False

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        if self.fails:
            raise StoreError("read checkpoints", "it is away")
        return await super().read(scope, partition_ids)


async def fill(emulator: Emulator) -> None:
    """Store events in three of four partitions."""
    async with EventProducer(emulator.connection_string, "telemetry") as producer:
        for partition_id, count in SENT.items():
            if count:
                await producer.send([EventData(b"x") for _ in range(count)], partition_id=partition_id)


async def checkpoints(path: Path, numbers: dict[str, int]) -> None:
    """Store checkpoints as a host does, which is gone then without releasing its leases."""
    store = SqliteLeaseStore(path)
    await store.open(ConsumerScope("127.0.0.1", "telemetry", "$Default"))
    await store.ensure(list(SENT))
    for partition_id, number in numbers.items():
        lease = await store.acquire(unheld(partition_id), "host-a")
        assert lease is not None
        assert await store.write_checkpoint(lease, Checkpoint(partition_id, str(number), number))
    await store.aclose()


async def test_lag_is_shown_for_each_partition(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """Processed, behind, never begun, and with a checkpoint of a former hub; the sum is of what is known."""
    await fill(eventpump_emulator)
    await checkpoints(tmp_path / "leases.db", {"0": 9, "2": 14, "3": 70})
    arguments = ("lag", "--hub", "telemetry", "--leases", str(tmp_path / "leases.db"))
    code, out, err = await run(*arguments, emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    lines = out.decode().splitlines()
    assert lines[0] == "hub telemetry, consumer group $Default: 5 events behind, and unknown in partitions 3"
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[2:]] == [
        ["partition", "first", "last", "checkpoint", "lag", "state", "age", "owner"],
        ["0", "0", "9", "9", "0", "ok", "host-a"],
        ["1", "0", "no-checkpoint"],
        ["2", "0", "19", "14", "5", "behind", "host-a"],
        ["3", "0", "4", "70", "?", "beyond-end", "host-a"],
    ]
    code, out, err = await run(*arguments, "--json", emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["lag"], document["unknown"]) == (5, ["3"])
    assert {each: (got["state"], got["lag"]) for each, got in document["partitions"].items()} == {
        "0": ("ok", 0),
        "1": ("no-checkpoint", 0),
        "2": ("behind", 5),
        "3": ("beyond-end", None),
    }


@pytest.mark.parametrize(
    ("numbers", "limit", "code", "says"),
    [
        ({"0": 9, "2": 14, "3": 4}, 5, 0, ""),
        ({"0": 9, "2": 14, "3": 4}, 4, 1, "the lag is 5, above 4"),
        ({"0": 9, "2": 19, "3": 70}, 99, 1, "the lag of partitions 3 is not known"),
    ],
)
async def test_max_lag_is_an_exit_code(
    eventpump_emulator: Emulator, tmp_path: Path, numbers: dict[str, int], limit: int, code: int, says: str
) -> None:
    """1 above the limit, and where it cannot be said."""
    await fill(eventpump_emulator)
    await checkpoints(tmp_path / "leases.db", numbers)
    arguments = ("lag", "--hub", "telemetry", "--leases", str(tmp_path / "leases.db"), "--max-lag", str(limit))
    found, _, err = await run(*arguments, emulator=eventpump_emulator)
    assert found == code
    assert says in err


async def test_lag_is_served_until_the_command_is_interrupted(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """For Prometheus and for a scaler that reads a number; it is ready once the lag was read."""
    await fill(eventpump_emulator)
    await checkpoints(tmp_path / "leases.db", {"0": 9, "2": 14, "3": 4})
    arguments = (
        "lag",
        "--hub",
        "telemetry",
        "--leases",
        str(tmp_path / "leases.db"),
        "--serve",
        ":0",
        "--interval",
        "1",
    )
    async with started(*arguments, emulator=eventpump_emulator) as process, aiohttp.ClientSession() as session:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        url = re.match(r"serving (http://127\.0\.0\.1:\d+)/metrics", line)
        assert url is not None, line
        line = (await process.stdout.readline()).decode()
        assert line == "hub telemetry, consumer group $Default: 5 events behind\n"
        async with session.get(f"{url[1]}/readyz") as ready:
            assert ready.status == 200
        async with session.get(f"{url[1]}/lag.json") as answer:
            assert (await answer.json())["lag"] == 5
        async with session.get(f"{url[1]}/metrics") as answer:
            text = await answer.text()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")
    lags = re.findall(r'^eventpump_partition_lag\{.*partition_id="(\d)",position="checkpointed"\} (\d+)$', text, re.M)
    assert dict(lags) == {"0": "0", "1": "0", "2": "5", "3": "0"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--container: --leases or --spark is required, and only one of them"),
        (("--leases", "a", "--spark", "b"), "only one of them"),
        (("--leases", "/no/such/file"), "/no/such/file: there is no such file"),
        (("--leases", __file__), "test_cli_lag.py"),
        (("--spark", "/no/such/directory"), "is not the checkpointLocation of a query"),
        (("--container", "a"), "--storage-connection-string: is required"),
        (("--spark", "a", "--prefix", "b"), "--prefix: goes with --container"),
        (("--spark", "a", "--seconds"), "--seconds: and --reader-group are given together"),
        (("--spark", "a", "--max-lag", "1", "--watch"), "--max-lag: is for one reading"),
        (("--spark", "a", "--serve", "9108"), "--serve: must be [ADDRESS]:PORT"),
        (("--spark", "a", "--seconds", "--reader-group", "$default"), "--reader-group: must be another consumer group"),
    ],
)
async def test_what_cannot_be_read_exits_with_2(
    eventpump_emulator: Emulator, arguments: tuple[str, ...], says: str
) -> None:
    """One line that names the option, and exit code 2."""
    code, out, err = await run("lag", "--hub", "telemetry", *arguments, emulator=eventpump_emulator)
    assert (code, out, err.count("\n")) == (2, b"", 1)
    assert says in err


async def test_time_behind_is_that_of_the_oldest_unprocessed_event(
    eventpump_emulators: EmulatorFactory, tmp_path: Path
) -> None:
    """One event is read per partition that is behind, in a group of its own; where all is processed none waits."""
    emulator = await eventpump_emulators([HubSpec("telemetry", 4, ("lag",))])
    await fill(emulator)
    await checkpoints(tmp_path / "leases.db", {"0": 9, "2": 14, "3": 4})
    reader = LagReader(
        emulator.connection_string,
        "telemetry",
        checkpoints=SqliteCheckpointReader(tmp_path / "leases.db"),
        reader_group="lag",
    )
    async with reader:
        found = await reader.read()
    waits = {each.partition_id: each.seconds for each in found.partitions}
    assert found.notes == ()
    assert (waits["0"], waits["1"], waits["3"]) == (0.0, 0.0, 0.0)
    assert waits["2"] is not None
    assert waits["2"] > 0


async def test_reader_in_the_watched_group_is_refused(tmp_path: Path) -> None:
    """It would be one of the five readers that a partition has room for."""
    with pytest.raises(ConfigurationError, match="reader_group"):
        LagReader(checkpoints=SqliteCheckpointReader(tmp_path / "a"), reader_group="$default")


async def test_reading_again_and_again_goes_on_through_an_outage_of_the_store(
    eventpump_emulator: Emulator, tmp_path: Path
) -> None:
    """What was read last is returned with a note; the first reading raises."""
    await fill(eventpump_emulator)
    path = tmp_path / "leases.db"
    await checkpoints(path, {"0": 9, "2": 14, "3": 4})
    store = Failing(path)
    async with LagReader(eventpump_emulator.connection_string, "telemetry", checkpoints=store) as reader:
        results = reader.watch(0.01)
        first = await _next(results, lambda lag: not lag.unknown)
        store.fails = True
        second = await _next(results, lambda lag: bool(lag.notes))
        store.fails = False
        third = await _next(results, lambda lag: not lag.notes)
        await results.aclose()
    assert (first.total, second.total, third.total) == (5, 5, 5)
    assert ["it is away" in note for note in second.notes] == [True]


async def _next(results: AsyncIterator[GroupLag], wanted: Callable[[GroupLag], bool]) -> GroupLag:
    """Return the next result of a kind. A result before the first reading has ended has partitions of unknown lag."""
    return await anext(found async for found in results if wanted(found))
