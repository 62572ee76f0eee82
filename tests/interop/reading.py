"""What the suites share on our side: reading everything, and comparing types along with values."""

from __future__ import annotations

from typing import Any

from eventpump import Emulator, ReceivedEvent
from eventpump.amqp.types import Described
from tests.support.reading import read_partition

PARTITIONS = ("0", "1", "2", "3")


async def read_hub(emulator: Emulator, hub: str) -> dict[str, list[ReceivedEvent]]:
    """Read what a hub of four partitions holds now, by our reader."""
    return {partition: await read_partition(emulator.connection_string, hub, partition) for partition in PARTITIONS}


def exact(value: Any) -> Any:
    """Return a value in which types count too: 1, True and 1.0 are equal in Python, an Int(1) and a long are too."""
    match value:
        case list():
            return [type(value).__name__, *map(exact, value)]
        case dict():
            return {exact(key): exact(each) for key, each in value.items()}
        case Described(descriptor=descriptor, value=described):
            return ("described", exact(descriptor), exact(described))
        case _:
            return (type(value).__name__, value)
