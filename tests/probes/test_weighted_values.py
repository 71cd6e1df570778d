"""Sums of a number that each key has, weighed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead import masks
from multihead.functional import attention_with_logsumexp, request_of, statistics
from multihead.kernels import sdpa
from multihead.kernels.native import kernel as native_kernel
from multihead.probes.context import ProbeContext
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.weighted_values import (
    attention_weighted_sums,
    output_norms,
    projected_value_norms,
    select_own_columns,
)
from tests import oracle
from tests.kernels.test_sdpa import LargestTensor

CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.Causal()},
    "sinks": {"sinks": torch.randn(4, dtype=torch.float64)},
    "capped": {"softcap": 0.8},
}


def subject_of(dtype: torch.dtype = torch.float64, **terms: Any) -> tuple[MeasuredCall, torch.Tensor]:
    q, k = torch.randn(2, 4, 30, 16).to(dtype), torch.randn(2, 2, 30, 16).to(dtype)
    v = torch.randn(2, 2, 30, 6).to(dtype)
    terms = {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in terms.items()}
    _, logsumexp = attention_with_logsumexp(q, k, v, kernel="reference", **terms)
    seen = oracle.shown(terms.get("mask", masks.Full()), (2, 4, 30, 30), 0)
    rest = {name: value for name, value in terms.items() if name != "mask"}
    return MeasuredCall.from_request(request_of(q, k, v, **terms), logsumexp, ProbeContext()), oracle.attend(
        q, k, k, seen, **rest
    ).weights


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_numbers_of_the_keys_are_weighed_by_every_kernel(
    case: str, count: int, dtype: torch.dtype, most: float
) -> None:
    subject, p = subject_of(dtype, **CASES[case])
    columns = torch.randn(2, 2, 30, count, dtype=dtype)
    expected = p @ columns.repeat_interleave(2, 1)
    assert oracle.difference(attention_weighted_sums(subject, columns), expected.double()) <= most


@pytest.mark.parametrize("embed_dim", [3, 50], ids=["few outputs", "many outputs"])
@pytest.mark.parametrize("case", CASES)
def test_norms_are_those_of_each_transformed_value(case: str, embed_dim: int) -> None:
    subject, p = subject_of(**CASES[case])
    weight = torch.randn(embed_dim, 4 * 6, dtype=torch.float64)
    transformed = torch.stack(
        [subject.request.v[:, head // 2] @ weight[:, 6 * head : 6 * head + 6].mT for head in range(4)], 1
    )  # (batch, heads, keys, embed_dim)
    expected = (p @ transformed.norm(dim=-1, keepdim=True))[..., 0]
    found = select_own_columns(subject, attention_weighted_sums(subject, projected_value_norms(subject, weight)))
    assert oracle.difference(found, expected) <= 1e-12
    assert oracle.difference(output_norms(subject, weight), (p @ transformed).norm(dim=-1)) <= 1e-12


def test_where_only_the_reference_kernel_would_do_it_tiles_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (native_kernel, sdpa):
        monkeypatch.setattr(kernel, "refusal", lambda request, bounds: "not now")
    q = torch.randn(1, 1, 3000, 4)
    subject = MeasuredCall.from_request(request_of(q, q, q), torch.zeros(1, 1, 3000), ProbeContext())
    with LargestTensor() as largest:
        attention_weighted_sums(subject, torch.ones(1, 1, 3000, 5))
    assert 0 < largest.elements < 3000 * 3000 // 8


def test_any_leading_dimensions_are_measured_as_one_batch() -> None:
    q, v = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 5, 6)
    context = ProbeContext(output_weight=torch.randn(7, 24))
    found = statistics(q, q, v=v, probes=("contribution",), context=context)["contribution"]
    alone = statistics(q[1, 2:], q[1, 2:], v=v[1, 2:], probes=("contribution",), context=context)["contribution"]
    assert found.shape == (2, 3, 4, 5)
    torch.testing.assert_close(found[1, 2], alone[0])


def test_half_precision_is_weighed_in_float32() -> None:
    """Half precision would round the sums."""
    q, k, v = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(3))
    _, logsumexp = attention_with_logsumexp(q.float(), k.float(), v.float(), kernel="reference")
    subject = MeasuredCall.from_request(request_of(q, k, v), logsumexp, ProbeContext())
    columns = torch.randn(1, 2, 40, 3)
    found = attention_weighted_sums(subject, columns)
    assert found.dtype == torch.float32
    p = (q.double() @ k.double().mT / 4).softmax(-1)
    assert oracle.difference(found, p @ columns.double()) <= 1e-5


@pytest.mark.filterwarnings("ignore:Entries of q, k or v are so large")  # for the logsumexp
def test_a_hidden_key_near_the_largest_number_leaves_norms_as_they_are() -> None:
    """Its score is inf, and PyTorch's fused kernel hides it by adding -inf."""
    q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64).unbind()
    mask, context = masks.Keep(torch.arange(6) % 3 > 0, "keys"), ProbeContext(output_weight=torch.randn(16, 16))
    large = k.clone()
    large[:, :, 3] = -torch.finfo(torch.float64).max
    probes = ("output_norm", "contribution")
    found, expected = (statistics(q, keys, v=v, mask=mask, probes=probes, context=context) for keys in (large, k))
    for name in probes:
        assert oracle.difference(found[name], expected[name]) < 1e-12


def test_what_is_weighed_is_weighed_before_dropout() -> None:
    q = torch.randn(1, 1, 50, 8)
    subject = MeasuredCall.from_request(request_of(q, q, q, dropout=0.5), torch.zeros(1, 1, 50), ProbeContext())
    torch.testing.assert_close(attention_weighted_sums(subject, torch.ones(1, 1, 50, 1)), torch.ones(1, 1, 50, 1))
