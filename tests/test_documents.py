"""The documents: what they link to, and the tests and histories that they name, are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.draw import FOLDER, drawings
from tests.faults.histories.kinds import KINDS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *(ROOT / "docs").glob("*.md")])
PROMISES = "## 9. Promises"
MODULES = "| package | what it is for | modules |"


def _prose(path: Path) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def _anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", _prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_documents_lead_to_files_and_headings(path: Path) -> None:
    """Every relative link of a document names a file of the repository, and a heading where it names one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in _anchors(there), f"{path.name}: {target}"


def _promises() -> list[list[str]]:
    """Return the rows of the table of promises, by their cells."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    rows = [row for row in text[text.index(PROMISES) :].splitlines() if row.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" |")] for row in rows[1:]]


def test_promises_name_tests_that_exist() -> None:
    """Each row names a test; every test, patch and kind of history that it names is there."""
    rows = _promises()
    assert len(rows) > 20
    for row in rows:
        assert len(row) == 4, row
        promise, _, tests, histories = row
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, promise
        for file, test in named:
            path = ROOT / file if file.startswith("eventpump/") else ROOT / "tests" / file
            assert re.search(rf"def {test}\(", path.read_text(encoding="utf-8")), f"{promise}: {file}::{test}"
        for patch in re.findall(r"`(\w+)`", tests.partition("undone:")[2]):
            assert (ROOT / f"tests/faults/undone/{patch}.patch").exists(), f"{promise}: {patch}"
        for kind in re.findall(r"`([\w:-]+)`", histories):
            assert kind in KINDS, f"{promise}: {kind}"


def _described() -> dict[str, list[str]]:
    """Return the table of modules: those of each package, and modules of the top level without any."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    table: dict[str, list[str]] = {}
    for row in text[text.index(MODULES) :].splitlines()[2:]:
        if not row.startswith("| "):
            break
        package, _, modules = row.strip("|").split(" | ")
        table[package.strip(" `/")] = re.findall(r"`([a-z_]+)`", modules)
    return table


def test_map_of_modules_has_every_module() -> None:
    """Section 1 of design.md has a row for each package and each top-level module, and each row all its modules."""
    package = ROOT / "eventpump"
    found: dict[str, list[str]] = {path.stem: [] for path in package.glob("*.py") if not path.stem.startswith("__")}
    for init in package.glob("*/**/__init__.py"):
        modules = sorted(path.stem for path in init.parent.glob("*.py") if path != init)
        found[str(init.parent.relative_to(package))] = modules
    assert {name: sorted(modules) for name, modules in _described().items()} == found


@pytest.mark.parametrize("name", drawings())
def test_diagrams_are_what_the_script_draws(name: str) -> None:
    """The drawings in the repository are what `python docs/draw.py` draws from the layers contract."""
    assert (FOLDER / name).read_text(encoding="utf-8") == drawings()[name], "run python docs/draw.py"


def test_diagrams_are_all_shown() -> None:
    """design.md shows every drawing, and there are no others."""
    shown = re.findall(r"!\[[^\]]+\]\(diagrams/([\w-]+\.svg)\)", (ROOT / "docs/design.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(drawings()) == sorted(path.name for path in FOLDER.iterdir())


_CITED = re.compile(r"protocol\.md[\s#]+(\d+(?:\.\d+)?(?:(?: \(\w+\))?(?:, | and | to )\d+(?:\.\d+)?)*)")
"""A citation of the protocol: "protocol.md 8.2", "protocol.md 2 to 7, 13", "protocol.md 8.2 (attach) and 8.5"."""


def _citations() -> Iterator[tuple[Path, str]]:
    """Yield each section of docs/protocol.md that a file cites."""
    folders = ("eventpump", "pyspark_eventpump", "tests", "benchmarks", "examples")
    programs = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in [*programs, *DOCUMENTS]:
        for cited in _CITED.findall(path.read_text(encoding="utf-8")):
            for section in re.findall(r"\d+(?:\.\d+)?", cited):
                yield path, section


def test_cited_sections_of_the_protocol_exist() -> None:
    """What the code and the documents cite as "protocol.md N.M" is a heading of docs/protocol.md."""
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^###? (\d+(?:\.\d+)?)\.? ", text, re.M))
    cited = list(_citations())
    assert len(cited) > 50
    assert [(str(path.relative_to(ROOT)), section) for path, section in cited if section not in sections] == []
