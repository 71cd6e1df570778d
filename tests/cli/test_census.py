"""The command `census`: what it prints, its options, and how bad input is answered."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from rich.cells import cell_len

import multihead as mh
from multihead.cli import main
from multihead.cli.census import parse_shard
from multihead.errors import InputError
from tests.counting.tiny import bert, jsonl, random_texts, saved_bert, tokenizer


def run(*args: str, **environment: str) -> Result:
    variables = {"COLUMNS": "100", "NO_COLOR": "1", **environment}
    return CliRunner().invoke(main, ["census", *args], prog_name="multihead", env=variables)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_bert(tmp_path_factory.mktemp("census") / "tiny-bert")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return jsonl(tmp_path_factory.mktemp("census") / "texts.jsonl", random_texts(12))


@pytest.fixture(scope="module")
def counted(model: str, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a census of the corpus."""
    out = str(tmp_path_factory.mktemp("census") / "counted")
    assert run(model, "--texts", corpus, "--out", out, "--threads", "1", "--probes", "entropy").exit_code == 0
    return out


def test_it_prints_what_was_read_and_the_heads_with_the_largest_means(model: str, corpus: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    result = run(model, "--texts", corpus, "--out", out, "--threads", "1", "--probes", "entropy,previous_mass")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    found = mh.Census.load(out)
    assert lines[0] == (
        f"tiny-bert: 12 texts with {found.tokens:,} tokens, in 1 of 1 shards "
        "(0 truncated, 0 empty, 0 broken, 0 left out)."
    )
    assert re.fullmatch(rf"This run: {found.tokens:,} tokens in [\d,]+ s, [\d,]+ per second\.", lines[1])
    best = found.table(sort="entropy").rows[0]
    row = next(line for line in lines if line.startswith("entropy (nats)"))
    assert f"L{best['layer']} H{best['head']} {best['entropy']:.2f}" in row
    chance = sum(each["entropy_chance"] for each in found.table().rows) / 8
    assert re.match(rf"entropy \(nats\) +[\d.]+ +{chance:.2f} ", row)
    assert lines[-1] == f'The table: {out}/heads.parquet. In Python: mh.Census.load("{out}")'
    again = run(model, "--texts", corpus, "--out", out, "--probes", "entropy,previous_mass", "--lang", "zh")
    assert again.stdout.splitlines()[0].startswith("tiny-bert：1 个分片中的 1 个，12 篇文本，")
    assert "本次运行" not in again.stdout  # nothing was left to count


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_narrow_terminal_has_fewer_heads_and_whole_names(counted: str, lang: str) -> None:
    narrow, wide = (
        [line.split() for line in run(counted, "--lang", lang, COLUMNS=columns).stdout.splitlines()[:-2]]
        for columns in ("50", "200")
    )
    *_, cut = narrow
    *_, whole = wide
    assert cut == whole[: len(cut)]
    assert 6 < len(cut) < len(whole)  # the name and the unit, two numbers, and heads of three words each
    assert all(sum(map(cell_len, line)) + len(line) - 1 <= 50 for line in narrow)


def test_it_prints_the_heads_of_each_kind_with_their_chance(corpus: str, tmp_path: Path) -> None:
    model = bert()
    for layer in model.encoder.layer:
        torch.nn.init.zeros_(layer.attention.self.query.weight)
    model.save_pretrained(tmp_path / "even")
    tokenizer().save_pretrained(tmp_path / "even")
    given = (str(tmp_path / "even"), "--texts", corpus, "--out", str(tmp_path / "out"), "--threads", "1")
    lines = run(*given, "--probes", "entropy").stdout.splitlines()
    row = next(place for place, line in enumerate(lines) if line.startswith("kind"))
    assert lines[row].split() == ["kind", "heads", "chance", "largest", "shares"]
    assert " ".join(lines[row + 2].split()) == "broad 8 – L0 H0 100 % L0 H1 100 % L0 H2 100 %"
    lines = run(*given, "--probes", "entropy", "--lang", "zh").stdout.splitlines()
    assert any(line.startswith("分散 ") for line in lines)


def test_what_cannot_be_read_is_printed_and_the_status_is_1(model: str, corpus: str, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.parquet")
    out = ("--out", str(tmp_path / "out"))
    result = run(model, "--texts", corpus, "--texts", gone, *out, "--threads", "1", "--probes", "entropy")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"{gone}: No such file or directory",
        "Shards without a result: 1 (1).",
    ]
    again = run(str(tmp_path / "out"))
    assert (again.exit_code, again.stderr) == (1, result.stderr)


def test_the_runs_of_a_split_may_have_several_processes_and_are_merged_once(
    model: str, corpus: str, counted: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for part in ("0/2", "1/2"):
        given = ("--texts", corpus, "--out", str(out), "--threads", "1", "--probes", "entropy", "--shard", part)
        assert run(model, *given, *(("--workers", "2") if part == "0/2" else ())).exit_code == 0
    (out / "heads.parquet").unlink()
    result = run(str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].startswith(f"The table: {out}/heads.parquet.")
    assert (out / "heads.parquet").read_bytes() == (Path(counted) / "heads.parquet").read_bytes()


def test_a_directory_that_cannot_be_written_is_read(
    counted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InputError("heads.parquet cannot be written: Read-only file system.", "Choose another folder.")

    monkeypatch.setattr("multihead.counting.merge.write_atomically", refuse)
    assert run(counted).exit_code == 0
    copy = Path(shutil.copytree(counted, tmp_path / "copy"))
    (copy / "heads.parquet").unlink()
    result = run(str(copy))
    assert (result.exit_code, result.stdout.startswith("tiny-bert: 12 texts")) == (1, True)
    assert result.stderr == "heads.parquet cannot be written: Read-only file system. Choose another folder.\n"
    assert run(str(copy), "--page", str(tmp_path / "page.html")).exit_code == 0


def test_many_problems_are_cut_off(model: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("w1\x1b[31m\n" * 14 + '"w1"\n', encoding="utf-8")
    result = run(model, "--texts", str(file), "--out", str(tmp_path / "out"), "--threads", "1", "--probes", "entropy")
    lines = result.stderr.splitlines()
    assert (result.exit_code, len(lines), lines[-1]) == (1, 11, "... and 4 more.")
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("latin.txt", b"caf\xe9\n", " byte 0: not UTF-8"),
        ("utf16.txt", "w1\n".encode("utf-16"), ": {file} is not UTF-8 text: it seems to be UTF-16. Convert"),
        ("empty.txt", b"", ""),
        ("cut.txt.gz", gzip.compress(b"w1 w2\n")[:-9], ": {file} cannot be read: Compressed file ended before the end"),
    ],
    ids=["a row", "a file", "empty", "cut off"],
)
def test_the_status_is_1_where_texts_cannot_be_read_or_there_are_none(
    model: str, tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    result = run(model, "--texts", str(file), "--out", str(tmp_path / "out"), "--threads", "1", "--probes", "entropy")
    assert result.exit_code == 1
    assert result.stdout.startswith("tiny-bert: 0 texts with 0 tokens")
    assert result.stderr.startswith(f"{file}{problem.format(file=file)}" if problem else "")


class TestTheNumberOfAProcess:
    @pytest.mark.parametrize(
        "environment",
        [
            {"RANK": "1", "WORLD_SIZE": "2"},
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "4"},
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            {"SLURM_ARRAY_TASK_ID": "8", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "7"},
        ],
    )
    def test_is_that_of_what_started_it(
        self, model: str, corpus: str, tmp_path: Path, environment: dict[str, str]
    ) -> None:
        out = ("--out", str(tmp_path / "out"), "--threads", "1", "--probes", "entropy")
        result = run(model, "--texts", corpus, *out, "--shard", "auto", **environment)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == [
            "tiny-bert: 0 texts with 0 tokens, in 0 of 1 shards (0 truncated, 0 empty, 0 broken, 0 left out).",
            f"Shards that other runs count: 1. When all have ended, run multihead census {tmp_path / 'out'}.",
        ]
        assert run(model, "--texts", corpus, *out, "--shard", "0/2").stdout.startswith("tiny-bert: 12 texts")

    def test_in_an_array_counts_the_processes_of_all_tasks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        array = {"ID": "9", "COUNT": "5", "MIN": "1", "STEP": "2"}
        for name, value in {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}.items():
            monkeypatch.setenv(name, value)
        assert parse_shard("auto") == (4, 5)
        monkeypatch.setenv("SLURM_PROCID", "3")
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
        assert parse_shard("auto") == (4 * 8 + 3, 5 * 8)

    @pytest.mark.parametrize("shard", ["2/2", "1", "a/b", "-1/2"])
    def test_out_of_range_is_an_error(self, shard: str) -> None:
        result = run("model", "--texts", "a", "--out", "b", "--shard", shard)
        assert result.exit_code == 2
        assert f"--shard is {shard!r}. Give it as 0/8: from 0/8 to 7/8 for eight processes." in result.stderr

    def test_is_unknown_without_a_launcher(self) -> None:
        result = run("model", "--texts", "a", "--out", "b", "--shard", "auto")
        sentence = "--shard is auto, and neither torchrun nor Slurm nor mpirun started this. Give it as 0/8."
        assert sentence in result.stderr
        result = run("model", "--texts", "a", "--out", "b", "--shard", "auto", RANK="x", WORLD_SIZE="2")
        assert "--shard is auto, and a variable of the launcher is no number: invalid literal" in result.stderr


def test_an_error_of_the_library_is_one_line(model: str, corpus: str, tmp_path: Path) -> None:
    result = run(model, "--texts", corpus, "--out", str(tmp_path), "--probes", "entropie")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: There is no statistic 'entropie'. Give some of entropy, ")
    result = run(model, "--texts", str(tmp_path / "*.parquet"), "--out", str(tmp_path))
    assert result.stderr == f"error: There is no file '{tmp_path}/*.parquet'. Check the names.\n"


def test_help_shows_examples_without_loading_torch() -> None:
    result = run("--help")
    assert "torchrun --nproc-per-node 8 -m multihead census" in result.stdout


def test_the_page_of_a_census_is_written_without_running_the_model(model: str, corpus: str, tmp_path: Path) -> None:
    out, other, page = (str(tmp_path / name) for name in ("out", "other", "page.html"))
    options = ("--threads", "1", "--probes", "entropy")
    result = run(model, "--texts", corpus, "--out", out, *options, "--page", page)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"The page: {page}")
    first = Path(page).read_bytes()
    Path(page).unlink()
    assert run(out, "--page", page).stdout == f"The page: {page}\n"
    assert Path(page).read_bytes() == first
    run(model, "--texts", corpus, "--out", other, *options, "--share", "0.5")
    assert run(out, "--page", page, "--against", other, "--lang", "zh").stdout == f"页面：{page}\n"
    assert b'"divergence":{' in Path(page).read_bytes()
    assert run(out, "--read", "0:3").stdout == random_texts(12)[3]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ("--texts", "a.txt", "--page", "p.html"),
            "Give --texts and --out to count, or the directory of a census without both.",
        ),
        (("--against", "b"), "--against needs --page: the page compares the two. Give --page FILE."),
        (
            ("--texts", "a.txt", "--out", "b", "--read", "0:1"),
            "--read prints a text of a census that exists. Give its directory, without --texts.",
        ),
        (("--read", "4"), "--read is '4'. Give it as 0:17, the shard and the text."),
        (("--read", "9:4"), "shard is 9. Give 0 to 0."),
        (("--read", "0:99"), "The text is no longer in the corpus. Keep the corpus as it was."),
    ],
)
def test_options_that_do_not_belong_together_are_rejected(
    given: tuple[str, ...], sentence: str, counted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(counted, *given)
    assert result.exit_code == 2
    line = result.stderr.splitlines()[-1]
    assert line.removesuffix(" See `multihead census --help`.") == f"error: {sentence}"
