"""The stored forms of a consumer group's scope record and of its subscriptions."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.storage.scope_form import (
    HubNames,
    NamedRecord,
    ScopeRecord,
    SubscriptionRecord,
    encode_named_record,
    encode_subscription,
    parse_named_record,
    parse_subscription,
)

RECORD = ScopeRecord(
    datetime(2026, 3, 1, 12, 30, 15, 125_000, tzinfo=UTC),
    4,
    {"": "@latest", "3": "-1"},
    datetime(2026, 4, 1, tzinfo=UTC),
    frozenset({"2", "0"}),
)
WRITTEN = (
    '{"version":1,"hubCreatedAt":"2026-03-01T12:30:15.125000+00:00","partitionCount":4,"starts":{"":"@latest","3":"-1"},'
    '"resetFor":"2026-04-01T00:00:00+00:00","resetPartitions":["0","2"]}'
)

zones = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
times = st.datetimes(datetime(3, 1, 1), datetime(9997, 1, 1), timezones=zones)
texts = st.text(st.characters(exclude_categories=["Cs"]))
records = st.builds(
    ScopeRecord,
    hub_created_at=times,
    partition_count=st.integers(0, 2**31),
    starts=st.dictionaries(texts, texts),
    reset_for=st.none() | times,
    reset_partitions=st.frozensets(texts),
)


NAMES = HubNames("example.servicebus.windows.net", "telemetry")
NAMED = '{"version":2,"namespace":"example.servicebus.windows.net","hub":"telemetry"'


def test_named_record_is_written_in_a_fixed_form() -> None:
    """With a record and without one; other versions of eventpump read it."""
    assert encode_named_record(NAMES, None, "5e").decode() == NAMED + ',"id":"5e"}'
    with_record = NAMED + WRITTEN.removeprefix('{"version":1').removesuffix("}") + ',"id":"5e"}'
    assert encode_named_record(NAMES, RECORD, "5e").decode() == with_record


@given(st.builds(HubNames, texts, texts), st.none() | records, texts)
def test_named_record_is_read_as_it_was_written(names: HubNames, record: ScopeRecord | None, body_id: str) -> None:
    """Every one comes back as it was, with or without a byte order mark, whatever its random text."""
    body = encode_named_record(names, record, body_id)
    assert parse_named_record(body) == parse_named_record(b"\xef\xbb\xbf" + body)
    assert parse_named_record(body) == NamedRecord(names, record, body_id)


@pytest.mark.parametrize(("members", "names"), [(WRITTEN, None), (NAMED + WRITTEN.removeprefix('{"version":1'), NAMES)])
def test_named_record_of_an_earlier_version_is_read(members: str, names: HubNames | None) -> None:
    """One without names, and one without the random text."""
    assert parse_named_record(members) == NamedRecord(names, RECORD)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (NAMED.replace('"telemetry"', "5") + "}", "does not name its hub"),
        ('{"version":2,"hub":"telemetry"}', "does not name its hub"),
        (NAMED + ',"starts":{}}', "lacks members, or has unknown ones: hubCreatedAt"),
        (NAMED + ',"later":1}', "lacks members"),
        (NAMED.replace("2", "3", 1) + "}", "has version 3"),
        ("[]", "not a JSON object"),
    ],
)
def test_named_record_of_another_form_raises(text: str, reason: str) -> None:
    """What is not understood is refused, not taken for a record without names."""
    with pytest.raises(ValueError, match=reason):
        parse_named_record(text)


def test_names_of_a_hub_are_the_same_in_any_case() -> None:
    """As to Event Hubs. Another hub, or another namespace, is another."""
    assert NAMES.is_same(HubNames("EXAMPLE.servicebus.windows.net", "Telemetry"))
    assert not NAMES.is_same(HubNames(NAMES.namespace, "alerts"))
    assert not NAMES.is_same(HubNames("staging.servicebus.windows.net", NAMES.hub))


def test_record_with_a_time_without_a_zone_is_refused() -> None:
    """A naive time would mean another moment on another machine."""
    with pytest.raises(ValueError, match="time zone"):
        encode_named_record(NAMES, ScopeRecord(datetime(2026, 3, 1), 4), "5e")


@pytest.mark.parametrize(
    ("member", "value", "reason"),
    [
        ("version", 3, "has version 3, and this version of eventpump knows 1"),
        ("version", None, "version None"),
        ("version", True, "version True"),
        ("version", "1", "version '1'"),
        ("hubCreatedAt", None, "hubCreatedAt is not a time"),
        ("hubCreatedAt", "yesterday", "hubCreatedAt is not a time"),
        ("hubCreatedAt", "2026-03-01T12:30:15", "hubCreatedAt has no time zone"),
        ("resetFor", 5, "resetFor is not a time"),
        ("partitionCount", -1, "partitionCount"),
        ("partitionCount", 1.0, "partitionCount"),
        ("partitionCount", True, "partitionCount"),
        ("partitionCount", "4", "partitionCount"),
        ("starts", [], "starts"),
        ("starts", {"": None}, "starts"),
        ("resetPartitions", {"0": "1"}, "resetPartitions"),
        ("resetPartitions", [0], "resetPartitions"),
        ("later", 1, "unknown ones: later"),
    ],
)
def test_record_with_an_odd_member_is_refused_by_name(member: str, value: Any, reason: str) -> None:
    """A member of the wrong kind, an unknown one and another version are each refused, and named."""
    with pytest.raises(ValueError, match=reason):
        parse_named_record(json.dumps({**json.loads(WRITTEN), member: value}))


@pytest.mark.parametrize(
    "member", ["version", "hubCreatedAt", "partitionCount", "starts", "resetFor", "resetPartitions"]
)
def test_record_with_a_missing_member_is_refused(member: str) -> None:
    """No member has a default: a record cut short is none."""
    members = json.loads(WRITTEN)
    del members[member]
    with pytest.raises(ValueError, match="version None" if member == "version" else f"lacks members.*{member}"):
        parse_named_record(json.dumps(members))


@pytest.mark.parametrize("raw", ["", b"", b"\xff\xfe", "[]", "1", "null", WRITTEN[:-1], "[" * 100_000])
def test_record_of_any_damage_raises_only_value_error(raw: str | bytes) -> None:
    """Damage is a ValueError, nothing else, and never a record."""
    with pytest.raises(ValueError, match="the scope record"):
        parse_named_record(raw)


SUBSCRIPTION = SubscriptionRecord(
    "archive", "0f3a", datetime(2026, 3, 1, 12, 30, 15, tzinfo=UTC), 2, {"0": "offset>-1", "1": "number>=7"}, True
)
WRITTEN_SUBSCRIPTION = (
    '{"version":1,"name":"archive","incarnation":"0f3a","hubCreatedAt":"2026-03-01T12:30:15+00:00","partitionCount":2,'
    '"starts":{"0":"offset>-1","1":"number>=7"},"isActive":true}'
)


def test_encode_subscription_writes_the_pinned_form() -> None:
    """Other versions of eventpump read it."""
    assert encode_subscription(SUBSCRIPTION, "5e").decode() == WRITTEN_SUBSCRIPTION.removesuffix("}") + ',"id":"5e"}'
    assert parse_subscription(WRITTEN_SUBSCRIPTION) == SUBSCRIPTION
    assert SUBSCRIPTION.key == "archive.0f3a"


@given(
    st.builds(
        SubscriptionRecord,
        name=texts,
        incarnation=texts,
        hub_created_at=times,
        partition_count=st.integers(0, 2**31),
        starts=st.dictionaries(texts, texts),
        is_active=st.booleans(),
    )
)
def test_parse_subscription_returns_what_was_encoded(record: SubscriptionRecord) -> None:
    """Every record comes back as it was."""
    assert parse_subscription(encode_subscription(record, "5e")) == record


@pytest.mark.parametrize(
    ("member", "value", "reason"),
    [
        ("version", 2, "version 2"),
        ("name", 5, "name"),
        ("incarnation", None, "incarnation"),
        ("isActive", 1, "isActive"),
        ("hubCreatedAt", "2026-03-01T12:30:15", "hubCreatedAt has no time zone"),
        ("partitionCount", True, "partitionCount"),
        ("starts", [], "starts"),
        ("later", 1, "unknown ones: later"),
    ],
)
def test_parse_subscription_with_an_odd_member_raises_its_name(member: str, value: Any, reason: str) -> None:
    """A member of the wrong kind, an unknown one and another version are each refused, and named."""
    odd = json.loads(WRITTEN_SUBSCRIPTION) | {member: value}
    with pytest.raises(ValueError, match=reason):
        parse_subscription(json.dumps(odd))
