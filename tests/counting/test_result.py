"""A census is read as tables, quantiles, examples and divergences."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import multihead as mh
from multihead.counting.heads_table import CHANCE_COLUMNS, read_metadata, table_to_parquet
from multihead.counting.merge import HEADS_FILE
from multihead.counting.result import Example
from multihead.errors import ArgumentError, InputError, ProbeError
from multihead.models.loading import load
from tests.counting.tiny import jsonl, random_texts

OWN = (
    mh.kinds.Kind("pointed", mh.probes.PROBES["largest_weight"], above_chance=0.1),
    mh.kinds.Kind("earlier", mh.probes.offset_mass(-2), above_chance=None, at_least=0.05),
    mh.kinds.Kind("even", mh.probes.PROBES["entropy"], above_chance=None, of_largest=0.2),
)


@pytest.fixture(scope="module")
def other(model: str, tmp_path_factory: pytest.TempPathFactory) -> mh.Census:
    """A census of the same model on other texts, with fewer probes."""
    folder = tmp_path_factory.mktemp("other")
    file = jsonl(folder / "texts.jsonl", random_texts(20, seed=9, longest=5))
    return mh.census(model, file, out=folder / "out", threads=1, probes=("entropy", "previous_mass"))


def test_it_says_what_was_read(counted: mh.Census) -> None:
    assert (
        repr(counted)
        == f"<Census of tiny-bert: 60 texts, {len(counted.plan.shards)} of {len(counted.plan.shards)} shards>"
    )
    assert counted.counts()["tokens"] == counted.tokens > 60 * 3


def test_the_table_has_a_row_per_head(counted: mh.Census) -> None:
    table = counted.table(sort="entropy", top=3)
    values = [row["entropy"] for row in table.rows]
    assert values == sorted(values, reverse=True)
    assert len(counted.table().rows) == 8
    assert all(row["largest_weight"] <= 1 for row in counted.table(of="max").rows)


def test_heads_are_found_by_their_numbers(counted: mh.Census) -> None:
    best = counted.table(sort="previous_mass").rows[0]
    found = counted.find(previous=(best["previous_mass"], None))
    assert [(each.layer, each.head) for each in found] == [(best["layer"], best["head"])]
    with pytest.raises(ProbeError, match=r"^There is no statistic 'nothing' in the record\. "):
        counted.find(nothing=(0, 1))


@pytest.fixture(scope="module")
def observed(model: str, corpus: str) -> mh.Record:
    """A record of the texts of the census, one after the other."""
    loaded = load(model)
    texts = [json.loads(line)["text"] for line in Path(corpus).read_text("utf-8").splitlines()]
    options = {"probes": (*mh.probes.DEFAULT, "induction_mass", "contribution"), "kinds": OWN}
    with mh.observe(loaded.model, keep="statistics", tokenizer=loaded.tokenizer, **options) as record, torch.no_grad():
        for text in texts:
            loaded.model(**loaded.tokenizer(text, return_tensors="pt"))
    return record


@pytest.fixture(scope="module")
def census(model: str, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> mh.Census:
    """The census of the corpus with a kind of one's own."""
    out = tmp_path_factory.mktemp("kinds") / "out"
    probes = [name for name in mh.probes.DEFAULT if name != "largest_key"]
    wanted = (*probes, "induction_mass", "contribution")
    return mh.census(model, corpus, out=out, shard_bytes=1000, threads=1, probes=wanted, kinds=OWN)


