"""What `send` and `tail` read from their arguments and lines, and what an event looks like."""

from __future__ import annotations

import json
import os
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.types import Decimal32, Described, Symbol, Timestamp, UByte
from eventpump.cli import streams
from eventpump.cli.send import KeyedEvent, key_of
from eventpump.cli.streams import LineSource, whole_number
from eventpump.cli.tail import json_line, plain, plain_line, position, shown_line
from eventpump.errors import ConfigurationError, EventError
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent

MOMENT = datetime(2024, 5, 6, 7, 8, 9, 123000, UTC)


# --------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("start", EventPosition.earliest()),
        ("end", EventPosition.latest()),
        ("0", EventPosition.at_sequence_number(0, inclusive=True)),
        ("9223372036854775807", EventPosition.at_sequence_number(2**63 - 1, inclusive=True)),
        ("offset:4294968112", EventPosition.at_offset("4294968112")),
        ("2024-05-06T07:08:09.123Z", EventPosition.at_enqueued_time(MOMENT, inclusive=True)),
        ("2024-05-06T09:08:09.123+02:00", EventPosition.at_enqueued_time(MOMENT, inclusive=True)),
        ("2024-05-06 07:08", EventPosition.at_enqueued_time(datetime(2024, 5, 6, 7, 8).astimezone(), inclusive=True)),
    ],
)
def test_position_option_is_parsed_in_every_form(text: str, expected: EventPosition) -> None:
    """Each form of --from is the place a person means by it, that place included."""
    assert position(text) == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "now", "9223372036854775808", "offset:", "offset:'", "2024-13-01", "٣", "1e3"]
)
def test_position_option_of_another_form_is_refused(text: str) -> None:
    """Anything else is refused by the option's name."""
    with pytest.raises(ConfigurationError) as caught:
        position(text)
    assert caught.value.field == "--from"


@pytest.mark.parametrize("text", ["", "-1", "+1", "0", "11", "1.0", "٣", "1" * 5000])
def test_number_option_outside_its_range_is_refused(text: str) -> None:
    """Only plain digits within the range are a number."""
    assert whole_number("--count", "10", 1, 10) == 10
    with pytest.raises(ConfigurationError, match="--count"):
        whole_number("--count", text, 1, 10)


# ----------------------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b'{"k": "sensor-7"}', "sensor-7"),
        (b'{"k": ""}', ""),
        (b'{"k": 12345678901234567890123}', "12345678901234567890123"),
        (b'{"k": 1.50}', "1.50"),
        (b'{"k": true}', "true"),
        (b'{"a": {"k": 1}, "k": "\xc3\xa9"}', "é"),
    ],
)
def test_key_of_a_line_is_the_fields_value_as_written(line: bytes, key: str) -> None:
    """Text is the key itself, a number is the key as it is written."""
    assert key_of(line, "k") == key


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "no JSON"),
        (b"\xff", "no JSON"),
        (b"{" * 100_000, "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'["k"]', "no JSON object"),
        (b'{"a": 1}', "no field 'k'"),
        (b'{"k": null}', "neither"),
        (b'{"k": [1]}', "neither"),
        (b'{"k": "\\ud800"}', "surrogate"),
        (b'{"k": "' + b"x" * 129 + b'"}', "longer"),
    ],
)
def test_key_of_a_line_without_one_raises_event_error(line: bytes, says: str) -> None:
    """A line that holds no key is an EventError with the reason."""
    with pytest.raises(EventError, match=says):
        key_of(line, "k")


@given(st.binary(max_size=600), st.text(max_size=128).filter(lambda key: key.isprintable()))
def test_keyed_line_is_encoded_as_an_event_sent_with_that_key(body: bytes, key: str) -> None:
    """What carries its own key is encoded as any event that is sent with the key."""
    assert KeyedEvent(body, key).encode() == EventData(body).encode(key)
    assert KeyedEvent(body, key).encode("another") == EventData(body).encode(key)


async def read_all(source: LineSource) -> list[bytes]:
    found = []
    while lines := await source.read():
        found += lines
    return found


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"\n\na\n\n", [b"", b"", b"a", b""]),
        (b"a\r\nb\rc\r\n\r\nd\r", [b"a", b"b\rc", b"", b"d"]),
    ],
)
async def test_lines_end_with_lf_or_crlf(tmp_path: Path, content: bytes, expected: list[bytes]) -> None:
    """An empty line is a line; the last one needs no end."""
    (tmp_path / "lines").write_bytes(content)
    assert await read_all(LineSource(str(tmp_path / "lines"))) == expected


