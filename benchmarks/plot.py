"""The pictures: of each benchmark the bars of its headline rows and of their peers, or curves, as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.report import Report, Row, environment, number

MEASURED = {
    "receive": "CPU time of the client's process per event, received and read, over TLS",
    "programs": "CPU time of the client's process per event, in programs that do more than read it, over TLS",
    "paced": "CPU time of the client's process per event, of events that come one by one or a few at a time",
    "delivery": "What one delivery of one event takes, and one send",
    "fanout": "CPU time of the process per event published, with several consumers that each read four fields of it",
    "send": "CPU time of the client's process per event, created and sent in full batches over TLS",
    "buffered": "CPU time of the client's process per event, sent singly through the client's buffer, over TLS",
    "idempotent": "What numbering events against duplicates costs the client's process, over TLS",
    "latency": "Sending one event and hearing that it is stored, over TLS",
    "idle": "What a client costs while no events come",
    "memory": "Resident memory of the client's process",
    "startup": "What a program costs before it connects: a client is imported and constructed, in a new process",
    "scale": "What hosts of many partitions cost",
    "keyed": "What a keyed processor costs per event over a plain one",
    "transports": "The transports of both clients",
    "stages": "CPU time per event of each stage of receiving, without a socket",
    "telemetry": "CPU time that telemetry adds to a batch",
    "spark-source": "Reading through Spark",
    "spark-small": "From an event's acceptance in one hub to its aggregate's in another, through Spark",
    "spark-sink": "Writing a DataFrame through Spark",
}
"""What stands below the title, by the benchmark."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours for one of the backgrounds that a page may have."""

    text: str
    muted: str
    subject: str
    peer: str
    curves: tuple[str, ...]


THEMES: Mapping[str, Theme] = {
    "light": Theme(
        text="#1f2328", muted="#59636e", subject="#0969da", peer="#afb8c1", curves=("#0969da", "#bc4c00", "#1a7f37")
    ),
    "dark": Theme(
        text="#e6edf3", muted="#9198a1", subject="#4493f8", peer="#59616b", curves=("#4493f8", "#f0883e", "#3fb950")
    ),
}

_STYLE: dict[Any, Any] = {  # newer versions spell out all keys in the type, older ones have none
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # it comes with matplotlib: the layout is the same everywhere
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "eventpump",  # else the ids in the file are different each time
}

# Inches.
_WIDTH = 8.0
_MARGIN = 0.12
_NAMES = 2.35
_TITLE = 0.62
_HEADING = 0.3
_BAR = 0.24
_STEP = 0.3
_GAP = 0.2
_CAPTION_LINE = 0.17

_COLUMNS = 2
_PANEL = 2.1
"""Of curves: how many panels stand side by side, and the height of one, in inches."""

_ROOM = 1.5
"""The width of the axis in terms of the longest bar: the rest is for what stands at its end."""


def plot(report: Report, directory: Path) -> list[Path]:
    """Draw the headline rows of every benchmark that has any, for a light and for a dark page.

    Rows that are void, or are bars and have no peer, are left out. The same report makes the same bytes.

    Returns:
        The files, `BENCHMARK-light.svg` and `BENCHMARK-dark.svg`.
    """
    drawn: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.is_headline and (row.peer_value is not None or row.at is not None) and not row.is_void:
            drawn.setdefault(row.benchmark, []).append(row)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for benchmark, rows in drawn.items():
        for name, theme in THEMES.items():
            path = directory / f"{benchmark}-{name}.svg"
            with mpl.rc_context(_STYLE):
                is_curves = all(row.at is not None for row in rows)
                figure = (draw_curves if is_curves else draw)(report, benchmark, rows, theme)
                figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            paths.append(path)
    return paths


