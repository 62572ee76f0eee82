"""uamqp as it is, in a process of its own: publishes to a partition and reads it, and prints what it read.

Its standard input is one JSON object: host, port, ca_file, key_name, key, hub, partition, the bodies to publish, in
hexadecimal, and the count to read. It may have `is_jwt`, to put the signature as a token of type "jwt" as the package's
samples do; `selector`, the filter to read by; and `delivery_annotations`, `annotations` and `footer` of each event.
It prints one JSON object: the bodies read, with their sequence numbers and offsets, and these sections.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import uamqp  # type: ignore[import-untyped]  # it comes without types
from uamqp.authentication import JWTTokenAuth, SASTokenAuth  # type: ignore[import-untyped]  # as above

PATIENCE = 20_000
"""Milliseconds to wait for what must come."""
SECTIONS = ("delivery_annotations", "annotations", "footer")
"""Maps of a message that the input may have, and that are printed."""


def auth(given: dict[str, Any]) -> SASTokenAuth | JWTTokenAuth:
    """Make a token, and trust the service."""
    uri = f"sb://{given['host']}/{given['hub']}"
    if given.get("is_jwt"):
        signed = SASTokenAuth.from_shared_access_key(uri, given["key_name"], given["key"])
        token = SimpleNamespace(token=signed.token.decode(), expires_on=signed.expires_at)
        return JWTTokenAuth(uri, uri, lambda: token, port=given["port"], verify=given["ca_file"])
    return SASTokenAuth.from_shared_access_key(
        uri, given["key_name"], given["key"], port=given["port"], verify=given["ca_file"]
    )


def text_of(section: dict[Any, Any] | None) -> dict[str, str]:
    """Return the entries of a section whose names and values are text."""
    return {
        name.decode(): value.decode()
        for name, value in (section or {}).items()
        if isinstance(name, bytes) and isinstance(value, bytes)
    }


def main() -> None:
    """Publish, read, print."""
    given = json.loads(sys.stdin.readline())
    base = f"amqps://{given['host']}/{given['hub']}"
    partition = given["partition"]
    sender = uamqp.SendClient(f"{base}/Partitions/{partition}", auth=auth(given))
    try:
        for body in given["bodies"]:
            sections = {name: given[name] for name in SECTIONS if name in given}
            sender.queue_message(uamqp.Message(bytes.fromhex(body), **sections))
        states = sender.send_all_messages(close_on_done=False)
        assert all(state == uamqp.constants.MessageState.SendComplete for state in states), states
    finally:
        sender.close()
    source = uamqp.address.Source(f"{base}/ConsumerGroups/$Default/Partitions/{partition}")
    source.set_filter(given.get("selector", "amqp.annotation.x-opt-offset > '-1'").encode())
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
                        **{name: text_of(getattr(message, name)) for name in SECTIONS},
                    }
                )
    finally:
        receiver.close()
    print(json.dumps(found), flush=True)  # noqa: T201 - this is its answer


main()
