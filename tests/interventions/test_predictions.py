"""Losses, divergences and likeliest tokens equal their definitions in float64, in blocks of any size."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from multihead.interventions import predictions
from multihead.interventions.predictions import kl_divergence, likeliest_tokens, token_losses

VOCABULARY = 11


@pytest.fixture(params=[1, 3 * VOCABULARY, 1 << 22], ids=["a position", "three positions", "all positions"])
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "_MAX_LOGITS_PER_CPU_BLOCK", request.param)


def logits(*, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw logits of 2 texts of 7 tokens."""
    return (4 * torch.randn(2, 7, VOCABULARY)).to(dtype)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_of_a_token_is_that_of_cross_entropy_at_the_position_before(dtype: torch.dtype) -> None:
    given, ids = logits(dtype=dtype), torch.randint(VOCABULARY, (2, 7))
    expected = cross_entropy(given[:, :-1].double().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    found = token_losses(given, ids)
    assert (found.shape, found.dtype) == ((2, 6), torch.float64)
    torch.testing.assert_close(found.flatten(), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(token_losses(given[0], ids[0]), found[0], atol=1e-12, rtol=0)


@pytest.mark.usefixtures("_block")
def test_the_divergence_is_that_of_pytorch_from_the_predictions_before() -> None:
    before, after = logits(), logits()
    expected = kl_div(after.double().log_softmax(-1), before.double().softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(kl_divergence(before, after), expected, atol=1e-12, rtol=0)
    assert kl_divergence(before, before + 5).abs().max() < 1e-12
    assert (kl_divergence(before, after) - kl_divergence(after, before)).abs().max() > 0.1


def test_tokens_that_a_model_excludes_have_no_probability() -> None:
    before, after = torch.tensor([0.0, 0.0, -torch.inf]), torch.tensor([0.0, log(3), -torch.inf])
    assert kl_divergence(before, after).item() == pytest.approx(0.5 * log(2) + 0.5 * log(2 / 3))
    assert kl_divergence(torch.zeros(3), after) == torch.inf
    assert likeliest_tokens(after, 3)[1].tolist() == pytest.approx([0.75, 0.25, 0])
    assert token_losses(before.expand(2, 3), torch.tensor([0, 2])).tolist() == [torch.inf]


@pytest.mark.usefixtures("_block")
def test_the_likeliest_tokens_have_the_largest_probabilities() -> None:
    given = logits()
    ids, probabilities = likeliest_tokens(given, 4)
    every = given.double().softmax(-1)
    expected = every.sort(-1, descending=True)
    assert ids.equal(expected.indices[..., :4])
    torch.testing.assert_close(probabilities, expected.values[..., :4], atol=1e-12, rtol=0)
    assert likeliest_tokens(given[0, 0], 99)[1].sum().item() == pytest.approx(1)


def test_a_text_of_one_token_has_no_loss() -> None:
    assert token_losses(torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.int64)).shape == (1, 0)
