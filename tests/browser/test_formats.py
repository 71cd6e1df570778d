"""The scripts of the pages write numbers as Python does, and end a scale of colours where Python does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from multihead.kinds import format_percent
from multihead.probes.probe import Statistic
from multihead.record.plots import end_of_color_scale
from tests.browser.shown import Shown

Opened = Callable[..., Shown]
# No value is halfway between two written numbers: Python rounds such a number to the even digit, and scripts up.
VALUES = [0.0, 0.0004, 0.00951, 0.0994, 0.0996, 0.1234, 0.999, 1.0, 3.14159, 12.346, 987.654, 12345.678, 1e-7, -0.031]


def computed(shown: Shown, module: str, expression: str, values: list[float]) -> list[object]:
    address = f"new URL('static/shared/{module}', document.baseURI)"
    found = shown.page.evaluate(
        f"async values => {{ const module = await import({address}); return {expression}; }}", values
    )
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("number_format", ["share", ".0f", ".1f", ".2f", ".3f", ".2g", ".3g"])
def test_a_statistic_is_written_as_python_writes_it(opened: Opened, number_format: str) -> None:
    column = f"{{ id: 'a', label: 'a', unit: '', about: '', format: '{number_format}' }}"
    expression = f"values.map((_, i) => module.makeStatistic({column}, values).number(i))"
    written = computed(opened(), "statistics.js", expression, VALUES)
    one = Statistic("a", number_format=number_format)
    assert written == [one.number(value) for value in VALUES]


def test_a_share_is_written_as_python_writes_it(opened: Opened) -> None:
    values = [value for value in VALUES if 0 <= value <= 1]
    written = computed(opened(), "numbers.js", "values.map(module.formatPercent)", values)
    assert written == [format_percent(value) for value in values]


def test_a_scale_of_means_ends_where_a_drawn_one_does(opened: Opened) -> None:
    values = [value for value in VALUES if 0 < value <= 1]
    ends = computed(opened(), "colour.js", "values.map(value => module.endOfRootScale(value, false))", values)
    assert ends == pytest.approx([end_of_color_scale(np.array([value]), single=False) for value in values])
