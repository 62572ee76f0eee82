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
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a board.

    Args:
        width: Characters it has at least.
    """

    name: str
    is_number: bool = True
    width: int = 8


Row = Sequence[str | tuple[str, str]]
"""The cells of a row: text, or text and the style it is drawn in."""


@dataclass(frozen=True, slots=True)
class Board:
    """A table."""

    columns: Sequence[Column]
    rows: Sequence[Row]


class Scene(Protocol):
    """What there is to see of a demo."""

    title: str

    def head(self) -> Sequence[tuple[str, str]]:
        """The figures that matter most: name and value."""

    def boards(self) -> Sequence[Board]:
        """How things stand."""

    def line(self) -> str:
        """How things stand, in one line."""


class Verdict(Protocol):
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

    def end(self, verdict: Verdict) -> None:
        """Show what came of it."""


def view_of(scene: Scene, *, is_plain: bool) -> View:
    """Create the view of a scene.

    Raises:
        ConfigurationError: The live view cannot be drawn here.
    """
    if is_plain:
        return PlainView(scene)
    if util.find_spec("rich") is None:
        raise ConfigurationError("demo", "the live table needs: pip install 'eventpump[cli]'; or use --plain")
    return LiveView(scene)


class PlainView:
    """A line for whatever happens, and at most one a second for how things stand, when that is news."""

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

    def end(self, verdict: Verdict) -> None:
        for name, value in verdict.figures():
            print(f"{name}: {value}")
        print(("OK: " if verdict.holds else "FAILED: ") + verdict.judgement(), flush=True)


class LiveView:
    """Live tables, drawn with rich."""

    def __init__(self, scene: Scene) -> None:
        from rich.console import Console
        from rich.live import Live

        self._scene = scene
        self._began = time.monotonic()
        self._log: deque[str] = deque(maxlen=6)
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._draw)

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

    def end(self, verdict: Verdict) -> None:
        from rich.table import Table

        self._live.stop()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(justify="right")
        for name, value in verdict.figures():
            table.add_row(name, value)
        self._console.print(table)
        self._console.print(verdict.judgement(), style="bold green" if verdict.holds else "bold red")

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        head = Text.assemble((self._scene.title, "bold"), f"   {time.monotonic() - self._began:4.0f} s")
        for (name, value), style in zip(self._scene.head(), ("cyan", "green", "magenta", "yellow"), strict=False):
            head.append(f"   {name} ")
            head.append(value, f"bold {style}")
        tables = [_table(board) for board in self._scene.boards()]
        shown: list[RenderableType] = [head]
        for table in tables:
            shown += [Text(), table]
        # What happened last is at the bottom, as much of it as the terminal has lines for.
        room = self._console.height - 1 - len(self._console.render_lines(Group(*shown)))
        log: deque[Text] = deque()
        for line in reversed(self._log):
            text = Text.from_markup(line)
            room -= len(self._console.render_lines(text))
            if room < 0:
                break
            log.appendleft(text)
        return Group(*shown, *log)


def _table(board: Board) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in board.columns:
        justify = "right" if column.is_number else "left"
        table.add_column(column.name, justify=justify, min_width=column.width)  # type: ignore[arg-type]  # one of rich's words
    for row in board.rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    return table
