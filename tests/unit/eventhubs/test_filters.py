from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.codec import decode, encode
from eventpump.amqp.types import Described, Symbol, ULong
from eventpump.eventhubs.events import EventPosition
from eventpump.eventhubs.filters import answered_filter, parse_selector, parse_source_filter, selector, source_filter
from eventpump.eventhubs.names import SELECTOR_FILTER

NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
NOON_MS = 1_704_110_400_000
DESCRIPTORS = (SELECTOR_FILTER, ULong(0x0000_468C_0000_0004), ULong(0x0000_0013_7000_000A))
"""The three descriptors in use: Python and Java; JavaScript and Go; .NET."""

milliseconds = st.datetimes(timezones=st.just(UTC)).map(
    lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)
)
positions = st.one_of(
    st.builds(
        EventPosition.at_offset,
        st.text(st.characters(exclude_characters="'", exclude_categories=["Cs"]), min_size=1),
        inclusive=st.booleans(),
    ),
    st.builds(EventPosition.at_sequence_number, st.integers(-(2**63), 2**63 - 1), inclusive=st.booleans()),
    st.builds(EventPosition.at_enqueued_time, milliseconds, inclusive=st.booleans()),
)


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (EventPosition.earliest(), "amqp.annotation.x-opt-offset > '-1'"),
        (EventPosition.latest(), "amqp.annotation.x-opt-offset > '@latest'"),
        (EventPosition.at_offset("1234", inclusive=True), "amqp.annotation.x-opt-offset >= '1234'"),
        (EventPosition.at_offset("geo:1:2"), "amqp.annotation.x-opt-offset > 'geo:1:2'"),
        (EventPosition.at_sequence_number(7), "amqp.annotation.x-opt-sequence-number > '7'"),
        (EventPosition.at_enqueued_time(NOON), f"amqp.annotation.x-opt-enqueued-time > '{NOON_MS}'"),
    ],
)
def test_selector_is_written_as_the_official_client_does(position: EventPosition, text: str) -> None:
    """A position is written as the official Python client writes it, and read back."""
    assert selector(position) == text
    assert parse_selector(text) == position


@given(positions)
def test_selector_reads_back_every_position(position: EventPosition) -> None:
    """Every position goes through the wire and comes back; from a number on, as after the one before."""
    filters, _ = decode(encode(source_filter(position)))
    found = parse_source_filter(filters)
    if position.sequence_number is None or not position.inclusive:
        assert found == position
    elif position.sequence_number <= 0:
        assert found == EventPosition.earliest()
    else:
        assert found == EventPosition.at_sequence_number(position.sequence_number - 1)


def test_selector_of_a_time_between_milliseconds() -> None:
    """Between two milliseconds, exclusive and inclusive both begin at the next event's."""
    within = NOON + timedelta(microseconds=500)
    assert selector(EventPosition.at_enqueued_time(within)).endswith(f"> '{NOON_MS}'")
    assert selector(EventPosition.at_enqueued_time(within, inclusive=True)).endswith(f">= '{NOON_MS + 1}'")


def test_selector_of_a_time_in_another_zone_is_the_same() -> None:
    """A position in another zone is the same moment."""
    there = NOON.astimezone(timezone(timedelta(hours=5)))
    assert selector(EventPosition.at_enqueued_time(there)) == selector(EventPosition.at_enqueued_time(NOON))


@pytest.mark.parametrize("descriptor", [*DESCRIPTORS, Symbol("acme:odd"), ULong(1)])
def test_filter_is_known_by_its_key_whatever_its_descriptor(descriptor: object) -> None:
    """The key of the map identifies the filter; its descriptor does not matter."""
    found = parse_source_filter({SELECTOR_FILTER: Described(descriptor, "amqp.annotation.x-opt-offset > '5'")})
    assert found == EventPosition.at_offset("5")


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("amqp.annotation.x-opt-offset > -1", EventPosition.earliest()),
        ("amqp.annotation.x-opt-offset > @latest", EventPosition.latest()),
        ("amqp.annotation.x-opt-offset >= 99", EventPosition.at_offset("99", inclusive=True)),
        ("amqp.annotation.x-opt-sequence-number > 12", EventPosition.at_sequence_number(12)),
        (f"amqp.annotation.x-opt-enqueued-time > {NOON_MS}", EventPosition.at_enqueued_time(NOON)),
        ("  amqp.annotation.x-opt-offset>='7' ", EventPosition.at_offset("7", inclusive=True)),
    ],
)
def test_selector_without_quotes_is_read(text: str, position: EventPosition) -> None:
    """Values without quotes, as .NET writes them, are read too."""
    assert parse_selector(text) == position


@pytest.mark.parametrize(
    "filters", [None, {}, {Symbol("other"): Described(Symbol("other"), "x")}, {SELECTOR_FILTER: None}]
)
def test_source_without_a_filter_has_no_position(filters: dict[Symbol, Described] | None) -> None:
    """A source without a selector has no position."""
    assert parse_source_filter(filters) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x-opt-offset > '1'",
        "amqp.annotation.x-opt-offset = '1'",
        "amqp.annotation.x-opt-offset < '1'",
        "amqp.annotation.x-opt-offset >",
        "amqp.annotation.x-opt-offset > ''",
        "amqp.annotation.x-opt-offset > '1",
        "amqp.annotation.x-opt-offset > '1' AND 1 > 0",
        "amqp.annotation.x-opt-partition-key > 'a'",
        "amqp.annotation.x-opt-sequence-number > 'abc'",
        "amqp.annotation.x-opt-sequence-number > '@latest'",
        "amqp.annotation.x-opt-sequence-number > '1_0'",
        "amqp.annotation.x-opt-sequence-number > '9223372036854775808'",
        "amqp.annotation.x-opt-enqueued-time > '1.5'",
        "amqp.annotation.x-opt-enqueued-time > '9223372036854775807'",
    ],
)
def test_selector_of_junk_is_refused_with_a_reason(text: str) -> None:
    """A selector that names no position is refused with a text that says what is wrong with it."""
    with pytest.raises(ValueError, match="the selector"):
        parse_source_filter({SELECTOR_FILTER: Described(SELECTOR_FILTER, text)})


def test_selector_that_is_no_text_is_refused() -> None:
    """A selector that is no text is refused."""
    with pytest.raises(ValueError, match="must be text"):
        parse_source_filter({SELECTOR_FILTER: Described(SELECTOR_FILTER, 5)})


@given(st.text() | st.from_regex(r"amqp\.annotation\.x-opt-[a-z-]{1,20} >=? '?.*'?"))
def test_selector_of_any_text_raises_only_value_error(text: str) -> None:
    """Any text is a position or a `ValueError`, and nothing else."""
    try:
        parse_selector(text)
    except ValueError:
        return


@pytest.mark.parametrize("descriptor", DESCRIPTORS)
def test_filter_is_answered_with_the_service_s_descriptor(descriptor: object) -> None:
    """Whatever the client's was, and other filters as they came (attach-receiver-start)."""
    sent = {SELECTOR_FILTER: Described(descriptor, "a > 'b'"), Symbol("other"): 1}
    answered = answered_filter(sent)
    assert answered == {SELECTOR_FILTER: Described(ULong(0x0000_0013_7000_000A), "a > 'b'"), Symbol("other"): 1}
    assert answered_filter({Symbol("other"): 1}) == {Symbol("other"): 1}
    assert answered_filter(None) is None
