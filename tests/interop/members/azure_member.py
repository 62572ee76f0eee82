"""An EventHubConsumerClient of azure-eventhub in a process of its own. One argument: its settings, as JSON.

It prints a JSON object a line, as every member of a fleet does; see `tests/interop/members/fleet.py`. The packages are
used as they are: what they do is seen by a checkpoint store that passes on every call. At SIGTERM it processes no
more, waits for what is being processed, and closes its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterable
from typing import Any

from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore


def say(kind: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"is": kind, **facts}) + "\n")
    sys.stdout.flush()


class Watched(BlobCheckpointStore):
    """Prints what it lists, with which each cycle begins, and what was claimed."""

    async def list_ownership(self, *scope: str, **options: Any) -> Iterable[dict[str, Any]]:
        found = list(await super().list_ownership(*scope, **options))
        view = {each["partition_id"]: [each["owner_id"] or "", each["last_modified_time"]] for each in found}
        say("cycle", view=view)
        return found

    async def claim_ownership(
        self, ownership_list: Iterable[dict[str, Any]], **options: Any
    ) -> Iterable[dict[str, Any]]:
        claimed = list(await super().claim_ownership(ownership_list, **options))
        for owner in {each["owner_id"] for each in claimed if each["owner_id"]}:
            say("claimed", owner=owner, partitions=[each["partition_id"] for each in claimed])
        return claimed


async def main(settings: dict[str, Any]) -> None:
    stopping, idle = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    working: set[str] = set()
    idle.set()

    async def on_event_batch(context: Any, events: list[EventData]) -> None:
        if not events or stopping.is_set():
            return
        partition_id = context.partition_id
        working.add(partition_id)
        idle.clear()
        try:
            say("processed", partition=partition_id, numbers=[event.sequence_number for event in events])
            await context.update_checkpoint(events[-1])
            say("stored", partition=partition_id, number=events[-1].sequence_number)
        finally:
            working.discard(partition_id)
            if not working:
                idle.set()

    async def on_error(context: Any, error: Exception) -> None:
        say("error", partition=context and context.partition_id, text=f"{type(error).__name__}: {error}"[:300])

    async def on_partition_initialize(context: Any) -> None:
        say("opened", partition=context.partition_id)

    async def on_partition_close(context: Any, reason: Any) -> None:
        say("closed", partition=context.partition_id, reason=reason.name)

    store = Watched.from_connection_string(settings["storage"], settings["container"])
    client = EventHubConsumerClient.from_connection_string(
        settings["connection_string"],
        "$Default",
        eventhub_name=settings["hub"],
        custom_endpoint_address=settings["address"],
        checkpoint_store=store,
        **settings["options"],
    )
    receiving = asyncio.create_task(
        client.receive_batch(
            on_event_batch,
            on_error=on_error,
            on_partition_initialize=on_partition_initialize,
            on_partition_close=on_partition_close,
            starting_position="-1",
            max_wait_time=1,
        )
    )
    await stopping.wait()
    await idle.wait()
    await client.close()
    # What is left of it sleeps to the end of its interval.
    receiving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await receiving
    await store.close()
    say("stopped")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
