"""Staging: a batch's encoded rows, written once and durably before any of them is sent, and published from there.

So a query may return other rows or values when a batch is repeated (random numbers, the current time, a changed
lookup): the rows that it returned first are published. Only the set of rows has to be kept, because their order depends
only on them.

Rows are Parquet files in a separate directory that executors can write to; a record in the ledger, created once, names
a batch's directory. Several runs may write; the first to create the record wins.
"""

from __future__ import annotations

import json
import logging
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from pyarrow import fs
from pyspark.sql.types import StructType

from eventpump.errors import StoreError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOCAL: Final = "file://"
"""The prefix by which Spark recognizes an absolute path of the local file system."""

_VERSION: Final = 1
_log = logging.getLogger("eventpump.spark")


@dataclass(frozen=True, slots=True)
class Staged:
    """The location of a batch's rows.

    Args:
        directory: As Spark names it.
        schema: The rows' schema, as Spark's JSON.
    """

    directory: str
    schema: str

    def encode(self) -> bytes:
        """Encode it as a record of the ledger."""
        return json.dumps({"version": _VERSION, "directory": self.directory, "schema": self.schema}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Decode the record.

        Raises:
            StoreError: The bytes are not such a record.
        """
        try:
            found = json.loads(raw)
            if found["version"] == _VERSION:
                return cls(str(found["directory"]), str(found["schema"]))
        except (ValueError, TypeError, KeyError):
            pass
        raise StoreError("read staged rows", "their record is unreadable")


def record_name(batch_id: int) -> str:
    """Return the name of a batch's record."""
    return f"{batch_id:012d}.staged.json"


def batch_directory(root: str, sink: str, batch_id: int) -> str:
    """Return the directory of a batch's staged rows.

    Args:
        sink: The sink's id, converted to a directory name.
    """
    return f"{root.rstrip('/')}/{sink}/{batch_id:012d}"


def write(rows: DataFrame, directory: str) -> Staged:
    """Write rows into a new directory below a batch's. They are complete when it returns."""
    own = f"{directory}/{uuid.uuid4().hex}"
    rows.write.mode("error").parquet(own)
    return Staged(own, rows.schema.json())


def read(spark: SparkSession, staged: Staged) -> DataFrame:
    """Read staged rows, in no particular order."""
    return spark.read.schema(StructType.fromJson(json.loads(staged.schema))).parquet(staged.directory)


def discard(spark: SparkSession, directory: str) -> None:
    """Delete a batch's directory, which is no longer needed. If it cannot be deleted, that is logged."""
    try:
        if hasattr(spark, "_jvm"):
            _delete_by_hadoop(spark, directory)
        else:
            # A Connect client has no access to Spark's file systems; this one supports local paths and the large
            # clouds.
            system, path = fs.FileSystem.from_uri(directory.removeprefix(LOCAL))
            with suppress(FileNotFoundError):  # of a batch that is repeated
                system.delete_dir(path)
    except Exception as error:
        _log.warning("staged rows are left in %s: %s", directory, type(error).__name__)


def _delete_by_hadoop(spark: Any, directory: str) -> None:
    path = spark._jvm.org.apache.hadoop.fs.Path(directory)  # noqa: SLF001 - PySpark has no public access to the JVM
    path.getFileSystem(spark._jsc.hadoopConfiguration()).delete(path, True)  # noqa: SLF001 - likewise
