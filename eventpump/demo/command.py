"""`eventpump demo`: the main use cases on one machine, with a process killed meanwhile, and verification of no loss."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from eventpump.aio.signals import handling_signals
from eventpump.demo.view import Scene, ShownVerdict, View, view_of
from eventpump.errors import ConfigurationError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the only name of this type

_REFRESH = 0.25
_SIZES = {"events": (200_000, 100_000), "seconds": (24.0, 20.0)}
"""By option: its default without and with `--spark`, which starts Spark twice beside it, and shall end in a minute."""


# Those of `options.connection`, which is not imported here: models take the time in which a first line is to be seen.
TRANSPORT_TYPES: Final = ("tcp", "websocket")
TRANSPORTS: Final = ("native", "uamqp")


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "demo",
        help=summary,
        description="Start a local service, publish market data, process it on three hosts, each in its own process, "
        "kill one, add another, and verify that every event was processed. With --spark: aggregate it by structured "
        "streaming into a second hub, kill Spark in the middle of a batch, start it again, and verify that every "
        "aggregate is there exactly once and in order. Exit code 1 if that is not so.",
    )
    add = parser.add_argument
    add("--spark", action="store_true", help="aggregate the stream on Spark (needs: eventpump[spark,java])")
    add("--events", type=int, metavar="N", help=f"events to publish ({_defaults('events')})")
    add("--partitions", type=int, default=8, metavar="N", help="partitions of each hub (default: %(default)s)")
    add("--seconds", type=float, metavar="S", help=f"time to publish them in ({_defaults('seconds')})")
    add("--seed", type=int, default=7, help="seed of the simulated market (default: %(default)s)")
    add("--transport-type", choices=TRANSPORT_TYPES, default="tcp", help="the transport of AMQP")
    add("--transport", choices=TRANSPORTS, default="native", help="the AMQP implementation of the hosts")
    add("--plain", action="store_true", help="print lines instead of the live table")
    parser.set_defaults(run=run)


def _defaults(option: str) -> str:
    return "default: {:g}; with --spark: {:g}".format(*_SIZES[option])


class Play(Protocol):
    """One demo."""

    @property
    def scene(self) -> Scene:
        """The content of the view."""

    @property
    def announcement(self) -> str:
        """What is shown first: how long it takes."""

    async def play(self, view: View) -> ShownVerdict:
        """Run the demo, and return the verdict. Raises `EventPumpError` if it could not be run."""

    async def stop(self) -> None:
        """End all its processes."""

    def kill(self) -> None:
        """Kill all its processes at once; `stop` is still called."""


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 if every promise was kept, else 1; after a signal, 128 and its number. Raises as `Play.play`."""
    for name, sizes in _SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, sizes[args.spark])
    for name, low, high in (("events", 100, 50_000_000), ("partitions", 1, 32), ("seconds", 1, 3600)):
        if not low <= getattr(args, name) <= high:
            raise ConfigurationError(f"--{name}", f"must lie between {low} and {high}")
    _check_transport(args)
    # Files that Spark's processes write while they end are removed with the rest, or left to the system.
    with (
        _exiting_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="eventpump-demo-", ignore_cleanup_errors=True) as folder,
    ):
        is_plain = args.plain or not sys.stdout.isatty()
        if not args.spark and (is_plain or util.find_spec("rich") is not None):
            # What runs it takes a second to import. Spark's demo first looks for what it needs.
            print("eventpump demo: a local service, three hosts, and a kill; starting", flush=True)
        play = _play_of(args, Path(folder))
        view = view_of(play.scene, is_plain=is_plain)
        return asyncio.run(_run(play, view))


@contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """Have SIGTERM raise `SystemExit`, so that what was made is removed, where no loop runs that handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_transport(args: argparse.Namespace) -> None:
    if args.spark and (args.transport, args.transport_type) != ("native", "tcp"):
        raise ConfigurationError("--spark", "runs on the native transport over TCP")
    if args.transport == "uamqp":
        if args.transport_type == "websocket":
            raise ConfigurationError("--transport", "uamqp does not support WebSockets")
        if util.find_spec("trustme") is None:
            raise ConfigurationError(
                "--transport", "uamqp speaks TLS only, and a certificate needs: pip install trustme"
            )


def _play_of(args: argparse.Namespace, folder: Path) -> Play:
    if args.spark:
        from eventpump.demo.pipeline import Pipeline

        return Pipeline(args, folder)
    began = time.monotonic()
    from eventpump.demo.processing import Processing

    return Processing(args, folder, time.monotonic() - began)


async def _run(play: Play, view: View) -> int:
    """Run a demo to its end, or to a signal: the first ends its processes in order, the second kills them."""
    caught: list[signal.Signals] = []
    work = asyncio.create_task(_play(play, view), name="demo")

    def arrived(number: signal.Signals) -> None:
        caught.append(number)
        if len(caught) == 1:
            work.cancel()
        else:
            play.kill()

    with handling_signals(arrived):
        try:
            return 0 if (await work).holds else 1
        except asyncio.CancelledError:
            if not caught:
                raise
            return 128 + caught[0]


async def _play(play: Play, view: View) -> ShownVerdict:
    try:
        with view:
            view.happened(play.announcement)
            refresh = asyncio.create_task(_refresh(view), name="view")
            try:
                verdict = await play.play(view)
            finally:
                refresh.cancel()
            view.refresh()
            view.end(verdict)
    finally:
        await play.stop()
    return verdict


async def _refresh(view: View) -> None:
    while True:
        view.refresh()
        await asyncio.sleep(_REFRESH)
