"""The command `importance`: its numbers are those of Python, what it prints and writes, and bad input."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from click.testing import CliRunner, Result
from rich.cells import cell_len

import multihead as mh
from multihead.cli import importance as command
from multihead.cli import main, progress
from multihead.models.loading import load
from tests.viewer.page import Page
from tests.word_models import save_word_models

TEXTS = ["the key is under the door", "nobody saw the key before it", "a door is under it and", "it saw the key and a"]
REFERENCE = "a door is under the key and nobody saw"
PROMPTS = [each for text in TEXTS for each in ("--prompt", text)]
LEAST_SHARE = {"█": 1 / 2, "▓": 1 / 4, "▒": 1 / 8, "░": 1 / 16}  # of the largest effect
MEASURE = ["--measure", "logit-difference", "--token", "key", "--other", "door"]


def run(*args: str, columns: int | None = None) -> Result:
    """Run the command in a terminal of `columns`, or into a pipe."""
    environment = {"COLUMNS": None if columns is None else str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(main, ["importance", *args], prog_name="multihead", env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny language model, one whose heads write nothing, and one with one head."""
    made = tmp_path_factory.mktemp("importance")
    save_word_models(made)
    (made / "other.txt").write_text(REFERENCE, encoding="utf-8")
    for name in ("silent", "single"):
        model: Any = hf.AutoModelForCausalLM.from_pretrained(made / "llama")
        if name == "single":
            sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**model.config.to_dict(), **sizes}))
        else:
            for layer in model.model.layers:
                torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        model.save_pretrained(made / name)
        hf.AutoTokenizer.from_pretrained(made / "llama").save_pretrained(made / name)
    return made


def rows_of(*args: str) -> list[dict[str, Any]]:
    """Run the command, and return its rows of JSON."""
    result = run(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ([], {}),
        (["--by", "resample"], {"by": "resample"}),
        (["--by", "mean", "--reference", "other.txt"], {"by": "mean"}),
        (["--gradient"], {"method": "gradient"}),
        ([*MEASURE, "--heads", "L0，L1H2"], {"heads": ["L0", "L1 H2"]}),
    ],
    ids=["zero", "resample", "mean", "gradient", "logit difference of some heads"],
)
def test_its_numbers_are_those_of_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], options: dict[str, Any]
) -> None:
    monkeypatch.chdir(folder)
    loaded = load("llama", head="language")
    ids = torch.tensor([loaded.tokenizer(text).input_ids for text in TEXTS])
    if options.get("by") == "mean":
        options = {**options, "reference": [loaded.tokenizer(REFERENCE, return_tensors="pt").input_ids]}
    token, other = loaded.tokenizer.convert_tokens_to_ids(["key", "door"])
    measure = mh.logit_difference(token, other) if "--measure" in args else None
    found = mh.importance(loaded.model, [ids], measure, **options)
    together = mh.off_together(loaded.model, [ids], found, 2)
    with torch.no_grad(), mh.observe(loaded.model, keep="summary") as seen:
        for each in ids:
            loaded.model(each[None])
    kinds = {(row["layer"], row["head"]): row["kind"] for row in seen.table().rows}

    rows = rows_of("llama", *PROMPTS, "--heads-off", "2", "--top", "1", *args)
    effect = "estimate" if "method" in options else "effect"
    heads, sets = rows[: len(found.heads())], rows[len(found.heads()) :]
    for row, head in zip(heads, found.heads(), strict=True):
        assert (row["set"], row["layer"], row["head"], row["name"]) == ("head", head.layer, head.head, head.name)
        assert row["heads"] == f"L{head.layer}H{head.head}"
        assert row[effect] == pytest.approx(head.effect, abs=1e-5)
        assert row["standard_error"] == pytest.approx(head.standard_error, abs=1e-5)
        assert (row["texts"], row["kind"]) == (4, kinds[head.layer, head.head])
    for row, expected in zip(sets, together.rows(), strict=True):
        assert (row["set"], row["heads"], row["texts"]) == (expected["set"], expected["heads"], 2)
        assert row[effect if row["set"].startswith("sum") else "effect"] == pytest.approx(expected["effect"], abs=1e-5)
        assert row["standard_error"] == pytest.approx(expected["standard_error"], abs=1e-5)


