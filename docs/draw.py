"""Draws the diagrams of the pages: `python docs/draw.py` writes them to docs/diagrams/.

The layers are read from the import contract in pyproject.toml, the lives and the times are below. The same input gives
the same bytes; `tests/test_documents.py` fails if a drawing in the repository is not what this script draws.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs/diagrams"

Kind: TypeAlias = Literal["decides", "acts", "values", "outside"]
"""What a part is for. The contract in pyproject.toml says which packages decide."""

KINDS: Final[Mapping[Kind, str]] = {
    "decides": "decides: no I/O, clock or logger",
    "acts": "acts: asyncio, I/O, threads",
    "values": "values and types",
    "outside": "not the library",
}

PURPOSES: Final[Mapping[str, str]] = {
    "health": "probes and metrics over HTTP",
    "probe": "observes the service",
    "doctor": "examines what a program needs",
    "checkpoints": "moves and restores checkpoints",
    "lag": "how far a group is behind",
    "cli": "the eventpump command",
    "demo": "what eventpump demo runs",
    "app": "decorated functions",
    "spark": "streaming source and foreachBatch sink",
    "clients": "the public classes, put together",
    "testing": "fixtures, fakes, contract suites for users",
    "sources": "events that come from elsewhere",
    "consumer": "host, leases, pumps, reader",
    "producer": "plain, idempotent and buffered sending",
    "transport": "connection, links, tokens, requests",
    "storage": "leases, publisher states, ledgers",
    "emulator": "the local service",
    "net": "TCP, TLS, proxies, WebSockets",
    "aio": "retries, tasks, waits",
    "credentials": "the names of credentials",
    "options": "options and credentials, checked once",
    "telemetry": "spans and metrics with OpenTelemetry",
    "interfaces": "what can be replaced",
    "reports": "host events: hooks, log",
    "clock": "the time, suspension included",
    "cancellation": "cancelled, or failed?",
    "logs": "log lines of several packages",
    "core": "leases, credit, back-off, checkpoints, numbering, routing",
    "eventhubs": "Event Hubs on AMQP: events, addresses, filters, envelopes, signatures, conditions",
    "amqp": "AMQP 1.0 in both roles: codec, connection, sessions, links",
    "errors": "the error tree, and Recovery",
    "texts": "texts of a peer, shortened and escaped",
    "compiled": "the compiled core, or none",
    "homes": "public names, and their modules",
}
"""What each package or module of the layers contract is for."""

VALUES: Final = frozenset({"credentials", "options", "interfaces", "errors", "texts", "compiled", "homes"})


class Node(NamedTuple):
    """One step of a life.

    Attributes:
        where: The module, or who acts.
        kind: See `Kind`.
        text: What happens there.
        column: 0 for the left one, 1 for the right one; None for a node that spans both.
    """

    where: str
    kind: Kind
    text: str
    column: int | None = None


Row: TypeAlias = Sequence[Node]

RECEIVED: Final[Sequence[Row]] = (
    [Node("the service", "outside", "sends transfers while the link has credit")],
    [Node("net/stream.py", "acts", "data_received hands over up to 256 KiB; no read while the engine is behind")],
    [
        Node(
            "amqp/connection.py",
            "decides",
            "receive walks the frames: a run of plain transfers costs one slice each, other frames are decoded; "
            "one Messages(link, payloads) per link and read",
        )
    ],
    [Node("transport/connection.py, links.py", "acts", "gives the list to the sink of its link")],
    [
        Node(
            "consumer/link/feed.py",
            "acts",
            "appends the list to the cache (core/cache.py), sets the credit that "
            "core/credit.py allows, wakes the pump once",
        )
    ],
    [
        Node(
            "consumer/pump/delivery.py",
            "acts",
            "takes up to max_batch_size from the cache, which creates the ReceivedEvents",
        )
    ],
    [
        Node(
            "consumer/pump/dispatch.py", "acts", "checks that the lease is alive, and has handler.py call the processor"
        )
    ],
    [Node("your process_events", "outside", "the first read of a field scans the message once (amqp/sections.py)")],
    [Node("core/checkpoint.py", "decides", "after it returned: is a checkpoint due, and where?")],
    [
        Node(
            "consumer/record/checkpoints.py",
            "acts",
            "one write in flight, the newest wins; the lease store fences it by the lease",
        )
    ],
)

SENT: Final[Sequence[Row]] = (
    [
        Node("EventProducer.send", "outside", "a batch, or a list of events", 0),
        Node("BufferedProducer.send", "outside", "one event; returns a receipt", 1),
    ],
    [
        Node("producer/batch.py", "acts", "try_add encodes the event and adds up the exact size on the wire", 0),
        Node(
            "producer/buffered.py",
            "acts",
            "core/router.py chooses the partition, BufferRoom gives room, producer/accumulator.py the batch; "
            "a full, due or flushed batch goes on",
            1,
        ),
    ],
    [
        Node(
            "eventhubs/sealing.py", "decides", "joins the encoded events once: from here on bytes and members are fixed"
        )
    ],
    [Node("producer/producer.py", "acts", "chooses the target: gateway or partition, plain or idempotent")],
    [
        Node("plain", "acts", "the target's link; tried again as Recovery and RetryOptions say", 0),
        Node(
            "producer/publisher.py",
            "acts",
            "idempotent: core/sequencer.py says the next step (attach, send, wait, fail); numbers are written in place",
            1,
        ),
    ],
    [Node("transport/links.py", "acts", "one delivery per message, waits for credit and for the outcome")],
    [Node("amqp/link.py, session.py, connection.py", "decides", "cuts the message to frames within the window")],
    [Node("net/stream.py", "acts", "writes chunks of about 64 KiB, while the peer reads")],
    [Node("the service", "outside", "accepted, or an AMQP condition that eventhubs/conditions.py maps to an error")],
)

ROW: Final[Sequence[Row]] = (
    [
        Node("source, driver", "outside", "Spark asks for the next offsets", 0),
        Node("sink, driver", "outside", "Spark calls foreachBatch", 1),
    ],
    [
        Node("spark/source/known_hubs.py", "decides", "keeps a snapshot of each hub's first and last numbers", 0),
        Node(
            "spark/sink/encode.py, kept.py",
            "acts",
            "in executors: each row's event and partition; rows are written in their order, by partition",
            1,
        ),
    ],
    [
        Node("spark/source/offsets.py", "decides", "plans ranges: checkpoint, limits, losses, tasks", 0),
        Node(
            "spark/sink/protocol.py",
            "decides",
            "the plan, stored before a row is sent: what was written; per partition a producer and the first number",
            1,
        ),
    ],
    [
        Node("spark/source/receive.py", "acts", "in executors: ranges from the cache, a kept link, or a new one", 0),
        Node(
            "spark/sink/attempt.py, exactly_once.py",
            "acts",
            "asks the service how far the batch is, sends the rest, each row under its own number",
            1,
        ),
    ],
    [
        Node(
            "spark/source/columnar.py, rows.py",
            "decides",
            "raw messages to Arrow, a column at a time; columns that are not asked for are not read",
            0,
        ),
        Node(
            "spark/sink/protocol.py",
            "decides",
            "finish, in the driver: checks the receipts, stores one record, done or taken over",
            1,
        ),
    ],
    [
        Node("Spark", "outside", "RecordBatches", 0),
        Node("storage/ledgers/", "acts", "keeps plans and records, each created once", 1),
    ],
)

BATCH: Final[Sequence[Row]] = (
    [
        Node("Spark calls foreachBatch", "outside", "batch 7; its rows are encoded, and kept in their order", 0),
        Node("why it is repeated", "values", "Spark has not noted that batch 7 ended: a crash, a failed task", 1),
    ],
    [
        Node(
            "plan",
            "acts",
            "the ledger gets a record, created once: for each partition the producer, and the number of its first row. "
            "Nothing is sent before",
            0,
        ),
        Node(
            "a crash before it, or here",
            "values",
            "nothing was sent; the repeated batch makes the plan, or finds it, and the rows that it names",
            1,
        ),
    ],
    [
        Node(
            "send",
            "acts",
            "for each partition the service states the last number it has stored; the rows after it are sent, each "
            "under its own number",
            0,
        ),
        Node(
            "a crash, a lost answer, two attempts at once",
            "values",
            "the same row always has the same number: what is stored is skipped, and what arrives late is refused",
            1,
        ),
    ],
    [
        Node(
            "record",
            "acts",
            "the ledger gets a second record: the next numbers, and counts of rows; the kept rows are deleted",
            0,
        ),
        Node("a crash after it", "values", "the repeated batch finds the record, and sends nothing", 1),
    ],
    [
        Node("Spark commits batch 7", "outside", "to its checkpoint; batch 8 continues with the recorded numbers", 0),
        Node(
            "checkpoint or ledger is lost", "values", "the other one does not fit it: the query fails, and says so", 1
        ),
    ],
)

BUFFER: Final[Sequence[Row]] = (
    [
        Node("await producer.send(event)", "outside", "returns a receipt once the buffer has room for the event", 0),
        Node("the buffer is full", "values", "send waits, so that the program slows down; send_nowait raises", 1),
    ],
    [
        Node("in the batch of its partition", "acts", "the router has chosen it: by key, or in turn", 0),
        Node("flush, or aclose", "values", "sends what there is; aclose waits for all outcomes", 1),
    ],
    [
        Node("sent", "acts", "when the batch is full, or its first event has waited for max_wait_time", 0),
        Node("busy service, lost connection", "values", "sent again, as retry says; batches keep their order", 1),
    ],
    [
        Node("stored", "outside", "the receipt has its partition, on_success is called, the room is free again", 0),
        Node("refused, or retries exhausted", "values", "await receipt raises the error, and on_error is called", 1),
    ],
)


class Span(NamedTuple):
    """What is the case on a lane for some time.

    Attributes:
        begin: When it begins, from 0 to 100.
        end: When it ends.
        kind: Its color: a number for who does it, "none" for a gap, or "kept" for what is stored.
        text: What is written on it.
    """

    begin: float
    end: float
    kind: Literal["one", "two", "three", "none", "kept"]
    text: str


class Times(NamedTuple):
    """Lanes over time, from left to right.

    Attributes:
        title: The title, which is the text alternative too.
        lanes: The name of each, and its spans.
        marks: Moments, and what happens then.
        notes: Sentences below.
    """

    title: str
    lanes: Sequence[tuple[str, Sequence[Span]]]
    marks: Sequence[tuple[float, str]]
    notes: Sequence[str]


LEASES: Final = Times(
    "Leases and epochs: a host is killed, and another one takes its partition over",
    [
        ("lease of partition 0", [Span(0, 100, "one", "host-1, epoch 4: renewed every third of its duration")]),
        (
            "lease of partition 1",
            [
                Span(0, 30, "two", "host-2, epoch 7"),
                Span(30, 58, "none", "not renewed"),
                Span(58, 100, "one", "host-1, epoch 8"),
            ],
        ),
        (
            "link of partition 1",
            [
                Span(0, 30, "two", "owner level 7"),
                Span(62, 100, "one", "owner level 8, from the checkpoint"),
            ],
        ),
        (
            "if host-2 only stood still",
            [
                Span(0, 30, "two", "epoch 7"),
                Span(62, 100, "none", "delivers nothing under epoch 7"),
            ],
        ),
    ],
    [(30, "host-2 is killed"), (58, "the lease expires")],
    ["Two hosts never deliver under one epoch. The events after the last checkpoint are delivered again, by host-1."],
)

SUBSCRIPTIONS: Final = Times(
    "Three subscriptions of a partition on one link: each has its own position in the cache",
    [
        ("cache of the link", [Span(22, 100, "kept", "events 100 to 180: received once, decoded once")]),
        ("alerts", [Span(0, 100, "one", "has processed up to 180")]),
        ("totals", [Span(0, 84, "three", "has processed up to 164")]),
        ("archive, a slow one", [Span(0, 22, "two", "up to 100")]),
    ],
    [(22, "the slowest position"), (100, "")],
    [
        "The cache keeps what the slowest one has not had. When it is full the link stops, and the others wait,",
        "until the slow one has gone on, is suspended, or reads over a link of its own.",
    ],
)

KEYED: Final = Times(
    "Keyed order: keys at the same time, each in order, and the checkpoint behind the first unprocessed event",
    [
        ("key A", [Span(0, 24, "one", "event 1"), Span(26, 52, "one", "event 4"), Span(54, 78, "one", "event 6")]),
        ("key B", [Span(0, 66, "two", "event 2, which takes long"), Span(68, 92, "two", "event 5")]),
        ("key C", [Span(0, 36, "three", "event 3")]),
        (
            "may be checkpointed",
            [
                Span(24, 66, "kept", "1, as 2 is not done"),
                Span(66, 92, "kept", "4, as 5 is not done"),
                Span(92, 100, "kept", "6"),
            ],
        ),
    ],
    [(66, "2 is processed")],
    ["After a crash, the events behind the checkpoint are delivered again, and those of a key in the same order."],
)

FLEETS: Final = Times(
    "A mixed fleet: eventpump joins one of azure-eventhub, takes its share, and in the end all partitions",
    [
        ("partition 0", [Span(0, 72, "two", "azure-eventhub, member A"), Span(74, 100, "one", "eventpump")]),
        ("partition 1", [Span(0, 26, "two", "member A"), Span(28, 100, "one", "eventpump, from A's checkpoint")]),
        ("partition 2", [Span(0, 46, "two", "azure-eventhub, member B"), Span(48, 100, "one", "eventpump")]),
        ("partition 3", [Span(0, 46, "two", "member B"), Span(48, 72, "two", "A"), Span(74, 100, "one", "eventpump")]),
        ("one container", [Span(0, 100, "kept", "ownership and checkpoints of all members, in the form of the SDKs")]),
    ],
    [(22, "eventpump joins"), (46, "B is stopped"), (72, "A is stopped")],
    ["Each member begins at the checkpoint of the one before it. The way back is the same, the other way round."],
)

RESTART: Final = Times(
    "A batch of Spark that is killed and repeated: what is stored is not sent again",
    [
        ("driver", [Span(0, 44, "one", "batch 7"), Span(56, 100, "one", "batch 7 again, with the same rows")]),
        ("ledger", [Span(6, 92, "kept", "the plan: first numbers per partition"), Span(93, 100, "kept", "done")]),
        ("partition 0, 40 rows", [Span(10, 30, "three", "1 to 40 stored"), Span(62, 74, "none", "has 40")]),
        (
            "partition 1, 60 rows",
            [
                Span(10, 44, "three", "1 to 25 stored"),
                Span(62, 70, "none", "has 25"),
                Span(70, 90, "three", "26 to 60"),
            ],
        ),
    ],
    [(44, "killed"), (56, "restarted")],
    ["Each row has its number by the plan. The repeated batch asks the service for the last number that it has."],
)

_STYLE: Final = """
  text { font-family: "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328; }
  .name { font-weight: 600; font-size: 13px; }
  .page { fill: #ffffff; stroke: #d1d9e0; }
  .decides { fill: #ddf4e4; stroke: #2da44e; }
  .acts { fill: #ddeeff; stroke: #0969da; }
  .values { fill: #eff1f3; stroke: #818b98; }
  .outside { fill: #fff1d6; stroke: #bf8700; }
  .arrow { stroke: #59636e; stroke-width: 1.5; fill: none; }
  .head { fill: #59636e; }
  .lane { fill: #ffffff; font-size: 11.5px; font-weight: 600; }
  .one { fill: #0969da; }
  .two { fill: #bc4c00; }
  .three { fill: #1a7f37; }
  .kept { fill: #59636e; }
  .none { fill: #eff1f3; stroke: #818b98; stroke-dasharray: 3 3; }
  .lane.on-none { fill: #1f2328; font-weight: 400; }
  .mark { stroke: #1f2328; stroke-width: 1.5; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .lane { fill: #ffffff; }
    .none { fill: #262c36; }
    .lane.on-none { fill: #f0f6fc; }
    .mark { stroke: #f0f6fc; }
    .page { fill: #0d1117; stroke: #3d444d; }
    .decides { fill: #12361f; }
    .acts { fill: #10294a; }
    .values { fill: #262c36; }
    .outside { fill: #3d2c00; }
    .arrow { stroke: #9198a1; }
    .head { fill: #9198a1; }
  }
"""

_MARGIN, _GAP, _WIDTH = 20, 26, 760
_LINE, _PAD = 16, 10
_CHARACTER = 6.4
"""How wide a character of the text is taken to be, in pixels: a little more than the fonts above need."""


def _contracts() -> list[dict[str, Any]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    return contracts


def layers() -> list[list[str]]:
    """Return the layers of the import contract, the highest first, each with its siblings."""
    (contract,) = (each for each in _contracts() if each.get("containers") == ["eventpump"])
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def deciding() -> set[str]:
    """Return the packages that may not import asyncio: those that decide."""
    (contract,) = (each for each in _contracts() if "asyncio" in each.get("forbidden_modules", ()))
    return {module.removeprefix("eventpump.") for module in contract["source_modules"]}


def _box(x: float, y: float, width: float, height: float, kind: Kind, name: str, lines: Iterable[str]) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    middle = x + width / 2
    yield f'<text class="name" x="{middle:g}" y="{y + _PAD + 11:g}" text-anchor="middle">{escape(name)}</text>'
    for number, line in enumerate(lines, 1):
        at = y + _PAD + 11 + number * _LINE
        yield f'<text x="{middle:g}" y="{at:g}" text-anchor="middle">{escape(line)}</text>'


def _arrow(x: float, top: float, to: float, bottom: float) -> Iterator[str]:
    bend = (top + bottom) / 2
    yield f'<path class="arrow" d="M{x:g} {top:g} V{bend:g} H{to:g} V{bottom - 6:g}"/>'
    yield f'<path class="head" d="M{to - 4:g} {bottom - 7:g} h8 l-4 7 z"/>'


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, int((width - 2 * _PAD) / _CHARACTER), break_long_words=False)


def _legend(y: float, kinds: Collection[Kind]) -> Iterator[str]:
    x = float(_MARGIN)
    for kind, meaning in KINDS.items():
        if kind not in kinds:
            continue
        yield f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="14" height="14" rx="3"/>'
        yield f'<text x="{x + 20:g}" y="{y + 11:g}">{escape(meaning)}</text>'
        x += 50 + len(meaning) * 6


def _page(title: str, height: float, parts: Iterable[str]) -> str:
    width = _WIDTH + 2 * _MARGIN
    size = f'width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1:g}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def draw_layers(contract: Sequence[Sequence[str]], decide: Collection[str]) -> str:
    """Draw a row per layer, the highest first.

    Args:
        contract: The layers with their siblings.
        decide: Those that decide.

    Raises:
        KeyError: `PURPOSES` lacks a package.
    """
    parts: list[str] = []
    y = float(_MARGIN)
    middle = _MARGIN + _WIDTH / 2
    kinds: dict[str, Kind] = {
        name: "decides" if name in decide else "values" if name in VALUES else "acts"
        for siblings in contract
        for name in siblings
    }
    for number, siblings in enumerate(contract):
        width = (_WIDTH - (len(siblings) - 1) * 8) / len(siblings)
        texts = [_wrapped(PURPOSES[name], width) for name in siblings]
        height = 2 * _PAD + 14 + max(map(len, texts)) * _LINE
        if number:
            parts += _arrow(middle, y - 18, middle, y)
        for place, (name, lines) in enumerate(zip(siblings, texts, strict=True)):
            parts += _box(_MARGIN + place * (width + 8), y, width, height, kinds[name], name, lines)
        y += height + 18
    parts += _legend(y, set(kinds.values()))
    return _page("The layers of eventpump: imports point down only", y + 14 + _MARGIN, parts)


def draw_life(title: str, rows: Sequence[Row]) -> str:
    """Draw the steps of a life from top to bottom.

    Args:
        title: The title of the picture.
        rows: What happens, the first step first; two nodes in a row are two ways.
    """
    parts: list[str] = []
    y = float(_MARGIN)
    half = (_WIDTH - 20) / 2
    above: list[tuple[int | None, float, float]] = []
    for row in rows:
        below: list[tuple[int | None, float, float]] = []
        boxes = []
        for node in row:
            width = half if node.column is not None else _WIDTH * 0.78
            x = _MARGIN + (_WIDTH - width) / 2 if node.column is None else _MARGIN + node.column * (half + 20)
            boxes.append((node, x, width, _wrapped(node.text, width)))
        height = 2 * _PAD + 14 + max(len(lines) for *_, lines in boxes) * _LINE
        for node, x, width, lines in boxes:
            parts += _box(x, y, width, height, node.kind, node.where, lines)
            middle = x + width / 2
            for column, from_x, bottom in above:
                if column is None or node.column is None or column == node.column:
                    parts += _arrow(from_x, bottom, middle if node.column is not None else from_x, y)
            below.append((node.column, middle, y + height))
        above = below
        y += height + _GAP
    y += 4 - _GAP + 14
    parts += _legend(y, {node.kind for row in rows for node in row})
    return _page(title, y + 14 + _MARGIN, parts)


def draw_steps(title: str, rows: Sequence[Row]) -> str:
    """Draw steps from top to bottom, and beside each what else can happen there.

    Args:
        title: The title of the picture.
        rows: A step, and what is beside it, each.
    """
    parts: list[str] = []
    y = float(_MARGIN)
    half = (_WIDTH - 40) / 2
    middle = _MARGIN + half / 2
    for number, row in enumerate(rows):
        texts = [_wrapped(node.text, half) for node in row]
        height = 2 * _PAD + 14 + max(map(len, texts)) * _LINE
        if number:
            parts += _arrow(middle, y - _GAP, middle, y)
        for node, lines in zip(row, texts, strict=True):
            parts += _box(_MARGIN + (node.column or 0) * (half + 40), y, half, height, node.kind, node.where, lines)
        parts.append(f'<path stroke="#818b98" stroke-dasharray="3 3" d="M{_MARGIN + half:g} {y + height / 2:g} h40"/>')
        y += height + _GAP
    return _page(title, y - _GAP + _MARGIN, parts)


_NAMES, _LANE = 160, 34
"""The width of the names of lanes, and the height of a lane."""


def draw_times(times: Times) -> str:
    """Draw lanes over time."""
    top = _MARGIN + 52
    left, right = _MARGIN + _NAMES, _MARGIN + _WIDTH
    bottom = top + len(times.lanes) * _LANE

    def at(time: float) -> float:
        return round(left + time / 100 * (right - left), 1)

    parts = [f'<text class="name" x="{_MARGIN}" y="{_MARGIN + 12}">{escape(times.title)}</text>']
    for time, text in times.marks:
        parts.append(f'<path class="mark" d="M{at(time):g} {top - 8} V{bottom + 4}"/>')
        parts.append(f'<text x="{at(time):g}" y="{top - 14}" text-anchor="middle">{escape(text)}</text>')
    for number, (name, spans) in enumerate(times.lanes):
        y = top + number * _LANE
        parts.append(f'<text x="{_MARGIN}" y="{y + 20}">{escape(name)}</text>')
        for begin, end, kind, text in spans:
            x, width = at(begin), round(at(end) - at(begin), 1)
            assert len(text) * _CHARACTER <= width, f"{name}: {text}"
            parts.append(f'<rect class="{kind}" x="{x:g}" y="{y + 4}" width="{width:g}" height="{_LANE - 8}" rx="4"/>')
            place = f'x="{x + width / 2:g}" y="{y + 21}" text-anchor="middle"'
            parts.append(f'<text class="lane on-{kind}" {place}>{escape(text)}</text>')
    y = bottom + 6
    for note in times.notes:
        y += _LINE
        parts.append(f'<text x="{_MARGIN}" y="{y}">{escape(note)}</text>')
    return _page(times.title, y + _MARGIN, parts)


def drawings() -> dict[str, str]:
    """Return the drawings by the name of their file."""
    return {
        "buffer.svg": draw_steps("The life of an event in the buffer", BUFFER),
        "fleets.svg": draw_times(FLEETS),
        "keyed.svg": draw_times(KEYED),
        "leases.svg": draw_times(LEASES),
        "spark-restart.svg": draw_times(RESTART),
        "subscriptions.svg": draw_times(SUBSCRIPTIONS),
        "layers.svg": draw_layers(layers(), deciding()),
        "received-event.svg": draw_life("The life of a received event", RECEIVED),
        "sent-event.svg": draw_life("The life of a sent event", SENT),
        "row.svg": draw_life("The life of a row of Spark", ROW),
        "spark-batch.svg": draw_steps("A batch that is published exactly once: plan, send, record", BATCH),
    }


def main() -> None:
    """Write the drawings."""
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (FOLDER / name).write_text(drawing, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
