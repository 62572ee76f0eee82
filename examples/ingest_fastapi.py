"""Take readings over HTTP and publish them: an ingestion API on FastAPI, run by uvicorn.

    pip install fastapi uvicorn
    python examples/ingest_fastapi.py --port 8080
    curl -H 'Content-Type: application/json' -d '{"sensor": "sensor-7", "celsius": 21.5}' \
        http://localhost:8080/readings

An answer of 201 means that Event Hubs has stored the reading. When the buffer is full, the answer is 503 with
Retry-After, and nothing is taken: `examples/ingest_aiohttp.py` says why requests do not wait for room.

The producer lives in FastAPI's lifespan: on SIGTERM uvicorn accepts no connection, the requests at work get their
answers, and then the lifespan ends, which sends what is buffered. Without a connection string the readings go to a
local service, which ends with the program.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install fastapi uvicorn") from None
from pydantic import BaseModel, FiniteFloat

from eventpump import (
    BufferedProducer,
    BufferFullError,
    Emulator,
    EventData,
    EventPumpError,
    EventTooLargeError,
)

ANSWER_WITHIN = 10.0
"""Seconds that a request waits for its reading to be stored."""


class Reading(BaseModel):
    sensor: str
    celsius: FiniteFloat


class Stored(BaseModel):
    partition: str


async def post_reading(reading: Reading, request: Request) -> Stored:
    producer: BufferedProducer = request.app.state.producer
    try:
        # One key, one partition: the readings of a sensor stay in order.
        event = EventData(reading.model_dump_json(), content_type="application/json")
        receipt = producer.send_nowait(event, partition_key=reading.sensor)
        async with asyncio.timeout(ANSWER_WITHIN):
            stored = await receipt
    except BufferFullError:
        raise HTTPException(503, "busy", headers={"Retry-After": "1"}) from None
    except EventTooLargeError as error:
        raise HTTPException(413, str(error)) from error
    except TimeoutError:
        # It is accepted, and may yet be stored: a client that sends it again may store it twice.
        raise HTTPException(504, "not known to be stored yet") from None
    except EventPumpError as error:
        raise HTTPException(503 if error.is_retryable else 400, str(error)) from error
    return Stored(partition=stored.partition_id)


async def get_health(request: Request) -> dict[str, int]:
    producer: BufferedProducer = request.app.state.producer
    return {
        "buffered_events": producer.buffered_events,
        "buffered_bytes": producer.buffered_bytes,
    }


async def refuse(request: Request, error: Exception) -> Response:
    """Answer what is no reading. FastAPI's own handler returns the input, and fails where that is NaN."""
    assert isinstance(error, RequestValidationError)
    problems = [
        {"field": ".".join(map(str, each["loc"])), "problem": each["msg"]}
        for each in error.errors()
    ]
    return JSONResponse({"error": problems}, status_code=422)


def make_app(connection_string: str | None, hub: str, max_bytes: int) -> FastAPI:
    @asynccontextmanager
    async def publishing(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            target = connection_string
            if target is None:
                target = (
                    await stack.enter_async_context(Emulator({hub: 4}))
                ).connection_string
            app.state.producer = await stack.enter_async_context(
                BufferedProducer(target, hub, max_bytes=max_bytes)
            )
            yield
        # Leaving the block has sent what was buffered.
        print("everything that was accepted is sent", flush=True)

    app = FastAPI(title="Readings", lifespan=publishing)
    app.add_exception_handler(RequestValidationError, refuse)
    app.add_api_route("/readings", post_reading, methods=["POST"], status_code=201)
    app.add_api_route("/health", get_health)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument(
        "--max-bytes", type=int, default=8 * 1024 * 1024, help="the size of the buffer"
    )
    args = parser.parse_args()
    app = make_app(args.connection_string, args.hub, args.max_bytes)
    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        timeout_graceful_shutdown=int(ANSWER_WITHIN),
    )