def test_the_table_and_the_picture_show_the_heads_that_matter_and_files_have_all(folder: Path, tmp_path: Path) -> None:
    args = [str(folder / "llama"), *PROMPTS]
    rows = rows_of(*args)
    lines = run(*args, "--top", "2", "--csv", str(tmp_path / "rows.csv"), columns=80).stdout.splitlines()
    assert " ".join(lines).startswith(
        "llama without each of 8 heads, one at a time: the output of the head is 0. The effect"
    )
    start = next(number for number, line in enumerate(lines) if line.startswith("──"))
    for line, row in zip(lines[start + 1 : start + 3], rows, strict=False):
        name = [f"L{row['layer']}", f"H{row['head']}"]
        assert line.split()[:4] == [*name, f"{row['effect']:+.3f}", f"{row['standard_error']:.3f}"]
    assert lines[start + 3] == ""
    largest = max(abs(row["effect"]) for row in rows)
    assert lines[start + 4].split() == ["H0"]
    for layer, line in enumerate(lines[start + 5 : start + 7]):
        cells = []
        for row in sorted((row for row in rows if row["layer"] == layer), key=lambda row: row["head"]):
            share = abs(row["effect"]) / largest
            shade = next((each for each, least in LEAST_SHARE.items() if share >= least), "·")
            small = shade == "·" or abs(row["effect"]) <= 2 * row["standard_error"]
            cells.append("·" if small else f"{'-' * (row['effect'] < 0)}{shade}")
        assert line.split() == [f"L{layer}", *cells]
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        assert [(row["layer"], row["head"]) for row in csv.DictReader(file)] == [
            (str(row["layer"]), str(row["head"])) for row in rows
        ]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_lines_fit_into_a_narrow_terminal_and_wide_layers_into_several_pictures(folder: Path, lang: str) -> None:
    for columns, more in ((80, ["--gradient"]), (40, [])):
        args = [*PROMPTS, "--heads-off", "2", "--lang", lang, *MEASURE, *more]
        result = run(str(folder / "llama"), *args, columns=columns)
        assert result.exit_code == 0, result.output
        assert all(cell_len(line) <= columns for line in result.stdout.splitlines())
    words = {"en": ["Offtogether(2):", "logitdifferencefalls"], "zh": ["同时关闭", "logit差降低"]}[lang]
    assert all(each in "".join(result.stdout.split()) for each in words)


def test_the_page_has_the_effects_the_heads_together_and_the_texts(folder: Path, tmp_path: Path) -> None:
    args = [str(folder / "llama"), *PROMPTS, "--heads-off", "2", "--json", str(tmp_path / "heads.json")]
    out = tmp_path / "heads.html"
    for more, name, sums in (([], "exact", "effects"), (["--gradient"], "gradient estimate", "estimates")):
        result = run(*args, *more, "--out", str(out))
        assert result.stdout.rstrip().splitlines()[-1].startswith(f"The page: {out}")
        page = Page(out)
        numbers = page.data["important"][0]
        rows = json.loads((tmp_path / "heads.json").read_text(encoding="utf-8"))
        of_heads = [row for row in rows if row["set"] == "head"]
        assert (numbers["name"], numbers["order"]) == (name, [4 * row["layer"] + row["head"] for row in of_heads])
        together, singles, draws = numbers["together"]["rows"]
        assert together[1] == pytest.approx(rows[8]["effect"], rel=1e-4)
        assert singles[:2] == [f"sum of single {sums}", pytest.approx(rows[9]["effect" if not more else "estimate"])]
        assert draws[1] == pytest.approx(sum(row["effect"] for row in rows[10:]) / 10, rel=1e-4)
        assert {row["kind"] for row in of_heads} != {None}


