"""What `inspect.signature` and `help` show of the clients: golden lines, in `shown/`.

`python -m tests.unit.options.test_described` writes the files anew, after a text was changed on purpose.
"""

from __future__ import annotations

import inspect
import pydoc
import re
from pathlib import Path

import pytest

from eventpump import BufferedProducer, EventProcessorHost, EventProducer, PartitionReader
from eventpump.options import described

FOLDER = Path(__file__).with_name("shown")
CLASSES = (EventProcessorHost, PartitionReader, EventProducer, BufferedProducer)


def shown(made: type) -> list[str]:
    """Return the parameters of a class, and then its docstring, each paragraph and each parameter's text in a line."""
    parameters = [str(each.replace(annotation=each.empty)) for each in inspect.signature(made).parameters.values()]
    lines = pydoc.plain(pydoc.render_doc(made)).split(" |  Method resolution order:")[0].splitlines()
    assert lines[2].startswith(f"class {made.__name__}("), lines[:4]
    text = "\n".join(line.removeprefix(" |").removeprefix("  ") for line in lines[3:])
    start = text.index("\n\n") + 2  # after the signature, which is wrapped in some versions of Python
    items = re.split(r"\n(?=\n| {4}\w+(?: \(.*\))?:\s)|(?<=Args:)\n|(?<=Raises:)\n", text[start:])
    return [*parameters, "", *(" ".join(each.split()) for each in items if each.strip())]


@pytest.mark.parametrize("made", CLASSES)
def test_help_shows_what_it_showed(made: type) -> None:
    """Each parameter has its default, type and text, in the order of before; further options may stand between them."""
    now = iter(shown(made))
    before = (FOLDER / f"{made.__name__}.txt").read_text(encoding="utf-8").splitlines()
    assert len(before) > 60
    assert [line for line in before if line not in now] == []


def test_help_without_source_names_the_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is shipped without source has the docstring as it is written, which says where the options are."""
    monkeypatch.setattr(described, "_written", dict)
    assert "options: See `ReaderOptions`." in (PartitionReader.__doc__ or "")


if __name__ == "__main__":
    for each in CLASSES:
        (FOLDER / f"{each.__name__}.txt").write_text("\n".join([*shown(each), ""]), encoding="utf-8")
