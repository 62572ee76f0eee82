"""The blobs that official SDKs write, as recorded: `golden_blobs.json`.

By the language of an SDK: its packages, and the blobs of a group of two partitions while a processor owns both and has
processed three events of partition 0, and after it was closed. `OWNER` stands for its identifier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from azure.storage.blob.aio import ContainerClient

from eventpump.interfaces import ConsumerScope

GOLDEN: Mapping[str, Any] = json.loads(Path(__file__).with_name("golden_blobs.json").read_text(encoding="utf-8"))
SCOPE = ConsumerScope("127.0.0.1", "Telemetry", "$Default")
OWNER = "OWNER"
PARTITIONS = ("0", "1")
COUNT = 3
"""Events of partition 0; partition 1 has none."""

Blobs = Mapping[str, Mapping[str, str]]


async def list_metadata(container: ContainerClient) -> dict[str, dict[str, str]]:
    """Return the metadata of all blobs by their names, keys in the case in which they are stored.

    Raises:
        AssertionError: A blob is not an empty block blob.
    """
    found = {}
    async for blob in container.list_blobs(include=["metadata"]):
        assert (blob.blob_type, blob.size) == ("BlockBlob", 0)
        # An empty value is listed as an empty element, which the package shows as None.
        found[blob.name] = {key: value or "" for key, value in (blob.metadata or {}).items()}
    return found
