"""A headless Chromium, which opens pages and measures what they show, by the protocol of its developer tools.

It is Debian's package `chromium`, or a Chrome or Chromium that is found on the path.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_START_TIMEOUT, _CALL_TIMEOUT = 60.0, 60.0
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # it refuses to run as root with it, and opens nothing but the files of this checkout
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def browser_program() -> str | None:
    """Return the program of a Chromium on this machine; None if there is none."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


class Browser:
    """A headless browser with one page. A context manager.

    Args:
        program: See `browser_program`.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._numbers = itertools.count(1)
        self._stack = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._target = ""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport in CSS pixels; below a width of 500 it is that of a mobile device."""
        is_phone = width < 500
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    async def prefer(self, scheme: str) -> None:
        """Have the system prefer a color scheme, "light" or "dark"."""
        await self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def open(self, url: str) -> None:
        """Open a page, and wait until it has loaded."""
        await self._call("Page.navigate", url=url, until="Page.loadEventFired")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript on the page, or what a promise of it resolves to."""
        result = await self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    async def screenshot(self) -> str:
        """Return what is on the screen, as PNG in Base64."""
        return str((await self._call("Page.captureScreenshot", format="png"))["data"])

    async def _start(self) -> None:
        profile = f"--user-data-dir={self._stack.name}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTPUMP_")}
        process = self._process = await asyncio.create_subprocess_exec(
            self._program,
            *_OPTIONS,
            profile,
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert process.stderr is not None
        address, said = None, []
        async with asyncio.timeout(_START_TIMEOUT):
            async for line in process.stderr:
                said.append(line.decode(errors="replace"))
                if address := re.search(r"DevTools listening on (ws://\S+)", said[-1]):
                    break
        assert address is not None, "".join(said)
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(address[1], max_msg_size=0)
        (page,) = (each for each in (await self._call("Target.getTargets"))["targetInfos"] if each["type"] == "page")
        attached = await self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._target = attached["sessionId"]
        await self._call("Page.enable")

    async def _stop(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.communicate()
        self._stack.cleanup()

    async def _call(self, method: str, *, until: str = "", **parameters: Any) -> Mapping[str, Any]:
        """Call a method of the protocol; return its result, once the event `until` has come as well."""
        assert self._socket is not None
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_str(json.dumps(message | ({"sessionId": self._target} if self._target else {})))
        result: Mapping[str, Any] | None = None
        async with asyncio.timeout(_CALL_TIMEOUT):
            while result is None or until:
                answer = await self._socket.receive_json()
                if answer.get("id") == number:
                    assert "error" not in answer, (method, answer)
                    result = answer["result"]
                until = "" if answer.get("method") == until else until
        return result


def address(path: Path) -> str:
    """Return the address of a file."""
    return path.resolve().as_uri()
