"""The documents: what they link to, and the tests and histories that they name, are there."""

from __future__ import annotations

import ast
import builtins
import doctest
import inspect
import re
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it comes without types

import eventpump
from docs.api import SPARK_OPTIONS, command_parsers, of_module, public_names, spark_option_rows
from docs.demo import PICTURE, RECORDING, Recording, draw
from docs.draw import FOLDER, drawings
from eventpump import (
    BufferedProducer,
    EventBatch,
    EventProcessorHost,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
)
from tests.faults.histories.kinds import KINDS
from tests.support.pages import is_program, python_blocks

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", ROOT / "examples/README.md", *(ROOT / "docs").glob("*.md")]
)
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


def test_links_of_readme_lead_to_files_wherever_it_is_shown() -> None:
    """README is shown outside of the repository too: its links are absolute, below the address that pyproject.toml
    has, and each names a file or a folder of the repository, and a heading where it names one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = project["urls"]["Source"]
    raw = source.replace("://github.com/", "://raw.githubusercontent.com/")
    assert all(url == source or url.startswith(f"{source}/") for url in project["urls"].values())
    text = _prose(ROOT / project["readme"])
    assert not re.search(r"\]\([^)\s]+\)", text), "addresses are collected at the end: [text][label]"
    links = [(bang, label or shown) for bang, shown, label in re.findall(r"(!?)\[([^\]]+)\]\[([^\]]*)\]", text)]
    addresses = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.M))
    assert len(links) > 15
    assert {label for _, label in links} == set(addresses)
    for is_picture, label in links:
        target = addresses[label]
        file, _, anchor = target.partition("#")
        is_folder = (ROOT / file.removeprefix(f"{source}/tree/main/")).is_dir()
        base = f"{raw}/main/" if is_picture else f"{source}/{'tree' if is_folder else 'blob'}/main/"
        assert file.startswith(base), target
        there = ROOT / file.removeprefix(base)
        assert there.is_dir() if is_folder else there.is_file(), target
        assert not anchor or anchor in _anchors(there), target


def test_list_of_examples_has_every_example() -> None:
    """examples/README.md links each program, and those that it says bring a service of their own start one."""
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((\w+\.py)\)", text)
    assert sorted(linked) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    without_service = {"balancing.py", "sources.py"}  # they need none
    for row in text.splitlines():
        for name in re.findall(r"\]\((\w+\.py)\)", row):
            code = (ROOT / "examples" / name).read_text(encoding="utf-8")
            is_alone = "Emulator" in code or name in without_service
            assert is_alone == row.endswith("| yes |"), name


_NEEDS = [
    ("ingest_fastapi", "fastapi", "fastapi uvicorn"),
    ("schema_registry", "azure.identity", "azure-schemaregistry-avroencoder azure-identity"),
    ("spark_pipeline", "pyspark", "'eventpump[spark,java]'"),
    ("telemetry", "opentelemetry.sdk", "'eventpump[otel]' opentelemetry-sdk"),
    ("test_with_the_emulator", "pytest", "'eventpump[testing]'"),
    ("with_identity", "azure.identity", "azure-identity"),
]
"""Examples that need more than the package: for each a module, and what it says to install."""


@pytest.mark.parametrize(("example", "module", "install"), _NEEDS)
def test_example_without_its_extra_prints_what_to_install(example: str, module: str, install: str) -> None:
    """In one line, without a traceback; the list of examples names it too."""
    run = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path('examples/{example}.py')"
    result = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.endswith(f": pip install {install}")
    (row,) = (
        row
        for row in (ROOT / "examples/README.md").read_text(encoding="utf-8").splitlines()
        if f"[{example}.py]" in row
    )
    assert all(f"`{each}`" in row for each in install.replace("'", "").split())
    assert (ROOT / "examples/README.md").read_text(encoding="utf-8").count("(needs ") == len(_NEEDS)


def test_options_of_commands_exist() -> None:
    """Where a document shows a command with options, the command has them."""
    known = {name: set(re.findall(r"--[a-z][a-z-]*", parser.format_help())) for name, parser in command_parsers()}
    found, wrong = 0, []
    for path in [ROOT / "README.md", ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
        for command, rest in re.findall(r"\b(eventpump (?:(?:parked|checkpoints) )?[a-z-]+)\b([^\n`|<>&;#]*)", text):
            options = re.findall(r"(?<!\S)--[a-z][a-z-]*", rest) if command in known else []
            found += len(options)
            wrong += [f"{path.name}: {command} {each}" for each in options if each not in known[command]]
    assert found > 30
    assert wrong == []


_COLUMNS = 88
"""What the site has room for in a block of code, at a width of 1440 pixels."""


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_of_code_are_as_wide_as_the_site_shows(path: Path) -> None:
    """No line of a block is cut off at the right: also those of pages that are files elsewhere."""
    elsewhere = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md", "security": "SECURITY.md"}
    if path.parent.name == "project" and path.stem in elsewhere:
        path = ROOT / elsewhere[path.stem]
    blocks = re.findall(r"^ *```[\w{}-]+[^\n]*\n(.*?)^ *```$", path.read_text(encoding="utf-8"), re.M | re.S)
    assert [line for block in blocks for line in block.splitlines() if len(line) > _COLUMNS] == []


def test_workflows_name_the_pythons_of_the_package() -> None:
    """Those that test each Python test the ones that the package names, and the files know no machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    workflows = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")}
    (matrix,) = re.findall(r"python: \[(.+)\]", workflows["tests.yml"])
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.M)
    assert re.findall(r'"([\d.]+)"', matrix) == named
    for text in workflows.values():
        assert yaml.safe_load(text)["jobs"]
        assert text.startswith("# Not run yet")
        assert not re.search(r"https?://|/home/|/tmp/|index-url", text)


