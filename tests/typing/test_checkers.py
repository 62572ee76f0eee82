"""Type checkers and the public names: a right program is accepted, and every mistake of a wrong one is found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Checker = Callable[[Path, Path], set[tuple[str, int]]]
PROGRAM = Path(__file__).with_name("user_program.py")

MISTAKES = """\
from collections.abc import Sequence

from eventpump import PartitionContext, ReceivedEvent
from eventpump import BufferedProducer, EventProcessor, EventProcessorHost, EventProducer, MemoryLeases
from eventpump import MemoryLeaseStore, PartitionReader, RetryOptions

store = MemoryLeaseStore(MemoryLeases())


class Alerts(EventProcessor):
    async def process_events(self, context: int, events: list[bytes]) -> None:  # wrong
        pass


EventProducer("Endpoint=...", idempotnet=True)  # wrong
EventProducer("Endpoint=...", retry=3)  # wrong
EventProducer("Endpoint=...", transport="amqp")  # wrong
EventProducer("Endpoint=...", transport=store)  # wrong
BufferedProducer("Endpoint=...", max_batch_events="100")  # wrong
PartitionReader("Endpoint=...", partition_id="0", on_data_loss="ignore")  # wrong
PartitionReader("Endpoint=...", partition_id="0", position=1.5)  # wrong
async def of_one(context: PartitionContext) -> None: ...


def of_two(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None: ...


EventProcessorHost("Endpoint=...", processor=Alerts, lease_store=None)  # wrong
EventProcessorHost("Endpoint=...", processor=of_one, lease_store=store)  # wrong
EventProcessorHost("Endpoint=...", processor=of_two, lease_store=store)  # wrong
EventProcessorHost("Endpoint=...", processor=dict, lease_store=store)  # wrong
EventProcessorHost("Endpoint=...", processor="Alerts", lease_store=store)  # wrong
EventProcessorHost("Endpoint=...", processor=Alerts, lease_store=store, hooks=[len])  # wrong
EventProcessorHost("Endpoint=...", processor=Alerts, lease_store=store, handler_retry=RetryOptions(), hook=[])  # wrong
"""


def _mypy(*files: Path) -> set[tuple[str, int]]:
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *map(str, files)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in {0, 1}, result.stderr
    found = re.findall(r"^(.+?):(\d+): error:", result.stdout, re.M)
    return {(Path(name).name, int(line)) for name, line in found}


def _pyright(*files: Path) -> set[tuple[str, int]]:
    folder = files[0].parent
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(ROOT)]})
    )
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--project",
        str(folder),
        "--pythonpath",
        sys.executable,
    ]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(result.stdout)["generalDiagnostics"]
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [_mypy, _pyright], ids=["mypy", "pyright"])
def test_checkers_find_every_mistake_and_nothing_else(check: Checker, tmp_path: Path) -> None:
    """A wrong name, type or value of an option is an error at its line; the program that has none is accepted."""
    wrong = tmp_path / "mistakes.py"
    wrong.write_text(MISTAKES)
    right = tmp_path / PROGRAM.name
    right.write_text(PROGRAM.read_text(encoding="utf-8"))
    expected = {number for number, line in enumerate(MISTAKES.splitlines(), 1) if line.endswith("# wrong")}
    assert len(expected) > 10
    assert check(wrong, right) == {("mistakes.py", number) for number in expected}
