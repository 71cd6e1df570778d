"""The viewer over HTTP: every address, exact numbers, error sentences, many requests at once."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from multihead import masks
from multihead.observation.record import Record
from multihead.probes.blocks import CancelledError
from multihead.record.texts import Text
from multihead.viewer import routes
from multihead.viewer.payload import RecordedRun
from tests.viewer.serving import TOKEN, Served, serving
from tests.viewer.watching import block_means, watch

LENGTH = 300
SAMPLE = "api/runs/0/samples/0"
HEAD = f"{SAMPLE}/heads/1/0"
TOKENS = ["=1+1", "</script><script>alert(1)</script>", *(f"t{index}" for index in range(2, LENGTH))]


@pytest.fixture(scope="module")
def record() -> Record:
    seen = watch(LENGTH, layers=2, lengths=(LENGTH, 41), mask=masks.Causal())
    seen.set_text(Text(tokens=TOKENS, special=[True] + [False] * (LENGTH - 1)))
    return seen


@pytest.fixture(scope="module")
def served(record: Record) -> Iterator[Served]:
    other = watch(LENGTH, layers=2, mask=masks.Causal(), seed=1)
    statistics = watch(30, layers=2, keep="statistics")
    runs = (
        RecordedRun("a.safetensors", record),
        RecordedRun("b.safetensors", other),
        RecordedRun("c.safetensors", statistics),
    )
    with serving(*runs, lang="zh") as found:
        yield found


def test_the_page_and_its_files_are_served(served: Served) -> None:
    page = served.get("")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert served.get("static/view/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert served.get("static/shared/dom.js").status == 200
    assert served.request(f"/{TOKEN}").headers["location"] == f"/{TOKEN}/"


@pytest.mark.parametrize(
    "path",
    [
        "static/view/../../server.py",
        "static/view/index.html",
        "static/census/page.js",
        "static/../server.py",
        "static/..%2f..%2fserver.py",
        "static/%2e%2e/server.py",
        "static//etc/passwd",
        "static/view/none.js",
        "static/view/",
        "static/",
        "..%2f..%2fserver.py",
        "api",
        "api/runs/0/samples",
        "api/runs/0/samples/0/heads/0/0/",
    ],
)
def test_no_other_file_and_no_other_address_is_served(served: Served, path: str) -> None:
    answer = served.get(path)
    assert answer.status == 404
    assert answer.error in (
        "The page has no such file. Open the address that `multihead view` printed.",
        "The viewer has nothing at this address. Open the address that `multihead view` printed.",
    )


def test_the_heads_over_all_texts_are_those_of_the_record() -> None:
    record = watch(40, heads=2, lengths=(40, 12))
    with serving(RecordedRun("a.safetensors", record)) as served:
        body = served.get("api/runs/0/texts").json
    assert body["texts"] == 2
    assert [one["sentence"] for one in body["findings"]] == [one.sentence for one in record.findings()]


def test_the_view_lists_the_runs(served: Served) -> None:
    body = served.get("api/view").json
    assert body["lang"] == "zh"
    assert [run["name"] for run in body["runs"]] == ["a.safetensors", "b.safetensors", "c.safetensors"]
    assert [run["keep"] for run in body["runs"]] == ["all", "all", "statistics"]
    assert body["runs"][0]["samples"] == [
        {"number": 1, "queries": LENGTH, "keys": LENGTH, "opening": "</script><script>alert(1)</script> t2 t3"},
        {"number": 2, "queries": 41, "keys": 41, "opening": ""},
    ]


def test_a_sample_is_described_and_a_hostile_token_is_plain_json(served: Served) -> None:
    answer = served.get(SAMPLE)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["texts"][0]["shown"] == TOKENS
    assert [len(layer["blocks"]) for layer in answer.json["layers"]] == [4, 4]
    assert len(answer.json["kinds"]) == 4
    assert served.get(SAMPLE).body == answer.body


def test_a_tile_of_every_level_is_exact(served: Served, record: Record) -> None:
    sample = record.layers[1].sample()
    for level in range(4):
        for sink in (True, False):
            expected = block_means(sample, 0, level, sink=sink)
            for row in range(-(-len(expected) // 256)):
                for column in range(-(-len(expected) // 256)):
                    path = f"{HEAD}/tile?level={level}&row={row}&column={column}&sink={int(sink)}"
                    found = torch.from_numpy(served.get(path).floats.copy()).double()
                    part = expected[256 * row : 256 * (row + 1), 256 * column : 256 * (column + 1)]
                    assert_close(found, part, rtol=2e-5, atol=1e-8, equal_nan=True)


def test_a_single_weight_is_the_records_to_the_last_bit(served: Served, record: Record) -> None:
    expected = record.layers[1].weights(0, queries=slice(7, 8))[0].numpy()
    row = served.get(f"{HEAD}/row?query=7")
    assert row.headers["x-shape"] == str(LENGTH)
    np.testing.assert_array_equal(row.floats[:8], expected[:8])
    assert np.isnan(row.floats[8:]).all()
    tile = served.get(f"{HEAD}/tile?level=0&row=0&column=0").floats
    np.testing.assert_allclose(tile[7, :8], expected[:8], rtol=1e-5)


def test_two_runs_and_two_samples_are_apart(served: Served) -> None:
    path = "api/runs/{}/samples/{}/heads/1/0/tile?level=0&row=0&column=0"
    found = [served.get(path.format(*place)).floats for place in ((0, 0), (1, 0), (0, 1))]
    assert [each.shape for each in found] == [(256, 256), (256, 256), (41, 41)]
    assert not np.array_equal(found[0], found[1], equal_nan=True)


def test_small_maps_have_at_most_64_cells_a_side(served: Served, record: Record) -> None:
    answer = served.get(f"{SAMPLE}/layers/1/maps")
    found = answer.floats
    assert (found.shape, answer.headers["x-block"]) == ((2, 38, 38), "8,8")
    expected = block_means(record.layers[1].sample(), 1, 3)
    assert_close(torch.from_numpy(found[1].copy()).double(), expected, rtol=2e-5, atol=1e-8, equal_nan=True)


def test_levels_of_a_short_text_are_ready(served: Served) -> None:
    assert served.get(f"{SAMPLE}/levels").json == {"state": "ready", "done": 0, "total": 0, "inMemory": False}


def test_the_table_is_the_records(served: Served, record: Record) -> None:
    answer = served.get(f"{SAMPLE}/table.csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="heads-0.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.body.decode(), newline="")))
    assert [(row["layer"], row["head"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    means = record.layers[1].sample().means
    assert float(rows[3]["entropy"]) == float(means["entropy"][1])
    assert float(served.get(f"{SAMPLE}/table.json").json[3]["entropy"]) == float(means["entropy"][1])


def test_weights_are_exported_with_safe_tokens(served: Served, record: Record) -> None:
    answer = served.get(f"{HEAD}/weights.csv?queries=3:5&keys=0:6")
    assert answer.headers["content-disposition"] == 'attachment; filename="weights-0-L1H0.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.body.decode(), newline="")))
    assert len(rows) == 12
    assert rows[0]["key_token"] == "'=1+1"
    assert rows[1]["key_token"] == TOKENS[1]
    expected = record.layers[1].weights(0, queries=slice(3, 5), keys=slice(0, 6))
    assert [row["weight"] == "" for row in rows[:6]] == [False] * 4 + [True] * 2
    assert np.float32(rows[3]["weight"]) == expected[0, 3].numpy()
    body = served.get(f"{HEAD}/weights.json?queries=3:5&keys=0:6").json
    assert body["key_tokens"][0] == "=1+1"
    assert body["weights"][0][4] is None


def test_the_nearest_heads_are_the_records_and_say_how_many_queries_were_looked_at(
    served: Served, record: Record
) -> None:
    body = served.get(f"{HEAD}/nearest?top=2").json
    expected = record.nearest(1, 0, top=2)
    assert body == [
        {"layer": each.layer, "head": each.head, "divergence": each.divergence, "queries": LENGTH} for each in expected
    ]
    assert len(served.get(f"{HEAD}/nearest").json) == 3  # all others


def test_the_divergence_of_a_head_of_nan_is_null() -> None:
    seen = watch(20)
    seen.layers[0].samples[0].q.all_rows()[:, 1] = float("nan")  # type: ignore[union-attr]
    with serving(RecordedRun("a", seen)) as served:
        answer = served.get("api/runs/0/samples/0/heads/0/0/nearest")
        assert (answer.status, answer.json) == (200, [{"layer": 0, "head": 1, "divergence": None, "queries": 20}])
        for path in ("", "/table.json", "/table.csv", "/layers/0/maps", "/heads/0/1/row?query=3", "/levels"):
            assert served.get(f"{SAMPLE}{path}").status == 200
        assert served.get(f"{SAMPLE}/heads/0/1/weights.json").json["weights"][0][0] is None


def test_what_changed_between_two_records_is_what_the_record_says(served: Served, record: Record) -> None:
    other = watch(LENGTH, layers=2, mask=masks.Causal(), seed=1)
    body = served.get(f"{SAMPLE}/changed/1?top=3").json
    expected = record.changed(other, sample=0, top=3)
    assert body["every"] == 1
    assert [(each["layer"], each["head"], each["divergence"]) for each in body["heads"]] == [
        (each.layer, each.head, pytest.approx(each.divergence, abs=1e-9)) for each in expected
    ]
    whole = record.changed(other, sample=0)
    mean = sum(each.divergence for each in whole) / len(whole)
    assert body["all"] == len(whole)
    assert body["sentences"][0].endswith(
        f"：{len(whole)} 个头，平均散度 {mean:.3f} 奈特（0 为注意力相同，0.693 为没有共同的键）。"
    )
    changed = sum(each.kinds_before != each.kinds_after for each in whole)
    assert body["sentences"][1] == f"{len(whole)} 个头中有 {changed} 个改变了种类。"
    first, name = body["heads"][0], expected[0].largest_difference
    assert first["kinds"] == [list(expected[0].kinds_before), list(expected[0].kinds_after)]
    assert name is not None
    shown = record.statistic(name)
    assert first["change"]["before"] == shown.text(expected[0].before[name])
    assert first["change"]["label"] > "\u4e00"  # the page is in Chinese
    assert len(served.get(f"{SAMPLE}/changed/1").json["heads"]) == 4


def test_two_models_are_compared_kind_by_kind(record: Record) -> None:
    other = watch(30, layers=3)
    with serving(RecordedRun("a", record), RecordedRun("b", other), lang="zh") as served:
        body = served.get("api/runs/0/samples/1/changed/1").json
    assert (body["heads"], body["sentences"]) == ([], ["a → b：层数或头数不同，因此按种类比较。"])
    expected = record.compared_kinds(other, sample=1, after_sample=0)
    assert [kind for kind, *_ in body["kinds"]] == [one.kind for one in expected]
    assert [row[2].partition("，")[0] for row in body["kinds"]] == [
        f"4 个头中有 {one.number_before} 个" for one in expected
    ]


def test_records_of_other_texts_list_the_heads_that_changed_clearly() -> None:
    before, after = (watch(length, layers=2, mask=masks.Causal(), seed=seed) for length, seed in ((300, 0), (60, 1)))
    runs = (RecordedRun("a", before), RecordedRun("b", after))
    with serving(*runs) as served:
        body = served.get(f"{SAMPLE}/changed/1").json
    clear = [one for one in before.changed(after) if one.is_clear]
    assert (body["sameTexts"], body["all"]) == (False, len(clear))
    assert [(one["layer"], one["head"], one["divergence"]) for one in body["heads"]] == [
        (one.layer, one.head, None) for one in clear
    ]
    assert body["sentences"][0] == (
        f"a → b: different texts, so weights are not compared. {len(clear)} of 4 heads changed beyond chance by 10 "
        "points and three standard errors."
    )


def test_two_records_that_cannot_be_compared_have_a_sentence_in_place_of_the_list() -> None:
    runs = [RecordedRun(name, watch(30, keep="statistics")) for name in "ab"]
    sentence = (
        '0 was observed with keep="statistics", so its weights cannot be computed. '
        'Observe with keep="cpu" or keep="device".'
    )
    with serving(*runs) as served:
        assert served.get(f"{SAMPLE}/changed/1").json == {"every": 1, "heads": [], "error": sentence}


def test_the_heads_that_look_at_a_token_are_ranked_by_their_mean_weight_on_it(served: Served, record: Record) -> None:
    key = 120
    body = served.get(f"{SAMPLE}/looking?key={key}").json
    columns = torch.stack([layer.weights(head)[key:, key] for layer in record.layers for head in range(2)]).double()
    order = columns.mean(-1).argsort(descending=True).tolist()
    assert [(each["layer"], each["head"]) for each in body["heads"]] == [(n // 2, n % 2) for n in order]
    for each, n in zip(body["heads"], order, strict=True):
        assert each["share"] == pytest.approx(float(columns[n].mean()), rel=1e-5)
        best = columns[n].topk(3)
        assert [query for query, _ in each["queries"]] == (best.indices + key).tolist()
        assert [weight for _, weight in each["queries"]] == pytest.approx(best.values.tolist(), rel=1e-5)
    assert body["tokens"][:key] == [0.0] * key
    assert body["tokens"][key:] == pytest.approx(columns.mean(0).tolist(), rel=1e-4)
    assert served.get(f"{SAMPLE}/looking?key=300").status == 404


def test_the_margins_of_a_map_are_what_each_key_receives_and_the_entropy_of_each_query() -> None:
    seen = watch(50, mask=masks.Causal(), probes=("entropy", "received"))
    weights = seen.layers[0].weights(1).double()
    with serving(RecordedRun("a", seen)) as served:
        assert served.get("api/runs/0/samples/0").json["layers"][0]["margins"] == ["received", "entropy"]
        received, entropy = (
            served.get(f"api/runs/0/samples/0/heads/0/1/margins/{name}").floats for name in ("received", "entropy")
        )
        assert served.get("api/runs/0/samples/0/heads/0/1/margins/q").status == 404
    assert received == pytest.approx(weights.mean(0).numpy(), abs=1e-6)
    assert entropy == pytest.approx(-torch.xlogy(weights, weights).sum(-1).numpy(), abs=1e-5)


def test_the_pooled_map_of_a_record_of_statistics_is_its_only_tile() -> None:
    seen = watch(90, mask=masks.Causal(), keep="statistics", probes=("entropy", "pooled_map"))
    with serving(RecordedRun("a", seen)) as served:
        tile = served.get("api/runs/0/samples/0/heads/0/1/tile?level=0&row=0&column=0").floats
    pooled = seen.layers[0].sample().statistics["pooled_map"][1]
    assert np.array_equal(tile, pooled.float().numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        (f"{SAMPLE}/changed/3", 404, "There is no record 3. Give a number from 0 to 2."),
        (f"{SAMPLE}/changed/1?top=0", 404, "There is no count of heads 0. Give a number from 1 to 100."),
        ("api/runs/3/samples/0", 404, "There is no run 3. Give a number from 0 to 2."),
        ("api/runs/x/samples/0", 400, "The run is 'x'. Give a whole number from 0 to 2."),
        ("api/runs/-1/samples/0", 400, "The run is '-1'. Give a whole number from 0 to 2."),
        ("api/runs/0/samples/2", 404, "There is no sample 2. Give a number from 0 to 1."),
        (f"{SAMPLE}/layers/2/maps", 404, "There is no layer 2. Give a number from 0 to 1."),
        (f"{SAMPLE}/heads/0/2/row?query=0", 404, "There is no head 2. Give a number from 0 to 1."),
        (f"{HEAD}/row?query=300", 404, "There is no query 300. Give a number from 0 to 299."),
        (f"{HEAD}/row", 400, "The query is missing. Give a whole number from 0 to 299."),
        (f"{HEAD}/tile?row=0&column=0", 400, "The level is missing. Give a whole number from 0 to 3."),
        (
            f"{HEAD}/tile?level=4&row=0&column=0",
            404,
            "There is no level 4. Give a number from 0 to 3.",
        ),
        (
            f"{HEAD}/tile?level=0&row=2&column=0",
            404,
            "There is no row of tiles 2. Give a number from 0 to 1.",
        ),
        (
            f"{HEAD}/tile?level=1&row=0&column=99999999999",
            404,
            "There is no column of tiles 99999999999. Give a number from 0 to 0.",
        ),
        (
            f"{HEAD}/tile?level={'9' * 6000}&row=0&column=0",
            400,
            f"The level is '{'9' * 39}…'. Give a whole number from 0 to 3.",
        ),
        (f"{HEAD}/tile?level=0&row=0&column=0&sink=no", 400, "sink is 'no'. Give 1 or 0."),
        (f"{HEAD}/nearest?top=101", 404, "There is no count of heads 101. Give a number from 1 to 100."),
        (f"{SAMPLE}/table.xml", 404, "There is no export in the format 'xml'. Request csv or json."),
        (f"{HEAD}/weights.csv?queries=5:3", 400, "The queries are 5:3, of 300. Give a part of 0:300."),
        (
            "api/runs/2/samples/0/heads/0/0/tile?level=0&row=0&column=0",
            404,
            'The record has no q and k, so there is no map. Save the record with keep="all" to see its maps.',
        ),
        (
            "api/runs/2/samples/0/layers/0/maps",
            404,
            'The record has no q and k, so there is no map. Save the record with keep="all" to see its maps.',
        ),
        (
            "api/runs/2/samples/0/heads/0/0/weights.csv",
            404,
            'The record has no q and k, so there is no map. Save the record with keep="all" to see its maps.',
        ),
    ],
)
def test_an_invalid_request_returns_an_error_sentence(served: Served, path: str, status: int, sentence: str) -> None:
    answer = served.get(path)
    assert (answer.status, answer.error) == (status, sentence)


@pytest.mark.parametrize(
    "path",
    [
        "api/runs/{}/samples/0",
        "api/runs/0/samples/{}",
        "api/runs/0/samples/{}/levels",
        f"{SAMPLE}/layers/{{}}/maps",
        f"{SAMPLE}/heads/{{}}/0/row?query=0",
        f"{SAMPLE}/heads/0/{{}}/row?query=0",
        f"{HEAD}/row?query={{}}",
        f"{HEAD}/tile?level={{}}&row=0&column=0",
        f"{HEAD}/tile?level=0&row={{}}&column=0",
        f"{HEAD}/tile?level=0&row=0&column={{}}",
        f"{HEAD}/tile?level=0&row=0&column=0&sink={{}}",
        f"{HEAD}/margins/{{}}",
        f"{HEAD}/weights.{{}}",
        f"{HEAD}/weights.csv?queries={{}}",
        f"{HEAD}/weights.csv?keys={{}}",
        f"{HEAD}/nearest?top={{}}",
        f"{SAMPLE}/table.{{}}",
        f"{SAMPLE}/changed/{{}}",
        f"{SAMPLE}/changed/1?top={{}}",
        f"{SAMPLE}/looking?key={{}}",
        f"{SAMPLE}/share?a={{}}",
        f"{SAMPLE}/share?a=0.{{}}",
        f"{SAMPLE}/share?a=0.0&run={{}}",
        f"{SAMPLE}/share?a=0.0&b={{}}x",
        f"{SAMPLE}/share?a=0.0&most={{}}",
    ],
)
def test_no_value_in_an_address_makes_the_server_fail(served: Served, path: str) -> None:
    for value in ("", "-1", "x", "1.5", "NaN", "inf", "1e3", "0x1", "null", "9" * 12, "9" * 5000, "%00", "%D9%A3x"):
        answer = served.get(path.format(value))
        assert answer.status in (400, 404), (value, answer.status, answer.body[:200])
        assert answer.error.endswith(".")


def test_too_many_weights_are_refused() -> None:
    with serving(RecordedRun("a", watch(1100, heads=1))) as served:
        answer = served.get("api/runs/0/samples/0/heads/0/0/weights.csv")
        assert answer.status == 400
        assert answer.error.startswith(
            "1,100 queries x 1,100 keys are 1,210,000 weights; a download holds at most 1,048,576."
        )


def test_a_record_of_statistics_has_its_numbers_and_no_levels(served: Served) -> None:
    body = served.get("api/runs/2/samples/0").json
    assert body["layers"][0]["blocks"] == []
    assert len(body["metrics"]["entropy"]) == 4
    assert served.get("api/runs/2/samples/0/levels").json == {"state": "none", "done": 0, "total": 0}
    assert served.get("api/runs/2/samples/0/table.csv").status == 200


def test_pooled_maps_that_were_kept_serve_where_q_and_k_were_not() -> None:
    seen = watch(100, keep="statistics", probes=("entropy", "pooled_map"))
    with serving(RecordedRun("a", seen)) as served:
        answer = served.get(f"{SAMPLE}/layers/0/maps")
        assert (answer.floats.shape, answer.headers["x-block"]) == ((2, 50, 50), "2,2")


@pytest.fixture(scope="module")
def long() -> Record:
    return watch(2100, layers=1, mask=masks.Causal())


class TestLongTexts:
    def until_ready(self, served: Served) -> dict[str, Any]:
        for _ in range(600):
            body: dict[str, Any] = served.get(f"{SAMPLE}/levels").json
            if body["state"] == "ready":
                return body
            assert body["state"] == "building"
            time.sleep(0.02)
        raise AssertionError("The levels were never ready.")

    def test_coarse_levels_are_built_next_to_the_file_and_reported(self, long: Record, tmp_path: Path) -> None:
        progress: list[tuple[float, int]] = []
        folder = tmp_path / "run.safetensors.levels"
        run = RecordedRun("run.safetensors", long, folder)
        with serving(run, progress=lambda done, total: progress.append((done, total))) as served:
            assert len(served.get(SAMPLE).json["layers"][0]["blocks"]) == 7
            assert self.until_ready(served) == {"state": "ready", "done": 2, "total": 2, "inMemory": False}
            found = served.get("api/runs/0/samples/0/heads/0/1/tile?level=6&row=0&column=0").floats
            expected = block_means(long.layers[0].sample(), 1, 6)
            assert_close(torch.from_numpy(found.copy()).double(), expected, rtol=2e-5, atol=1e-8, equal_nan=True)
            maps = served.get(f"{SAMPLE}/layers/0/maps").floats
            np.testing.assert_array_equal(maps[1], found)
        assert progress[-1] == (2, 2)
        assert [each.name for each in folder.iterdir()] == ["layer-0.sample-0.safetensors"]
        with serving(run) as served:
            assert served.get(f"{SAMPLE}/levels").json["state"] == "ready"

    def test_until_levels_are_built_the_response_is_to_retry(
        self, long: Record, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(routes.LevelBuilder, "build_strip", lambda self: False)
        with serving(RecordedRun("run.safetensors", long)) as served:
            for path in (f"{SAMPLE}/layers/0/maps", f"{SAMPLE}/heads/0/1/tile?level=6&row=0&column=0"):
                answer = served.get(path)
                assert answer.status == 503
                assert answer.headers["retry-after"] == "1"
                assert answer.error == "The coarse levels are being built, 0 % are done. Try again in a second."

    def test_where_the_folder_cannot_be_written_they_stay_in_memory(self, long: Record, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("no folder")
        with serving(RecordedRun("run.safetensors", long, tmp_path / "file" / "levels")) as served:
            assert served.get(SAMPLE).status == 200
            assert self.until_ready(served)["inMemory"]
            assert served.get(f"{SAMPLE}/heads/0/1/tile?level=6&row=0&column=0").status == 200


def slowly(begun: threading.Event, ended: list[str]) -> Callable[..., Any]:
    """A tile that takes until its client goes away."""

    def tile(*given: Any, cancelled: Callable[[], bool], **options: Any) -> Any:
        begun.set()
        for _ in range(2000):
            if cancelled():
                ended.append("cancelled")
                raise CancelledError
            time.sleep(0.005)
        ended.append("finished")
        return np.zeros((1, 1))

    return tile


def test_a_tile_whose_client_went_away_is_given_up(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), []
    monkeypatch.setattr(routes, "fine_tile", slowly(begun, ended))
    with serving(RecordedRun("a", record)) as served:
        with served.requesting(f"{HEAD}/tile?level=0&row=0&column=0"):
            assert begun.wait(10)
        for _ in range(2000):
            if ended:
                break
            time.sleep(0.005)
        assert ended == ["cancelled"]
        assert served.get(f"{HEAD}/row?query=3").status == 200


def test_requests_at_once_are_all_answered_and_the_same_ones_computed_once(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[Any, ...]] = []
    fine = routes.fine_tile

    def counting(sample: Any, head: int, level: int, *, row: int, column: int, **options: Any) -> Any:
        computed.append((head, level, row, column))
        time.sleep(0.01)
        return fine(sample, head, level, row=row, column=column, **options)

    monkeypatch.setattr(routes, "fine_tile", counting)
    with serving(RecordedRun("a", record)) as served, ThreadPoolExecutor(16) as clients:
        paths = [
            f"{SAMPLE}/heads/0/{head}/tile?level=0&row={row}&column={column}"
            for head in range(2)
            for row in range(2)
            for column in range(2)
        ]
        answers = list(clients.map(served.get, paths * 5))
        assert {answer.status for answer in answers} == {200}
        for place, path in enumerate(paths):
            assert len({answer.body for answer in answers[place :: len(paths)]}) == 1, path
        assert sorted(computed) == sorted(set(computed))


def test_a_failure_is_a_sentence_and_the_server_keeps_running(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise ValueError("secret")

    monkeypatch.setattr(routes, "fine_tile", fail)
    with serving(RecordedRun("a", record)) as served:
        answer = served.get(f"{HEAD}/tile?level=0&row=0&column=0")
        assert answer.status == 500
        assert json.loads(answer.body) == {
            "error": "The viewer failed on this request. Please report the error that its terminal shows."
        }
        assert "content-security-policy" in answer.headers
        assert served.get(f"{HEAD}/row?query=3").status == 200


def test_a_layer_is_requested_and_shown_by_its_number_if_only_some_were_recorded() -> None:
    some = watch(20, layers=3, layers_kept=[1, 2])
    with serving(RecordedRun("run.safetensors", some)) as served:
        body = served.get(SAMPLE).json
        assert [layer["number"] for layer in body["layers"]] == [1, 2]
        rows = served.get(f"{SAMPLE}/table.json").json
        assert [(row["layer"], row["name"]) for row in rows] == [(1, "1"), (1, "1"), (2, "2"), (2, "2")]
        answer = served.get(f"{SAMPLE}/heads/2/1/weights.csv")
        assert answer.headers["content-disposition"] == 'attachment; filename="weights-0-L2H1.csv"'
        weights = served.get(f"{SAMPLE}/heads/2/1/row?query=3").floats
        assert np.array_equal(weights, some.layers[1].weights(1)[3].numpy())
        near = served.get(f"{SAMPLE}/heads/2/1/nearest?top=9").json
        assert {(each["layer"], each["head"]) for each in near} == {(1, 0), (1, 1), (2, 0)}
        refused = served.get(f"{SAMPLE}/layers/0/maps")
        assert (refused.status, refused.error) == (404, "There is no layer 0 in this record. Give one of 1, 2.")


def test_a_record_whose_mask_is_not_defined_shows_its_table_and_refuses_its_maps(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Elsewhere(masks.Mask):
        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return (queries - keys) % 2 == 0

    watch(30, layers=1, mask=Elsewhere()).save(file := tmp_path / "run.safetensors")
    masks.base._MASK_CLASSES.pop("Elsewhere")
    with serving(RecordedRun("run", Record.load(file))) as served:
        assert len(served.get(SAMPLE).json["layers"]) == 1
        assert served.get(f"{SAMPLE}/table.csv").status == 200
        answer = served.get(f"{SAMPLE}/heads/0/1/tile?level=0&row=0&column=0")
        assert answer.status >= 400
        assert answer.error.startswith("The record uses the mask Elsewhere, which is not defined here.")
