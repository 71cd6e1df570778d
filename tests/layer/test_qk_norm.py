"""Norms of queries and keys against float64 computed by hand, PyTorch and transformers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from multihead.errors import ArgumentError, ShapeError
from multihead.functional import attention_weights
from multihead.layer.heads import merge_heads, split_heads
from multihead.layer.qk_norm import QKNorm, QKNorms
from tests.oracle import budget, difference

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 8, 5
KINDS = {
    "rms": QKNorm(),
    "rms over all heads": QKNorm(over="all"),
    "rms without weights": QKNorm(learned=False),
    "l2": QKNorm("l2"),
    "l2 without scales": QKNorm("l2", learned=False, initial_scale=3.0),
}
each = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def made(kind: QKNorm, dtype: torch.dtype = torch.float64) -> QKNorms:
    """Norms whose every number is its own."""
    norms = kind.build(HEADS, KV_HEADS, HEAD_DIM, dtype=dtype)
    for parameter in norms.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    return norms


def drawn(dtype: torch.dtype = torch.float64, batch: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    q = torch.randn(batch, length, HEADS * HEAD_DIM, dtype=torch.float64).to(dtype)
    k = torch.randn(batch, length, KV_HEADS * HEAD_DIM, dtype=torch.float64).to(dtype)
    return split_heads(q, HEADS), split_heads(k, KV_HEADS)


def by_hand(norms: QKNorms, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token and head by head, in float64."""
    kind = norms.qk_norm
    found = []
    for x, weight, is_query in ((q, norms.q_weight, True), (k, norms.k_weight, False)):
        out = x.double().clone()
        for b, h, i in product(*(range(size) for size in x.shape[:3])):
            row, others = x[b, h, i].double(), x[b, :, i].double()
            if kind.kind == "l2":
                scale = kind.initial_scale if norms.scale is None else norms.scale[h].double()
                out[b, h, i] = row / (row.pow(2).sum() + kind.eps).sqrt() * (scale * HEAD_DIM**0.5 if is_query else 1)
                continue
            square = (others if kind.over == "all" else row).pow(2).mean()
            columns = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM) if kind.over == "all" else slice(None)
            out[b, h, i] = row / (square + kind.eps).sqrt() * (1 if weight is None else weight.double()[columns])
        found.append(out.detach())
    return found[0], found[1]


