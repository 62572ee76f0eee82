"""What the source makes of the options that Spark's users write."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import EventPosition
from eventpump.spark.connection import CONNECTION_OPTIONS
from eventpump.spark.source.offsets import TriggerLimits
from eventpump.spark.source.options import NOT_TAKEN, SOURCE_OPTIONS, WITHOUT_EFFECT, SourceOptions, without_effect
from tests.support.connecting import connection_string_to
from tests.support.pages import ROOT

SECRET = "c2VjcmV0LWtleQ=="
STRING = connection_string_to("ns.servicebus.windows.net", key=SECRET, hub="trades")
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_options({"connectionString": STRING, **given})


def problem(**given: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        options(**given)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_options_are_known_in_any_case_and_with_the_prefix() -> None:
    """`eventhubs.MAXEVENTSPERTRIGGER` is `maxEventsPerTrigger`."""
    for name in (
        "maxEventsPerTrigger",
        "maxeventspertrigger",
        "eventhubs.maxEventsPerTrigger",
        "EventHubs.MAXEVENTSPERTRIGGER",
    ):
        assert options(**{name: "500"}).limits == TriggerLimits(max_events=500)


def test_options_cover_every_field() -> None:
    """No field is out of users' reach, and no option leads nowhere."""
    assert set(SOURCE_OPTIONS.values()) == set(SourceOptions.model_fields) - {"connection"}


def test_options_take_a_connectors_configuration() -> None:
    """What the connector's users write in Python works, save the encrypted connection string."""
    made = SourceOptions.from_options(
        {
            "eventhubs.connectionString": STRING,
            "eventhubs.consumerGroup": "readers",
            "eventhubs.startingPosition": json.dumps(
                {"offset": "-1", "seqNo": -1, "enqueuedTime": None, "isInclusive": True}
            ),
            "eventhubs.startingPositions": json.dumps(
                {
                    json.dumps({"ehName": "Trades", "partitionId": 0}): {
                        "offset": "@latest",
                        "seqNo": -1,
                        "enqueuedTime": None,
                        "isInclusive": True,
                    },
                    json.dumps({"ehName": "other", "partitionId": 1}): {
                        "offset": "5",
                        "seqNo": -1,
                        "enqueuedTime": None,
                        "isInclusive": False,
                    },
                }
            ),
            "eventhubs.receiverTimeout": "PT00H01M30S",
            "eventhubs.operationTimeout": "PT100S",
            "eventhubs.prefetchCount": "300",
            "eventhubs.threadPoolSize": "16",
            "eventhubs.useExclusiveReceiver": "false",
            "eventhubs.useAadAuth": "false",
            "maxEventsPerTrigger": "10000",
        }
    ).for_stream()
    assert made.connection.hub == "trades"
    assert made.connection.operation_timeout == 100
    assert (made.start_of("0"), made.start_of("1")) == (EventPosition.latest(), EventPosition.earliest())
    assert made.limits.max_events == 10_000
    receive = made.receive
    assert (receive.consumer_group, receive.owner_level, receive.receiver_timeout, receive.prefetch_count) == (
        "readers",
        None,
        90.0,
        300,
    )


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("earliest", EventPosition.earliest()),
        ("Latest", EventPosition.latest()),
        ("-1", EventPosition.earliest()),
        ("@latest", EventPosition.latest()),
        ("42", EventPosition.at_sequence_number(42, inclusive=True)),
        ("2030-01-31T12:00:00Z", EventPosition.at_enqueued_time(NOON, inclusive=True)),
        ("2030-01-31T13:00:00+01:00", EventPosition.at_enqueued_time(NOON, inclusive=True)),
        ("2030-01-31 12:00:00", EventPosition.at_enqueued_time(NOON, inclusive=True)),
        ('{"seqNo": 42}', EventPosition.at_sequence_number(42, inclusive=True)),
        ('{"seqno": 42, "isInclusive": false}', EventPosition.at_sequence_number(42)),
        ('{"offset": "1234", "isInclusive": false}', EventPosition.at_offset("1234")),
        ('{"offset": "@latest", "isInclusive": true}', EventPosition.latest()),
        ('{"offset": null, "seqNo": -1, "enqueuedTime": "2030-01-31T12:00:00.000Z", "isInclusive": true}',
         EventPosition.at_enqueued_time(NOON, inclusive=True)),
        ('{"enqueuedTime": 1896091200000}', EventPosition.at_enqueued_time(NOON, inclusive=True)),
    ],
)  # fmt: skip
def test_position_option_is_read_in_every_form(text: str, position: EventPosition) -> None:
    """A position is a word, a number, a time, or the connector's object."""
    assert options(startingPosition=text).for_stream().start_of("0") == position
    is_stated = "isInclusive" in text or position.offset in {"-1", "@latest"}
    end = position if is_stated else replace(position, inclusive=False)
    assert options(endingPosition=text).for_batch().end_of("0") == end
    given = text if text.startswith("{") else json.dumps(text)
    by_partition = options(startingPositions=f'{{"0": {given}}}', endingPositions=f'{{"0": {given}}}').for_batch()
    assert (by_partition.start_of("0"), by_partition.end_of("0")) == (position, end)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "1.5", "{}", "{", "[1]", '{"seqNo": -1}', '{"seqNo": "4"}', '{"seqNo": true}', '{"offset": 4}',
     '{"offset": "4", "seqNo": 4}', '{"sequence": 4}', '{"seqNo": 4, "isInclusive": 1}', '{"enqueuedTime": 1e99}',
     '{"offset": "it\'s"}', "2030-13-01"],
)  # fmt: skip
def test_position_option_of_another_form_is_refused(text: str) -> None:
    """The error names the option and says what would do."""
    assert problem(startingPosition=text).startswith("startingPosition: ")
    assert problem(startingPositions=json.dumps({"0": text})).startswith("startingPositions: ")


