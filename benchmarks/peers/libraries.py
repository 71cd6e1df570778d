"""The attention layers of other libraries, each with the weights of a trial and called in its fastest way."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from benchmarks.peers.cases import STEPS, Trial
from benchmarks.peers.contender import CannotError, Contender, added, contender, load


def x_transformers(trial: Trial) -> Contender:
    """Attention of x-transformers with flash=True; its projections have no bias, so each gets one."""
    module = imported("x_transformers.x_transformers")
    case, shown, memory = trial.case, trial.shown, trial.memory
    width = trial.x.shape[2]
    layer = module.Attention(
        dim=width, heads=trial.heads, dim_head=width // trial.heads, causal=case.kind == "causal", flash=True
    ).to(trial.x.dtype)
    load((layer.to_q, layer.to_k, layer.to_v, layer.to_out), trial)
    if case.kind == "decoding":
        cache = [module.Intermediates(cached_kv=trial.held)]

        def step(x: Tensor) -> Tensor:
            output, cache[0] = layer(x, cache=cache[0], return_intermediates=True)
            return output

        return contender(step, layer, trial)
    arguments: dict[str, Tensor] = {}
    if case.kind == "ragged":
        arguments["mask"] = shown[:, 0, 0]
    elif shown is not None and case.kind != "causal":
        arguments["attn_mask"] = shown[0, 0]
    return contender(lambda x: layer(x, context=memory, **arguments), layer, trial)


def torchtune(trial: Trial) -> Contender:
    """MultiHeadAttention of torchtune, without the positions of a Llama."""
    module = _torchtune_layer()
    case, width = trial.case, trial.x.shape[2]
    names = ("q_proj", "k_proj", "v_proj", "output_proj")
    layer = module.MultiHeadAttention(
        embed_dim=width,
        num_heads=trial.heads,
        num_kv_heads=trial.heads,
        head_dim=width // trial.heads,
        is_causal=case.kind == "causal",
        **{name: nn.Linear(width, width) for name in names},
    ).to(trial.x.dtype)
    load((getattr(layer, name) for name in names), trial)
    if case.kind == "decoding":
        layer.setup_cache(case.batch, trial.x.dtype, case.keys + 1 + STEPS)
        layer.kv_cache.update(*trial.held)
        following = iter(_rows_of_steps(trial))
        return contender(lambda x: layer(x, x, mask=next(following)[None, None]), layer, trial)
    mask = None if trial.shown is None or case.kind == "causal" else trial.shown[:, 0]
    return contender(lambda x: layer(x, x if trial.memory is None else trial.memory, mask=mask), layer, trial)


def keras(trial: Trial) -> Contender:
    """keras.layers.MultiHeadAttention on the torch backend."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    library = imported("keras")
    if library.backend.backend() != "torch":
        raise CannotError(f"Keras runs on {library.backend.backend()} in this process")
    case, width = trial.case, trial.x.shape[2]
    if case.kind == "decoding":
        raise CannotError("it has no cache: each step would project all tokens again")
    dtype = str(trial.x.dtype).removeprefix("torch.")
    layer = library.layers.MultiHeadAttention(trial.heads, width // trial.heads, dtype=dtype)
    other = trial.x if trial.memory is None else trial.memory
    layer.build(trial.x.shape, other.shape)
    kernels = [projection.weight.mT.unflatten(1, (trial.heads, -1)) for projection in trial.weights[:3]]
    biases = [projection.bias.unflatten(0, (trial.heads, -1)) for projection in trial.weights[:3]]
    kernels.append(trial.weights.out.weight.mT.unflatten(0, (trial.heads, -1)))
    biases.append(trial.weights.out.bias)
    values = [value for pair in zip(kernels, biases, strict=True) for value in pair]
    for variable, value in zip(layer.weights, values, strict=True):
        variable.assign(value.contiguous())
    causal, shown = case.kind == "causal", trial.shown
    mask = None if shown is None or causal else shown.expand(-1, -1, case.queries, -1)[:, 0]

    def forward(x: Tensor) -> Tensor:
        memory = x if trial.memory is None else trial.memory
        return layer(x, memory, attention_mask=mask, use_causal_mask=causal, training=case.training)

    return Contender(forward, tuple(variable.value for variable in layer.trainable_variables))


def hugging_face_eager(trial: Trial) -> Contender:
    """BERT's attention and output layer, with materialised weights."""
    return _hugging_face(trial, "eager")


def hugging_face_sdpa(trial: Trial) -> Contender:
    """BERT's attention and output layer, with SDPA."""
    return _hugging_face(trial, "sdpa")


def _hugging_face(trial: Trial, implementation: str) -> Contender:
    """BERT's layer, because it has no rotary positions, has biases, and supports every case."""
    library, bert = imported("transformers"), imported("transformers.models.bert.modeling_bert")
    case, shown, dtype = trial.case, trial.shown, trial.x.dtype
    config = library.BertConfig(
        hidden_size=trial.x.shape[2],
        num_attention_heads=trial.heads,
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attn_implementation=implementation,
    )
    kind = bert.BertCrossAttention if case.kind == "cross" else bert.BertSelfAttention
    causal = case.kind in ("causal", "decoding")
    attention = kind(config, is_causal=causal, layer_idx=0).to(dtype)
    layer = nn.ModuleDict({"attention": attention, "output": bert.BertSelfOutput(config).dense.to(dtype)})
    load((attention.query, attention.key, attention.value, layer["output"]), trial)
    if case.kind == "decoding":
        cache = library.StaticCache(config, max_cache_len=case.keys + 1 + STEPS)
        cache.update(*trial.held, 0)
        following = iter(_rows_of_steps(trial) if implementation == "sdpa" else added(_rows_of_steps(trial), dtype))

        def step(x: Tensor) -> Tensor:
            mask = next(following)[None, None, None]
            return layer["output"](attention(x, attention_mask=mask, past_key_values=cache)[0])

        return contender(step, layer, trial)
    mask = shown
    if implementation == "eager":
        mask = None if shown is None else added(shown, dtype)
    elif causal:
        mask = None  # expressed by is_causal
    elif shown is not None:
        mask = shown.expand(-1, -1, case.queries, -1)
    arguments = {} if trial.memory is None else {"encoder_hidden_states": trial.memory}

    def forward(x: Tensor) -> Tensor:
        return layer["output"](attention(x, attention_mask=mask, **arguments)[0])

    return contender(forward, layer, trial)


def _rows_of_steps(trial: Trial) -> Tensor:
    """Return a dense mask (steps, keys) for caches that return the whole buffer: the keys written at each step."""
    key = torch.arange(trial.case.keys + 1 + STEPS)
    return key <= key[trial.case.keys :, None]


def imported(name: str) -> ModuleType:
    """Import a module of a peer.

    Raises:
        CannotError: it is not installed.
    """
    if find_spec(name.partition(".")[0]) is None:
        raise CannotError("it is not installed")
    return import_module(name)


def _torchtune_layer() -> ModuleType:
    """Import only the file of torchtune's layer, because the whole package requires torchao, datasets and more."""
    spec = find_spec("torchtune") if "torchtune" not in sys.modules else None
    if spec is None or spec.submodule_search_locations is None:
        if "torchtune.modules.attention" in sys.modules:
            return sys.modules["torchtune.modules.attention"]
        raise CannotError("it is not installed")
    root = Path(spec.submodule_search_locations[0])
    bare = {"torchtune": root, "torchtune.modules": root / "modules", "torchtune.utils": root / "utils"}
    for name, folder in bare.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    return import_module("torchtune.modules.attention")
