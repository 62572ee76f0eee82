"""Take readings over HTTP and publish them: an ingestion API on aiohttp.

    python examples/ingest_aiohttp.py --port 8080
    curl -d '{"sensor": "sensor-7", "celsius": 21.5}' http://localhost:8080/readings

An answer of 201 means that Event Hubs has stored the reading. All requests share one buffered producer, so that the
readings of many of them travel in one message.

When the buffer is full, the answer is 503 with Retry-After, and nothing is taken. Waiting for room would hide the
problem: each waiting request holds a connection and its body, clients time out and send again, and the queue grows
outside of the buffer, where nothing limits it. After a 503 a client, or a load balancer, waits or goes elsewhere.

On SIGTERM no connection is accepted, the requests at work get their answers, and what is buffered is sent. Without a
connection string the readings go to a local service, which ends with the program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from aiohttp import web

from eventpump import (
    BufferedProducer,
    BufferFullError,
    Emulator,
    EventData,
    EventError,
    EventPumpError,
    EventTooLargeError,
)

ANSWER_WITHIN = 10.0
"""Seconds that a request waits for its reading to be stored."""

PRODUCER = web.AppKey("producer", BufferedProducer)


async def post_reading(request: web.Request) -> web.Response:
    try:
        reading = json.loads(await request.read())
        sensor = str(reading["sensor"])
        event = EventData.json({"sensor": sensor, "celsius": float(reading["celsius"])})
    except (ValueError, TypeError, KeyError, EventError):
        return web.json_response(
            {"error": 'expected {"sensor": text, "celsius": number}'}, status=400
        )
    try:
        # One key, one partition: the readings of a sensor stay in order.
        receipt = request.app[PRODUCER].send_nowait(event, partition_key=sensor)
        async with asyncio.timeout(ANSWER_WITHIN):
            stored = await receipt
    except BufferFullError:
        return web.json_response(
            {"error": "busy"}, status=503, headers={"Retry-After": "1"}
        )
    except EventTooLargeError as error:
        return web.json_response({"error": str(error)}, status=413)
    except TimeoutError:
        # It is accepted, and may yet be stored: a client that sends it again may store it twice.
        return web.json_response({"error": "not known to be stored yet"}, status=504)
    except EventPumpError as error:
        return web.json_response(
            {"error": str(error)}, status=503 if error.is_retryable else 400
        )
    return web.json_response({"partition": stored.partition_id}, status=201)


async def get_health(request: web.Request) -> web.Response:
    producer = request.app[PRODUCER]
    return web.json_response(
        {
            "buffered_events": producer.buffered_events,
            "buffered_bytes": producer.buffered_bytes,
        }
    )


def make_app(
    connection_string: str | None, hub: str, max_bytes: int
) -> web.Application:
    async def publishing(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            target = connection_string
            if target is None:
                target = (
                    await stack.enter_async_context(Emulator({hub: 4}))
                ).connection_string
            app[PRODUCER] = await stack.enter_async_context(
                BufferedProducer(target, hub, max_bytes=max_bytes)
            )
            yield
        # Leaving the block has sent what was buffered.
        print("everything that was accepted is sent", flush=True)

    app = web.Application(client_max_size=1024 * 1024)
    app.cleanup_ctx.append(publishing)
    app.router.add_post("/readings", post_reading)
    app.router.add_get("/health", get_health)
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
    web.run_app(app, host=args.host, port=args.port, shutdown_timeout=ANSWER_WITHIN)
