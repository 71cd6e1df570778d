"""The command `ablate`: its numbers are those of Python, what it prints and writes, and how bad input is answered."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn.functional import cross_entropy

import multihead as mh
from multihead.cli import main
from multihead.models.loading import load
from tests.word_models import save_word_models

TEXTS = {"first.txt": "the key is under the door", "second.txt": "nobody saw the key before it"}


def run(*args: str, columns: int | None = None) -> Result:
    """Run the command in a terminal of `columns`, or into a pipe."""
    environment = {"COLUMNS": None if columns is None else str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(main, ["ablate", *args], prog_name="multihead", env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a tiny language model and a tiny encoder, which both read words."""
    made = tmp_path_factory.mktemp("ablate")
    for name, text in TEXTS.items():
        (made / name).write_text(text, encoding="utf-8")
    save_word_models(made)
    return made


def two_texts(folder: Path) -> list[str]:
    return [each for name in TEXTS for each in ("--text", str(folder / name))]


def rows_of(*args: str) -> list[dict[str, Any]]:
    """Run the command, and return its rows of JSON."""
    result = run(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def losses(folder: Path, **options: Any) -> list[float]:
    """Return the loss of both texts with heads switched off in Python, one by one, or without any in one batch."""
    loaded = load(str(folder / "llama"), head="language")
    model: Any = loaded.model
    ids = torch.tensor([loaded.tokenizer(text).input_ids for text in TEXTS.values()])
    with torch.no_grad():
        if "factors" in options:
            with mh.scale_heads(model, options["factors"]):
                logits = model(ids).logits
        elif options:
            with mh.ablate(model, **options):
                logits = model(ids).logits
        else:
            logits = model(ids).logits
    return [float(cross_entropy(one[:-1].double(), row[1:])) for one, row in zip(logits, ids, strict=True)]


HEADS = ["L0 H1", "L1 H3"]
REFERENCE = "a door is under the key and nobody saw"


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ([], {"heads": HEADS}),
        (["--by", "resample"], {"heads": HEADS, "by": "resample"}),
        (["--by", "mean", "--reference", "other.txt"], {"heads": HEADS, "by": "mean"}),
        (["--scale", "0.5"], {"factors": dict.fromkeys(HEADS, 0.5)}),
    ],
    ids=["zero", "resample", "mean", "scale"],
)
def test_its_losses_are_those_of_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], options: dict[str, Any]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "other.txt").write_text(REFERENCE, encoding="utf-8")
    if options.get("by") == "mean":
        ids = load(str(folder / "llama")).tokenizer(REFERENCE, return_tensors="pt").input_ids
        options = {**options, "reference": [ids]}
    rows = rows_of("llama", "--heads", "L0H1,L1H3", *two_texts(folder), *args)
    before, after = losses(folder), losses(folder, **options)
    assert [row["loss_before"] for row in rows[:2]] == pytest.approx(before, abs=1e-5)
    assert [row["loss_after"] for row in rows[:2]] == pytest.approx(after, abs=1e-5)
    differences = [late - early for early, late in zip(before, after, strict=True)]
    assert max(map(abs, differences)) > 1e-3
    assert rows[2]["difference"] == pytest.approx(fmean(differences), abs=1e-5)
    assert rows[2]["standard_error"] == pytest.approx(stdev(differences) / 2**0.5, abs=1e-5)
    assert (rows[2]["text"], rows[2]["tokens"]) == (None, 12)


def test_the_next_tokens_are_the_likeliest_before_and_after(folder: Path) -> None:
    (row,) = rows_of(str(folder / "llama"), "--heads", "L1", "--prompt", "the key is")
    loaded = load(str(folder / "llama"), head="language")
    model: Any = loaded.model
    ids = loaded.tokenizer("the key is", return_tensors="pt").input_ids
    with torch.no_grad():
        before = model(ids).logits[0, -1].softmax(-1)
        with mh.ablate(model, "L1"):
            after = model(ids).logits[0, -1].softmax(-1)
    for name, probabilities in (("next_before", before), ("next_after", after)):
        assert row[name] == loaded.tokenizer.decode([int(probabilities.argmax())])
        assert row[f"{name}_probability"] == pytest.approx(float(probabilities.max()), abs=1e-5)


def test_a_difference_of_logits_is_measured_in_place_of_the_loss(folder: Path) -> None:
    loaded = load(str(folder / "llama"), head="language")
    model: Any = loaded.model
    ids = torch.tensor([loaded.tokenizer(text).input_ids for text in TEXTS.values()])
    token, other = loaded.tokenizer.convert_tokens_to_ids(["key", "door"])
    with torch.no_grad():
        before = model(ids).logits[:, -1]
        with mh.ablate(model, "L0 H1"):
            after = model(ids).logits[:, -1]
    args = [str(folder / "llama"), "--heads", "L0H1", *two_texts(folder), "--measure", "logit-difference"]
    args += ["--token", "key", "--other", "door"]
    rows = rows_of(*args)
    for when, logits in (("before", before), ("after", after)):
        expected = (logits[:, token] - logits[:, other]).tolist()
        assert [row[f"logit_difference_{when}"] for row in rows[:2]] == pytest.approx(expected, abs=1e-5)
    lines = run(*args, columns=80).stdout.splitlines()
    assert "logit diff." in lines[2]
    assert "The logit difference is the logit of “key” minus that of “door”" in " ".join(lines)


