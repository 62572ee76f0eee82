"""The site of the documentation: built without a warning, with links that lead somewhere, and all public names.

It is looked at in a real browser too, on a wide screen and on a phone: what is cut off or below the first screen, and
what the search box finds. Without a browser these tests are skipped, except in CI, where `.ci/run` installs one.
"""

from __future__ import annotations

import asyncio
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

from docs.api import GROUPS, ORDER, class_of, members_of, modules_of, of_module, parameter_texts, public_names
from tests.support.browser import Browser, address, browser_program

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(600)  # half a minute of CPU time, which is minutes on a busy machine


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as CONTRIBUTING.md says; a warning, such as a reference that leads nowhere, is an error.

    Left out is what takes a quarter of the time and is not looked at: typographic quotes, and the names of objects
    in the navigation of each page.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", "--keep-going"]
    command += ["-D", "smartquotes=0", "-D", "toc_object_entries=0", "docs", str(folder)]
    # What Sphinx logs are the pages themselves, with the emulator's documented key in them: no place to look for leaks.
    environment = {name: value for name, value in os.environ.items() if name != "EVENTPUMP_LEAK_LOGS"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


def test_links_of_the_site_lead_to_pages_files_and_anchors(site: Path) -> None:
    """Every link within the site leads to a page or file that was built, and to an anchor that the page has."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    assert len(pages) > 20
    wrong = []
    for path, text in pages.items():
        for target in set(re.findall(r'<[^<>]*\b(?:href|src)="([^"]+)"', text)):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.exists() or (parts.fragment and file in pages and unquote(parts.fragment) not in anchors[file]):
                wrong.append(f"{path.relative_to(site)}: {target}")
    assert wrong == []


def test_every_page_is_in_the_list_for_language_models(site: Path) -> None:
    """`llms.txt` has a section per caption and a line per page, with a sentence; `llms-full.txt` has the texts."""
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# eventpump\n\n> ")
    captions = re.findall(r"^:caption: (.+)$", (ROOT / "docs/index.md").read_text(encoding="utf-8"), re.M)
    assert re.findall(r"^## (.+)$", text, re.M) == captions
    listed = re.findall(r"^- \[.+\]\(([\w/-]+)\.html\): .+$", text, re.M)
    assert len(listed) == text.count("\n- ")
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages - {"index"})
    assert all((site / f"{name}.html").is_file() for name in listed)
    full = (site / "llms-full.txt").read_text(encoding="utf-8")
    assert full.count("<!-- ") >= len(listed)
    assert "Exactly once into a database" in full


def test_site_has_every_public_name(site: Path) -> None:
    """Each name of `eventpump` and of the public modules below it has an entry."""
    entries = _entries(site)
    modules = ["eventpump.spark", *modules_of("eventpump.testing")]
    expected = {f"{each.module}.{each.name}" for each in public_names().values()}
    expected |= {f"{module}.{each.name}" for module in modules for each in of_module(module)}
    assert expected - entries == set()


def _entries(site: Path) -> set[str]:
    """Return all names that have an entry in the reference."""
    text = "".join(map(_read, (site / "reference").glob("*.html")))
    return set(re.findall(r'\bid="(eventpump\.[\w.]+)"', text))


def test_classes_show_no_members_of_built_in_types(site: Path) -> None:
    """An enumeration of texts, as `LagState`, has its own members on the page, and not those of `str`."""
    entries = _entries(site)
    found = []
    for entry in sorted(entries):
        owner, _, member = entry.rpartition(".")
        made = pkgutil.resolve_name(owner) if owner in entries else None
        bases = made.__mro__ if isinstance(made, type) else ()
        first = next((base for base in bases if member in vars(base)), None)
        if first is not None and first.__module__ == "builtins":
            found.append(entry)
    assert found == []


@pytest.mark.parametrize("key", GROUPS)
def test_parameters_of_a_class_are_each_in_one_group(key: str) -> None:
    """An option that is added gets a place on the page of its class."""
    grouped = [each for names in GROUPS[key].values() for each in names]
    assert sorted(grouped) == sorted(parameter_texts(key))


@pytest.mark.parametrize("key", ORDER)
def test_members_of_a_class_are_in_the_order_of_use(site: Path, key: str) -> None:
    """The page has them as `ORDER` says, and the others behind them."""
    (page,) = (text for path in (site / "reference").glob("*.html") if f'id="eventpump.{key}"' in (text := _read(path)))
    shown = re.findall(rf'<dt[^>]* id="eventpump\.{re.escape(key)}\.(\w+)"', page)
    assert shown == [member for _, member in members_of(key)]
    assert all(hasattr(class_of(key), each) for each in ORDER[key])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


SIZES = {"wide": (1440, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")

_LOOK = """(() => {
  const height = innerHeight, seen = box => Math.max(0, Math.min(box.bottom, height) - Math.max(box.top, 0));
  const boxes = (what) => [...document.querySelectorAll(what)].map(each => [each, each.getBoundingClientRect()]);
  const brightness = (color) => color.match(/\\d+/g).slice(0, 3).reduce((sum, each) => sum + +each, 0) / 3;
  const style = getComputedStyle(document.body);
  const lines = (pre) => {
    const style = getComputedStyle(pre), padding = parseFloat(style.paddingTop) + parseFloat(style.paddingBottom);
    return Math.round((pre.clientHeight - padding) / parseFloat(style.lineHeight));
  };
  return {
    broken: [...document.querySelectorAll("article pre")]
      .filter(each => lines(each) > each.innerText.replace(/\\n$/, "").split("\\n").length)
      .map(each => each.innerText.slice(0, 80)),
    cut: [...document.querySelectorAll("article pre")]
      .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.innerText.slice(0, 80)),
    signatures: boxes("article dt.sig").filter(([_, box]) => seen(box) > height / 2.5)
      .map(([each, _]) => each.innerText.slice(0, 80)),
    bottom: Math.max(...boxes("article section > p:first-of-type, article pre, article img").slice(0, 4)
      .map(([_, box]) => box.bottom)),
    pictures: boxes("article img").map(([each, box]) => [each.alt, box.width > 0]),
    contrast: Math.abs(brightness(style.color) - brightness(style.backgroundColor)),
    dark: brightness(style.backgroundColor) < 128,
  };
})()"""

_SEARCHED = """new Promise(done => {
  const found = () => [...document.querySelectorAll("#search-results li a")].map(each => each.getAttribute("href"));
  const ended = () => /found|did not match/.test(document.querySelector("#search-results")?.innerText ?? "");
  if (ended()) return done(found());
  new MutationObserver(() => { if (ended()) done(found()); })
    .observe(document.body, {childList: true, subtree: true, characterData: true});
})"""

TASKS: Mapping[str, Sequence[str]] = {
    "place of checkpoints": ("howto/choose-a-store.html", "reference/stores.html", "reference/clients.html"),
    "lease_store": ("howto/choose-a-store.html", "reference/stores.html", "reference/clients.html"),
    "handler raises": ("what-happens-when.html", "guarantees.html", "faq/consumers.html"),
    "lag": ("howto/lag.html",),
    "how to see lag": ("howto/lag.html",),
    "reset checkpoints": ("howto/checkpoints.html",),
    "back to azure-eventhub": ("from-azure-eventhub.html",),
    "migrate from azure-eventhub": ("from-azure-eventhub.html",),
    "roll back to azure-eventhub": ("from-azure-eventhub.html",),
    "cannot connect to 127.0.0.1:5671: Connection refused": ("reference/errors.html",),
    "process_events raised (1 in a row), trying again in 0.1 s: ValueError": ("reference/errors.html",),
    "The token has an invalid signature": ("reference/errors.html",),
    "no checkpoint anywhere": ("howto/troubleshoot.html", "reference/reports.html", "reference/errors.html"),
}
"""What a stranger types into the search box, and the pages that answer it."""
_FIRST = 5
"""Of so many results one has to be such a page."""


class Looked(NamedTuple):
    """What a browser showed: of pages by size and scheme, and the results of searches."""

    pages: Mapping[str, Mapping[tuple[str, str], Any]]
    found: Mapping[str, Sequence[str]]


async def _look(pages: Mapping[str, str], search: str, program: str) -> Looked:
    looks: dict[str, dict[tuple[str, str], Any]] = {}
    found = {}
    async with Browser(program) as browser:
        for name, url in pages.items():
            await browser.open(url)
            for size, (width, height) in SIZES.items():
                await browser.resize(width, height)
                for scheme in SCHEMES:
                    await browser.prefer(scheme)
                    looks.setdefault(name, {})[size, scheme] = await browser.evaluate(_LOOK)
        for words in TASKS:
            await browser.open(f"{search}?q={words.replace(' ', '+')}")
            found[words] = await browser.evaluate(_SEARCHED)
    return Looked(looks, found)


@pytest.fixture(scope="module")
def looked(site: Path) -> Looked:
    """All pages in a browser."""
    program = browser_program()
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "there is no Chromium (Debian: apt-get install chromium)"
        )
    made = {"genindex.html", "search.html", "py-modindex.html"}
    pages = {path.relative_to(site).as_posix(): address(path) for path in sorted(site.rglob("*.html"))}
    written = {name: url for name, url in pages.items() if name not in made}
    return asyncio.run(_look(written, pages["search.html"], program))


def test_pages_cut_off_no_code_and_begin_with_no_signature(looked: Looked) -> None:
    """At 1440 and 390 pixels, light and dark: each line of code is seen whole, and no signature fills the screen."""
    assert len(looked.pages) > 50
    looks = [(name, kind, look) for name, kinds in looked.pages.items() for kind, look in kinds.items()]
    assert [(name, kind, look["cut"]) for name, kind, look in looks if look["cut"]] == []
    assert [(name, kind, look["signatures"]) for name, kind, look in looks if look["signatures"]] == []


def test_code_on_a_wide_screen_has_the_lines_that_it_was_written_with(looked: Looked) -> None:
    """That of docstrings too, which are indented: a program of theirs is not broken within a line."""
    broken = {name: kinds["wide", "light"]["broken"] for name, kinds in looked.pages.items()}
    assert {name: blocks for name, blocks in broken.items() if blocks} == {}


def test_pages_are_light_and_dark_and_have_pictures_with_texts(looked: Looked) -> None:
    """Text stands out from its ground in both schemes, and each picture is there, with a text in its place."""
    for name, kinds in looked.pages.items():
        for (size, scheme), look in kinds.items():
            assert look["dark"] == (scheme == "dark"), (name, size, scheme)
            assert look["contrast"] > 120, (name, size, scheme)
            assert all(text and is_seen for text, is_seen in look["pictures"]), (name, look["pictures"])


def test_first_screen_of_the_site_has_a_program_and_a_picture(looked: Looked) -> None:
    """The sentence, the install line, the consumer and the picture are seen without scrolling."""
    for (size, scheme), look in looked.pages["index.html"].items():
        assert look["bottom"] <= SIZES[size][1], (size, scheme, look["bottom"])


@pytest.mark.parametrize("words", TASKS)
def test_search_box_finds_what_strangers_look_for(looked: Looked, words: str) -> None:
    """The answer is among the first results, and before all pages for contributors."""
    found = [each.partition("#")[0].partition("?")[0] for each in looked.found[words]]
    assert set(found[:_FIRST]) & set(TASKS[words]), found[:12]
    assert not found[0].startswith(("project/", "design", "protocol")), found[:12]


def test_install_line_of_readme_agrees_with_the_site() -> None:
    """README installs from a checkout until something is published, which a line in `docs/conf.py` says."""
    is_published = "IS_PUBLISHED: Final = True" in _read(ROOT / "docs/conf.py")
    assert ("From a checkout (`pip install" in _read(ROOT / "README.md")) != is_published
