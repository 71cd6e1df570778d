"""The functions that show a record exist and take what its methods pass on."""

from __future__ import annotations

from inspect import signature

import pytest

from multihead.counting.result import Census
from multihead.observation.presentation import PRESENTERS, presenting_function
from multihead.observation.record import Record


@pytest.mark.parametrize("method", PRESENTERS)
def test_a_method_finds_its_function(method: str) -> None:
    caller = Census.report if method == "census" else getattr(Record, method)
    found = signature(presenting_function(method)).parameters
    passed = set(signature(caller).parameters) - {"self", "others", "options"}
    assert passed <= set(found)
