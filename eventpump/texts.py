"""Text that a peer or a user chose, in a form fit for errors, logs and refusals."""

from __future__ import annotations

import re
from typing import Final

MAX_EXCERPT: Final = 256
"""Characters of a peer's text that an error, a log line or a refusal quotes, at most."""


def excerpt(text: str, limit: int = MAX_EXCERPT) -> str:
    """Return at most so many characters of a text, on one line: what is not printable is escaped as in Python.

    What was cut ends in "…".
    """
    cut = text[:limit]
    if not cut.isprintable():
        cut = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)
    if len(text) > limit or len(cut) > limit:
        cut = cut[: limit - 1] + "…"
    return cut


def not_the_class(given: object) -> str:
    """Return what to add to "must be ..." where a class was given for an object; "" for anything else."""
    return f"; give an object, not the class {given.__name__}" if isinstance(given, type) else ""


_SECRET: Final = re.compile(
    r"((?:SharedAccess|Account)Key|SharedAccessSignature|\bsig|\bpassword|\bpwd)(\s*(?:=|%3D))[^;&\s'\"]+",
    re.IGNORECASE,
)
_USER: Final = re.compile(r"(:/{1,2}[^/\s@:]*:)[^/\s@]+@")


def without_secrets(text: str) -> str:
    """Return a text with the values masked that are secret in connection strings, signatures and URLs."""
    return _USER.sub(r"\1***@", _SECRET.sub(r"\1\2***", text))
