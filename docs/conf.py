"""The site: `python -m sphinx -W -n docs build/site` (extra `docs`).

The pages are plain Markdown, which can be read in the repository too. Directives are added: `public-names`
documents names from their docstrings, `option-table` lists the options of a class, and `command-help` shows the
command's help; `docs/api.py` fills them in. `install` shows the ways to install.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, is_typeddict

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER: Final = Path(__file__).parent
ROOT: Final = FOLDER.parent
sys.path.insert(0, str(ROOT))
os.environ["EVENTPUMP_PURE"] = "1"  # signatures are those of the Python code, which the compiled core has none of

from docs import api  # noqa: E402  # sphinx imports this file by its path: the checkout is not on the path before
from eventpump.reports import HostReport  # noqa: E402

_PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_SOURCE: Final = _PROJECT.get("urls", {}).get("Source", "").rstrip("/")
"""Where the repository can be read; empty while it has no public address."""

IS_PUBLISHED: Final = False
"""Whether `pip install eventpump` finds a release on PyPI. README's first install line has to agree with it."""

project = "eventpump"
author = "the contributors to eventpump"
release = version = _PROJECT["version"]
project_copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["diagrams", "pictures"]
html_theme = "furo"
html_title = f"eventpump {release}"
pygments_dark_style = "github-dark"  # the theme's underlines what is imported
html_static_path = ["_static", "pictures"]
html_css_files = ["site.css"]
html_search_scorer = str(FOLDER / "scorer.js")
html_show_sphinx = html_copy_source = False
html_theme_options = {
    "source_repository": _SOURCE,
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": [],  # half of the pages are made from the code, or of a file elsewhere
    "footer_icons": [{"name": "The repository", "url": _SOURCE, "html": "The repository", "class": ""}],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a changelog of headings alone, and pages that are included, skip levels

default_role = "public"
add_module_names = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "inherited-members": "BaseException,Protocol,BaseModel,Generic,dict,tuple,str,BaseSelectorEventLoop",
}
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# No inventories of other projects are loaded, so that the site is built without a network: what is not eventpump's is
# not a link. Every name of eventpump has to be documented.
nitpick_ignore_regex = [
    (r"py:.*", r"(typing|collections|asyncio|datetime|enum|pathlib|os|ssl|random|types|logging|contextlib|socket)\..*"),
    (r"py:.*", r"(_asyncio|pydantic|annotated_types|pyspark|pandas|pyarrow|azure|pytest)(_\w+)?\..*"),
    (r"py:.*", r"[a-z_]+"),  # built-in types, and parameters
    (r"py:.*", r"(Any|Callable|Mapping|Sequence|Iterable|Iterator|Collection|Awaitable|AsyncIterator|Literal|Self)"),
    (r"py:.*", r"(Path|SecretStr|NoneType|FieldInfo|MaxLen|PydanticUndefined)"),
    (r"py:.*", r"(SparkSession|DataFrame|Query\w+Event|ContainerClient|list\[.*)"),
    # Aliases, and pytest's own.
    (r"py:.*", r"(PartitionOptions|Emulator(Thread)?Factory|_pytest\..*)"),
    (r"py:.*", r"(StoredRecord|eventpump\.errors\.UnsettledBatch)"),  # what public objects return
    (r"py:.*", r"(.*\.)?_\w+"),  # private helpers of what is for tests
    # Reached through public objects, not to be named by programs.
    (r"py:.*", r"eventpump\.(amqp|app|consumer\.pump\.batches|core\.backoff|eventhubs|options)\..*"),
    (r"py:.*", r"eventpump\.(producer|sources|spark\.sink|telemetry)\..*"),
]

PROJECT_PAGES: Final = {
    "project/changelog": ROOT / "CHANGELOG.md",
    "project/contributing": ROOT / "CONTRIBUTING.md",
    "project/security": ROOT / "SECURITY.md",
    "project/benchmarks": ROOT / "benchmarks/README.md",
}
"""Pages of the site that are files outside of docs/."""

_LINK: Final = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_PICTURE: Final = re.compile(r'\b(src|srcset)="([^"]+)"')
"""A picture in HTML, which Sphinx does not look at: those of docs/pictures are copied as static files."""


def _page_of(path: Path) -> str | None:
    """Return the name of the page that shows a file; None if none does."""
    for name, file in PROJECT_PAGES.items():
        if file == path:
            return name
    if path.is_relative_to(FOLDER) and path.suffix == ".md":
        return path.relative_to(FOLDER).with_suffix("").as_posix()
    return None


