"""Runs the steps in order. What a failure makes impossible is not tried; the store and the service are apart."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from eventpump.clients.connection import make_transport
from eventpump.compiled import build_info
from eventpump.doctor import network, store
from eventpump.doctor.findings import Diagnosis, Finding, ProblemFoundError, StepOutcome, clean
from eventpump.doctor.service import ServiceSteps, credential_found
from eventpump.errors import ConfigurationError, ServiceError
from eventpump.interfaces import CLOSE_TIMEOUT, ConsumerScope, LeaseStore
from eventpump.options.connection import ConnectionSettings
from eventpump.storage.leases.blob import BlobLeaseStore
from eventpump.storage.leases.ownership import BlobOwnershipStore
from eventpump.storage.leases.sqlite import SqliteLeaseStore
from eventpump.transport.connection import client_route

_OF_NETWORK: Final = ("name", "TCP", "TLS", "token", "hub", "partitions", "consumer group", "events")
_OF_CONTAINER: Final = ("storage account", "clock", "rights", "leases")


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where hosts keep leases and checkpoints: a container with one of the two ways to its account, or a file.

    Args:
        account_url: Of the storage account, with a signature.
        form: "v5" for a `BlobOwnershipStore`, "eph" for a `BlobLeaseStore`. Default: "v5".
        prefix: What goes before the consumer group in names of a `BlobLeaseStore`.
        file: The file of a `SqliteLeaseStore`; None for a container.
    """

    container: str | None = None
    connection_string: str | None = None
    account_url: str | None = None
    form: str = "v5"
    prefix: str = ""
    preserve_case: bool = False
    namespace: str | None = None
    file: str | None = None


