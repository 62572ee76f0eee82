"""The two ends of a connection, for tests of what carries it."""

from __future__ import annotations

import asyncio

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import (
    Connection,
    CreditChanged,
    Event,
    LinkAttached,
    Opened,
    Role,
    SaslRequested,
    SessionBegun,
)
from eventpump.amqp.performatives import Source, Target


class Recorder:
    """A handler that keeps what it is called with."""

    def __init__(self, engine: Connection) -> None:
        self.engine = engine
        self.events: list[Event] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self.gone = asyncio.Event()

    def on_events(self, events: list[Event]) -> None:
        assert not self.closed
        self.events += events
        for event in events:
            if isinstance(event, SaslRequested):
                self.engine.sasl_outcome(ok=True)
            elif isinstance(event, LinkAttached) and event.link.is_remote_initiated:
                event.link.accept(snd_settle_mode=2)
                event.link.set_credit(100)

    def on_writable(self) -> None:
        self.writable += 1

    def on_closed(self, error: Exception | None) -> None:
        self.closed.append(error)
        self.gone.set()


class Client(Recorder):
    """A client that attaches one sender, sends one message and closes."""

    def __init__(self, payload: bytes = b"") -> None:
        super().__init__(Connection(ConnectionConfig(container_id="me", hostname="localhost"), Role.CLIENT))
        self.engine.start()
        self.payload = payload

    def on_events(self, events: list[Event]) -> None:
        super().on_events(events)
        for event in events:
            match event:
                case Opened():
                    self.engine.begin()
                case SessionBegun(session):
                    session.attach("up", is_receiver=False, snd_settle_mode=2, source=Source(), target=Target("there"))
                case CreditChanged(link):
                    link.send(self.payload, settled=True)
                    self.engine.close()
                case _:
                    pass
