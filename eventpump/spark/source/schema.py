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

TYPE_COLUMNS: Final[Mapping[str, str]] = MappingProxyType(
    {"propertyTypes": "MAP<STRING, STRING>", "systemPropertyTypes": "MAP<STRING, STRING>"}
)
"""Further columns, with `includePropertyTypes`: the AMQP types of the properties that are not text, by their names."""

HUB_COLUMN: Final = "hub"
"""The column with the name of an event's hub: the last one where several hubs are read; otherwise only if the user's
schema has it."""

ALL_TYPES: Final[Mapping[str, str]] = MappingProxyType({**COLUMN_TYPES, **TYPE_COLUMNS, HUB_COLUMN: "STRING"})
"""All columns that can be read."""

PROPERTY_COLUMNS: Final = frozenset({"properties", "systemProperties"})
"""The columns that `includeProperties=false` omits."""


def ddl(columns: Iterable[str] = COLUMN_TYPES) -> str:
    """Return some of the columns as a DDL string."""
    return ", ".join(f"{column} {ALL_TYPES[column]}" for column in columns)
