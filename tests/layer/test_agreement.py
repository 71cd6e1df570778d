"""The whole layer against an oracle of its own in float64: sizes, options, masks, padding, dtypes, kernels and modes.

Every example is a whole layer with options of its own, called in one way (a padded batch, step by step with a cache,
...) in one mode: training (no dropout) and evaluation (a dropout that must not act), both with the gradients of
everything that has one, or without gradients. Each is watched too, which may change no bit.

MULTIHEAD_DEEPER=20 tries twenty times as many examples.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_names import EACH
from tests.layer.layer_drawing import WAYS, layer_cases
from tests.layer.layer_ways import assert_the_layer_agrees

EXAMPLES = int(10 * float(os.environ.get("MULTIHEAD_DEEPER", "1")))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", [*EACH, pytest.param(None, id="chosen")])
def test_a_layer_is_what_the_papers_say(kernel: str | None, way: str) -> None:
    @settings(max_examples=EXAMPLES)
    @given(data=st.data())
    def agrees(data: st.DataObject) -> None:
        assert_the_layer_agrees(data.draw(layer_cases(kernel, way)), kernel)

    agrees()