def test_wheels_are_built_on_machines_of_their_own_kind() -> None:
    """The action has a tag per version only, and no machine of the workflow builds for another kind of processor."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    (action,) = {step["uses"] for step in steps if "cibuildwheel" in step.get("uses", "")}
    assert re.fullmatch(r"pypa/cibuildwheel@v\d+\.\d+\.\d+", action)
    assert settings["linux"]["archs"] == ["native"]


def test_version_is_in_one_place() -> None:
    """It is in pyproject.toml: a release changes one line, and a heading of the changelog, which has one form."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert version == eventpump.__version__
    files = [
        path for name in ("eventpump", "docs") for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md")
    ]
    mentions = rf"eventpump[- =]+v?{re.escape(version)}\b"
    assert [path for path in files if re.search(mentions, path.read_text(encoding="utf-8"))] == []
    first, *released = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", heading) for heading in released)


def _promises() -> list[list[str]]:
    """Return the rows of the table of promises, by their cells."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    rows = [row for row in text[text.index(PROMISES) :].splitlines() if row.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" |")] for row in rows[1:]]


@pytest.mark.parametrize("model", SPARK_OPTIONS)
def test_page_of_spark_options_has_every_option(model: str) -> None:
    """Each field of the models is on the page, by the name that users write, with its meaning and its default."""
    page = (ROOT / "docs/reference/spark-options.md").read_text(encoding="utf-8")
    assert f"```{{option-table}} {model}\n" in page
    rows = list(spark_option_rows(model))
    fields = [field for field in SPARK_OPTIONS[model].model_fields if field != "connection"]
    assert [name.lower() for name, _, _ in rows] == [
        field if model == "SinkSettings" else field.replace("_", "") for field in fields
    ]
    for name, default, meaning in rows:
        assert default, name
        assert len(meaning) > len("See ``.") + 3, name
        assert not re.search(r":\w+:`", meaning), f"{name}: a role of the docstring is left"


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


def test_walks_name_files_and_functions_that_exist() -> None:
    """Each function in the walks of design.md, file by file, is of the file that is named before it."""
    sections = re.findall(
        r"^### File by file.*?(?=^#)", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert len(sections) == 2
    for section in sections:
        code = ""
        for cell in re.findall(r"^\|[^|]*\|([^|]*)\|", section, re.M):
            for name in re.findall(r"`([^`]+)`", cell):
                if name.endswith(".py"):
                    code = (ROOT / "eventpump" / name).read_text(encoding="utf-8")
                    continue
                for part in name.split("."):
                    assert re.search(rf"\b(class|def) {part}\b", code), f"{name}: {cell}"


@pytest.mark.parametrize("name", drawings())
def test_diagrams_are_what_the_script_draws(name: str) -> None:
    """The drawings in the repository are what `python docs/draw.py` draws from the layers contract."""
    assert (FOLDER / name).read_text(encoding="utf-8") == drawings()[name], "run python docs/draw.py"


def test_diagrams_are_all_shown() -> None:
    """A page shows each drawing, with a text in its place; there are no others, and each has colors for the dark."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    shown = re.findall(r"!\[([^\]]+)\]\(diagrams/([\w-]+\.svg)\)", pages)
    assert sorted({name for _, name in shown}) == sorted(drawings()) == sorted(path.name for path in FOLDER.iterdir())
    assert all(len(text) > 10 for text, _ in shown)
    assert all("prefers-color-scheme: dark" in drawing for drawing in drawings().values())


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


def test_picture_of_the_demo_is_what_the_script_draws() -> None:
    """docs/pictures/demo.svg is drawn from the recorded run, which lost nothing."""
    recording = Recording.parse(RECORDING.read_text(encoding="utf-8"))
    assert PICTURE.read_text(encoding="utf-8") == draw(recording), "run python docs/demo.py"
    assert recording.figures["lost"] == "0"
    # What stands still, as on paper, shows the first frame: all of the run.
    assert re.findall(r"^    0%.*$", draw(recording), re.M) == ["    0%, 33.33% { transform: scaleX(1); }"]
    ((killed_at, text),) = [each for each in recording.story if "was killed" in each[1]]
    killed = text.split()[0]
    assert any(killed in moment.owners for moment in recording.moments)
    assert not any(killed in moment.owners for moment in recording.moments if moment.time >= killed_at)