def _rebased(text: str, file: Path, name: str) -> str:
    """Return a page with its links as they must be on the site.

    A link to a file that is a page of the site leads there, and any other link to a file of the repository leads to the
    repository, or, while that has no address, is shown as text.

    Args:
        text: The page.
        file: Where the text is: its links are relative to the folder of this file.
        name: The name of the page.
    """

    def link(found: re.Match[str]) -> str:
        start, target, anchor, end = found[1], found[2], found[3] or "", found[4]
        path = (file.parent / target).resolve()
        if ":" in target or not path.is_relative_to(ROOT):
            return found[0]
        page = _page_of(path)
        if page is not None:
            return f"{start}{os.path.relpath(FOLDER / page, (FOLDER / name).parent)}.md{anchor}{end}"
        if path.is_relative_to(FOLDER):
            return f"{start}{os.path.relpath(path, (FOLDER / name).parent)}{end}"
        if path == ROOT and _SOURCE:
            return f"{start}{_SOURCE}{end}"
        at = f"{_SOURCE}/{'tree' if path.is_dir() else 'blob'}/main" if _SOURCE else "repository:"
        return f"{start}{at}/{path.relative_to(ROOT).as_posix()}{end}"

    def picture(found: re.Match[str]) -> str:
        path = (file.parent / found[2]).resolve()
        if path.parent != FOLDER / "pictures":
            return found[0]
        return f'{found[1]}="{os.path.relpath(FOLDER / "_static" / path.name, (FOLDER / name).parent)}"'

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    parts[::2] = [_PICTURE.sub(picture, _LINK.sub(link, part)) for part in parts[::2]]
    text = "".join(parts)
    return re.sub(r"\[([^\]]+)\]\(repository:[^)]*\)", r"\1", text)


def _read(app: Sphinx, name: str, content: list[str]) -> None:
    """Replace the stubs of project pages, and rebase links. An event handler of Sphinx."""
    file = PROJECT_PAGES.get(name, FOLDER / f"{name}.md")
    if name in PROJECT_PAGES:
        app.env.note_dependency(file)
        content[0] = file.read_text(encoding="utf-8")
    content[0] = _rebased(content[0], file, name)


_COLON: Final = "\ue000"
"""Stands for a colon while napoleon reads a docstring."""