@pytest.mark.parametrize(
    "positions",
    [
        {"0": "earliest", "1": 7},
        {"trades": {"0": "earliest", "1": {"seqNo": 7}}, "other": {"0": "latest", "9": 1}},
        {'{"ehName": "trades", "partitionId": 0}': {"offset": "-1"}, "1": "7"},
        {
            "trades": {"0": "earliest", "1": 7},
            "(start)": {"0": 1},
            "(created)": {"trades": "2030-01-01T00:00:00+00:00"},
        },
    ],
)
def test_positions_by_partition_are_read_in_every_form(positions: object) -> None:
    """They are keyed by partition, by hub and partition, or as the connector does; other hubs' are left out. A query's
    offset is such positions too."""
    made = options(startingPositions=json.dumps(positions), startingPosition="latest").for_stream()
    assert made.start_of("0") == EventPosition.earliest()
    assert made.start_of("1") == EventPosition.at_sequence_number(7, inclusive=True)
    assert made.start_of("2") == EventPosition.latest()
    made.require_partitions(["0", "1"])
    with pytest.raises(ConfigurationError, match="startingPositions: hub trades has no partition 1"):
        made.require_partitions(["0"])


@pytest.mark.parametrize(
    "text", ["", "7", "[]", '{"x": 7}', '{"{}": 7}', '{"{\\"ehName\\": \\"t\\"}": 7}', '{"trades": 7}']
)
def test_positions_by_partition_of_another_form_are_refused(text: str) -> None:
    """The error names the option and says what would do."""
    assert "must be a JSON object of positions by partition id" in problem(endingPositions=text)


