"""The records of the sink: each is read as it was written, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.errors import ConfigurationError
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS
from eventpump.spark.sink.records import (
    Done,
    KeptRows,
    LossReason,
    PackingLimits,
    PartitionDone,
    PartitionOutcome,
    PartitionPlan,
    PartitionReceipt,
    Plan,
    Record,
    RunClaim,
    Sink,
    StateLost,
    TakenProducer,
    TakeOver,
    batch_of,
    batch_of_rows,
    decode_outcome,
    decode_record,
    directory_name,
    done_name,
    encode_outcome,
    encode_record,
    is_obsolete,
    plan_name,
    rows_stem,
    token_name,
)
from tests.unit.spark.plans import changed

numbers = st.integers(0, NUMBERS - 1)
counts = st.integers(0, 2**40)
texts = st.text(min_size=1, max_size=8)
sinks = st.builds(Sink, sink_id=texts, namespace=texts, hub=texts)
common: dict[str, Any] = {
    "sink": sinks,
    "query_id": st.none() | texts,
    "run_id": texts,
    "batch_id": counts,
}
producers: dict[str, Any] = {
    "partition_id": texts,
    "producer_id": st.integers(0, MAX_PRODUCER_ID),
    "owner_level": st.integers(0, MAX_OWNER_LEVEL),
}
tails = st.integers(-1, 2**60)
receipts = st.builds(
    PartitionReceipt,
    **producers,
    count=counts,
    offset=counts,
    first_number=st.none() | numbers,
    next_number=numbers,
    found=counts,
)
losses = st.builds(StateLost, partition_id=texts, reason=st.sampled_from(LossReason), stored=counts)
records = st.one_of(
    st.builds(
        Plan,
        **common,
        partitions=st.lists(
            st.builds(
                PartitionPlan,
                **producers,
                next_number=numbers,
                nothing=st.integers(-1, 0),
                is_fresh=st.booleans(),
                tail=tails,
                count=counts,
                offset=counts,
                missing=counts,
            ),
            max_size=3,
        ).map(tuple),
        limits=st.builds(PackingLimits, max_events=st.integers(1, 10**6), max_bytes=st.integers(1024, 2**40)),
        is_stamped=st.booleans(),
        rows=st.none() | st.builds(KeptRows, name=texts, size=st.integers(1, 2**40), digest=texts),
        revision=counts,
    ),
    st.builds(
        Done,
        **common,
        partitions=st.lists(
            st.builds(
                PartitionDone,
                **producers,
                next_number=numbers,
                nothing=st.integers(-1, 0),
                is_fresh=st.booleans(),
                tail=tails,
                count=counts,
                first_number=st.none() | numbers,
            ),
            max_size=3,
        ).map(tuple),
        receipts=st.lists(receipts, max_size=3).map(tuple),
    ),
    st.builds(
        TakeOver,
        **common,
        producers=st.lists(st.builds(TakenProducer, **producers), max_size=3).map(tuple),
    ),
    st.builds(RunClaim, sink=sinks, query_id=st.none() | texts, run_id=texts, batch_id=counts),
)


@given(records)
def test_record_is_read_as_it_was_written(record: Record) -> None:
    """Every record comes back equal, and equal records are equal bytes; none is taken for another kind."""
    raw = encode_record(record)
    assert decode_record(raw, type(record)) == record
    assert encode_record(decode_record(raw, Plan, Done, TakeOver, RunClaim)) == raw
    others = [kind for kind in (Plan, Done, TakeOver, RunClaim) if kind is not type(record)]
    with pytest.raises(ValueError, match="it is no"):
        decode_record(raw, *others)


@given(receipts | losses)
def test_outcome_is_read_as_it_was_written(outcome: PartitionOutcome) -> None:
    """What a task reports comes back equal from its text."""
    assert decode_outcome(encode_outcome(outcome)) == outcome


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"version": 2, "kind": "plan", "sink"', "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "no version"),
        (lambda: changed(version="2"), "no version"),
        (lambda: changed(version=0), "no version"),
        (lambda: changed(version=1), "earlier version"),
        (lambda: changed(version=3), "newer version"),
        (lambda: changed(version=3, kind="else"), "newer version"),
        (lambda: changed(kind="done"), "it is not a plan"),
        (lambda: changed(batch_id="7"), "batch_id: .*integer"),
        (lambda: changed(batch_id=True), "batch_id: .*integer"),
        (lambda: changed(batch_id=-1), "batch_id: .*greater"),
        (lambda: changed(sink=...), "sink: .*required"),
        (lambda: changed(unheard_of=1), "unheard_of: .*not permitted"),
        (lambda: changed(partitions=[{}]), r"partitions\.0\.partition_id"),
    ],
)
def test_record_of_damaged_or_foreign_bytes_is_refused(raw: bytes | Callable[[], bytes], says: str) -> None:
    """The error says whether bytes are not JSON, of another kind or of a newer version; they are never a record."""
    with pytest.raises(ValueError, match=says):
        decode_record(raw if isinstance(raw, bytes) else raw(), Plan)


def test_record_names_sort_by_batch() -> None:
    """Names of records sort by batch and contain it; other files' contain none."""
    batches = [0, 9, 10, 41, 10**11]
    names = [name for each in batches for name in (done_name(each), plan_name(each), plan_name(each, 1))]
    assert sorted(names) == names
    assert [batch_of(name) for name in names[::3]] == batches
    assert [batch_of(name) for name in ("", "000000000041.json", "000000000041.staged.json", ".tmp-41")] == [None] * 4


