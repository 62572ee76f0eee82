"""What `eventpump doctor` prints."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from eventpump.doctor.findings import Diagnosis, Finding, StepOutcome, clean

SCREENS: Final = Path(__file__).parent / "screens"
SVG: Final = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg"><style>
text {{ font: {char_height}px monospace }} {styles}</style>
<rect width="100%" height="100%" fill="#292929"/>{backgrounds}<g transform="translate(10 20)">{matrix}</g></svg>
"""
HUB_MISSING: Final = Diagnosis(
    (
        Finding("machine", StepOutcome.OK, "eventpump 1.2.3, compiled core; Python 3.11.7, Linux x86_64"),
        Finding("connection string", StepOutcome.OK, "example.servicebus.windows.net, hub telemetri, key listen"),
        Finding("clock", StepOutcome.OK, "as the storage account's, within 20 s"),
        Finding("storage account", StepOutcome.OK, "container leases answers in 14 ms"),
        Finding("rights", StepOutcome.OK, "blobs can be written, leased and deleted"),
        Finding("leases", StepOutcome.OK, "8 leases, 8 of them held by 2 hosts"),
        Finding("name", StepOutcome.OK, "example.servicebus.windows.net is 203.0.113.7"),
        Finding("TCP", StepOutcome.OK, "203.0.113.7 port 5671 answers in 12 ms"),
        Finding("TLS", StepOutcome.OK, "TLSv1.3, the certificate is issued by Microsoft Corporation"),
        Finding("token", StepOutcome.OK, "the token is accepted"),
        Finding(
            "hub",
            StepOutcome.FAILED,
            "the namespace has no hub telemetri",
            "check the spelling; the portal, or `az eventhubs eventhub list`, shows which hubs there are",
        ),
        *(Finding(name, StepOutcome.NOT_TRIED, "needs: hub") for name in ("partitions", "consumer group", "events")),
    )
)


def screen(diagnosis: Diagnosis, width: int, height: int) -> str:
    """Return a terminal of that size as a picture."""
    console = Console(width=width, height=height, record=True, file=io.StringIO(), legacy_windows=False)
    lines = [*diagnosis.lines(width), "$ "]
    console.print(Text("\n".join(["$ eventpump doctor --hub telemetri --container leases", *lines])), soft_wrap=True)
    return console.export_svg(code_format=SVG, unique_id="screen")


def texts(picture: str) -> list[str]:
    return re.findall(r">([^<]+)</text>", picture)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_a_diagnosis_fits_a_screen(width: int, height: int) -> None:
    """With the prompts before and after it; the texts are the picture's, which this file draws as a program."""
    lines = HUB_MISSING.lines(width)
    assert len(lines) + 2 <= height
    assert max(map(len, lines)) <= width
    picture = (SCREENS / f"doctor-{width}x{height}.svg").read_text(encoding="utf-8")
    assert texts(screen(HUB_MISSING, width, height)) == texts(picture)


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=20), st.sampled_from(StepOutcome), st.text(), st.text()), min_size=1
    ),
    st.integers(0, 200),
)
def test_the_first_failure_is_the_first_line(steps: list[tuple[str, StepOutcome, str, str]], width: int) -> None:
    """At every width; without one, the line says that nothing fails."""
    diagnosis = Diagnosis(tuple(Finding(*each) for each in steps))
    failed = [each for each in diagnosis.findings if each.outcome is StepOutcome.FAILED]
    first = diagnosis.lines(width)[0]
    document = diagnosis.document()
    assert document["healthy"] is (not failed)
    assert len(document["steps"]) == len(steps)
    if failed:
        assert first == document["cause"] == f"{failed[0].step}: {failed[0].found}"
    else:
        assert first.startswith(("everything works", "nothing fails"))


def test_a_text_of_the_service_is_shown_without_what_is_for_its_support() -> None:
    """Tracking ids, links, and the condition and entity that errors add."""
    text = (
        "The messaging entity 'sb://x/telemetry' could not be found. To know more visit https://aka.ms/x. "
        "TrackingId:1_G2, SystemTracker:x, Timestamp:2026-01-01T00:00:00; condition amqp:not-found; entity x"
    )
    assert clean(text) == "The messaging entity 'sb://x/telemetry' could not be found"


if __name__ == "__main__":
    for size in ((80, 24), (120, 40)):
        name = f"doctor-{size[0]}x{size[1]}.svg"
        (SCREENS / name).write_text(screen(HUB_MISSING, *size), encoding="utf-8")
