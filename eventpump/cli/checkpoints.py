"""`eventpump checkpoints`: show, save, restore, copy and move the checkpoints of a consumer group, of any fleet."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from eventpump.checkpoints import (
    ChangeAction,
    CheckpointChange,
    CheckpointEditor,
    CheckpointExport,
    CheckpointOutcome,
    CheckpointPlan,
)
from eventpump.checkpoints.editor import write_new_file
from eventpump.checkpoints.plan import Start
from eventpump.cli.logs import add_log_option
from eventpump.cli.main import FAILURE
from eventpump.cli.stores import (
    TARGET,
    add_store_options,
    checkpoint_store,
    in_options,
)
from eventpump.cli.streams import (
    add_connection_options,
    add_group_option,
    complain,
    connection_options,
    connection_text,
    hub_name,
    keep_quiet,
    say,
    whole_number,
)
from eventpump.cli.tables import duration, table
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import START_OFFSET
from eventpump.eventhubs.partitions import named_partitions, partition_order
from eventpump.interfaces import ConsumerScope
from eventpump.lag import CheckpointReader, GroupCheckpoints, StoredCheckpoint
from eventpump.texts import excerpt, without_secrets

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the only name of this type

_OPTIONS: Final = {
    "partitions": "--partition",
    "to": "--to",
    "export_to": "--export",
    "rate": "--rate",
    "checkpoints": "checkpoints",
}
_MAX_FILE: Final = 16 << 20
_SHOWN_OFFSET: Final = 32
_CODES: Final = (
    "Exit codes: 0 if every partition is, or would be, as asked; 1 if one was refused, or a request failed; 2 if "
    "nothing can be done with what was given."
)


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "checkpoints",
        help=summary,
        description="Show, save, copy, restore or move the checkpoints of a consumer group: those of eventpump, of "
        "azure-eventhub or any current SDK, or of an EventProcessorHost; those of Azure Functions and of Spark queries "
        "can be shown, saved and copied. What writes prints what it would do, and writes nothing without --yes.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_readers(actions)
    _add_writers(actions)


def _add_readers(actions: Subparsers) -> None:
    listing = actions.add_parser(
        "list",
        help="show the checkpoints",
        description="Print a line for each partition of the hub: number and offset of the last event that is "
        "processed, how old that checkpoint is, and who owns the partition. Nothing is written.",
    )
    export = actions.add_parser(
        "export",
        help="save the checkpoints in a file",
        description="Save the checkpoints in a file, from which import restores them. Nothing else is written.",
    )
    export.add_argument("file", metavar="FILE", help="a new file, or - for the standard output")
    for each in (listing, export):
        add_connection_options(each)
        add_group_option(each, "the consumer group")
        add_log_option(each, default=argparse.SUPPRESS)
        add_store_options(each, is_strict=True)
        _add_partition(each)
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    listing.set_defaults(run=run, work=_list)
    export.set_defaults(run=run, work=_export)


def _add_writers(actions: Subparsers) -> None:
    restore = actions.add_parser(
        "import",
        help="restore the checkpoints that are saved in a file",
        description="Restore the checkpoints that export has saved, or that a command has saved before it wrote: also "
        "that a partition had none. Partitions that are not in the file stay as they are. " + _CODES,
    )
    restore.add_argument("file", metavar="FILE", help="the file")
    copy = actions.add_parser(
        "copy",
        help="store the checkpoints in another store or form",
        description="Store the checkpoints of one store in another, which may have another form. A checkpoint that is "
        "further on there is kept. The source is not changed. " + _CODES,
    )
    reset = actions.add_parser(
        "reset",
        help="have the group begin somewhere else",
        description="Have the consumer group begin somewhere else, in all partitions or in some. " + _CODES,
    )
    for each in (restore, copy, reset):
        add_connection_options(each)
        add_group_option(each, "the consumer group")
        add_log_option(each, default=argparse.SUPPRESS)
    add_store_options(restore, is_written=True, is_strict=True)
    add_store_options(copy, is_strict=True)
    add_store_options(copy, TARGET, is_written=True, is_strict=True)
    add_store_options(reset, is_written=True, is_strict=True)
    reset.add_argument(
        "--to",
        required=True,
        metavar="WHERE",
        help="earliest, latest, a sequence number, or a time with its zone (2026-11-24T10:00:00Z): the event that is "
        "processed next, of a time the first one that was stored then or later",
    )
    reset.add_argument("--new", action="store_true", help="the store may have nothing of the group yet")
    copy.add_argument("--backwards", action="store_true", help="replace checkpoints that are further on, too")
    for each in (copy, reset):
        _add_partition(each)
    for each in (restore, copy, reset):
        each.add_argument("--yes", action="store_true", help="write it")
        each.add_argument(
            "--force",
            action="store_true",
            help="write partitions that a consumer owns, too: a lease is taken from its owner; of v5 the owner writes "
            "its next checkpoint over the new one",
        )
        each.add_argument(
            "--export",
            metavar="FILE",
            help="a new file for what is stored before the first write (default: a name with hub and time)",
        )
        each.add_argument(
            "--reader-group",
            metavar="NAME",
            help="the consumer group in which an event is read where its offset has to be found (default: the group)",
        )
        each.add_argument(
            "--rate", default="25", metavar="N", help="the most requests to the hub per second (default: %(default)s)"
        )
    restore.set_defaults(run=run, work=_import)
    copy.set_defaults(run=run, work=_copy)
    reset.set_defaults(run=run, work=_reset)


def _add_partition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--partition", action="append", metavar="ID", help="only this partition; may be given again (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    """Plan the change and carry it out; return the exit code. Raises `EventPumpError` if nothing was done."""
    work: Callable[[argparse.Namespace], Awaitable[int]] = args.work
    keep_quiet()

    async def awaited() -> int:
        return await work(args)

    try:
        return asyncio.run(awaited())
    except ConfigurationError as error:
        start = TARGET if work is _copy else ""
        raise in_options(error, _OPTIONS, start) from None


def _editor(args: argparse.Namespace, checkpoints: CheckpointReader) -> CheckpointEditor:
    return CheckpointEditor(
        connection_text(args),
        hub_name(args),
        checkpoints=checkpoints,
        consumer_group=args.consumer_group,
        reader_group=getattr(args, "reader_group", None),
        rate=whole_number("--rate", getattr(args, "rate", "25"), 1, 1000),
        **connection_options(args),
    )


# ---------------------------------------------------------------------------------------------------------- reading


async def _list(args: argparse.Namespace) -> int:
    async with _editor(args, checkpoint_store(args)) as editor:
        partition_ids, stored = await editor.read(args.partition)
        if args.json:
            say(json.dumps(document(editor.scope, partition_ids, stored), ensure_ascii=False))
            return 0
        for line in lines(editor.scope, partition_ids, stored, datetime.now(UTC), _width()):
            say(line)
    return 0


async def _export(args: argparse.Namespace) -> int:
    if args.file != "-" and await asyncio.to_thread(os.path.exists, args.file):
        raise ConfigurationError("FILE", f"{args.file}: exists already; give the name of a new file")
    async with _editor(args, checkpoint_store(args)) as editor:
        export = await editor.export(args.partition)
    if args.file == "-":
        say(export.encode().rstrip("\n"))
        return 0
    await asyncio.to_thread(write_new_file, args.file, export.encode())
    count = sum(each is not None for each in export.partitions.values())
    say(f"{_count(count)} in {without_secrets(args.file)}")
    return 0


# ---------------------------------------------------------------------------------------------------------- writing


async def _import(args: argparse.Namespace) -> int:
    export = CheckpointExport.decode(await asyncio.to_thread(_content, args.file), args.file)
    async with _editor(args, checkpoint_store(args, may_be_new=True)) as editor:
        return await carry_out(args, editor, await editor.plan_import(export, name=args.file, force=args.force))


async def _copy(args: argparse.Namespace) -> int:
    source = _Source(checkpoint_store(args))
    try:
        async with _editor(args, checkpoint_store(args, TARGET, may_be_new=True)) as editor:
            plan = await editor.plan_copy(source, partitions=args.partition, force=args.force, backwards=args.backwards)
            return await carry_out(args, editor, plan)
    finally:
        await source.aclose()


async def _reset(args: argparse.Namespace) -> int:
    to = _start(args.to)
    async with _editor(args, checkpoint_store(args, may_be_new=args.new)) as editor:
        plan = await editor.plan_reset(to, partitions=args.partition, force=args.force, is_new=args.new)
        return await carry_out(args, editor, plan)


async def carry_out(args: argparse.Namespace, editor: CheckpointEditor, plan: CheckpointPlan) -> int:
    """Show a plan, and write it if that is asked for; return the exit code."""
    if not args.yes:
        for line in plan_lines(plan, _width()):
            say(line)
        return FAILURE if plan.having(ChangeAction.REFUSE) else 0
    path = args.export or _export_name(plan.scope, datetime.now(UTC))
    for line in plan_lines(plan, _width(), is_written=True):
        say(line)
    try:
        outcome = await editor.apply(plan, export_to=path)
    except asyncio.CancelledError:
        if plan.having(ChangeAction.WRITE) and os.path.exists(path):  # noqa: ASYNC240 - as the process ends
            complain(f"stopped: some checkpoints may be written; {_how_to_go_on(path)}")
        raise
    for line in outcome_lines(plan, outcome, _width()):
        say(line)
    for text in failures(outcome):
        complain(text)
    return 0 if outcome.is_complete else FAILURE


def failures(outcome: CheckpointOutcome) -> list[str]:
    """Return what failed, and how to go on; nothing if nothing did."""
    if not outcome.failed:
        return []
    assert outcome.export is not None
    left = f"{named_partitions(outcome.left)} not tried" if outcome.left else "every other one was tried"
    return [*outcome.failed.values(), f"it may be written or not, and {left}; {_how_to_go_on(outcome.export)}"]


def _how_to_go_on(path: str) -> str:
    return (
        f"the same command again writes the rest, and `eventpump checkpoints import {path} --yes` with the same store "
        "and group restores what was there before"
    )


class _Source:
    """A `CheckpointReader` of the store that is copied from: errors of its options name those, and not the target's."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        try:
            return await self._reader.read(scope, partition_ids)
        except ConfigurationError as error:
            raise in_options(error, {}) from None

    async def aclose(self) -> None:
        await self._reader.aclose()


