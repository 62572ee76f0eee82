"""What an examination found, step by step. No I/O."""

from __future__ import annotations

import enum
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from eventpump.texts import without_secrets

_INDENT: Final = 6
_NARROWEST: Final = 40


class StepOutcome(enum.Enum):
    """The outcome of a step."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one step found. Secrets of connection strings, signatures and URLs in it are masked.

    Args:
        found: What was found, in a sentence without a full stop.
        advice: What to do about it; empty if nothing is to be done.
    """

    step: str
    outcome: StepOutcome
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", without_secrets(self.found))


class ProblemFoundError(Exception):
    """A step found what prevents the work, or, as a warning, what will.

    Args:
        outcome: `WARNING` if the work goes on for now. Default: `FAILED`.
    """

    def __init__(self, found: str, advice: str, *, outcome: StepOutcome = StepOutcome.FAILED) -> None:
        super().__init__(found)
        self.found = found
        self.advice = advice
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found, in the order of the steps."""

    findings: Sequence[Finding]

    @property
    def cause(self) -> Finding | None:
        """The first failure: later ones may follow from it. None if nothing failed."""
        return next((each for each in self.findings if each.outcome is StepOutcome.FAILED), None)

    @property
    def title(self) -> str:
        """The cause, or that there is none, in a line."""
        cause = self.cause
        if cause is not None:
            return f"{cause.step}: {cause.found}"
        warnings = [each for each in self.findings if each.outcome is StepOutcome.WARNING]
        if warnings:
            return f"nothing fails, but: {warnings[0].found}"
        return f"everything works: {sum(each.outcome is StepOutcome.OK for each in self.findings)} steps"

    def lines(self, width: int) -> list[str]:
        """Return the title, and then each step with what to do, in lines of at most `width` columns, but for words that
        are longer."""
        names = max(len(each.step) for each in self.findings)
        marks = {each: len(each.value) for each in StepOutcome}
        first = f"{{:{max(marks.values())}}}  {{:{names}}}  "
        lines = [self.title, ""]
        for each in self.findings:
            head = first.format(each.outcome.value, each.step)
            lines += _wrapped(each.found, width, head, " " * len(head))
            if each.advice:
                lines += _wrapped(each.advice, width, " " * (len(head) - 3) + "-> ", " " * len(head))
        return lines

    def document(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        cause = self.cause
        return {
            "healthy": cause is None,
            "cause": None if cause is None else f"{cause.step}: {cause.found}",
            "steps": [
                {
                    "step": each.step,
                    "outcome": each.outcome.value.replace(" ", "-"),
                    "found": each.found,
                    "advice": each.advice or None,
                }
                for each in self.findings
            ],
        }


def _wrapped(text: str, width: int, first: str, following: str) -> Iterable[str]:
    if width - len(first) < _NARROWEST:
        yield first.rstrip()
        first = following = " " * _INDENT
    yield from textwrap.wrap(
        text,
        max(width, _NARROWEST),
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )


_NOISE: Final = re.compile(r"\s*(To know more visit \S+|TrackingId:|; condition |; entity ).*", re.S)
"""What the service's texts end with, and what an error adds to them."""


def clean(text: str) -> str:
    """Return a text of a peer or of a library as a finding shows it: one line, without secrets and tracking ids."""
    return without_secrets(" ".join(_NOISE.sub("", text).split())).removesuffix(".")


def span(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
