"""The lag that KEDA's azure-eventhub scaler computes with `checkpointStrategy: blobMetadata`, as of 2026-08."""

from __future__ import annotations

from collections.abc import Mapping

STALE_THRESHOLD = 10_000
"""The default of `stalePartitionInfoThreshold`."""

_MOST = 2**63 - 1


class PollFailedError(Exception):
    """The whole reading fails: KEDA has no number for any partition."""


def blob_name(namespace: str, hub: str, consumer_group: str, partition_id: str) -> str:
    """Name the blob that it reads: namespace and hub as they are written in the trigger, the group in lower case."""
    return f"{namespace}/{hub}/{consumer_group.lower()}/checkpoint/{partition_id}"


def partition_lag(first: int, last: int, metadata: Mapping[str, str] | None) -> int:
    """Return the lag of a partition.

    Args:
        first: The number of the oldest event, as the service reports it.
        last: That of the newest, -1 if there never was one.
        metadata: Of the checkpoint's blob; None if there is no such blob.

    Raises:
        PollFailedError: The blob has no number in `sequencenumber`.
    """
    if last == -1:
        return 0
    if metadata is None:
        return last - first + 1 if first != last or last == 0 else 0
    text = metadata.get("sequencenumber", metadata.get("Sequencenumber"))
    try:
        number = int(text or "")
    except ValueError:
        raise PollFailedError(text) from None
    if not -_MOST - 1 <= number <= _MOST:
        raise PollFailedError(text)
    lag = last - number if last >= number else _MOST - number + last
    # A checkpoint that is a little beyond the end is taken for one that was stored after the end was read.
    return 0 if lag > _MOST - STALE_THRESHOLD else lag
