"""The compiled core, where it is installed and not switched off. The only place that decides which build runs.

`eventpump/_core.pyx` has functions and classes that do what Python code of the same name does, faster. The Python code
is the reference: it defines what is right, and it runs where there is no compiled core (there was no compiler when the
package was built, the interpreter is not CPython, or `EVENTPUMP_PURE=1` is set). `docs/design.md` lists them.
"""

from __future__ import annotations

import copyreg
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, TypeVar, cast
from zlib import crc32

PURE: Final = "EVENTPUMP_PURE"
"""The variable of the environment that, if it is neither empty nor "0", keeps the compiled core from being used."""

_NAME: Final = "eventpump._core"


def _load() -> tuple[ModuleType | None, str]:
    """Return the compiled core, None without it; and why it is not used."""
    if os.environ.get(PURE, "0") not in ("", "0"):
        return None, f"{PURE} is set"
    try:
        loaded = import_module(_NAME)
    except ModuleNotFoundError as error:
        return None, "it was not built" if error.name == _NAME else f"it cannot be loaded: {error}"
    except ImportError as error:
        return None, f"it cannot be loaded: {error}"
    # Wheels do not have the source. In a checkout it may be newer than what was built.
    source = Path(__file__).with_name("_core.pyx")
    if source.is_file() and crc32(source.read_bytes().replace(b"\r\n", b"\n")) != loaded.SOURCE:
        return None, "it was built from another source; install the package again"
    return loaded, ""


core, _REASON = _load()


_T = TypeVar("_T", bound=type)


def _slots_of(kind: type) -> tuple[str, ...]:
    """Return the slots of a class itself, in the order in which it names them."""
    slots: tuple[str, ...] = vars(kind)["__slots__"]
    return slots


def _copied_alike(reference: type) -> None:
    """Make a class be copied and pickled in every protocol with the same state in both builds, unless it defines how.

    The interpreter does not know the attributes of the part that is compiled.
    """
    slots = [each for each in _slots_of(reference) if each != "__weakref__"]

    def state(self: object) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        found = object.__getstate__(self)
        attributes, others = (
            found if isinstance(found, tuple) else (found, {})
        )  # others: slots, and those of subclasses
        return attributes, others | {each: getattr(self, each) for each in slots if hasattr(self, each)}

    def reduced(self: Any) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]  # undocumented

    for name, method in (("__getstate__", state), ("__reduce__", reduced)):
        if name not in vars(reference):
            method.__name__, method.__qualname__ = name, f"{reference.__qualname__}.{name}"
            setattr(reference, name, method)


class _Signature:
    """`__signature__` of a class whose constructor is compiled: that of the reference, for `inspect` and `help`.

    Not of an object, nor of a subclass with a constructor of its own.
    """

    __slots__ = ("_reference", "_whole")

    def __init__(self, reference: type) -> None:
        self._reference = reference
        self._whole: type | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self._whole = owner

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is not None or owner.__init__ is not self._whole.__init__:  # type: ignore[misc]  # only compared
            raise AttributeError("__signature__")
        return import_module("inspect").signature(self._reference)


def based_on_core(name: str) -> Callable[[_T], _T]:
    """Return a decorator for a class in Python, the reference, of which the core has a part.

    Args:
        name: The class of the core that has that part: some of the attributes and methods, under the same names.

    Returns:
        The decorator. In the compiled build it returns a class with that base, and all else of the reference; there
        `core.references` has the reference under `name`. In the other build it returns the reference. Either can be
        copied and pickled, if the class does not say otherwise, and the pickle be read in both builds.
    """

    def decorate(reference: _T) -> _T:
        _copied_alike(reference)
        if core is None:
            return reference
        base = getattr(core, name)
        parts = {each for each in vars(base) if not each.startswith("__") or each == "__init__"}
        slots = _slots_of(reference)
        kept: dict[str, Any] = {
            each: value for each, value in vars(reference).items() if each not in parts and each not in slots
        }
        if "__init__" in parts:
            kept["__signature__"] = _Signature(reference)
        for each in parts & vars(reference).keys():
            if isinstance(method := vars(reference)[each], FunctionType) and each != "__init__":
                vars(base)[each].__annotations__ = method.__annotations__
        kept["__slots__"] = tuple(each for each in slots if each not in parts)
        whole = type(reference.__name__, (base,), kept)
        core.complete(name, reference, whole)
        return cast("_T", whole)

    return decorate


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """Which build of the library runs in this process.

    Attributes:
        is_compiled: Whether the compiled core is used.
        reason: Why it is not used; an empty text if it is.
    """

    is_compiled: bool
    reason: str

    def __str__(self) -> str:
        return "compiled core" if self.is_compiled else "pure Python"


def build_info() -> BuildInfo:
    """Return which build of the library runs in this process.

    It is decided when the library is imported; the environment variable ``EVENTPUMP_PURE=1`` selects pure Python.
    """
    return BuildInfo(core is not None, _REASON)
