"""The public classes: what they show of their options, and what of an option's definition they repeat."""

from __future__ import annotations

import enum
import gzip
import inspect
import pickle
import pydoc
import re
import typing
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

import eventpump
import eventpump.spark
from docs.api import Documented, modules_of, of_module, public_names, shown
from eventpump import (
    BufferedProducer,
    CheckpointPolicy,
    ConfigurationError,
    EventData,
    EventPosition,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    MemoryLeases,
    MemoryLeaseStore,
    PartitionReader,
    PayloadCodec,
    RetryOptions,
)
from eventpump.checkpoints import CheckpointEditor
from eventpump.lag import LagReader
from eventpump.options.connection import (
    ClientOptions,
    ConnectionOptions,
    ConnectionSettings,
    ProxySettings,
    connection_settings,
)
from eventpump.options.consumer import (
    FeedOptions,
    FeedSettings,
    HostOptions,
    HostSettings,
    ReaderOptions,
    ReaderSettings,
    SubscriptionOptions,
    SubscriptionSettings,
    start_position,
)
from eventpump.options.described import option_texts
from eventpump.options.producer import (
    BufferedOptions,
    BufferSettings,
    ProducerOptions,
    ProducerSettings,
)
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.foreach_batch import SinkSettings
from eventpump.testing.transport import FakeHub, FakeTransport

NS = "example.servicebus.windows.net"
TEXT = f"Endpoint=sb://{NS}/;SharedAccessKeyName=Root;SharedAccessKey=c2VjcmV0;EntityPath=telemetry"
KNOWN: dict[type, type] = {
    EventProcessorHost: HostOptions,
    PartitionReader: ReaderOptions,
    EventProducer: ProducerOptions,
    BufferedProducer: BufferedOptions,
}
CLASSES = tuple(KNOWN)

CODEC = PayloadCodec("gzip", gzip.compress, gzip.decompress)
WIDER: dict[str, tuple[object, ...]] = {
    "position": ("-1", 5, datetime(2024, 1, 1, tzinfo=UTC), EventPosition.latest()),
    "end": ("@latest", 5, datetime(2024, 1, 1, tzinfo=UTC), EventPosition.at_sequence_number(5), None),
    "decode": (CODEC, [CODEC], (), None),
    "initial_position": ("-1", 5, datetime(2024, 1, 1, tzinfo=UTC), EventPosition.latest(), {"0": "-1", "1": 5}),
}
"""Options that take more than their models hold: a value of each kind that the typed dictionaries name."""


class Nothing(EventProcessor):
    async def process_events(self, context: Any, events: Any) -> None:
        """Do nothing."""


def make(made: type, **options: Any) -> Any:
    """Make a client of a class, with what the class requires."""
    required: dict[type, dict[str, Any]] = {
        EventProcessorHost: {"processor": Nothing, "lease_store": MemoryLeaseStore(MemoryLeases())},
        PartitionReader: {"partition_id": "0"},
        LagReader: {"checkpoints": None},
        CheckpointEditor: {"checkpoints": None},
    }
    return made(**{**required.get(made, {}), **options})


@pytest.mark.parametrize(
    ("known", "base", "models"),
    [
        (FeedOptions, ClientOptions, [FeedSettings]),
        (ReaderOptions, ClientOptions, [ReaderSettings]),
        (HostOptions, ClientOptions, [HostSettings]),
        (SubscriptionOptions, None, [SubscriptionSettings]),
        (ProducerOptions, ClientOptions, [ProducerSettings]),
        (BufferedOptions, ClientOptions, [ProducerSettings, BufferSettings]),
    ],
)
def test_typed_dictionaries_have_the_fields_of_their_models(
    known: type, base: type | None, models: list[type[BaseModel]]
) -> None:
    """Each option has the name and the type of its model's field."""
    given = typing.get_type_hints(known)
    of_base = set() if base is None else set(typing.get_type_hints(base))
    explicit = {"hub", "partition_id"} if base is not None else {"name"}
    kinds = {name: kind for model in models for name, kind in typing.get_type_hints(model).items()}
    assert given.keys() - of_base == {name for model in models for name in model.model_fields} - explicit
    for name in given.keys() - of_base - WIDER.keys():
        if kinds[name] is not Any:
            assert given[name] == kinds[name], name


