"""Earlier occurrences of a token, and the keys behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.functional import attention_with_logsumexp, request_of, statistics
from multihead.probes import ProbeContext, repeats
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.statistics import measure_parts
from multihead.probes.streaming import measure_in_tiles
from multihead.scores import RelativeBias

PARTS = ("duplicate_mass", "induction_mass")


def subject_of(ids: Tensor, *, queries: int, **terms: Any) -> MeasuredCall:
    q = torch.randn(len(ids), 4, queries, 8, dtype=torch.float64)
    k = torch.randn(len(ids), 2, ids.shape[1], 8, dtype=torch.float64)
    _, logsumexp = attention_with_logsumexp(q, k, k, kernel="reference", **terms)
    return MeasuredCall.from_request(request_of(q, k, k, **terms), logsumexp, ProbeContext(ids=ids))


CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.Causal()},
    "full": {},
    "window": {"mask": masks.Window(20, after=4)},
    "ragged starts": {"mask": masks.Causal(), "query_start": torch.tensor([-3, 60])},
    "bias": {"bias": torch.randn(2, 1, 70, 70, dtype=torch.float64)},
    "bias of keys": {"bias": torch.randn(1, 4, 1, 70, dtype=torch.float64).masked_fill(torch.rand(70) < 0.2, -1e30)},
    "along diagonals": {"bias": RelativeBias(torch.randn(1, 4, 139, dtype=torch.float64))},
    "capped": {"softcap": 0.7, "sinks": torch.randn(4, dtype=torch.float64)},
}


@pytest.mark.parametrize("cells", [1, 4 * 30, 1 << 19])
@pytest.mark.parametrize("case", CASES)
def test_looked_up_token_by_token_they_weigh_what_tiles_find(
    case: str, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token makes up half of the text, others come twice or once."""
    monkeypatch.setattr(repeats, "MAX_WEIGHTS_AT_ONCE", cells)
    ids = torch.randint(0, 40, (2, 70)).masked_fill(torch.rand(2, 70) < 0.5, 7)
    subject = subject_of(ids, queries=70, **CASES[case])
    found, (tiled, _) = repeats.measure_repeats(subject, PARTS), measure_in_tiles(subject, PARTS)
    for part in PARTS:
        torch.testing.assert_close(found[part], tiled[part], atol=1e-12, rtol=0)
        assert bool((found[part] > 0).any())


def test_a_mask_with_gaps_is_left_to_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "measure_repeats", None)
    ids = torch.zeros(1, 9, dtype=torch.int64)
    subject = subject_of(ids, queries=9, mask=masks.Window(2) | masks.Prefix(1))
    found, (tiled, _) = measure_parts(subject, frozenset(PARTS)), measure_in_tiles(subject, PARTS)
    assert all(torch.equal(found[part], tiled[part]) for part in PARTS)


def test_a_head_that_copies_has_all_its_mass_behind_the_earlier_token() -> None:
    """The text is a b c a b c: each later query looks right behind its token's first occurrence."""
    ids = torch.tensor([[5, 6, 7, 5, 6, 7]])
    q, k = torch.zeros(1, 1, 6, 6), torch.eye(6)[None, None] * 100
    for query, key in ((3, 1), (4, 2), (5, 3)):
        q[0, 0, query, key] = 100
    found = statistics(
        q, k, mask=masks.Causal(), probes=("induction_mass", "duplicate_mass"), context=ProbeContext(ids=ids)
    )
    assert found["induction_mass"].tolist() == [[[0, 0, 0, 1, 1, 1]]]
    assert found["duplicate_mass"].tolist() == [[[0, 0, 0, 0, 0, 0]]]


def test_a_token_that_comes_twice_running_points_to_itself() -> None:
    ids, q = torch.tensor([[5, 5]]), torch.zeros(1, 1, 2, 4)
    found = statistics(
        q, q, mask=masks.Causal(), probes=("induction_mass", "duplicate_mass"), context=ProbeContext(ids=ids)
    )
    assert found["induction_mass"].tolist() == found["duplicate_mass"].tolist() == [[[0, 0.5]]]


def test_a_query_that_stands_at_no_key_has_no_token() -> None:
    ids, q = torch.full((1, 4), 5), torch.zeros(1, 1, 6, 4)
    found = statistics(q, q[:, :, :4], query_start=1, probes=("duplicate_mass",), context=ProbeContext(ids=ids))
    assert found["duplicate_mass"].tolist() == [[[0.25, 0.5, 0.75, 0, 0, 0]]]


@pytest.mark.parametrize("huge", [torch.finfo(torch.float32).max, torch.inf, torch.nan])
def test_a_key_that_a_bias_hides_has_no_weight_however_large_it_is(huge: float) -> None:
    """Its score overflows, and inf - inf is NaN."""
    ids = torch.tensor([[3, 5, 3, 5, 3]])
    q, k = torch.randn(2, 1, 2, 5, 8).unbind()
    bias = torch.zeros(1, 1, 5, 5).index_fill(-1, torch.tensor([1]), -torch.inf)
    context = ProbeContext(ids=ids)
    expected = statistics(q, k, mask=masks.Causal(), bias=bias, probes=PARTS, context=context)
    k[0, :, 1] = huge
    found = statistics(q, k, mask=masks.Causal(), bias=bias, probes=PARTS, context=context)
    for part in PARTS:
        torch.testing.assert_close(found[part], expected[part])
