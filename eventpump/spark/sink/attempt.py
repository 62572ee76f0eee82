"""One attempt of an executor to publish a partition of a batch exactly once."""

from __future__ import annotations

import enum
from typing import Any

from eventpump.core.sequencer import PartitionSequencer, SequencerState
from eventpump.errors import (
    EventPumpError,
    InvalidClientStateError,
    ProducerDisconnectedError,
)
from eventpump.eventhubs.numbering import NUMBERS, distance
from eventpump.spark.sink.records import LossReason, PartitionPlan, PartitionReceipt, StateLost


class WorkStep(enum.Enum):
    """The next step of an attempt."""

    LOOK = "look"
    """Attach as the plan's producer with a null number; then `looked`, `unknown_producer` or `fenced`."""
    SCAN = "scan"
    """Look for the stamp, or else the content, of row `offset` after the planned tail; then `scanned`."""
    SEND = "send"
    """Publish from row `position` on; then `published`, `troubled` or `fenced`."""
    REST = "rest"
    """Wait for rows."""
    END = "end"
    """All rows are stored: `receipt`."""
    LOST = "lost"
    """The producer's state is lost: `loss`."""
    FAIL = "fail"
    """Raise `error()`."""


def may_continue(sequencer: PartitionSequencer[Any], entry: PartitionPlan) -> bool:
    """Return whether the first attempt at a plan that was just created may publish over the link of an earlier batch.

    It may, if nothing else has used the producer since: then the service is where the plan begins. Otherwise, and
    wherever anything of the batch may be stored, the attempt attaches with a null number and looks. A producer that has
    published nothing always looks, because "nothing" is also the answer of a service that has forgotten.
    """
    return (
        not entry.is_fresh
        and sequencer.state is SequencerState.IDLE
        and (sequencer.producer_id, sequencer.owner_level) == (entry.producer_id, entry.owner_level)
        and sequencer.last_number == entry.last_number != entry.nothing
    )


class PartitionWork:
    """Decides the steps of one attempt to publish one partition's rows. Several may run at once: they share the
    numbers.

    An attempt never relies on what it sent: it asks the service how much of the batch is stored, continues from there,
    and asks again whenever an answer is missing or unexpected. If the service's number is ahead of it, a concurrent
    attempt with the same rows has published them.

    Args:
        max_tries: How many failures in a row that count, without any row being stored, are retried; None for no limit.

    Attributes:
        rows: How many rows have been received so far, with those that are stored already.
        position: Rows before it are stored; None before the first look.
        found: How many rows were stored at the first look.
    """

    __slots__ = (
        "_entry",
        "_failure",
        "_is_suspicious",
        "_must_look",
        "_must_scan",
        "_tries",
        "found",
        "loss",
        "max_tries",
        "position",
        "rows",
    )

    def __init__(self, entry: PartitionPlan, *, max_tries: int | None = 3) -> None:
        self._entry = entry
        self.max_tries = max_tries
        self.rows = entry.offset
        self.position: int | None = None
        self.found = entry.offset
        self.loss: StateLost | None = None
        self._failure: EventPumpError | None = None
        self._must_look = True
        self._must_scan = False
        self._is_suspicious = False
        self._tries = 0

    @property
    def step(self) -> WorkStep:
        """The next step."""
        if self._failure is not None:
            return WorkStep.FAIL
        if self.loss is not None:
            return WorkStep.LOST
        if self._must_look:
            return WorkStep.LOOK
        needed = self.needed
        assert needed is not None
        if needed >= self._entry.count:
            return WorkStep.END
        if needed >= self.rows:
            return WorkStep.REST
        return WorkStep.SCAN if self._must_scan else WorkStep.SEND

    @property
    def needed(self) -> int | None:
        """The first row that is needed; None before the first look."""
        return self._entry.offset if self._must_scan else self.position

    def error(self) -> EventPumpError:
        """Return the error the attempt failed with."""
        assert self._failure is not None
        return self._failure

    def receipt(self) -> PartitionReceipt:
        """Return the receipt, if the step is to end."""
        assert self.step is WorkStep.END
        entry = self._entry
        return PartitionReceipt(
            partition_id=entry.partition_id,
            producer_id=entry.producer_id,
            owner_level=entry.owner_level,
            count=entry.count,
            offset=entry.offset,
            first_number=entry.next_number if entry.count > entry.offset else None,
            next_number=entry.number_of(entry.count),
            found=self.found,
        )

    def received(self, rows: int) -> None:
        """Record that the rows before one are here, or stored."""
        self.rows = max(self.rows, rows)

    def continued(self) -> None:
        """Record that the attempt begins with a link that was kept, instead of looking: see `may_continue`."""
        assert self._must_look
        assert self.position is None
        self._must_look = False
        self._arrived_at(self._entry.offset)

    def looked(self, last_number: int) -> None:
        """Record what the service answered as the last number published."""
        entry = self._entry
        ahead = distance(entry.last_number, last_number)
        self._must_look = self._must_scan = False
        if last_number == entry.nothing and not (entry.is_fresh and not ahead):
            # Also if the rows cross the wrap, where it could be a row's number: nothing else distinguishes the two.
            self._lose(LossReason.BELOW)
        elif ahead >= NUMBERS // 2:
            self._lose(LossReason.BELOW)
        elif self.position is not None and entry.offset + ahead < self.position:
            self._lose(LossReason.REGRESSED)
        elif ahead or not entry.is_fresh:
            self._arrived_at(entry.offset + ahead)
        elif self._is_suspicious:
            self._lose(LossReason.UNCOUNTED)
        else:
            # A service that has forgotten what it stored would answer the same.
            self._must_scan = True

    def scanned(self, *, is_stored: bool) -> None:
        """Record whether row `offset` is in the hub. If so, a concurrent attempt may have stored it since the look:
        look again."""
        assert self.step is WorkStep.SCAN
        self._must_scan = False
        if is_stored:
            self._is_suspicious = self._must_look = True
        else:
            self._arrived_at(self._entry.offset)

    def published(self, first_number: int, count: int) -> None:
        """Record that rows from `position` on were accepted, the first of them with this number."""
        assert self.position is not None
        assert first_number == self._entry.number_of(self.position), "rows were sent under the numbers of other rows"
        self._arrived_at(self.position + count)

    def unknown_producer(self) -> None:
        """Record that the service does not know the producer."""
        self._lose(LossReason.UNKNOWN)

    def fenced(self, error: ProducerDisconnectedError) -> None:
        """Record that the producer was taken over, which is final."""
        self._failure = error

    def troubled(self, error: EventPumpError, *, counts: bool = True, is_late: bool = False) -> bool:
        """Record that a step failed, so that the outcome of a send is unknown or it was refused: look again, or give
        up.

        Returns:
            Whether the attempt continues.
        """
        self._must_look, self._must_scan = True, False
        self._tries += counts
        if is_late or (self.max_tries is not None and self._tries > self.max_tries):
            self._failure = error
        return self._failure is None

    def _arrived_at(self, position: int) -> None:
        if self.position is None:
            self.found = position
        if self.position is None or position > self.position:
            self._tries = 0
        self.position = position
        count = self._entry.count
        if position > count:
            self._failure = InvalidClientStateError(
                self._entry.partition_id,
                f"{position} rows are stored under the numbers of this batch, which has {count}: a later batch has "
                "begun since, and this attempt is late; otherwise the ledger is an older copy: restore the newest",
            )

    def _lose(self, reason: LossReason) -> None:
        stored = self._entry.offset if self.position is None else self.position
        self.loss = StateLost(partition_id=self._entry.partition_id, reason=reason, stored=stored)
