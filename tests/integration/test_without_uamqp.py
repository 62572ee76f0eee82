"""What holds where uamqp is not installed, or is not asked for. It needs no uamqp."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("version", "words"),
    [((3, 13, 0), r"transport: .*install eventpump\[uamqp\]"), ((3, 14, 0), "transport: .*no release for Python 3.14")],
)
def test_transport_option_without_uamqp_is_refused_by_name(version: tuple[int, ...], words: str) -> None:
    """Asked for where it is not installed, or cannot be, it is one error that names the option and what to do."""
    program = f"""
import sys
sys.modules["uamqp"] = None
import eventpump.clients.producers  # before the version changes, by which other packages go as they are imported
sys.version_info = {version}
try:
    eventpump.EventProducer("Endpoint=sb://a.test;SharedAccessKeyName=a;SharedAccessKey=b", "hub", transport="uamqp")
except eventpump.ConfigurationError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.match(words, result.stdout)


def test_uamqp_is_imported_by_its_transport_only() -> None:
    """No module outside `transport/uamqp/` imports it, however much of the package is imported."""
    program = """
import importlib, pkgutil, sys
import eventpump

def imported(name):
    if name.startswith("eventpump.transport.uamqp"):
        return False
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # an extra that is not installed
        assert not error.name.startswith("eventpump"), error
        return False
    return True

print(sum(imported(module.name) for module in pkgutil.walk_packages(eventpump.__path__, "eventpump.")))
print([name for name in sys.modules if name.partition(".")[0] == "uamqp"])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, found = result.stdout.splitlines()[-2:]
    assert int(count) > 100
    assert found == "[]"
