"""`eventpump send` and `eventpump tail` as processes: what arrives, what they say, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from eventpump import Emulator, EventData, EventProducer, PartitionReader
from eventpump.core.router import ROUTERS
from eventpump.emulator.faults import DropConnection, Hold, LinkRole, Reject
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.testing.fixtures import eventpump_emulator
from tests.support.forks import COMMAND, start_python
from tests.support.reading import read_bodies

__all__ = ["eventpump_emulator"]

HUB = "telemetry"
KEY = "SAS_KEY_VALUE"
TIMEOUT = 60.0


@asynccontextmanager
async def started(
    *arguments: str,
    emulator: Emulator | None,
    stdout: int = asyncio.subprocess.PIPE,
    stderr: int = asyncio.subprocess.PIPE,
    is_forked: bool = True,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command as a process, connected by the environment; killed if it is still there at the end."""
    environment = {key: value for key, value in os.environ.items() if key != "EVENTPUMP_CONNECTION_STRING"}
    if emulator is not None:
        environment["EVENTPUMP_CONNECTION_STRING"] = emulator.connection_string
    command = COMMAND if is_forked else ("-m", "eventpump")
    process = await start_python(
        *(*command, *arguments),
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        is_forked=is_forked,
    )
    try:
        async with asyncio.timeout(TIMEOUT):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def run(
    *arguments: str, emulator: Emulator | None, stdin: bytes = b"", is_forked: bool = True
) -> tuple[int | None, bytes, str]:
    """The command's exit code, output and error output."""
    async with started(*arguments, emulator=emulator, is_forked=is_forked) as process:
        out, err = await process.communicate(stdin)
    return process.returncode, out, err.decode()


async def everything(emulator: Emulator) -> list[bytes]:
    """The bodies in all partitions."""
    return [body for number in range(4) for body in await read_bodies(emulator.connection_string, HUB, str(number))]


def numbered(count: int) -> list[bytes]:
    return [b"line %06d" % number for number in range(count)]


# ------------------------------------------------------------------------------------------------------ send


