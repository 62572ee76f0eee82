"""Public names that are defined elsewhere: imported when they are first used, and shown under their public module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import FunctionType
from typing import Any, Final, get_type_hints, is_typeddict

LAZY: Final[dict[str, dict[str, str]]] = {}
"""By public module: the module that defines each of its names."""
_SHOWN: Final[set[tuple[str, str]]] = set()
"""The public modules and names that are attributes already."""


def public(
    module: str, defined: Mapping[str, str], own: Iterable[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Make names of other modules attributes of a public one, each when it is first used.

    Args:
        module: The public module.
        defined: The names by the module that defines them, below `eventpump`, separated by spaces.
        own: The public names that the module defines by itself.

    Returns:
        What the module needs as `__all__`, `__getattr__` and `__dir__`.
    """
    homes = LAZY[module] = {name: f"eventpump.{home}" for home, names in defined.items() for name in names.split()}
    names = sorted({*homes, *own})

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        made = getattr(import_module(homes[name]), name)
        _show_loaded()
        # A module that another thread is importing is shown later.
        return vars(sys.modules[module]).get(name, made)

    return names, find, lambda: names


def _show_loaded() -> None:
    """Make the names of all modules that are loaded attributes of their public modules.

    Not only the one that was asked for: an error is printed under its public name by a program that never mentions it.
    """
    for public_module, homes in list(LAZY.items()):
        for name, home in homes.items():
            module = sys.modules.get(home)
            if (public_module, name) in _SHOWN or module is None or getattr(module.__spec__, "_initializing", False):
                continue
            setattr(sys.modules[public_module], name, _shown(getattr(module, name), public_module))
            _SHOWN.add((public_module, name))


def _shown(made: Any, public_module: str) -> Any:
    """Show what is public under its public name, in errors, reprs and documentation; pickle finds it there too."""
    if isinstance(made, type | FunctionType):
        if "__annotations__" in vars(made) and isinstance(made, type) and not is_typeddict(made):
            # They are text, which dataclasses' and pydantic's users could not evaluate in another module than theirs.
            with suppress(NameError):  # imported for checkers only
                kinds = get_type_hints(made, include_extras=True)
                made.__annotations__.update((name, kinds[name]) for name in made.__annotations__)
                for field in fields(made) if is_dataclass(made) else ():
                    field.type = kinds[field.name]
        made.__module__ = public_module
    return made