@pytest.mark.parametrize("hub", ["trades", "trades,bars"])
@pytest.mark.parametrize("option", ["startingPositions", "endingPositions"])
@pytest.mark.parametrize(
    "positions", [{"trade": {"0": 7}}, {'{"ehName": "Bar", "partitionId": 0}': 7, "quotes": {"0": 7}}]
)
def test_positions_of_other_hubs_alone_are_refused(hub: str, option: str, positions: object) -> None:
    """A slip in the hub's name is not a query that begins elsewhere."""
    given = {
        "connectionString": connection_string_to("ns.servicebus.windows.net"),
        "hub": hub,
        option: json.dumps(positions),
    }
    with pytest.raises(ConfigurationError, match=f"{option}: names no hub that is read: that is trades"):
        SourceOptions.each_hub(given)
    given[option] = json.dumps({"TRADES": {"0": 7}, "quotes": {"0": 7}})
    first = SourceOptions.each_hub(given)[0]
    assert list(first.starting_positions or first.ending_positions) == ["0"]


def test_positions_by_default_are_latest_for_a_query_oldest_for_a_batch() -> None:
    """Without positions, a query reads what comes, exclusively; a batch what there is, beside other readers."""
    stream, batch = options().for_stream(), options().for_batch()
    assert (stream.start_of("0"), stream.receive.owner_level) == (EventPosition.latest(), 0)
    assert (batch.start_of("0"), batch.end_of("0")) == (EventPosition.earliest(), EventPosition.latest())
    assert batch.receive.owner_level is None
    assert options(useExclusiveReceiver="true").for_batch().receive.owner_level is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("maxEventPerTrigger", "; did you mean maxEventsPerTrigger?"),
        ("eventhubs.consumergroupp", "; did you mean consumerGroup?"),
        ("conectionString", "; did you mean connectionString?"),
        ("path", ""),
        ("failondatalos", "; did you mean failOnDataLoss?"),
    ],
)
def test_option_that_is_unknown_names_the_nearest(name: str, hint: str) -> None:
    """A slip is not passed over, and its value is not shown."""
    assert problem(**{name: SECRET}) == f"{name}: there is no such option{hint}"


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_option_that_needs_the_jvm_names_its_replacement(name: str) -> None:
    """An option of the connector that cannot work is no silent loss."""
    assert problem(**{f"eventhubs.{name}": "org.example.Plugin"}) == f"{name}: {NOT_TAKEN[name]}"


def test_option_for_entra_id_by_a_jvm_class_is_refused() -> None:
    """`useAadAuth` leads to the credential provider."""
    assert problem(**{"eventhubs.useAadAuth": "true"}).startswith("useAadAuth: use fullyQualifiedNamespace")


def test_option_without_an_effect_is_taken_with_a_warning() -> None:
    """Options of the connector that mean nothing here do not stop a query, and each is reported with its reason."""
    given = {f"eventhubs.{name}": "1" for name in WITHOUT_EFFECT}
    options(**given)
    assert len(without_effect(given)) == len(WITHOUT_EFFECT)
    assert without_effect(["threadpoolsize"]) == ["option threadPoolSize has no effect: there is no thread pool"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"maxEventsPerTrigger": "0"}, "maxEventsPerTrigger: "),
        ({"maxEventsPerTrigger": "many"}, "maxEventsPerTrigger: "),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay: must be a number of seconds"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss: "),
        ({"maxBytesPerTrigger": "lots"}, "maxBytesPerTrigger: "),
        ({"noMatchingPosition": "earliest"}, "noMatchingPosition: "),
        ({"prefetchCount": "0"}, "prefetchCount: "),
        ({"minEventsPerTrigger": "9", "maxEventsPerTrigger": "8"}, "minEventsPerTrigger: must not be greater"),
        ({"minPartitions": "9", "partitionsPerTask": "2"}, "minPartitions: cannot be combined"),
        ({"partitionsPerTask": "0"}, 'partitionsPerTask: must be "auto", or a number of partitions'),
        ({"partitionsPerTask": "many"}, 'partitionsPerTask: must be "auto", or a number of partitions'),
        ({"maxEventsPerTrigger": "9", "eventhubs.maxEventsPerTrigger": "8"}, "maxEventsPerTrigger: is given twice"),
    ],
)
def test_option_with_a_bad_value_is_refused_by_its_name(given: dict[str, str], says: str) -> None:
    """The error names the option as users write it."""
    assert problem(**given).startswith(says)


