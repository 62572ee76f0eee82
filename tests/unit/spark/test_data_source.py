"""The format where it cannot work: a sentence instead of a missing module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("3.5.6", 'pyspark: format("eventpump") needs PySpark 4.0 or later, and this is 3.5.6: upgrade Spark'),
        (None, "pyspark: is not installed: pip install 'eventpump[spark]'"),
    ],
)
def test_register_without_a_suitable_spark_says_so(tmp_path: Path, version: str | None, says: str) -> None:
    """With Spark 3.5, or none, the import of what needs another one fails with what to do."""
    package = tmp_path / "pyspark"
    (package / "sql").mkdir(parents=True)
    text = "raise ModuleNotFoundError('no pyspark')" if version is None else f"__version__ = '{version}'"
    (package / "__init__.py").write_text(text, encoding="utf-8")
    (package / "sql" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = subprocess.run(
        [sys.executable, "-c", "from eventpump.spark import register"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode != 0
    assert f"ConfigurationError: {says}" in run.stderr
