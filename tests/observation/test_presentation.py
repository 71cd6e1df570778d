"""The functions that show a record exist and take what its methods pass on."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getsource, signature

import pytest

from multihead.counting.result import Census
from multihead.observation.presentation import function_of_viewer
from multihead.observation.record import Record
from multihead.observation.time_series import TimeSeries

CALLERS = {
    ("census_page", "write_census_page"): Census.report,
    ("series_page", "film_of_series"): TimeSeries.view,
    ("report", "write_report"): Record.report,
    ("series_page", "write_series_page"): TimeSeries.report,
    ("widget.view", "View"): Record.view,
}


@pytest.mark.parametrize(("place", "caller"), CALLERS.items())
def test_a_method_finds_its_function(place: tuple[str, str], caller: Callable[..., object]) -> None:
    module, name = place
    assert f'function_of_viewer("{module}", "{name}")(self, ' in getsource(caller)
    found = signature(function_of_viewer(module, name)).parameters
    passed = set(signature(caller).parameters) - {"self", "others", "options"}
    assert passed <= set(found)
