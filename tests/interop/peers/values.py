"""AMQP values on the JSON lines between a test and its peer: what JSON has no form for is tagged."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any


def pack(value: Any) -> Any:
    """Return the JSON form of a value. Subclasses (of int, say) become plain."""
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str(value)
        case bytes():
            return {"bytes": value.hex()}
        case uuid.UUID():
            return {"uuid": value.hex}
        case datetime():
            return {"time": value.isoformat()}
        case list():
            return [pack(each) for each in value]
        case dict():
            return {"map": [[pack(key), pack(each)] for key, each in value.items()]}
        case _:
            return {"other": repr(value)}


def unpack(value: Any) -> Any:
    """Return the value of a JSON form."""
    match value:
        case list():
            return [unpack(each) for each in value]
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"uuid": text}:
            return uuid.UUID(text)
        case {"time": text}:
            return datetime.fromisoformat(text)
        case {"map": items}:
            return {unpack(key): unpack(each) for key, each in items}
        case dict():
            raise ValueError(f"no value: {value}")
        case _:
            return value
