"""A module that moved is named by its present name."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from multihead.errors import moved


@pytest.mark.parametrize("name", moved._NEW_MODULE_NAMES)
def test_importing_a_module_that_moved_names_the_present_one_which_exists(name: str) -> None:
    now = moved._NEW_MODULE_NAMES[name]
    sentence = f"There is no module multihead.{name}: it has moved. Import {now}."
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(sentence)}$"):
        import_module(f"multihead.{name}")
    import_module(now)


def test_other_names_are_unknown_as_in_any_package() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'multihead\.nothing'$"):
        import_module("multihead.nothing")