@pytest.mark.parametrize("known", [ClientOptions, ReaderOptions, HostOptions, SubscriptionOptions, *KNOWN.values()])
def test_every_option_of_a_typed_dictionary_has_a_text(known: type) -> None:
    """Editors show it, and `help` is composed of it."""
    assert option_texts(known).keys() == known.__annotations__.keys()


@pytest.mark.parametrize("name", WIDER)
def test_options_take_each_kind_that_is_named(name: str) -> None:
    """Where the model holds something else than what is given, each kind of value that may be given is accepted."""
    made = EventProcessorHost if name == "initial_position" else PartitionReader
    for value in WIDER[name]:
        make(made, connection_string=TEXT, **{name: value})
    for value in WIDER["position"]:
        assert isinstance(start_position(value), EventPosition)


def test_the_options_of_a_connection_are_those_of_its_function_and_model() -> None:
    """A connection's options are those of the function that checks them, with the model's defaults."""
    function = inspect.signature(connection_settings, eval_str=True).parameters
    options = typing.get_type_hints(ConnectionOptions)
    assert options.keys() == function.keys() - {"connection_string", "hub", "transport"}
    assert all(options[name] == function[name].annotation for name in options)
    fields = ConnectionSettings.model_fields
    for name in options.keys() & fields.keys() - {"fully_qualified_namespace", "credential"}:
        assert function[name].default == fields[name].default, name


def documented(made: object) -> dict[str, str]:
    """Return the items of the `Args` section of a docstring, by name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(made.__doc__ or ""), re.M | re.S)
    items = [] if section is None else re.split(r"^    (?=\S)", section[1], flags=re.M)[1:]
    pairs = (re.split(r":\s", item, maxsplit=1) for item in items)  # a line may end there
    return {name: " ".join(text.split()) for name, text in pairs}


@pytest.mark.parametrize("made", [*CLASSES, LagReader, CheckpointEditor])
def test_signature_and_docstring_show_every_option(made: type) -> None:
    """`help` and `inspect.signature` show each option with type, default and meaning; an own default is the model's."""
    parameters = inspect.signature(made).parameters
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    documents = {name.partition(" (")[0]: (name, text) for name, text in documented(made).items()}
    assert documents.keys() == parameters.keys()
    page = pydoc.plain(pydoc.render_doc(made))
    known = typing.get_type_hints(KNOWN.get(made, ClientOptions))
    for name, each in parameters.items():
        head, text = documents[name]
        assert each.annotation is not each.empty, name
        assert text[0].isupper(), name
        assert text.endswith("."), name
        if name in known:
            assert head.startswith(f"{name} ("), "its type is missing"
            assert text.endswith(f" Default: {shown(each.default)}."), name
            assert each.annotation == known[name]
        assert f"{name}: " in page, "the signature lacks it"
        assert f"\n |      {head}: " in page, "the docstring lacks it"


@pytest.mark.parametrize("made", [RetryOptions, ProxySettings, ConnectionSettings])
def test_every_field_of_a_model_is_documented(made: type[BaseModel]) -> None:
    """A field without a meaning, or a meaning without its field, is found, and so is a wrong default."""
    documents = {name.partition(" (")[0]: text for name, text in documented(made).items()}
    assert documents.keys() == made.model_fields.keys()
    for name, field in made.model_fields.items() if made is not ProxySettings else ():
        assert field.is_required() or documents[name].endswith(f"Default: {shown(field.default)}."), name


