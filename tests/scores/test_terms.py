"""The softcap of the scores, and the sinks of their softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead import masks
from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.functional import attention, attention_weights, attention_with_logsumexp
from multihead.scores.terms import add_sinks, apply_softcap
from tests import oracle
from tests.kernel_names import EACH, exactest, rounding


def test_scores_stay_within_the_cap_and_small_ones_stay_as_they_are() -> None:
    scores = torch.tensor([-1e6, -1e-6, 0.0, 1e-6, 1e6], dtype=torch.float64)
    assert apply_softcap(scores, 5.0).tolist() == pytest.approx([-5, -1e-6, 0, 1e-6, 5], abs=1e-15)
    assert apply_softcap(scores, None) is scores


def test_a_cap_counts_before_the_softmax() -> None:
    q = torch.full((1, 1, 1, 1), 100.0, dtype=torch.float64)
    k = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    _, logsumexp = attention_with_logsumexp(q, k, k, softcap=2.0)
    assert logsumexp.item() == pytest.approx(float(torch.tensor([2.0, 0.0]).double().logsumexp(0)), abs=1e-12)


@pytest.mark.parametrize("softcap", [0, -1.0, float("inf"), float("nan"), True, "50"])
def test_a_cap_that_is_no_positive_number_is_refused(softcap: Any) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ArgumentError) as refusal:
        attention(q, q, q, softcap=softcap)
    assert str(refusal.value) == f"softcap is {softcap!r}. Give a positive number, for example 50.0, or None."


Q, K, V = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64).unbind()


def given(kernel: str) -> list[torch.Tensor]:
    """q, k and v in the most precise dtype of the kernel."""
    return [tensor.to(exactest(kernel)) for tensor in (Q, K, V)]


@pytest.mark.parametrize("kernel", EACH)
def test_a_sink_is_one_more_key_whose_value_is_zero(kernel: str) -> None:
    sinks = torch.tensor([0.3, -2.0], dtype=torch.float64)
    scores = torch.cat([Q @ K.mT / 8**0.5, sinks.view(1, 2, 1, 1).expand(-1, -1, 5, -1)], -1)
    output, logsumexp = attention_with_logsumexp(*given(kernel), sinks=sinks, kernel=kernel)
    assert torch.allclose(output.double(), scores.softmax(-1)[..., :5] @ V, atol=rounding(kernel))
    assert torch.allclose(logsumexp.double(), scores.logsumexp(-1), atol=rounding(kernel))
    assert torch.allclose(attention_weights(Q, K, sinks=sinks), scores.softmax(-1)[..., :5], atol=1e-14)


@pytest.mark.parametrize("kernel", EACH)
def test_a_sink_of_minus_infinity_has_no_weight(kernel: str) -> None:
    sinks = torch.full((2,), -torch.inf, dtype=torch.float64, requires_grad=True)
    output, logsumexp = attention_with_logsumexp(*given(kernel), sinks=sinks, kernel=kernel)
    plain, plain_logsumexp = attention_with_logsumexp(*given(kernel), kernel=kernel)
    assert torch.allclose(output, plain, atol=rounding(kernel))
    assert torch.allclose(logsumexp, plain_logsumexp, atol=rounding(kernel))
    (output.sum() + logsumexp.sum()).backward()
    assert sinks.grad is not None
    assert sinks.grad.tolist() == [0, 0]


@pytest.mark.parametrize("kernel", EACH)
def test_a_huge_sink_has_all_the_weight(kernel: str) -> None:
    output, logsumexp = attention_with_logsumexp(*given(kernel), sinks=torch.full((2,), 1e4), kernel=kernel)
    assert bool((output == 0).all())
    assert bool((logsumexp / 1e4 - 1).abs().max() <= torch.finfo(exactest(kernel)).eps)


@pytest.mark.parametrize("sink", [-torch.inf, 1e4])
@pytest.mark.parametrize("kernel", EACH)
def test_gradients_are_those_of_float64_next_to_queries_without_keys(kernel: str, sink: float) -> None:
    """There exp(sink - 0) of a huge sink overflows, and 0 * inf is NaN."""
    mask = masks.Lengths(torch.tensor([[0, 3, 0, 5, 1]]))
    sinks = torch.tensor([sink, -0.3], dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (*given(kernel), sinks.to(exactest(kernel)))]
    output, logsumexp = attention_with_logsumexp(*leaves[:3], mask=mask, sinks=leaves[3], kernel=kernel)
    exact_leaves = [tensor.clone().requires_grad_() for tensor in (Q, K, V, sinks)]
    exact = oracle.attend(*exact_leaves[:3], oracle.shown(mask, (1, 2, 5, 5)), sinks=exact_leaves[3])
    found, expected = (
        torch.autograd.grad(output.square().sum() + logsumexp.masked_fill(empty, 0).sin().sum(), each)
        for output, logsumexp, empty, each in (
            (output, logsumexp, logsumexp == -torch.inf, leaves),
            (exact.output, exact.logsumexp, exact.logsumexp == -torch.inf, exact_leaves),
        )
    )
    size = 1 + 1e4 * (sink > 0)  # sin of a large number multiplies its rounding
    for one, two in zip(found, expected, strict=True):
        assert oracle.difference(one, two) < size * rounding(kernel)


@pytest.mark.parametrize("sink", [0.0, torch.inf, torch.nan])
def test_an_empty_row_stays_empty(sink: float) -> None:
    empty, sinks = torch.full((1, 2, 1), -torch.inf), torch.tensor([0, sink])
    output, logsumexp = add_sinks(torch.zeros(1, 2, 1, 3), empty, sinks)
    assert bool((output == 0).all() & (logsumexp == -torch.inf).all())
    output, logsumexp = add_sinks(torch.ones(1, 2, 1, 3), torch.zeros(1, 2, 1), sinks)
    assert bool((output.isnan().all(-1) == logsumexp.isnan()).all())
    assert logsumexp.isnan()[0, :, 0].tolist() == [False, sink != 0]


@pytest.mark.parametrize(
    ("sinks", "kind", "sentence"),
    [
        (
            torch.zeros(3),
            ShapeError,
            "sinks has shape (3,), and there are 2 heads. Give one logit per head: shape (2,).",
        ),
        (
            torch.zeros(2, dtype=torch.int32),
            DtypeError,
            "sinks is a torch.int32 tensor on cpu. Give a floating point tensor of logits on cpu.",
        ),
        (
            torch.zeros(2, device="meta"),
            DtypeError,
            "sinks is a torch.float32 tensor on meta. Give a floating point tensor of logits on cpu.",
        ),
        ([0.0, 0.0], DtypeError, "sinks is a list. Give a floating point tensor of logits on cpu."),
    ],
    ids=["three", "integers", "another device", "a list"],
)
def test_sinks_that_do_not_fit_are_refused(sinks: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as refusal:
        attention(Q, K, V, sinks=sinks)
    assert str(refusal.value) == sentence
