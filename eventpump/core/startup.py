"""Decides whether a refused partition means that the host is misconfigured: only then does a refusal end it."""

from __future__ import annotations

from eventpump.errors import AuthenticationError, EntityNotFoundError

_OF_THE_HOST = (AuthenticationError, EntityNotFoundError)
"""Errors about the credential, the hub or the consumer group, which are the same for every partition."""


class HostStart:
    """The first attempts of one host to open links.

    A host ends because of a refusal only soon after its start, if it never attached a link, and if the service refused
    all its attempts because of the credential, the hub or the consumer group. Everything else concerns one partition:
    it is reported, released, and tried again.

    The partitions considered are those tried when the first refusal arrives: with a thousand partitions there is always
    one whose attempt has just begun.

    Args:
        until: When the start is over, on the clock whose time `verdict` takes, in seconds.
    """

    def __init__(self, until: float) -> None:
        self._until = until
        self._trying: set[str] = set()
        self._awaited: set[str] | None = None
        self._refusal: Exception | None = None
        self._was_answered = False

    def tried(self, partition_id: str) -> None:
        """Record that an attempt on a partition begins."""
        self._trying.add(partition_id)

    def linked(self) -> None:
        """Record that a link was attached: from now on no refusal ends the host."""
        self._was_answered = True

    def refused(self, partition_id: str, error: Exception) -> None:
        """Record that an attempt was refused permanently."""
        if not isinstance(error, _OF_THE_HOST):
            # The service looked up the partition, so it accepts this host's credential, hub and group.
            self._was_answered = True
        elif self._refusal is None:
            self._refusal = error
            self._awaited = set(self._trying)
        self.ended(partition_id)

    def ended(self, partition_id: str) -> None:
        """Record that an attempt is over; without a refusal if `refused` was not called."""
        self._trying.discard(partition_id)
        if self._awaited is not None:
            self._awaited.discard(partition_id)

    @property
    def was_answered(self) -> bool:
        """Whether the service has accepted this host's credential, hub and group: it has attached a link."""
        return self._was_answered

    def is_open(self, now: float) -> bool:
        """Return whether attempts in progress decide if an earlier refusal ends the host."""
        return not self._was_answered and now <= self._until and bool(self._awaited)

    def verdict(self, now: float) -> Exception | None:
        """Return the error with which the host ends; None if it continues."""
        if self._was_answered or now > self._until or self._awaited is None or self._awaited:
            return None
        return self._refusal