class TestKinds:
    def test_chance_and_its_error_are_those_of_a_record_of_the_same_texts(
        self, census: mh.Census, observed: mh.Record
    ) -> None:
        for mine, record in zip(census.profiles(), observed.profiles(), strict=True):
            assert mine.evidence.keys() == record.evidence.keys()
            assert {"induction_mass", "offset_minus_2_mass"} <= mine.evidence.keys()
            assert "contribution" not in mine.evidence
            for name, found in mine.evidence.items():
                expected = record.evidence[name]
                for field in ("mean", "chance", "standard_error", "num_observations"):
                    one, other = getattr(found, field), getattr(expected, field)
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=f"{name} {field}")
        assert census.heads["blocks"].null_count == len(census.heads)  # there are texts enough

    @pytest.mark.parametrize("shards", [1, 2])
    def test_two_texts_have_the_error_that_they_have_in_a_summary_however_they_are_sharded(
        self, model: str, corpus: str, tmp_path: Path, shards: int
    ) -> None:
        lines, loaded = Path(corpus).read_text("utf-8").splitlines()[:2], load(model)
        for number in range(shards):
            some = lines if shards == 1 else lines[number : number + 1]
            (tmp_path / f"{number}.jsonl").write_text("\n".join(some), "utf-8")
        census = mh.census(model, str(tmp_path / "*.jsonl"), out=tmp_path / "out", threads=1)
        assert (census.texts, len(census.plan.shards)) == (2, shards)
        with mh.observe(loaded.model, keep="summary", tokenizer=loaded.tokenizer) as record, torch.no_grad():
            for line in lines:
                loaded.model(**loaded.tokenizer(json.loads(line)["text"], return_tensors="pt"))
        for found in (census, mh.Census.load(tmp_path / "out")):
            for mine, expected in zip(found.profiles(), record.profiles(), strict=True):
                assert "previous_mass" in mine.evidence
                for name, each in mine.evidence.items():
                    assert bool(each.standard_error.isfinite().all())
                    other = expected.evidence[name].standard_error
                    torch.testing.assert_close(each.standard_error, other, rtol=1e-4, atol=1e-6, msg=name)

    def test_they_are_those_of_a_record_of_the_same_texts(self, census: mh.Census, observed: mh.Record) -> None:
        found = census.kinds()
        expected = observed.kinds()
        assert {each.kind for each in found} >= {"pointed", "earlier", "even"}
        assert list(map(str, found)) == list(map(str, expected))
        for one, other in zip(found, expected, strict=True):
            assert (one.layer, one.head, one.name, one.n) == (other.layer, other.head, other.name, other.n)
            numbers = (one.share, one.chance, one.error)
            assert numbers == pytest.approx((other.share, other.chance, other.error), rel=1e-4)

    def test_some_are_chosen_by_name(self, census: mh.Census) -> None:
        assert {each.kind for each in census.kinds("pointed", "induction")} == {"pointed"}
        with pytest.raises(ArgumentError, match=r"^There is no kind 'late'\. Give some of broad, "):
            census.kinds("late")

    @pytest.mark.parametrize(
        ("kind", "needs"),
        [
            ("duplicate", 'the statistic "duplicate_mass": probes=[..., "duplicate_mass"] of observe or census.'),
            (
                "repeated_induction",
                """texts of repeated random tokens: look --textbook, or add_repeated in observation.textbook. \
The record has numbers for 'induction'.""",
            ),
        ],
    )
    def test_one_that_was_not_counted_is_an_error_and_not_an_empty_list(
        self, census: mh.Census, kind: str, needs: str
    ) -> None:
        with pytest.raises(ProbeError) as caught:
            census.kinds("pointed", kind)
        assert str(caught.value) == f"The record has no numbers for {kind!r}. It needs {needs}"

    def test_one_that_a_census_of_an_earlier_version_lacks_is_an_error(self, other: mh.Census) -> None:
        with pytest.raises(ProbeError) as caught:
            other.kinds("local")
        needs = 'the statistic "near_mass": probes=[..., "near_mass"] of observe or census.'
        assert str(caught.value) == f"The record has no numbers for 'local'. It needs {needs}"

    def test_a_row_of_the_table_has_them_and_the_chance_of_each_mean(
        self, census: mh.Census, observed: mh.Record
    ) -> None:
        for mine, record in zip(census.table().rows, observed.table().rows, strict=True):
            chances = [name for name in mine if name.endswith("_chance")]
            assert {"entropy_chance", "offset_minus_2_mass_chance"} <= set(chances)
            assert "contribution_chance" not in chances
            assert [mine[name] for name in chances] == pytest.approx([record[name] for name in chances], rel=1e-4)
            assert mine["kind"] == record["kind"]
        assert "kind" not in census.table(kinds=False).rows[0]

    def test_heads_are_found_by_kinds_of_ones_own(self, census: mh.Census) -> None:
        named = {(each.layer, each.head) for each in census.kinds("earlier")}
        least = min(each.share for each in census.kinds("earlier"))
        assert {(each.layer, each.head) for each in census.find(earlier=(least, None))} >= named

    def test_they_are_added_to_a_census_that_is_loaded(self, census: mh.Census) -> None:
        loaded = mh.Census.load(census.folder)
        assert not any(each.kind == "pointed" for each in loaded.kinds())
        loaded.add_kinds(*OWN)
        assert loaded.kinds() == census.kinds()
        with pytest.raises(ArgumentError, match=r"^Two kinds are called pointed\."):
            loaded.add_kinds(*OWN)

    def test_a_census_of_three_texts_names_heads_by_blocks_of_queries(self, model: str, tmp_path: Path) -> None:
        file = jsonl(tmp_path / "texts.jsonl", random_texts(3))
        found = mh.census(model, file, out=tmp_path / "out", threads=1, kinds=OWN)
        pointed = found.kinds("pointed")
        assert pointed
        assert all(0 < each.error < each.share / 3 for each in pointed)
        assert found.kinds("even")  # which needs no standard error


