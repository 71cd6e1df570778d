"""A tiny language model and a tiny encoder, saved to a folder, whose tokens are a few English words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["the", "key", "is", "under", "a", "door", "and", "nobody", "saw", "it", "before"]


def save_word_models(folder: Path, *, words: int = 0, layers: int = 2) -> None:
    """Save the models as `folder`/llama and `folder`/bert.

    Args:
        folder: where they are saved.
        words: how many further words there are, "w0", "w1" and so on; texts of random tokens need 64.
        layers: number of layers of each model.
    """
    vocabulary = ["?", *WORDS, *(f"w{index}" for index in range(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(1)
    llama = hf.LlamaConfig(**sizes, **tokens, intermediate_size=8, num_key_value_heads=2, initializer_range=0.5)
    hf.LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    hf.BertModel(hf.BertConfig(**sizes, intermediate_size=8)).save_pretrained(folder / "bert")
    for model in ("llama", "bert"):
        hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder / model)
