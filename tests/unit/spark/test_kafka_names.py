"""Options with the names of Spark's Kafka connector: each is answered with the name that it has here."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.errors import ConfigurationError
from eventpump.spark.connection import CONNECTION_OPTIONS
from eventpump.spark.kafka_names import GUIDE, NAMES
from eventpump.spark.sink.data_source_writer import WRITER_OPTIONS
from eventpump.spark.sink.foreach_batch import SinkOptions
from eventpump.spark.source.options import SOURCE_OPTIONS, SourceOptions
from tests.support.connecting import connection_string_to
from tests.support.pages import ROOT

SECRET = "c2VjcmV0LWtleQ=="
STRING = connection_string_to("ns.servicebus.windows.net", key=SECRET, hub="trades")
OURS = {*CONNECTION_OPTIONS, *SOURCE_OPTIONS, *WRITER_OPTIONS, *SinkOptions.__annotations__, "foreach_batch_producer"}


def problem(**options: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        SourceOptions.each_hub(options)
    assert SECRET not in str(caught.value)
    return str(caught.value)


@given(st.sampled_from(sorted(NAMES)), st.data(), st.booleans())
def test_name_of_kafka_is_answered_with_ours(name: str, data: st.DataObject, is_alone: bool) -> None:
    """In any case of letters, with and without a connection; the value is not shown."""
    spelled = "".join(data.draw(st.sampled_from((each.lower(), each.upper()))) for each in name)
    text = problem(**{spelled: SECRET}, **({} if is_alone else {"connectionString": STRING}))
    assert text.startswith(f"{name}: is a name of Kafka's connector")
    assert NAMES[name] in text


def test_all_names_of_kafka_are_answered_at_once() -> None:
    """A query with Kafka's options is changed in one go; one of Kafka's client without a meaning here is named."""
    options = {"kafka.bootstrap.servers": "a:9093", "subscribe": "b", "startingOffsets": "earliest", "kafka.x": "1"}
    text = problem(**options)
    for answer in ("`connectionString`", "`hub`", "`startingPosition`", "for kafka.x nothing"):
        assert answer in text


@pytest.mark.parametrize("name", NAMES)
def test_answer_names_options_that_exist(name: str) -> None:
    """What stands in backticks can be written."""
    assert set(re.findall(r"`(\w+)`", NAMES[name])) <= OURS


def test_names_are_those_of_the_guide() -> None:
    """Every option of Kafka that the page lists is answered, unless it has the same name here."""
    text = (ROOT / GUIDE).read_text(encoding="utf-8")
    cells = re.findall(
        r"^\| (`[^|]*) \|", "".join(re.findall(r"^## Options of the .*?(?=^## )", text, re.M | re.S)), re.M
    )
    listed = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert len(listed) > 25
    assert listed - OURS <= NAMES.keys()
