"""Options that name something to import, such as a callable: "module:name"."""

from __future__ import annotations

import pkgutil
from typing import Any

from eventpump.errors import ConfigurationError
from eventpump.eventhubs.codecs import PayloadCodec, codecs_of


def check_import_name(name: str) -> str:
    """Return the import name of a callable, if it has that form. Nothing is imported."""
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ValueError('must be "module:callable", the import name of a callable without arguments')
    return name


def call_by_import_name(field: str, name: str) -> Any:
    """Import a callable, call it without arguments, and return what it returns.

    Raises:
        ConfigurationError: It cannot be imported, or is not callable.
    """
    found = _imported(field, name)
    if not callable(found):
        raise ConfigurationError(field, f"{name} is not callable")
    return found()


def check_codecs(field: str, given: object) -> object:
    """Return codecs, or the import name of a codec or a list of them, not imported. Raises `ConfigurationError`."""
    if not isinstance(given, str):
        return codecs_of(field, given)
    try:
        return check_import_name(given)
    except ValueError:
        problem = 'must be a PayloadCodec, a list of them, or the import name of either, as "module:name"'
        raise ConfigurationError(field, problem) from None


def loaded_codecs(field: str, given: object) -> tuple[PayloadCodec, ...]:
    """Return what `check_codecs` has accepted, imported where it is named. Raises `ConfigurationError`."""
    return codecs_of(field, _imported(field, given) if isinstance(given, str) else given)


def _imported(field: str, name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        problem = f"{name} cannot be imported ({type(error).__name__}); it must be importable in every process"
        raise ConfigurationError(field, problem) from error
