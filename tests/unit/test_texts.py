"""Excerpts of what a peer says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.texts import MAX_EXCERPT, excerpt


@given(st.text(max_size=600), st.integers(1, 300))
def test_excerpt_is_bounded_and_on_one_line(text: str, limit: int) -> None:
    """Whatever the text, its excerpt is printable and no longer than allowed; a short printable text is itself."""
    found = excerpt(text, limit)
    assert len(found) <= limit
    assert found.isprintable()
    if text.isprintable() and len(text) <= limit:
        assert found == text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ""),
        ("a\r\nb\x1b[31m\x00", "a\\r\\nb\\x1b[31m\\x00"),
        ("\ud800\u2028", "\\ud800\\u2028"),
        ("x" * 256, "x" * 256),
        ("x" * 257, "x" * 255 + "…"),
        ("\0" * 256, ("\\x00" * 64)[:255] + "…"),
    ],
)
def test_excerpt_escapes_what_is_not_printable(text: str, found: str) -> None:
    """Controls are escaped as Python escapes them, and the cut is marked."""
    assert excerpt(text) == found
    assert MAX_EXCERPT == 256
