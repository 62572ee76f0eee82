"""The source's columns as Spark's users know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

COLUMN_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "body": "BINARY",
        "partition": "STRING",
        "offset": "STRING",
        "sequenceNumber": "BIGINT",
        "enqueuedTime": "TIMESTAMP",
        "publisher": "STRING",
        "partitionKey": "STRING",
        "properties": "MAP<STRING, STRING>",
        "systemProperties": "MAP<STRING, STRING>",
    }
)
"""The columns in their order, all nullable, as Microsoft's Scala connector has them, with their types in SQL."""

PROPERTY_COLUMNS: Final = frozenset({"properties", "systemProperties"})
"""Those that `includeProperties` leaves out."""


def ddl(columns: Iterable[str] = COLUMN_TYPES) -> str:
    """Write some of the columns as Spark does."""
    return ", ".join(f"{column} {COLUMN_TYPES[column]}" for column in columns)
