"""The public names by subject, and tables of options, for the API reference of the site (`docs/conf.py`)."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import eventpump
from eventpump.cli import main as cli
from eventpump.core.balancers import FairBalancer
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.eventhubs.events import EventPosition
from eventpump.options.consumer import HostOptions, ReaderOptions
from eventpump.options.described import option_texts
from eventpump.options.producer import BufferedOptions, ProducerOptions

SUBJECTS: Final[Mapping[str, Sequence[str]]] = {
    "clients": (
        "EventProcessorHost",
        "PartitionReader",
        "EventProducer",
        "BufferedProducer",
        "EventHubsApp",
        "make_transport",
    ),
    "processing": (
        "EventProcessor",
        "KeyedProcessor",
        "PartitionContext",
        "ReceivedBatch",
        "CloseReason",
        "CheckpointPolicy",
        "Park",
    ),
    "events": (
        "EventData",
        "ReceivedEvent",
        "EventBatch",
        "EventPosition",
        "SendResult",
        "DeliveryReceipt",
        "CloudEvent",
        "PayloadDecoder",
        "PayloadCodec",
    ),
    "options": ("RetryOptions",),
    "routers": ("HashRouter", "RoundRobinRouter", "StickyRouter", "RingRouter"),
    "balancers": ("FairBalancer", "GreedyBalancer", "RingBalancer", "StaticAssignment"),
    "sources": (
        "EventHubSource",
        "GeneratorSource",
        "MemorySource",
        "CaptureSource",
        "CaptureFiles",
        "CaptureContainer",
    ),
    "stores": (
        "SqliteLeaseStore",
        "BlobLeaseStore",
        "MemoryLeaseStore",
        "MemoryLeases",
        "SqlitePublisherStateStore",
        "BlobPublisherStateStore",
        "MemoryPublisherStateStore",
    ),
    "emulator": ("Emulator",),
    "errors": (
        "EventPumpError",
        "ConfigurationError",
        "AuthenticationError",
        "EntityNotFoundError",
        "ServiceError",
        "StoreError",
        "EventError",
        "EventTooLargeError",
        "DecodeError",
        "BufferFullError",
        "DataLossError",
        "ProducerDisconnectedError",
        "PublishOutcomeUnknownError",
    ),
}
"""The names of `eventpump` by subject, in the order in which they are documented; errors are so with all others."""

HOMES: Final = tuple(f"eventpump.{name}" for name in ("errors", "reports", "interfaces", "options", "credentials"))
"""The public modules of the names that are not in `eventpump`, beside `eventpump.spark` and `eventpump.testing`."""

WITHOUT_MEMBERS: Final = frozenset(
    {"LeaseStoreContract", "PublisherStateStoreContract", "RecordStoreContract", "TransportContract"}
)
"""Their members are tests."""


class Documented(NamedTuple):
    """A name to document.

    Attributes:
        module: The module under which users import it.
        name: The name in it.
        made: The object.
    """

    module: str
    name: str
    made: Any

    @property
    def directive(self) -> str:
        """The directive of autodoc that documents it."""
        if isinstance(self.made, type):
            return "autoexception" if issubclass(self.made, BaseException) else "autoclass"
        return "autofunction" if inspect.isroutine(self.made) else "autodata"


def of_subject(subject: str) -> list[Documented]:
    """Return the names of a subject."""
    return [Documented("eventpump", name, getattr(eventpump, name)) for name in SUBJECTS[subject]]


def of_module(module: str) -> list[Documented]:
    """Return the public names of a module: those of its `__all__`, or the classes and functions that it defines.

    One that is a name of `eventpump` too, as some errors, is documented as that.
    """
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name for name, made in vars(found).items() if name[0] != "_" and getattr(made, "__module__", None) == module
    ]
    return [Documented("eventpump" if name in dir(eventpump) else module, name, getattr(found, name)) for name in names]


@functools.cache
def public_names() -> dict[str, Documented]:
    """Return all public names but those for Spark and for tests."""
    groups = [*map(of_subject, SUBJECTS), *map(of_module, HOMES)]
    return {each.name: each for group in groups for each in group}


def modules_of(package: str) -> list[str]:
    """Return the modules of a package, those of its packages included."""
    found = importlib.import_module(package)
    return [each.name for each in pkgutil.walk_packages(found.__path__, f"{package}.") if not each.ispkg]


def shown(default: object) -> str:
    """Return a default as a program would write it."""
    match default:
        case EventPosition():
            assert default == EventPosition.earliest()
            return "`EventPosition.earliest()`"
        case CheckpointPolicy():
            assert default == CheckpointPolicy.automatic()
            return "`CheckpointPolicy.automatic()`"
        case FairBalancer():
            return "`FairBalancer()`"
        case str():
            return f'"{default}"'
        case bool() | None:
            return str(default)
        case int() | float():
            return f"{default:,}"
    return f"`{default!r}`"


OPTIONS: Final[Mapping[str, type]] = {
    "EventProcessorHost": HostOptions,
    "PartitionReader": ReaderOptions,
    "EventProducer": ProducerOptions,
    "BufferedProducer": BufferedOptions,
}
"""The typed dictionary of each class's options."""


def option_rows(name: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and meaning of each option of a public class.

    Args:
        name: One of `OPTIONS`.
    """
    texts = option_texts(OPTIONS[name])
    for option, parameter in inspect.signature(getattr(eventpump, name)).parameters.items():
        if option in texts:
            kind, text = texts[option]
            default = shown(parameter.default)
            yield option, kind, default.strip("`"), text.removesuffix(f" Default: {default}.")


def option_table(name: str) -> str:
    """Return a table of the options of a public class, in Markdown.

    Args:
        name: One of `OPTIONS`.
    """
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option, kind, default, meaning in option_rows(name):
        kind, meaning = kind.replace("|", "\\|"), meaning.replace("|", "\\|")
        lines.append(f"| `{option}` | `{default}` | `{kind}`<br>{meaning} |")
    return "\n".join(lines)


def command_help() -> str:
    """Return the help of the command and of its subcommands, in Markdown."""
    parts = []
    for name, parser in _parsers(cli.parser()):
        # The first lines depend on the width of the terminal, unless they are formatted for one width.
        parser.formatter_class = functools.partial(argparse.HelpFormatter, width=84)
        parts += [f"## {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to its subcommands
        for each in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _parsers(each)
