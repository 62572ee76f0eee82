"""Mutated captures through every entry: a few thousand strings each by date, a million in all with `--long`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from eventpump.amqp.codec import encode
from tests.fuzz import captures, mutations
from tests.fuzz.entries import ENTRIES
from tests.fuzz.entry import BreachError, command_of, run_seed, run_string, seed_of_today
from tests.fuzz.regressions import REGRESSIONS

MOST_SHOWN = 10
"""Breaches after which an entry's run ends."""

pytestmark = pytest.mark.made_up_tokens


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is logged of hostile bytes is not formatted; errors are, as the entries look at them."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_readers_of_hostile_bytes_keep_every_promise(name: str, request: pytest.FixtureRequest) -> None:
    """Documented errors only, bounded memory, and the same by every path, for strings of today's seeds."""
    count = ENTRIES[name].long if request.config.getoption("--long") else ENTRIES[name].gate
    first = seed_of_today()
    breaches: list[str] = []
    entry = ENTRIES[name]()
    try:
        for seed in range(first, first + count):
            try:
                run_seed(entry, seed)
            except BreachError as breach:
                breaches.append(str(breach))
                if len(breaches) >= MOST_SHOWN:
                    break
    finally:
        entry.close()
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize("name", sorted(REGRESSIONS))
def test_readers_of_recorded_strings_behave_as_documented(name: str) -> None:
    """Each string that once broke a promise is read as documented."""
    regression = REGRESSIONS[name]
    entry = ENTRIES[regression.entry]()
    try:
        run_string(entry, regression.string, Random(0), is_measured=regression.is_measured)
    finally:
        entry.close()


def test_long_form_runs_a_million_strings() -> None:
    """All entries together run what the documents say."""
    assert sum(entry.long for entry in ENTRIES.values()) >= 1_000_000


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_seed_makes_the_same_string_again(name: str) -> None:
    """A string that failed can be recreated from its seed alone, whatever ran before it."""
    first, second = ENTRIES[name](), ENTRIES[name]()
    try:
        made = [first.make(Random(f"{name} {seed}")) for seed in range(30)]
        again = [second.make(Random(f"{name} {seed}")) for seed in reversed(range(30))]
    finally:
        first.close()
        second.close()
    assert made == again[::-1]
    assert len({repr(each) for each in made}) > 15


def test_breach_names_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails says how to run it again, and nothing of what was sent."""
    kind = ENTRIES["codec"]

    def fail(_entry: Any, string: bytes, _rng: Random) -> None:
        raise ValueError(string)

    monkeypatch.setattr(kind, "run", fail)
    with pytest.raises(BreachError) as raised:
        run_seed(kind(), 5)
    assert command_of("codec", 5) in str(raised.value)
    assert str(raised.value).startswith("ValueError is no documented error\n")


def test_memory_beyond_the_bound_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that makes too much of few bytes is seen."""
    kind = ENTRIES["codec"]
    monkeypatch.setattr(kind, "run", lambda _entry, _string, _rng: list(range(1_000_000)))
    with pytest.raises(BreachError, match="bytes of memory for 1 bytes"):
        run_string(kind(), b"\x40", Random(0), is_measured=True)


def test_captures_hold_every_kind_of_conversation() -> None:
    """Several clients and services, both directions, and messages of every kind are in the repository, in little."""
    names = {dialogue.name.rpartition("-")[0] for dialogue in captures.dialogues()}
    assert names == {"azure", "idempotent", "native", "rhea", "uamqp", "websocket"}
    for node in ("$cbs", "$management"):
        assert captures.sent_to(node)
        assert captures.answers_of(node)
    assert len(captures.published()) > 10
    assert len(captures.stored()) > 20
    assert sum(path.stat().st_size for path in Path(captures.FOLDER).iterdir()) < 300 * 1024


def test_values_taken_apart_and_put_together_are_the_same() -> None:
    """What mutations are made of means what was captured."""
    for raw in captures.messages():
        nodes = mutations.read_all(raw)
        written = b"".join(map(mutations.write, nodes))
        assert [_shape(node) for node in mutations.read_all(written)] == [_shape(node) for node in nodes]
    assert mutations.write(mutations.read(encode({"a": [1, None]}))[0]) == encode({"a": [1, None]})


def _shape(node: mutations.Node) -> Any:
    # A size may be written in a longer form than it needs.
    code = node.code & 0xEF if node.code >= 0xA0 else node.code
    return code, node.raw, [_shape(item) for item in node.items]
