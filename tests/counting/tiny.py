"""A tiny model with a tokenizer of words, and corpora of random words."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"w{number}" for number in range(40)]
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}


def tokenizer() -> Any:
    """Return a tokenizer of words, which puts [CLS] before a text and [SEP] after it."""
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=48, **names)


def bert(seed: int = 0) -> Any:
    """Return a tiny BERT in evaluation mode."""
    torch.manual_seed(seed)
    config = hf.BertConfig(**SIZES, vocab_size=44, max_position_embeddings=48, initializer_range=0.5)
    return hf.BertModel(config).eval()


def saved_bert(folder: Path, seed: int = 0) -> str:
    """Save the tiny BERT and its tokenizer, and return the folder as a MODEL argument."""
    bert(seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def random_texts(count: int, *, seed: int = 0, longest: int = 30) -> list[str]:
    """Return texts of random words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


def jsonl(file: Path, texts: Sequence[str]) -> str:
    """Write texts as lines of JSON, and return the file's name."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(file)
