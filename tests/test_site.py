"""The site of the documentation: built without a warning, with links that lead somewhere, and all public names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.api import modules_of, of_module, public_names

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
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    entries = set(re.findall(r'\bid="(eventpump\.[\w.]+)"', text))
    modules = ["eventpump.spark", *modules_of("eventpump.testing")]
    expected = {f"{each.module}.{each.name}" for each in public_names().values()}
    expected |= {f"{module}.{each.name}" for module in modules for each in of_module(module)}
    assert expected - entries == set()