@pytest.mark.real_time
@pytest.mark.parametrize("size", range(1, 9))
async def test_lines_cut_anywhere_come_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A line that comes in pieces is one line, be it cut within its end."""
    monkeypatch.setattr(streams, "_CHUNK", size)
    (tmp_path / "lines").write_bytes(b"one line\r\ntwo\n\n\r\nthree")
    assert await read_all(LineSource(str(tmp_path / "lines"))) == [b"one line", b"two", b"", b"", b"three"]


@pytest.mark.real_time
async def test_lines_are_read_where_files_have_other_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no O_CLOEXEC, and there a file is opened as binary, or its line ends would be changed."""
    real, flags = os.open, []

    def noted(path: str, given: int, *more: Any) -> int:
        flags.append(given)
        return real(path, given & ~(1 << 30), *more)

    (tmp_path / "lines").write_bytes(b"a\r\nb")
    with monkeypatch.context() as windows:
        windows.delattr(os, "O_CLOEXEC")
        windows.setattr(os, "O_BINARY", 1 << 30, raising=False)
        windows.setattr(os, "open", noted)
        source = LineSource(str(tmp_path / "lines"))
    assert await read_all(source) == [b"a", b"b"]
    assert flags[0] & 1 << 30


@pytest.mark.real_time
async def test_line_without_an_end_is_cut_and_takes_bounded_memory(tmp_path: Path) -> None:
    """A line that is too long is cut to one byte too many, and the next one is whole again."""
    (tmp_path / "lines").write_bytes(b"a\n" + b"x" * 5_000_000 + b"\nb\n")
    source = LineSource(str(tmp_path / "lines"))
    source.longest = 1000
    found = await read_all(source)
    assert [found[0], found[2]] == [b"a", b"b"]
    assert 1000 < len(found[1]) < 300_000
    assert set(found[1]) == {ord("x")}


@pytest.mark.real_time
@pytest.mark.parametrize("end", [b"", b"\n", b"\nlast"])
async def test_count_rest_counts_the_lines_not_read(tmp_path: Path, end: bytes) -> None:
    """Lines read and lines counted are together the lines of the file."""
    path = tmp_path / "lines"
    path.write_bytes(b"some line\n" * 100_000 + b"another" + end)
    total = len(await read_all(LineSource(str(path))))
    source = LineSource(str(path))
    begun = len(await source.read())
    assert 0 < begun < total
    assert begun + source.count_rest() == total


def test_open_of_a_missing_file_raises_configuration_error(tmp_path: Path) -> None:
    """A missing file and a directory are a ConfigurationError with the system's reason."""
    with pytest.raises(ConfigurationError, match="No such file"):
        LineSource(str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="Is a directory"):
        LineSource(str(tmp_path))


# ---------------------------------------------------------------------------------------------------- events


def event(body: bytes | None = None, **options: Any) -> ReceivedEvent:
    return ReceivedEvent.build(body, offset="1880", sequence_number=17, enqueued_time=MOMENT, **options)


def test_plain_line_is_the_body() -> None:
    """The body's bytes are given as they are; a body of another kind as JSON."""
    assert plain_line("3", event(b"\xff\x00 body")) == b"\xff\x00 body\n"
    assert plain_line("3", event(value={"a": 1})) == b'{"a": 1}\n'


def test_json_line_has_every_field() -> None:
    """Place, time, key, properties and body, in one line of JSON."""
    line = json_line(
        "3", event(b'one\n"two"', partition_key="k", properties={"n": 1, "b": b"\xff"}, content_type="text/plain")
    )
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "partition": "3",
        "sequence_number": 17,
        "offset": "1880",
        "enqueued_time": "2024-05-06T07:08:09.123000Z",
        "partition_key": "k",
        "properties": {"n": 1, "b": "/w=="},
        "system_properties": {"content-type": "text/plain"},
        "body": 'one\n"two"',
    }


def test_json_line_of_a_binary_body_is_base64() -> None:
    """Bytes that are no UTF-8 and bodies of other kinds have names of their own."""
    assert json.loads(json_line("3", event(b"\xff")))["body_base64"] == "/w=="
    assert json.loads(json_line("3", event(value=[1, None])))["value"] == [1, None]
    assert json.loads(json_line("3", event(sequence=["a", 2])))["value"] == ["a", 2]


def test_json_form_exists_for_every_amqp_value() -> None:
    """What JSON does not have is given as text or as its nearest kin."""
    number = uuid.uuid4()
    values = {
        1.5: 1.5,
        float("nan"): "nan",
        float("-inf"): "-inf",
        UByte(7): 7,
        Symbol("s"): "s",
        Timestamp(1714979289123): "2024-05-06T07:08:09.123000Z",
        number: str(number),
        MOMENT: "2024-05-06T07:08:09.123000+00:00",
        Decimal32(b"\0\0\0\1"): "00000001",
    }
    for value, expected in values.items():
        assert plain(value) == expected
    assert plain({Symbol("a"): {1: [b"x", (True, None)]}}) == {"a": {"1": ["x", [True, None]]}}
    assert plain(Described(Symbol("d"), 3)) == 3


def test_shown_text_escapes_terminal_controls() -> None:
    """Escape sequences, line ends and bytes that are no text are spelled out; place and time stand before the body."""
    line = shown_line("3", event("\x1b[2Jclear\r\nü\tx\u202e".encode() + b"\xff")).decode()
    place, moment, body = line.split(" ", 2)
    assert place == "3:17"
    assert moment == MOMENT.astimezone().strftime("%H:%M:%S.123")
    assert body == " \\x1b[2Jclear\\r\\nü\tx\\u202e\\xff\n"
