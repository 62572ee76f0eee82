"""What every suite shares: the short and the long form, and what may not be left over."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from eventpump.reports import build_info
from tests.authority import Authority
from tests.fuzz.entry import seed_of_today
from tests.interop.matrix import MatrixReport
from tests.leaks.watch import LeakWatch
from tests.support.coverage import CoverageReport
from tests.support.order import LONGEST
from tests.support.seeds import RUN_VARIABLE, seeds_of
from tests.ways import Way, ways_of

settings.register_profile("gate", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])


# The tests start hundreds of Python processes. Without bytecode each would compile the package again, for half a
# second, and pytest would rewrite the assertions of all test files again in each run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A job that a script started in the background has SIGINT ignored, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_PLACES = {f"tests/{name}": place for place, name in enumerate(LONGEST)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help="all seeds, sizes and kills, not a sample")
    parser.addoption("--build", choices=("pure", "compiled"), help="fail where another build of the package runs")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(RUN_VARIABLE, str(secrets.randbelow(1 << 31)))  # workers of pytest-xdist inherit it
    if config.getoption("--hypothesis-profile") is None:
        settings.load_profile("long" if config.getoption("--long") else "gate")
    wanted = config.getoption("--build")
    if wanted is not None and wanted != ("compiled" if build_info().is_compiled else "pure"):
        raise pytest.UsageError(f"--build {wanted}: this is the other build; {build_info().reason or 'it is there'}")
    logs = tempfile.TemporaryDirectory(prefix="eventpump-logs-")
    config.add_cleanup(logs.cleanup)
    config.pluginmanager.register(LeakWatch(Path(logs.name)))
    config.addinivalue_line("markers", "long: run with --long only; deselected without it")
    config.addinivalue_line("markers", "made_up_tokens: the test's tokens are any text, and are not looked for in it")
    config.pluginmanager.register(MatrixReport())
    config.pluginmanager.register(CoverageReport())
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would start the files with the most tests first
    config.addinivalue_line("markers", "over_both: runs over the native transport and over uamqp; see tests/ways.py")
    config.addinivalue_line(
        "markers", "seeds: runs by a sample of seeds, with --long by all; see tests/support/seeds.py"
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each worker of pytest-xdist begin with other files, since they collect all at the same time.

    pytest rewrites the assertions of a module at its first import, in ten times the time of compiling it, and keeps the
    result on the disk. On a fresh clone, and in the same order, every worker would rewrite every module.
    """
    report = yield
    worker: dict[str, Any] | None = getattr(collector.config, "workerinput", None)
    if worker is not None and isinstance(collector, pytest.Directory):
        number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        begin = number % count * len(report.result) // count
        report.result = [*report.result[begin:], *report.result[:begin]]
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Deselect what only the long form runs, and put the files that take longest first."""
    # The same order in every worker, before pytest-randomly makes one of it.
    items.sort(key=lambda item: item.nodeid.partition("::")[0])
    yield
    if not config.getoption("--long"):
        left = [item for item in items if item.get_closest_marker("long") is not None]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.get_closest_marker("long") is None]
    # Stable, and after pytest-randomly: all other files, and the tests of each file, stay in random order.
    items.sort(key=lambda item: _PLACES.get(item.nodeid.partition("::")[0], len(_PLACES)))


def pytest_report_header() -> str:
    """Say which build is tested, and which seeds by date this run uses."""
    seeds = f"seeds from {seed_of_today()} on; python -m tests.fuzz ENTRY SEED runs one again"
    samples = f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]} repeats them"
    return f"build: {build_info()}; mutated captures: {seeds}; samples of seeds, hash seeds of programs: {samples}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    from tests.scheduling import FileScheduling  # only where pytest-xdist, which calls this, is used

    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (mark := metafunc.definition.get_closest_marker("seeds")) is not None:
        test = metafunc.function.__name__
        metafunc.parametrize("seed", seeds_of(mark, test, is_long=metafunc.config.getoption("--long")))
    if "way" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("over_both")
        metafunc.parametrize("way", ways_of(mark, is_long=metafunc.config.getoption("--long")), indirect=True)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that is trusted only if configured."""
    return Authority.new(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def way(request: pytest.FixtureRequest, authority: Authority) -> Way:
    """How the test's clients reach the service."""
    return Way.of(request.param, authority)
