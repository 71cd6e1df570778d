"""What users do on a GPU: the layer, its training, caches, graphs, models and their statistics. Skipped without one.

`python -m tests.fuzz --device cuda` compares random calls, masks and values with float64; these are the ways to call.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import contract, masks
from multihead.compat.torch_nn import from_torch

if not torch.cuda.is_available():
    pytest.skip("it needs a GPU", allow_module_level=True)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def drawn(queries: int, keys: int, *, dim: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(2, *size, dim, device=CUDA).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("call", contract.CALLS, ids=str)
@pytest.mark.parametrize("kernel", ["flex", "sdpa", "ragged", "statistics"])
def test_every_kernel_passes_the_contract(kernel: str, call: contract.Call) -> None:
    """PyTorch's fused kernels take full and causal attention, FlashAttention sequences; the others all."""
    sequences = call.name in ("window", "documents", "lengths", "queries without keys", "NaN in padding")
    taken = {
        "flex": True,
        "statistics": True,
        "sdpa": call.name in ("full", "causal", "one query", "grouped heads", "sinks"),
        "ragged": sequences and call.dtype != torch.float32 and call.head_dim % 8 == 0,
    }
    assert contract.accepts(kernel, call, CUDA) == taken[kernel]
    if contract.accepts(kernel, call, CUDA):
        contract.check(kernel, call, CUDA)


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Window(100, after=3)], ids=["sdpa", "flex"])
def test_a_second_backward_pass_gives_the_gradients_of_the_first(mask: masks.Mask) -> None:
    given = drawn(300, 300, dim=64, dtype=torch.bfloat16)
    output = mh.attention(*given, mask=mask)
    first = torch.autograd.grad(output, given, torch.ones_like(output), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(output, given, torch.ones_like(output)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=2e-2)  # dq is summed in any order


def test_a_call_waits_for_no_value_of_the_gpu() -> None:
    q, k, v = (each.detach() for each in drawn(256, 256, dim=64, dtype=torch.bfloat16))
    lengths = torch.tensor([256, 100], device=CUDA)
    mask = masks.Causal() & masks.Lengths(lengths)
    mh.attention(q, k, v, mask=mask)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mh.attention(q, k, v, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layers() -> tuple[mh.MultiHeadAttention, mh.MultiHeadAttention]:
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(128, 4, num_kv_heads=2, rotary=mh.Rotary(), qk_norm=mh.QKNorm())
    return layer, copy.deepcopy(layer).to(CUDA)


def test_a_layer_gives_the_outputs_and_gradients_that_it_gives_on_the_cpu() -> None:
    layer, there = layers()
    x = torch.randn(3, 50, 128)
    left: dict[str, Any] = {"lengths": [5, 0, 50], "padding_side": "left"}
    for options in ({}, {"mask": masks.Causal()}, {"lengths": [50, 20, 1]}, left):
        results = []
        for module, device in ((layer, CPU), (there, CUDA)):
            module.zero_grad()
            output = module(x.to(device), **options)
            output.square().sum().backward()
            results.append([output.detach().cpu(), *(each.grad.cpu() for each in module.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-4)


@pytest.mark.parametrize("cache", [{}, {"capacity": 64}, {"window": 16}])
def test_a_cache_on_the_gpu_gives_what_a_call_of_all_tokens_gives(cache: dict[str, int]) -> None:
    _, there = layers()
    x = torch.randn(2, 40, 128, device=CUDA)
    mask = masks.Causal() & masks.Window(16) if "window" in cache else masks.Causal()
    with torch.no_grad():
        whole = there(x, mask=mask)
        kept = mh.KeyValueCache(**cache)
        steps = [there(x[:, n : n + (20 if n == 0 else 1)], mask=mask, cache=kept) for n in (0, *range(20, 40))]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=2e-5, rtol=1e-4)


def test_a_compiled_layer_gives_what_it_gives_uncompiled() -> None:
    _, there = layers()
    x = torch.randn(2, 64, 128, device=CUDA)
    compiled = torch.compile(there, fullgraph=True)
    for mask in (masks.Causal(), masks.Window(7)):
        torch.testing.assert_close(compiled(x, mask=mask), there(x, mask=mask), atol=2e-5, rtol=1e-4)


def test_under_autocast_a_layer_computes_in_bfloat16() -> None:
    _, there = layers()
    x = torch.randn(2, 64, 128, device=CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        output = there(x, mask=masks.Causal())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), there(x, mask=masks.Causal()), atol=5e-2, rtol=5e-2)


def test_packed_texts_give_what_padded_ones_give() -> None:
    _, there = layers()
    x, lengths = torch.randn(3, 50, 128, device=CUDA), [50, 7, 31]
    tokens, packing = mh.pack(x, lengths)
    padded, packed = there(x, lengths=lengths), mh.unpack(there(tokens, packing=packing), packing)
    torch.testing.assert_close(packed, padded, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::multihead.errors.SlowPathWarning")
def test_second_derivatives_are_those_of_the_reference_kernel() -> None:
    given = drawn(20, 20, dim=16, dtype=torch.float32, kv_heads=4)

    def twice(kernel: str) -> tuple[Tensor, ...]:
        output = mh.attention(*given, mask=masks.Causal(), kernel=kernel)
        first = torch.autograd.grad(output.square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), given)

    for one, two, other in zip(*map(twice, ("flex", "sdpa", "reference")), strict=True):
        torch.testing.assert_close(two, other, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_a_mask_of_100_000_tokens_takes_memory_linear_in_them() -> None:
    q, k, v = (torch.randn(1, 2, 100_000, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
    mask = masks.Causal() & masks.Window(512)
    mh.attention(q, k, v, mask=mask)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mh.attention(q, k, v, mask=mask)
    assert torch.cuda.max_memory_allocated() - before < 200 << 20


def llama() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(**sizes, head_dim=32, intermediate_size=64, vocab_size=100, initializer_range=0.3)
    return hf.LlamaForCausalLM(config).eval()


def test_a_model_on_the_gpu_gives_what_it_gives_on_the_cpu() -> None:
    model = llama()
    there = copy.deepcopy(model).to(CUDA)
    ids = torch.randint(0, 100, (2, 60))
    with torch.no_grad(), mh.strict():
        expected = model(ids).logits
        with mh.use(there) as used:
            found = there(ids.to(CUDA)).logits.cpu()
            written = there.generate(ids.to(CUDA), max_new_tokens=8, do_sample=False)
            explained = used.explain(input_ids=ids.to(CUDA)).values()
        assert [each.kernel for each in explained] == ["flex", "flex"]  # grouped heads in float32
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(written.cpu(), model.generate(ids, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("keep", ["cpu", "device", "statistics", "summary"])
def test_every_head_of_a_model_is_measured_as_on_the_cpu(keep: Any) -> None:
    model = llama()
    ids = torch.randint(0, 100, (2, 60))
    tables = []
    for device in (CPU, CUDA):
        there = copy.deepcopy(model).to(device)
        with torch.no_grad(), mh.observe(there, keep=keep) as seen:
            there(ids.to(device))
        tables.append([layer.means() for layer in seen.layers])
    for one, other in zip(*tables, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name].cpu(), value.cpu(), atol=1e-3, rtol=1e-3, equal_nan=True, msg=name)


def test_a_head_that_is_switched_off_changes_a_model_as_on_the_cpu() -> None:
    model = llama()
    ids = torch.randint(0, 100, (2, 60))
    results = []
    for device in (CPU, CUDA):
        there = copy.deepcopy(model).to(device)
        with torch.no_grad(), mh.ablate(there, ["L0 H1", (1, 2)]):
            results.append(there(ids.to(device)).logits.cpu())
    torch.testing.assert_close(*results, atol=2e-3, rtol=1e-3)


def test_a_drop_in_gives_what_the_layer_of_torch_gives() -> None:
    theirs = torch.nn.MultiheadAttention(128, 4, batch_first=True, device=CUDA).eval()
    ours = from_torch(theirs)
    x = torch.randn(2, 50, 128, device=CUDA)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], atol=2e-5, rtol=1e-4)
