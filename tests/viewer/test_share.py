"""A shared view: every value is the viewer's own, the file keeps to its size, and tokens stay text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multihead import masks
from multihead.errors import ArgumentError
from multihead.record.texts import Text
from multihead.viewer.payload import RecordedRun, describe_run, describe_sample
from multihead.viewer.share import SharedHead, name_shared_file, shared_page
from multihead.viewer.tiles import fine_tile, weights_of_queries
from tests.viewer.page import Page
from tests.viewer.serving import Served, serving
from tests.viewer.watching import watch

LENGTH = 300
HOSTILE = "</script><script>window.broken=1</script>"


def run(seed: int = 0) -> RecordedRun:
    record = watch(LENGTH, mask=masks.Causal(), heads=2, layers=2, seed=seed)
    record.set_text(Text(None, [HOSTILE, *("word" for _ in range(LENGTH - 1))], [True, *[False] * (LENGTH - 1)]))
    return RecordedRun(f"run {seed}.safetensors", record)


RUN = run()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(RUN, run(1)) as server:
        yield server


def values(page: Page, name: str) -> np.ndarray:
    """Decode an array of a file: four planes of bytes, the last byte of each little-endian float first."""
    assert page.arrays[name]["coding"] == "float32"
    planes = page.unpacked(name).numpy().astype(np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes[::-1].T).view("<f4").reshape(page.arrays[name]["shape"])


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == np.ascontiguousarray(other, "<f4").tobytes()


def a_head(layer: int, head: int) -> SharedHead:
    one = RUN.record.layers[layer].sample(0)

    def tile(level: int, row: int, column: int, *, sink: bool) -> Any:
        return fine_tile(one, head, level, row=row, column=column, sink=sink)

    return SharedHead(0, layer, head, one, tile)


def written(*heads: SharedHead, fragment: str = "#a=L1H0&n=40&x=20&y=30&q=50", **given: Any) -> bytes:
    described_run = {"runs": [describe_run(RUN)], "samples": [describe_sample(RUN, 0)]}
    return shared_page(
        heads, small_maps_of_layer=lambda run, layer: None, fragment=fragment, lang="en", **described_run | given
    )


def test_every_tile_of_a_head_is_in_the_file_bit_for_bit_if_it_fits() -> None:
    page = Page(written(a_head(1, 0)))
    one = RUN.record.layers[1].sample(0)
    names = {name for name in page.packs if re.fullmatch(r"0/0/1/0 \d+ \d+ \d+ [01]", name)}
    assert {int(name.split()[1]) for name in names} == {0, 1, 2, 3}
    whole = {f"0/0/1/0 0 {row} {column} 1" for row in range(2) for column in range(2)}
    assert {name for name in names if name.split()[1] == "0"} == whole
    assert {name for name in names if name.split()[1] == "1"} >= {"0/0/1/0 1 0 0 0", "0/0/1/0 1 0 0 1"}
    for name in names:
        level, row, column, sink = map(int, name.split()[1:])
        assert same(values(page, name), fine_tile(one, 0, level, row=row, column=column, sink=bool(sink))), name


def test_the_weights_of_the_queries_around_the_chosen_one_are_in_the_file() -> None:
    page = Page(written(a_head(1, 0)))
    rows = page.arrays["0/0/1/0 rows"]
    assert rows["first"] <= 50 < rows["first"] + rows["shape"][0]
    assert same(
        values(page, "0/0/1/0 rows")[50 - rows["first"]],
        weights_of_queries(RUN.record.layers[1].sample(0), 0, slice(50, 51))[0],
    )


def test_a_smaller_limit_leaves_out_finer_levels_and_keeps_the_single_weights_in_view() -> None:
    most = len(written(a_head(1, 0))) * 93 // 100
    page = written(a_head(1, 0), max_bytes=most)
    assert len(page) <= most
    levels = {int(name.split()[1]) for name in Page(page).packs if name.count(" ") == 4}
    whole = {name.split()[1] for name in Page(page).packs if name.endswith(" 1 1 1")}
    assert 0 in levels
    assert "0" not in whole
    assert b"in blocks of" in page


def test_a_view_that_does_not_fit_is_refused_with_its_size() -> None:
    sentence = (
        r"This view needs [\d.]+ [kM]B, and a shared file holds at most 400 kB\. Zoom in, or share one head at a time\."
    )
    with pytest.raises(ArgumentError, match=f"^{sentence}$"):
        written(a_head(1, 0), max_bytes=400_000)


def test_tokens_and_addresses_cannot_become_markup() -> None:
    page = written(a_head(1, 0), fragment=f"#a=L1H0&c={HOSTILE}&unknown=1&x=1e9&n=40")
    assert page.count(b"<script") == 3 + len(Page(page).packs)
    assert b"<script>window" not in page
    place = Page(page).held["place"]
    assert place == "#a=L1H0&c=%3C%2Fscript%3E%3Cscript%3Ewindow.broken%3D1%3C%2Fscript%3E&n=40"


def test_a_file_is_named_after_the_record_and_the_heads() -> None:
    assert name_shared_file("../a model", [a_head(1, 0), a_head(0, 1)]) == "a-model-L1H0-L0H1"
    assert name_shared_file("字", []) == "view"


def test_the_server_returns_the_file_with_two_heads_of_two_records(served: Served) -> None:
    answer = served.get("api/runs/0/samples/0/share?a=1.0&b=0.1&run=1&place=%23a%3DL1H0%26b%3DL0H1%26v%3Dab%26n%3D30")
    assert answer.status == 200
    assert answer.headers["content-disposition"] == 'attachment; filename="ModuleList-L1H0-L0H1.html"'
    page = Page(answer.body)
    assert page.held["place"] == "#a=L1H0&b=L0H1&v=ab&n=30&rb=1"
    assert {name.split()[0] for name in page.packs if name.endswith(" rows")} == {"0/0/1/0", "1/0/0/1"}
    assert [each["name"] for each in page.view["runs"]] == ["run 0.safetensors", "run 1.safetensors"]
    assert "runs/1/samples/0/layers/0/maps" in page.packs
    assert values(page, "runs/0/samples/0/layers/1/maps").shape[0] == 2


def test_the_server_returns_a_smaller_file_on_request(served: Served) -> None:
    address = "api/runs/0/samples/0/share?a=1.0&place=%23a%3DL1H0%26n%3D40%26x%3D20%26y%3D30"
    most = len(served.get(address).body) * 93 // 100
    assert len(served.get(f"{address}&most={most}").body) <= most
    assert served.get(f"{address}&most=20000001").status == 404


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("a=7.0", "There is no layer 7. Give a number from 0 to 1."),
        ("a=1.9", "There is no head 9. Give a number from 0 to 1."),
        ("", "The layer is ''. Give a whole number from 0 to 1."),
    ],
)
def test_a_head_that_does_not_exist_is_refused(served: Served, given: str, sentence: str) -> None:
    answer = served.get(f"api/runs/0/samples/0/share?{given}")
    assert answer.status in (400, 404)
    assert answer.error == sentence
