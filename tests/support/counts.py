"""Counts of the code: `python -m tests.support.counts` prints those of the working tree.

With names of commits it prints theirs, beside each other; with `--where N` also the largest parts of each count of the
last one. `tests/test_house.py` has the limits.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
_UNROLLED = re.compile(r".*/workers\.py:KeyedWorkers\._work")
"""Long on purpose, and the only one: in functions of its own, what it does with each event takes 3 µs more."""
_PRIVATE = re.compile("_(?!(?:replace|fields|asdict|make)$)[A-Za-z].*")  # named tuples have those for users
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Tree:
    """The sources of the package and of the tests, at one time.

    Each count is a `Counter` of what it is made of, by file or by name.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = {path: text for path, text in files.items() if path.startswith("eventpump/")}
        self._package = {path: ast.parse(text) for path, text in self._files.items() if path.endswith(".py")}
        self._tests = {
            path: ast.parse(text) for path, text in files.items() if path.startswith("tests/") and path.endswith(".py")
        }
        self._modules = {
            path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in self._package
        }
        self._contracts = tomllib.loads(files["pyproject.toml"])["tool"]["importlinter"]["contracts"]

    @classmethod
    def working(cls) -> Tree:
        """Return the files as they are now."""
        paths = [path for folder in ("eventpump", "tests") for path in sorted((ROOT / folder).rglob("*.py*"))]
        paths = [path for path in paths if path.suffix in {".py", ".pyx"}]
        return cls(
            {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in [*paths, ROOT / "pyproject.toml"]}
        )

    @classmethod
    def of(cls, commit: str) -> Tree:
        """Return the files of a commit."""
        command = ["git", "archive", commit, "eventpump", "tests", "pyproject.toml"]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            return cls(
                {
                    member.name: extracted.read().decode()
                    for member in files
                    if member.name.endswith((".py", ".pyx", ".toml")) and (extracted := files.extractfile(member))
                }
            )

    @cached_property
    def _lines(self) -> dict[str, tuple[set[int], set[int]]]:
        """The numbers of each file's lines of code and of docstrings, Cython's files included."""
        return {path: _lines(text) for path, text in self._files.items()}

    def lines_of_code(self) -> Counter[str]:
        """Lines with anything but a comment or a docstring, by file."""
        return Counter({path: len(code) for path, (code, _) in self._lines.items()})

    def lines_of_docstrings(self) -> Counter[str]:
        """Lines of strings that are statements, those below attributes included, without blank ones, by file."""
        return Counter({path: len(docstrings) for path, (_, docstrings) in self._lines.items()})

    def statements(self) -> Counter[str]:
        """Statements by file, docstrings and Cython's files apart."""
        return Counter({path: sum(map(_is_statement, ast.walk(tree))) for path, tree in self._package.items()})

    def attributes(self) -> Counter[str]:
        """Instance attributes by class: what its methods set on `self`, and the fields of a dataclass that changes.

        A frozen dataclass, a model and a typed dictionary are values: their fields are what there is to say.
        """
        return Counter(
            {
                f"{path}:{node.name}": len(set(_fields(node)) | set(_set_on_self(node)))
                for path, tree in self._package.items()
                for node in ast.walk(tree)
                if isinstance(node, ast.ClassDef)
            }
        )

    def bodies(self) -> Counter[str]:
        """Lines of code by function, from its first statement to its last, docstrings and comments apart.

        `_UNROLLED` is left out.
        """
        found: Counter[str] = Counter()
        for path, tree in self._package.items():
            code, _ = self._lines[path]
            for name, function in _functions(tree):
                place, last = f"{path}:{name}", function.end_lineno or 0
                if not _UNROLLED.fullmatch(place):
                    found[place] = sum(line in code for line in range(function.body[0].lineno, last + 1))
        return found

    def namesakes(self) -> Counter[str]:
        """Classes by name, where a name without underscore is that of several."""
        names = Counter(
            node.name
            for tree in self._package.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        )
        return Counter({name: count for name, count in names.items() if count > 1})

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        """The modules of the package that each one imports, for types and within functions too."""
        return {module: set(self._imported(module)) - {module} for module in self._modules}

    def _imported(self, module: str) -> Iterator[str]:
        for node in ast.walk(self._package[self._modules[module]]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self._modules)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names = (f"{node.module}.{alias.name}", str(node.module))
                    yield from [name for name in names if name in self._modules][:1]

    def circles(self) -> Counter[str]:
        """Files by circle: each of them imports each other one, by way of others."""
        reached = {module: _reached(module, self._imports) for module in self._imports}
        found = {
            frozenset(other for other in others if module in reached[other])
            for module, others in reached.items()
            if module in others
        }
        return Counter({" ".join(sorted(circle)): len(circle) for circle in found})

    def arrows_up(self) -> Counter[str]:
        """Imports against the layers of a contract in pyproject.toml, also those that it excuses."""
        return Counter(
            f"{module} -> {other}"
            for contract in self._contracts
            if contract["type"] == "layers"
            for container in contract["containers"]
            for module, others in self._imports.items()
            for other in others
            if _is_up(_layer(module, container, contract["layers"]), _layer(other, container, contract["layers"]))
        )

    def private_reads(self) -> Counter[str]:
        """Attributes with a private name of the package that tests read or set, by file.

        Those of `self`, `cls` and `super()` are a class's own. Names that only tests or other libraries have do not
        count.
        """
        defined = set(_private_names(self._package.values()))
        return Counter(
            path
            for path, tree in self._tests.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr in defined
            and ast.unparse(node.value) not in {"self", "cls", "super()"}
        )


