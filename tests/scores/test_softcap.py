"""A softcap presses scores into an interval."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead.errors import ArgumentError
from multihead.functional import attention, attention_with_logsumexp
from multihead.scores.softcap import softcapped


def test_scores_stay_within_the_cap_and_small_ones_stay_as_they_are() -> None:
    scores = torch.tensor([-1e6, -1e-6, 0.0, 1e-6, 1e6], dtype=torch.float64)
    assert softcapped(scores, 5.0).tolist() == pytest.approx([-5, -1e-6, 0, 1e-6, 5], abs=1e-15)
    assert softcapped(scores, None) is scores


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