def _items(doc: str | None) -> dict[str, str]:
    """Return what a docstring says of each parameter, in `Args` or in `Attributes`."""
    sections = re.findall(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", inspect.cleandoc(doc or ""), re.M | re.S)
    items = [
        re.split(r":\s", item, maxsplit=1) for text in sections for item in re.split(r"^ {4}(?=\S)", text, flags=re.M)
    ]
    return {
        name.partition(" (")[0]: " ".join(text.split()) for name, text in (item for item in items if len(item) == 2)
    }


_MODELS = (ConnectionSettings, SparkConnection, SinkSettings)


def _named(name: str) -> Any:
    return public_names()[name].made if name in public_names() else None


def _said_of(made: Any, owner: type | None = None) -> dict[str, str]:
    """Return what is said of the parameters of a callable: in its docstring, in those of its bases if it is a class,
    and where it refers to: models of options, the method of an interface, or another method of its class.

    Args:
        owner: The class of a method. Default: None.
    """
    doc, said = made.__doc__ or "", dict[str, str]()
    for model in _MODELS:
        if re.search(rf":class:`[\w.]*\b{model.__name__}`", doc):
            said |= _items(model.__doc__)
    for known in (ConnectionOptions, ClientOptions):
        if f"See `{known.__name__}`" in doc:
            said |= {name: text for name, (_, text) in option_texts(known).items()}
    for interface in re.findall(r"\bSee `(\w+)`", doc):
        said |= _items(getattr(_named(interface), made.__name__, made).__doc__)
    for sibling in re.findall(r"\bas `(\w+)` does", doc) if owner is not None else ():
        said |= _items(getattr(owner, sibling, made).__doc__)
    for each in reversed(made.__mro__) if isinstance(made, type) else (made,):
        said |= _items(each.__doc__)
    return said


def _public_callables() -> Iterator[tuple[str, Any, type | None]]:
    """Yield each public class and function, and the public methods of the classes with their class."""
    public = [(name, each.made) for name, each in public_names().items()]
    for module in ["eventpump.spark", *modules_of("eventpump.testing")]:
        public += [(f"{module}.{each.name}", each.made) for each in of_module(module)]
    public += [(each.__name__, each) for each in _MODELS]
    for name, made in public:
        if inspect.isfunction(made):
            yield name, made, None
        elif isinstance(made, type) and not issubclass(made, enum.Enum) and not typing.is_typeddict(made):
            yield name, made, None
            for method, each in inspect.getmembers(made, lambda each: inspect.isroutine(each) and callable(each)):
                if (
                    method[0] != "_"
                    and callable(each)
                    and str(getattr(each, "__module__", "")).startswith("eventpump.")
                ):
                    yield f"{name}.{method}", each, made


def _states_default(text: str, default: object) -> bool:
    """Return whether a parameter's text states its default: after "Default: ", by what None means, in words, or by
    reference to another docstring. A number, a truth value or a quoted text after "Default: " must be the right one."""
    stated = re.search(r"\bDefault: (.+?)(?: \([^()]*\))?\.$", text)
    if stated is None:
        means_none = default is None and "None" in text
        return means_none or re.search(r"\bby default\b|^As (for|of) `", text, re.I) is not None
    is_plain = isinstance(default, int | float) or (isinstance(default, str) and stated[1][0] == '"')
    if not is_plain or isinstance(default, enum.Enum):
        return True
    size = re.fullmatch(r"(\d+) MiB", stated[1])
    return (f"{int(size[1]) << 20:,}" if size else stated[1]) in (shown(default), str(default))


def test_docstrings_state_every_default() -> None:
    """A parameter with a default states it in its line of `Args`, or is a field of the model that is named there."""
    found, checked = [], 0
    for name, made, owner in _public_callables():
        try:
            parameters = inspect.signature(made).parameters.values()
        except ValueError:
            continue
        said = _said_of(made, owner)
        for each in parameters:
            if each.default is not each.empty and each.name[0] != "_":
                checked += 1
                if each.name not in said or not _states_default(said[each.name], each.default):
                    found.append(f"{name}({each.name}={each.default!r}): {said.get(each.name, 'is not described')}")
    assert checked > 300
    assert found == []


@pytest.mark.parametrize("public", public_names().values(), ids=lambda public: public.name)
def test_public_classes_show_their_public_name(public: Documented) -> None:
    """A class or function that is public says so, is pickled under that name, and its annotations can be evaluated."""
    made = public.made
    if not isinstance(made, type):
        return
    assert (made.__module__, made.__qualname__) == (public.module, public.name)
    assert pickle.loads(pickle.dumps(made)) is made
    # Types of what is defined in `interfaces` and of another are for checkers only.
    if public.module != "eventpump.interfaces" and public.name != "PublishOutcomeUnknownError":
        typing.get_type_hints(made)


def test_public_values_may_be_fields_of_models() -> None:
    """pydantic looks up the types of a dataclass's fields in the module that the class names, if they are text."""

    class Configured(BaseModel):
        start: EventPosition
        policy: CheckpointPolicy
        options: RetryOptions

    made = Configured(start=EventPosition.latest(), policy=CheckpointPolicy.manual(), options=RetryOptions())
    assert made.start == EventPosition.latest()


@pytest.mark.parametrize("made", [*CLASSES, LagReader, CheckpointEditor])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("idle_timout", "; did you mean idle_timeout?"),
        ("conection_string", "; did you mean connection_string?"),
        ("owns_transports", "; did you mean owns_transport?"),
        ("xyzzy", ""),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_nearest(made: type, name: str, hint: str) -> None:
    """Options of the connection, too; the value is not shown."""
    with pytest.raises(ConfigurationError) as raised:
        make(made, connection_string=TEXT, **{name: "SECRET"})
    assert str(raised.value) == f"{name}: there is no such option{hint}"


@pytest.mark.parametrize(
    ("made", "name", "nearest"),
    [
        (EventProcessorHost, "max_batchsize", "max_batch_size"),
        (EventProcessorHost, "hook", "hooks"),
        (PartitionReader, "prefetch_event", "prefetch_events"),
        (EventProducer, "idempotnet", "idempotent"),
        (BufferedProducer, "max_batch_byte", "max_batch_bytes"),
        (BufferedProducer, "on_succes", "on_success"),
        (HostSettings, "prefetch_event", "prefetch_events"),
    ],
)
def test_an_unknown_option_of_a_class_is_an_error_that_names_the_nearest(made: type, name: str, nearest: str) -> None:
    """The options of a class and its explicit parameters are suggested."""
    where = {"hub": "telemetry"} if made is HostSettings else {"connection_string": TEXT}
    with pytest.raises(ConfigurationError, match=f"^{name}: there is no such option; did you mean {nearest}"):
        make(made, **where, **{name: 1})


@pytest.mark.parametrize("made", CLASSES)
async def test_clients_say_where_they_connect_and_whether_they_are_closed(made: type) -> None:
    """Before anything is connected, and after closing."""
    client = make(made, connection_string=TEXT)
    assert (client.hub, client.fully_qualified_namespace, client.is_closed) == ("telemetry", NS, False)
    await client.aclose()
    assert client.is_closed


@pytest.mark.parametrize("made", CLASSES)
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"connection_string": TEXT}, "connection_string"),
        ({"hub": "telemetry", "idle_timeout": 5.0}, "idle_timeout"),
        ({"hub": "telemetry", "fully_qualified_namespace": NS}, "fully_qualified_namespace"),
        ({}, "hub"),
        ({"hub": "not a hub"}, "hub"),
        ({"hub": 5}, "hub"),
        ({"hub": "telemetry", "transport": None}, "transport"),
        ({"hub": "telemetry", "transport": object()}, "transport"),
        ({"hub": "telemetry", "transport": FakeTransport}, "transport"),
        ({"hub": "telemetry", "connection_string": TEXT, "transport": "native", "owns_transport": False}, "owns_trans"),
        *(({"hub": "telemetry", "owns_transport": wrong}, "owns_transport") for wrong in ("no", 0, None)),
        ({"hub": "telemetry", "connection_string": TEXT, "transport": "native", "owns_transport": 1}, "owns_transport"),
        *(({"hub": "telemetry", "retry": wrong}, "retry") for wrong in (5, 0, {"max_retries": 1}, RetryOptions)),
    ],
)
def test_a_transport_object_goes_with_a_hub_and_retries_only(made: type, options: dict[str, Any], field: str) -> None:
    """What the transport decides already cannot be given beside it."""
    with pytest.raises(ConfigurationError, match=f"^{field}"):
        make(made, **{"transport": FakeTransport(FakeHub(partitions=2)), **options})