def _lines(text: str) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines of code and of docstrings: statements that are one string."""
    code: set[int] = set()
    docstrings: set[int] = set()
    blank = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip()}
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            is_docstring = all(part.type == tokenize.STRING for part in statement)
            for part in statement:
                (docstrings if is_docstring else code).update(range(part.start[0], part.end[0] + 1))
            statement = []
    return code, docstrings - blank


def _is_statement(node: ast.AST) -> bool:
    """Return whether a node is a statement, and not a string by itself."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return False
    return isinstance(node, ast.stmt)


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{within}{node.name}", node
        name = getattr(node, "name", None) if isinstance(node, ast.stmt) else None
        yield from _functions(node, f"{within}{name}." if name else within)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Return the fields of a dataclass, unless it is frozen."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(text.startswith("dataclass") and "frozen=True" not in text for text in decorators):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                yield ast.unparse(statement.target)


def _set_on_self(node: ast.ClassDef) -> Iterator[str]:
    for method in node.body:
        for inner in ast.walk(method):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            ):
                yield inner.attr


def _reached(module: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return what a module imports, and what that imports, and so on."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        new = imports[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def _layer(module: str, container: str, layers: list[str]) -> tuple[int, str] | None:
    """Return the place of a module among the layers, from the top, and the name that it has there."""
    name = module.removeprefix(f"{container}.").partition(".")[0] if module.startswith(f"{container}.") else ""
    return next(((place, name) for place, layer in enumerate(layers) if name in re.split(r" [|:] ", layer)), None)


def _is_up(importer: tuple[int, str] | None, imported: tuple[int, str] | None) -> bool:
    """Return whether an import goes up, or to another one of the same layer."""
    return bool(importer and imported and importer[1] != imported[1] and importer[0] >= imported[0])


def _private_names(trees: Iterable[ast.AST]) -> Iterator[str]:
    """Return the private names that are defined: of attributes, functions, classes and modules."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
            ) if _PRIVATE.fullmatch(name):
                yield name


def counts(tree: Tree) -> dict[str, tuple[int, Counter[str]]]:
    """Return by name each count, and what it is made of."""
    code, docstrings, statements = tree.lines_of_code(), tree.lines_of_docstrings(), tree.statements()
    attributes, bodies, namesakes = tree.attributes(), tree.bodies(), tree.namesakes()
    circles, arrows_up, private = tree.circles(), tree.arrows_up(), tree.private_reads()
    return {
        "lines of code": (code.total(), code),
        "lines of docstrings": (docstrings.total(), docstrings),
        "lines of code and docstrings": (code.total() + docstrings.total(), code + docstrings),
        "statements": (statements.total(), statements),
        "attributes of the widest class": (max(attributes.values()), attributes),
        "lines of code of the longest body": (max(bodies.values()), bodies),
        "names of several classes": (len(namesakes), namesakes),
        "circles of files": (len(circles), circles),
        "arrows up": (len(arrows_up), arrows_up),
        "private attributes read in tests": (private.total(), private),
    }


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.counts", description=__doc__)
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="what to count; without any, the working tree")
    parser.add_argument("--where", type=int, metavar="N", default=0, help="list the N largest parts of each count")
    options = parser.parse_args()
    columns = {commit: counts(Tree.of(commit)) for commit in options.commits} or {"now": counts(Tree.working())}
    last = list(columns.values())[-1]
    lines = [" " * 38 + "".join(f"{name[:12]:>14}" for name in columns)]
    for name, (_, parts) in last.items():
        lines.append(f"{name:38}" + "".join(f"{column[name][0]:14,}" for column in columns.values()))
        lines += [f"    {count:6,} {part}" for part, count in parts.most_common(options.where)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
