"""One Spark for all its tests, with a Connect server inside, and one service.

Spark allows one context per process: a test that needs another (other executors, a driver to kill) runs a program of
its own, with `eventpump.spark.local.local_session`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.connect.session import SparkSession as ConnectSession

from eventpump.spark.local import local_session

pytest.register_assert_rewrite("tests.spark.service")

from tests.spark.service import SparkService  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Spark with two slots, tasks tried up to four times, and a Connect server."""
    # Python workers import what test modules define.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    session = local_session(
        tmp_path_factory.mktemp("spark"),
        settings={
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
        },
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def connect_url(spark: SparkSession) -> str:
    """The address of the Connect server, which runs in the JVM of `spark`: for a client in a process of its own."""
    jvm = spark._jvm
    assert jvm is not None
    package = jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    return f"sc://127.0.0.1:{service.localPort()}"


@pytest.fixture
def connect(connect_url: str) -> Iterator[ConnectSession]:
    """A Connect client in this process: use its own methods and `pyspark.sql.connect.functions` only."""
    session = ConnectSession.builder.remote(connect_url).create()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def service() -> Iterator[SparkService]:
    """The service, on a thread of this process."""
    with SparkService() as started:
        yield started


@pytest.fixture(autouse=True)
def no_faults_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the faults of each test."""
    yield
    if "service" in request.fixturenames:
        request.getfixturevalue("service").clear_faults()


@pytest.fixture(autouse=True)
def no_query_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the queries that a failed test leaves behind."""
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            query.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A directory for one query's checkpoints."""
    return str(tmp_path / "checkpoint")
