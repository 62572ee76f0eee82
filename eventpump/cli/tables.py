"""Tables and durations, as commands print them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> list[str]:
    """Return the lines of a table.

    Args:
        left: The columns whose texts begin at the left; the others end at the right.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if head in left else cell.rjust(width)
            for head, cell, width in zip(heads, row, widths, strict=True)
        ).rstrip()
        for row in (heads, *rows)
    ]


def duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has two."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
