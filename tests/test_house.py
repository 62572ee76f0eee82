"""The rules of the house, run with the tests: style, types, the direction of imports, and the public names."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import eventpump
from tests.support.order import LONGEST

ROOT = Path(__file__).parents[1]

_PUBLIC = """
AccessToken AppHub AppHubs AuthenticationError BalancerFailed BatchIterator BatchNotTaken BatchState BlobLeaseStore
BlobPublisherStateStore BufferFullError BufferedOptions BufferedProducer BuildInfo CaptureContainer CaptureFileError
CaptureFiles CaptureGapError CaptureSettings CaptureSource Checkpoint CheckpointClaim CheckpointDropped CheckpointPolicy
CheckpointStore CheckpointWritten ClientOptions Clock CloseReason ClosedError CloudEvent ConfigurationError
ConnectionLostError ConnectionOptions ConnectionSettings ConsumerDisconnectedError ConsumerScope Credential
DataLossError DataLost DecodeError Decoder DeliveryReceipt Emulator EntityNotFoundError EventBatch EventData
EventDecoding EventEncoding EventError EventHubSource EventHubsApp EventParked EventPosition EventProcessor
EventProcessorHost EventProducer EventPumpError EventRange EventSender EventSkipped EventSource EventTooLargeError
FairBalancer FeedOptions FleetView GeneratorSource GreedyBalancer HandlerSlow HashRouter Hook HostOptions HostReport
HubDirectory HubProperties InvalidClientStateError KeyedProcessor LastEnqueued LeaseLost LeasePlan LeaseReleased
LeaseSnapshot LeaseStore LeaseStoreEmpty LeaseTaken LinkDetachedError LinkFailed LinkRestored LinkRewound LinkStalled
LinkState LinkStateChanged LoopBlocked Loss LossKind MachineClock MemoryLeaseStore MemoryLeases
MemoryPublisherStateStore MemorySource NamedKey NamedKeyCredential OnError OnSuccess OutsideReader OwnershipLostError
Park PartitionBalancer PartitionContext PartitionFailed PartitionLease PartitionProperties PartitionPublishingOptions
PartitionPublishingProperties PartitionReader PartitionRouter PartitionStatus PartitionsFound PayloadCodec
PayloadDecoder PositionSought PressureState ProbedSourceLink ProcessorFailed ProcessorFailedError
ProducerDisconnectedError ProducerOptions ProducerStateLostError ProducerStats ProtocolError PublishOutcomeUnknownError
PublisherIntent PublisherState PublisherStateStore PumpClosed PumpOverdue PumpStarted PumpState QuotaExceededError
RangeReplayed ReaderOptions ReceiveLink ReceiveLinkSpec ReceiveSink ReceivedBatch ReceivedEvent Recovery
RequestRefusedError RetryOptions RingBalancer RingRouter RoundRobinRouter SasCredential ScopeRecord SendCount SendLink
SendLinkOpener SendLinkSpec SendResult ServiceBusyError ServiceError ServiceFailed ServiceTimeoutError SharedKey
SharedSignature SourceEndedError SourceLink SqliteLeaseStore SqlitePublisherStateStore StartIgnored StartPosition
StaticAssignment StickyRouter StoreError StoreFailed StoreRestored StoredPublisherState StoredScopeRecord
StoredSubscription SubscriberOptions SubscriptionOptions SubscriptionRecord SubscriptionSlow
SubscriptionWithoutProcessor TokenCredential Transport TransportName TransportType UnexpectedFailure build_info
connection_settings make_transport
"""

_COVERED_BY = {
    "amqp/config.py": "unit/amqp/test_connection.py unit/amqp/test_limits.py",
    "amqp/flow.py": "unit/amqp/test_link.py unit/amqp/test_states.py",
    "amqp/frames.py": "unit/amqp/test_fitting.py unit/amqp/test_trace.py",
    "amqp/receiver.py": "unit/amqp/test_connection.py unit/amqp/test_limits.py unit/amqp/test_link.py",
    "amqp/sections.py": "unit/amqp/test_message.py unit/amqp/test_event_scan.py",
    "amqp/session.py": "unit/amqp/test_link.py unit/amqp/test_limits.py unit/amqp/test_stealing.py",
    "amqp/types.py": "unit/amqp/test_codec.py",
    "app/hubs.py": "integration/test_app.py",
    "cancellation.py": "unit/consumer/pump/test_escapes.py unit/producer/test_ends.py",
    "cli/emulator.py": "integration/test_emulator_command.py",
    "cli/info.py": "integration/test_cli_info.py",
    "cli/main.py": "integration/test_cli_main.py integration/test_bad_input.py",
    "cli/outages.py": "integration/test_cli_send_tail.py",
    "cli/parked.py": "integration/test_parked.py",
    "cli/send.py": "unit/cli/test_send_tail.py integration/test_cli_send_tail.py",
    "cli/streams.py": "unit/cli/test_send_tail.py unit/cli/test_tail.py",
    "clients/connection.py": "unit/test_clients.py",
    "clients/consumers.py": "unit/test_clients.py",
    "clients/producers.py": "unit/test_clients.py",
    "app/results.py": "integration/test_app_outages.py",
    "consumer/record/checkpoints.py": (
        "unit/consumer/pump/test_context_checkpoint.py unit/consumer/record/test_data_loss.py"
    ),
    "consumer/host/commands.py": "unit/consumer/pump/test_rewind.py",
    "consumer/record/continuity.py": "unit/consumer/record/test_data_loss.py unit/consumer/pump/test_begun_anew.py",
    "consumer/pump/delivery.py": "unit/consumer/host/test_host.py unit/consumer/host/test_manager.py",
    "consumer/reader/ending.py": "unit/consumer/reader/test_reader.py unit/consumer/host/test_host.py",
    "consumer/pump/failing.py": "unit/consumer/pump/test_parking.py unit/consumer/pump/test_escapes.py",
    "consumer/pump/dispatch.py": (
        "unit/consumer/host/test_host.py unit/consumer/pump/test_parking.py unit/consumer/pump/test_rewind.py"
    ),
    "consumer/link/feeds.py": "unit/consumer/link/test_sharing.py unit/consumer/pump/test_begun_anew.py",
    "consumer/pump/keyed_dispatch.py": "unit/consumer/test_keyed.py",
    "consumer/link/member.py": (
        "unit/consumer/link/test_sharing.py unit/consumer/link/test_catch_up.py unit/consumer/link/test_streams.py"
    ),
    "consumer/pump/partition.py": "unit/consumer/host/test_host.py unit/consumer/pump/test_context_checkpoint.py",
    "consumer/link/position_search.py": "unit/consumer/pump/test_rewind.py unit/consumer/link/test_sharing.py",
    "consumer/pump/pump.py": "unit/consumer/host/test_host.py unit/consumer/calls/test_handler_timeout.py",
    "consumer/pump/reading.py": "unit/consumer/record/test_starts.py unit/consumer/pump/test_begun_anew.py",
    "consumer/pump/requests.py": "unit/consumer/pump/test_rewind.py",
    "consumer/host/renewals.py": "unit/consumer/host/test_manager.py",
    "consumer/host/startup.py": "unit/consumer/host/test_refusals.py unit/consumer/host/test_host.py",
    "consumer/pump/steps.py": "unit/app/test_handlers.py",
    "consumer/pump/ownership.py": "unit/consumer/pump/test_escapes.py unit/consumer/host/test_manager.py",
    "consumer/pump/services.py": "unit/consumer/host/test_host.py",
    "consumer/calls/workers.py": "unit/consumer/test_keyed.py unit/consumer/host/test_host.py",
    "consumer/bounds/loop_gate.py": "unit/consumer/bounds/test_limits.py",
    "core/lease.py": "unit/core/test_balancer.py unit/consumer/host/test_manager.py",
    "core/status.py": "unit/producer/test_stats.py unit/producer/test_batch.py",
    "demo/command.py": "integration/test_programs.py",
    "demo/exchange.py": "integration/test_programs.py",
    "demo/fleet.py": "integration/test_programs.py",
    "demo/host.py": "integration/test_programs.py",
    "demo/job.py": "spark/test_demo.py",
    "demo/market.py": "unit/demo/test_bars.py",
    "demo/pipeline.py": "spark/test_demo.py",
    "demo/processing.py": "integration/test_programs.py",
    "demo/record.py": "unit/demo/test_verify.py",
    "demo/scene.py": "integration/test_programs.py",
    "demo/view.py": "integration/test_programs.py",
    "emulator/durable.py": "integration/test_emulator_durable.py",
    "emulator/links.py": "integration/test_emulator.py integration/test_emulator_hostile.py",
    "emulator/long_keys.py": "integration/test_emulator_hostile.py",
    "emulator/nodes.py": "integration/test_emulator.py integration/test_emulator_hostile.py",
    "emulator/server.py": "integration/test_emulator.py integration/test_websockets.py",
    "emulator/service.py": "integration/test_emulator.py unit/emulator/test_connection.py",
    "eventhubs/names.py": "unit/eventhubs/test_envelope.py unit/eventhubs/test_sealing.py",
    "eventhubs/numbering.py": "unit/core/test_sequencer.py unit/eventhubs/test_sealing.py",
    "eventhubs/requests.py": "unit/eventhubs/test_cbs.py unit/eventhubs/test_management.py",
    "interfaces.py": (
        "contract/test_lease_stores.py contract/test_publisher_states.py contract/test_transports.py "
        "contract/test_sources.py"
    ),
    "net/dialing.py": "unit/net/test_route.py unit/net/test_websocket.py",
    "options/consumer.py": "unit/options/test_positions.py unit/options/test_retry.py unit/consumer/host/test_host.py",
    "options/producer.py": "unit/producer/test_buffered.py unit/test_clients.py",
    "producer/intake.py": "unit/producer/test_buffered.py unit/test_core.py",
    "producer/targets.py": "unit/producer/test_producer.py unit/producer/test_overlapping.py",
    "producer/marks.py": "unit/producer/test_claiming.py",
    "sources/files.py": "unit/sources/test_capture.py contract/test_sources.py",
    "sources/closing.py": "contract/test_sources.py unit/sources/test_memory.py",
    "sources/checks.py": "unit/sources/test_generator.py unit/sources/test_memory.py",
    "sources/hub.py": "unit/sources/test_transport.py contract/test_sources.py",
    "sources/links.py": "contract/test_sources.py unit/sources/test_memory.py",
    "sources/positions.py": "contract/test_sources.py unit/sources/test_generator.py",
    "spark/data_source.py": "spark/test_source_batch.py spark/test_source_queries.py",
    "spark/java.py": "spark/test_java.py",
    "spark/local.py": "spark/test_demo.py spark/test_fixtures.py",
    "spark/sink/at_least_once.py": "spark/test_sink.py",
    "spark/sink/data_source_writer.py": "spark/test_writer.py",
    "spark/sink/columns.py": "spark/test_sink_encode.py",
    "spark/sink/encode.py": "spark/test_sink_encode.py",
    "spark/sink/exactly_once.py": "faults/test_sink.py spark/test_sink.py",
    "spark/sink/executor.py": "spark/test_sink.py",
    "spark/sink/foreach_batch.py": "spark/test_sink.py",
    "spark/sink/patience.py": "faults/test_sink.py",
    "spark/sink/properties.py": "spark/test_sink_encode.py",
    "spark/sink/records.py": "unit/spark/test_records.py contract/test_ledger_stores.py",
    "spark/sink/small.py": "unit/spark/test_small.py spark/test_sink.py faults/test_sink.py",
    "spark/sink/staging.py": "spark/test_sink.py",
    "spark/source/columnar.py": "unit/spark/test_columns.py spark/test_source_batch.py spark/test_source_readers.py",
    "spark/source/lookups.py": "spark/test_source_readers.py",
    "spark/source/progress.py": "spark/test_progress.py",
    "spark/source/readers.py": "spark/test_source_readers.py",
    "spark/source/schema.py": "spark/test_source_batch.py",
    "storage/blob_access.py": "contract/test_blob_leases.py contract/test_publisher_states.py",
    "storage/leases/blob.py": "contract/test_blob_leases.py contract/test_lease_stores.py",
    "storage/ledgers/blob.py": "contract/test_ledger_stores.py",
    "storage/ledgers/directory.py": "contract/test_ledger_stores.py",
    "storage/ledgers/interface.py": "contract/test_ledger_stores.py",
    "storage/ledgers/opening.py": "contract/test_ledger_stores.py",
    "storage/ledgers/store.py": "contract/test_ledger_stores.py",
    "storage/publisher_states/blob.py": "contract/test_publisher_states.py",
    "storage/publisher_states/form.py": "contract/test_publisher_states.py",
    "storage/publisher_states/memory.py": "contract/test_publisher_states.py",
    "storage/publisher_states/sqlite.py": "contract/test_publisher_states.py",
    "storage/publisher_states/store.py": "contract/test_publisher_states.py",
    "testing/conformance/leases.py": "contract/test_lease_stores.py",
    "storage/records/blob.py": "contract/test_record_stores.py",
    "storage/records/directory.py": "contract/test_record_stores.py",
    "storage/records/memory.py": "contract/test_record_stores.py",
    "storage/records/names.py": "contract/test_record_stores.py",
    "storage/records/sqlite.py": "contract/test_record_stores.py",
    "storage/sqlite_file.py": "contract/test_record_stores.py unit/storage/leases/test_sqlite.py",
    "testing/conformance/publisher_state.py": "contract/test_publisher_states.py",
    "testing/conformance/records.py": "contract/test_record_stores.py",
    "testing/conformance/source.py": "contract/test_sources.py",
    "testing/conformance/transport.py": "contract/test_transports.py",
    "testing/fixtures.py": "integration/test_readme.py integration/test_cli_send_tail.py",
    "testing/pytest_plugin.py": "integration/test_pytest_plugin.py",
    "testing/proxy.py": "faults/test_networks.py integration/test_native_transport.py",
    "testing/sink.py": "contract/test_transports.py",
    "testing/threaded.py": "integration/test_spark_receive.py",
    "transport/base.py": "unit/transport/test_native.py contract/test_transports.py",
    "transport/connection.py": "unit/transport/test_native.py unit/transport/test_outages.py",
    "transport/namespace.py": "unit/transport/test_native.py unit/transport/test_requests.py",
    "transport/uamqp/connection.py": "integration/test_uamqp_transport.py",
    "transport/uamqp/door.py": "integration/test_without_uamqp.py integration/test_uamqp_transport.py",
    "transport/uamqp/transport.py": "integration/test_uamqp_transport.py contract/test_transports.py",
    "transport/uamqp/worker.py": "integration/test_uamqp_transport.py",
}
"""By module without a `test_<module>.py`: the files whose tests cover it. Paths are below `eventpump/` and `tests/`."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", f"--cache-dir={os.devnull}"],
        ["lint-imports", "--no-cache"],
    ],
    ids=lambda command: " ".join(command),
)
def test_checkers_find_nothing(command: list[str]) -> None:
    """Each checker finds nothing."""
    program = Path(sysconfig.get_path("scripts")) / command[0]
    result = subprocess.run([str(program), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_public_names_are_pinned() -> None:
    """A public name comes or goes on purpose only; every one of them exists."""
    assert eventpump.__all__ == _PUBLIC.split()
    assert all(getattr(eventpump, name) is not None for name in eventpump.__all__)


def test_lazy_imports_are_those_of_the_checkers() -> None:
    """A public name is found at run time in the module from which type checkers import it."""
    tree = ast.parse(Path(eventpump.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == eventpump._HOMES
    assert sorted(imported) == sorted(eventpump.__all__)
    assert set(eventpump.__all__) <= set(dir(eventpump))


_LOADED = """
import sys
from eventpump import {name}
kept = ("aiohttp", "azure", "eventpump", "fastavro", "pydantic", "pyspark", "pytest", "rich", "sqlite3", "uamqp")
kept += ("eventpump.consumer", "eventpump.emulator", "eventpump.producer")
print(*(name for name in kept if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("__version__", "eventpump"),
        ("EventPumpError", "eventpump"),
        ("EventData", "eventpump"),
        ("EventProducer", "pydantic eventpump eventpump.producer"),
        ("EventProcessorHost", "pydantic eventpump eventpump.consumer"),
        ("Emulator", "pydantic eventpump eventpump.emulator sqlite3"),
        ("SqliteLeaseStore", "eventpump sqlite3"),
        ("MemoryLeaseStore", "eventpump"),
        ("BlobLeaseStore", "azure aiohttp eventpump"),
    ],
)
def test_import_of_a_name_loads_what_it_needs(name: str, loaded: str) -> None:
    """Extras, the storage SDK, SQLite, the emulator and the models of options are loaded by what needs them only."""
    command = [sys.executable, "-c", _LOADED.format(name=name)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) == set(loaded.split())


def test_error_is_printed_under_its_public_name() -> None:
    """Also by a program that mentions nothing but a client."""
    program = (
        "from eventpump import EventProducer\n"
        "try:\n    EventProducer('x')\n"
        "except Exception as error:\n    print(type(error))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "<class 'eventpump.ConfigurationError'>\n"


def _namesakes(module: Path) -> list[Path]:
    """Return the test files that a module's name suggests: in its package's folder of unit tests, or the one above."""
    folder = ROOT / "tests" / "unit" / module.parent
    return [
        each / f"test_{module.name}" for each in (folder, folder.parent) if each.is_relative_to(ROOT / "tests/unit")
    ]


def test_docstrings_are_in_google_style() -> None:
    """Fields as in `:param x:` would be shown as text by Sphinx with napoleon's sections beside them."""
    field = re.compile(r":(param|returns?|raises|yields?|ivar)\b[^:\n]*:\s")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("eventpump", "benchmarks", "tests", "examples", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if field.search(line)
    ]
    assert not found, f"use Args, Returns, Raises: {found}"


def test_modules_have_the_test_file_of_their_name_or_a_row() -> None:
    """Who changes a module finds its tests: by its name, or in the table, which lists only files that exist."""
    modules = {
        path.relative_to(ROOT / "eventpump")
        for path in (ROOT / "eventpump").rglob("*.py")
        if not path.name.startswith("__")
    }
    assert len(modules) > 100
    without = {module for module in modules if not any(path.is_file() for path in _namesakes(module))}
    rows = {Path(module): files.split() for module, files in _COVERED_BY.items()}
    assert sorted(without - rows.keys()) == [], "these need a test file of their name, or a row in _COVERED_BY"
    assert sorted(rows.keys() - modules) == [], "these rows of _COVERED_BY are of no module"
    assert all(rows.values())
    missing = [
        f"{module}: {file}" for module, files in rows.items() for file in files if not (ROOT / "tests" / file).is_file()
    ]
    assert missing == [], "these rows of _COVERED_BY name files that are not there"


def test_files_that_start_first_exist() -> None:
    """A file that was renamed or removed does not stay in the list of those that take longest."""
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
