"""The rules of the house, run with the tests: style, types, the direction of imports, and the public names."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import eventpump

ROOT = Path(__file__).parents[1]

_PUBLIC = """
AuthenticationError BatchState BlobLeaseStore BlobPublisherStateStore BufferFullError BufferedProducer Checkpoint
CheckpointPolicy CloseReason ClosedError ConfigurationError ConnectionLostError ConsumerDisconnectedError
DataLossError DeliveryReceipt Emulator EntityNotFoundError EventBatch EventData EventError EventPosition
EventProcessor EventProcessorHost EventProducer EventPumpError EventTooLargeError HubProperties
InvalidClientStateError LastEnqueued LinkDetachedError MemoryLeaseStore MemoryLeases MemoryPublisherStateStore
OwnershipLostError PartitionContext PartitionProperties PartitionPublishingOptions PartitionPublishingProperties
PartitionReader ProcessorFailedError ProducerDisconnectedError ProducerStateLostError ProtocolError
PublishOutcomeUnknownError PublisherIntent PublisherState PublisherStateStore QuotaExceededError ReceivedEvent
Recovery RequestRefusedError RetryOptions SendResult ServiceBusyError ServiceError ServiceTimeoutError SharedKey
SharedSignature SqliteLeaseStore SqlitePublisherStateStore StoreError StoredPublisherState
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["lint-imports", "--no-cache"],
    ],
    ids=lambda command: " ".join(command),
)
def test_the_house_is_in_order(command: list[str]) -> None:
    """Each checker finds nothing."""
    program = Path(sysconfig.get_path("scripts")) / command[0]
    result = subprocess.run([str(program), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_public_names_are_these() -> None:
    """A public name comes or goes on purpose only; every one of them exists."""
    assert eventpump.__all__ == _PUBLIC.split()
    assert all(getattr(eventpump, name) is not None for name in eventpump.__all__)


def test_importing_the_library_loads_only_what_everybody_needs() -> None:
    """Extras, and the storage SDK, are loaded by what needs them; the SDK with the first mention of its store."""
    probe = (
        "import sys, eventpump\n"
        "extra = ('aiohttp', 'rich', 'pytest', 'uamqp', 'pyspark', 'azure.storage.blob')\n"
        "print([m for m in extra if m in sys.modules])\n"
        "from eventpump import BlobLeaseStore\n"
        "print('azure.storage.blob' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["[]", "True"]
