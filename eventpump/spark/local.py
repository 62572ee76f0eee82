"""A small Spark on this machine: for the demo, the examples, and tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eventpump.errors import ConfigurationError
from eventpump.spark.java import use_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LONGEST_SOCKET_DIRECTORY = 60
"""Characters; a socket's name of 42 is appended, and macOS allows 103 in total."""

SHORT_LIVED = (
    "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
"""Options of a JVM that lives for a minute or two: it compiles quickly instead of optimizing, and does not verify the
bytecode of Spark's classes, of which it loads thousands."""

_LOGGING = """\
appenders=file
appender.file.type=File
appender.file.name=file
appender.file.fileName={log}
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=%d{{HH:mm:ss.SSS}} %p %c{{1}}: %m%n%ex
rootLogger.level=warn
rootLogger.appenderRef.file.ref=file
"""


def local_session(
    directory: Path,
    *,
    master: str = "local[2,4]",
    is_short: bool = True,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start Spark in a JVM that belongs to this process, on the loopback interface only.

    Java is found by `eventpump.spark.java`. Python workers run this interpreter. Spark's log goes to the file
    `spark.log` in `directory`. Stop the session with `stop()`; the JVM ends with this process.

    Args:
        directory: An existing directory for all files that Spark writes: logs, warehouse, temporary files.
        master: Where tasks run; `local[2,4]` runs two at a time, each tried up to four times.
        is_short: The session runs for a minute or two: its JVM has the options `SHORT_LIVED`, with which the start
            and the first batches take half of the CPU time.
        settings: Further settings, which override those set here.

    Raises:
        ConfigurationError: pyspark is not installed, or no suitable Java was found.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigurationError("pyspark", "not installed: pip install 'eventpump[spark,java]'")
    use_java()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # Otherwise the launcher looks up this machine's address, and warns if it is the loopback address.
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    logging = directory / "log4j2.properties"
    logging.write_text(_LOGGING.format(log=directory / "spark.log"), encoding="utf-8")
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    options = f"-Dlog4j2.configurationFile={logging.as_uri()} -Djava.io.tmpdir={temporary} "
    options += SHORT_LIVED if is_short else "-XX:+UseSerialGC"
    made = {
        "spark.master": master,
        "spark.app.name": "eventpump",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": options,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(temporary),
        "spark.python.unix.domain.socket.enabled": str(len(str(temporary)) <= _LONGEST_SOCKET_DIRECTORY).lower(),
        "spark.python.unix.domain.socket.dir": str(temporary),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.checkpointLocation": str(directory / "checkpoints"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **(settings or {}),
    }
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for name, value in made.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