def draw_curves(report: Report, benchmark: str, rows: Sequence[Row], theme: Theme) -> Figure:
    """Draw what is measured over a number: a panel for each quantity, in which each curve has a colour.

    Points are measured; the thin line is the law, where there is one. Both axes are logarithmic, so that what grows in
    proportion rises by the same angle everywhere.
    """
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.panel, []).append(row)
    colours = dict(zip(dict.fromkeys(row.curve for row in rows), theme.curves, strict=False))
    caption = _caption(report, rows)
    lines = -(-len(panels) // _COLUMNS)
    height = _TITLE + 0.25 + lines * _PANEL + _CAPTION_LINE * len(caption) + 2 * _MARGIN
    figure = Figure(figsize=(_WIDTH, height))
    _write(figure, height, _MARGIN, benchmark, 13, theme.text, "bold")
    about = ", ".join([*([MEASURED[benchmark]] if benchmark in MEASURED else []), "lower is better; lines: the law"])
    _write(figure, height, _MARGIN + 0.27, about, 9, theme.muted)
    left = _MARGIN
    for curve, colour in colours.items():
        over = next(row for row in rows if row.curve == curve).over
        label = f"\u25cf {curve}, over {over}"
        figure.text(left / _WIDTH, 1 - (_MARGIN + 0.5) / height, label, size=9, color=colour, va="top", weight="bold")
        left += 0.085 * len(label) + 0.3
    width = (_WIDTH - 2 * _MARGIN) / _COLUMNS
    for number_of_panel, (panel, points) in enumerate(panels.items()):
        line, column = divmod(number_of_panel, _COLUMNS)
        x, top = _MARGIN + column * width + 0.5, _TITLE + 0.25 + _MARGIN + line * _PANEL + 0.3
        size = ((width - 0.65) / _WIDTH, (_PANEL - 0.7) / height)
        axes = figure.add_axes((x / _WIDTH, 1 - top / height - size[1], *size))
        axes.set_title(f"{panel}, {points[0].unit}", size=9, color=theme.text, weight="bold", loc="left")
        _draw_curves_of(axes, points, colours, theme)
    end = _TITLE + 0.25 + _MARGIN + lines * _PANEL
    for number_of_line, text in enumerate(caption):
        _write(figure, height, end + _CAPTION_LINE * number_of_line, text, 7.5, theme.muted)
    return figure


def _draw_curves_of(axes: Axes, rows: Sequence[Row], colours: Mapping[str, str], theme: Theme) -> None:
    axes.set_facecolor("none")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for curve, colour in colours.items():
        points = sorted((row.at, row.subject_value, row.peer_value) for row in rows if row.curve == curve and row.at)
        if not points:
            continue
        where = [at for at, _, _ in points]
        has_law = all(law for _, _, law in points)
        axes.plot(
            where, [value for _, value, _ in points], "o", ls="none" if has_law else "-", color=colour, ms=5, lw=1
        )
        if has_law:
            # The law is a straight line, which is a curve on these axes: it needs more points than are measured.
            between = np.geomspace(where[0], where[-1], 100)
            axes.plot(between, np.interp(between, where, [law or 0.0 for _, _, law in points]), color=colour, lw=1)
    numbers = sorted({row.at for row in rows if row.at})
    axes.set_xticks([each for each in numbers if all(not each < other < each * 2 for other in numbers)])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    values = [row.subject_value for row in rows]
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 30 * min(values) else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.minorticks_off()
    axes.tick_params(colors=theme.muted, labelsize=7.5)
    axes.grid(visible=True, color=theme.peer, lw=0.4, alpha=0.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.peer)


def _write(
    figure: Figure, height: float, top: float, text: str, size: float, colour: str, weight: str = "normal"
) -> None:
    """Write a line at the left margin, so many inches from the top."""
    figure.text(_MARGIN / _WIDTH, 1 - top / height, text, size=size, color=colour, weight=weight, va="top", ha="left")


def draw(report: Report, benchmark: str, rows: Sequence[Row], theme: Theme) -> Figure:
    """Draw the bars of one benchmark: rows of the same unit share their axis."""
    units: dict[str, list[Row]] = {}
    for row in rows:
        units.setdefault(row.unit, []).append(row)
    caption = _caption(report, rows)
    height = _TITLE + sum(map(_panel_height, units.values())) + _CAPTION_LINE * len(caption) + 2 * _MARGIN
    figure = Figure(figsize=(_WIDTH, height))
    _write(figure, height, _MARGIN, benchmark, 13, theme.text, "bold")
    measured = [MEASURED[benchmark]] if benchmark in MEASURED else []
    only_unit = [f"in {unit}" for unit in units if len(units) == 1]
    _write(figure, height, _MARGIN + 0.27, ", ".join([*measured, *only_unit, "shorter is better"]), 9, theme.muted)
    top = _MARGIN + _TITLE
    environments = set(map(environment, rows))
    for group in units.values():
        panel = _panel_height(group)
        left = _MARGIN + _NAMES
        bottom = height - top - panel
        axes = figure.add_axes((left / _WIDTH, bottom / height, (_WIDTH - left - _MARGIN) / _WIDTH, panel / height))
        headings = [_heading(row, with_unit=len(units) > 1, with_environment=len(environments) > 1) for row in group]
        _draw_panel(axes, group, headings, theme)
        top += panel
    for number_of_line, line in enumerate(caption):
        _write(figure, height, top + _CAPTION_LINE * number_of_line, line, 7.5, theme.muted)
    return figure


def _panel_height(rows: Sequence[Row]) -> float:
    return (_HEADING + 2 * _STEP + _GAP) * len(rows)


def _heading(row: Row, *, with_unit: bool, with_environment: bool) -> str:
    """Return what stands above a row's bars: its name, and what not all rows share."""
    name = row.name.removeprefix(row.benchmark).lstrip(":, ") or row.name
    if with_unit:
        name = f"{name}, {row.unit}"
    return f"{name} ({environment(row)})" if with_environment else name


def _draw_panel(axes: Axes, rows: Sequence[Row], headings: Sequence[str], theme: Theme) -> None:
    """Draw the bars of one unit; the vertical axis counts inches from the top."""
    axes.set_axis_off()
    longest = max(max(row.subject_value, row.peer_value or 0.0) for row in rows)
    axes.set_xlim(0, longest * _ROOM)
    axes.set_ylim(_panel_height(rows), 0)
    inch = longest * _ROOM / (_WIDTH - _NAMES - 2 * _MARGIN)
    top = 0.0
    for row, heading in zip(rows, headings, strict=True):
        axes.text(-_NAMES * inch, top + _HEADING / 2, heading, size=9.5, color=theme.text, va="center", weight="bold")
        top += _HEADING
        bars = (
            (row.subject, row.subject_value, f"{number(row.subject_value)}{_less(row)}", theme.subject, "bold"),
            (row.peer, row.peer_value or 0.0, number(row.peer_value), theme.peer, "normal"),
        )
        for name, value, label, colour, weight in bars:
            middle = top + _STEP / 2
            axes.barh(middle, value, height=_BAR, color=colour, linewidth=0)
            wrapped = "\n".join(textwrap.wrap(name, 36)[:2])
            axes.text(-0.1 * inch, middle, wrapped, size=8, color=theme.text, va="center", ha="right", linespacing=1.0)
            axes.text(value + 0.08 * inch, middle, label, size=9, color=theme.text, va="center", weight=weight)
            top += _STEP
        top += _GAP


def _less(row: Row) -> str:
    """Return how much less than the peer's our value is, or more."""
    if row.ratio is None:
        return ""
    if 0.95 < row.ratio < 1.05:
        return " (about the same)"
    factor, word = (row.ratio, "less") if row.ratio >= 1 else (1 / row.ratio, "more")
    return f" ({factor:.0f}× {word})" if factor >= 10 else f" ({factor:.1f}× {word})"


def _caption(report: Report, rows: Sequence[Row]) -> list[str]:
    """Return the lines of machine, versions and environment."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version[:1].isdigit())
    on = {environment(row): row for row in rows}
    environments = [f"{row.build}, {row.loop}" for row in on.values()] if len(on) == 1 else []
    short = "short runs (--quick), not to be quoted" if report.is_quick else ""
    parts = [part for part in (report.machine, versions, *environments, short) if part]
    return textwrap.wrap("; ".join(parts), 120)
