"""Staging: a batch's encoded rows, written once and durably before any of them is sent, and published from there.

A query that gives other rows or values when a batch is repeated (random numbers, the current time, a lookup that
changed) can then not be told from one that does not: whatever it gave first is what is published. Which rows these
are is all that has to be kept, since their order follows from them.

Rows are Parquet files in a directory of their own, wherever executors can write; which directory is a batch's is said
by a record in the ledger, created once. Several runs may write; the first to create the record wins.
"""

from __future__ import annotations

import json
import logging
import uuid
from typing import TYPE_CHECKING, Any, Final

from pyarrow import fs

from eventpump.errors import StoreError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log: Final = logging.getLogger("eventpump.spark")


def new_directory(root: str, sink: str, batch_id: int) -> str:
    """Name a directory that no other attempt has. :param sink: the sink's name as a directory."""
    return f"{root.rstrip('/')}/{sink}/{batch_id:012d}-{uuid.uuid4().hex}"


def encode_directory(directory: str) -> bytes:
    """Encode the record that names a batch's directory."""
    return json.dumps({"version": 1, "directory": directory}).encode()


def decode_directory(raw: bytes) -> str:
    """Decode that record. :raises StoreError: it is something else."""
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("version") != 1 or not isinstance(found.get("directory"), str):
        raise StoreError("read what is staged", "its record is unreadable")
    return str(found["directory"])


def write(rows: DataFrame, directory: str) -> None:
    """Write rows. Complete once it returns."""
    rows.write.mode("errorifexists").parquet(directory)


def read(spark: SparkSession, directory: str, schema: Any) -> DataFrame:
    """Read rows back; in no particular order."""
    return spark.read.schema(schema).parquet(directory)


def discard(spark: SparkSession, directory: str) -> None:
    """Delete a directory that nobody needs any more. What cannot be deleted is logged, and left."""
    try:
        if hasattr(spark, "_jvm"):
            _delete_by_hadoop(spark, directory)
        else:
            # A Connect client has no way to Spark's file systems; this one knows local paths and the large clouds.
            system, path = fs.FileSystem.from_uri(directory)
            system.delete_dir(path)
    except Exception as error:
        _log.warning("staged rows are left in %s: %s", directory, type(error).__name__)


def _delete_by_hadoop(spark: Any, directory: str) -> None:
    path = spark._jvm.org.apache.hadoop.fs.Path(directory)  # noqa: SLF001 - PySpark's own way to the JVM
    path.getFileSystem(spark._jsc.hadoopConfiguration()).delete(path, True)  # noqa: SLF001 - likewise
