"""The recorded exchanges are well formed: they cite recordings, and their frames have fields that AMQP has."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from eventpump.amqp.performatives import AmqpError, Composite, Source, Target
from tests.recorded import (
    FOLDER,
    PERFORMATIVES,
    Exchange,
    Frame,
    exchanges,
    payload_bytes,
    placeholders,
    recordings,
    sections,
)

NESTED = {"source": Source, "target": Target, "error": AmqpError}
SECTIONS = range(0x70, 0x79)
NUMBERS = {"handle", "delivery_id", "delivery_tag", "delivery_count", "first", "next_incoming_id", "next_outgoing_id"}
"""Fields that count something: two exchanges that differ in these only are one."""


def _names(cls: type[Composite]) -> set[str]:
    return {each.name for each in dataclasses.fields(cls)}  # type: ignore[arg-type]  # each of them is a dataclass


def _unknown(frame: Frame) -> Iterator[str]:
    """Yield the fields of a frame that its performative does not have."""
    cls = PERFORMATIVES[frame.name]
    fields = frame.fields or {}
    yield from fields.keys() - (_names(cls) if cls else set())
    for name, kind in NESTED.items():
        if name in fields:
            yield from (f"{name}.{each}" for each in fields[name].keys() - _names(kind))


def _shape(value: Any) -> Any:
    """Return what distinguishes exchanges: all but counted numbers."""
    if isinstance(value, Mapping):
        return {key: _shape(each) for key, each in sorted(value.items()) if key not in NUMBERS}
    if isinstance(value, (list, tuple)):
        return [_shape(each) for each in value]
    return re.sub(r"\d+", "N", value) if isinstance(value, str) else value


def _payload_shape(payload: str | None) -> list[Any]:
    """Return a payload's sections by kind: the keys of maps in their order, texts, and types of other values."""
    if payload is None:
        return []
    if "<rest:" in payload:
        return [re.sub(r"\d+", "N", payload)]
    return [
        [code, [[str(key), _types(each)] for key, each in value.items()] if isinstance(value, dict) else _types(value)]
        for code, value in sections(payload_bytes(payload))
    ]


def _types(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"[\d\0]+", "N", value)
    if isinstance(value, list):
        return [_types(each) for each in value]
    if isinstance(value, bytes) and value[:2] == b"\x00\x53":
        return [[code, _types(each)] for code, each in sections(value)]
    return f"{type(value).__name__}{'' if value else ' empty'}"


def _fingerprint(exchange: Exchange) -> str:
    return json.dumps(
        [
            [frame.by, frame.name, _shape(frame.fields), _payload_shape(frame.payload), _shape(frame.message)]
            for frame in exchange.frames
        ]
    )


def test_recordings_are_files_of_one_commit_each() -> None:
    """At least 60 recordings were read; each is named once, by path and commit, and at least one exchange cites it."""
    assert len(recordings()) >= 60
    assert len({each.path for each in recordings().values()}) == len(recordings())
    for each in recordings().values():
        assert re.fullmatch(r"[0-9a-f]{40}", each.commit), each.id
        assert re.fullmatch(r"sdk/eventhub/azure-eventhub/tests/amqpproxy_recordings/livetest/\S+ ?.*\.json", each.path)
        assert each.shows
    cited = {name for exchange in exchanges() for name in exchange.recordings}
    assert cited == recordings().keys()


def test_exchanges_are_named_and_cite_recordings() -> None:
    """There are at least 150 exchanges, each with its own name and at least one recording that was read."""
    assert len(exchanges()) >= 150
    assert len({each.name for each in exchanges()}) == len(exchanges())
    for each in exchanges():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", each.name)
        assert each.kind
        assert each.shows
        assert each.recordings
        assert each.frames


def test_exchanges_differ_in_more_than_names_numbers_and_times() -> None:
    """No two exchanges have the same frames with the same fields and the same sections."""
    seen: dict[str, str] = {}
    for each in exchanges():
        other = seen.setdefault(_fingerprint(each), each.name)
        assert other == each.name, f"{each.name} is {other}"


@pytest.mark.parametrize("exchange", exchanges(), ids=lambda each: each.name)
def test_frames_have_known_fields(exchange: Exchange) -> None:
    """Every frame is one that AMQP has, of one of both sides, and has only fields of its performative. A frame without
    fields is a heartbeat, or a request of the client of which a recording has the message only."""
    for at, frame in enumerate(exchange.frames):
        assert frame.by in ("client", "service")
        assert frame.name in PERFORMATIVES
        assert list(_unknown(frame)) == []
        assert frame.after is None or (at > 0 and frame.after >= 0)
        if frame.name == "empty":
            assert frame.fields is None
            assert frame.size == 8
        elif frame.fields is None:
            assert (frame.by, frame.name, frame.size) == ("client", "transfer", None)
            assert frame.message
        else:
            assert frame.size is not None
            assert frame.message is None
            assert (frame.payload is not None) == (frame.name == "transfer")


@pytest.mark.parametrize("exchange", exchanges(), ids=lambda each: each.name)
def test_payloads_are_messages(exchange: Exchange) -> None:
    """A payload fits into its frame, and holds sections of a message; one with `<rest>` is a part of a message."""
    for frame in exchange.frames:
        if frame.payload is None:
            continue
        payload = payload_bytes(frame.payload)
        assert frame.size is not None
        assert 20 < frame.size - len(payload) < 48
        if "<rest:" not in frame.payload:
            assert [code for code, _ in sections(payload) if code not in SECTIONS] == []


def test_placeholders_are_explained() -> None:
    """Whatever stands between < and > in the exchanges is explained, and no explanation is left over."""
    text = (FOLDER / "exchanges.toml").read_text(encoding="utf-8").split("[[exchange]]", 1)[1]
    assert set(re.findall(r"<([a-z-]+)(?::\d+)?>", text)) == placeholders().keys()


def test_no_name_of_the_recorded_namespace_is_left() -> None:
    """The exchanges have no uuid, address, token or host of the namespace that was recorded."""
    text = (FOLDER / "exchanges.toml").read_text(encoding="utf-8")
    assert (
        re.findall(r"swathip|servicebus\.windows\.net/|[0-9a-f]{8}-[0-9a-f]{4}-|\d+\.\d+\.\d+\.\d+|eyJ0eXAi", text)
        == []
    )


def test_payload_takes_values_for_its_placeholders() -> None:
    """A value replaces a placeholder of the same length, and any other is refused."""
    assert payload_bytes("0053 'a b' <time:2> ff", {"time": b"xy"}) == b"\x00\x53a bxy\xff"
    assert payload_bytes("<time:2>") == bytes(2)
    with pytest.raises(ValueError, match="takes 2 bytes, not 1"):
        payload_bytes("<time:2>", {"time": b"x"})
    with pytest.raises(ValueError, match="is no piece"):
        payload_bytes("0053 5")
