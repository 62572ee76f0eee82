"""Run one side: `python -m benchmarks.sides MODULE:FUNCTION JSON LOOP`. Prints its result, a JSON object, as a line."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys


def main(name: str, arguments: str, loop: str) -> None:
    """Run a side's function.

    Args:
        loop: `asyncio` or `uvloop`, where it is a coroutine function.
    """
    module, _, function = name.partition(":")
    result = getattr(importlib.import_module(f"benchmarks.sides.{module}"), function)(**json.loads(arguments))
    if inspect.iscoroutine(result):
        factory = None if loop == "asyncio" else importlib.import_module(loop).new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            result = runner.run(result)
    print(json.dumps(result), flush=True)


main(*sys.argv[1:])
