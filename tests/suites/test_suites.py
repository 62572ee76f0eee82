"""How a run of another project's suite is judged; with `--long`, the run itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventpump.errors import ConfigurationError
from tests.suites import Outcome, Record, Result, azure_eventhub, summary
from tests.suites.azure_eventhub import results_of

ROOT = Path(__file__).parents[2]
RECORD = Record(5, {"file.py::skipped": "no network"}, {"file.py::failed": "a fault of the SDK"})
AS_RECORDED = {
    "file.py::a": Result(Outcome.PASSED),
    "file.py::b": Result(Outcome.PASSED),
    "file.py::c": Result(Outcome.PASSED),
    "file.py::skipped": Result(Outcome.SKIPPED, "why"),
    "file.py::failed": Result(Outcome.FAILED, "what"),
}
REPORT = """<testsuites><testsuite>
<testcase classname="tests.live.test_a" name="test_one[x]"/>
<testcase classname="live.test_a" name="test_two"><failure message="AssertionError: no&#10;more">it</failure></testcase>
<testcase classname="live.test_a" name="test_three"><skipped message="no network"/></testcase>
<testcase classname="live.test_a" name="test_four"/>
<testcase classname="live.test_a" name="test_four"><error message="failed on teardown">trace</error></testcase>
</testsuite></testsuites>"""


def differences(results: dict[str, Result], *, is_whole: bool = True) -> list[str]:
    return list(RECORD.differences(results, is_whole=is_whole))


def test_differences_of_a_run_as_recorded() -> None:
    """A run with the recorded outcomes has none."""
    assert differences(AS_RECORDED) == []


def test_differences_with_another_outcome() -> None:
    """A failure and a skip that are not recorded are differences, and so is a recorded failure that passes."""
    for test, outcome in (
        ("file.py::a", Outcome.FAILED),
        ("file.py::a", Outcome.SKIPPED),
        ("file.py::failed", Outcome.PASSED),
        ("file.py::skipped", Outcome.FAILED),
    ):
        (line,) = differences({**AS_RECORDED, test: Result(outcome, "text")})
        assert line.startswith(f"{test} {outcome.value}, recorded as "), line


def test_differences_of_a_run_with_other_tests() -> None:
    """Tests of the suite that were not run are differences of a whole run, and not of a part."""
    part = {test: result for test, result in AS_RECORDED.items() if test != "file.py::failed"}
    assert differences(part) == ["file.py::failed is recorded, and was not run", "4 tests were run, 5 are recorded"]
    assert differences(part, is_whole=False) == []
    assert differences({**AS_RECORDED, "file.py::new": Result(Outcome.PASSED)}) == ["6 tests were run, 5 are recorded"]


def test_summary_names_the_cause() -> None:
    """A run's lines are its counts, and each test that did not pass with its recorded cause, or else its own text."""
    results = {**AS_RECORDED, "file.py::a": Result(Outcome.FAILED, "own text")}
    assert list(summary(results, RECORD)) == [
        "2 passed of 5, 1 skipped by the suite, 2 failed",
        "skipped file.py::skipped: no network",
        "failed file.py::a: own text",
        "failed file.py::failed: a fault of the SDK",
    ]


def test_results_of_a_report(tmp_path: Path) -> None:
    """A test has the id that the suite's pytest takes, and a failure in its teardown is a failure."""
    file = tmp_path / "report.xml"
    file.write_text(REPORT)
    assert results_of(file) == {
        "live/test_a.py::test_one[x]": Result(Outcome.PASSED),
        "live/test_a.py::test_two": Result(Outcome.FAILED, "AssertionError: no"),
        "live/test_a.py::test_three": Result(Outcome.SKIPPED, "no network"),
        "live/test_a.py::test_four": Result(Outcome.FAILED, "failed on teardown"),
    }


def test_record_of_azure_eventhub() -> None:
    """Of the official suite 214 tests pass, and 6 are skipped by the suite itself."""
    record = Record.read("azure-eventhub")
    assert (record.run, record.passed, len(record.skipped)) == (220, 214, 6)


def test_page_has_the_figures() -> None:
    """The site's page of suites has the version and the figures of the record, and names each skipped test."""
    record = Record.read("azure-eventhub")
    page = (ROOT / "docs" / "project" / "suites.md").read_text()
    figures = (
        f"{azure_eventhub.version()} | {record.run} | {record.passed} | {len(record.skipped)} | {len(record.failed)}"
    )
    assert f"| {figures} |" in page
    for test in (*record.skipped, *record.failed):
        assert test.partition("::")[2].partition("[")[0].removesuffix("_async") in page


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.made_up_tokens
async def test_suite_of_azure_eventhub_is_as_recorded() -> None:
    """azure-eventhub's own live tests pass against the emulator, but for those that are recorded with their cause."""
    try:
        results = await azure_eventhub.run()
    except ConfigurationError as error:
        if os.geteuid() != 0:
            pytest.skip(str(error))  # the right to listen on port 443
        raise
    assert list(Record.read("azure-eventhub").differences(results, is_whole=True)) == []
