"""The public names by subject, and tables of options, for the API reference of the site (`docs/conf.py`)."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

import eventpump
from eventpump.cli import main as cli
from eventpump.core.balancers import FairBalancer
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.eventhubs.events import EventPosition
from eventpump.options.base import SettingsModel
from eventpump.options.connection import ClientOptions, ConnectionFields, ConnectionOptions
from eventpump.options.consumer import HostOptions, ReaderOptions
from eventpump.options.described import option_texts
from eventpump.options.producer import BufferedOptions, ProducerOptions, PublishingOptions
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.data_source_writer import WriterOptions
from eventpump.spark.sink.foreach_batch import SinkSettings
from eventpump.spark.source.options import SourceOptions

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
        "BlobOwnershipStore",
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

HOMES: Final = tuple(
    f"eventpump.{name}"
    for name in (
        *("errors", "reports", "interfaces", "options", "credentials"),
        *("lag", "checkpoints", "health", "telemetry"),
    )
)
"""The public modules of the names that are not in `eventpump`, beside `eventpump.spark` and `eventpump.testing`."""

WITHOUT_MEMBERS: Final = frozenset(
    {
        *(
            f"{kind}Contract"
            for kind in ("Checkpoint", "LeaseStore", "PublisherStateStore", "RecordStore", "Source", "Transport")
        ),
        "Telemetry",
    }
)
"""Their members are tests, or what the library itself calls."""


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
    def key(self) -> str:
        """The name below `eventpump`, by which `GROUPS` and `ORDER` have it, as "lag.LagReader"."""
        return f"{self.module}.{self.name}".removeprefix("eventpump.")

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

SPARK_OPTIONS: Final[Mapping[str, type[SettingsModel]]] = {
    "SparkConnection": SparkConnection,
    "SourceOptions": SourceOptions,
    "WriterOptions": WriterOptions,
    "SinkSettings": SinkSettings,
}
"""The models of what Spark's users set."""


_HUB: Final = ("connection_string", "hub", "consumer_group")
_MEMORY: Final = ("prefetch_events", "prefetch_bytes", "strict_prefetch_bytes")
_EXACTLY_ONCE: Final = (
    *("idempotent", "name", "state_store", "mode", "on_doubt", "scan_consumer_group", "on_state_lost"),
    "partition_options",
)
_CONNECTION: Final = tuple(ClientOptions.__annotations__)
_PUBLISHING: Final = tuple(each for each in PublishingOptions.__annotations__ if each not in _EXACTLY_ONCE)
_OF_PRODUCER: Final = tuple(
    each for each in ProducerOptions.__annotations__ if each not in {*_PUBLISHING, *_EXACTLY_ONCE, *_CONNECTION}
)

GROUPS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "EventProcessorHost": {
        "What to read": (*_HUB, "initial_position", "source"),
        "How to process it": (
            *("processor", "max_batch_size", "max_wait_time", "call_when_idle", "decode", "hooks", "telemetry"),
            *("track_last_enqueued", "delivery_interval"),
        ),
        "Where to keep positions, and how to share partitions": (
            *("lease_store", "checkpoint_policy", "owner_id", "balancer", "weight", "renew_interval"),
            *("ownership_lost_grace", "close_timeout"),
        ),
        "What to do on failure": (
            *("failure_policy", "handler_retry", "on_retries_exhausted", "handler_timeout", "on_handler_timeout"),
            *("on_data_loss", "link_retry", "startup_timeout"),
        ),
        "Memory": (*_MEMORY, "max_buffered_bytes", "max_message_size"),
        "Connection": _CONNECTION,
        "Tests": ("rng",),
    },
    "PartitionReader": {
        "What to read": (*_HUB, "partition_id", "position", "end", "source"),
        "How it is read": ("decode", "track_last_enqueued", "delivery_interval", "telemetry"),
        "Readers beside it": ("owner_level", "receiver_name"),
        "What to do on failure": ("on_data_loss", "link_retry", "startup_timeout"),
        "Memory": (*_MEMORY, "max_message_size"),
        "Connection": _CONNECTION,
    },
    "EventProducer": {
        "Where to send, and how": ("connection_string", "hub", "router", *_PUBLISHING, *_OF_PRODUCER),
        "Publishing exactly once": _EXACTLY_ONCE,
        "Connection": _CONNECTION,
    },
    "BufferedProducer": {
        "Where to send, and how": ("connection_string", "hub", "router", *_PUBLISHING, "max_in_flight"),
        "When a batch is sent, and what is reported of it": (
            *("max_batch_events", "max_batch_bytes", "max_wait_time", "on_success", "on_error"),
        ),
        "Room of the buffer": ("max_events", "max_bytes", "max_partition_events", "max_partition_bytes"),
        "Publishing exactly once": _EXACTLY_ONCE,
        "Connection": _CONNECTION,
    },
    "Emulator": {
        "Hubs": ("hubs", "retention", "max_message_size", "data", "fsync", "capture"),
        "Where it listens": ("host", "port", "ws_port", "standard_ports", "tls", "tls_directory", "names"),
        "Who has access": ("key_name", "key", "rules", "token_verifier", "accept_jwt"),
        "How it behaves": ("deadlines", "producer_retention", "nothing_published", "refuse_long_keys", "now"),
    },
    "lag.LagReader": {
        "What to watch": ("connection_string", "hub", "checkpoints", "consumer_group"),
        "How it is read": ("rate", "stalled_after", "reader_group", "clock"),
        "Connection": _CONNECTION,
    },
    "checkpoints.CheckpointEditor": {
        "What to change": ("connection_string", "hub", "checkpoints", "consumer_group"),
        "How the hub is read": ("reader_group", "rate", "clock"),
        "Connection": _CONNECTION,
    },
    "checkpoints.BlobCheckpointWriter": {
        "Where the container is": ("container", "connection_string", "account_url", "credential"),
        "What lies in it": ("format", "prefix", "preserve_case", "namespace"),
        "Times": ("owner_timeout", "call_timeout", "clock"),
    },
    "telemetry.Telemetry": {
        "Where it is recorded": ("tracer_provider", "meter_provider"),
        "Events that are sent": ("create_spans", "propagate"),
        "How much is recorded": ("process_spans", "management_spans", "partition_attribute"),
    },
    "lag.BlobCheckpointReader": {
        "Where the container is": ("container", "connection_string", "account_url", "credential"),
        "What lies in it": ("format", "prefix", "preserve_case", "namespace"),
        "Times": ("owner_timeout", "call_timeout", "clock"),
    },
}
"""The parameters of classes that have many, by what they are for: so the site shows them, and not as a signature.

A class is named as below `eventpump`: one of a public module with the module's name, as "lag.LagReader".
"""

