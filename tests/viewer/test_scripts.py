"""What Python and the scripts of the pages both hold is the same: colours, flags of tokens, sizes, limits."""

from __future__ import annotations

import re

import pytest

from multihead.models.tokens import CONTINUATION_MARK
from multihead.record.plots import _COLOURS_OF_SCALE
from multihead.viewer import payload
from multihead.viewer.downloads import MAX_WEIGHTS_PER_DOWNLOAD
from multihead.viewer.levels import TILE_SIDE
from multihead.viewer.page import read_package_file
from multihead.viewer.tokens import PIECE_FLAG, SPECIAL_FLAG, UNKNOWN_FLAG


@pytest.mark.parametrize(
    ("script", "constant", "value"),
    [
        ("shared/tokens.js", "SPECIAL_FLAG", SPECIAL_FLAG),
        ("shared/tokens.js", "UNKNOWN_FLAG", UNKNOWN_FLAG),
        ("shared/tokens.js", "PIECE_FLAG", PIECE_FLAG),
        ("shared/tokens.js", "CONTINUATION_MARK", f"'{CONTINUATION_MARK}'"),
        ("view/tiles.js", "TILE_SIDE", TILE_SIDE),
        ("view/head.js", "MAX_WEIGHTS_PER_DOWNLOAD", f"1 << {MAX_WEIGHTS_PER_DOWNLOAD.bit_length() - 1}"),
        ("offline/comparisons.js", "MAX_LOOKING_HEADS", payload.MAX_LOOKING_HEADS),
        ("offline/comparisons.js", "MAX_LOOKING_QUERIES", payload.MAX_LOOKING_QUERIES),
    ],
)
def test_a_constant_is_that_of_python(script: str, constant: str, value: object) -> None:
    source = read_package_file(f"viewer/static/{script}")
    assert re.findall(rf"^(?:export )?const {constant} = (.*?);", source, re.MULTILINE) == [str(value)]


def test_a_drawn_map_has_the_colours_of_the_pages() -> None:
    source = read_package_file("viewer/static/shared/colour.js")
    (light,) = re.findall(r"ink: \{\s*light: '([^']*)'", source)
    assert light == _COLOURS_OF_SCALE


def test_a_weight_of_0_has_the_colour_of_the_paper_in_both_themes() -> None:
    paper = re.findall(r"--paper: (#\w+);", read_package_file("viewer/static/shared/base.css"))
    first = re.findall(r"(?:light|dark): '(#\w+)", read_package_file("viewer/static/shared/colour.js"))[:2]
    assert [each.lower() for each in first] == paper
