"""The examples that run as services, as processes: their answers, their ends, and what a kill leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import runpy
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import kubernetes_validate  # type: ignore[import-untyped]  # it comes without types
import pytest
import yaml  # type: ignore[import-untyped]  # likewise
from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator, EventData, EventProducer, PartitionReader, ReceivedEvent
from eventpump.emulator.faults import Hold, LinkRole, Reject
from eventpump.options import environment
from eventpump.options.consumer import HostSettings
from eventpump.testing.fixtures import eventpump_emulator
from tests.support.azurite import Azurite
from tests.support.forks import start_python

__all__ = ["eventpump_emulator"]

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "examples/kubernetes"
HUB = "telemetry"
VARIABLES = {
    f"{environment.PREFIX}_{name}"
    for name in (
        *(environment.CONNECTION_STRING, environment.NAMESPACE, environment.HUB, environment.CONSUMER_GROUP),
        *(environment.STORAGE_CONNECTION_STRING, environment.STORAGE_URL, environment.CONTAINER),
        environment.HOST_NAME,
    )
}
_LIMIT = 200.0
APIS = ["ingest_aiohttp.py", "ingest_fastapi.py"]


class Running:
    """A program that runs, and what it has printed, on either stream."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def until(self, pattern: str) -> re.Match[str]:
        """Read lines up to one that has a pattern."""
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(self.lines))

    async def end(self, number: signal.Signals | None = None) -> str:
        """Wait for the end, after a signal if one is given, and return all that was printed."""
        if number is not None:
            self.process.send_signal(number)
        out, _ = await self.process.communicate()
        self.lines.append(out.decode())
        return "".join(self.lines)


