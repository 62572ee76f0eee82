"""`eventpump checkpoints` as a process, over an emulator whose truth is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eventpump import Emulator, EventData, EventProducer, SqliteLeaseStore
from eventpump.core.lease import PartitionLease
from eventpump.emulator.config import HubSpec
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.testing.fixtures import EmulatorFactory, eventpump_emulator, eventpump_emulators
from tests.integration.test_cli_send_tail import run
from tests.support.leases import unheld

__all__ = ["eventpump_emulator", "eventpump_emulators"]

SENT = {"0": 10, "1": 0, "2": 20, "3": 5}
SCOPE = ConsumerScope("127.0.0.1", "telemetry", "$Default")


async def fill(emulator: Emulator, hub: str = "telemetry") -> None:
    """Store events in three of four partitions."""
    async with EventProducer(emulator.connection_string, hub) as producer:
        for partition_id, count in SENT.items():
            if count:
                await producer.send([EventData(b"x") for _ in range(count)], partition_id=partition_id)


async def store(path: Path, numbers: dict[str, int], owned: str = "") -> None:
    """Store checkpoints as a host does, which is gone then, and still owns one partition for an hour."""
    leases = SqliteLeaseStore(path, lease_duration=3600)
    await leases.open(SCOPE)
    await leases.ensure(list(SENT))
    for partition_id, number in numbers.items():
        lease = await leases.acquire(unheld(partition_id), "host-a")
        assert isinstance(lease, PartitionLease)
        assert await leases.write_checkpoint(lease, Checkpoint(partition_id, f"offset-{number}", number))
        if partition_id != owned:
            await leases.release(lease)
    await leases.aclose()


async def stored(path: Path) -> dict[str, tuple[int, str]]:
    """Return the checkpoints in a file."""
    leases = SqliteLeaseStore(path)
    await leases.open(SCOPE, read_only=True)
    found = {each: await leases.read_checkpoint(each) for each in SENT}
    await leases.aclose()
    return {each: (got.sequence_number, got.offset) for each, got in found.items() if got is not None}


def cells(lines: list[str]) -> list[list[str]]:
    """Return the cells of a table, from its head to the line before the next empty one."""
    rows = lines[2 : lines.index("", 2)] if "" in lines[2:] else lines[2:]
    return [re.split(r"\s{2,}", line.strip()) for line in rows]


async def test_checkpoints_are_listed(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """With the owner; as a table, and as JSON."""
    await store(tmp_path / "leases.db", {"0": 9, "2": 14}, owned="0")
    arguments = ("checkpoints", "list", "--hub", "telemetry", "--leases", str(tmp_path / "leases.db"))
    code, out, err = await run(*arguments, "--partition", "2", "--partition", "0", emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    lines = out.decode().splitlines()
    assert lines[0] == "hub telemetry, consumer group $Default: 2 checkpoints for 2 partitions"
    assert cells(lines) == [
        ["partition", "checkpoint", "offset", "age", "owner"],
        ["0", "9", "offset-9", "host-a"],
        ["2", "14", "offset-14"],
    ]
    code, out, err = await run(*arguments, "--json", emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    partitions = json.loads(out)["partitions"]
    assert {each: got and (got["sequence_number"], got["is_owned"]) for each, got in partitions.items()} == {
        "0": (9, True),
        "1": (None, False),
        "2": (14, False),
        "3": (None, False),
    }


async def test_reset_shows_what_it_would_do_and_does_it_with_yes(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """Nothing is written before; then a file is too, which import restores. An owned partition is exit code 1."""
    await fill(eventpump_emulator)
    path, file = tmp_path / "leases.db", tmp_path / "before.json"
    await store(path, {"0": 9, "2": 14, "3": 70}, owned="0")
    before = await stored(path)
    at = ("--hub", "telemetry", "--leases", str(path))
    arguments = ("checkpoints", "reset", *at, "--to", "3", "--export", str(file))
    code, out, err = await run(*arguments, emulator=eventpump_emulator)
    assert (code, err) == (1, "")
    lines = out.decode().splitlines()
    assert lines[0] == "hub telemetry, consumer group $Default: 2 to write, 2 refused"
    assert cells(lines) == [
        ["partition", "from", "to", "events", "result"],
        ["0", "9", "2", "7 again", "refused"],
        ["1", "none", "?", "refused"],
        ["2", "14", "2", "12 again", "write"],
        ["3", "70", "2", "68 again", "write"],
    ]
    assert lines[-3:] == [
        "partition 0 refused: host-a owns it",
        "partition 1 refused: 3 is beyond its end: the next event will be 0",
        "Nothing is written without --yes.",
    ]
    assert (await stored(path), file.exists()) == (before, False)
    code, out, err = await run(*arguments, "--yes", emulator=eventpump_emulator)
    assert (code, err) == (1, "")
    assert out.decode().splitlines()[-1] == f"2 checkpoints written. What was there before is in {file}."
    after = await stored(path)
    assert (after["0"], after["2"][0], after["3"][0]) == (before["0"], 2, 2)
    undoing = ("checkpoints", "import", str(file), *at, "--yes", "--export", str(tmp_path / "undo.json"))
    code, out, err = await run(*undoing, emulator=eventpump_emulator)
    assert (code, err) == (1, "")
    assert "partition 3 refused: 70 is beyond its end, 4" in out.decode()
    assert (await stored(path))["2"] == before["2"]


async def test_export_and_copy_take_the_positions_elsewhere(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """A file that is not there is created with --yes only; an export is not written over."""
    await fill(eventpump_emulator)
    path, other, file = tmp_path / "leases.db", tmp_path / "other.db", tmp_path / "saved.json"
    await store(path, {"0": 9, "2": 14})
    at = ("--hub", "telemetry", "--leases", str(path))
    code, out, err = await run("checkpoints", "export", str(file), *at, emulator=eventpump_emulator)
    assert (code, out.decode(), err) == (0, f"2 checkpoints in {file}\n", "")
    assert json.loads(file.read_text())["partitions"]["2"] == {"sequence_number": 14, "offset": "offset-14"}
    code, _, err = await run("checkpoints", "export", str(file), *at, emulator=eventpump_emulator)
    assert (code, err) == (2, f"eventpump: FILE: {file}: exists already; give the name of a new file\n")
    copying = ("checkpoints", "copy", *at, "--to-leases", str(other), "--export", str(tmp_path / "before.json"))
    code, out, err = await run(*copying, emulator=eventpump_emulator)
    assert (code, err, other.exists()) == (0, "", False)
    assert f"{other}: there is no such file yet" in out.decode()
    code, _, err = await run(*copying, "--yes", emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    assert await stored(other) == await stored(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("reset", "--to", "latest"), "--container: or --leases is required, and only one of them"),
        (("list",), "--container: --leases or --spark is required, and only one of them"),
        (("list", "--leases", "/no/such/file"), "--leases: /no/such/file: there is no such file"),
        (("reset", "--leases", "LEASES", "--to", "2030-01-01T00:00:00"), "--to: 2030-01-01T00:00:00 has no time zone"),
        (("reset", "--leases", "LEASES", "--to", "2999-01-01T00:00:00Z"), "--to: 2999-01-01T00:00:00+00:00 is in the"),
        (("reset", "--leases", "LEASES", "--to", "soon"), "--to: must be earliest, latest, a sequence number or"),
        (("reset", "--leases", "LEASES", "--to", "latest", "--partition", "9"), "--partition: hub telemetry has no"),
        (("reset", "--leases", "OTHER", "--to", "latest"), "has nothing of the consumer group $Default"),
        (("reset", "--leases", __file__, "--to", "latest"), "--leases: "),
        (("import", "LEASES", "--leases", "LEASES"), "is not JSON"),
        (("import", "/no/such/file", "--leases", "LEASES"), "FILE: /no/such/file: No such file or directory"),
        (("copy", "--leases", "/no/such/file", "--to-leases", "LEASES"), "--leases: /no/such/file"),
        (("copy", "--leases", "LEASES", "--to-leases", "/no/such/directory/a"), "--to-leases: /no/such/directory/a"),
        (("copy", "--leases", "LEASES"), "--to-container: or --to-leases is required"),
        (("copy", "--leases", "LEASES", "--to-container", "a"), "--to-storage-connection-string: is required"),
        (("copy", "--leases", "LEASES", "--to-leases", "x", "--to-prefix", "b"), "--to-prefix: goes with --to-contai"),
    ],
)
async def test_what_cannot_work_exits_with_2(
    eventpump_emulator: Emulator, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    """One line that names the option, and exit code 2; nothing is written."""
    path, other = tmp_path / "leases.db", tmp_path / "other.db"
    await store(path, {"0": 9})
    leases = SqliteLeaseStore(other)
    await leases.open(ConsumerScope("127.0.0.1", "telemetry", "another"))
    await leases.aclose()
    places = {"LEASES": str(path), "OTHER": str(other)}
    given = [places.get(each, each) for each in arguments]
    if given[0] in ("copy", "import"):
        given.append("--yes")
    code, out, err = await run("checkpoints", *given, "--hub", "telemetry", emulator=eventpump_emulator)
    assert (code, out, err.count("\n")) == (2, b"", 1)
    assert says in err
    assert await stored(path) == {"0": (9, "offset-9")}


async def test_file_of_another_hub_or_group_is_refused(eventpump_emulators: EmulatorFactory, tmp_path: Path) -> None:
    """And one that is cut off: each is named, with what to do."""
    emulator = await eventpump_emulators([HubSpec("telemetry", 4, ("second",)), HubSpec("other", 4)])
    path, file = tmp_path / "leases.db", tmp_path / "saved.json"
    await store(path, {"0": 9})
    at = ("--leases", str(path))
    code, _, _ = await run("checkpoints", "export", str(file), "--hub", "telemetry", *at, emulator=emulator)
    assert code == 0
    for options, says in (
        (
            ("--hub", "other"),
            "hub telemetry, consumer group $Default, and this is 127.0.0.1, hub other",
        ),
        (("--hub", "telemetry", "--consumer-group", "second"), "consumer group second: name that hub and group"),
    ):
        code, out, err = await run("checkpoints", "import", str(file), *options, *at, "--yes", emulator=emulator)
        assert (code, out) == (2, b"")
        assert err.startswith(f"eventpump: FILE: {file}: ")
        assert says in err
    file.write_bytes(file.read_bytes()[:-30])
    code, out, err = await run(
        "checkpoints", "import", str(file), "--hub", "telemetry", *at, "--yes", emulator=emulator
    )
    assert (code, out) == (2, b"")
    assert f"FILE: {file}: is cut off (line " in err
