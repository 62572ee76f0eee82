"""Where tests reach for what is private to the package: `python -m tests.support.private` prints the count by file."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PRIVATE = re.compile("_[A-Za-z].*")


def _nodes(folder: str) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def _defined() -> set[str]:
    """Return the private names that the package defines, of attributes, functions, classes and modules."""
    found: set[str] = set()
    for _, node in _nodes("eventpump"):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if _PRIVATE.fullmatch(name)}


def private_reads() -> Counter[str]:
    """Count by file what tests read or set of attributes with such a name.

    Those of `self`, `cls` and `super()` are a class's own. Names that only tests or other libraries have do not count.
    """
    defined = _defined()
    return Counter(
        path.relative_to(ROOT).as_posix()
        for path, node in _nodes("tests")
        if isinstance(node, ast.Attribute)
        and node.attr in defined
        and ast.unparse(node.value) not in {"self", "cls", "super()"}
    )


if __name__ == "__main__":
    counted = private_reads()
    sys.stdout.writelines(
        f"{count:4} {name}\n" for name, count in [*counted.most_common(), ("in all", counted.total())]
    )
