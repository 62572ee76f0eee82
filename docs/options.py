"""Writes what `eventpump/clients/` repeats of the options, for editors and `help`: `python docs/options.py`.

The meaning of an option is written once, in the docstring of its model (those of publishing: of `HubProducer`), and its
default is the model's. From there this script fills in the docstrings of the typed dictionaries' fields, and the
options in the docstrings of the public classes. `tests/unit/test_clients.py` fails if a file is not what it writes.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from eventpump.clients import connection, consumers, producers
from eventpump.core.balancers import FairBalancer
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.eventhubs.events import EventPosition
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.options.consumer import HostSettings, ReaderSettings
from eventpump.options.producer import BufferSettings
from eventpump.producer.producer import HubProducer

FILES: Final = tuple(Path(inspect.getfile(each)) for each in (connection, consumers, producers))

_WIDTH: Final = 120
_INDENT: Final = " " * 4


def documented(made: object) -> dict[str, str]:
    """Return the items of the `Args` section of a docstring, by name; of a model with those of its base."""
    found: dict[str, str] = {}
    lineage = reversed(made.__mro__) if isinstance(made, type) and issubclass(made, BaseModel) else (made,)
    for each in lineage:
        section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(each.__doc__ or ""), re.M | re.S)
        if section is not None:
            for item in re.split(r"^    (?=\S)", section[1], flags=re.M)[1:]:
                name, text = re.split(r":\s", item, maxsplit=1)  # a line may end there
                found[name] = " ".join(text.split())
    return found


def _without_defaults(texts: Mapping[str, str]) -> dict[str, str]:
    """Return items of `Args` without their last sentence, where it states the default."""
    return {name: re.sub(r" Default: .+\.$", "", text) for name, text in texts.items()}


_FIELDS: Final = _without_defaults(documented(ConnectionSettings))
_CONNECTION: Final = {
    **_FIELDS,
    **_without_defaults(documented(connection_settings)),
    "transport": f"{_FIELDS['transport']} Or a transport object: the client then uses its "
    "connection, and no other option of the connection but `retry` may be given.",
    "owns_transport": "Whether a transport object is closed with the client. False to share it between clients.",
}

MEANINGS: Final[Mapping[type, Mapping[str, str]]] = {
    consumers.EventProcessorHost: {**_CONNECTION, **documented(HostSettings)},
    consumers.PartitionReader: {**_CONNECTION, **documented(ReaderSettings)},
    producers.EventProducer: {**documented(HubProducer), **_CONNECTION},
    producers.BufferedProducer: {**documented(HubProducer), **_CONNECTION, **documented(BufferSettings)},
}
"""What the options of each public class mean, by name."""

_DICTIONARIES: Final[Mapping[type, type]] = {
    connection.ConnectionOptions: producers.EventProducer,
    connection.ClientOptions: producers.EventProducer,
    consumers.FeedOptions: consumers.PartitionReader,
    consumers.ReaderOptions: consumers.PartitionReader,
    consumers.HostOptions: consumers.EventProcessorHost,
    producers.ProducerOptions: producers.EventProducer,
    producers.BufferedOptions: producers.BufferedProducer,
}
"""A class that takes the options of each typed dictionary."""


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


def _meaning(made: type, name: str) -> str:
    default = inspect.signature(made).parameters[name].default
    return f"{MEANINGS[made][name]} Default: {shown(default)}."


def _wrapped(text: str, indent: str, hanging: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _unparsed(annotation: ast.expr) -> str:
    return ast.unparse(annotation).replace("'", '"')


def _dictionary(node: ast.ClassDef, made: type, source: list[str]) -> Iterator[str]:
    """Yield the lines of a typed dictionary: its head, and each field with its docstring."""
    head, fields = node.body[0], [each for each in node.body if isinstance(each, ast.AnnAssign)]
    assert head.end_lineno is not None
    yield from source[node.lineno - 1 : head.end_lineno]
    yield ""
    for field in fields:
        assert isinstance(field.target, ast.Name)
        yield f"{_INDENT}{field.target.id}: {_unparsed(field.annotation)}"
        yield from _wrapped(f'"""{_meaning(made, field.target.id)}"""', _INDENT, "")


def _class(node: ast.ClassDef, made: type, source: list[str], kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a class; its explicit parameters stay as they are documented, and its options follow them."""
    (init,) = (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    explicit = {each.arg for each in (*init.args.args, *init.args.kwonlyargs)}
    doc = node.body[0]
    assert doc.end_lineno is not None
    lines = source[node.lineno - 1 : doc.end_lineno]
    start = lines.index(f"{_INDENT}Args:") + 1
    end = lines.index("", start)
    yield from lines[:start]
    is_kept = False
    for line in lines[start:end]:
        item = re.match(r" {8}(\w+)", line)
        is_kept = item[1] in explicit if item else is_kept
        if is_kept:
            yield line
    for name in inspect.signature(made).parameters:
        if name not in explicit:
            yield from _wrapped(f"{name} ({kinds[name]}): {_meaning(made, name)}", _INDENT * 2, _INDENT)
    yield from lines[end:]
    yield from source[doc.end_lineno : node.end_lineno]


def _kinds() -> dict[str, str]:
    """Return the types of all options, as the typed dictionaries write them."""
    names = {known.__name__ for known in _DICTIONARIES}
    trees = (ast.parse(each.read_text(encoding="utf-8")) for each in FILES)
    nodes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names)
    fields = (field for node in nodes for field in node.body if isinstance(field, ast.AnnAssign))
    return {ast.unparse(each.target): _unparsed(each.annotation) for each in fields}


def written(text: str) -> str:
    """Return one of the files with the docstrings of its options as they must be.

    Args:
        text: The file as it is.
    """
    source = text.splitlines()
    nodes = {each.name: each for each in ast.parse(text).body if isinstance(each, ast.ClassDef)}
    kinds = _kinds()
    for name, node in reversed(nodes.items()):  # from the end on, so that the numbers of lines stay right
        for known, made in _DICTIONARIES.items():
            if known.__name__ == name:
                source[node.lineno - 1 : node.end_lineno] = _dictionary(node, made, source)
        for made in MEANINGS:
            if made.__name__ == name:
                source[node.lineno - 1 : node.end_lineno] = _class(node, made, source, kinds)
    return "\n".join(source) + "\n"


def main() -> None:
    """Write the files."""
    for file in FILES:
        file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