def test_tables_of_an_earlier_version_are_read_without_chance(folder: Path, counted: mh.Census, tmp_path: Path) -> None:
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    for file in (out / HEADS_FILE, *(out / "shards").iterdir()):
        table = pq.read_table(file)
        file.write_bytes(table_to_parquet(table.drop_columns(list(CHANCE_COLUMNS)), read_metadata(table.schema)))
    sentence = (
        "The chance of every statistic is unknown, so no kind can be told from it. Count the corpus again: shards of "
        "earlier versions lack it, and so do probes without a chance."
    )
    for left in (HEADS_FILE, "no file"):
        old = mh.Census.load(out)
        assert old.table().rows == counted.table(kinds=False).rows
        with pytest.raises(ProbeError, match=f"^{re.escape(sentence)}$"):
            old.kinds()
        (out / left).unlink(missing_ok=True)  # then the shards are merged


def test_quantiles_are_between_the_extremes(counted: mh.Census) -> None:
    values, counts = counted.histogram(1, 2, "entropy")
    assert counts.sum() == counted.tokens
    found = [counted.quantile(1, 2, "entropy", share) for share in (0, 0.25, 0.5, 0.75, 1)]
    assert found == sorted(found)
    row = counted.heads.slice(counted.row_of_head[1, "entropy", 2], 1).to_pylist()[0]
    assert (found[0], found[-1]) == pytest.approx((row["minimum"], row["maximum"]), rel=0.01)
    assert np.average(values, weights=counts) == pytest.approx(row["mean"], rel=0.01)
    with pytest.raises(ArgumentError, match=r"^share is 2\. Give a number from 0 to 1\.$"):
        counted.quantile(1, 2, "entropy", 2)


def test_an_example_leads_to_its_text(counted: mh.Census) -> None:
    found = counted.top(1, 3, "previous_mass")
    assert [each.value for each in found] == sorted((each.value for each in found), reverse=True)
    for example in found:
        text = counted.text(example)
        assert example.token in (text if not example.token.startswith("[") else "[CLS] [SEP]")
        assert f"»{example.token}«".replace(" ", "") in str(example).replace(" ", "")


def test_special_tokens_stand_apart_in_an_example(counted: mh.Census) -> None:
    whole = next(each for each in counted.top(0, 0, "entropy") if each.tokens[0] == "[CLS]" and each.position)
    assert whole.special == [token in ("[CLS]", "[SEP]") for token in whole.tokens]
    value, line = str(whole).split("  ")
    assert value == f"{whole.value:.3f}"
    assert line.startswith(("[CLS] w", "[CLS] »w"))
    joined = Example(
        0.5, 0, 0, 1, "said", 0, "<s>", 0, ["<s>", "said", "Ann", "</s>"], [0.5] * 4, [True, False, False, True]
    )
    assert str(joined) == "0.500  <s> »said«Ann </s>"


def test_a_text_that_is_gone_is_an_error(model: str, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "texts.jsonl", ["w1 w2", "w3"])
    found = mh.census(model, file, out=tmp_path / "out", probes="entropy", threads=1)
    example = next(each for each in found.top(0, 0, "entropy") if each.text == 1)
    jsonl(tmp_path / "texts.jsonl", ["w1 w2"])
    with pytest.raises(InputError, match=r"^The text is no longer in the corpus\. Keep the corpus as it was\.$"):
        found.text(example)
    Path(file).unlink()
    with pytest.raises(InputError, match=r"^The text cannot be read: .* Keep the corpus where it was\.$"):
        found.text(example)


class TestNames:
    def test_a_statistic_that_is_not_there_is_an_error(self, other: mh.Census) -> None:
        sentence = "There is no statistic 'self_mass' in the census. Give one of entropy, previous_mass."
        with pytest.raises(ProbeError, match=f"^{re.escape(sentence)}$"):
            other.top(0, 0, "self_mass")

    def test_a_head_that_is_not_there_is_an_error(self, counted: mh.Census) -> None:
        with pytest.raises(
            ArgumentError, match=r"^There is no head 7 of layer 0 with entropy\. See census\.table\(\)\.$"
        ):
            counted.quantile(0, 7, "entropy", 0.5)
        with pytest.raises(ArgumentError, match=r"^There is no head 0 of layer 9\. See census\.table\(\)\.$"):
            counted.nearest(9, 0)