def test_names_of_rows_have_their_batch() -> None:
    """What a listing of rows shows has the batch in its name, or is something else: a run's token, a record."""
    name = f"{rows_stem(41)}.{'0f' * 16}"
    assert batch_of_rows(name) == 41
    assert batch_of(name) is None
    assert [batch_of_rows(each) for each in (done_name(41), "run.41", f"{name}.tmp", rows_stem(41))] == [None] * 4
    names = [name, token_name(3, "0f"), token_name(4, "0f"), "else"]
    assert [is_obsolete(each, 41, 4) for each in names] == [False, True, False, False]
    assert [is_obsolete(each, 42, 3) for each in names] == [True, False, False, False]


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_directory_names_differ_by_sink_id(one: str, other: str) -> None:
    """Different sink ids are different, harmless names; what cannot be a name is refused."""
    for text in (one, other):
        if not text.isprintable():
            with pytest.raises(ConfigurationError, match="sink_id"):
                directory_name(text)
            return
    first, second = directory_name(one), directory_name(other)
    assert (first == second) == (one == other)
    assert not set(first) & set('./\\:*?"<>| ')


@given(
    st.tuples(*[st.text("a~é", min_size=1, max_size=3)] * 2), st.tuples(*[st.text("a~é", min_size=1, max_size=3)] * 2)
)
def test_directories_differ_by_part(one: tuple[str, str], other: tuple[str, str]) -> None:
    """No part has the directory of another, or of a sink."""
    first, second = (Sink(sink_id=sink_id, part=part, namespace="n", hub="h") for sink_id, part in (one, other))
    assert (first.directory == second.directory) == (one == other)
    assert (first.stamp_name == second.stamp_name) == (one == other)
    whole = second.model_copy(update={"part": None})
    assert first.rows_directory != first.model_copy(update={"hub": "other"}).rows_directory
    assert first.directory != whole.directory == directory_name(other[0])


def test_sink_id_that_is_too_long_is_refused() -> None:
    """A name must fit the file systems it is for."""
    assert directory_name("n" * 200)
    for text in ("n" * 201, "é" * 40, ""):
        with pytest.raises(ConfigurationError, match="sink_id"):
            directory_name(text)
