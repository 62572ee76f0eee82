"""The columns of the source."""

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
"""The columns in order, all nullable, as in Microsoft's Scala connector, with their SQL types."""

PROPERTY_COLUMNS: Final = frozenset({"properties", "systemProperties"})
"""The columns that `includeProperties=false` omits."""


def ddl(columns: Iterable[str] = COLUMN_TYPES) -> str:
    """Return some of the columns as a DDL string."""
    return ", ".join(f"{column} {COLUMN_TYPES[column]}" for column in columns)