_SHOWN: Final = {
    "connection_string",
    "hub",
    "processor",
    "lease_store",
    "partition_id",
    "router",
    "hubs",
    "host",
    "port",
    "checkpoints",
    "container",
}
"""Of these parameters the signature that the site shows is made."""

ORDER: Final[Mapping[str, Sequence[str]]] = {
    "EventProcessorHost": (
        *("run", "batches", "stop", "aclose", "drain", "partitions", "subscribe", "unsubscribe", "pause", "resume"),
        *("seek", "replay"),
    ),
    "PartitionReader": ("read", "read_all", "run", "position", "is_at_end", "last_enqueued", "aclose"),
    "EventProducer": (
        *("send", "create_batch", "settle", "stats", "aclose", "get_partition_ids", "get_properties"),
        "get_partition_properties",
    ),
    "BufferedProducer": ("send", "send_and_wait", "send_nowait", "flush", "settle", "stats", "aclose", "open"),
    "EventHubsApp": ("subscriber", "publisher", "run", "run_async", "test", "stop"),
    "EventProcessor": ("process_events", "open", "process_error", "close"),
    "KeyedProcessor": ("process_events", "open", "process_error", "close"),
    "PartitionContext": ("partition_id", "checkpoint", "lag", "seek"),
    "Emulator": ("start", "connection_string", "aclose", "restart", "hubs", "faults"),
    "lag.LagReader": ("read", "watch", "scope", "aclose"),
    "checkpoints.CheckpointEditor": (
        *("plan_reset", "plan_copy", "plan_import", "apply", "read", "export", "scope", "aclose"),
    ),
}
"""The members of classes in the order of use; those that are not named follow as they are in the source."""


def class_of(key: str) -> type[Any]:
    """Return the class that `GROUPS` or `ORDER` has by this name."""
    made = pkgutil.resolve_name(f"eventpump.{key}")
    assert isinstance(made, type)
    return made


def members_of(key: str) -> list[tuple[str, str]]:
    """Return the documented members of a class of `ORDER`: for each the directive of autodoc, and its name."""
    found: dict[str, str] = {}
    for base in class_of(key).__mro__[:-1]:
        for member, value in vars(base).items():
            if member[0] != "_" and member not in found and inspect.getdoc(value) and hasattr(base, "__module__"):
                is_method = inspect.isroutine(value) or isinstance(value, classmethod | staticmethod)
                found[member] = "automethod" if is_method else "autoproperty"
    first = ORDER[key]
    names = [*first, *(each for each in found if each not in first)]
    return [(found[each], each) for each in names]


