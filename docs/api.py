"""The public names by subject, and tables of options, for the API reference of the site (`docs/conf.py`).

A name that is in `eventpump.__all__` and in no subject below is documented under "interfaces": a new public name is
never missing from the site.
"""

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
from eventpump.errors import EventPumpError
from eventpump.eventhubs.events import EventPosition
from eventpump.options.consumer import HostOptions, ReaderOptions
from eventpump.options.described import option_texts
from eventpump.options.producer import BufferedOptions, ProducerOptions
from eventpump.reports import HostReport

_BY_NAME: Final[Mapping[str, Sequence[str]]] = {
    "clients": (
        "EventProcessorHost",
        "EventProducer",
        "BufferedProducer",
        "PartitionReader",
        "EventHubsApp",
        "AppHubs",
        "AppHub",
        "make_transport",
        "build_info",
        "BuildInfo",
    ),
    "processing": (
        "EventProcessor",
        "KeyedProcessor",
        "PartitionContext",
        "BatchIterator",
        "ReceivedBatch",
        "CloseReason",
        "CheckpointPolicy",
        "Park",
        "PartitionStatus",
        "PumpState",
        "LinkState",
        "PressureState",
        "Loss",
        "LossKind",
    ),
    "events": (
        "EventData",
        "ReceivedEvent",
        "EventBatch",
        "BatchState",
        "EventPosition",
        "StartPosition",
        "Checkpoint",
        "LastEnqueued",
        "CloudEvent",
        "Decoder",
        "PayloadDecoder",
        "SendResult",
        "DeliveryReceipt",
        "OnSuccess",
        "OnError",
        "PartitionPublishingOptions",
        "PartitionPublishingProperties",
        "ProducerStats",
        "SendCount",
        "PayloadCodec",
        "EventEncoding",
        "EventDecoding",
    ),
    "routers": ("PartitionRouter", "HashRouter", "RoundRobinRouter", "StickyRouter", "RingRouter"),
    "balancers": (
        "PartitionBalancer",
        "FairBalancer",
        "GreedyBalancer",
        "RingBalancer",
        "StaticAssignment",
        "FleetView",
        "LeasePlan",
    ),
    "sources": (
        "EventHubSource",
        "GeneratorSource",
        "MemorySource",
        "CaptureSource",
        "CaptureFiles",
        "CaptureContainer",
        "EventSource",
        "SourceLink",
        "ProbedSourceLink",
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
    "options": (
        "RetryOptions",
        "SubscriptionOptions",
        "ConnectionOptions",
        "ClientOptions",
        "FeedOptions",
        "ReaderOptions",
        "HostOptions",
        "ProducerOptions",
        "BufferedOptions",
        "SubscriberOptions",
        "ConnectionSettings",
        "connection_settings",
        "TransportName",
        "TransportType",
    ),
    "credentials": (
        "Credential",
        "TokenCredential",
        "AccessToken",
        "SharedKey",
        "SharedSignature",
        "NamedKey",
        "NamedKeyCredential",
        "SasCredential",
    ),
    "emulator": ("Emulator", "CaptureSettings"),
    "errors": ("Recovery",),
    "reports": ("Hook",),
}
"""The names of each subject, in the order in which they are documented; errors and reports are found by their base."""

REST: Final = "interfaces"
"""The subject of all other names."""

WITHOUT_MEMBERS: Final = frozenset({"LeaseStoreContract", "PublisherStateStoreContract", "TransportContract"})
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


def _subclasses(base: type) -> Iterator[str]:
    for name in eventpump.__all__:
        made = getattr(eventpump, name)
        if isinstance(made, type) and issubclass(made, base):
            yield name


def subjects() -> dict[str, list[str]]:
    """Return the public names of `eventpump` by subject; each name has one."""
    table = {subject: [name for name in names if hasattr(eventpump, name)] for subject, names in _BY_NAME.items()}
    for subject, base in (("errors", EventPumpError), ("reports", HostReport)):
        found = sorted(_subclasses(base))
        found.remove(base.__name__)
        table[subject] = [base.__name__, *table[subject], *found]
    known = {name for names in table.values() for name in names}
    table[REST] = [name for name in eventpump.__all__ if name not in known]
    return table


def of_subject(subject: str) -> list[Documented]:
    """Return the public names of a subject."""
    return [Documented("eventpump", name, getattr(eventpump, name)) for name in subjects()[subject]]


def of_module(module: str) -> list[Documented]:
    """Return the public names of a module: those of its `__all__`, or the classes and functions that it defines."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name for name, made in vars(found).items() if name[0] != "_" and getattr(made, "__module__", None) == module
    ]
    return [Documented(module, name, getattr(found, name)) for name in names]


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