class Examination:
    """One run of all steps.

    It takes no lease, reads without an owner level, writes one blob of its own, which it deletes, and sends only if
    asked to.

    Args:
        settings: Returns the settings of the connection, or raises `ConfigurationError`.
        place: Where the store is; None if there is none to examine.
        timeout: Seconds that a step may wait for an answer.
        seconds: Seconds for which events are read.
        progress: Called with the name of each step as it begins.
    """

    def __init__(
        self,
        settings: Callable[[], ConnectionSettings],
        consumer_group: str,
        place: StorePlace | None,
        *,
        timeout: float = 10.0,
        seconds: float = 5.0,
        sends: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._group = consumer_group
        self._place = place
        self._timeout = timeout
        self._seconds = seconds
        self._sends = sends
        self._progress = progress
        self._findings: list[Finding] = []
        self._owners: dict[str, str] = {}

    async def run(self) -> Diagnosis:
        """Run the steps. If it is cancelled, nothing is left but maybe the blob, which the next run deletes."""
        self._add("machine", StepOutcome.OK, self._machine())
        settings = self._connection()
        await self._examine_store(settings)
        if settings is None:
            self._not_tried(_OF_NETWORK, "connection string")
        else:
            await self._examine_service(settings)
        return Diagnosis(tuple(self._findings))

    @staticmethod
    def _machine() -> str:
        version = f"eventpump {metadata.version('eventpump')}, {build_info()}"
        return f"{version}; Python {platform.python_version()}, {platform.system()} {platform.machine()}"

    def _connection(self) -> ConnectionSettings | None:
        step = "connection string"
        try:
            settings = self._settings()
            client_route(settings)  # the files of certificates
        except ConfigurationError as error:
            advice = "copy it from Shared access policies in the portal: Endpoint=sb://...;SharedAccessKeyName=...;..."
            self._add(step, StepOutcome.FAILED, clean(str(error)), advice)
            return None
        try:
            credential = credential_found(settings.credential, time.time())
        except ProblemFoundError as error:
            self._add(step, error.outcome, error.found, error.advice)
            return settings if error.outcome is StepOutcome.WARNING else None
        tls = "" if settings.use_tls else ", without TLS"
        namespace = f"{settings.fully_qualified_namespace}, hub {clean(settings.hub)}"
        self._add(step, StepOutcome.OK, f"{namespace}, {credential}{tls}")
        return settings

    # ---------------------------------------------------------------------------------------------- the store

    async def _examine_store(self, settings: ConnectionSettings | None) -> None:
        place = self._place
        if place is None:
            self._add(
                "store", StepOutcome.NOT_TRIED, "name it: --container or --leases; then its clock is compared too"
            )
        elif place.file is not None:
            await self._examine_file(place.file, settings)
        else:
            await self._examine_container(place, settings)

    async def _examine_file(self, path: str, settings: ConnectionSettings | None) -> None:
        try:
            absent = store.check_file(path)
        except ProblemFoundError as error:
            self._add("leases", StepOutcome.FAILED, error.found, error.advice)
            return
        if absent is not None:
            self._add("leases", StepOutcome.OK, absent)
        elif settings is not None:
            await self._find_leases(SqliteLeaseStore(path), settings)

    async def _examine_container(self, place: StorePlace, settings: ConnectionSettings | None) -> None:
        assert place.container is not None
        try:
            steps = store.ContainerSteps(
                place.container,
                connection_string=place.connection_string,
                account_url=place.account_url,
                timeout=self._timeout,
            )
        except ConfigurationError as error:
            advice = "copy it from Access keys of the storage account: DefaultEndpointsProtocol=https;AccountName=..."
            self._add("storage account", StepOutcome.FAILED, clean(str(error)), advice)
            self._not_tried(_OF_CONTAINER[1:], "storage account")
            return
        try:
            is_reached = await self._step("storage account", steps.reach)
            # Before the account's answer, which may refuse the credential because of it.
            account = self._findings.pop()
            await self._step("clock", steps.compare_clocks)
            self._findings.append(account)
            if not is_reached:
                self._not_tried(_OF_CONTAINER[2:], "storage account")
                return
            await self._step("rights", steps.try_rights)
        finally:
            await steps.aclose()
        if settings is not None:
            await self._find_leases(self._blob_store(place.container, place), settings)

    @staticmethod
    def _blob_store(container: str, place: StorePlace) -> LeaseStore:
        text, url = place.connection_string, place.account_url
        if place.form == "eph":
            return BlobLeaseStore(container, connection_string=text, account_url=url, prefix=place.prefix)
        return BlobOwnershipStore(
            container,
            connection_string=text,
            account_url=url,
            preserve_case=place.preserve_case,
            namespace=place.namespace,
        )

    async def _find_leases(self, leases: LeaseStore, settings: ConnectionSettings) -> None:
        scope = ConsumerScope(settings.fully_qualified_namespace, settings.hub, self._group)

        async def find() -> str:
            text, self._owners = store.leases_found(await store.find_leases(leases, scope))
            return text

        await self._step("leases", find)

    # -------------------------------------------------------------------------------------------- the service

    async def _examine_service(self, settings: ConnectionSettings) -> None:
        route = client_route(settings)
        steps: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("name", lambda: network.resolve_name(network.first_hop(route)[0], self._timeout)),
            ("TCP", lambda: network.reach(route, self._timeout)),
        ]
        if route.proxy is not None:
            steps.append(("proxy", lambda: network.open_tunnel(route, self._timeout)))
        if route.tls is not None:
            steps.append(("TLS", lambda: network.secure(route, self._timeout)))
        transport = make_transport(settings)
        service = ServiceSteps(transport, settings.hub, self._group, self._timeout)
        carrier = "WebSocket, token" if route.is_websocket else "token"
        steps += [
            (carrier, lambda: service.connect(settings.credential)),
            ("hub", service.find_hub),
            ("partitions", service.find_partitions),
        ]
        try:
            for at, (name, step) in enumerate(steps):
                if not await self._step(name, step):
                    self._not_tried([*(each for each, _ in steps[at + 1 :]), "consumer group", "events"], name)
                    break
            else:
                self._progress("events")
                self._findings += await service.read(self._seconds, self._owners)
                if self._sends:
                    await self._step("send", service.send)
        finally:
            with contextlib.suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await transport.aclose()

    # ------------------------------------------------------------------------------------------------ findings

    async def _step(self, name: str, step: Callable[[], Awaitable[str]]) -> bool:
        self._progress(name)
        try:
            self._add(name, StepOutcome.OK, await step())
        except ProblemFoundError as error:
            self._add(name, error.outcome, error.found, error.advice)
            return error.outcome is not StepOutcome.FAILED
        return True

    def _add(self, step: str, outcome: StepOutcome, found: str, advice: str = "") -> None:
        self._findings.append(Finding(step, outcome, found, advice))

    def _not_tried(self, steps: Iterable[str], after: str) -> None:
        for each in steps:
            self._add(each, StepOutcome.NOT_TRIED, f"needs: {after}")
