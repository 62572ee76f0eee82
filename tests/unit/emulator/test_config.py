"""What the emulator can be told to serve, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventpump.emulator.config import HubSpec, hub_specs, load_config, parse_hub
from eventpump.errors import ConfigurationError


def config(**entity: Any) -> dict[str, Any]:
    return {
        "UserConfig": {
            "NamespaceConfig": [{"Type": "EventHub", "Name": "emulatorNs1", "Entities": [entity]}],
            "LoggingConfig": {"Type": "File"},
        }
    }


def write(tmp_path: Path, document: object) -> Path:
    path = tmp_path / "Config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_config_of_the_official_file_is_read(tmp_path: Path) -> None:
    """Names, counts and consumer groups come from the official emulator's file."""
    path = write(tmp_path, config(Name="eh1", PartitionCount=2, ConsumerGroups=[{"Name": "cg1"}]))
    assert load_config(path) == [HubSpec("eh1", 2, ("cg1",))]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{", "not JSON"),
        ("[]", "the file: must be an object"),
        ({}, "UserConfig"),
        ({"UserConfig": {"NamespaceConfig": []}}, "UserConfig.NamespaceConfig"),
        (config(PartitionCount=2), "Entities.0.Name"),
        (config(Name="eh1"), "Entities.0.PartitionCount"),
        (config(Name="eh1", PartitionCount=0), "Entities.0.PartitionCount"),
        (config(Name="_eh1", PartitionCount=1), "Entities.0.Name"),
        (config(Name="eh1", PartitionCount=1, ConsumerGroups=[{"Name": "$x"}]), "ConsumerGroups.0.Name"),
        (config(Name="eh1", PartitionCount=1, ConsumerGroups=5), "ConsumerGroups: Input should be a valid list"),
    ],
)
def test_config_with_a_wrong_entry_names_it(tmp_path: Path, document: object, says: str) -> None:
    """Each mistake in the file is one error that names the entry."""
    with pytest.raises(ConfigurationError) as caught:
        load_config(write(tmp_path, document))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_that_is_missing_is_named(tmp_path: Path) -> None:
    """A file that is not there is a configuration error, not a traceback."""
    with pytest.raises(ConfigurationError, match=r"nothing\.json cannot be read"):
        load_config(tmp_path / "nothing.json")


def test_hub_option_is_split_at_its_last_colon() -> None:
    """NAME:PARTITIONS is read from its last colon."""
    assert parse_hub("telemetry:4") == HubSpec("telemetry", 4)


@pytest.mark.parametrize("text", ["telemetry", "telemetry:", ":4", "telemetry:four", "telemetry:0", "a b:1", "x:99999"])
def test_hub_option_of_another_form_is_refused(text: str) -> None:
    """Anything else is a configuration error."""
    with pytest.raises(ConfigurationError):
        parse_hub(text)


def test_hub_declared_twice_is_refused() -> None:
    """Hub names compare without case."""
    with pytest.raises(ConfigurationError, match="twice"):
        hub_specs([HubSpec("a", 1), HubSpec("A", 2)])


@pytest.mark.parametrize("name", ["a\n", "\na", "a\nb", "a b"])
def test_hub_name_with_a_line_end_is_refused(name: str) -> None:
    """A line's end is no part of a name."""
    with pytest.raises(ConfigurationError):
        HubSpec(name, 1)
    with pytest.raises(ConfigurationError):
        HubSpec("h", 1, (name,))
