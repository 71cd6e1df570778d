"""Conversion of the original's masks: those that hide become mask values, those that add become a bias."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.compat.torch_nn import MultiheadAttention
from multihead.compat.torch_nn.masks import convert_masks, nested_like, padding_of_nested
from multihead.errors import ArgumentError, DtypeError, MaskError, MultiheadError, ShapeError
from multihead.masks import Causal, Drop, Full, Lengths
from multihead.masks.positions import CallSize, TilePositions
from tests.compat.torch_nn.test_attention import pair

SIZE = CallSize(batch=2, heads=3, queries=4, keys=5)
CAUSAL = torch.ones(4, 5, dtype=torch.bool).triu(1)
PAST_END = torch.arange(5) >= torch.tensor([[5], [2]])


def as_float(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("form", [torch.Tensor.bool, as_float])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_causal_tensor_is_causal_with_the_hint_and_without(form: object, *, is_causal: bool) -> None:
    mask, bias = convert_masks(form(CAUSAL), None, SIZE, added_keys=0, is_causal=is_causal)  # type: ignore[operator]
    assert (mask, bias) == (Causal(), None)


def test_is_causal_without_a_mask_is_the_causal_mask() -> None:
    assert convert_masks(None, None, SIZE, added_keys=0, is_causal=True)[0] == Causal()


def test_a_wrong_hint_is_ignored_where_the_mask_can_be_read() -> None:
    hidden = CAUSAL.clone()
    hidden[1, 0] = True
    mask = convert_masks(hidden, None, SIZE, added_keys=0, is_causal=True)[0]
    assert isinstance(mask, Drop)
    assert torch.equal(mask.tensor, hidden)


@pytest.mark.parametrize("form", [torch.Tensor.bool, as_float])
def test_padding_after_the_tokens_is_lengths(form: object) -> None:
    mask = convert_masks(None, form(PAST_END), SIZE, added_keys=0, is_causal=False)[0]  # type: ignore[operator]
    assert isinstance(mask, Lengths)
    assert isinstance(mask.lengths, Tensor)
    assert mask.lengths.tolist() == [5, 2]


def test_no_padding_is_no_mask() -> None:
    assert convert_masks(None, torch.zeros(2, 5, dtype=torch.bool), SIZE, added_keys=0, is_causal=False)[0] == Full()


def test_scattered_padding_is_dropped_key_by_key() -> None:
    hidden = PAST_END.flip(1)
    mask = convert_masks(None, hidden, SIZE, added_keys=0, is_causal=False)[0]
    assert isinstance(mask, Drop)
    assert mask.axes == "batch keys"


def test_floats_that_do_more_than_hide_are_added_and_those_of_both_masks_together() -> None:
    of_query, of_key = torch.randn(6, 4, 5), torch.randn(2, 5)
    mask, bias = convert_masks(of_query, of_key, SIZE, added_keys=0, is_causal=False)
    assert mask == Full()
    assert bias is not None
    torch.testing.assert_close(bias, of_query.view(2, 3, 4, 5) + of_key[:, None, None])


def test_a_float_mask_that_requires_a_gradient_stays_a_bias() -> None:
    added = as_float(CAUSAL).requires_grad_()
    mask, bias = convert_masks(added, None, SIZE, added_keys=0, is_causal=False)
    assert mask == Full()
    assert bias is not None
    assert bias.requires_grad


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_added_keys_come_first_and_every_query_sees_them(extra: int) -> None:
    per_head = torch.rand(6, 4, 5) < 0.5
    for attn_mask, hidden in ((CAUSAL, CAUSAL[None, None]), (per_head, per_head.view(2, 3, 4, 5))):
        for padding in (PAST_END, PAST_END.flip(1)):
            mask, _ = convert_masks(attn_mask, padding, SIZE, added_keys=extra, is_causal=False)
            shown = mask.tile(TilePositions.from_sizes(4, 5 + extra, query_start=extra)).expand(2, 3, -1, -1)
            assert shown[..., :extra].all()
            assert torch.equal(shown[..., extra:], ~(hidden | padding[:, None, None]).expand(2, 3, -1, -1))
    added = convert_masks(torch.randn(4, 5), None, SIZE, added_keys=extra, is_causal=False)[1]
    assert added is not None
    assert (added[..., :extra] == 0).all()


@pytest.mark.parametrize(
    ("attn_mask", "padding", "error", "sentence"),
    [
        (
            torch.ones(4, 5, dtype=torch.int64),
            None,
            DtypeError,
            (
                "attn_mask has dtype torch.int64. Give a boolean tensor, True = hidden (attn_mask.bool() if 1 hides), "
                "or floats to add to the scores."
            ),
        ),
        (
            torch.ones(5, 4),
            None,
            MaskError,
            "attn_mask has shape (5, 4). Give (queries, keys) = (4, 5) or (batch * heads, ...) = (6, 4, 5).",
        ),
        (
            None,
            torch.ones(5, 2, dtype=torch.bool),
            MaskError,
            "key_padding_mask has shape (5, 2). Give (batch, keys) = (2, 5).",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(
    attn_mask: Tensor | None, padding: Tensor | None, error: type[MultiheadError], sentence: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        convert_masks(attn_mask, padding, SIZE, added_keys=0, is_causal=False)


def test_nested_samples_are_attended_one_by_one() -> None:
    theirs, ours = pair()
    samples = [torch.randn(length, 12) for length in (5, 2, 3)]
    nested = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    output, weights = ours(nested, nested, nested, need_weights=False)
    assert weights is None
    for sample, actual in zip(samples, output.unbind(), strict=True):
        torch.testing.assert_close(actual, theirs(sample, sample, sample)[0], rtol=0, atol=2e-5)


PROTOTYPE = "ignore:The PyTorch API of nested tensors is in prototype stage"


@pytest.mark.filterwarnings(PROTOTYPE)
@pytest.mark.parametrize("average", [True, False])
def test_nested_samples_get_the_originals_padded_weights(*, average: bool) -> None:
    theirs, ours = pair(num_heads=2)  # the original takes nested tensors in its fused path alone
    nested = torch.nested.as_nested_tensor([torch.randn(length, 12) for length in (5, 2, 3)])
    with torch.no_grad():
        expected = theirs.eval()(nested, nested, nested, average_attn_weights=average)
        actual = ours.eval()(nested, nested, nested, average_attn_weights=average)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=2e-6)
    for found, wanted in zip(actual[0].unbind(), expected[0].unbind(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings(PROTOTYPE)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": False}], ids=str)
@pytest.mark.parametrize("call", [{}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("cross", [False, True])
def test_nested_samples_have_the_outputs_of_each_alone_with_gradients(
    layout: torch.layout, options: dict[str, Any], call: dict[str, Any], *, cross: bool
) -> None:
    _, ours = pair(**options)
    of_query = [torch.randn(length, 12, requires_grad=True) for length in (5, 2, 3)]
    of_key = [torch.randn(length, 12, requires_grad=True) for length in (4, 6, 1)] if cross else of_query
    query = torch.nested.as_nested_tensor(of_query, layout=layout)
    key = torch.nested.as_nested_tensor(of_key, layout=layout) if cross else query
    output, weights = ours(query, key, key, **call)
    _ = query + output  # a residual connection: the lengths are known to be the same
    samples, total = output.unbind(), torch.zeros(())
    for place, (one, other) in enumerate(zip(of_query, of_key, strict=True)):
        expected, of_sample = ours(one, other, other, **call)
        torch.testing.assert_close(samples[place], expected, rtol=0, atol=2e-5)
        rows, columns = len(one), len(other)
        torch.testing.assert_close(weights[place, :rows, :columns], of_sample[:, :columns], rtol=0, atol=2e-6)
        added = of_sample.shape[1] - columns
        torch.testing.assert_close(
            weights[place, :rows, weights.shape[2] - added :], of_sample[:, columns:], rtol=0, atol=2e-6
        )
        assert weights[place].count_nonzero() == of_sample.count_nonzero()
        total = total + expected.square().sum()
    leaves = [*of_query, *(of_key if cross else ()), *ours.parameters()]
    found = torch.autograd.grad(sum((sample.square().sum() for sample in samples), torch.zeros(())), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(total, leaves), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_nested_samples_that_lie_apart_stay_where_they_are(*, need_weights: bool) -> None:
    _, ours = pair()
    starts, lengths = torch.tensor([1, 2]), torch.tensor([3, 4])
    apart = torch.nested.narrow(torch.randn(2, 8, 12), 1, starts, lengths, layout=torch.jagged)
    output, _ = ours(apart, apart, apart, need_weights=need_weights)
    for sample, found, added in zip(apart.unbind(), output.unbind(), (apart + output).unbind(), strict=True):
        expected = ours(sample, sample, sample)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(added, sample + expected, rtol=0, atol=2e-5)


def test_padding_is_marked_and_samples_of_the_same_lengths_can_be_added() -> None:
    jagged = torch.nested.as_nested_tensor([torch.zeros(1, 4), torch.zeros(3, 4)], layout=torch.jagged)
    assert padding_of_nested(jagged).tolist() == [[False, True, True], [False, False, False]]
    ones = [torch.ones(1, 4), torch.ones(3, 4)]
    assert all((sample == 1).all() for sample in (jagged + nested_like(jagged, ones)).unbind())


def nested_of(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(x), layout=torch.jagged)


REFUSED: dict[str, tuple[Any, type[MultiheadError], str]] = {
    "nested and a mask": (
        lambda layer, x: layer(*[nested_of(x)] * 3, key_padding_mask=x[..., 0] > 0),
        ArgumentError,
        (
            "query is a nested tensor, and key_padding_mask describes padded tensors. "
            "Remove key_padding_mask, or give query.to_padded_tensor(0.0) and a key_padding_mask."
        ),
    ),
    "nested in part": (
        lambda layer, x: layer(nested_of(x), x, x),
        ShapeError,
        (
            "key is not a nested tensor, and another input is. "
            "Give query, key and value as nested tensors, or none of them."
        ),
    ),
    "nested of another width": (
        lambda layer, x: layer(*[nested_of(x[..., :3])] * 3),
        ShapeError,
        "query is a nested tensor of (5, 3), (5, 3). Give samples of shape (length, features = 12).",
    ),
    "nested without samples": (
        lambda layer, x: layer(*[torch.nested.nested_tensor([])] * 3),
        ShapeError,
        "query is a nested tensor of no samples. Give samples of shape (length, features = 12).",
    ),
    "nested batches": (
        lambda layer, x: layer(nested_of(x), nested_of(x[:1]), nested_of(x[:1])),
        ShapeError,
        "query has 2 samples and key has 1. Give both the same batch size.",
    ),
    "nested values": (
        lambda layer, x: layer(nested_of(x), nested_of(x), nested_of(x[:, :4])),
        ShapeError,
        "key has samples of lengths [5, 5] and value of lengths [4, 4]. Give one value per key.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_rejected_with_a_whole_sentence(name: str) -> None:
    call, error, sentence = REFUSED[name]
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        call(MultiheadAttention(12, 3, batch_first=True), torch.zeros(2, 5, 12))