def test_the_table_has_a_row_per_text_and_their_mean(folder: Path, tmp_path: Path) -> None:
    args = [str(folder / "llama"), "--heads", "L0H1，L1 H3", *two_texts(folder)]
    rows = rows_of(*args)
    result = run(*args, "--csv", str(tmp_path / "rows.csv"))
    lines = result.stdout.splitlines()
    assert lines[0] == "llama without L0 H1, L1 H3: their output is 0."
    assert lines[2].split() == ["loss", "loss", "std.", "next", "token", "next", "token"]
    assert lines[3].split() == ["text", "tokens", "before", "after", "change", "error", "before", "after"]
    assert lines[6].split()[1:3] == ["6", f"{rows[1]['loss_before']:.3f}"]
    assert lines[5].split()[5] == "–"
    mean = rows[2]
    assert lines[7].split()[:4] == ["mean", "of", "2", "texts"]
    assert lines[7].split()[4:] == [
        "12",
        f"{mean['loss_before']:.3f}",
        f"{mean['loss_after']:.3f}",
        f"{mean['difference']:+.3f}",
        f"{mean['standard_error']:.3f}",
    ]
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == [str(folder / name) for name in TEXTS] + [""]


def test_one_text_has_no_standard_error_and_no_row_of_means(folder: Path) -> None:
    lines = run(str(folder / "llama"), "--heads", "L0", "--prompt", "the key is").stdout.splitlines()
    assert lines[6] == ""
    assert lines[5].split()[:4] == ["the", "key", "is", "3"]
    assert lines[5].split()[7] == "–"


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_in_80_columns_a_text_still_has_one_line(folder: Path, tmp_path: Path, lang: str) -> None:
    from rich.cells import cell_len

    file = tmp_path / f"{'long-' * 20}name.txt"
    file.write_text("the door is under the key")
    args = [str(folder / "llama"), "--heads", "L0", "--prompt", "the key is", "--text", str(file), "--lang", lang]
    lines = run(*args, columns=80).stdout.splitlines()
    assert all(cell_len(line) <= 80 for line in lines[2:8])
    row = rows_of(*args[:-2])[1]
    numbers = [f"{row['loss_before']:.3f}", f"{row['loss_after']:.3f}", f"{row['difference']:+.3f}"]
    assert lines[6].split()[-10:-7] == numbers
    assert lines[6].split()[-2:] == [f"{row['next_after_probability']:.1%}"[:-1], "%"]


def test_cut_names_can_be_told_apart_and_a_pipe_has_whole_names(folder: Path) -> None:
    prompts = [f"the key is under the {word} before it" for word in ("door", "key")]
    args = [str(folder / "llama"), "--heads", "L0", *(each for prompt in prompts for each in ("--prompt", prompt))]
    for columns in (60, 80, 120):
        named = [re.split(r"\s+\d", line)[0] for line in run(*args, columns=columns).stdout.splitlines()[5:7]]
        assert all("…" in name for name in named)
        assert named[0] != named[1]
    piped = run(*args).stdout.splitlines()
    assert all(line.startswith(prompt) for line, prompt in zip(piped[5:7], prompts, strict=True))
    assert [row["text"] for row in rows_of(*args)] == [*prompts, None]


def test_everything_printed_is_in_the_language_asked_for(folder: Path) -> None:
    lines = run(str(folder / "llama"), "--heads", "L0", "--prompt", "the key is", "--lang", "zh").stdout.splitlines()
    assert lines[0] == "llama 关闭 L0：其输出为 0。"
    assert lines[2].split() == ["之前的", "之后的", "之前的", "之后的"]
    assert lines[3].split()[:4] == ["文本", "词元", "损失", "损失"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "There is no text. Give texts as --text FILE or --prompt TEXT; both may be repeated. See `multihead"),
        (["a text"], "'a text' stands after MODEL without an option. Give a text as --prompt 'a text', and a file as"),
        (["--prompt", "the key", "--by", "mean"], "--by mean takes the mean output of each head over texts. Give them"),
        (["--prompt", "the key", "--reference", "a.txt"], "--reference is the texts of --by mean. Add --by mean, or"),
        (["--prompt", "the key", "--by", "resample"], "--by resample takes the output of a head on another text, and"),
        (["--prompt", "the key", "--by", "zero", "--scale", "2"], "--scale multiplies the output, and --by zero"),
        (["--prompt", "the key", "--scale", "nan"], "The factor of L0 H1 is nan. Give a finite number."),
        (["--prompt", "key"], "The text 'key' has 1 token, and the first token of a text is not predicted. Give a"),
        (
            ["--prompt", "the key", "--prompt", "the key is", "--by", "resample"],
            "--by resample needs texts of one length, and they have 2 to 3 tokens. Cut them with --tokens 2.",
        ),
        (["--prompt", "the key", "--text", "none.txt"], "There is no file 'none.txt'. Check its name."),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, args: list[str], said: str) -> None:
    result = run(str(folder / "llama"), "--heads", "L0H1", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {said}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "heads", "said"),
    [
        (
            "llama",
            "L7H1",
            "There is no head L7 H1: the model has layers L0 to L1, and L1 has heads H0 to H3. The nearest",
        ),
        ("llama", "the best", "'the best' is not the name of a head."),
        ("llama", "L0,L1", "The heads are all heads of the model. Leave some on."),
        ("bert", "L0H1", "bert is an encoder, so it has no head that predicts the next token. Give a language model; "),
    ],
)
def test_heads_that_do_not_exist_and_models_without_a_head_for_the_next_token(
    folder: Path, model: str, heads: str, said: str
) -> None:
    result = run(str(folder / model), "--heads", heads, "--prompt", "the key is")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {said}"), result.stderr