def test_option_of_partitions_per_task_is_a_number_or_chosen() -> None:
    """By default, and with "auto", the number of events decides."""
    assert options().partitions_per_task is None
    assert options(partitionsPerTask="Auto").partitions_per_task is None
    assert options(partitionsPerTask="3").partitions_per_task == 3


@pytest.mark.parametrize("text", ["7,0,3", " 0, 3 ,7", "[0, 3, 7]", '["7", "3", 0, 0]'])
def test_option_of_partitions_is_a_list(text: str) -> None:
    """Ids in any order, once each; all of the hub's if it is not given."""
    assert options(partitions=text).partitions == ("0", "3", "7")
    assert options(partitions=text).chosen([str(each) for each in range(8)]) == ["0", "3", "7"]
    assert options().chosen(["1", "10", "2"]) == ["1", "2", "10"]
    with pytest.raises(ConfigurationError, match="partitions: hub trades has no partition 7, only 4"):
        options(partitions=text).chosen(["0", "1", "2", "3"])


@pytest.mark.parametrize("text", ["", "all", "1,,2", "[]", "[true]", "[1.5]", "{}", "[", "-1", "0-3"])
def test_option_of_partitions_of_another_form_is_refused(text: str) -> None:
    """The error shows the form."""
    assert problem(partitions=text) == 'partitions: must be partition ids, such as "0,3,7", or a JSON list of them'


def test_option_of_the_other_kind_is_refused() -> None:
    """An end for a query, or a limit for a batch, is an error and not passed over."""
    for given in ({"endingPosition": "latest"}, {"endingPositions": '{"0": 5}'}):
        with pytest.raises(ConfigurationError, match="endingPosition: is only for batches"):
            options(**given).for_stream()
    for name in ("maxEventsPerTrigger", "minEventsPerTrigger"):
        with pytest.raises(ConfigurationError, match=f"{name}: is only for queries"):
            options(**{name: "5"}).for_batch()


def test_option_to_split_needs_shared_receivers() -> None:
    """Several tasks cannot read one partition exclusively: a query says so, a batch shares anyway."""
    with pytest.raises(ConfigurationError, match=r"minPartitions: .*useExclusiveReceiver=false"):
        options(minPartitions="9").for_stream()
    assert options(minPartitions="9", useExclusiveReceiver="false").for_stream().min_partitions == 9
    assert options(minPartitions="9").for_batch().min_partitions == 9


def test_options_are_pickled_and_show_no_secret() -> None:
    """They are pickled to executors whole, and their repr holds no key."""
    made = options(startingPosition="42", maxBytesPerTrigger="16MiB", maxTriggerDelay="PT5M").for_stream()
    assert pickle.loads(pickle.dumps(made)) == made
    assert (made.limits.max_bytes, made.limits.max_delay) == (16 * 1024 * 1024, 300)
    assert SECRET not in repr(made) + str(made)


def test_option_names_have_one_meaning() -> None:
    """The options of the connection, of the source, and those that are not taken are different ones."""
    groups = [CONNECTION_OPTIONS, SOURCE_OPTIONS, WITHOUT_EFFECT, NOT_TAKEN]
    names = [name.lower() for group in groups for name in group]
    assert len(names) == len(set(names))


def test_options_have_the_defaults_that_the_tuning_page_states() -> None:
    """Numbers behind an option's name there are its default."""
    page = (ROOT / "docs/spark-tuning.md").read_text(encoding="utf-8")
    stated = re.findall(r"`(\w+)`(?: \(|: leave it at )([\d.,]*\d)", page)
    found = [(name, float(number.replace(",", ""))) for name, number in stated if name in SOURCE_OPTIONS]
    assert {"prefetchCount"} <= {name for name, _ in found}
    for name, number in found:
        assert number == getattr(options(), SOURCE_OPTIONS[name]), name
