"""The blocks of Python in the documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_blocks(path: Path) -> list[str]:
    """Return the blocks of Python of a document."""
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)


def is_program(block: str) -> bool:
    """Return whether a block is a whole program, and not a part of one."""
    return block.rstrip().splitlines()[-1].startswith("asyncio.run(")


def runs_until_stopped(block: str) -> bool:
    """Return whether a program runs until it gets a signal."""
    return "handle_signals=True" in block
