"""The calls whose launches, host reads, copies and frames on a GPU are kept in counts.json.

python -m tests.simulated_gpu.calls           print them
python -m tests.simulated_gpu.calls --write   write counts.json
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.kernels.proven import UNPROVEN_VARIABLE
from multihead.models.mask_functions import padding_mask
from tests.simulated_gpu.device import OnGpu, begin_to_count, count, count_frames, simulated_gpu, to_gpu

FILE = Path(__file__).with_name("counts.json")
LAYERS = (1, 2)  # models of two sizes, whose difference is what a layer takes


def drawn(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return to_gpu(torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype))


# ---- single calls


def attention_calls() -> dict[str, Callable[[], object]]:
    """Calls of 2 samples, 4 heads of 64 columns and 256 keys; masks are made once, as layers do."""
    q, one, grouped = drawn(2, 4, 256, 64), drawn(2, 4, 1, 64), drawn(2, 2, 256, 64)
    single, single_grouped = (drawn(2, heads, 256, 64, dtype=torch.float32) for heads in (4, 2))
    causal, window = masks.Causal(), masks.Causal() & masks.Window(64)
    lengths, documents = masks.Lengths((256, 100)), masks.Documents((100, 100, 56)) & causal
    padded = lengths & causal
    bias, no_interval = drawn(1, 4, 256, 256), masks.Window(64) | masks.Prefix(8)
    sinks = drawn(4, dtype=torch.float32)
    trained, trained_grouped = (each.detach().requires_grad_() for each in (q, grouped))
    return {
        "full": lambda: mh.attention(q, q, q),
        "causal": lambda: mh.attention(q, q, q, mask=causal),
        "causal, grouped heads": lambda: mh.attention(q, grouped, grouped, mask=causal),
        "one query": lambda: mh.attention(one, grouped, grouped),
        "causal, with gradients": lambda: with_gradients(trained, trained),
        "causal, grouped heads, with gradients": lambda: with_gradients(trained, trained_grouped),
        "lengths, causal, with gradients": lambda: with_gradients(trained, trained, padded),
        "lengths, causal, sinks": lambda: mh.attention(q, q, q, mask=padded, sinks=sinks),
        "causal, with the logsumexp": lambda: mh.attention_with_logsumexp(q, q, q, mask=causal),
        "lengths": lambda: mh.attention(q, q, q, mask=lengths),
        "lengths, causal": lambda: mh.attention(q, q, q, mask=padded),
        "documents": lambda: mh.attention(q, q, q, mask=documents),
        "window": lambda: mh.attention(q, q, q, mask=window),
        "softcap": lambda: mh.attention(q, q, q, mask=causal, softcap=30.0),
        "bias": lambda: mh.attention(q, q, q, mask=causal, bias=bias),
        "no interval": lambda: mh.attention(q, q, q, mask=no_interval),
        "dropout": lambda: mh.attention(q, q, q, mask=causal, dropout=0.1),
        "float32, causal": lambda: mh.attention(single, single, single, mask=causal),
        "float32, causal, grouped heads": lambda: mh.attention(single, single_grouped, single_grouped, mask=causal),
    }


def ragged_calls() -> dict[str, Callable[[], object]]:
    """Calls of the kernel `ragged`: tokens before heads, as a projection gives them; "cache": k and v as one holds."""
    q, k = (drawn(2, 256, 4, 64).transpose(1, 2) for _ in range(2))
    row, held = drawn(1, 512, 4, 64).transpose(1, 2), drawn(2, 4, 256, 64)
    causal, lengths = masks.Causal(), masks.Lengths((256, 100))
    documents, window = masks.Documents((100, 100, 56)) & causal, causal & masks.Window(64)
    packed, right = masks.Documents((200, 312)) & causal, lengths & causal
    left = padding_mask(to_gpu(torch.arange(256) >= torch.tensor([[0], [50]]))) & causal
    return {
        "lengths": lambda: mh.attention(q, k, k, mask=lengths),
        "documents": lambda: mh.attention(q, k, k, mask=documents),
        "packed row": lambda: mh.attention(row, row, row, mask=packed),
        "window": lambda: mh.attention(q, k, k, mask=window),
        "padding on the left, causal": lambda: mh.attention(q, k, k, mask=left),
        "padding on the left, causal, cache": lambda: mh.attention(q, held, held, mask=left),
        "padding on the right, causal": lambda: mh.attention(q, k, k, mask=right),
        "lengths, with the logsumexp": lambda: mh.attention_with_logsumexp(q, k, k, mask=lengths),
    }


def with_gradients(q: Tensor, k: Tensor, mask: masks.Mask | None = None) -> Tensor:
    """Compute the forward pass of a call, by default a causal one, whose q, k and v require gradients."""
    with torch.enable_grad():
        return mh.attention(q, k, k, mask=masks.Causal() if mask is None else mask)


def statistics_calls() -> dict[str, Callable[[], object]]:
    """Statistics of 256 keys; those of more keys take more tiles, and more launches and reads."""
    q, padded = drawn(2, 4, 256, 64), drawn(2, 4, 64, 64)
    causal, lengths = masks.Causal(), masks.Lengths((64, 25))
    more = ("received", "pooled_map")
    return {
        "statistics": lambda: mh.statistics(q, q, mask=causal),
        "statistics, lengths": lambda: mh.statistics(padded, padded, mask=lengths),
        "statistics, received and map": lambda: mh.statistics(q, q, mask=causal, probes=more),
    }


# ---- a layer of a Llama


def import_models() -> Any:
    """Import the models' code, before the simulation replaces functions of PyTorch that it may read and keep."""
    return importlib.import_module("transformers.models.llama.modeling_llama")


