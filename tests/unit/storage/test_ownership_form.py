"""Checkpoints of azure-eventhub 5 and the other SDKs, in the forms in which each has written them."""

from __future__ import annotations

import pytest

from eventpump.interfaces import ConsumerScope
from eventpump.storage.ownership_form import (
    CheckpointMetadata,
    group_directory,
    parse_checkpoint,
    parse_ownership,
)

SCOPE = ConsumerScope("Fleet.servicebus.windows.net", "Telemetry", "$Default")


@pytest.mark.parametrize(
    ("metadata", "offset", "number"),
    [
        ({"offset": "4294968112", "sequencenumber": "1201"}, "4294968112", 1201),  # Python, JavaScript, Go
        ({"Offset": "4294968112", "SequenceNumber": "1201"}, "4294968112", 1201),  # old Java
        ({"sequencenumber": "7", "offset": "no offset", "clientidentifier": "a"}, None, 7),  # .NET 5.11
        ({"sequencenumber": "7", "offset": ""}, None, 7),
        ({"sequencenumber": "", "offset": "12"}, "12", None),  # .NET, given an offset alone
        ({"sequencenumber": "-9223372036854775808", "offset": "12"}, "12", None),
        (
            {"offset": "1-2-3:00000000-0000-0000-0000-000000000000", "sequencenumber": "5"},
            "1-2-3:00000000-0000-0000-0000-000000000000",
            5,
        ),
        ({"offset": "12", "sequencenumber": "many"}, "12", None),
        ({"offset": "0", "sequencenumber": "0", "other": "x"}, "0", 0),
    ],
)
def test_checkpoint_of_each_writer_is_read(metadata: dict[str, str], offset: str | None, number: int | None) -> None:
    """Whatever the case of the keys, and with the texts that stand for nothing."""
    assert parse_checkpoint(metadata) == CheckpointMetadata(offset, number, None)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"offset": "", "sequencenumber": ""},
        {"offset": "no offset"},
        {"sequencenumber": "-9223372036854775808"},
        {"sequencenumber": "many"},
        {"sequencenumber": str(2**63)},
        {"sequencenumber": "1_000"},
        {"sequencenumber": "+5"},
        {"sequencenumber": "٣"},
    ],
)
def test_checkpoint_without_a_position_has_a_problem(metadata: dict[str, str] | None) -> None:
    """It is not taken for the start of the stream."""
    found = parse_checkpoint(metadata)
    assert (found.offset, found.sequence_number) == (None, None)
    assert found.problem


@pytest.mark.parametrize(
    ("metadata", "owner"),
    [({"ownerid": "a"}, "a"), ({"OwnerId": "a"}, "a"), ({"ownerid": ""}, None), ({}, None), (None, None)],
)
def test_released_ownership_has_no_owner(metadata: dict[str, str] | None, owner: str | None) -> None:
    """Nor has one without the key."""
    assert parse_ownership(metadata).owner == owner


def test_names_are_in_lower_case_unless_they_are_to_be_preserved() -> None:
    """Python, .NET and JavaScript write the former, Java and Go the latter."""
    assert group_directory(SCOPE) == "fleet.servicebus.windows.net/telemetry/$default/"
    assert group_directory(SCOPE, preserve_case=True) == "Fleet.servicebus.windows.net/Telemetry/$Default/"