class Watched(FakeTransport):
    """Counts how often it is closed."""

    closed = 0

    async def aclose(self) -> None:
        self.closed += 1
        await super().aclose()


@pytest.mark.parametrize("owns", [True, False])
async def test_clients_share_a_transport_that_they_do_not_own(owns: bool) -> None:
    """A producer and a reader detach their links, and close the transport only if it is theirs."""
    hub = FakeHub(partitions=2)
    transport = Watched(hub)
    options: dict[str, Any] = {"hub": hub.name, "transport": transport, "owns_transport": owns}
    links: list[Any] = []
    opened = transport.open_send_link

    async def open_send_link(spec: Any) -> Any:
        links.append(await opened(spec))
        return links[-1]

    transport.open_send_link = open_send_link  # type: ignore[method-assign]  # to look at the links
    async with EventProducer(**options) as producer:
        assert producer.fully_qualified_namespace == transport.fully_qualified_namespace
        await producer.send(EventData(b"one"), partition_id="0")
    assert [link.is_attached for link in links] == [False]
    assert transport.closed == owns
    if owns:
        return
    async with PartitionReader(partition_id="0", **options) as reader:
        assert [event.body for event in await reader.read()] == [b"one"]
    async with BufferedProducer(**options) as buffered:
        await buffered.send_and_wait(EventData(b"two"), partition_id="0")
    assert transport.closed == 0
    await transport.aclose()


