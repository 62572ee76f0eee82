"""The body of a telemetry event as a type: for the sides that decode it as one."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel


class Position(BaseModel):
    """Where a device is."""

    lat: float
    lon: float


class Report(BaseModel):
    """What a device reports, for pydantic."""

    dev: str
    seq: int
    ts: int
    type: str
    site: int
    fw: int
    bat: int
    rssi: int
    temp: float
    hum: float
    pres: float
    ok: bool
    err: str | None
    pos: Position
    tags: list[str]
    vib: dict[str, float] | None = None
    operator: str | None = None
    note: str | None = None
    log: dict[str, str] | None = None
    config: str | None = None


class PlainPosition(msgspec.Struct):
    """Where a device is."""

    lat: float
    lon: float


class PlainReport(msgspec.Struct):
    """The same, for msgspec."""

    dev: str
    seq: int
    ts: int
    type: str
    site: int
    fw: int
    bat: int
    rssi: int
    temp: float
    hum: float
    pres: float
    ok: bool
    err: str | None
    pos: PlainPosition
    tags: list[str]
    vib: dict[str, float] | None = None
    operator: str | None = None
    note: str | None = None
    log: dict[str, str] | None = None
    config: str | None = None
