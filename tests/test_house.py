"""The rules of the house, run with the tests: style, types, the direction of imports, and the public names."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import eventpump
from docs.api import HOMES, SUBJECTS
from eventpump.homes import LAZY
from tests.support.counts import Tree, counts
from tests.support.order import LONGEST

ROOT = Path(__file__).parents[1]

_MOST = {
    "attributes of the widest class": 25,
    "lines of code of the longest body": 66,
    "names of several classes": 2,
    "circles of files": 0,
    "arrows up": 0,
    "private attributes read in tests": 100,
}
"""Limits of what `tests.support.counts` counts, which are only ever lowered."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", f"--cache-dir={os.devnull}"],
        ["lint-imports", "--no-cache"],
    ],
    ids=lambda command: " ".join(command),
)
def test_checkers_find_nothing(command: list[str]) -> None:
    """Each checker finds nothing."""
    program = Path(sysconfig.get_path("scripts")) / command[0]
    result = subprocess.run([str(program), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_public_names_are_pinned() -> None:
    """A name of `eventpump` comes or goes on purpose only: `dir`, the site and the table of CONTRIBUTING.md agree."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("\n| subject | names of `eventpump` |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| (\w+) \| (.+) \|$", table, re.M))
    assert {subject: tuple(re.findall(r"`(\w+)`", names)) for subject, names in rows.items()} == dict(SUBJECTS)
    top = [name for names in SUBJECTS.values() for name in names]
    assert len(top) <= 60
    packages = re.findall(r"^\| `eventpump\.(\w+)` \|", text, re.M)
    assert sorted([*top, *packages, "__version__"]) == dir(eventpump)
    assert all(getattr(eventpump, name) is not None for name in dir(eventpump))


def test_public_names_have_one_home() -> None:
    """A name is in one public module, but for the errors that are in `eventpump` too."""
    homes_of: dict[str, list[str]] = {}
    for home in ("eventpump", *HOMES):
        for name in import_module(home).__all__:
            homes_of.setdefault(name, []).append(home)
    twice = {name: found for name, found in homes_of.items() if len(found) > 1}
    assert twice == {name: ["eventpump", "eventpump.errors"] for name in SUBJECTS["errors"]}


@pytest.mark.parametrize("module", ["eventpump", *HOMES[1:]])
def test_lazy_imports_are_those_of_the_checkers(module: str) -> None:
    """A public name is found at run time in the module from which type checkers import it."""
    tree = ast.parse(Path(str(import_module(module).__file__)).read_text(encoding="utf-8"))
    imported = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "eventpump"
        for alias in node.names
        if alias.asname == alias.name
    }
    assert imported == LAZY[module]


_LOADED = """
import sys
from eventpump import {name}
kept = ("aiohttp", "azure", "eventpump", "fastavro", "pydantic", "pyspark", "pytest", "rich", "sqlite3", "uamqp")
kept += ("eventpump.consumer", "eventpump.emulator", "eventpump.producer")
print(*(name for name in kept if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("__version__", "eventpump"),
        ("EventPumpError", "eventpump"),
        ("EventData", "eventpump"),
        ("EventProducer", "pydantic eventpump eventpump.producer"),
        ("EventProcessorHost", "pydantic eventpump eventpump.consumer"),
        ("Emulator", "pydantic eventpump eventpump.emulator sqlite3"),
        ("SqliteLeaseStore", "eventpump sqlite3"),
        ("MemoryLeaseStore", "eventpump"),
        ("BlobLeaseStore", "azure aiohttp eventpump"),
        ("BlobOwnershipStore", "azure aiohttp eventpump"),
    ],
)
def test_import_of_a_name_loads_what_it_needs(name: str, loaded: str) -> None:
    """Extras, the storage SDK, SQLite, the emulator and the models of options are loaded by what needs them only."""
    command = [sys.executable, "-c", _LOADED.format(name=name)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) == set(loaded.split())


def test_error_is_printed_under_its_public_name() -> None:
    """Also by a program that mentions nothing but a client."""
    program = (
        "from eventpump import EventProducer\n"
        "try:\n    EventProducer('x')\n"
        "except Exception as error:\n    print(type(error))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "<class 'eventpump.ConfigurationError'>\n"


def test_docstrings_are_in_google_style() -> None:
    """Fields as in `:param x:` would be shown as text by Sphinx with napoleon's sections beside them."""
    field = re.compile(r":(param|returns?|raises|yields?|ivar)\b[^:\n]*:\s")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("eventpump", "benchmarks", "tests", "examples", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if field.search(line)
    ]
    assert not found, f"use Args, Returns, Raises: {found}"


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, Counter[str]]]:
    """Count once for all limits."""
    return counts(Tree.working())


@pytest.mark.parametrize("name", _MOST)
def test_counts_keep_their_limits(name: str, counted: dict[str, tuple[int, Counter[str]]]) -> None:
    """No class gets wider, no function longer, no import goes up, and no test stands more on what is private."""
    count, parts = counted[name]
    assert count <= _MOST[name], parts.most_common(10)


def test_files_that_start_first_exist() -> None:
    """A file that was renamed or removed does not stay in the list of those that take longest."""
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
