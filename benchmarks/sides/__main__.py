"""Run one side: `python -m benchmarks.sides MODULE:FUNCTION JSON`. Prints its result, a JSON object, as a line."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys


def main(name: str, arguments: str) -> None:
    """Run a side's function."""
    module, _, function = name.partition(":")
    result = getattr(importlib.import_module(f"benchmarks.sides.{module}"), function)(**json.loads(arguments))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    print(json.dumps(result), flush=True)


main(*sys.argv[1:])
