"""How the demo looks: a live table on a terminal, or plain lines."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, Self

from eventpump.cli.demo.fleet import Fleet, Meter
from eventpump.cli.demo.verify import Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


class Scene:
    """What there is to see.

    :param total: events to publish.
    """

    def __init__(self, fleet: Fleet, total: int) -> None:
        self.fleet = fleet
        self.total = total
        self.published = 0
        self.log: deque[str] = deque(maxlen=6)
        self.meters: dict[str, Meter] = {str(each): Meter() for each in range(fleet.partitions)}
        self.began = time.monotonic()
        self._last_owner: dict[str, str] = {}
        self._final: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] | None = None

    def freeze(self) -> None:
        """Keep showing owners and hosts as they are now: the stream is over, and they are about to stop."""
        self._final = self.rows(), self.host_rows()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def processed(self) -> int:
        """Events processed by all hosts, those of a killed one as far as it said."""
        return sum(host.processed for host in self.fleet.hosts)

    def host_rows(self) -> list[tuple[str, ...]]:
        """One row a host: name, process id, state, partitions, events processed, events a second."""
        if self._final is not None:
            return self._final[1]
        return [
            (
                host.name,
                str(host.process.pid),
                host.state,
                str(len(host.partitions)) if host.is_running else "",
                f"{host.processed:,}",
                f"{host.meter.rate:,.0f}" if host.is_running else "",
            )
            for host in self.fleet.hosts
        ]

    def rows(self) -> list[tuple[str, ...]]:
        """One row a partition: id, owner, epoch, position, lag, events a second."""
        if self._final is not None:
            return self._final[0]
        rows: list[tuple[str, ...]] = []
        for partition_id, meter in self.meters.items():
            owner = self.fleet.owner(partition_id)
            if owner is None:
                last = self._last_owner.get(partition_id)
                rows.append((partition_id, f"none (was {last})" if last else "none", "", "", "", ""))
                continue
            self._last_owner[partition_id] = owner.name
            status = owner.partitions[partition_id]
            position, lag = status["position"], status["lag"]
            if position is not None:
                meter.note(position)
            rows.append(
                (
                    partition_id,
                    owner.name,
                    str(status["epoch"]),
                    "" if position is None else f"{position:,}",
                    "" if lag is None else f"{lag:,}",
                    f"{meter.rate:,.0f}",
                )
            )
        return rows


class View(Protocol):
    """Shows a scene."""

    def happened(self, what: str) -> None:
        """Show that something happened."""

    def refresh(self) -> None:
        """Show how things stand."""

    def end(self, verdict: Verdict) -> None:
        """Show what came of it."""


def _ending(verdict: Verdict) -> list[tuple[str, str]]:
    return [
        ("published", f"{verdict.published:,}"),
        ("processed", f"{verdict.processed:,}"),
        ("lost", f"{verdict.lost:,}"),
        ("duplicates", f"{verdict.duplicates:,}"),
        ("shared epochs", f"{verdict.shared:,}"),
        ("time to take over", "-" if verdict.take_over is None else f"{verdict.take_over:.1f} s"),
    ]


def _judgement(verdict: Verdict) -> str:
    if verdict.holds:
        return "every published event was processed"
    if verdict.unknown:
        return f"{verdict.unknown:,} events were processed that the hub does not hold"
    if verdict.lost:
        return f"{verdict.lost:,} events were lost"
    return f"{verdict.shared:,} times two hosts delivered a partition under the same epoch"


class PlainView:
    """A line for whatever happens, and one a second for how things stand."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._next = 0.0

    def happened(self, what: str) -> None:
        print(f"{self._scene.elapsed:6.1f}  {what}", flush=True)

    def refresh(self) -> None:
        scene = self._scene
        if scene.elapsed < self._next:
            return
        self._next = scene.elapsed + 1.0
        owners = " ".join(f"{row[0]}:{row[1].replace(' ', '_')}" for row in scene.rows())
        print(
            f"{scene.elapsed:6.1f}  published {scene.published:,} processed {scene.processed:,}  {owners}", flush=True
        )

    def end(self, verdict: Verdict) -> None:
        for name, value in _ending(verdict):
            print(f"{name}: {value}")
        print(("OK: " if verdict.holds else "FAILED: ") + _judgement(verdict), flush=True)


class LiveView:
    """A live table, drawn with rich. Used as a context manager."""

    def __init__(self, scene: Scene) -> None:
        from rich.console import Console
        from rich.live import Live

        self._scene = scene
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def happened(self, what: str) -> None:
        self._scene.log.append(f"[dim]{self._scene.elapsed:5.1f} s[/dim]  {what}")
        self._live.refresh()

    def refresh(self) -> None:
        self._live.refresh()

    def end(self, verdict: Verdict) -> None:
        from rich.table import Table

        self._live.stop()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(justify="right")
        for name, value in _ending(verdict):
            table.add_row(name, value)
        self._console.print(table)
        style = "bold green" if verdict.holds else "bold red"
        self._console.print(_judgement(verdict), style=style)

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        scene = self._scene
        head = Text.assemble(
            ("eventpump demo", "bold"),
            f"   {scene.elapsed:4.0f} s   published ",
            (f"{scene.published:,}", "bold cyan"),
            f" of {scene.total:,}   processed ",
            (f"{scene.processed:,}", "bold green"),
        )
        return Group(head, self._partitions(), self._hosts(), *map(Text.from_markup, scene.log))

    def _partitions(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("partition", justify="right")
        table.add_column("owner", min_width=19)
        for name in ("epoch", "position", "lag", "events/s"):
            table.add_column(name, justify="right", min_width=8)
        colors = ("cyan", "green", "magenta", "yellow", "blue")
        names = {host.name: colors[index % len(colors)] for index, host in enumerate(self._scene.fleet.hosts)}
        for partition_id, owner, *rest in self._scene.rows():
            table.add_row(partition_id, f"[{names.get(owner, 'dim red')}]{owner}[/]", *rest)
        return table

    def _hosts(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("host")
        table.add_column("process", justify="right", min_width=8)
        table.add_column("state", min_width=8)
        for name in ("partitions", "processed", "events/s"):
            table.add_column(name, justify="right", min_width=9)
        styles = {"running": "green", "killed": "bold red", "stopped": "dim"}
        for name, process, state, *rest in self._scene.host_rows():
            table.add_row(name, process, f"[{styles[state]}]{state}[/]", *rest)
        return table
