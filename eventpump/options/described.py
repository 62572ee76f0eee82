"""How the options of a callable are shown: its signature and docstring, composed from typed dictionaries and models.

The type and the meaning of an option are written once, in a typed dictionary, where editors find them too; its default
and its bounds in the model beside it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple, get_type_hints

from pydantic import BaseModel

_MODULES: Final = tuple(f"{__package__}.{each}" for each in ("connection", "consumer", "producer"))
_WIDTH: Final = 120
_INDENT: Final = " " * 4


class OptionText(NamedTuple):
    """What is written of an option: its type; and its meaning, unit and default."""

    kind: str
    text: str


@cache
def _written() -> dict[str, dict[str, OptionText]]:
    """Return the options of each typed dictionary in this package, by its name: Python does not keep the texts."""
    found: dict[str, dict[str, OptionText]] = {}
    for module in _MODULES:
        try:
            tree = ast.parse(inspect.getsource(import_module(module)))
        except OSError:  # a program that is shipped without its source
            continue
        for node in tree.body:
            bases = [ast.unparse(each) for each in node.bases] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.ClassDef) and any(base == "TypedDict" or base in found for base in bases):
                options = {name: text for base in bases for name, text in found.get(base, {}).items()}
                for field, text in zip(node.body, node.body[1:], strict=False):
                    if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                        kind = ast.unparse(field.annotation).replace("'", '"')
                        options[ast.unparse(field.target)] = OptionText(
                            kind, " ".join(str(ast.literal_eval(text.value)).split())
                        )
                found[node.name] = options
    return found


def option_texts(known: type) -> Mapping[str, OptionText]:
    """Return what is written of the options of a typed dictionary; nothing if there is no source to read it from."""
    return _written().get(known.__name__, {})


class _Docstring:
    """A docstring of which one line, "options: See ...", is replaced by the options. It is composed when it is read."""

    def __init__(self, written: str | None, known: type, names: Iterable[str]) -> None:
        self._written = written
        self._known = known
        self._names = tuple(names)

    def __get__(self, instance: object, owner: type) -> str | None:
        texts = option_texts(self._known)
        line = f"{_INDENT * 2}options: See `{self._known.__name__}`."
        if self._written is None or not texts:
            return self._written
        composed = [
            textwrap.fill(
                f"{name} ({texts[name].kind}): {texts[name].text}",
                _WIDTH,
                initial_indent=_INDENT * 2,
                subsequent_indent=_INDENT * 3,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for name in self._names
        ]
        return self._written.replace(line, "\n".join(composed))


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of the fields of a model, by name."""
    return {name: field.default for name, field in model.model_fields.items() if not field.is_required()}


def with_options(made: Callable[..., Any], known: type, names: Iterable[str], defaults: Mapping[str, Any]) -> None:
    """Show options, with type and default, in this order, in the signature of a function with `**options`."""
    given, kinds = inspect.signature(made, eval_str=True), get_type_hints(known)
    named = [each for each in given.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kinds[name])
        for name in names
    ]
    vars(made)["__signature__"] = given.replace(parameters=[*named, *keywords])


def show_options(made: type, known: type, names: Iterable[str]) -> None:
    """Show options, in this order, in the docstring of a class, in place of its line "options: See ..."."""
    # Checkers take a docstring for text; as a descriptor it costs nothing until it is read.
    setattr(made, "__doc__", _Docstring(made.__doc__, known, names))  # noqa: B010 - as said
