"""The stored form of leases, against bodies as every EventProcessorHost writes them."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.eventhubs.events import Checkpoint
from eventpump.storage.checkpoint_form import CheckpointRecord
from eventpump.storage.groups import SCOPE_RECORD, checkpoint_name, subscription_name
from eventpump.storage.leases.layout import (
    NO_NUMBER,
    LeaseBody,
    lease_blob,
    lease_directory,
    lease_metadata,
    owner_of,
    partition_of,
    record_prefix,
)
from eventpump.storage.records.texts import encode_texts

DOTNET = (
    b'{"Offset":"4294968112","SequenceNumber":1201,"PartitionId":"3","Owner":"worker-a-6f0c",'
    b'"Token":"1d2e7c1a-0000-4000-8000-000000000001","Epoch":17}'
)
DOTNET_REORDERED = (
    b'\xef\xbb\xbf{"PartitionId":"3","Owner":"worker-a-6f0c","Token":"1d2e7c1a-0000-4000-8000-000000000001",'
    b'"Epoch":17,"Offset":"4294968112","SequenceNumber":1201}'
)
JAVA = (
    b'{"offset":"4294968112","sequenceNumber":1201,"partitionId":"3","owner":"worker-a-6f0c",'
    b'"token":"1d2e7c1a-0000-4000-8000-000000000001","epoch":17}'
)
PYTHON = (
    b'{"partition_id": "3", "owner": "worker-a-6f0c", "token": "1d2e7c1a-0000-4000-8000-000000000001", "epoch": 17,'
    b' "offset": "4294968112", "sequence_number": 1201, "event_processor_context": null}'
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
integers = st.integers(-(2**63), 2**63 - 1)
bodies = st.builds(
    LeaseBody,
    partition_id=texts,
    owner=texts,
    token=texts,
    epoch=integers,
    offset=st.none() | texts.filter(bool),
    sequence_number=integers,
)


@pytest.mark.parametrize("raw", [DOTNET, DOTNET_REORDERED, JAVA, PYTHON], ids=["dotnet", "reordered", "java", "python"])
def test_body_is_read_as_every_host_writes_it(raw: bytes) -> None:
    """PascalCase, camelCase and snake_case bodies, in any order, mean the same lease."""
    body = LeaseBody.parse(raw, "3")
    assert (body.owner, body.token, body.epoch) == ("worker-a-6f0c", "1d2e7c1a-0000-4000-8000-000000000001", 17)
    assert body.checkpoint == Checkpoint("3", "4294968112", 1201)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"Offset":null,"SequenceNumber":0,"PartitionId":"3","Owner":"","Token":"","Epoch":2}',
        b'{"Offset":"","SequenceNumber":0,"PartitionId":"3","Owner":"","Token":"","Epoch":2}',
        b'{"sequenceNumber":0,"partitionId":"3","owner":"","epoch":2}',
        b'{"partition_id": "3", "owner": null, "token": null, "epoch": 2, "offset": null, "sequence_number": null}',
    ],
    ids=["dotnet", "dotnet-empty", "java", "python"],
)
def test_body_of_a_released_lease_is_read_as_every_host_writes_it(raw: bytes) -> None:
    """A released lease without a checkpoint reads the same, whether its writer uses null, "" or leaves things out."""
    assert LeaseBody.parse(raw, "3") == LeaseBody("3", epoch=2)
    assert LeaseBody.parse(raw, "3").checkpoint is None


def test_body_is_written_as_dotnet_does() -> None:
    """A body is byte for byte that of a .NET EventProcessorHost."""
    assert LeaseBody.parse(JAVA, "3").encode() == DOTNET
    assert LeaseBody("3").encode() == (
        b'{"Offset":null,"SequenceNumber":0,"PartitionId":"3","Owner":"","Token":"","Epoch":0}'
    )


@pytest.mark.parametrize("last", [0, 4, 2_000_000])
@pytest.mark.parametrize(
    "body", [LeaseBody("3", sequence_number=NO_NUMBER), LeaseBody("3", offset="-1", sequence_number=-1)],
    ids=["made", "pinned"],
)  # fmt: skip
def test_body_counts_event_0_for_readers_of_the_number(body: LeaseBody, last: int) -> None:
    """KEDA takes the difference of numbers as its lag, and Functions begins after the number where no offset is."""
    written = json.loads(body.encode())
    assert last - written["SequenceNumber"] == last + 1
    begins_after = written["Offset"] or written["SequenceNumber"]
    assert int(begins_after) < 0


def test_body_keeps_unknown_properties() -> None:
    """What this version does not know survives a rewrite."""
    raw = b'{"PartitionId":"3","Epoch":1,"event_processor_context":"mine","Later":{"x":[1]}}'
    written = json.loads(LeaseBody.parse(raw, "3").encode())
    assert written["event_processor_context"] == "mine"
    assert written["Later"] == {"x": [1]}
    assert [key for key in written if key.replace("_", "").lower() == "partitionid"] == ["PartitionId"]


def test_body_with_two_spellings_reads_the_written_one() -> None:
    """Where a body has a property twice, in two spellings, the one we write counts."""
    for raw in (b'{"Epoch":5,"epoch":9}', b'{"epoch":9,"Epoch":5}'):
        assert LeaseBody.parse(raw, "0").epoch == 5


def test_partition_is_the_one_in_the_blobs_name() -> None:
    """The partition is the one the blob is named after, whatever its body says."""
    assert LeaseBody.parse(DOTNET, "7").partition_id == "7"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b"[]",
        b"\xff\xfe",
        b'{"Epoch":"x"}',
        b'{"Epoch":1.5}',
        b'{"Epoch":true}',
        b'{"Epoch":9223372036854775808}',
        b'{"Owner":3}',
        b'{"Offset":12}',
        b"[" * 100_000,
    ],
)
def test_body_that_is_no_lease_raises_value_error(raw: bytes) -> None:
    """A body that is none raises ValueError, instead of being taken for a lease without a checkpoint."""
    with pytest.raises(ValueError, match=r"."):
        LeaseBody.parse(raw, "0")


@given(bodies)
def test_body_is_read_as_it_was_written(body: LeaseBody) -> None:
    """Every lease reads back as it was written."""
    assert LeaseBody.parse(body.encode(), body.partition_id) == body


@given(st.binary())
def test_body_of_any_bytes_raises_only_value_error(raw: bytes) -> None:
    """Parsing raises nothing but ValueError."""
    try:
        LeaseBody.parse(raw, "0")
    except ValueError:
        return


def test_lease_name_is_prefix_group_and_partition() -> None:
    """The prefix goes before the consumer group with nothing between; case is kept."""
    assert lease_blob("", "$Default", "3") == "$Default/3"
    assert lease_blob("NS/Hub/", "$Default", "3") == "NS/Hub/$Default/3"


def test_lease_names_are_only_directly_in_the_directory() -> None:
    """A name is a lease's only directly in the directory: v5 stores keep `checkpoint/0` and `ownership/0` below it."""
    directory = lease_directory("ns/hub/", "$default")
    assert partition_of("ns/hub/$default/12", directory) == "12"
    for name in ("ns/hub/$default/checkpoint/0", "ns/hub/$default/", "ns/hub/$default", "ns/hub/other/0"):
        assert partition_of(name, directory) is None


