"""The columns that a sink takes: which they are, of which types, and what is said of those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final, Self

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    IntegralType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from eventpump.errors import ConfigurationError

_SIMPLE: Final = (
    BinaryType,
    BooleanType,
    ByteType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampType,
)
_LISTED: Final = 20
"""The most columns that an error lists."""


def _is_text(kind: DataType) -> bool:
    return isinstance(kind, StringType)


def _is_body(kind: DataType) -> bool:
    return isinstance(kind, StringType | BinaryType)


def _is_partition(kind: DataType) -> bool:
    return isinstance(kind, StringType | IntegralType)


def _is_id(kind: DataType) -> bool:
    return isinstance(kind, StringType | IntegralType | BinaryType)


def _is_texts(kind: DataType) -> bool:
    return isinstance(kind, MapType) and _is_text(kind.keyType) and _is_text(kind.valueType)


def _is_properties(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return len(set(kind.names)) == len(kind.names) and all(isinstance(each.dataType, _SIMPLE) for each in kind)
    return isinstance(kind, MapType) and _is_text(kind.keyType) and isinstance(kind.valueType, _SIMPLE)


_ID: Final = "must be string, an integer type or binary"
_SIMPLE_VALUES: Final = (
    "must be a map<string,T> or a struct of string, boolean, byte, short, int, long, float, double, timestamp or binary"
)
_TEXTS: Final = "must be map<string,string>, as the source returns it"
_MEANINGS: Final[Mapping[str, tuple[str, Callable[[DataType], bool], str]]] = MappingProxyType(
    {
        "body": ("body", _is_body, "must be string or binary"),
        "partition": ("partition", _is_partition, "must be string or an integer type"),
        "partitionid": ("partition", _is_partition, "must be string or an integer type"),
        "partitionkey": ("partition_key", _is_text, "must be string"),
        "properties": (
            "properties",
            _is_properties,
            _SIMPLE_VALUES,
        ),
        "propertytypes": ("property_types", _is_texts, _TEXTS),
        "contenttype": ("content_type", _is_text, "must be string"),
        "correlationid": ("correlation_id", _is_id, _ID),
        "messageid": ("message_id", _is_id, _ID),
        "systemproperties": ("system_properties", _is_texts, _TEXTS),
        "systempropertytypes": ("system_property_types", _is_texts, _TEXTS),
    }
)
"""By the lower-case name of a column: the field of `EventColumns`, and which types it may have."""

STANDARD_ROLES: Final = frozenset({"message_id", "correlation_id", "content_type", "system_properties"})
"""The fields of `EventColumns` of which an event's standard properties are made."""


