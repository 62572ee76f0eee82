"""The steps of the store of leases and checkpoints: a blob container, or a SQLite file; and the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from eventpump.core.lease import LeaseSnapshot
from eventpump.doctor.findings import ProblemFoundError, StepOutcome, clean, span
from eventpump.errors import ConfigurationError, StoreError
from eventpump.interfaces import ConsumerScope, LeaseStore
from eventpump.storage.blob_access import BlobContainer, ForbiddenError
from eventpump.storage.blob_rights import BlobRights, MissingRightError
from eventpump.storage.leases.sqlite import NoGroupError

_SKEW: Final = 300.0
"""Seconds from which on services refuse tokens of this machine."""
_REMARKABLE: Final = 20.0
_CLOCK: Final = "set this machine's clock (NTP, `timedatectl set-ntp true`): tokens are signed with its time"
_ROLE: Final = (
    "give the identity the role Storage Blob Data Contributor at the container, or use the key of the account"
)

_OTHER_PLACE: Final = "use another container, prefix or file for this hub"
_ADVICE: Final = {
    "preserve_case": "all members of a group use one spelling: give --preserve-case here if the program's store has "
    "preserve_case=True, and only then",
    "consumer_group": "spell the consumer group (--consumer-group) as its other hosts do",
}
"""What to do where a store is refused, by the parameter that is named."""


class ContainerSteps:
    """The steps of a blob container.

    Args:
        timeout: Seconds that a request may take.

    Raises:
        ConfigurationError: The values cannot be those of a storage account.
    """

    def __init__(
        self, container: str, *, connection_string: str | None, account_url: str | None, timeout: float
    ) -> None:
        self._blobs = BlobContainer(
            container,
            connection_string,
            account_url,
            None,
            timeout,
            owner="the container of `eventpump doctor`",
            on_date=self._date,
        )
        self._skew: float | None = None
        self._rights = BlobRights(self._blobs)

    async def reach(self) -> str:
        """Ask the account for the container. Raises `ProblemFoundError` for no answer, no right, or no container."""
        began = time.monotonic()
        try:
            is_there = await self._rights.exists()
        except ForbiddenError as error:
            raise ProblemFoundError(
                f"the storage account refuses to list container {self._blobs.name}: {clean(error.reason)}",
                f"check the account's key or signature, and its firewall; {_ROLE}",
            ) from error
        except StoreError as error:
            raise ProblemFoundError(
                f"the storage account does not answer: {clean(error.reason)}",
                "check the account's name in the connection string, and that its firewall admits this machine",
            ) from error
        if not is_there:
            raise ProblemFoundError(
                f"there is no container {self._blobs.name}",
                "check the spelling, or create it: `az storage container create`, or create=True of the store",
            )
        return f"container {self._blobs.name} answers in {(time.monotonic() - began) * 1000:.0f} ms"

    def _date(self, date: float) -> None:
        self._skew = time.time() - date

    async def compare_clocks(self) -> str:
        """Compare the account's time, of its last answer, with this machine's. Raises `ProblemFoundError` if they
        differ too much."""
        skew = self._skew
        if skew is None:
            return "not known: the storage account gave no time"
        way = "ahead of" if skew > 0 else "behind"
        text = f"this machine's clock is {span(abs(skew))} {way} the storage account's"
        if abs(skew) >= _SKEW:
            raise ProblemFoundError(text, _CLOCK)
        if abs(skew) >= _REMARKABLE:
            raise ProblemFoundError(text, _CLOCK, outcome=StepOutcome.WARNING)
        return "as the storage account's, within 20 s"

    async def try_rights(self) -> str:
        """Write, lease and delete a blob of its own. Raises `ProblemFoundError` if that is not allowed, or fails."""
        try:
            await self._rights.try_all()
        except MissingRightError as error:
            raise ProblemFoundError(clean(str(error)), _ROLE) from error
        except StoreError as error:
            raise ProblemFoundError(
                clean(str(error)), "try again; look at the health of the storage account"
            ) from error
        return "blobs can be written, leased and deleted"

    async def aclose(self) -> None:
        """Close the client."""
        await self._blobs.aclose()


async def find_leases(store: LeaseStore, scope: ConsumerScope) -> Sequence[LeaseSnapshot]:
    """Return the leases of the consumer group. Nothing is written.

    Args:
        store: The store, which is opened and closed here.

    Raises:
        ProblemFoundError: The store belongs to another hub, or cannot be read.
    """
    is_refused = False
    try:
        await store.open(scope, read_only=True)
        return await store.list()
    except NoGroupError:
        return ()
    except ConfigurationError as error:
        is_refused = True
        raise ProblemFoundError(clean(error.problem), _ADVICE.get(error.field, _OTHER_PLACE)) from error
    except StoreError as error:
        raise ProblemFoundError(
            clean(str(error)), "the leases cannot be read: look at the file or blob named"
        ) from error
    finally:
        if not is_refused:  # then it is closed already
            await store.aclose()


def leases_found(leases: Sequence[LeaseSnapshot]) -> tuple[str, dict[str, str]]:
    """Describe leases; return what was found, and the owner of each partition that is held."""
    owners = {each.partition_id: each.owner for each in leases if each.is_held and each.owner}
    if not leases:
        return "the consumer group has none yet: its first host creates them", owners
    hosts = len(set(owners.values()))
    return f"{len(leases)} leases, {len(owners)} of them held by {hosts} host{'' if hosts == 1 else 's'}", owners


def check_file(path: str) -> str | None:
    """Check that a file of leases can be used: else a `ProblemFoundError`. Return what was found if there is none."""
    if os.path.exists(path):
        if not os.access(path, os.R_OK | os.W_OK):
            raise ProblemFoundError(f"{path} cannot be written by this user", "give this user the right to the file")
        return None
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise ProblemFoundError(f"the directory of {path} does not exist", "create it, or check the path")
    if not os.access(directory, os.W_OK):
        raise ProblemFoundError(f"{directory} cannot be written by this user", "give this user the right to it")
    return f"{path} does not exist yet: the first host creates it"
