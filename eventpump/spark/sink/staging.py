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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from pyarrow import fs
from pyspark.sql.types import StructType

from eventpump.errors import StoreError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOCAL: Final = "file://"
"""What Spark knows an absolute path of the machine's own file system by."""

_VERSION: Final = 1
_log = logging.getLogger("eventpump.spark")


@dataclass(frozen=True, slots=True)
class Staged:
    """Where a batch's rows are.

    Args:
        directory: As Spark names it.
        schema: Of the rows, as Spark's JSON.
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
            StoreError: It is something else.
        """
        try:
            found = json.loads(raw)
            if found["version"] == _VERSION:
                return cls(str(found["directory"]), str(found["schema"]))
        except (ValueError, TypeError, KeyError):
            pass
        raise StoreError("read what is staged", "its record is unreadable")


def record_name(batch_id: int) -> str:
    """Spell the name of a batch's record."""
    return f"{batch_id:012d}.staged.json"


def batch_directory(root: str, sink: str, batch_id: int) -> str:
    """Name the directory of all that is staged of a batch.

    Args:
        sink: The sink's id, spelled as a directory.
    """
    return f"{root.rstrip('/')}/{sink}/{batch_id:012d}"


def write(rows: DataFrame, directory: str) -> Staged:
    """Write rows into a directory of their own below a batch's. They are complete once it returns."""
    own = f"{directory}/{uuid.uuid4().hex}"
    rows.write.mode("errorifexists").parquet(own)
    return Staged(own, rows.schema.json())


def read(spark: SparkSession, staged: Staged) -> DataFrame:
    """Read rows back; in no particular order."""
    return spark.read.schema(StructType.fromJson(json.loads(staged.schema))).parquet(staged.directory)


def discard(spark: SparkSession, directory: str) -> None:
    """Delete a batch's directory, which nobody needs any more. What cannot be deleted is logged, and left."""
    try:
        if hasattr(spark, "_jvm"):
            _delete_by_hadoop(spark, directory)
        else:
            # A Connect client has no way to Spark's file systems; this one knows local paths and the large clouds.
            system, path = fs.FileSystem.from_uri(directory.removeprefix(LOCAL))
            system.delete_dir(path)
    except Exception as error:
        _log.warning("staged rows are left in %s: %s", directory, type(error).__name__)


def _delete_by_hadoop(spark: Any, directory: str) -> None:
    path = spark._jvm.org.apache.hadoop.fs.Path(directory)  # noqa: SLF001 - PySpark's own way to the JVM
    path.getFileSystem(spark._jsc.hadoopConfiguration()).delete(path, True)  # noqa: SLF001 - likewise