@asynccontextmanager
async def running(program: str, *arguments: str, **variables: str) -> AsyncIterator[Running]:
    """Run an example, without the connection string of the tests' environment, and kill it at the end."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    process = await start_python(
        *(str(ROOT / "examples" / program), *arguments),
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_LIMIT):
            yield Running(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until_well(client: aiohttp.ClientSession, paths: Iterable[str]) -> None:
    """Ask as a supervisor does, until each answer is 200: partitions are delivered before all leases are taken."""
    for path in paths:
        status = 0
        while status != 200:
            async with client.get(path) as response:
                status = response.status
                assert status in (200, 503), path


async def stored(emulator: Emulator, hub: str = HUB) -> dict[str, list[ReceivedEvent]]:
    """Return the events of a hub by partition."""
    found = {}
    for number in range(emulator.hubs[hub]):
        async with PartitionReader(emulator.connection_string, hub, partition_id=str(number), end="@latest") as reader:
            found[str(number)] = [event async for event in reader]
    return found


def reading(number: int) -> dict[str, Any]:
    return {"sensor": f"sensor-{number % 7}", "celsius": number + 0.5}


@asynccontextmanager
async def api(program: str, *arguments: str) -> AsyncIterator[tuple[Running, aiohttp.ClientSession]]:
    """Run an ingestion API, and return a client of it."""
    async with running(program, "--port", "0", *arguments) as run:
        found = await run.until(r"[Rr]unning on http://127\.0\.0\.1:(\d+)")
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{found[1]}", connector=connector) as client:
            yield run, client


async def post(client: aiohttp.ClientSession, body: object) -> aiohttp.ClientResponse:
    async with client.post("/readings", json=body) as response:
        await response.read()
        return response


@pytest.mark.parametrize("program", APIS)
async def test_ingestion_brings_its_own_service_and_refuses_what_is_no_reading(program: str) -> None:
    """It answers, says what is wrong with other bodies, and ends on SIGTERM."""
    async with api(program) as (run, client):
        assert (await post(client, reading(1))).status == 201
        wrong: list[object] = [{}, [], "text", {"sensor": "a"}, {"sensor": "a", "celsius": "warm"}]
        for body in [*wrong, {"sensor": "k" * 200_000}]:
            assert (await post(client, body)).status in (400, 422), body
        for celsius in ("NaN", "Infinity", "1e999"):
            text = f'{{"sensor": "a", "celsius": {celsius}}}'
            async with client.post("/readings", data=text, headers={"Content-Type": "application/json"}) as response:
                assert response.status in (400, 422), celsius
        assert (await post(client, {"sensor": "k" * 200, "celsius": 1.0})).status == 400  # too long for a key
        async with client.get("/health") as response:
            assert await response.json() == {"buffered_events": 0, "buffered_bytes": 0}
        assert "everything that was accepted is sent" in await run.end(signal.SIGTERM)


@pytest.mark.parametrize("program", APIS)
async def test_ingestion_answers_503_while_its_buffer_is_full(program: str, eventpump_emulator: Emulator) -> None:
    """What it accepted is answered when the service has stored or refused it, and what is beyond the buffer at once."""
    connection = ["--connection-string", eventpump_emulator.connection_string, "--max-bytes", "4000"]
    async with api(program, *connection) as (run, client):
        fault = eventpump_emulator.faults.add(Hold(), role=LinkRole.PRODUCER, count=None)
        pending = {asyncio.create_task(post(client, reading(number))) for number in range(200)}
        done: set[asyncio.Task[aiohttp.ClientResponse]] = set()
        while not done:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert {each.result().status for each in done} == {503}
        assert {each.result().headers["Retry-After"] for each in done} == {"1"}
        fault.remove()
        statuses = [response.status for response in await asyncio.gather(*pending)]
        assert set(statuses) == {201, 503}
        assert (await post(client, reading(201))).status == 201
        refusal = Reject("amqp:resource-limit-exceeded", "the quota is used up")
        fault = eventpump_emulator.faults.add(refusal, role=LinkRole.PRODUCER, count=None)
        assert (await post(client, reading(202))).status in (400, 503)
        fault.remove()
        assert (await post(client, reading(203))).status == 201
        await run.end(signal.SIGTERM)
    kept = [event for events in (await stored(eventpump_emulator)).values() for event in events]
    assert len(kept) == statuses.count(201) + 2


@pytest.mark.parametrize("program", APIS)
async def test_ingestion_that_is_stopped_under_load_has_stored_what_it_confirmed(
    program: str, eventpump_emulator: Emulator
) -> None:
    """SIGTERM comes while requests wait for the service: they get their answers, and each 201 is true."""
    async with api(program, "--connection-string", eventpump_emulator.connection_string) as (run, client):
        assert (await post(client, reading(0))).status == 201
        fault = eventpump_emulator.faults.add(Hold(), role=LinkRole.PRODUCER, count=None)
        pending = [asyncio.create_task(post(client, reading(number))) for number in range(1, 60)]
        await fault.until_fired()
        health = 0
        while health < len(pending):
            async with client.get("/health") as response:
                health = (await response.json())["buffered_events"]
        run.process.send_signal(signal.SIGTERM)
        url = client._base_url
        assert url is not None
        with suppress(ConnectionError):
            while True:  # until no connection is accepted; a request on one of the last would wait for the shutdown
                _, writer = await asyncio.open_connection(url.host, url.port)
                writer.transport.abort()
        assert not any(each.done() for each in pending)
        fault.remove()
        assert {response.status for response in await asyncio.gather(*pending)} == {201}
        assert "everything that was accepted is sent" in await run.end()
        assert run.process.returncode in (0, -signal.SIGTERM)
    by_sensor = defaultdict(list)
    for events in (await stored(eventpump_emulator)).values():
        for event in events:
            by_sensor[event.partition_key].append(event.body_as_json()["celsius"])
    assert sorted(value for values in by_sensor.values() for value in values) == [number + 0.5 for number in range(60)]


async def test_consumer_service_brings_its_own_service() -> None:
    """It accounts for each event, counts what is no reading, and ends."""
    async with running("consumer_service.py", "--port", "0", "--count", "2000") as run:
        assert "1999 readings, 1 rejected" in await run.end()
        assert run.process.returncode == 0


async def test_consumer_service_counts_each_reading_once_over_kills(
    request: pytest.FixtureRequest, eventpump_emulator: Emulator, tmp_path: Path
) -> None:
    """Killed and started again while readings come, with two processes at times: the totals are those of what came."""
    rng = random.Random(21)
    connection = ["--connection-string", eventpump_emulator.connection_string, "--folder", str(tmp_path)]
    arguments = ["consumer_service.py", *connection, "--port", "0", "--lease-duration", "2"]
    values: list[float] = []
    async with EventProducer(eventpump_emulator.connection_string, HUB) as producer:

        async def publish(count: int) -> None:
            for start in range(0, count, 50):
                new = [round(rng.uniform(10, 30), 2) for _ in range(50)]
                values.extend(new)
                readings = [EventData.json({"sensor": "a", "celsius": value}) for value in new]
                await producer.send([*readings, EventData("{")], partition_id=str(start // 50 % 4))

        for _ in range(3 if request.config.getoption("--long") else 1):
            async with running(*arguments) as first, running(*arguments) as second:
                await asyncio.gather(first.until("reads from"), second.until("listening on port"))
                await publish(400)
                await first.until("is not a reading")
                rng.choice([first, second]).process.kill()
        await publish(100)
    rejected = len(values) // 50
    async with running(*arguments, "--count", str(len(values) + rejected)) as run:
        port = int((await run.until(r"listening on port (\d+)"))[1])
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            async with client.get("/live") as response:
                assert response.status == 200
            rows: list[dict[str, Any]] = []
            with suppress(aiohttp.ClientConnectionError):  # it ends when all are accounted for
                async with client.get("/minutes", params={"sensor": "a"}) as response:
                    rows = await response.json()
            assert all(row["readings"] > 0 and row["lowest"] >= 10 and row["highest"] <= 30 for row in rows)
        assert f"{len(values)} readings, {rejected} rejected" in await run.end()
    rows = _minutes(tmp_path / "totals.db")
    assert sum(row["readings"] for row in rows) == len(values)
    assert sum(row["total"] for row in rows) == pytest.approx(sum(values))
    assert (min(row["lowest"] for row in rows), max(row["highest"] for row in rows)) == (min(values), max(values))


def _minutes(path: Path) -> list[dict[str, Any]]:
    """Return what the service answers for the sensor, by its own code."""
    example = runpy.run_path(str(ROOT / "examples/consumer_service.py"))
    return cast(list[dict[str, Any]], example["Totals"](path, None).minutes("a"))


async def test_program_with_metrics_serves_what_is_counted(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """A scrape has no series but those of the page's first tables, and all of them but counters of what has not
    happened and what is gone when the program ends; alone it ends by itself."""
    first, *_ = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8").split("\n## ")
    names = set(re.findall(r"^\| `(\w+)`", first, re.M))
    rare = {"handler_failures_total", "link_reopens_total", "store_failures_total", "loop_blocked_seconds"}
    rare |= {"handler_running_seconds"}
    async with running("metrics.py", "--port", "0") as run:
        output = await run.end()
        assert run.process.returncode == 0
        found = set(re.findall(r"^# TYPE (\w+) (?:counter|gauge|histogram)$", output, re.M))
        assert found <= names
        assert names - found <= {f"eventpump_{name}" for name in rare}
        sent = re.findall(r"^messaging_client_sent_messages_total\{[^}]*\} (\d+)$", output, re.M)
        assert [int(each) for each in sent] == [500, 0]
    connection = ["--connection-string", eventpump_emulator.connection_string]
    async with EventProducer(eventpump_emulator.connection_string, HUB) as producer:
        await producer.send([EventData("one"), EventData("two")], partition_key="2")
    async with running("metrics.py", *connection, "--port", "0", "--leases", str(tmp_path / "leases.db")) as run:
        port = (await run.until(r"listening on port (\d+)"))[1]
        partition_id = (await run.until(r"partition (\d): "))[1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            async with client.get("/metrics") as response:
                text = re.sub(
                    r'messaging_(?!destination_partition)\w+="[^"]*",|server_address="[^"]*",',
                    "",
                    await response.text(),
                )
            series = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            await until_well(client, ["/livez", "/readyz"])
            async with client.get("/lag.json") as response:
                assert (await response.json())["lag"] == 0
        label = f'messaging_destination_partition_id="{partition_id}"'
        assert series[f'eventpump_partition_lag{{{label},position="delivered"}}'] == "0"
        assert series[f'eventpump_partition_owned{{{label},state="running"}}'] == "1"
        assert series['eventpump_reports_total{report="PartitionsFound"}'] == "1"
        await run.end(signal.SIGTERM)
        assert run.process.returncode == 0


async def test_forwarding_brings_its_own_service() -> None:
    """It forwards everything, and ends."""
    async with running("forward.py", "--count", "500") as run:
        assert "forwarded 500 events" in await run.end()
        assert run.process.returncode == 0


async def test_forwarding_keeps_order_and_numbers_over_kills(tmp_path: Path) -> None:
    """Killed again and again, it loses nothing; by the numbers each event is found once, in order, with its origin."""
    rng, count = random.Random(22), 3000
    async with Emulator({"source": 3, "target": 2}) as emulator:
        async with EventProducer(emulator.connection_string, "source") as producer:
            for start in range(0, count, 10):
                batch = [EventData(f"reading {start + number}", properties={"n": start}) for number in range(10)]
                target: dict[str, str] = {"partition_id": str(rng.randrange(3))}
                if rng.random() < 0.3:
                    target = {"partition_key": f"key-{rng.randrange(9)}"}
                await producer.send(batch, **target)  # type: ignore[arg-type]  # one of the two is given
        connection = ["--connection-string", emulator.connection_string, "--source", "source", "--target", "target"]
        arguments = ["forward.py", *connection, "--leases", str(tmp_path / "leases.db"), "--lease-duration", "2"]
        fault = emulator.faults.add(Hold(), role=LinkRole.PRODUCER, hub="target", count=None)
        async with running(*arguments) as run:
            await fault.until_fired()
            with pytest.raises(TimeoutError):  # nothing counts as processed before the target has stored it
                await asyncio.wait_for(run.until("forwarded up to"), timeout=1)
        fault.remove()
        for _ in range(2):
            async with running(*arguments) as run:
                for _ in range(rng.randrange(1, 4)):
                    await run.until("forwarded up to")
        originals = await stored(emulator, "source")
        lasts = {partition_id: events[-1].sequence_number for partition_id, events in originals.items() if events}
        async with running(*arguments) as run:
            while lasts:
                found = await run.until(r"partition (\d): forwarded up to (\d+)")
                if lasts.get(found[1]) == int(found[2]):
                    del lasts[found[1]]
            await run.end(signal.SIGTERM)
            assert run.process.returncode == 0
        copies: dict[str, dict[int, ReceivedEvent]] = defaultdict(dict)
        for partition_id, events in (await stored(emulator, "target")).items():
            for event in events:
                origin = event.properties["forwarded.partition_id"]
                number = event.properties["forwarded.sequence_number"]
                assert partition_id == str(int(origin) % 2)
                if number > max(copies[origin], default=-1):
                    copies[origin][number] = event
        for partition_id, events in originals.items():
            assert list(copies[partition_id]) == [event.sequence_number for event in events]
            for event, copy in zip(events, copies[partition_id].values(), strict=True):
                assert (copy.body, copy.properties["n"]) == (event.body, event.properties["n"])
                assert copy.properties["forwarded.offset"] == event.offset
                assert copy.properties["forwarded.enqueued_time"] == event.enqueued_time.isoformat()
                assert copy.properties.get("forwarded.partition_key") == event.partition_key


async def test_program_with_an_identity_brings_its_own_service_and_credential() -> None:
    """It processes events with tokens in place of keys, and ends."""
    async with running("with_identity.py", PORT="0") as run:
        assert "processed 100 events" in await run.end()
        assert run.process.returncode == 0


@pytest.fixture(scope="module")
def azurite() -> Any:
    """Azurite, for the leases of the program in the cluster."""
    with Azurite() as running:
        yield running


async def test_program_of_the_manifests_answers_its_probes_and_ends_in_order(
    azurite: Azurite, eventpump_emulator: Emulator
) -> None:
    """With the variables of the manifests, and keys in place of the identity; KEDA finds the checkpoints."""
    variables = _of_kind("ConfigMap")["data"] | {"EVENTPUMP_CONTAINER": "cluster"}
    del variables["EVENTPUMP_NAMESPACE"], variables["EVENTPUMP_STORAGE_URL"]
    secrets = {
        "EVENTPUMP_CONNECTION_STRING": eventpump_emulator.connection_string,
        "EVENTPUMP_STORAGE_CONNECTION_STRING": azurite.connection_string,
    }
    async with ContainerClient.from_connection_string(azurite.connection_string, "cluster") as container:
        await container.create_container()
    async with EventProducer(eventpump_emulator.connection_string, HUB) as producer:
        await producer.send([EventData("one"), EventData("two")], partition_id="2")
    async with running("with_identity.py", PORT="0", **variables, **secrets) as run:
        port = (await run.until(r"listening on port (\d+)"))[1]
        await run.until("^2 1 two")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            await until_well(client, _probes().values())
        output = await run.end(signal.SIGTERM)
        assert "processed 2 events" in output
        assert run.process.returncode == 0
    metadata = _of_kind("ScaledObject")["spec"]["triggers"][0]["metadata"]
    async with ContainerClient.from_connection_string(azurite.connection_string, "cluster") as container:
        blob = await container.download_blob(f"{metadata['consumerGroup']}/2")
        assert json.loads(await blob.readall())["SequenceNumber"] == 1


def _manifests() -> list[dict[str, Any]]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(MANIFESTS.glob("*.yaml"))]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def _of_kind(kind: str) -> dict[str, Any]:
    (found,) = (each for each in _manifests() if each["kind"] == kind)
    return found


def _container() -> dict[str, Any]:
    (container,) = _of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    return cast(dict[str, Any], container)


def _probes() -> dict[str, str]:
    names = ("startupProbe", "readinessProbe", "livenessProbe")
    return {name: _container()[name]["httpGet"]["path"] for name in names}


@pytest.mark.parametrize("manifest", [each for each in _manifests() if "keda" not in each["apiVersion"]], ids=str)
def test_manifests_are_valid(manifest: dict[str, Any]) -> None:
    """By the strict schemas of Kubernetes, where a misspelled field is an error."""
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_manifests_agree_with_the_program_and_with_each_other() -> None:
    """Names that refer to each other exist, the program reads what is set, and the pod has time to end."""
    container, pod = _container(), _of_kind("Deployment")["spec"]["template"]["spec"]
    program = (ROOT / "examples" / container["command"][1]).read_text(encoding="utf-8")
    read = set(re.findall(r'os\.environ(?:\.get)?[\[(]"(\w+)"', program))
    given = {*_of_kind("ConfigMap")["data"], *(each["name"] for each in container["env"])}
    assert "EventProcessorHost.from_env(" in program
    assert given - {"PYTHONUNBUFFERED"} == read | (VARIABLES - {"EVENTPUMP_HOST_NAME"})
    assert container["envFrom"] == [{"configMapRef": {"name": _of_kind("ConfigMap")["metadata"]["name"]}}]
    assert pod["serviceAccountName"] == _of_kind("ServiceAccount")["metadata"]["name"]
    close_timeout = HostSettings.model_fields["close_timeout"].default
    assert pod["terminationGracePeriodSeconds"] > close_timeout + 10  # the probes' server and Python end too
    assert all(path in program for path in _probes().values())
    ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
    assert {"name": "PORT", "value": ports["probes"]} in container["env"]


KEDA_PARAMETERS = {
    *("connectionFromEnv", "connection", "storageConnectionFromEnv", "storageConnection", "consumerGroup"),
    *("unprocessedEventThreshold", "activationUnprocessedEventThreshold", "stalePartitionInfoThreshold"),
    *("blobContainer", "checkpointStrategy", "eventHubNamespace", "eventHubName", "storageAccountName"),
    *("cloud", "endpointSuffix", "storageEndpointSuffix"),
}
"""What KEDA's azure-eventhub scaler reads (`pkg/scalers/azure_eventhub_scaler.go`, 2026-08)."""


