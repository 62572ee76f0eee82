"""The hubs that the emulator serves, from options or the official emulator's `Config.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from eventpump.errors import ConfigurationError

MAX_PARTITIONS = 1024
MAX_NAME_LENGTH = 256
_INNER = "[A-Za-z0-9_.-]"
_NAME = rf"[A-Za-z0-9]({_INNER}*(/\.*[A-Za-z0-9_-]{_INNER}*)*(/{_INNER}*)?[A-Za-z0-9])?"
_NAME_RULE = "letters and digits, inside also _ - . /, and no part between slashes that is empty or only dots"
"""Capture's files are named for the hub: such a part would lead out of their directory, or to another hub's."""


@dataclass(frozen=True, slots=True)
class HubSpec:
    """A hub to serve.

    Args:
        name: Letters and digits, inside also `_ - . /`; no part between slashes is empty or only dots.
        partitions: From 1 to 1024.
        consumer_groups: Those besides `$Default`, which always exists.

    Raises:
        ConfigurationError: A value that the service would refuse too.
    """

    name: str
    partitions: int
    consumer_groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name("hub", self.name)
        if type(self.partitions) is not int or not 1 <= self.partitions <= MAX_PARTITIONS:
            raise ConfigurationError(
                "hub", f"{self.name} has {self.partitions} partitions; it must have 1 to {MAX_PARTITIONS}"
            )
        for group in self.consumer_groups:
            if group.lower() != "$default":
                _check_name("consumer group", group)


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str):
        raise ConfigurationError(field, f"a name must be text, not {type(name).__name__}")
    if len(name) > MAX_NAME_LENGTH or not re.fullmatch(_NAME, name):
        raise ConfigurationError(field, f"{name[:80]!r} is invalid: {_NAME_RULE}, up to {MAX_NAME_LENGTH}")


DEFAULT_PARTITIONS = 4
"""Partitions of a hub whose name alone is given."""

Hubs = str | HubSpec | Mapping[str, int] | Iterable[HubSpec | str]
"""The hubs to serve: one or several `HubSpec`s or texts as `parse_hub` reads them, or names and partition counts."""


def hub_specs(hubs: object) -> list[HubSpec]:
    """Parse the `hubs` option, of type `Hubs`. Raises `ConfigurationError` if it names none, or a hub twice."""
    if isinstance(hubs, Mapping):
        specs = [HubSpec(name, count) for name, count in hubs.items()]
    elif isinstance(hubs, Iterable) and not isinstance(hubs, str):
        specs = [_spec(hub) for hub in hubs]
    else:
        specs = [_spec(hubs)]
    seen: set[str] = set()
    for spec in specs:
        if spec.name.lower() in seen:
            raise ConfigurationError("hub", f"{spec.name} is declared twice")
        seen.add(spec.name.lower())
    return specs


def _spec(hub: object) -> HubSpec:
    if isinstance(hub, HubSpec):
        return hub
    if isinstance(hub, str):
        return parse_hub(hub, "hubs", default=DEFAULT_PARTITIONS)
    raise ConfigurationError(
        "hubs", f'must be hubs: {{"telemetry": 4}}, "telemetry:4" or HubSpec("telemetry", 4), not {type(hub).__name__}'
    )


def parse_hub(text: str, field: str, *, default: int | None = None) -> HubSpec:
    """Parse a hub in the form `NAME:PARTITIONS[:GROUP,GROUP,...]`.

    Args:
        text: Such as "telemetry:4:dashboard,archive". The consumer group $Default exists always.
        field: What is named in errors.
        default: The partitions of a hub whose name alone is given; None to refuse that.

    Raises:
        ConfigurationError: The text has another form.
    """
    name, *rest = text.split(":")
    count = rest[0] if rest else "" if default is None else str(default)
    groups = rest[1].split(",") if len(rest) > 1 else []
    if len(rest) > 2 or not name or not count.isascii() or not count.isdigit() or len(count) > 9 or "" in groups:
        problem = "must be NAME:PARTITIONS, such as telemetry:4, or NAME:PARTITIONS:GROUP,GROUP, such as"
        raise ConfigurationError(field, f"{problem} telemetry:4:dashboard,archive, not {text[:80]!r}")
    return HubSpec(name, int(count), tuple(groups))


def config_document(specs: Iterable[HubSpec]) -> dict[str, object]:
    """Return hubs in the form of the official emulator's `Config.json`."""
    entities = [
        {
            "Name": spec.name,
            "PartitionCount": str(spec.partitions),
            "ConsumerGroups": [{"Name": group} for group in spec.consumer_groups],
        }
        for spec in specs
    ]
    namespace = {"Type": "EventHub", "Name": "emulatorNs1", "Entities": entities}
    return {"UserConfig": {"NamespaceConfig": [namespace], "LoggingConfig": {"Type": "File"}}}


_Name = Annotated[str, StringConstraints(pattern=rf"^{_NAME}$", max_length=MAX_NAME_LENGTH)]


class _Group(BaseModel):
    model_config = ConfigDict(extra="ignore")
    Name: Annotated[str, StringConstraints(pattern=rf"(?i)^\$default$|^{_NAME}$", max_length=MAX_NAME_LENGTH)]


class _Entity(BaseModel):
    model_config = ConfigDict(extra="ignore")
    Name: _Name
    PartitionCount: Annotated[int, Field(ge=1, le=MAX_PARTITIONS)]
    ConsumerGroups: list[_Group] | None = None


class _Namespace(BaseModel):
    model_config = ConfigDict(extra="ignore")
    Type: Literal["EventHub"]
    Name: str
    Entities: Annotated[list[_Entity], Field(min_length=1)]


class _UserConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")
    NamespaceConfig: Annotated[list[_Namespace], Field(min_length=1, max_length=1)]


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore")
    UserConfig: _UserConfig


def load_config(path: Path) -> list[HubSpec]:
    """Read the official emulator's `Config.json`; its limits on counts do not apply. Errors name the entry."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError("config", f"{path} cannot be read: {reason}") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError("config", f"{path} is not JSON: {error}") from None
    try:
        config = _File.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        problem = {
            "model_type": "must be an object",
            "string_pattern_mismatch": _NAME_RULE,
        }.get(first["type"], first["msg"])
        raise ConfigurationError("config", f"{path}: {where}: {problem}") from None
    entities = config.UserConfig.NamespaceConfig[0].Entities
    return hub_specs(
        HubSpec(entity.Name, entity.PartitionCount, tuple(group.Name for group in entity.ConsumerGroups or ()))
        for entity in entities
    )