def _hide_colons(app: Sphinx, what: str, name: str, made: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking "The address: host and port" of a property for a type and a text. An event handler."""
    if what in ("property", "attribute", "data"):
        lines[:] = [line.replace(":", _COLON) for line in lines]


def _show_colons(app: Sphinx, what: str, name: str, made: object, options: object, lines: list[str]) -> None:
    """Undo `_hide_colons`. An event handler."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def _hide_protocol(
    app: Sphinx, what: str, name: str, made: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Show a protocol, which is not created, without parameters. An event handler."""
    return ("", None) if what == "class" and getattr(made, "_is_protocol", False) else None


def _shorten_signature(
    app: Sphinx, what: str, name: str, made: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Show a class whose parameters are shown in groups with a short signature. An event handler."""
    key = name.removeprefix("eventpump.")
    return (api.short_signature(key), None) if what == "class" and key in api.GROUPS else None


def _remove_parameters(app: Sphinx, what: str, name: str, made: object, options: object, lines: list[str]) -> None:
    """Remove the parameters from the docstring of a class that has them in groups. An event handler."""
    if what == "class" and name.removeprefix("eventpump.") in api.GROUPS:
        start = lines.index("Args:")
        end = next((n for n in range(start + 1, len(lines)) if lines[n][:1].strip()), len(lines))
        del lines[start:end]


def _public_role(
    role: str, rawtext: str, text: str, lineno: int, inliner: Inliner, options: Any = None, content: Any = None
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Show `text` in a docstring as code, and as a link if it begins with a public name, or is a page."""
    text = text.replace("\x00", "")
    code = nodes.literal(rawtext, text, classes=["py"])
    if page := re.fullmatch(r"docs(/.+)\.md", text):
        reference = addnodes.pending_xref("", code, refdomain="std", reftype="doc", reftarget=page[1], refexplicit=True)
        reference["refdoc"] = inliner.document.settings.env.docname
        return [reference], []
    name = re.match(r"[A-Za-z_]+", text)
    found = None if name is None else api.public_names().get(name[0])
    if found is None:
        return [code], []
    target = f"{found.module}.{found.name}"
    reference = addnodes.pending_xref("", code, refdomain="py", reftype="obj", reftarget=target)
    reference["refdoc"] = inliner.document.settings.env.docname
    return [reference], []


class PublicNames(SphinxDirective):
    """Document names from their docstrings.

    ::

        ```{public-names} errors
        ```

    The argument is a subject of `docs/api.py`, or the name of a module. With `names`, only these of the module, in this
    order.
    """

    required_arguments = 1
    option_spec: ClassVar[Any] = {"names": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        (what,) = self.arguments
        self.env.note_dependency(str(FOLDER / "api.py"))
        found = api.of_subject(what) if what in api.SUBJECTS else api.of_module(what)
        if wanted := self.options.get("names", "").split():
            found = sorted((each for each in found if each.name in wanted), key=lambda each: wanted.index(each.name))
        lines = [line for each in found for line in self._lines(each)]
        return self.parse_text_to_nodes("\n".join(["````{eval-rst}", *lines, "````"]))

    def _lines(self, each: api.Documented) -> Iterator[str]:
        yield f".. py:currentmodule:: {each.module}"
        yield ""
        yield f".. {each.directive}:: {each.name}"
        is_ordered = each.key in api.ORDER
        if each.name in api.WITHOUT_MEMBERS or is_ordered or is_typeddict(each.made):
            yield from ("   :no-members:", "   :no-inherited-members:")
        if each.directive == "autodata":
            yield "   :no-value:"
        if each.directive == "autoclass" and issubclass(each.made, HostReport) and each.made is not HostReport:
            yield "   :exclude-members: describe"
        yield ""
        if each.key in api.GROUPS:
            yield from (f"   {line}" for line in api.grouped_parameters(each.key))
        for directive, member in api.members_of(each.key) if is_ordered else ():
            yield from (f"   .. {directive}:: {each.name}.{member}", "")


class OptionTable(SphinxDirective):
    """List the options of a public class, or of Spark's source or sinks, with their defaults and meanings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [
            nodes.container("", *self.parse_text_to_nodes(api.option_table(self.arguments[0])), classes=["options"])
        ]


class Install(SphinxDirective):
    """Show how to install: the content, which is the way in a checkout, and beside it the way from PyPI."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        checkout = "\n".join(self.content)
        released = re.sub(r"(['\"]?)\.(\[\w+(?:,\w+)*\])?\1(?=\s|$)", r"\1eventpump\2\1", checkout, count=1)
        notes = ("# from PyPI", "# in a checkout") if IS_PUBLISHED else ("# once released", "# in a checkout")
        width = max(map(len, (released, checkout)))
        lines = [f"{way:{width}}  {note}" for way, note in zip((released, checkout), notes, strict=True)]
        lines = lines if IS_PUBLISHED else lines[::-1]
        return self.parse_text_to_nodes("\n".join(["```sh", *lines, "```"]))


class CommandHelp(SphinxDirective):
    """Show the help of the command and of its subcommands."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(api.command_help(), allow_section_headings=True)


_Reader = Callable[[str], nodes.document]


def _pages_below(page: nodes.document, read: _Reader) -> Iterator[tuple[str, str, nodes.document]]:
    """Yield caption, name and content of each page that a page lists, and of those that these list."""
    for tree in page.findall(addnodes.toctree):
        for _, name in tree["entries"]:
            listed = read(name)
            yield tree.get("caption") or "", name, listed
            yield from (("", below, content) for _, below, content in _pages_below(listed, read))


def _first_sentence(page: nodes.document) -> str:
    """Return the first sentence of a page, outside of its tables and lists; empty if it has none."""
    for paragraph in page.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            return re.split(r"(?<=\.) ", " ".join(paragraph.astext().split()))[0].rstrip(":.") + "."
    return ""


def _write_llms(app: Sphinx, error: Exception | None) -> None:
    """Write `llms.txt`, the site's pages as a list in Markdown, and `llms-full.txt`, their texts. An event handler."""
    if error is not None or app.builder.format != "html":
        return
    lines, texts, section = [f"# {project}", "", f"> {_PROJECT['description']}"], [], ""
    # Each page is read once: to unpickle one takes longer than all else that is done with it here.
    read = app.env.get_doctree
    for caption, name, page in _pages_below(read("index"), read):
        if caption and caption != section:
            section = caption
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{app.env.titles[name].astext()}]({name}.html): {_first_sentence(page)}")
        file = PROJECT_PAGES.get(name, FOLDER / f"{name}.md")
        texts.append(f"<!-- {name}.html -->\n\n{file.read_text(encoding='utf-8')}")
    folder = Path(app.outdir)
    folder.joinpath("llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    folder.joinpath("llms-full.txt").write_text("\n".join(texts), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Add what this file defines. Called by Sphinx."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("option-table", OptionTable)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("install", Install)
    app.add_role("public", _public_role)
    app.connect("source-read", _read)
    app.connect("build-finished", _write_llms)
    app.connect("autodoc-process-signature", _hide_protocol)
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-process-docstring", _remove_parameters, priority=300)
    app.connect("autodoc-process-docstring", _hide_colons, priority=400)
    app.connect("autodoc-process-docstring", _show_colons, priority=600)  # napoleon is between, at 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
