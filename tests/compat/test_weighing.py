"""The weights of a call: beside its output, after dropout, remembered, with gradients, and free of hidden NaN."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import Tensor

from multihead import masks
from multihead.call import AttentionRequest
from multihead.compat.weighing import Remembered, attend_with_weights
from multihead.functional import attend, request_of

SHOWN = torch.tensor([[True, True, False, False], [True, False, True, False], [False, False, False, False]])


def request(*, dropout: float = 0.0, grad: bool = False, mask: masks.Mask | None = None) -> AttentionRequest:
    q, k, v = (torch.randn(2, 2, n, 5, dtype=torch.float64, requires_grad=grad) for n in (3, 4, 4))
    return request_of(q, k, v, mask or masks.Keep(SHOWN, "queries keys"), dropout=dropout)


def expected_weights(asked: AttentionRequest) -> Tensor:
    scores = torch.einsum("bhic,bhjc->bhij", asked.q, asked.k) * asked.scale
    exponentials = scores.exp() * SHOWN
    return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)


def test_the_output_is_made_of_the_weights() -> None:
    asked = request()
    output, weights = attend_with_weights(asked)
    torch.testing.assert_close(weights, expected_weights(asked), rtol=0, atol=1e-12)
    torch.testing.assert_close(output, weights @ asked.v, rtol=0, atol=1e-12)


def test_under_dropout_the_output_is_made_of_the_weights_that_are_left() -> None:
    asked = request(dropout=0.4)
    output, weights = attend_with_weights(asked)
    whole = expected_weights(asked)
    dropped = (weights == 0) & (whole > 0)
    assert dropped.any()
    torch.testing.assert_close(weights, torch.where(dropped, torch.zeros_like(whole), whole / 0.6), rtol=0, atol=1e-12)
    torch.testing.assert_close(output, weights @ asked.v, rtol=0, atol=1e-12)


def test_gradients_flow_through_the_weights() -> None:
    asked = request(grad=True)
    remembered = Remembered()
    remembered.call(asked, attend(asked))
    later = remembered.weights()
    assert later is not None
    cotangent = torch.randn_like(later)
    expected = torch.autograd.grad((expected_weights(asked) * cotangent).sum(), (asked.q, asked.k))
    for weights in (attend_with_weights(asked)[1], later):
        actual = torch.autograd.grad((weights * cotangent).sum(), (asked.q, asked.k))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_weights_asked_for_without_gradients_are_the_same() -> None:
    asked = request(grad=True)
    with torch.no_grad():
        torch.testing.assert_close(attend_with_weights(asked)[1], expected_weights(asked), rtol=0, atol=1e-12)


def test_a_call_without_a_mask_or_without_a_key_has_its_weights_too() -> None:
    asked = request(grad=True, mask=masks.Full())
    torch.testing.assert_close(attend_with_weights(asked)[1].sum(-1), torch.ones(2, 2, 3, dtype=torch.float64))
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    output, weights = attend_with_weights(request_of(q, q[:, :, :0], q[:, :, :0]))
    assert weights.shape == (1, 1, 3, 0)
    assert (output == 0).all()


def test_a_hidden_nan_reaches_no_weight_and_no_gradient_and_a_seen_one_its_own_rows() -> None:
    asked = request(grad=True)
    with torch.no_grad():
        asked.k[:, :, 3] = torch.nan  # hidden from all
        asked.v[0, 0, 1] = torch.nan  # seen by the first query alone
    output, weights = attend_with_weights(asked)
    assert weights[0, 0, 0, :2].isnan().all()
    assert (weights[0, 0, 0, 2:] == 0).all()
    assert output[0, 0, 0].isnan().all()
    clean = torch.ones(2, 2, 3, dtype=torch.bool)
    clean[0, 0, 0] = False
    assert weights[clean].isfinite().all()
    assert output[clean].isfinite().all()
    gradients = torch.autograd.grad(weights[clean].square().sum() + output[clean].sum(), (asked.q, asked.k, asked.v))
    assert all(each.isfinite().all() for each in gradients)


def test_half_precision_gets_its_weights_in_its_own_dtype() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.bfloat16).unbind()
    output, weights = attend_with_weights(request_of(q, k, v))
    assert output.dtype == weights.dtype == torch.bfloat16


def test_what_is_remembered_is_neither_copied_nor_pickled() -> None:
    remembered = Remembered()
    assert remembered.weights() is None
    asked = request(grad=True)
    remembered.call(asked, attend(asked))
    assert remembered.weights() is not None
    assert copy.deepcopy(remembered).weights() is None
    assert pickle.loads(pickle.dumps(remembered)).weights() is None
    given = torch.ones(1)
    remembered.given(given)
    assert remembered.weights() is given


def test_a_compiled_layer_gives_the_same_output_and_weights() -> None:
    asked = request(grad=True)
    compiled = torch.compile(lambda q, k, v: attend_with_weights(request_of(q, k, v, asked.mask)), backend="eager")
    torch.testing.assert_close(compiled(asked.q, asked.k, asked.v), attend_with_weights(asked))