@given(st.text(st.sampled_from(string.ascii_letters + string.digits + "._-$"), min_size=1), texts.filter(bool))
def test_checkpoint_names_are_outside_every_groups_directory(group: str, subscription: str) -> None:
    """Checkpoints of other subscriptions lie in no directory that any consumer group's hosts list."""
    name = record_prefix("", "$Default") + checkpoint_name(subscription, "0")
    assert not name.startswith(lease_directory("", group))
    assert name.rpartition("/")[2] == "0"
    assert name.count("/") == 2


def test_metadata_names_the_owner() -> None:
    """OWNINGHOST names the owner and is absent where there is none; its case does not matter to a reader."""
    assert lease_metadata("host-a") == {"OWNINGHOST": "host-a"}
    assert lease_metadata("") == {}
    assert owner_of({"owninghost": "host-a", "other": "x"}) == "host-a"
    assert owner_of({"OWNINGHOST": ""}) is None
    assert owner_of({}) is None
    assert owner_of(None) is None


def test_repr_of_a_lease_shows_no_token() -> None:
    """A program that knows the token may steal the lease, so no repr shows it."""
    assert "1d2e7c1a" not in repr(LeaseBody.parse(DOTNET, "3"))


def test_checkpoint_metadata_is_read_as_it_was_written() -> None:
    """A checkpoint in metadata reads back, whatever a service made of the case of its keys."""
    fence = {"epoch": "4", "generation": "2", "clientidentifier": "host-a"}
    place = {"offset": "geo:17", "sequencenumber": "1201"}
    for checkpoint, expected in ((Checkpoint("3", "geo:17", 1201), place | fence), (None, fence)):
        record = CheckpointRecord(checkpoint, 4, "host-a", 2)
        assert json.loads(record.encode()) == expected
        for each in (expected, {key.upper(): value for key, value in expected.items()}):
            assert CheckpointRecord.decode(encode_texts(each), "3") == record
    claimed = CheckpointRecord(None, 4, "host-a", 2, "0f3a")
    assert json.loads(claimed.encode()) == {**fence, "claim": "0f3a"}
    assert CheckpointRecord.decode(claimed.encode(), "3") == claimed


def test_checkpoint_record_without_a_generation_is_the_first() -> None:
    """Records written before there were generations are read."""
    earlier = {"offset": "geo:17", "sequencenumber": "1201", "epoch": "4", "clientidentifier": "host-a"}
    assert CheckpointRecord.decode(encode_texts(earlier), "3") == CheckpointRecord(
        Checkpoint("3", "geo:17", 1201), 4, "host-a", 0
    )


def test_subscription_blobs_lie_beside_the_leases() -> None:
    """No record of a subscription, nor a checkpoint of one, is in the directory that hosts list as leases."""
    prefix = record_prefix("p/", "$Default")
    blobs = [prefix + name for name in (SCOPE_RECORD, subscription_name("a/b"), checkpoint_name("a.0f", "0"))]
    assert blobs == [
        "p/$Default~scope.json",
        "p/$Default~subscriptions/a%2Fb.json",
        "p/$Default~checkpoints/a.0f/0",
    ]
    for blob in blobs:
        assert partition_of(blob, lease_directory("p/", "$Default")) is None


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"offset": ""}', b'{"offset": "1", "sequencenumber": "x"}'])
def test_checkpoint_metadata_without_a_checkpoint_raises_value_error(raw: bytes) -> None:
    """A checkpoint blob that holds none raises ValueError, instead of starting at the default position unnoticed."""
    with pytest.raises(ValueError, match=r"."):
        CheckpointRecord.decode(raw, "0")
