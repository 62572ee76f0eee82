"""Azurite as a test server: it starts by itself, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from azure.storage.blob.aio import ContainerClient

from eventpump.errors import StoreError
from tests.support.azurite import AZURITE_VERSION, Azurite, install_azurite


async def test_azurite_serves_until_it_is_stopped() -> None:
    """A started Azurite answers at once; a stopped one has no process left, and stopping twice is fine."""
    with Azurite() as server:
        pid = server.pid
        async with ContainerClient.from_connection_string(server.connection_string, "first") as container:
            await container.create_container()
            assert await container.exists()
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.stop()


def test_azurite_that_cannot_start_raises_store_error(tmp_path: Path) -> None:
    """A server that ends before it listens gives a StoreError with what it said, and can be stopped all the same."""
    script = tmp_path / f"azurite-{AZURITE_VERSION}" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    script.parent.mkdir(parents=True)
    script.write_text("console.log('out of order'); process.exit(3)")
    assert install_azurite(tmp_path) == script
    server = Azurite(tmp_path)
    with pytest.raises(StoreError, match="out of order"):
        server.start()
    server.stop()