async def test_send_stores_every_line_once(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """Every line of a file is stored once, empty ones and an unfinished last one too; the summary is all it says."""
    lines = [*numbered(20_000), b"", b"\xff\x00", b"last"]
    (tmp_path / "lines").write_bytes(b"\n".join(lines))
    code, out, err = await run("send", "--hub", "telemetry", str(tmp_path / "lines"), emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    assert out.startswith(b"sent 20,003 lines, 0.2 MB, in ")
    assert out.count(b"\n") == 1
    assert sorted(await everything(eventpump_emulator)) == sorted(lines)


async def test_send_to_a_partition_keeps_the_order(eventpump_emulator: Emulator) -> None:
    """Lines for a partition are stored there in their order, over many messages, though one has to be sent again."""
    lines = numbered(5_000)
    cut = eventpump_emulator.faults.add(DropConnection(), role=LinkRole.PRODUCER, after=3)
    arguments = ("send", "--hub", "telemetry", "--partition", "2", "--batch-bytes", "2000", "-")
    code, _, err = await run(*arguments, emulator=eventpump_emulator, stdin=b"\n".join(lines))
    assert (code, err, cut.fired) == (0, "", 1)
    assert await read_bodies(eventpump_emulator.connection_string, HUB, "2") == lines


async def test_send_by_key_keeps_lines_of_a_key_in_order(eventpump_emulator: Emulator) -> None:
    """Each line goes where the service would put its key, carries the key, and follows the key's earlier lines."""
    lines = [json.dumps({"sensor": f"s{number % 23}", "n": number}).encode() for number in range(3_000)]
    arguments = ("send", "--hub", "telemetry", "--key-field", "sensor", "--batch-bytes", "5000")
    code, out, err = await run(*arguments, emulator=eventpump_emulator, stdin=b"\n".join(lines))
    assert (code, err) == (0, "")
    assert out.startswith(b"sent 3,000 lines")
    seen: list[bytes] = []
    for partition in range(4):
        reader = PartitionReader(
            eventpump_emulator.connection_string, "telemetry", partition_id=str(partition), end="@latest"
        )
        last: dict[str, int] = {}
        async with reader:
            async for event in reader:
                body = event.body_as_json()
                assert event.partition_key == body["sensor"]
                assert partition_for_key(body["sensor"], 4) == partition
                assert last.get(body["sensor"], -1) < body["n"]
                last[body["sensor"]] = body["n"]
                seen.append(event.body)
    assert sorted(seen) == sorted(lines)


@pytest.mark.parametrize("router", sorted(ROUTERS))
async def test_send_with_a_router_stores_every_line_once(eventpump_emulator: Emulator, router: str) -> None:
    """By each router, with keys and idempotent: lines of a key that has a place are in order."""
    lines = [json.dumps({"sensor": f"s{number % 20}", "n": number}).encode() for number in range(1000)]
    arguments = ("send", "--hub", "telemetry", "--router", router, "--idempotent", "--key-field", "sensor")
    code, out, err = await run(*arguments, emulator=eventpump_emulator, stdin=b"\n".join(lines))
    assert (code, err) == (0, "")
    assert out.startswith(b"sent 1,000 lines")
    assert sorted(await everything(eventpump_emulator)) == sorted(lines)


async def test_send_with_a_router_needs_no_keys(eventpump_emulator: Emulator) -> None:
    """Lines without a key are stored too."""
    arguments = ("send", "--hub", "telemetry", "--router", "ring")
    code, out, err = await run(*arguments, emulator=eventpump_emulator, stdin=b"a\nb\nc")
    assert (code, err) == (0, "")
    assert out.startswith(b"sent 3 lines")
    assert sorted(await everything(eventpump_emulator)) == [b"a", b"b", b"c"]


async def test_send_with_idempotent_stores_lines_once_over_cut_connections(
    eventpump_emulator: Emulator, request: pytest.FixtureRequest
) -> None:
    """Though connections are cut before and after storing, --idempotent stores every line once and in order."""
    lines = numbered(3_000)
    faults = eventpump_emulator.faults
    after = faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER, after=1)
    # Four times is all that one call tries: its outcome is not known then, and the batch is waited for once more.
    cuts = 4 if request.config.getoption("--long") else 1
    before = faults.add(DropConnection(), role=LinkRole.PRODUCER, after=2, count=cuts)
    arguments = ("send", "--hub", "telemetry", "--partition", "1", "--idempotent", "--batch-bytes", "20000")
    code, _, err = await run(*arguments, emulator=eventpump_emulator, stdin=b"\n".join(lines))
    assert (code, err) == (0, "")
    assert (after.fired, before.fired) == (1, cuts)
    assert await read_bodies(eventpump_emulator.connection_string, HUB, "1") == lines


async def test_send_that_is_refused_counts_the_lines_not_sent(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """Refused midway: exit code 1, nothing more is begun, and the number is exactly that of the lines not stored."""
    lines = numbered(200_000)
    (tmp_path / "lines").write_bytes(b"\n".join(lines))
    eventpump_emulator.faults.add(Reject("amqp:not-allowed", "No."), role=LinkRole.PRODUCER, after=3)
    arguments = ("send", "--hub", "telemetry", "--partition", "0", "--batch-bytes", "20000", str(tmp_path / "lines"))
    code, out, err = await run(*arguments, emulator=eventpump_emulator)
    there = await read_bodies(eventpump_emulator.connection_string, HUB, "0")
    assert 0 < len(there) < len(lines)
    assert there == lines[: len(there)]
    assert code == 1
    assert out.startswith(f"sent {len(there):,} lines, ".encode())
    unsent = len(lines) - len(there)
    assert err.startswith(f"eventpump: {unsent:,} of 200,000 lines were not sent: No; condition amqp:not-allowed")
    assert err.count("\n") == 1


async def test_send_without_an_answer_counts_lines_that_may_be_stored(eventpump_emulator: Emulator) -> None:
    """A plain message that got no answer to its last try may be stored: the lines it holds are distinguished."""
    eventpump_emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER, count=None)
    arguments = ("send", "--hub", "telemetry", "--partition", "0")
    code, _, err = await run(*arguments, emulator=eventpump_emulator, stdin=b"a\nb\n")
    assert code == 1
    assert err.startswith("eventpump: 2 of ")
    assert err.endswith("(up to 2 of them may be stored)\n")
    assert set(await read_bodies(eventpump_emulator.connection_string, HUB, "0")) == {b"a", b"b"}


@pytest.mark.parametrize(
    ("arguments", "bad", "says"),
    [
        (("--batch-bytes", "1000"), b"x" * 1000, "line 2: it is larger than a message may be, 1,000 bytes"),
        ((), b"x" * 3_000_000, "line 2: it is larger than a message may be, 1,048,576 bytes"),
        (("--key-field", "k"), b"{", "line 2: it is no JSON"),
        (("--key-field", "k"), b'{"a":1}', "line 2: it has no field 'k'"),
    ],
)
async def test_send_of_a_bad_line_sends_the_others_and_exits_with_1(
    eventpump_emulator: Emulator, arguments: tuple[str, ...], bad: bytes, says: str
) -> None:
    """A line that cannot be an event is not sent, is counted, and is named; the others are sent; exit code 1."""
    good = [b'{"k":1,"n":%d}' % number for number in range(3)]
    lines = [good[0], bad, good[1], bad, good[2]]
    code, out, err = await run(
        "send", "--hub", "telemetry", *arguments, emulator=eventpump_emulator, stdin=b"\n".join(lines)
    )
    assert code == 1
    assert out.startswith(b"sent 3 lines, ")
    assert err == f"eventpump: 2 of 5 lines were not sent; the first, {says}\n"
    assert sorted(await everything(eventpump_emulator)) == good


async def test_send_does_not_wait_for_the_next_line(eventpump_emulator: Emulator) -> None:
    """While the input stays open, what came so far is sent."""
    arguments = ("send", "--hub", "telemetry", "--partition", "3")
    reader = PartitionReader(eventpump_emulator.connection_string, "telemetry", partition_id="3")
    async with started(*arguments, emulator=eventpump_emulator) as process, reader:
        assert process.stdin is not None
        for line in (b"one", b"two"):
            process.stdin.write(line + b"\nbegun ")
            assert [event.body for event in await reader.read()] == [line.replace(b"two", b"begun two")]
        process.stdin.close()
        out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert out.startswith(b"sent 3 lines")
        assert [event.body for event in await reader.read()] == [b"begun "]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_send_on_a_signal_sends_every_line_read(eventpump_emulator: Emulator, number: signal.Signals) -> None:
    """On a signal, with the input still open, every line read is sent, and the number of the last one is reported."""
    lines = numbered(30_000)
    eventpump_emulator.faults.add(Hold(), role=LinkRole.PRODUCER, after=2)
    arguments = ("send", "--hub", "telemetry", "--partition", "0", "--batch-bytes", "20000")
    async with started(*arguments, emulator=eventpump_emulator) as process:
        assert process.stdin is not None
        process.stdin.write(b"\n".join(lines))
        while not await read_bodies(eventpump_emulator.connection_string, HUB, "0"):
            pass
        process.send_signal(number)
        eventpump_emulator.faults.clear()
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = await process.stdout.read(), (await process.stderr.read()).decode()
        assert await process.wait() == 128 + number
    there = await read_bodies(eventpump_emulator.connection_string, HUB, "0")
    assert there == lines[: len(there)]
    assert out.startswith(f"sent {len(there):,} lines, ".encode())
    assert err == f"eventpump: stopped by {number.name} after line {len(there):,} of the input\n"


async def test_send_on_a_second_signal_gives_up(eventpump_emulator: Emulator) -> None:
    """Where the service does not answer, a second signal ends it, and reports what was not sent."""
    hold = eventpump_emulator.faults.add(Hold(), role=LinkRole.PRODUCER)
    async with started("send", "--hub", "telemetry", emulator=eventpump_emulator) as process:
        assert process.stdin is not None
        process.stdin.write(b"a\nb\n")
        await hold.until_fired()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        out, err = await process.communicate()
    assert process.returncode in (130, 143)  # which of two pending signals is seen first is the system's choice
    assert out.startswith(b"sent 0 lines")
    assert b"2 lines read before that were not sent" in err
    assert err.count(b"\n") == 1


async def test_send_to_a_dead_service_exits_with_1(tmp_path: Path) -> None:
    """A service that cannot be reached is exit code 1, and no line of the file is called sent."""
    async with Emulator({"telemetry": 1}) as emulator:
        pass
    (tmp_path / "lines").write_bytes(b"a\nb\nc")
    arguments = ("send", "--hub", "telemetry", "--retry-for", "0", str(tmp_path / "lines"))
    code, out, err = await run(*arguments, emulator=emulator)
    assert code == 1
    assert out.startswith(b"sent 0 lines")
    assert err.startswith("eventpump: 3 of 3 lines were not sent: ")
    assert err.count("\n") == 1
    assert KEY not in err


async def test_send_on_a_terminal_shows_a_bar_and_the_summary(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """Attached to a terminal it shows lines and rate while it sends; the output has the summary only."""
    (tmp_path / "lines").write_bytes(b"\n".join(numbered(1000)))
    ours, theirs = pty.openpty()
    shown = bytearray()
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(ours, lambda: shown.extend(os.read(ours, 65536)))
        arguments = ("send", "--hub", "telemetry", str(tmp_path / "lines"))
        async with started(*arguments, emulator=eventpump_emulator, stderr=theirs) as process:
            out, _ = await process.communicate()
    finally:
        loop.remove_reader(ours)
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    assert out.startswith(b"sent 1,000 lines, ")
    assert out.count(b"\n") == 1
    assert b" lines/s, " in shown
    assert b"Traceback" not in shown


# ------------------------------------------------------------------------------------------------------ tail


async def fill(emulator: Emulator, count: int) -> None:
    """Put events into each of the four partitions, in batches."""
    async with EventProducer(emulator.connection_string, "telemetry") as producer:
        for number in range(4):
            bodies = [EventData(b"%d/%06d" % (number, each)) for each in range(count)]
            await producer.send(bodies, partition_id=str(number))


async def test_tail_follows_all_partitions(eventpump_emulator: Emulator) -> None:
    """Everything there comes, each partition in order, then what is sent later; --count is exact."""
    await fill(eventpump_emulator, 500)
    async with started("tail", "--hub", "telemetry", "--count", "2002", emulator=eventpump_emulator) as process:
        assert process.stdout is not None
        lines = [(await process.stdout.readline()).rstrip() for _ in range(2000)]
        for number in range(4):
            mine = [line for line in lines if line.startswith(b"%d/" % number)]
            assert mine == [b"%d/%06d" % (number, each) for each in range(500)]
        async with EventProducer(eventpump_emulator.connection_string, "telemetry") as producer:
            await producer.send([EventData("new")] * 5, partition_id="1")
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"new\nnew\n", b"")


async def test_tail_with_json_writes_an_object_per_event(eventpump_emulator: Emulator) -> None:
    """With --json each event is one object; a later run can begin at the number or time it names."""
    await fill(eventpump_emulator, 10)
    tail = ("tail", "--hub", "telemetry", "--partition", "2", "--json", "--count")
    code, out, err = await run(*tail, "10", emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["sequence_number"] for record in records] == list(range(10))
    assert {record["partition"] for record in records} == {"2"}
    assert [record["body"] for record in records] == [f"2/{number:06}" for number in range(10)]
    for start, first in ((str(7), 7), (f"offset:{records[6]['offset']}", 7), (records[0]["enqueued_time"], 0)):
        code, out, err = await run(*tail, str(10 - first), "--from", start, emulator=eventpump_emulator)
        assert [json.loads(line)["sequence_number"] for line in out.splitlines()] == list(range(first, 10))


async def test_tail_writes_what_send_read(eventpump_emulator: Emulator) -> None:
    """Lines come out of tail as they went into send, both in new interpreters, which have imported nothing before."""
    lines = b"one\n\ntwo \xff\n"
    send, tail = ("send", "--hub", "telemetry"), ("tail", "--hub", "telemetry", "--count", "3")
    code, _, err = await run(*send, emulator=eventpump_emulator, stdin=lines, is_forked=False)
    assert (code, err) == (0, "")
    assert await run(*tail, emulator=eventpump_emulator, is_forked=False) == (0, lines, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("count", [1, 100_000])
async def test_tail_ends_on_a_signal(eventpump_emulator: Emulator, number: signal.Signals, count: int) -> None:
    """A signal ends it without output, also while its output is not read."""
    bodies = [EventData(b"%0100d" % each) for each in range(count)]
    async with EventProducer(eventpump_emulator.connection_string, "telemetry") as producer:
        await producer.send(bodies, partition_id="0", split=True)
    reading, writing = os.pipe()
    async with started("tail", "--hub", "telemetry", emulator=eventpump_emulator, stdout=writing) as process:
        os.close(writing)
        assert len(await asyncio.to_thread(os.read, reading, 101)) == 101
        process.send_signal(number)
        assert process.stderr is not None
        assert await process.stderr.read() == b""
        assert await process.wait() == 128 + number
    os.close(reading)


@pytest.mark.parametrize("count", [1, 20_000])
async def test_tail_ends_when_its_reader_goes(eventpump_emulator: Emulator, count: int) -> None:
    """Piped into something that ends, it ends too, without a word, though no event comes any more."""
    await fill(eventpump_emulator, count)
    reading, writing = os.pipe()
    async with started("tail", "--hub", "telemetry", emulator=eventpump_emulator, stdout=writing) as process:
        os.close(writing)
        taken = 0
        while taken < 4 * len("0/000000\n"):  # of a single event each, that is all there will ever be
            taken += len(await asyncio.to_thread(os.read, reading, 1))
        os.close(reading)
        assert process.stderr is not None
        assert await process.stderr.read() == b""
        assert await process.wait() == 0


async def test_tail_with_an_output_that_fails_exits_with_1(eventpump_emulator: Emulator) -> None:
    """A full disk is one line and exit code 1, whichever partition meets it first."""
    await fill(eventpump_emulator, 10)
    full = os.open("/dev/full", os.O_WRONLY)
    tail = ("tail", "--hub", "telemetry", "--count", "10")
    async with started(*tail, emulator=eventpump_emulator, stdout=full) as process:
        os.close(full)
        _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"eventpump: the output cannot be written: No space left on device\n")


async def test_tail_goes_on_after_a_lost_connection(eventpump_emulator: Emulator) -> None:
    """A connection that is cut is opened again, and nothing is missing or doubled."""
    await fill(eventpump_emulator, 100)
    async with started("tail", "--hub", "telemetry", "--count", "800", emulator=eventpump_emulator) as process:
        assert process.stdout is not None
        first = [await process.stdout.readline() for _ in range(400)]
        eventpump_emulator.drop_connections()
        await fill(eventpump_emulator, 100)
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    expected = sorted(b"%d/%06d\n" % (number, each) for number in range(4) for each in range(100))
    assert sorted(first) == sorted(out.splitlines(keepends=True)) == expected


async def test_send_and_tail_live_through_an_outage(tmp_path: Path) -> None:
    """Both wait until the service is back, say so once each, and neither loses a line."""
    async with Emulator("telemetry:4", data=tmp_path) as emulator:
        send = started("send", "--hub", "telemetry", emulator=emulator)
        tail = started("tail", "--hub", "telemetry", "--count", "200", emulator=emulator)
        async with send as sending, tail as tailing:
            assert sending.stdin is not None
            assert sending.stderr is not None
            assert tailing.stdout is not None
            assert tailing.stderr is not None
            sending.stdin.write(b"".join(b"%d\n" % number for number in range(100)))
            seen = [await tailing.stdout.readline() for _ in range(100)]
            port = emulator.port
            await emulator.aclose()
            sending.stdin.write(b"".join(b"%d\n" % number for number in range(100, 200)))
            down = [(await each.readline()).decode() for each in (sending.stderr, tailing.stderr)]
            async with Emulator("telemetry:4", data=tmp_path, port=port):
                seen += [await tailing.stdout.readline() for _ in range(100)]
                back = [(await each.readline()).decode() for each in (sending.stderr, tailing.stderr)]
                sending.stdin.close()
                assert await sending.stderr.read() == b""
                assert await tailing.stderr.read() == b""
                assert (await sending.wait(), await tailing.wait()) == (0, 0)
    assert {int(line) for line in seen} == set(range(200))
    assert all(
        line.startswith("eventpump: the service cannot be reached, trying again until it can: ") for line in down
    )
    assert all(line.startswith("eventpump: the service is back after ") for line in back)


@pytest.mark.parametrize("command", ["send", "tail"])
async def test_commands_give_up_on_an_outage_after_the_given_time(command: str) -> None:
    """The service goes away for longer than --retry-for: one last line, and exit code 1."""
    async with Emulator("telemetry:1") as emulator:
        await fill_one(emulator)
        arguments = (command, "--hub", "telemetry", "--retry-for", "2")
        async with started(*arguments, emulator=emulator) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if command == "tail":
                assert await process.stdout.readline() == b"one\n"
            else:
                process.stdin.write(b"a\n")
                while await read_bodies(emulator.connection_string, HUB, "0") != [b"one", b"a"]:
                    pass
            await emulator.aclose()
            if command == "send":
                process.stdin.write(b"b\n")
            _, err = await process.communicate()
    lines = err.decode().splitlines()
    assert process.returncode == 1
    assert lines[0].startswith("eventpump: the service cannot be reached, trying again for 2 s in all: ")
    assert lines[-1].endswith(("(tried for 2 s)", "(up to 1 of them may be stored)"))
    assert len(lines) == 2


async def fill_one(emulator: Emulator) -> None:
    async with EventProducer(emulator.connection_string, "telemetry") as producer:
        await producer.send(EventData(b"one"))


async def test_tail_beside_an_exclusive_reader_names_the_way_out(eventpump_emulator: Emulator) -> None:
    """A host takes the consumer group: the line that ends `tail` names the option that helps."""
    await fill(eventpump_emulator, 1)
    async with started("tail", "--hub", "telemetry", emulator=eventpump_emulator) as process:
        assert process.stdout is not None
        for _ in range(4):
            await process.stdout.readline()
        exclusive = PartitionReader(eventpump_emulator.connection_string, HUB, partition_id="1", owner_level=3)
        async with exclusive as reader:
            await reader.read()
            _, err = await process.communicate()
    assert process.returncode == 2
    assert err.startswith(b"eventpump: --consumer-group: $Default is read by an exclusive reader")
    assert b"--consumer-group NAME" in err
    assert err.count(b"\n") == 1


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("send", "--hub", "nothing"), "not"),
        (("send", "--hub", "telemetry", "--partition", "9"), "9"),
        (("send", "--hub", "telemetry", "--partition", ""), "--partition"),
        (("send", "--hub", "telemetry", "--idempotent"), "--partition"),
        (("send", "--hub", "telemetry", "--partition", "0", "--key-field", "a"), "--key-field"),
        (("send", "--hub", "telemetry", "--partition", "0", "--router", "ring"), "--router"),
        (("send", "--hub", "telemetry", "--batch-bytes", "many"), "--batch-bytes"),
        (("send", "--hub", "telemetry", "--batch-bytes", "0"), "--batch-bytes"),
        (("send", "--hub", "telemetry", "--batch-bytes", "99999999"), "--batch-bytes"),
        (("send", "--hub", "telemetry", "/no/such/file"), "No such file"),
        (("send", "--hub", "telemetry", "/"), "Is a directory"),
        (("send",), "hub"),
        (("send", "--connection-string", "{wrong}", "--hub", "telemetry"), "InvalidSignature"),
        (("send", "--connection-string", "Endpoint=x;SharedAccessKey=topsecret", "--hub", "telemetry"), "Endpoint"),
        (("tail", "--connection-string", "", "--hub", "telemetry"), "EVENTPUMP_CONNECTION_STRING"),
        (("tail", "--hub", "nothing"), "not"),
        (("tail", "--hub", "telemetry", "--partition", "9"), "9"),
        (("tail", "--hub", "telemetry", "--consumer-group", "nobody"), "nobody"),
        (("tail", "--hub", "telemetry", "--from", "yesterday"), "--from"),
        (("tail", "--hub", "telemetry", "--count", "0"), "--count"),
        (("tail", "--hub", "telemetry", "--retry-for", "soon"), "--retry-for"),
        (("send", "--hub", "telemetry", "--retry-for", "-1"), "--retry-for"),
        (("tail", "--connection-string", "{wrong}", "--hub", "telemetry"), "InvalidSignature"),
    ],
)
async def test_commands_with_bad_input_exit_with_2_and_one_line(
    eventpump_emulator: Emulator, arguments: tuple[str, ...], says: str
) -> None:
    """What cannot work is one clear line on stderr and exit code 2, with no secret in it."""
    wrong = eventpump_emulator.connection_string_for("RootManageSharedAccessKey", "topsecret")
    code, out, err = await run(*(each.replace("{wrong}", wrong) for each in arguments), emulator=eventpump_emulator)
    assert (code, out) == (2, b""), err
    assert err.startswith("eventpump: ")
    assert err.count("\n") == 1
    assert says.lower() in err.lower()
    assert "topsecret" not in err


async def test_commands_without_a_connection_string_say_where_to_put_it() -> None:
    """Neither option nor variable: the line names both."""
    for command in ("send", "tail"):
        code, _, err = await run(command, "--hub", "telemetry", emulator=None)
        assert code == 2
        assert err == "eventpump: --connection-string: is required, here or in EVENTPUMP_CONNECTION_STRING\n"
