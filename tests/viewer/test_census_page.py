"""The page of a census holds the census's numbers and examples, and stays under its limit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import multihead as mh
from multihead.counting.heads_table import CHANCE_COLUMNS, add_missing_columns
from multihead.errors import ArgumentError
from multihead.viewer import write_census_page
from multihead.viewer.census_page import BARS_PER_HISTOGRAM
from tests.counting.tiny import jsonl, random_texts, saved_bert


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[mh.Census, mh.Census]:
    """Two censuses of one model, on other texts."""
    folder = tmp_path_factory.mktemp("pages")
    model = saved_bert(folder / "tiny-bert")
    files = [jsonl(folder / f"{seed}.jsonl", random_texts(12, seed=seed)) for seed in (0, 1)]
    one, other = (
        mh.census(model, file, out=folder / f"it's {place}", threads=1, probes=("entropy", "previous_mass"))
        for place, file in enumerate(files)
    )
    return one, other


def data_of(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_the_numbers_and_the_distribution_of_every_head(
    counted: tuple[mh.Census, mh.Census], tmp_path: Path
) -> None:
    one, _ = counted
    data = data_of(one.report(tmp_path / "page.html"))
    assert [each["id"] for each in data["columns"]] == ["entropy", "previous_mass"]
    assert [each["heads"] for each in data["layers"]] == [4, 4]
    for of in ("mean", "p95"):
        expected = [row["previous_mass"] for row in one.table(of=of).rows]
        assert data["runs"][0]["numbers"]["previous_mass"][of] == pytest.approx(expected, rel=1e-3)
    bars, (low, high) = data["runs"][0]["bars"]["entropy"][5], data["axes"]["entropy"][5]
    values, counts = one.histogram(1, 1, "entropy")
    assert len(bars) == BARS_PER_HISTOGRAM
    assert sum(bars) == pytest.approx(1, abs=1e-3)
    middle = low + (high - low) / 2
    assert sum(bars[: BARS_PER_HISTOGRAM // 2]) == pytest.approx(counts[values < middle].sum() / counts.sum(), abs=1e-3)


def test_the_page_has_the_chance_of_every_mean_and_the_kinds_of_every_head(
    counted: tuple[mh.Census, mh.Census], tmp_path: Path
) -> None:
    one, _ = counted
    kind = mh.kinds.Kind("pointed", mh.probes.PROBES["entropy"], above_chance=None, of_largest=0.1)
    mine = mh.Census.load(one.folder)
    mine.add_kinds(kind)
    data = data_of(mine.report(tmp_path / "page.html"))
    rows = mine.table().rows
    (run,) = data["runs"]
    assert run["chance"].keys() == {"entropy", "previous_mass"}
    for name, levels in run["chance"].items():
        assert levels == pytest.approx([row[f"{name}_chance"] for row in rows], rel=1e-3)
    assert ["+".join(each) for each in run["kinds"]] == [row["kind"] for row in rows]
    assert any("pointed" in each for each in run["kinds"])
    legend = {each["id"]: each["measured"] for each in data["legend"]}
    assert (legend["pointed"], legend["previous"], legend["induction"], legend["local"]) == (True, True, False, False)


def test_the_first_screen_has_the_findings_and_the_heads_of_each_kind(
    counted: tuple[mh.Census, mh.Census], tmp_path: Path
) -> None:
    pointed = mh.kinds.Kind("pointed", mh.probes.PROBES["entropy"], above_chance=None, of_largest=0.1)
    mine = mh.Census.load(counted[0].folder)
    mine.add_kinds(pointed)
    data = data_of(mine.report(tmp_path / "page.html", lang="zh"))
    sentences = [(each.layer, each.head, "entropy", each.sentence, each.count) for each in mine.findings(lang="zh")]
    assert sentences
    assert [tuple(each.values()) for each in data["findings"]] == sentences
    (found,) = [each for each in data["runs"][0]["found"] if each["kind"] == "pointed"]
    heads = mine.kinds("pointed")
    assert found["number"] == len(heads)
    assert [(each["layer"], each["head"], each["share"]) for each in found["best"]] == [
        (each.layer, each.head, pointed.format_value(each.share)) for each in heads[:3]
    ]


def test_a_head_opens_on_the_statistic_of_its_kind_or_on_the_share_farthest_above_chance(
    counted: tuple[mh.Census, mh.Census], tmp_path: Path
) -> None:
    mine = mh.Census.load(counted[0].folder)
    assert all(each.kind == "broad" for each in mine.kinds())
    data = data_of(mine.report(tmp_path / "page.html"))
    broad = ["broad" in names for names in data["runs"][0]["kinds"]]
    assert data["own"] == ["entropy" if each else "previous_mass" for each in broad]
    mine.add_kinds(mh.kinds.Kind("turned", mh.probes.PROBES["previous_mass"], above_chance=None, at_least=0.0, rank=-1))
    assert data_of(mine.report(tmp_path / "page.html"))["own"] == ["previous_mass"] * 8


def test_the_page_of_a_census_of_an_earlier_version_has_neither(
    counted: tuple[mh.Census, mh.Census], tmp_path: Path
) -> None:
    one, _ = counted
    old = replace(one, heads=add_missing_columns(one.heads.drop_columns(list(CHANCE_COLUMNS))))
    (run,) = data_of(old.report(tmp_path / "page.html"))["runs"]
    assert (run["chance"], run["kinds"]) == ({}, [])


def test_the_examples_are_those_of_the_census_and_their_command_reads_the_text(
    counted: tuple[mh.Census, mh.Census], tmp_path: Path
) -> None:
    one, _ = counted
    data = data_of(one.report(tmp_path / "page.html"))
    example = one.top(1, 2, "previous_mass")[0]
    value, place, position, key, key_token, start, tokens, values = data["examples"][0]["previous_mass"][6][0]
    assert place == f"{example.shard}:{example.text}"
    assert (position, key, start) == (example.position, example.key, example.start)
    assert data["words"][key_token] == example.key_token
    assert "".join(data["words"][token] for token in tokens) == "".join(example.tokens)
    assert {data["words"][token] for token in data["special"]} == {"[CLS]", "[SEP]"}
    assert value == pytest.approx(example.value, rel=1e-3)
    assert values[position - start] == value
    before, between, after = data["runs"][0]["command"]
    folder = str(one.folder).replace("'", "'\"'\"'")
    assert before == f"multihead census '{folder}' --read "
    assert re.fullmatch(r" \| multihead look \S*tiny-bert --text - --tokens 48 --record ", between)
    assert after == " && multihead view "


def test_two_censuses_are_on_one_page_with_their_divergences(
    counted: tuple[mh.Census, mh.Census], tmp_path: Path
) -> None:
    one, other = counted
    data = data_of(write_census_page(one, tmp_path / "page.html", other, lang="zh"))
    found = {(each.layer, each.head): each for each in one.changed(other)}
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    assert data["findings"] == []  # samples of one corpus
    assert data["divergence"][""] == pytest.approx([found[head].divergence for head in heads], rel=1e-3)
    assert data["divergence"]["entropy"] == pytest.approx(
        [found[head].divergences["entropy"] for head in heads], rel=1e-3
    )
    assert data_of(one.report(tmp_path / "same.html", one))["findings"] == []
    means = data["runs"][1]["numbers"]["entropy"]["mean"]
    assert means == pytest.approx([found[head].after["entropy"] for head in heads], rel=1e-3)


def test_a_limit_leaves_out_the_weaker_examples_first(counted: tuple[mh.Census, mh.Census], tmp_path: Path) -> None:
    one, _ = counted
    whole = one.report(tmp_path / "whole.html")
    limit = whole.stat().st_size - 1000
    page = one.report(tmp_path / "page.html", max_bytes=limit)
    assert page.stat().st_size <= limit
    data = data_of(page)
    assert data["kept"] == 4 == max(len(each) for each in data["examples"][0]["entropy"])
    assert data["examples"][0]["entropy"][0][0][0] == data_of(whole)["examples"][0]["entropy"][0][0][0]
    with pytest.raises(
        ArgumentError,
        match=r"^max_bytes is 1,000, and this page needs [\d,]+ bytes without any example\. "
        r"Increase max_bytes, or count fewer statistics\.$",
    ):
        one.report(tmp_path / "none.html", max_bytes=1000)
    assert not (tmp_path / "none.html").exists()