@each
@settings(max_examples=20)
@given(
    batch=st.integers(0, 2),
    length=st.integers(0, 4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    grad=st.booleans(),
    strided=st.booleans(),
)
def test_norms_are_those_by_hand(
    kind: QKNorm, batch: int, length: int, dtype: torch.dtype, grad: bool, strided: bool
) -> None:
    norms = made(kind, dtype)
    q, k = (x.mT.contiguous().mT if strided else x for x in drawn(dtype, batch, length))
    with torch.set_grad_enabled(grad):
        found = norms(q, k)
    for ours, exact in zip(found, by_hand(norms, q, k), strict=True):
        assert ours.dtype == dtype
        assert difference(ours.detach(), exact) <= budget(exact, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_is_pytorchs_norm(dtype: torch.dtype) -> None:
    norms, (q, k) = made(KINDS["rms"], dtype), drawn(dtype)
    theirs = nn.RMSNorm(HEAD_DIM, eps=1e-6, dtype=dtype)
    for x, weight, ours in zip((q, k), (norms.q_weight, norms.k_weight), norms(q, k), strict=True):
        theirs.weight = weight
        torch.testing.assert_close(ours, theirs(x), rtol=1e-6, atol=1e-6)


def test_a_norm_of_each_head_is_that_of_qwen3() -> None:
    norms, (q, k) = made(KINDS["rms"], torch.float32), drawn(torch.float32)
    for x, weight, ours in zip((q, k), (norms.q_weight, norms.k_weight), norms(q, k), strict=True):
        theirs = Qwen3RMSNorm(HEAD_DIM, 1e-6)
        theirs.weight = weight
        torch.testing.assert_close(ours, theirs(x.transpose(1, 2)).transpose(1, 2), rtol=0, atol=1e-6)


def test_a_norm_of_all_heads_together_is_that_of_olmo2() -> None:
    norms, (q, k) = made(KINDS["rms over all heads"], torch.float32), drawn(torch.float32)
    for x, weight, ours in zip((q, k), (norms.q_weight, norms.k_weight), norms(q, k), strict=True):
        assert weight is not None
        theirs = Olmo2RMSNorm(len(weight), 1e-6)
        theirs.weight = weight
        torch.testing.assert_close(merge_heads(ours), theirs(merge_heads(x)), rtol=0, atol=1e-6)


def test_with_l2_a_score_is_a_cosine_times_the_scale_of_its_head() -> None:
    norms, (q, k) = made(QKNorm("l2", eps=1e-30)), drawn()
    assert norms.scale is not None
    q_normed, k_normed = norms(q, k)
    cosine = nn.functional.cosine_similarity(q[:, :, :, None], k.repeat_interleave(2, 1)[:, :, None], dim=-1)
    expected = (cosine * norms.scale[:, None, None]).softmax(-1)
    torch.testing.assert_close(attention_weights(q_normed, k_normed), expected, rtol=0, atol=1e-12)


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_vector_of_zeros_stays_zero_and_its_gradient_finite(kind: QKNorm, dtype: torch.dtype) -> None:
    q = torch.zeros(1, HEADS, 1, HEAD_DIM, dtype=dtype, requires_grad=True)
    k = torch.zeros(1, KV_HEADS, 1, HEAD_DIM, dtype=dtype, requires_grad=True)
    found = made(kind, dtype)(q, k)
    assert all(bool((x == 0).all()) for x in found)
    sum(x.sum() for x in found).backward()  # type: ignore[union-attr]
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


@each
def test_gradients_are_right(kind: QKNorm) -> None:
    norms = made(kind)
    parameters = dict(norms.named_parameters())

    def outputs(q: Tensor, k: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(norms, dict(zip(parameters, values, strict=True)), (q, k))

    def inputs(length: int) -> tuple[Tensor, ...]:
        q, k = drawn(batch=1, length=length)
        return q.detach().requires_grad_(), k.detach().requires_grad_(), *parameters.values()

    assert torch.autograd.gradcheck(outputs, inputs(2), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(outputs, inputs(1))


@each
def test_weights_of_several_models_are_mapped_over(kind: QKNorm) -> None:
    models, (q, k) = [made(kind) for _ in range(3)], drawn()
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]

    def one(parameters: dict[str, Tensor], q: Tensor) -> Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), (q, k))[0]  # type: ignore[no-any-return]

    if parameters:
        with torch.no_grad():
            found = torch.func.vmap(one, in_dims=(0, None))(parameters, q)
        torch.testing.assert_close(found, torch.stack([model(q, k)[0] for model in models]).detach())


@each
def test_layouts_of_projections_are_kept(kind: QKNorm) -> None:
    with torch.no_grad():
        assert all(x.transpose(1, 2).is_contiguous() for x in made(kind)(*drawn()))


@each
def test_it_compiles_and_autocast_keeps_dtypes(kind: QKNorm) -> None:
    norms, (q, k) = made(kind, torch.float32), drawn(torch.float32)
    torch._dynamo.reset()
    found = torch.compile(norms, fullgraph=True, backend="aot_eager")(q, k)
    torch.testing.assert_close(found, norms(q, k))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norms(q.bfloat16(), k)[0].dtype == torch.bfloat16
        torch.testing.assert_close(norms(q, k), found)


def test_weights_start_at_one_and_scales_at_initial_scale() -> None:
    norms = QKNorm(over="all").build(HEADS, KV_HEADS, HEAD_DIM)
    assert {name: tuple(p.shape) for name, p in norms.named_parameters()} == {"q_weight": (32,), "k_weight": (16,)}
    assert all(bool((parameter == 1).all()) for parameter in norms.parameters())
    norms = QKNorm("l2", initial_scale=7.0).build(HEADS, KV_HEADS, HEAD_DIM)
    assert {name: parameter.tolist() for name, parameter in norms.named_parameters()} == {"scale": [7.0] * 4}
    assert not list(QKNorm(learned=False).build(HEADS, KV_HEADS, HEAD_DIM).parameters())
    nn.init.zeros_(norms.scale)  # type: ignore[arg-type]
    norms.reset_parameters()
    assert norms.scale is not None
    assert norms.scale.tolist() == [7.0] * 4


@each
def test_norms_are_made_without_memory_and_filled_later(kind: QKNorm) -> None:
    norms = kind.build(HEADS, KV_HEADS, HEAD_DIM, device="meta", dtype=torch.bfloat16)
    assert all((p.device.type, p.dtype) == ("meta", torch.bfloat16) for p in norms.parameters())
    q, k = norms(*(x.to("meta", torch.bfloat16) for x in drawn()))
    assert (q.shape, k.dtype) == ((2, HEADS, LENGTH, HEAD_DIM), torch.bfloat16)
    norms = norms.to_empty(device="cpu").to(torch.float64)
    norms.reset_parameters()
    q, k = drawn()
    fresh = kind.build(HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    assert torch.equal(norms(q, k)[0], fresh(q, k)[0])


def test_its_repr_shows_its_options_and_it_can_be_copied() -> None:
    norms = made(QKNorm("l2"))
    assert "QKNorm(kind='l2', eps=1e-06, learned=True, over='head', initial_scale=10.0)" in repr(norms)
    q, k = drawn()
    assert torch.equal(copy.deepcopy(norms)(q, k)[0], norms(q, k)[0])
    assert QKNorm() == QKNorm("rms")
    assert len({QKNorm(), QKNorm("rms"), QKNorm("l2")}) == 2


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: QKNorm("layer"), """kind is 'layer'. Give "rms" or "l2"."""),  # type: ignore[arg-type]
        (lambda: QKNorm(over="batch"), """over is 'batch'. Give "head" or "all"."""),  # type: ignore[arg-type]
        (
            lambda: QKNorm("l2", over="all"),
            'kind is "l2" and over is "all". Give over="head": unit vectors are per head.',
        ),
        (lambda: QKNorm(eps=0.0), "eps is 0.0. Give a number above 0."),
        (lambda: QKNorm(eps=True), "eps is True. Give a number above 0."),
        (lambda: QKNorm("l2", initial_scale=-1.0), "initial_scale is -1.0. Give a number above 0."),
    ],
)
def test_invalid_options_are_rejected(made: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        made()


def test_heads_that_do_not_fit_are_rejected() -> None:
    q, k = drawn()
    for given_q, given_k, sentence in (
        (k, k, "q has shape (2, 2, 5, 8). Give (batch, heads, length, head_dim) with 4 heads of 8 columns."),
        (q, q, "k has shape (2, 4, 5, 8). Give (batch, heads, length, head_dim) with 2 heads of 8 columns."),
    ):
        with pytest.raises(ShapeError, match=f"^{re.escape(sentence)}$"):
            made(QKNorm())(given_q, given_k)
