"""A token id without an embedding is rejected in one sentence, before the model runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import multihead as mh
from multihead.errors import InputError
from multihead.models.loading import load
from multihead.models.token_ids import check_token_ids
from tests.word_models import save_word_models

MEND = (
    "Use the tokenizer of this model; for tokens that were added to it, call "
    "model.resize_token_embeddings(len(tokenizer)), train them and save the model again."
)


def test_an_added_token_without_an_embedding_is_rejected_before_the_model_runs(tmp_path: Path) -> None:
    save_word_models(tmp_path)
    loaded = load(str(tmp_path / "llama"))
    loaded.tokenizer.add_tokens("<|user|>")
    ids = torch.tensor([[1, 12]])
    functions: list[tuple[Callable[[], object], str]] = [
        (lambda: mh.look(loaded, "<|user|> the", show=False), "llama"),
        (lambda: mh.head_means(loaded.model, [{"input_ids": ids}]), "LlamaModel"),
        (lambda: mh.head_means(loaded.model, [ids]), "LlamaModel"),
    ]
    for function, title in functions:
        with pytest.raises(InputError) as caught:
            function()
        assert str(caught.value) == f"A token has the id 12, and {title} has embeddings for the ids 0 to 11. {MEND}"


def test_a_text_of_a_census_with_such_a_token_is_a_problem_of_its_shard(tmp_path: Path) -> None:
    save_word_models(tmp_path)
    loaded = load(str(tmp_path / "llama"))
    loaded.tokenizer.add_tokens("<|user|>")
    (tmp_path / "texts.txt").write_text("the key\n<|user|> the door\n")
    found = mh.census(loaded.model, str(tmp_path / "texts.txt"), tokenizer=loaded.tokenizer, out=tmp_path / "census")
    sentence = f"A token has the id 12, and LlamaModel has embeddings for the ids 0 to 11. {MEND}"
    assert found.problems == [f"{tmp_path / 'texts.txt'}: {sentence}"]


def test_negative_ids_are_rejected_and_unknown_embeddings_accept_all() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertModel(BertConfig(vocab_size=9, **sizes))
    with pytest.raises(InputError, match=r"^A token has the id -1, and bert has embeddings for the ids 0 to 8\."):
        check_token_ids(model, torch.tensor([3, -1]), "bert")
    check_token_ids(model, torch.tensor([3, 8]), "bert")
    check_token_ids(torch.nn.Linear(1, 1), torch.tensor([10**9]), "other")


def test_ids_are_not_compared_with_the_embeddings_of_the_decoder_of_a_model_that_reads_audio() -> None:
    from transformers import WhisperConfig, WhisperModel

    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = WhisperModel(WhisperConfig(vocab_size=9, pad_token_id=0, num_mel_bins=4, **sizes, **heads))
    check_token_ids(model, torch.tensor([9]), "whisper")
    with pytest.raises(InputError, match=r"^A token has the id 9, and whisper has embeddings for the ids 0 to 8\."):
        check_token_ids(model.get_decoder(), torch.tensor([9]), "whisper")
