"""Returned weights are softmax(scores): after dropout, stored, averaged, with gradients, and without hidden NaN."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.compat.weights import LastWeights, attend_with_weights
from multihead.functional import attend, request_of
from multihead.kernels.call import AttentionCall, AttentionRequest, find_surroundings, listen
from multihead.masks.positions import TilePositions

SHOWN = torch.tensor([[True, True, False, False], [True, False, True, False], [False, False, False, False]])

MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "lengths": masks.Lengths((6, 3)),
    "by head": masks.Keep(torch.arange(2 * 3 * 5 * 6).view(2, 3, 5, 6) % 7 > 2),
}
BIASES = {"none": (), "of keys": (2, 1, 1, 6), "of heads": (1, 3, 1, 1), "of cells": (2, 3, 5, 6)}


def request(*, dropout: float = 0.0, grad: bool = False, mask: masks.Mask | None = None) -> AttentionRequest:
    q, k, v = (torch.randn(2, 2, n, 5, dtype=torch.float64, requires_grad=grad) for n in (3, 4, 4))
    return request_of(q, k, v, mask or masks.Keep(SHOWN, "queries keys"), dropout=dropout)


def expected_weights(call: AttentionRequest) -> Tensor:
    scores = torch.einsum("bhic,bhjc->bhij", call.q, call.k) * call.scale
    exponentials = scores.exp() * SHOWN
    return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)


def test_the_output_is_computed_from_the_weights() -> None:
    call = request()
    output, weights = attend_with_weights(call)
    torch.testing.assert_close(weights, expected_weights(call), rtol=0, atol=1e-12)
    torch.testing.assert_close(output, weights @ call.v, rtol=0, atol=1e-12)


def test_under_dropout_the_output_is_computed_from_the_weights_after_dropout() -> None:
    call = request(dropout=0.4)
    output, weights = attend_with_weights(call)
    whole = expected_weights(call)
    dropped = (weights == 0) & (whole > 0)
    assert dropped.any()
    torch.testing.assert_close(weights, torch.where(dropped, torch.zeros_like(whole), whole / 0.6), rtol=0, atol=1e-12)
    torch.testing.assert_close(output, weights @ call.v, rtol=0, atol=1e-12)


def test_gradients_flow_through_the_weights() -> None:
    call = request(grad=True)
    last = LastWeights()
    last.store(call)
    later = last.weights()
    assert later is not None
    cotangent = torch.randn_like(later)
    expected = torch.autograd.grad((expected_weights(call) * cotangent).sum(), (call.q, call.k))
    for weights in (attend_with_weights(call)[1], later):
        actual = torch.autograd.grad((weights * cotangent).sum(), (call.q, call.k))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_weights_without_gradients_are_the_same() -> None:
    call = request(grad=True)
    with torch.no_grad():
        torch.testing.assert_close(attend_with_weights(call)[1], expected_weights(call), rtol=0, atol=1e-12)


def test_a_call_without_a_mask_or_without_a_key_has_its_weights_too() -> None:
    call = request(grad=True, mask=masks.Full())
    torch.testing.assert_close(attend_with_weights(call)[1].sum(-1), torch.ones(2, 2, 3, dtype=torch.float64))
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    output, weights = attend_with_weights(request_of(q, q[:, :, :0], q[:, :, :0]))
    assert weights.shape == (1, 1, 3, 0)
    assert (output == 0).all()


def test_a_hidden_nan_reaches_no_weight_and_no_gradient_and_a_seen_one_its_own_rows() -> None:
    call = request(grad=True)
    with torch.no_grad():
        call.k[:, :, 3] = torch.nan  # hidden from all
        call.v[0, 0, 1] = torch.nan  # seen by the first query alone
    output, weights = attend_with_weights(call)
    assert weights[0, 0, 0, :2].isnan().all()
    assert (weights[0, 0, 0, 2:] == 0).all()
    assert output[0, 0, 0].isnan().all()
    clean = torch.ones(2, 2, 3, dtype=torch.bool)
    clean[0, 0, 0] = False
    assert weights[clean].isfinite().all()
    assert output[clean].isfinite().all()
    gradients = torch.autograd.grad(weights[clean].square().sum() + output[clean].sum(), (call.q, call.k, call.v))
    assert all(each.isfinite().all() for each in gradients)


def test_half_precision_gets_its_weights_in_its_own_dtype() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.bfloat16).unbind()
    output, weights = attend_with_weights(request_of(q, k, v))
    assert output.dtype == weights.dtype == torch.bfloat16


def test_last_weights_are_neither_copied_nor_pickled() -> None:
    last = LastWeights()
    assert last.weights() is None
    call = request(grad=True)
    last.store(call)
    assert last.weights() is not None
    assert copy.deepcopy(last).weights() is None
    assert pickle.loads(pickle.dumps(last)).weights() is None
    weights = torch.ones(1)
    last.store(weights)
    assert last.weights() is weights


def test_a_compiled_layer_has_the_same_output_and_weights() -> None:
    call = request(grad=True)
    compiled = torch.compile(lambda q, k, v: attend_with_weights(request_of(q, k, v, call.mask)), backend="eager")
    torch.testing.assert_close(compiled(call.q, call.k, call.v), attend_with_weights(call))


def biased(mask: masks.Mask, bias: tuple[int, ...], **options: float) -> tuple[AttentionRequest, list[Tensor]]:
    q, k = (torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True) for length in (5, 6))
    leaves = [q, k]
    if bias:
        leaves.append(torch.randn(bias, dtype=torch.float64, requires_grad=True))
    added = leaves[2] if bias else None
    return request_of(q, k, k.detach(), mask, added, query_start=0, **options), leaves  # type: ignore[arg-type]


def softmaxed(call: AttentionRequest) -> Tensor:
    """Compute the weights by the formula."""
    scores = call.q @ call.k.mT / 2
    scores = scores if call.bias is None else scores + call.bias
    return scores.masked_fill(~call.mask.tile(TilePositions.from_sizes(5, 6)), -torch.inf).softmax(-1)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_weights_and_gradients_are_those_of_the_softmax(mask: str, bias: str, *, average: bool) -> None:
    call, leaves = biased(MASKS[mask], BIASES[bias])
    actual = attend_with_weights(call, average=average)[1]
    expected = softmaxed(call).mean(1) if average else softmaxed(call)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    loss = torch.randn(actual.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad((weights * loss).sum(), leaves) for weights in (actual, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_graph_of_weights_keeps_no_tensor_of_queries_by_keys() -> None:
    call, _ = biased(masks.Full(), ())
    weights = attend_with_weights(call, average=True)[1]
    node = weights.grad_fn
    assert node is not None
    kept = [tensor.shape for tensor in node.saved_tensors if tensor is not None]  # type: ignore[attr-defined]
    assert kept == [(2, 3, 5, 4), (2, 3, 6, 4)]


def test_dropout_with_weights_is_that_of_the_call_without_them() -> None:
    call, _ = biased(masks.Causal(), (), dropout=0.5)
    call = replace(call, v=torch.eye(6, 4, dtype=torch.float64).expand(2, 3, 6, 4))
    before = torch.get_rng_state()
    expected, after = attend(call).output, torch.get_rng_state()
    torch.set_rng_state(before)
    output, weights = attend_with_weights(call)
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights[..., :4], output, rtol=0, atol=1e-12)  # the values are unit vectors
    share = (weights == 0).double().mean()
    assert 0.3 < share < 0.9
    torch.set_rng_state(before)
    average = attend_with_weights(call, average=True)[1]
    torch.testing.assert_close(average, weights.mean(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_call_with_weights_is_published_once_and_without_dropout(dropout: float) -> None:
    calls: list[AttentionCall] = []

    class Calls:
        requested_statistics = frozenset[str]()

        def receive(self, call: AttentionCall) -> None:
            calls.append(call)

    with listen(Calls()):
        attend_with_weights(request(dropout=dropout))
    assert [call.request.dropout for call in calls] == [0.0]


def test_a_query_that_sees_no_key_has_weights_of_zero_and_a_row_of_nan_is_nan_where_it_sees() -> None:
    call, _ = biased(masks.Lengths((0, 4)), ())
    q = call.q.detach().clone()
    q[1, 0, 2] = torch.nan
    call = replace(call, q=q)
    weights = attend_with_weights(call)[1]
    assert (weights[0] == 0).all()
    assert weights[1, 0, 2, :4].isnan().all()
    assert (weights[1, 0, 2, 4:] == 0).all()
    assert weights[1, 1].isfinite().all()


@pytest.mark.parametrize("bias", ["none", "of heads"])
@pytest.mark.parametrize("mask", [masks.Full(), masks.Lengths((0, 4))])
def test_weights_have_second_derivatives(mask: masks.Mask, bias: str) -> None:
    call, leaves = biased(mask, BIASES[bias])

    def weights(q: Tensor, k: Tensor, *added: Tensor) -> Tensor:
        return attend_with_weights(replace(call, q=q, k=k, bias=added[0] if added else None), average=True)[1]

    torch.autograd.gradgradcheck(weights, leaves, fast_mode=True)


@pytest.mark.parametrize("average", [False, True])
def test_heads_that_are_computed_one_by_one_have_the_weights_of_all(
    *, average: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, leaves = biased(MASKS["by head"], BIASES["of keys"])
    results = []
    for cells in (1, 2 * 2 * 5 * 6, 1 << 18):  # one head at a time, two, and all three
        monkeypatch.setattr("multihead.compat.weights.MAX_WEIGHTS_PER_TILE", cells)
        weights = attend_with_weights(call, average=average)[1]
        results.append((weights, *torch.autograd.grad((weights**2).sum(), leaves)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_trace_and_a_transform_have_the_same_weights_and_gradients() -> None:
    call = request()

    def weights(q: Tensor, k: Tensor) -> Tensor:
        return attend_with_weights(replace(call, q=q, k=k, surroundings=find_surroundings()))[1]

    traced = torch.jit.trace(weights, (call.q, call.k), check_trace=False)
    torch.testing.assert_close(traced(call.q, call.k), weights(call.q, call.k), rtol=0, atol=1e-12)
    gradients = torch.func.grad(lambda q, k: weights(q, k).square().sum(), (0, 1))(call.q, call.k)
    leaves = [tensor.clone().requires_grad_() for tensor in (call.q, call.k)]
    expected = torch.autograd.grad(weights(*leaves).square().sum(), leaves)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_finite_bias_hides_no_key_and_shows_no_hidden_one(dtype: torch.dtype) -> None:
    """Hidden scores were once filled with the lowest finite number, which then took part in the softmax."""
    q, k = torch.zeros(1, 1, 2, 4, dtype=dtype), torch.zeros(1, 1, 3, 4, dtype=dtype)
    bias = torch.full((1, 1, 2, 3), torch.finfo(dtype).min, dtype=dtype)
    _, weights = attend_with_weights(request_of(q, k, k, masks.Lengths((2,)), bias))
    assert torch.equal(weights, torch.tensor([0.5, 0.5, 0.0], dtype=dtype).expand(1, 1, 2, 3))
