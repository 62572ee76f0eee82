"""The watch over credentials sees each way one could leak: planted there, each fails the test that planted it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

_TESTS = """
import asyncio, logging, subprocess, sys
from dataclasses import dataclass
import pytest
from pydantic import SecretStr
from eventpump import errors
from eventpump.eventhubs import sas
from eventpump.eventhubs.requests import SecretText

KEY = "SAS_KEY" + "_VALUE"
URI = "sb://host/hub"
SAS = sas.generate(URI, "name", "another key", 2_000_000_000)
SIGNATURE = sas.parse(SAS).signature
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJhIiwiZXhwIjoxfQ.c2lnbmF0dXJlLW9mLWE"
log = logging.getLogger("eventpump.transport")

def child(program):
    return [sys.executable, "-c", program]

async def run(program):
    process = await asyncio.create_subprocess_exec(*child(program), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await process.communicate()

@dataclass
class Holder:
    key: str
Holder.__module__ = "eventpump.options.credentials"

@pytest.fixture
def held():
    yield Holder(KEY)

@pytest.fixture
def late():
    yield
    log.debug("closing with %s", KEY)

def test_log_of_the_key():
    log.debug("using %s", KEY)

def test_log_of_the_key_by_name():
    log.debug("using %(key)s", {"key": KEY})

def test_log_of_a_signature():
    logging.getLogger("asyncio").debug("signed %s", SIGNATURE)

def test_log_of_a_frame():
    logging.getLogger("eventpump.amqp").debug("attach %s", KEY)

def test_log_of_a_sas():
    log.info(SAS)

def test_log_of_a_web_token():
    log.debug("put %s", TOKEN)

def test_log_of_a_key_of_its_own():
    secret = SecretStr("a key that cannot be guessed")
    log.debug(secret.get_secret_value())

def test_log_of_a_token_of_its_own():
    token = SecretText("opaque-token-4711")
    log.debug("put %s", str(token))

def test_log_of_a_traceback():
    try:
        raise OSError(KEY)
    except OSError:
        log.exception("failed")

def test_error_text():
    with pytest.raises(errors.AuthenticationError):
        raise errors.AuthenticationError(f"refused {KEY}")

def test_repr(held):
    pass

def test_fixture(late):
    pass

def test_output_of_a_child():
    subprocess.run(child("print('SAS_KEY' + '_VALUE')"), capture_output=True, check=True)

def test_text_of_a_child():
    subprocess.run(child("print('SAS_KEY' + '_VALUE')"), capture_output=True, check=True, text=True)

def test_output_of_an_awaited_child():
    asyncio.run(run("import sys; sys.stderr.write('SAS_KEY'); sys.stderr.flush(); sys.stderr.write('_VALUE')"))

def test_log_of_a_child():
    asyncio.run(run("import logging; logging.getLogger('x').debug('SAS_KEY' + '_VALUE')"))

def test_connection_string_in_a_log():
    log.debug("Endpoint=sb://h;SharedAccessKeyName=n;SharedAccessKey=4711-0815")
"""

_INNOCENT = """
import asyncio, logging, subprocess, sys
from dataclasses import dataclass
import pytest
from hypothesis import given, strategies as st
from eventpump import errors

@dataclass
class Holder:
    key: str
Holder.__module__ = "eventpump.options.credentials"

@pytest.mark.made_up_tokens
def test_of_any_text_that_leaves_garbage():
    held = Holder("SAS_KEY" + "_VALUE")
    held.itself = held

def test_after_it():
    pass

@given(st.just("SAS_KEY" + "_VALUE"))
def test_text_that_hypothesis_takes_from_the_source(text):
    errors.AuthenticationError(text)

def test_innocent():
    logging.getLogger("eventpump").debug("the key, SharedAccessKey=***, sig=..., and a SharedAccessSignature of none")
    string = "Endpoint=sb://h:1;SharedAccessKeyName=n;SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true"
    subprocess.run([sys.executable, "-c", f"print({string!r})"], capture_output=True, check=True)

def test_trace_of_what_the_user_says():
    logging.getLogger("py4j.clientserver").debug("Command to send: SAS_KEY_VALUE")

def test_levels_are_as_they_were(caplog):
    logging.getLogger("eventpump").debug("not seen")
    logging.getLogger("eventpump").warning("seen")
    assert [record.message for record in caplog.records] == ["seen"]
    assert caplog.records[0].pathname == __file__
    child = "import logging; logging.debug('not seen'); logging.warning('seen')"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert done.stderr == "WARNING:root:seen\\n"
"""


_LATE = """
def pytest_sessionfinish(session):
    if not session.config.pluginmanager.hasplugin("dsession"):
        import logging
        logging.debug("late " + "SAS_KEY" + "_VALUE")
"""


def _run(directory: Path, program: str, *more: str, hooks: str = "") -> list[str]:
    """Run tests under the watch in a process of their own.

    Returns:
        What pytest said of each, and its exit code.
    """
    tests, settings, said = (directory / name for name in ("test_planted.py", "pytest.ini", "said"))
    tests.write_text(program)
    (directory / "conftest.py").write_text("from tests.conftest import *\n" + hooks)
    settings.write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "-rA"]
    options = ["--rootdir", str(directory), "--confcutdir", str(directory), "--import-mode=importlib"]
    # The watch over this run need not see what is planted there.
    environment = {name: value for name, value in os.environ.items() if name != "EVENTPUMP_LEAK_LOGS"}
    with said.open("w") as output:
        done = subprocess.run(
            [*command, *options, *more, "-c", settings, tests], cwd=ROOT, stdout=output, env=environment, check=False
        )
    lines = (line.split(" - ")[0] for line in said.read_text().splitlines())
    reported = [line for line in lines if line.startswith(("PASSED", "ERROR", "FAILED", "looked", "in the "))]
    return [*reported, f"exit code {done.returncode}"]


def test_leaks_that_are_planted_are_found(tmp_path: Path) -> None:
    """The test that leaks passes in itself and fails at its end, for each source and each kind of secret."""
    said = _run(tmp_path, _TESTS)
    names = [line.split("(")[0].removeprefix("def ") for line in _TESTS.splitlines() if line.startswith("def test_")]
    assert len(names) > 10
    for name in names:
        assert [line.split()[0] for line in said if line.endswith(f"::{name}")] == ["PASSED", "ERROR"], name


def test_leaks_are_not_seen_where_there_are_none(tmp_path: Path) -> None:
    """What is masked or meant for the user is none, nor a trace of his words; who sees which record is as it was."""
    said = _run(tmp_path, _INNOCENT)
    assert [line.split()[0] for line in said if "::" in line] == ["PASSED"] * 6
    assert said[-1] == "exit code 0"
    (looked,) = (line for line in said if line.startswith("looked"))
    assert "log of a child" in looked
    assert "output" in looked


def test_leak_after_the_last_test_fails_the_run(tmp_path: Path) -> None:
    """What shows itself when all tests have passed still makes the run fail, and is reported."""
    said = _run(tmp_path, "def test_nothing():\n    pass\n", hooks=_LATE)
    assert [line.split()[0] for line in said if "::" in line] == ["PASSED"]
    assert "in the log: root DEBUG late SAS_[...]" in said
    assert said[-1] == "exit code 1"


def test_leak_in_a_worker_fails_its_test_or_the_run(tmp_path: Path) -> None:
    """Where pytest-xdist runs the tests in other processes, a leak fails its test, and a late one the run."""
    planted = "import logging\n\ndef test_planted():\n    logging.warning('now ' + 'SAS_KEY' + '_VALUE')\n"
    said = _run(tmp_path, planted, "-n", "1", hooks=_LATE)
    assert [line.split()[0] for line in said if "::" in line] == ["PASSED", "ERROR"]
    assert said.count("in the log: root DEBUG late SAS_[...]") == 1
    (looked,) = (line for line in said if line.startswith("looked"))
    assert "log" in looked
    assert "child" not in looked
    assert said[-1] == "exit code 1"
    said = _run(tmp_path, "def test_nothing():\n    pass\n", "-n", "1", hooks=_LATE)
    assert [line.split()[0] for line in said if "::" in line] == ["PASSED"]
    assert said[-1] == "exit code 1"