def test_the_png_is_the_plot_of_a_record(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "heads.png"
    result = run(str(folder / "llama"), *PROMPTS, "--gradient", "--png", str(file))
    assert result.stdout.splitlines()[-1] == f"Picture of all heads: {file}", result.output
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_seed_draws_the_heads_and_the_other_texts(folder: Path) -> None:
    def draws(*args: str) -> list[tuple[str, float]]:
        rows = rows_of(str(folder / "llama"), *PROMPTS, "--heads-off", "1", "--by", "resample", *args)
        return [(row["heads"], row["effect"]) for row in rows if row["set"] == "draw"]

    assert draws("--seed", "0") == draws() != draws("--seed", "1")


def test_heads_that_do_nothing_have_an_empty_picture_and_are_not_beyond_the_draws(folder: Path) -> None:
    result = run(str(folder / "silent"), *PROMPTS, "--heads-off", "2")
    assert "L1  ·  ·  ·  ·\n" in result.stdout
    assert "10 of them reach 0." in result.stdout
    one = run(str(folder / "silent"), *PROMPTS[:2])
    assert "One text has no standard error" in one.stdout
    assert "within two standard errors" not in one.stdout


def test_the_time_left_is_printed_after_the_first_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[float, int | None, str]] = []

    def show(_: object, step: str, done: float = 0, total: int | None = None, *, detail: str = "") -> None:
        shown.extend([(done, total, detail)] * (step == "Switching heads off"))

    monkeypatch.setattr(progress.Steps, "show", show)
    run(str(folder / "llama"), *PROMPTS)
    assert [each[:2] for each in shown] == [(0, None), *((done, 8) for done in range(1, 9))]  # two layers of four texts
    assert [re.sub(r"\d+", "N", each[2]) for each in shown] == ["", *["about N s left"] * 7, ""]
    assert [command._time_left(each, "en") for each in (3.2, 89.5, 91, 5000, 9000)] == [
        "about 4 s left",
        "about 90 s left",
        "about 2 min left",
        "about 84 min left",
        "about 2.5 h left",
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--prompt", "the key", "--heads-off", "2"], "--heads-off chooses heads on every second text and measures on"),
        ([*PROMPTS, "--gradient", "--by", "resample"], "--gradient estimates the effect by zero or by the mean. Leave"),
        (["--prompt", "the key", "--measure", "accuracy"], "Invalid value for '--measure': 'accuracy' is not one of"),
        (["--prompt", "the key", *MEASURE[:2]], "--measure logit-difference compares two tokens. Give --token and"),
        (["--prompt", "the key", *MEASURE[2:]], "--token and --other are for --measure logit-difference. Add it, or"),
        (
            ["--prompt", "the key", *MEASURE[:-1], "keys"],
            "--other 'keys' is no token of llama. Give one token of its vocabulary, with the space before a word:",
        ),
        (
            ["--prompt", "the key", *MEASURE[:-1], "a key"],
            "--other 'a key' is 2 tokens of llama ('a', 'key'). Give one token of its vocabulary, with the space",
        ),
        (["--prompt", "the key", *MEASURE[:-1], "key"], "--token and --other are both 'key'. Give two tokens."),
        (
            [*PROMPTS, "--heads-off", "8"],
            "8 heads cannot be switched off together: the model has 8. Give at most 7, so that one stays on.",
        ),
        (
            [*PROMPTS, "--heads", "L0", "--heads-off", "5"],
            "5 heads cannot be switched off together: the model has 8, of which 4 are measured. Give at most 4.",
        ),
        ([*PROMPTS, "--heads", "L3"], "There is no head L3: the model has layers L0 to L1"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, args: list[str], said: str) -> None:
    result = run(str(folder / "llama"), *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {said}")
    assert result.stderr.count("\n") == 1


def test_a_model_with_one_head_is_an_error(folder: Path) -> None:
    result = run(str(folder / "single"), *PROMPTS)
    assert result.exit_code == 2, result.output
    said = "The model has one head, and nothing is left without it. Give a model with several."
    assert result.stderr.startswith(f"error: {said}"), result.stderr