def parameter_texts(key: str) -> dict[str, tuple[str, str]]:
    """Return type and meaning of each parameter of a class of `GROUPS`, by its docstring."""
    made = class_of(key)
    kinds = vars(made)["__init__"].__annotations__
    _, _, rest = (inspect.getdoc(made) or "").partition("\nArgs:\n")
    texts: dict[str, tuple[str, str]] = {}
    for entry in re.split(r"\n    (?=\S)", "\n" + re.split(r"\n(?=\S)", rest)[0])[1:]:
        found = re.fullmatch(r"(\w+)(?: \((.*?)\))?: (.*)", " ".join(entry.split()))
        assert found is not None, entry
        texts[found[1]] = found[2] or str(kinds[found[1]]), found[3]
    return texts


def grouped_parameters(key: str) -> Iterator[str]:
    """Yield the parameters of a class of `GROUPS` in a table per group, in reStructuredText."""
    texts = parameter_texts(key)
    for group, names in GROUPS[key].items():
        yield from (f".. rubric:: {group}", "", ".. list-table::", "   :class: options", "   :widths: 25 75", "")
        for each in names:
            kind, text = texts[each]
            text = re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", text)  # as in "`HubSpec`s"
            yield from (f"   * - ``{each}``", f"     - | ``{kind}``", f"       | {text}")
        yield ""


def short_signature(key: str) -> str:
    """Return the signature of a class of `GROUPS` with the parameters that nearly every program gives."""
    shown, has_star = [], False
    for each in inspect.signature(class_of(key)).parameters.values():
        if each.name in _SHOWN:
            if each.kind is each.KEYWORD_ONLY and not has_star:
                has_star = True
                shown.append("*")
            shown.append(each.name if each.default is each.empty else f"{each.name}={each.default!r}")
    return f"({', '.join(shown)}, **options)"


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
    """Return a table of the options of a public class, or of Spark's source or sinks, in Markdown.

    Args:
        name: One of `OPTIONS` or `SPARK_OPTIONS`.
    """
    if name in SPARK_OPTIONS:
        return spark_option_table(name)
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option, kind, default, meaning in option_rows(name):
        kind, meaning = kind.replace("|", "\\|"), meaning.replace("|", "\\|")
        lines.append(f"| `{option}` | `{default}` | `{kind}`<br>{meaning} |")
    return "\n".join(lines)


def spark_option_table(name: str) -> str:
    """Return a table of the options of a model of Spark's source or sinks, in Markdown.

    Args:
        name: One of `SPARK_OPTIONS`.
    """
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option, default, meaning in spark_option_rows(name):
        lines.append(f"| `{option}` | {default} | {meaning} |")
    return "\n".join(lines)


def spark_option_rows(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, default and meaning of each option of a model of Spark's source or sinks.

    Args:
        name: One of `SPARK_OPTIONS`.

    Raises:
        StopIteration: The docstring of the model does not name an option.
    """
    model = SPARK_OPTIONS[name]
    texts = _argument_texts(model)
    if issubclass(model, ConnectionFields):
        texts = {each: text.text for each, text in option_texts(ConnectionOptions).items()} | texts
    # Those of `foreach_batch_producer` are Python's arguments, and the others text in Spark's options.
    names = {field: field if model is SinkSettings else to_camel(field) for field in model.model_fields}
    for field, info in model.model_fields.items():
        if field == "connection":
            continue
        own = texts.get(field) or next(f"See `{each}`." for each in texts if f"`{field}`" in texts[each])
        text, _, stated = own.partition(" Default: ")
        default = stated.removesuffix(".").strip("`") or _spark_default(info)
        text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
        text = re.sub(r"`(\w+)`", lambda found: f"`{names.get(found[1], found[1])}`", text)
        text = re.sub(r"`parse_positions?`", "[positions](#positions)", text).replace("|", "\\|")
        yield names[field], default if info.is_required() else f"`{default}`", text


def _spark_default(field: FieldInfo) -> str:
    """Return a default as Spark's users write it."""
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _argument_texts(made: type) -> dict[str, str]:
    """Return the meaning of each argument in the docstring of a class."""
    _, _, rest = (inspect.getdoc(made) or "").partition("\nArgs:\n")
    entries = re.split(r"\n    (?=\S)", "\n" + re.split(r"\n(?=\S)", rest)[0])[1:]
    return {name: text for name, _, text in (" ".join(entry.split()).partition(": ") for entry in entries)}


def command_help() -> str:
    """Return the help of the command and of its subcommands, in Markdown."""
    parts = []
    for name, parser in command_parsers():
        # The first lines depend on the width of the terminal, unless they are formatted for one width.
        parser.formatter_class = functools.partial(argparse.HelpFormatter, width=84)
        parts += [f"## {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def command_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the command and its subcommands, by name."""
    return _parsers(cli.parser())


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to its subcommands
        for each in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _parsers(each)
