"""Metrics and their text, and the health and the metrics of several parts."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.monitoring import (
    BUCKETS,
    Durations,
    Health,
    Metric,
    Sample,
    all_healthy,
    exposition,
    labels_of,
    merged,
)


def test_metrics_are_written_in_the_text_format() -> None:
    """Labels are quoted, one HELP and TYPE for each name, and a metric without values is left out."""
    made = [
        Metric("a", "gauge", "What\nit is.", [Sample({"hub": 'x"\\\n'}, 3), Sample({}, 0.5), Sample({}, math.inf)]),
        Metric("b", "counter", "None.", []),
    ]
    assert exposition(made) == '# HELP a What\\nit is.\n# TYPE a gauge\na{hub="x\\"\\\\\\n"} 3\na 0.5\na +Inf\n'


def test_metrics_of_several_parts_have_each_name_once() -> None:
    """As the format demands, with the samples of all parts."""
    one, two = (Metric("a", "gauge", "It.", [Sample({"hub": hub}, 1)]) for hub in ("x", "y"))
    other = Metric("b", "gauge", "Other.", [Sample({}, 2)])
    assert merged([[one, other], [two]]) == [Metric("a", "gauge", "It.", [*one.samples, *two.samples]), other]


@st.composite
def parts(draw: st.DrawFn) -> list[Metric]:
    """Make what one client has: each series once."""
    names = draw(st.lists(st.sampled_from("ab"), unique=True))
    of = st.fixed_dictionaries({"hub": st.sampled_from("xy")}, optional={"client": st.sampled_from(["2", "3"])})
    kinds = st.lists(of, unique_by=lambda labels: tuple(sorted(labels.items())), max_size=4)
    return [Metric(name, "gauge", "It.", [Sample(labels, 1) for labels in draw(kinds)]) for name in names]


@given(st.lists(parts(), max_size=5))
def test_series_of_several_parts_are_each_there_once(clients: list[list[Metric]]) -> None:
    """None is lost and none is equal to another, whatever the parts have in common; the first part stays as it is."""
    made = merged(clients)
    lines = [line for line in exposition(made).splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)) == sum(len(each.samples) for client in clients for each in client)
    if clients:
        assert [each for each in merged(clients[:1]) if each.samples] == [each for each in clients[0] if each.samples]


def test_second_client_with_the_same_labels_has_a_number() -> None:
    """On all its series, also on those that it alone has now: they do not change their labels when partitions move."""
    ready = Metric("ready", "gauge", "It.", [Sample({"hub": "x"}, 1)])
    owned = Metric("owned", "gauge", "It.", [Sample({"hub": "x", "partition": "0"}, 1)])
    assert exposition(merged([[ready], [ready, owned]])).splitlines()[2:] == [
        'ready{hub="x"} 1',
        'ready{hub="x",client="2"} 1',
        "# HELP owned It.",
        "# TYPE owned gauge",
        'owned{hub="x",partition="0",client="2"} 1',
    ]


def test_histogram_counts_in_each_bucket_what_is_at_most_its_limit() -> None:
    """And in "+Inf" everything, as in its count."""
    durations = Durations()
    for seconds in (0.005, 0.006, 10.0, 11.0):
        durations.add(seconds)
    text = exposition([Metric("d", "histogram", "It.", durations.samples({"of": "x"}))])
    assert 'd_bucket{of="x",le="0.005"} 1\nd_bucket{of="x",le="0.01"} 2\n' in text
    assert 'd_bucket{of="x",le="10.0"} 3\nd_bucket{of="x",le="+Inf"} 4\n' in text
    assert text.endswith('d_sum{of="x"} 21.011\nd_count{of="x"} 4\n')
    assert text.count("_bucket") == len(BUCKETS) + 1


def test_value_that_is_not_finite_is_written_as_prometheus_has_it() -> None:
    """And a whole number without a point."""
    samples = [Sample({}, each) for each in (math.nan, -math.inf, 3, 3.0)]
    lines = exposition([Metric("a", "gauge", "It.", samples)]).splitlines()[2:]
    assert lines == ["a NaN", "a -Inf", "a 3", "a 3.0"]


def test_health_of_several_parts_is_that_of_the_worst() -> None:
    """With each reason once; of none it is well."""
    well, not_yet = Health(live=True, ready=True), Health(live=True, ready=False, reasons=("the hub",))
    assert all_healthy([well, not_yet, not_yet]) == not_yet
    assert all_healthy([well, Health(live=False, ready=True)]) == Health(live=False, ready=True)
    assert all_healthy([]) == well


def test_labels_are_those_of_what_is_named() -> None:
    """A producer's have no group, and those of a group no partition."""
    assert list(labels_of("a.example", "hub").values()) == ["eventhubs", "a.example", "hub"]
    labels = labels_of("a.example", "hub", "$Default", "3")
    assert (labels["messaging_consumer_group_name"], labels["messaging_destination_partition_id"]) == ("$Default", "3")