def test_scaled_object_has_the_fields_that_keda_reads() -> None:
    """Its fields are KEDA's, all values are text, and it names what the other manifests do."""
    scaled, authentication = _of_kind("ScaledObject"), _of_kind("TriggerAuthentication")
    assert {scaled["apiVersion"], authentication["apiVersion"]} == {"keda.sh/v1alpha1"}
    spec = scaled["spec"]
    assert spec.keys() <= {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "cooldownPeriod", "triggers"}
    assert spec["scaleTargetRef"] == {"name": _of_kind("Deployment")["metadata"]["name"]}
    assert "replicas" not in _of_kind("Deployment")["spec"]
    (trigger,) = spec["triggers"]
    assert trigger.keys() == {"type", "authenticationRef", "metadata"}
    assert trigger["type"] == "azure-eventhub"
    assert trigger["authenticationRef"] == {"name": authentication["metadata"]["name"]}
    assert authentication["spec"] == {"podIdentity": {"provider": "azure-workload"}}
    metadata, variables = trigger["metadata"], _of_kind("ConfigMap")["data"]
    assert metadata.keys() <= KEDA_PARAMETERS
    assert "checkpointStrategy" not in metadata
    assert all(isinstance(value, str) for value in metadata.values())
    assert int(metadata["unprocessedEventThreshold"]) > 0
    assert metadata["eventHubNamespace"] == variables["EVENTPUMP_NAMESPACE"].partition(".")[0]
    assert metadata["eventHubName"] == variables["EVENTPUMP_HUB"]
    assert metadata["consumerGroup"] == variables["EVENTPUMP_CONSUMER_GROUP"]
    assert variables["EVENTPUMP_STORAGE_URL"] == f"https://{metadata['storageAccountName']}.blob.core.windows.net"
    assert metadata["blobContainer"] == variables["EVENTPUMP_CONTAINER"]


def test_page_on_kubernetes_shows_the_manifests() -> None:
    """Its blocks of YAML are whole manifests, or parts of them."""
    manifests = "\n".join(path.read_text(encoding="utf-8") for path in MANIFESTS.glob("*.yaml"))
    page = (ROOT / "docs/howto/kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    assert blocks
    known = {line.strip() for line in manifests.splitlines()}
    for block in blocks:
        if "metrics-api" not in block:
            assert [line for line in block.splitlines() if line.strip() and line.strip() not in known] == []