def llama(layers: int, on_gpu: Callable[[Tensor], Tensor] = OnGpu.of) -> Any:
    """Build a tiny Llama in bfloat16 whose parameters and buffers a function moves, by default to the simulated GPU."""
    hf = import_models()
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = hf.LlamaConfig(**sizes, num_hidden_layers=layers, intermediate_size=64, vocab_size=100)
    model = hf.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(on_gpu(parameter.detach()), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = on_gpu(buffer.detach())
    return model


def used(model: Any, ids: Tensor, padding: Tensor | None) -> Callable[[], object]:
    mh.use(model)
    return lambda: model(ids, attention_mask=padding, use_cache=False)


def used_with_cache(model: Any, ids: Tensor, padding: Tensor | None) -> Callable[[], object]:
    mh.use(model)
    return lambda: model(ids, attention_mask=padding)


def observed(keep: str) -> Callable[..., Callable[[], object]]:
    """Return what observes a model."""

    def make(model: Any, ids: Tensor, padding: Tensor | None) -> Callable[[], object]:
        def call() -> None:
            with mh.observe(model, keep=keep):
                model(ids, attention_mask=padding, use_cache=False)

        return call

    return make


def decoding(keep: str | None) -> Callable[..., Callable[[], object]]:
    """Return what decodes one token after a text, of which the step alone is counted; without `keep`, unobserved."""

    def make(model: Any, ids: Tensor, padding: Tensor | None) -> Callable[[], object]:
        if keep is None:
            mh.use(model)

        def call() -> None:
            cache = importlib.import_module("transformers.cache_utils").DynamicCache(config=model.config)
            with nullcontext() if keep is None else mh.observe(model, keep=keep):
                model(ids, attention_mask=padding, past_key_values=cache)
                one = torch.ones(len(ids), 1, dtype=torch.int64, device=ids.device)
                longer = None if padding is None else torch.cat([padding, one], 1)
                begin_to_count()
                model(ids[:, :1], attention_mask=longer, past_key_values=cache)

        return call

    return make


def layer_calls() -> dict[str, tuple[Callable[..., Callable[[], object]], int, str | None]]:
    """Name -> what runs the model, its samples, and on which side they are padded."""
    return {
        "a layer used": (used, 2, None),
        "a layer used, padded": (used, 2, "right"),
        "a layer used, padded on the left": (used, 2, "left"),
        "a layer used, with a cache": (used_with_cache, 2, None),
        "a step used": (decoding(None), 8, None),
        "a step used, padded on the left": (decoding(None), 2, "left"),
        **layer_calls_of_operators(),
    }


def observed_layer_calls() -> dict[str, tuple[Callable[..., Callable[[], object]], int, str | None]]:
    """Return observed layers, as `layer_calls` does."""
    return {
        **layer_calls_of_operators(),
        "a layer observed, with q and k, padded": (observed("cpu"), 2, "right"),
        "a layer observed, summary": (observed("summary"), 8, None),
        "a layer observed, summary, padded": (observed("summary"), 2, "right"),
        "a step observed": (decoding("statistics"), 8, None),
        "a step observed, padded on the left": (decoding("statistics"), 2, "left"),
        "a step observed, with q and k": (decoding("cpu"), 8, None),
        "a step observed, summary": (decoding("summary"), 8, None),
        "a step observed, summary, padded on the left": (decoding("summary"), 2, "left"),
    }


def layer_calls_of_operators() -> dict[str, tuple[Callable[..., Callable[[], object]], int, str | None]]:
    """Return the observed layers that are counted without our kernels too, as `layer_calls` does."""
    return {
        "a layer observed, 1 sample": (observed("statistics"), 1, None),
        "a layer observed, 8 samples": (observed("statistics"), 8, None),
        "a layer observed, padded on the left": (observed("statistics"), 2, "left"),
        "a layer observed, padded": (observed("statistics"), 2, "right"),
    }


def ragged_layer_calls() -> dict[str, tuple[Callable[..., Callable[[], object]], int, str | None]]:
    """Return layers with the kernel `ragged`, as `layer_calls` does."""
    return {
        "a layer used, padded on the left": (used, 2, "left"),
        "a layer used, padded on the left, with a cache": (used_with_cache, 2, "left"),
        "a layer used, padded": (used, 2, "right"),
    }


def count_layer(make: Callable[..., Callable[[], object]], samples: int, side: str | None) -> dict[str, int]:
    """Return what one layer takes: the difference of two models, divided by their difference in layers."""
    ids = to_gpu(torch.randint(0, 100, (samples, 60), generator=torch.Generator().manual_seed(0)))
    padding = torch.ones(samples, 60, dtype=torch.int64)
    padding[-1, slice(40, None) if side == "right" else slice(20)] = 0
    few, many = (count(make(llama(layers), ids, None if side is None else to_gpu(padding))) for layers in LAYERS)
    return {name: (many[name] - few[name]) // (LAYERS[1] - LAYERS[0]) for name in few}


# ---- the table

FRAMES = 10  # a call that enters this many functions more than the table says is a failure


def count_all(call: Callable[[], object]) -> dict[str, int]:
    """Return what the second call of a function takes, and how many functions the third one enters."""
    return {**count(call), "frames": count_frames(call, before=2)}


def measure_all() -> dict[str, dict[str, int]]:
    """Count every call."""
    found: dict[str, dict[str, int]] = {}
    with torch.no_grad():
        for name, call in attention_calls().items():
            found[name] = count_all(call)
        for name, call in statistics_calls().items():
            found[name] = count(call)
        for name, (make, samples, side) in layer_calls().items():
            found[name] = count_layer(make, samples, side)
        with mock.patch.dict(os.environ, {UNPROVEN_VARIABLE: "statistics"}):
            for name, call in statistics_calls().items():
                found[f"kernels: {name}"] = count(call)
            for name, (make, samples, side) in observed_layer_calls().items():
                found[f"kernels: {name}"] = count_layer(make, samples, side)
        with mock.patch.dict(os.environ, {UNPROVEN_VARIABLE: "ragged"}):
            for name, call in ragged_calls().items():
                found[f"ragged: {name}"] = count_all(call)
            for name, (make, samples, side) in ragged_layer_calls().items():
                found[f"ragged: {name}"] = count_layer(make, samples, side)
    return found


def differences(found: dict[str, dict[str, int]], table: dict[str, dict[str, int]]) -> list[str]:
    """Return a sentence for each count that is not the one of the table; frames may differ by fewer than FRAMES."""
    sentences = []
    for name, counts in found.items():
        for kind, number in counts.items():
            known = table.get(name, {}).get(kind, 0)
            if abs(number - known) >= (FRAMES if kind == "frames" else 1):
                sentences.append(f"{name}: {number} {kind}, and counts.json has {known}.")
    return sentences


def main() -> None:
    """Print the table, and write it if --write is given."""
    import_models()
    with simulated_gpu():
        found = measure_all()
    for name, counts in found.items():
        print(f"{name:56}", ", ".join(f"{kind} {number}" for kind, number in counts.items()))  # noqa: T201
    if "--write" in sys.argv[1:]:
        rows = [f'  "{name}": {json.dumps(counts)}' for name, counts in found.items()]
        versions = f' "torch": "{torch.__version__.split("+")[0]}",\n "python": "{sys.version.split()[0]}",'
        text = "{\n" + versions + '\n "calls": {\n' + ",\n".join(rows) + "\n }\n}\n"
        FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
