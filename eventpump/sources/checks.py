"""Checks of what users give to sources."""

from __future__ import annotations

import math
from datetime import datetime

from eventpump.errors import ConfigurationError


def check_whole(field: str, value: object, least: int, most: int | None = None) -> None:
    """Check that a value is a whole number within bounds. Raises `ConfigurationError` if it is not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"{least} or more" if most is None else f"from {least} to {most:,}"
        raise ConfigurationError(field, f"must be a whole number, {bounds}, not {value!r}")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_time(field: str, value: object) -> None:
    """Check that a value is a datetime with a time zone. Raises `ConfigurationError` if it is not."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ConfigurationError(field, f"must be a datetime with a time zone, not {value!r}")


def offers(value: object, *methods: str) -> bool:
    """Return whether a value is an object with these methods, and not a class."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def is_source(value: object) -> bool:
    """Return whether a value can be read as an `EventSource`."""
    return offers(value, "partitions", "partition_properties", "open")


def kind_of(value: object) -> str:
    """Return what a value is, for an error: the class itself or an object of it."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of {type(value).__name__}"