def _start(text: str) -> Start:
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.isascii() and text.isdigit():
        return whole_number("--to", text, 0, 2**63 - 1)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        problem = "must be earliest, latest, a sequence number or a time with its zone, such as 2026-11-24T10:00:00Z"
        raise ConfigurationError("--to", f"{problem}, not {excerpt(text, 40)}") from None


def _content(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError("FILE", f"{path}: {reason}") from None
    if len(content) > _MAX_FILE:
        raise ConfigurationError("FILE", f"{path}: is too large to be an export of checkpoints")
    return content


def _export_name(scope: ConsumerScope, now: datetime) -> str:
    names = re.sub(r"[^\w.$-]", "-", f"{scope.hub}-{scope.consumer_group}".replace("$", ""))
    return f"checkpoints-{names}-{now:%Y%m%dT%H%M%SZ}.json"


# ---------------------------------------------------------------------------------------------------- what is shown


def document(scope: ConsumerScope, partition_ids: Iterable[str], stored: GroupCheckpoints) -> dict[str, Any]:
    """Return what a store has as JSON values."""
    found = stored.partitions
    return {
        "namespace": scope.fully_qualified_namespace,
        "hub": scope.hub,
        "consumer_group": scope.consumer_group,
        "partitions": {each: _partition(found[each]) if each in found else None for each in partition_ids},
        "notes": list(stored.notes),
    }


def _partition(each: StoredCheckpoint) -> dict[str, Any]:
    return {
        "sequence_number": each.sequence_number,
        "offset": each.offset,
        "written_at": None if each.written_at is None else each.written_at.isoformat(),
        "format": each.format,
        "place": each.place,
        "owner": each.owner,
        "is_owned": each.is_owned,
        "problem": each.problem,
    }


def lines(
    scope: ConsumerScope,
    partition_ids: Sequence[str],
    stored: GroupCheckpoints,
    now: datetime,
    width: int | None = None,
) -> list[str]:
    """Return what a store has as a table, and the notes."""
    rows, notes = [], list(stored.notes)
    for partition_id in partition_ids:
        each = stored.partitions.get(partition_id)
        written_at = None if each is None or not each.is_usable else each.written_at
        age = "" if written_at is None else duration(max(0.0, (now - written_at).total_seconds()))
        offset = "" if each is None or each.offset is None else excerpt(each.offset, _SHOWN_OFFSET)
        owner = "" if each is None or not each.is_owned else excerpt(each.owner or "?")
        rows.append([partition_id, _shown(each), offset, age, owner])
        if each is not None and each.problem is not None:
            notes.append(f"partition {partition_id}: {each.place}: {each.problem}")
    count = sum(each.is_usable for each in stored.partitions.values())
    title = f"{_place(scope)}: {_count(count)} for {len(partition_ids)} partitions"
    shown = table(("partition", "checkpoint", "offset", "age", "owner"), rows, ("owner",))
    return [title, "", *shown, *(["", *_wrapped(map(without_secrets, notes), width)] if notes else [])]


def plan_lines(plan: CheckpointPlan, width: int | None, *, is_written: bool = False) -> list[str]:
    """Return a plan as a table, why partitions are refused, and the notes.

    Args:
        width: Columns of the terminal; None for none.
        is_written: Whether it is going to be written. Default: False.
    """
    counts = [(len(plan.having(action)), name) for action, name in _COUNTED]
    title = f"{_place(plan.scope)}: " + ", ".join(f"{count:,} {name}" for count, name in counts if count)
    rows = [
        [
            each.partition_id,
            _shown(each.before),
            "?" if each.after is None and each.reason is not None else _to(each),
            _effect(each),
            each.action.value,
        ]
        for each in plan.changes
    ]
    shown = table(("partition", "from", "to", "events", "result"), rows, ("result",))
    reasons = {each.partition_id: each.reason or "" for each in plan.having(ChangeAction.REFUSE)}
    notes = [*_grouped(reasons), *map(without_secrets, plan.notes)]
    if not is_written and plan.having(ChangeAction.WRITE):
        notes.append("Nothing is written without --yes.")
    return [title, "", *shown, *(["", *_wrapped(notes, width)] if notes else [])]


_COUNTED: Final = (
    (ChangeAction.WRITE, "to write"),
    (ChangeAction.KEEP, "unchanged"),
    (ChangeAction.REFUSE, "refused"),
)


def outcome_lines(plan: CheckpointPlan, outcome: CheckpointOutcome, width: int | None) -> list[str]:
    """Return what was written, and what was refused since the plan was made."""
    planned = {each.partition_id for each in plan.having(ChangeAction.REFUSE)}
    later = {each: reason for each, reason in outcome.refused.items() if each not in planned}
    notes = _grouped(later)
    if outcome.export is not None:
        notes.append(
            f"{_count(len(outcome.written))} written. What was there before is in {without_secrets(outcome.export)}."
        )
    return ["", *_wrapped(notes, width)] if notes else []


def _grouped(reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each reason, with its partitions."""
    partitions: dict[str, list[str]] = {}
    for partition_id, reason in sorted(reasons.items(), key=lambda each: partition_order(each[0])):
        partitions.setdefault(reason, []).append(partition_id)
    return [
        f"{named_partitions(each)} refused: {without_secrets(excerpt(reason, 1000))}"
        for reason, each in partitions.items()
    ]


def _place(scope: ConsumerScope) -> str:
    return f"hub {excerpt(scope.hub)}, consumer group {excerpt(scope.consumer_group)}"


def _count(count: int) -> str:
    return f"{count:,} checkpoint{'' if count == 1 else 's'}"


def _shown(each: StoredCheckpoint | None) -> str:
    if each is None or not each.is_usable:
        return "none"
    if each.offset == START_OFFSET:
        return "start"
    if each.sequence_number is None:
        return f"offset {excerpt(each.offset or '', 20)}"
    return f"{each.sequence_number:,}" if each.offset is not None else f"{each.sequence_number:,} (no offset)"


def _to(each: CheckpointChange) -> str:
    if each.after is None:
        return "none"
    return "start" if each.after.offset == START_OFFSET else f"{each.after.sequence_number:,}"


def _effect(each: CheckpointChange) -> str:
    if not each.moved:
        return ""
    return f"{-each.moved:,} again" if each.moved < 0 else f"{each.moved:,} skipped"


def _wrapped(notes: Iterable[str], width: int | None) -> list[str]:
    if width is None:
        return list(notes)
    # Names of blobs and files stay whole: they are copied.
    whole = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line for note in notes for line in whole.wrap(note)]


def _width() -> int | None:
    """Return the columns of the terminal; None if the output is none."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
