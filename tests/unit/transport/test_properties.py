"""The properties of the AMQP open."""

from __future__ import annotations

import platform
import subprocess
import sys

_PROGRAM = """
import sys

started = []
sys.addaudithook(lambda event, _: event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and started.append(event))
from eventpump.transport.base import connection_properties

print(started, connection_properties()["user-agent"])
"""


def test_properties_of_a_connection_name_the_system_and_start_no_process() -> None:
    """A process would stop the event loop for its start; in a new interpreter, where `platform` has cached nothing."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    started, _, agent = done.stdout.strip().partition(" ")
    assert started == "[]"
    assert agent.startswith("eventpump/")
    system = f"{platform.system()}-{platform.release()}-{platform.machine()}"
    assert agent.endswith(f" Python/{platform.python_version()} ({system})")
