"""What the emulator can be configured to serve, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventpump.emulator.config import HubSpec, config_document, hub_specs, load_config, parse_hub
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


def test_hub_option_names_partitions_and_consumer_groups() -> None:
    """NAME:PARTITIONS, and consumer groups after a further colon."""
    assert parse_hub("telemetry:4", "--hub") == HubSpec("telemetry", 4)
    assert parse_hub("telemetry:4:one,two", "--hub") == HubSpec("telemetry", 4, ("one", "two"))
    assert parse_hub("telemetry", "--hub", default=2) == HubSpec("telemetry", 2)


@pytest.mark.parametrize(
    "text",
    [
        *("telemetry", "telemetry:", ":4", "telemetry:four", "telemetry:0", "a b:1", "x:99999"),
        *("a:4:", "a:4:b,", "a:4:b:c", "a:b:4", "a:4:$x", "a::b"),
    ],
)
def test_hub_option_of_another_form_is_refused(text: str) -> None:
    """Anything else is a configuration error."""
    with pytest.raises(ConfigurationError):
        parse_hub(text, "--hub")


@pytest.mark.parametrize(
    ("hubs", "expected"),
    [
        ({"a": 1, "b": 2}, [HubSpec("a", 1), HubSpec("b", 2)]),
        ("a:3", [HubSpec("a", 3)]),
        ("a", [HubSpec("a", 4)]),
        (["a", "b:1:x"], [HubSpec("a", 4), HubSpec("b", 1, ("x",))]),
        (HubSpec("a", 3), [HubSpec("a", 3)]),
        ((HubSpec("a", 3), "b:2"), [HubSpec("a", 3), HubSpec("b", 2)]),
    ],
)
def test_hubs_may_be_given_in_every_form(hubs: object, expected: list[HubSpec]) -> None:
    """A text, a spec, several of them, or a dictionary; a name alone is a hub of four partitions."""
    assert hub_specs(hubs) == expected


@pytest.mark.parametrize("hubs", [4, None, [4], [("a", 1)], {"a": "1"}, b"a:1", {1: 2}, "a b"])
def test_hubs_of_another_type_are_refused(hubs: object) -> None:
    """Never an AttributeError."""
    with pytest.raises(ConfigurationError, match="hub"):
        hub_specs(hubs)


def test_printed_config_is_read_again(tmp_path: Path) -> None:
    """What is written in the official form declares the same hubs."""
    specs = [HubSpec("a", 1), HubSpec("b", 32, ("x", "y"))]
    assert load_config(write(tmp_path, config_document(specs))) == specs


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


@pytest.mark.parametrize("name", ["a/../b", "a/./b", "a//b", "a/.../b", "a/../../../b", "../a", "a/..", "/a", "a/"])
def test_hub_name_with_a_part_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """Capture's files are named for the hub: none of them may be outside of the directory, or another hub's."""
    with pytest.raises(ConfigurationError, match="only dots"):
        HubSpec(name, 1)
    with pytest.raises(ConfigurationError, match="only dots"):
        load_config(write(tmp_path, config(Name=name, PartitionCount=1)))


@pytest.mark.parametrize("name", ["a", "a/b", "a.b/c..d", "a/..b/.c", "a/_/-/b", "a/b.-_/c", "a/" * 127 + "b"])
def test_hub_name_with_dots_inside_of_its_parts_is_taken(tmp_path: Path, name: str) -> None:
    """Dots and slashes are no matter by themselves, and a long name is checked as fast as a short one."""
    assert [HubSpec(name, 1)] == load_config(write(tmp_path, config(Name=name, PartitionCount=1)))
    with pytest.raises(ConfigurationError):
        HubSpec(name[:254] + "/.", 1)
