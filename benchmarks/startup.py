"""The benchmark `startup`: what a program costs before it connects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

from benchmarks.comparing import OURS, PEER, Figures, Log, compare, run_rounds
from benchmarks.processes import CHECKOUT, BenchmarkError
from benchmarks.report import Row

_PLACE = '"Endpoint=sb://localhost/;SharedAccessKeyName=name;SharedAccessKey=a2V5"'
PROGRAMS = {
    "a host": {
        OURS: f"""
from eventpump import EventProcessor, EventProcessorHost, MemoryLeaseStore

class Processor(EventProcessor):
    async def process_events(self, context, events):
        pass

EventProcessorHost({_PLACE}, "hub", processor=Processor(), lease_store=MemoryLeaseStore())
""",
        PEER: f"""
from azure.eventhub.aio import EventHubConsumerClient

EventHubConsumerClient.from_connection_string({_PLACE}, "$Default", eventhub_name="hub")
""",
    },
    "a producer": {
        OURS: f"""
from eventpump import EventProducer

EventProducer({_PLACE}, "hub")
""",
        PEER: f"""
from azure.eventhub.aio import EventHubProducerClient

EventHubProducerClient.from_connection_string({_PLACE}, eventhub_name="hub")
""",
    },
}
"""What stands in the file of each program, by what it creates and by side."""
_MEASURED = """
import json, sys, time
print(json.dumps({"cost": time.process_time() * 1000, "modules": len(sys.modules)}))
"""


def startup(quick: bool, log: Log) -> list[Row]:
    """Import a client and construct it, each time in a process of its own, beside azure-eventhub's aio client."""
    return [_row(f"startup: importing and constructing {what}", what, 3 if quick else 21, log) for what in PROGRAMS]


def _row(name: str, what: str, rounds: int, log: Log) -> Row:
    sides = {side: partial(run_program, program) for side, program in PROGRAMS[what].items()}
    for run in sides.values():
        run()  # so that the bytecode of all modules is there, as in an installed program after its first start
    found = run_rounds(rounds, sides, lambda side, figures: log(f"{what}, {side}: {_shown(figures)}"))
    modules = [[each[side]["modules"] for each in found] for side in (OURS, PEER)]
    row = compare(name, found, OURS, PEER, unit="ms CPU", note="{:.0f} modules, peer {:.0f}".format(*map(max, modules)))
    return replace(row, is_headline=True)


def run_program(program: str) -> Figures:
    """Run a program in a process of its own. Return the CPU of the whole process, in ms, and how many modules it has.

    Raises:
        BenchmarkError: It fails.
    """
    command = [sys.executable, "-c", program + _MEASURED]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"a program of startup failed: {done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout)
    return {**figures, "busy": figures["cost"] / 1000 / (time.perf_counter() - began)}


def _shown(figures: Figures) -> str:
    return f"{figures['cost']:.0f} ms CPU, {figures['modules']:.0f} modules"
