"""Callables that options name."""

from __future__ import annotations

import pytest

from eventpump.errors import ConfigurationError
from eventpump.options.callables import call_by_import_name, check_import_name

NUMBER = 7


class Maker:
    @staticmethod
    def make() -> str:
        return "made"


@pytest.mark.parametrize("name", ["module:make", "package.module:make", "module:Maker.make"])
def test_check_import_name_returns_the_name(name: str) -> None:
    """A module and an attribute of it, both with dots or without, are an import name."""
    assert check_import_name(name) == name


@pytest.mark.parametrize("name", ["", ":", "module", "module:", ":make", "a b:c", "a:b:c", "TOP/SECRET=:x", "a..b:c"])
def test_check_import_name_of_another_form(name: str) -> None:
    """Everything else is refused, and not shown."""
    with pytest.raises(ValueError, match="module:callable") as caught:
        check_import_name(name)
    assert "SECRET" not in str(caught.value)


def test_call_by_import_name_returns_what_it_makes() -> None:
    """The callable is imported and called."""
    assert call_by_import_name("credential", f"{__name__}:Maker.make") == "made"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.such_module:make", "cannot be imported"),
        (f"{__name__}:missing", "cannot be imported"),
        (f"{__name__}:NUMBER", "is not callable"),
    ],
)
def test_call_by_import_name_of_what_is_not_there(name: str, problem: str) -> None:
    """What cannot be imported or called is a configuration error of the option, which names it."""
    with pytest.raises(ConfigurationError, match=f"{name} {problem}") as caught:
        call_by_import_name("credential", name)
    assert caught.value.field == "credential"
