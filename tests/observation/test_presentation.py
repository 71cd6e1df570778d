"""The functions that show a record exist and take what its methods pass on."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import pytest

from multihead.counting.result import Census
from multihead.observation.presentation import PRESENTERS, presenting_function
from multihead.observation.record import Record
from multihead.observation.time_series import TimeSeries

CALLERS = {
    "census": Census.report,
    "film": TimeSeries.view,
    "report": Record.report,
    "series": TimeSeries.report,
    "view": Record.view,
}


@pytest.mark.parametrize(("method", "caller"), CALLERS.items())
def test_a_method_finds_its_function(method: str, caller: Callable[..., object]) -> None:
    assert CALLERS.keys() == PRESENTERS.keys()
    found = signature(presenting_function(method)).parameters
    passed = set(signature(caller).parameters) - {"self", "others", "options"}
    assert passed <= set(found)