PAGES = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN_WHOLE = sorted([ROOT / "README.md", *(path for path in PAGES if path.parent != ROOT / "docs")])
"""Their blocks of Python are programs, which `integration/test_pages.py` runs, or parts of examples."""


def _lines(code: str) -> str:
    """Return code without what a formatter changes where a part of a program is shown: indents and empty lines."""
    return "".join(f"{line.strip()}\n" for line in code.splitlines() if line.strip())


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_of_python_compile_and_are_programs_or_of_examples(path: Path) -> None:
    """What can be pasted can at least be read by Python; where pages promise it, it is a program or a part of one."""
    examples = [_lines(each.read_text(encoding="utf-8")) for each in (ROOT / "examples").glob("*.py")]
    for block in python_blocks(path):
        ast.parse(block)
        if not any(_lines(block) in text for text in examples):
            compile(block, str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            assert path not in WRITTEN_WHOLE or is_program(block), block


_OWNERS: dict[str, type] = {
    "host": EventProcessorHost,
    "context": PartitionContext,
    "producer": BufferedProducer,  # it has the methods of `EventProducer`, and more
    "batch": EventBatch,
    "event": ReceivedEvent,
    "reader": PartitionReader,
}
_MIGRATIONS = ["from-azure-eventhub.md", "from-event-processor-host.md", "from-kafka.md"]


def _parameters() -> set[str]:
    """Return the names of all options and parameters of public classes and their methods."""
    known: set[str] = set()
    for made in (each.made for each in public_names().values()):
        if isinstance(made, type):
            known |= set(typing.get_type_hints(made)) if typing.is_typeddict(made) else set()
            functions = [each for _, each in inspect.getmembers(made, inspect.isfunction)]
            known |= {each for function in functions for each in inspect.signature(function).parameters}
    return known


@pytest.mark.parametrize("page", _MIGRATIONS)
def test_names_that_pages_of_migration_promise_exist(page: str) -> None:
    """What stands in the column of eventpump is public: classes, their methods and attributes, and options."""
    parameters, checked = _parameters(), 0
    for row in re.findall(r"^\| (?!-).* \| (.*) \|$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M):
        for code in re.findall(r"`([^`]+)`", row):
            code = re.sub(r'"[^"]*"', "", code)
            for name, attribute in re.findall(r"(?<![\w.$])([A-Z][a-z]\w+)(?:\.(\w+))?", code):
                checked += 1
                foreign = {*dir(builtins), "CancelledError"}
                assert name in public_names() or name in foreign, f"{page}: {code}"
                assert not attribute or hasattr(public_names()[name].made, attribute), f"{page}: {code}"
            for option in re.findall(r"(?<![\w.])([a-z]\w+)=(?!=)", code):
                checked += 1
                assert option in parameters, f"{page}: {code}"
            for owner, attribute in re.findall(r"(?<![\w.])([a-z]+)\.(\w+)", code):
                if owner in _OWNERS:
                    checked += 1
                    assert hasattr(_OWNERS[owner], attribute), f"{page}: {code}"
    assert checked > 10


def test_sessions_of_pages_print_what_they_show() -> None:
    """The blocks with prompts are doctests; those of a page continue each other."""
    runner, count = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE), 0  # long lines are broken
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        known: dict[str, object] = {}
        for number, block in enumerate(re.findall(r"^```pycon\n(.*?)^```$", text, re.M | re.S), 1):
            session = doctest.DocTestParser().get_doctest(block, known, f"{path.name} {number}", str(path), 0)
            result = runner.run(session, clear_globs=False)
            known = session.globs
            count += result.attempted
            assert result.failed == 0, f"{path.name}, session {number}"
    assert count > 5


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_pages_lead_to_files_and_headings(path: Path) -> None:
    """As those of the other documents, also in the folders of the site."""
    test_links_of_documents_lead_to_files_and_headings(path)


def test_page_of_errors_has_every_error_and_quotes_what_is_said() -> None:
    """Each class of the tree is on the page, and each message on it is in the code."""
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    unsaid = {"EventPumpError", "ServiceError", "LinkDetachedError"}  # bases, and what is always retried
    classes = {each.name for each in of_module("eventpump.errors") if each.name.endswith("Error")} - unsaid
    assert [name for name in sorted(classes) if f"`{name}`" not in page] == []
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "eventpump").rglob("*.py"))
    code = re.sub(r"\{[^{}]*\}", "", re.sub(r'"\s*\n\s*f?"', "", code))
    messages = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| ")]
    quoted = [text for message in messages for text in re.findall(r"`([^`]+)`", message)]
    assert len(quoted) > 40
    foreign = {"CERTIFICATE_VERIFY_FAILED"}
    assert [text for text in quoted if text.removeprefix("condition ") not in code and text not in foreign] == []
