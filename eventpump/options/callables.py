"""Options that name a callable to import: "module:callable"."""

from __future__ import annotations

import pkgutil
from typing import Any

from eventpump.errors import ConfigurationError


def check_import_name(name: str) -> str:
    """Return the import name of a callable, if it has that form. Nothing is imported.

    Raises:
        ValueError: It has another form; the text does not show it, as it may be a secret in the wrong place.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ValueError('must be "module:callable", the import name of a callable without arguments')
    return name


def call_by_import_name(field: str, name: str) -> Any:
    """Import a callable, call it without arguments, and return what it returns.

    Args:
        field: The option that names it, for errors.
        name: As `check_import_name` takes it.

    Raises:
        ConfigurationError: It cannot be imported, or is not callable.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        problem = f"{name} cannot be imported ({type(error).__name__}); it must be importable in every process"
        raise ConfigurationError(field, problem) from error
    if not callable(found):
        raise ConfigurationError(field, f"{name} is not callable")
    return found()
