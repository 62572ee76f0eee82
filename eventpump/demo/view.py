"""How a demo looks: live tables on a terminal, or plain lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import util
from typing import TYPE_CHECKING, Protocol, Self

from eventpump.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a board.

    Args:
        width: Characters that it has at least, where there is room.
        rank: Where the table is too wide, columns of the highest rank are left out first; those of rank 0 never are.
    """

    name: str
    is_number: bool = True
    width: int = 8
    rank: int = 0


Row = Sequence[str | tuple[str, str]]
"""The cells of a row: text, or text and the style it is drawn in."""


@dataclass(frozen=True, slots=True)
class Board:
    """A table; `least` rows are kept where the terminal has few lines."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    least: int = 3


class Scene(Protocol):
    """What there is to see of a demo."""

    title: str

    def head(self) -> Sequence[tuple[str, str]]:
        """The figures that matter most: name and value."""

    def boards(self) -> Sequence[Board]:
        """How things stand."""

    def line(self) -> str:
        """How things stand, in one line."""


class ShownVerdict(Protocol):
    """The result of a run."""

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""

    def figures(self) -> Sequence[tuple[str, str]]:
        """What was counted: name and value."""

    def judgement(self) -> str:
        """Return the conclusion in one sentence."""


class View(AbstractContextManager[object], Protocol):
    """Shows a scene while it is entered."""

    def happened(self, what: str) -> None:
        """Show that something happened."""

    def refresh(self) -> None:
        """Show how things stand."""

    def end(self, verdict: ShownVerdict) -> None:
        """Show the result."""


def view_of(scene: Scene, *, is_plain: bool) -> View:
    """Create the view of a scene. Raises `ConfigurationError` if the live view cannot be drawn here."""
    if is_plain:
        return PlainView(scene)
    if util.find_spec("rich") is None:
        raise ConfigurationError("demo", "the live table needs: pip install 'eventpump[cli]'; or use --plain")
    return LiveView(scene)


class PlainView:
    """Prints a line per event of the scene, and at most one per second for a changed state."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._began = time.monotonic()
        self._next = 0.0
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def happened(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f}  {what}", flush=True)

    def refresh(self) -> None:
        elapsed = time.monotonic() - self._began
        line = self._scene.line()
        if elapsed >= self._next and line != self._last:
            self._next, self._last = elapsed + 1.0, line
            self.happened(line)

    def end(self, verdict: ShownVerdict) -> None:
        for name, value in verdict.figures():
            print(f"{name}: {value}")
        print(("OK: " if verdict.holds else "FAILED: ") + verdict.judgement(), flush=True)


class LiveView:
    """Live tables, drawn with rich on a console: by default the standard output."""

    def __init__(self, scene: Scene, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._scene = scene
        self._began = time.monotonic()
        self._log: deque[str] = deque(maxlen=6)
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self.__rich__)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def happened(self, what: str) -> None:
        self._log.append(f"[dim]{time.monotonic() - self._began:5.1f} s[/dim]  {what}")
        self._live.refresh()

    def refresh(self) -> None:
        self._live.refresh()

    def end(self, verdict: ShownVerdict) -> None:
        from rich.table import Table

        self._live.stop()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(justify="right")
        for name, value in verdict.figures():
            table.add_row(name, value)
        self._console.print(table)
        self._console.print(verdict.judgement(), style="bold green" if verdict.holds else "bold red")

    def _head(self, title: str) -> Text:
        from rich.text import Text

        head = Text.assemble((title, "bold"), f"   {time.monotonic() - self._began:.0f} s")
        for (name, value), style in zip(self._scene.head(), ("cyan", "green", "magenta", "yellow"), strict=False):
            head.append(f"   {name} ")
            head.append(value, f"bold {style}")
        return head

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        width, height = self._console.width, self._console.height - 1
        head = self._head(self._scene.title)
        if head.cell_len > width:
            head = self._head(self._scene.title.removeprefix("eventpump "))
        log = [Text.from_markup(line) for line in self._log]
        heights = [len(self._console.render_lines(line)) for line in log]
        room = height - len(self._console.render_lines(head))
        boards = [narrowed(board, width) for board in self._scene.boards()]
        layout = arranged(boards, room - sum(heights[-STORY:]))
        shown: list[RenderableType] = [head]
        for board, rows in zip(boards, layout.rows, strict=True):
            shown += [Text()] * layout.has_gaps + [_table(shortened(board, rows), has_rule=layout.has_rules)]
            room -= layout.lines_of(rows)
        # What happened last is at the bottom, as much of it as there are lines for.
        first = len(log)
        while first and heights[first - 1] <= room:
            first -= 1
            room -= heights[first]
        return Group(*shown, *log[first:])


STORY = 4
"""How many of the last things that happened are shown at least: they are what the demo is about."""
_BETWEEN = 2
"""Characters between two columns."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tables share the lines of a terminal.

    Args:
        has_gaps: Whether there is an empty line above each table.
        has_rules: Whether there is a rule below each table's names.
    """

    has_gaps: bool
    has_rules: bool
    rows: Sequence[int]

    def lines_of(self, rows: int) -> int:
        """Return the lines of a table with so many rows."""
        return rows + 1 + self.has_rules + self.has_gaps

    @property
    def lines(self) -> int:
        """The lines of all tables."""
        return sum(map(self.lines_of, self.rows))


def arranged(boards: Sequence[Board], lines: int) -> Layout:
    """Return how tables are shown on so many lines: without gaps, rules and, from the last table on, rows, as needed.

    Where even that is too much, the result is the smallest there is.
    """
    rows = [len(board.rows) for board in boards]
    layout = Layout(has_gaps=True, has_rules=True, rows=rows)
    for has_gaps, has_rules in ((True, True), (False, True), (False, False)):
        layout = Layout(has_gaps, has_rules, rows)
        if layout.lines <= lines:
            return layout
    excess = layout.lines - lines
    for index in reversed(range(len(boards))):
        cut = max(0, min(excess, rows[index] - boards[index].least))
        rows[index] -= cut
        excess -= cut
    return layout


def narrowed(board: Board, width: int) -> Board:
    """Return a table without the columns for which there is no room."""
    kept = list(range(len(board.columns)))

    def taken() -> int:
        return sum(_width(board, each) for each in kept) + _BETWEEN * (len(kept) - 1)

    while taken() > width and (dispensable := [each for each in kept if board.columns[each].rank]):
        kept.remove(max(dispensable, key=lambda each: (board.columns[each].rank, each)))
    return Board(
        [board.columns[each] for each in kept], [[row[each] for each in kept] for row in board.rows], board.least
    )


def _width(board: Board, index: int) -> int:
    cells = [row[index] for row in board.rows]
    column = board.columns[index]
    return max(column.width, len(column.name), *(len(cell if isinstance(cell, str) else cell[0]) for cell in cells), 0)


def shortened(board: Board, rows: int) -> Board:
    """Return the first rows of a table, with a mark if there are others."""
    if rows >= len(board.rows):
        return board
    mark = ["…", *[""] * (len(board.columns) - 1)]
    return Board(board.columns, [*board.rows[: rows - 1], mark], board.least)


def _table(board: Board, *, has_rule: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if has_rule else None, pad_edge=False, show_edge=False, collapse_padding=has_rule)
    for column in board.columns:
        justify = "right" if column.is_number else "left"
        table.add_column(column.name, justify=justify, min_width=column.width, no_wrap=True)  # type: ignore[arg-type]  # one of rich's words
    for row in board.rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    return table
