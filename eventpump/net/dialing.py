"""Connects a client's AMQP connection to a service: in a stream, or in a WebSocket."""

from __future__ import annotations

from eventpump.amqp.connection import Connection
from eventpump.net.route import Route, open_stream
from eventpump.net.stream import ConnectionHandler, ConnectionProtocol


async def dial(connection: Connection, handler: ConnectionHandler, route: Route) -> ConnectionProtocol:
    """Connect a client; what is queued is sent at once. Cancelled, no stream is left. Raises `ServiceError`."""
    if route.is_websocket:
        # Only this needs aiohttp, which takes long to import.
        from eventpump.net import websocket

        return await websocket.connect(
            lambda: ConnectionProtocol(connection, handler),
            route,
            max_message=websocket.FRAMES_PER_MESSAGE * connection.config.max_frame_size,
        )
    return await open_stream(lambda: ConnectionProtocol(connection, handler), route)