class TestDivergence:
    def test_a_census_is_the_same_as_itself(self, counted: mh.Census) -> None:
        found = counted.changed(counted)
        assert len(found) == 8
        assert {each.divergence for each in found} == {0.0}

    def test_heads_are_ranked_by_how_much_their_distributions_differ(
        self, counted: mh.Census, other: mh.Census
    ) -> None:
        found = counted.changed(other)
        values = [each.divergence for each in found if not each.is_clear]  # clear changes beyond chance come first
        assert values == sorted(values, reverse=True)
        assert 0 < values[-1] <= values[0] <= math.log(2)
        first = found[0]
        assert set(first.divergences) == {"entropy", "previous_mass"}
        assert first.before["entropy"] == pytest.approx(
            counted.layers[first.layer].summary("mean")["entropy"][first.head].item()
        )
        assert first.row()["entropy_after"] == first.after["entropy"]
        assert str(first).startswith(f"L{first.layer} H{first.head}: {first.divergence:.3f} nats; ")

    def test_it_is_that_of_the_two_histograms(self, counted: mh.Census, other: mh.Census) -> None:
        """In coarse bins: from 2^-10 on, eight per factor of two, of the quotient by chance, which differs here."""
        one = next(each for each in counted.changed(other) if (each.layer, each.head) == (1, 2))
        shares: list[dict[int, float]] = []
        for census in (counted, other):
            found: dict[int, float] = {}
            chance = census.table().rows[6]["entropy_chance"]
            for number, count in zip(*census.histogram(1, 2, "entropy"), strict=True):
                value = number / chance
                place = math.floor(8 * math.log2(value * 1024)) + 1 if value >= 2**-10 else 0
                found[place] = found.get(place, 0.0) + float(count)
            shares.append({place: count / sum(found.values()) for place, count in found.items()})
        total = 0.0
        for place in {*shares[0], *shares[1]}:
            p, q = (each.get(place, 0.0) for each in shares)
            middle = (p + q) / 2
            total += sum(each * math.log(each / middle) / 2 for each in (p, q) if each)
        assert one.divergences["entropy"] == pytest.approx(total, abs=1e-12)

    def test_two_samples_of_one_corpus_with_texts_of_other_lengths_name_no_head(
        self, model: str, tmp_path: Path
    ) -> None:
        censuses = []
        for seed, longest in ((3, 20), (4, 30)):
            file = jsonl(tmp_path / f"{seed}.jsonl", random_texts(40, seed=seed, longest=longest))
            censuses.append(mh.census(model, file, out=tmp_path / str(seed), threads=1))
        before, after = censuses
        levels = [census.table().rows[0]["effective_keys_chance"] for census in censuses]
        assert levels[1] > 1.3 * levels[0]
        found = before.changed(after)
        assert [each for each in found if each.is_clear] == []
        assert (
            f"(chance {levels[0]:.1f})"
            in next(each for each in found if (each.layer, each.head) == (0, 0)).values("effective_keys")[0]
        )

    def test_the_nearest_heads_are_those_of_the_smallest_divergence(self, counted: mh.Census) -> None:
        found = counted.nearest(0, 1, top=7)
        values = [each.divergence for each in found]
        assert len(found) == 7
        assert values == sorted(values)
        assert (0, 1) not in {(each.layer, each.head) for each in found}

    def test_models_with_other_heads_are_an_error(self, counted: mh.Census, model: str, tmp_path: Path) -> None:
        file = jsonl(tmp_path / "texts.jsonl", ["w1 w2"])
        small = mh.census(model, file, out=tmp_path / "out", layers=0, threads=1)
        with pytest.raises(ArgumentError, match=r"^The two have different heads: 8 and 4\. "):
            counted.changed(small)


class TestLoading:
    def test_a_census_that_still_runs_is_that_of_its_finished_shards(
        self, counted: mh.Census, folder: Path, tmp_path: Path
    ) -> None:
        copy = Path(shutil.copytree(folder, tmp_path / "out"))
        for file in (copy / HEADS_FILE, counted.plan.shard_file(copy, 1)):
            file.unlink()
        found = mh.Census.load(copy)
        assert found.missing == [1]
        assert 0 < found.texts < 60

    def test_a_folder_without_a_census_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"holds no census\. Run multihead census with --out first\.$"):
            mh.Census.load(tmp_path)
