"""uamqp as it is, in a process of its own: publishes to a partition and reads it, and prints what it read.

Its standard input is one JSON object: host, port, ca_file, key_name, key, hub, partition, and the bodies to publish, in
hexadecimal. It prints one JSON object: the bodies read, with their sequence numbers and offsets.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import uamqp  # type: ignore[import-untyped]  # it comes without types
from uamqp.authentication import SASTokenAuth  # type: ignore[import-untyped]  # as above

PATIENCE = 20_000
"""Milliseconds to wait for what must come."""


def auth(given: dict[str, Any]) -> SASTokenAuth:
    """Make a token, and trust the service."""
    uri = f"sb://{given['host']}/{given['hub']}"
    return SASTokenAuth.from_shared_access_key(
        uri, given["key_name"], given["key"], port=given["port"], verify=given["ca_file"]
    )


def main() -> None:
    """Publish, read, print."""
    given = json.loads(sys.stdin.readline())
    base = f"amqps://{given['host']}/{given['hub']}"
    partition = given["partition"]
    sender = uamqp.SendClient(f"{base}/Partitions/{partition}", auth=auth(given))
    try:
        for body in given["bodies"]:
            sender.queue_message(uamqp.Message(bytes.fromhex(body)))
        states = sender.send_all_messages(close_on_done=False)
        assert all(state == uamqp.constants.MessageState.SendComplete for state in states), states
    finally:
        sender.close()
    source = uamqp.address.Source(f"{base}/ConsumerGroups/$Default/Partitions/{partition}")
    source.set_filter(b"amqp.annotation.x-opt-offset > '-1'")
    receiver = uamqp.ReceiveClient(source, auth=auth(given), timeout=PATIENCE, prefetch=300)
    found: list[dict[str, Any]] = []
    try:
        while len(found) < given["count"]:
            for message in receiver.receive_message_batch(timeout=PATIENCE):
                annotations = message.annotations
                found.append(
                    {
                        "body": b"".join(message.get_data()).hex(),
                        "sequence_number": annotations[b"x-opt-sequence-number"],
                        "offset": annotations[b"x-opt-offset"].decode(),
                    }
                )
    finally:
        receiver.close()
    print(json.dumps(found), flush=True)  # noqa: T201 - this is its answer


main()
