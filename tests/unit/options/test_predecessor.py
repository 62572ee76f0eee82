"""azure-eventhub's names are answered with ours."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from eventpump import (
    BufferedProducer,
    ConfigurationError,
    EventBatch,
    EventHubsApp,
    EventProcessorHost,
    EventProducer,
    MemoryLeaseStore,
    PartitionContext,
    PartitionReader,
)
from eventpump.options import predecessor

CONNECTION = "Endpoint=sb://a.example;SharedAccessKeyName=name;SharedAccessKey=a2V5"
ROOT = Path(__file__).parents[3]
CLASSES: list[tuple[Any, Any]] = [
    (EventProducer, predecessor.PRODUCER),
    (BufferedProducer, predecessor.PRODUCER),
    (EventProcessorHost, predecessor.CONSUMER),
    (PartitionReader, predecessor.READER),
    (PartitionContext, predecessor.CONTEXT),
    (EventBatch, predecessor.BATCH),
]


def _make(kind: Any, **options: Any) -> Any:
    if kind is EventProcessorHost:
        return kind(CONNECTION, "hub", lease_store=MemoryLeaseStore(), **options)
    if kind is PartitionReader:
        return kind(CONNECTION, "hub", partition_id="0", **options)
    if kind is PartitionContext:
        return object.__new__(kind)
    if kind is EventBatch:
        return EventBatch(99)
    if kind is EventHubsApp:
        return kind(CONNECTION, **options)
    return kind(CONNECTION, "hub", **options)


@pytest.mark.parametrize("name", predecessor.OPTIONS)
@pytest.mark.parametrize("kind", [EventProducer, BufferedProducer, EventProcessorHost, PartitionReader, EventHubsApp])
def test_option_of_the_predecessor_is_answered_with_ours(kind: Any, name: str) -> None:
    """With every client that does not have an option of that name."""
    if kind is BufferedProducer and name in ("on_success", "on_error"):
        _make(kind, **{name: print})
        return
    with pytest.raises(ConfigurationError) as refused:
        _make(kind, **{name: "value"})
    here = predecessor.OPTIONS[name]
    hint = f"azure-eventhub's {name}: here {here} (docs/from-azure-eventhub.md)"
    assert str(refused.value) == f"{name}: there is no such option; {hint}"


@pytest.mark.parametrize(("kind", "names"), CLASSES)
def test_attribute_of_the_predecessor_is_answered_with_ours(kind: Any, names: dict[str, str]) -> None:
    """Of the class and of its objects; what asks whether there is one gets no."""
    made: Any = _make(kind)
    for name, here in names.items():
        for each in (kind, made):
            with pytest.raises(AttributeError) as refused:
                getattr(each, name)
            assert f"has no attribute {name!r}; azure-eventhub's {name}: here {here} (docs/" in str(refused.value)
            assert refused.value.name == name
            assert not hasattr(each, name)
            assert getattr(each, name, None) is None
        with pytest.raises(AttributeError, match="no attribute 'sendd'"):
            made.sendd  # noqa: B018 - it raises


def test_attribute_of_a_subclass_or_of_another_base_is_not_hidden() -> None:
    """A program may add what it was used to."""

    class Closing:
        kind = "closing"

        def close(self) -> str:
            return self.kind

        @classmethod
        def from_connection_string(cls, text: str) -> str:
            return f"{cls.__name__} {text}"

    class Old(EventProducer, Closing):
        def send_batch(self) -> str:
            return "sent"

    made: Any = Old(CONNECTION, "hub")
    assert (made.close(), made.send_batch(), Old.from_connection_string("x")) == ("closing", "sent", "Old x")
    made.close = "set"
    assert made.close == "set"
    with pytest.raises(AttributeError, match="azure-eventhub's send_event"):
        made.send_event()


def test_objects_with_such_names_are_copied() -> None:
    """Copying and pickling ask for special methods alone."""
    assert copy.copy(EventBatch(99)).max_size_in_bytes == 99


def test_page_of_the_guide_exists_and_has_the_names() -> None:
    """The errors name it."""
    page = (ROOT / predecessor.GUIDE).read_text(encoding="utf-8")
    missing = {
        name
        for name in ("from_connection_string", "on_event_batch", "send_batch", "update_checkpoint")
        if not re.search(rf"\b{name}\b", page)
    }
    assert not missing


@pytest.mark.parametrize("kind", [EventProducer, EventProcessorHost])
def test_class_in_place_of_a_transport_is_named(kind: Any) -> None:
    """As of every option that takes an object with methods."""

    class Mine:
        async def open_send_link(self, spec: object) -> None: ...

    with pytest.raises(ConfigurationError, match="transport object; give an object, not the class Mine"):
        kind(hub="hub", transport=Mine, **({} if kind is EventProducer else {"lease_store": MemoryLeaseStore()}))


def test_class_in_place_of_a_lease_store_is_named() -> None:
    """The likeliest mistake: the parentheses are missing."""
    store: Any = MemoryLeaseStore
    with pytest.raises(ConfigurationError, match=r"lease store.*; give an object, not the class MemoryLeaseStore$"):
        EventProcessorHost(CONNECTION, "hub", lease_store=store)