@dataclass(frozen=True, slots=True)
class EventColumns:
    """The columns of a DataFrame that form an event, by their names there; None for missing ones.

    Args:
        body: String (as UTF-8) or binary.
        partition: `partition` or `partitionId`; a hub partition's id, as string or integer.
        partition_key: `partitionKey`; string, of at most 128 characters (the JavaScript client's limit; the service's
            behavior for longer keys is unknown).
        properties: `properties`; the application properties, published sorted by name. A map from string to a simple
            type, or a struct of simple types, whose null fields are left out. Each simple type has its AMQP type:
            byte, short, int, long, float, double, boolean, string, binary, and timestamp in milliseconds.
        property_types: `propertyTypes`; where `properties` is map<string,string>, the AMQP types of those values that
            are not text, by name, as the source returns it with `includePropertyTypes`.
        content_type: `contentType`; string.
        correlation_id: `correlationId`; string, an integer (published as ulong) or binary.
        message_id: `messageId`; likewise.
        system_properties: `systemProperties`; map<string,string>, as the source returns it. AMQP's standard properties
            are published again, where no other column gives them; the service's annotations are not.
        system_property_types: `systemPropertyTypes`; as `property_types`.
        sequence_number: `sequenceNumber`, an integer; together with `partition`, it names a row in errors. Not used
            if there are several of this name.
        order_by: The columns that order the events of a hub partition.
    """

    body: str
    partition: str | None = None
    partition_key: str | None = None
    properties: str | None = None
    property_types: str | None = None
    content_type: str | None = None
    correlation_id: str | None = None
    message_id: str | None = None
    system_properties: str | None = None
    system_property_types: str | None = None
    sequence_number: str | None = None
    order_by: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: StructType, order_by: Sequence[str] = ()) -> Self:
        """Find the columns; their names are not case-sensitive. Other columns are ignored, but not `hub` and `topic`.

        Raises:
            ConfigurationError: A column is missing, has another type, or conflicts with another; the error names it.
        """
        found: dict[str, str] = {}
        numbers = [field for field in schema.fields if field.name.lower() == "sequencenumber"]
        if len(numbers) == 1 and isinstance(numbers[0].dataType, IntegralType):
            found["sequence_number"] = numbers[0].name  # of several, as a join has them, Spark can select none
        for field in schema.fields:
            if field.name.lower() in ("hub", "topic"):
                raise ConfigurationError(
                    field.name,
                    "rows go to the hub of the producer, whatever they have in this column. Publish those of each hub "
                    f'by a producer of its own, as by .where("{field.name} = \'a\'").drop("{field.name}"), or drop it',
                )
            meaning = _MEANINGS.get(field.name.lower())
            if meaning is None:
                continue
            kind, is_right, problem = meaning
            if kind in found:
                raise ConfigurationError(field.name, f"the DataFrame also has the column {found[kind]}: drop one")
            if not is_right(field.dataType):
                hint = _cast_hint(field.name, field.dataType) if kind in ("body", "partition_key") else ""
                raise ConfigurationError(
                    field.name, f"the column {problem}, not {field.dataType.simpleString():.200}{hint}"
                )
            found[kind] = field.name
        if "body" not in found:
            raise ConfigurationError("body", f"the DataFrame has no such column; {_body_hint(schema)}")
        if "partition" in found and "partition_key" in found:
            partition, key = found["partition"], found["partition_key"]
            raise ConfigurationError(
                key,
                f"the DataFrame also has the column {partition}, but an event is sent by partition or by key. "
                f'.drop("{partition}") sends each row by its key, and a row without key to any partition; '
                f'.drop("{key}") sends each row to the partition of its number, without a key',
            )
        types = found.get("property_types")
        if types is not None and ("properties" not in found or not _is_texts(schema[found["properties"]].dataType)):
            raise ConfigurationError(types, "needs the column properties as map<string,string>: drop the types")
        if "system_property_types" in found and "system_properties" not in found:
            raise ConfigurationError(found["system_property_types"], "needs the column systemProperties: drop it")
        return cls(**found, order_by=tuple(_ordering(schema, name) for name in order_by))

    @property
    def names(self) -> list[str]:
        """The columns to select, in the order an encoder expects."""
        return [*self.roles.values(), *self.order_by]

    @property
    def roles(self) -> dict[str, str]:
        """The columns but the ordering ones, by the field of this class, in the order an encoder expects."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "order_by"}
        return {role: name for role, name in given.items() if name is not None}


def _cast_hint(name: str, kind: DataType) -> str:
    """Return what to write for a column that must be text."""
    is_nested = isinstance(kind, MapType | StructType) or kind.typeName() in ("array", "variant")
    return f': select "{"to_json" if is_nested else "string"}({name}) AS {name}"'


def _listed(schema: StructType) -> str:
    names = schema.fieldNames()
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "") or "no columns"


def _body_hint(schema: StructType) -> str:
    """Return which columns there are, and what to write, where there is none for the body."""
    texts = [field for field in schema.fields if _is_body(field.dataType)]
    values = [field for field in texts if field.name.lower() == "value"]
    found = values or (texts if len(texts) == 1 else [])
    if not found:
        return f'it has: {_listed(schema)}. Add it, such as .selectExpr("*", "to_json(struct(*)) AS body")'
    hint = f'.withColumnRenamed("{found[0].name}", "body")'
    for field in schema.fields:
        if values and field.name.lower() == "key":
            # As of Kafka's source; its keys are binary.
            hint += f'.selectExpr("*", "string({field.name}) AS partitionKey")'
    return f"it has: {_listed(schema)}. Write {hint}"


def _ordering(schema: StructType, name: str) -> str:
    named = [field for field in schema.fields if field.name.lower() == name.lower()]
    if len(named) != 1:
        has = f"several columns {name}" if named else f"no column {name}; it has: {_listed(schema)}"
        raise ConfigurationError("order_by", f"the DataFrame has {has}")
    if isinstance(named[0].dataType, MapType):
        raise ConfigurationError("order_by", f"the column {name} is a map, which has no order")
    return named[0].name
