"""The document from which checkpoints are restored."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.checkpoints import CheckpointExport, ExportedCheckpoint
from eventpump.errors import ConfigurationError
from eventpump.interfaces import ConsumerScope

CREATED = datetime(2030, 1, 1, tzinfo=UTC)
SCOPE = ConsumerScope("a.servicebus.windows.net", "telemetry", "$Default")
EXPORT = CheckpointExport(
    SCOPE, CREATED, CREATED, "v5", {"0": ExportedCheckpoint(7, "100"), "1": None, "2": ExportedCheckpoint(None, "7")}
)

_offsets = st.text(st.characters(exclude_characters="'", categories=["L", "N", "P"]), min_size=1)
_checkpoints = st.one_of(
    st.none(),
    st.builds(ExportedCheckpoint, st.integers(-1, 2**63 - 1), st.one_of(st.none(), _offsets)),
    st.builds(ExportedCheckpoint, st.none(), _offsets),
)


@given(st.dictionaries(st.integers(0, 31).map(str), _checkpoints))
def test_document_is_read_as_it_was_written(partitions: dict[str, ExportedCheckpoint | None]) -> None:
    """Also that a partition had no checkpoint, or one without a number or an offset."""
    export = CheckpointExport(SCOPE, CREATED, CREATED, "v5", partitions)
    assert CheckpointExport.decode(export.encode(), "file") == export


@given(st.integers(0, len(EXPORT.encode().rstrip()) - 1))
def test_document_that_is_cut_off_is_refused(length: int) -> None:
    """Wherever it ends: a part of the partitions is not restored for all of them."""
    with pytest.raises(ConfigurationError, match=r"FILE: before\.json: .*; nothing was written"):
        CheckpointExport.decode(EXPORT.encode()[:length], "before.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "something else"}, "is not an export of checkpoints, as eventpump checkpoints export writes it"),
        ({"version": 2}, "is an export of a version that this one does not know"),
        ({"hub": 4}, "its hub is not a text"),
        ({"exported_at": "soon"}, "its exported_at is not a time"),
        ({"hub_created_at": "2030-01-01T00:00:00"}, "its hub_created_at has no time zone"),
        ({"partitions": []}, "it has no partitions"),
        ({"partitions": {"0": 7}}, "what it has of partition 0 is not a checkpoint"),
        ({"partitions": {"0": {"sequence_number": True, "offset": "1"}}}, "the sequence number of partition 0 is not"),
        ({"partitions": {"0": {"sequence_number": 2**63, "offset": "1"}}}, "the sequence number of partition 0 is not"),
        ({"partitions": {"0": {"sequence_number": 7, "offset": "1'"}}}, "the offset of partition 0 is not the text"),
        ({"partitions": {"0": {}}}, "the checkpoint of partition 0 has neither a sequence number nor an offset"),
    ],
)
def test_document_of_another_form_is_refused(changes: dict[str, object], says: str) -> None:
    """With what is wrong, and the name of the file."""
    document = json.loads(EXPORT.encode()) | changes
    with pytest.raises(ConfigurationError) as refused:
        CheckpointExport.decode(json.dumps(document).encode(), "before.json")
    assert f"before.json: {says}" in str(refused.value)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe\x00", b"partition,number\n0,7\n", b"[" * 100_000])
def test_file_of_something_else_is_refused(raw: bytes) -> None:
    """Whatever bytes it has."""
    with pytest.raises(ConfigurationError, match=r"a picture: .*; nothing was written"):
        CheckpointExport.decode(raw, "a picture")


def test_document_is_restored_to_its_own_group_only() -> None:
    """Of the hub as it was created then, in a store of the form that it had. Names are compared as the service does."""
    EXPORT.check(ConsumerScope("A.servicebus.windows.net", "Telemetry", "$default"), CREATED, "v5", "file")
    other = ConsumerScope("a.servicebus.windows.net", "telemetry", "second")
    with pytest.raises(ConfigurationError, match=r"consumer group [$]Default, and this is .* consumer group second"):
        EXPORT.check(other, CREATED, "v5", "file")
    with pytest.raises(ConfigurationError, match=r"it was recreated 2030-01-02 00:00:00 UTC.*use reset"):
        EXPORT.check(SCOPE, CREATED + timedelta(days=1), "v5", "file")
    with pytest.raises(ConfigurationError, match=r"in the form v5, and the store has the form eventpump.*copy"):
        EXPORT.check(SCOPE, CREATED, "eventpump", "file")