async def test_a_host_leaves_a_transport_that_it_does_not_own_open() -> None:
    """The lease store is the host's in any case."""
    hub = FakeHub(partitions=2)
    transport = Watched(hub)
    host: EventProcessorHost

    class Stops(EventProcessor):
        async def open(self, context: Any) -> None:
            host.stop()

        async def process_events(self, context: Any, events: Any) -> None:
            """Do nothing."""

    host = make(EventProcessorHost, hub=hub.name, transport=transport, owns_transport=False, processor=Stops)
    await host.run()
    assert host.is_closed
    assert transport.closed == 0
    await transport.aclose()


def test_a_subclass_has_its_own_signature() -> None:
    """The signature that lists the options belongs to the constructor, not to the class."""

    class Mine(EventProducer):
        def __init__(self, name: str) -> None:
            super().__init__(TEXT)
            self.mine = name

    assert list(inspect.signature(Mine).parameters) == ["name"]


def test_secrets_are_not_shown_by_a_signature() -> None:
    """Passwords and credentials have no default that could hold one."""
    given = inspect.signature(EventProducer).parameters
    assert given["client_key_password"].default is None
    assert given["client_key_password"].annotation == str | SecretStr | None
    assert given["ca_file"].annotation == str | Path | None
    assert isinstance(given["retry"].default, RetryOptions)


def test_the_router_that_is_the_default_can_be_made_by_users() -> None:
    """`HashRouter` assigns keys as the service does, without an argument."""
    make_router: Callable[[], eventpump.interfaces.PartitionRouter] = eventpump.HashRouter
    assert make_router().route(EventData(b""), "sensor-7", ["0", "1"]) in {"0", "1"}
