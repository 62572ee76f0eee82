"""`eventpump demo` before it plays: what it loads, and what it offers."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

from eventpump.demo.command import TRANSPORT_TYPES, TRANSPORTS
from eventpump.options.connection import TransportName, TransportType


def test_first_line_of_the_demo_waits_for_no_model() -> None:
    """What the command imports before it prints takes a tenth of a second: no pydantic, aiohttp or SDK."""
    program = "import sys, eventpump.demo.command; print(*{'aiohttp', 'azure', 'pydantic', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_transports_of_the_demo_are_those_of_the_options() -> None:
    """They are written again, so that the options' models are not imported for them."""
    assert get_args(TransportType) == TRANSPORT_TYPES
    assert get_args(TransportName) == TRANSPORTS
