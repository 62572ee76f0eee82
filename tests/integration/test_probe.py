"""`eventpump probe`: observations beside the emulator's, on a hub that nobody uses."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from eventpump import Emulator, EventData, EventPosition, EventProducer
from eventpump.clients.connection import make_transport
from eventpump.emulator.config import HubSpec
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.options.connection import connection_settings
from eventpump.probe.bench import Arrivals
from eventpump.probe.observations import NOT_OBSERVED, OBSERVATIONS
from eventpump.testing.fixtures import EmulatorFactory, eventpump_emulators
from tests.integration.test_cli_send_tail import run, started

__all__ = ["eventpump_emulators"]

HUB = "probe"
ARGUMENTS = ("probe", "--hub", HUB, "--timeout", "4")


@pytest.fixture
async def emulator(eventpump_emulators: EmulatorFactory) -> Emulator:
    """A new hub."""
    return await eventpump_emulators({HUB: 2})


async def newest(emulator: Emulator) -> list[int]:
    """Return the number of the newest event of each partition."""
    async with EventProducer(emulator.connection_string, HUB) as producer:
        ids = await producer.get_partition_ids()
        return [(await producer.get_partition_properties(each)).last_enqueued_sequence_number for each in ids]


async def test_emulator_is_as_the_emulator(emulator: Emulator, tmp_path: Path) -> None:
    """No observation differs, none is without an answer, and the report names neither the service nor the hub."""
    file = tmp_path / "report.json"
    code, out, err = await run(*ARGUMENTS, "--yes", "--report", str(file), emulator=emulator)
    lines = out.decode().splitlines()
    short = [each.name for each in OBSERVATIONS if not each.is_long]
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in lines[:-1]] == [["same", f"{name}:"] for name in short]
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"127\.0\.0\.1|localhost|SharedAccess|\"probe\"", text)
    seen = {each["name"]: each["observed"] for each in json.loads(text)["observations"]}
    assert [name for name, what in seen.items() if what in ("no answer", "no outcome", "no event came")] == []
    assert seen["number-epoch"] == "-1"
    assert seen["begin-after-next"] == "refused: com.microsoft:argument-error"


async def test_service_that_does_something_else_is_shown(eventpump_emulators: EmulatorFactory, tmp_path: Path) -> None:
    """With what the emulator does, in the report too; the exit code is 1."""
    emulator = await eventpump_emulators({HUB: 1}, refuse_long_keys=True)
    file = tmp_path / "report.json"
    code, out, _ = await run(*ARGUMENTS, "--yes", "--report", str(file), emulator=emulator)
    differing = [line for line in out.decode().splitlines() if line.startswith("DIFFERS")]
    assert code == 1
    assert [line.split()[1] for line in differing] == ["partition-key-129:"]
    rows = json.loads(file.read_text(encoding="utf-8"))["observations"]
    assert [row["name"] for row in rows if row["observed"] != row["emulator"]] == ["partition-key-129"]


async def test_report_is_not_lost_where_its_file_cannot_be_written(emulator: Emulator, tmp_path: Path) -> None:
    """A directory is refused before anything is done; what cannot be written afterwards is printed."""
    code, out, err = await run(*ARGUMENTS, "--yes", "--report", str(tmp_path), emulator=emulator)
    assert (code, out, err.count("\n")) == (2, b"", 1)
    assert await newest(emulator) == [-1, -1]
    code, out, err = await run(*ARGUMENTS, "--yes", "--report", "/dev/full", emulator=emulator)
    assert (code, err.count("\n"), "the report is on the standard output" in err) == (1, 1, True)
    text = out.decode()
    assert len(json.loads(text[text.index("{") :])["observations"]) == text.count("same  ")


async def test_report_has_what_was_observed_before_ctrl_c(emulator: Emulator, tmp_path: Path) -> None:
    """The hub serves for no second run."""
    file = tmp_path / "report.json"
    async with started(*ARGUMENTS, "--yes", "--report", str(file), emulator=emulator) as process:
        assert process.stdout is not None
        first = await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")
    names = [each["name"] for each in json.loads(file.read_text(encoding="utf-8"))["observations"]]
    assert 0 < len(names) < len([each for each in OBSERVATIONS if not each.is_long])
    assert first.decode().split()[1] == f"{names[0]}:"


async def test_without_yes_nothing_is_done(emulator: Emulator) -> None:
    """What would be done is printed, with its cost."""
    code, out, err = await run(*ARGUMENTS, emulator=emulator)
    assert (code, err) == (0, "")
    assert "requests" in out.decode().splitlines()[0]
    assert await newest(emulator) == [-1, -1]


async def test_hub_that_has_had_events_is_refused(emulator: Emulator) -> None:
    """In one line, and nothing is added to it."""
    async with EventProducer(emulator.connection_string, HUB) as producer:
        await producer.send([EventData(b"x")], partition_id="1")
    code, out, err = await run(*ARGUMENTS, "--yes", emulator=emulator)
    assert (code, out, err.count("\n")) == (2, b"", 1)
    assert "partition 1 of probe has had events" in err
    assert await newest(emulator) == [-1, 0]


@pytest.mark.parametrize("owner_level", [None, 0])
async def test_consumer_group_in_use_is_refused(eventpump_emulators: EmulatorFactory, owner_level: int | None) -> None:
    """Whether its reader is exclusive or not; the reader stays, and nothing is stored."""
    emulator = await eventpump_emulators([HubSpec(HUB, 1)])
    transport = make_transport(connection_settings(emulator.connection_string, HUB))
    arrivals = Arrivals()
    spec = ReceiveLinkSpec(HUB, "$Default", "0", EventPosition.latest(), owner_level=owner_level)
    link = await transport.open_receive_link(spec, arrivals)
    code, out, err = await run(*ARGUMENTS, "--yes", emulator=emulator)
    assert (code, out, err.count("\n")) == (2, b"", 1)
    assert "somebody may read partition 0" in err
    assert await newest(emulator) == [-1]
    assert arrivals.error is None
    await link.aclose()
    await transport.aclose()


def test_observations_are_questions_of_the_protocol() -> None:
    """Each section exists, and names are unique."""
    text = (Path(__file__).parents[2] / "docs/protocol.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^#{2,3} ([\d.]+?)\.? ", text, re.M))
    assert {each.section for each in OBSERVATIONS} | NOT_OBSERVED.keys() <= sections
    assert len({each.name for each in OBSERVATIONS}) == len(OBSERVATIONS)
