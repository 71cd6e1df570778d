"""The tutorials' classes against the originals: outputs, weights, gradients, parameters, training, differences."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import multihead as mh
from multihead.compat.annotated import MultiHeadAttention, MultiHeadedAttention
from multihead.errors import ArgumentError, MaskError, ShapeError
from tests.compat.originals import Harvard, Tutorial, assert_same_step, dtypes, losses


def some_mask(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw a mask in which every query sees its first key, with broadcast dimensions."""
    drawn = torch.rand(*shape) < 0.5
    drawn[..., 0] = True
    return drawn.to(dtype)


mask_dtypes = st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32])
sizes = {
    "batch": st.integers(1, 3),
    "queries": st.integers(1, 5),
    "keys": st.integers(1, 6),
    "h": st.integers(1, 3),
    "d_k": st.integers(1, 4),
    "dtype": dtypes,
    "mask_dtype": mask_dtypes,
    "data": st.data(),
}


@given(**sizes)
@settings(max_examples=40)
def test_the_tutorials_outputs_weights_and_gradients_are_equal(
    batch: int, queries: int, keys: int, h: int, d_k: int, dtype: torch.dtype, mask_dtype: torch.dtype,
    data: st.DataObject,
) -> None:  # fmt: skip
    theirs, ours = Tutorial(h * d_k, h).to(dtype), MultiHeadAttention(h * d_k, h, dropout=0.0).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    whole = (batch, h, queries, keys)
    shapes = [None, whole[2:], whole[3:], whole, (batch, 1, 1, keys), (1, 1, queries, keys), (1, h, queries, 1)]
    shape = data.draw(st.sampled_from(shapes))
    mask = None if shape is None else some_mask(shape, mask_dtype)
    inputs = [torch.randn(batch, length, h * d_k, dtype=dtype) for length in (queries, keys, keys)]
    assert_same_step(ours, theirs, lambda layer, x: layer(*x, mask), inputs)


@given(**sizes)
@settings(max_examples=40)
def test_harvards_outputs_weights_and_gradients_are_equal(
    batch: int, queries: int, keys: int, h: int, d_k: int, dtype: torch.dtype, mask_dtype: torch.dtype,
    data: st.DataObject,
) -> None:  # fmt: skip
    theirs, ours = Harvard(h, h * d_k).to(dtype), MultiHeadedAttention(h, h * d_k, dropout=0.0).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    shape = data.draw(st.sampled_from([None, (batch, queries, keys), (batch, 1, keys), (1, queries, keys)]))
    mask = None if shape is None else some_mask(shape, mask_dtype)
    inputs = [torch.randn(batch, length, h * d_k, dtype=dtype) for length in (queries, keys, keys)]

    def call(layer: nn.Module, x: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        output = layer(*x, mask)
        return output, layer.attn

    assert_same_step(ours, theirs, call, inputs)


@pytest.mark.parametrize(("ours", "theirs"), [(MultiHeadAttention, Tutorial), (MultiHeadedAttention, Harvard)])
def test_the_same_seed_draws_the_same_parameters_and_state_dicts_load_both_ways(
    ours: type[nn.Module], theirs: type[nn.Module]
) -> None:
    sizes = (12, 4) if ours is MultiHeadAttention else (4, 12)
    made = []
    for kind in (ours, theirs):
        torch.manual_seed(3)
        made.append(kind(*sizes, 0.0))
    names = ["W_q", "W_k", "W_v", "W_o"] if ours is MultiHeadAttention else [f"linears.{i}" for i in range(4)]
    assert list(made[0].state_dict()) == [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    for name, value in made[1].state_dict().items():
        assert torch.equal(made[0].state_dict()[name], value)
    made[1].load_state_dict(ours(*sizes, 0.0).state_dict())


def test_a_query_that_sees_no_key_has_weights_of_zero_where_the_originals_weight_all_keys_equally() -> None:
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    theirs, ours = Tutorial(4, 2).double(), MultiHeadAttention(4, 2, 0.0).double()
    ours.load_state_dict(theirs.state_dict())
    (expected, uniform), (actual, weights) = theirs(x, x, x, mask), ours(x, x, x, mask)
    assert (uniform[0, :, 1] - 1 / 3).abs().max() < 1e-12
    assert (weights[0, :, 1] == 0).all()
    assert torch.equal(actual[0, 1], ours.W_o.bias)
    torch.testing.assert_close(actual[:, ::2], expected[:, ::2], rtol=0, atol=1e-12)
    harvard = MultiHeadedAttention(2, 4, 0.0).double()
    output = harvard(x, x, x, mask[None])
    assert harvard.attn is not None
    assert (harvard.attn[0, :, 1] == 0).all()
    assert torch.equal(output[0, 1], harvard.linears[3].bias)


@pytest.mark.parametrize("kind", [MultiHeadAttention, MultiHeadedAttention])
def test_in_training_the_output_is_computed_from_the_weights_after_dropout(
    kind: type[nn.Module],
) -> None:
    harvard = kind is MultiHeadedAttention
    layer = kind(*((2, 8) if harvard else (8, 2)), 0.3)
    q_proj, k_proj, v_proj, last = layer.linears if harvard else (layer.W_q, layer.W_k, layer.W_v, layer.W_o)
    x = torch.randn(2, 9, 8)
    output, weights = (layer(x, x, x), layer.attn) if harvard else layer(x, x, x)
    q, k, v = (mh.split_heads(projection(x), 2) for projection in (q_proj, k_proj, v_proj))
    whole = (torch.einsum("bhic,bhjc->bhij", q, k) / 2).softmax(-1)
    assert 0.15 < (weights == 0).float().mean() < 0.45
    torch.testing.assert_close(weights, torch.where(weights == 0, weights, whole / 0.7))
    torch.testing.assert_close(output, last(mh.merge_heads(weights @ v)))
    layer.eval()
    weights = (layer(x, x, x), layer.attn)[1] if harvard else layer(x, x, x)[1]
    torch.testing.assert_close(weights, whole)


def test_the_methods_of_the_tutorial_are_there() -> None:
    layer = MultiHeadAttention(6, 3).eval()
    x = torch.randn(2, 4, 6)
    q = layer.split_heads(x)
    assert torch.equal(q[1, 2], x[1, :, 4:])
    output, weights = layer.scaled_dot_product_attention(q, q, q, torch.ones(4, 4).tril())
    assert output.shape == (2, 3, 4, 2)
    assert torch.equal(weights > 0, torch.ones(2, 3, 4, 4).tril() > 0)


class Model(nn.Module):
    """A small causal model that a reader of a tutorial could have written."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = attention(8, 2, 0.0)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        n = tokens.shape[1]
        mask = torch.tril(torch.ones(n, n))
        return self.head(x + self.attention(x, x, x, mask)[0])


def test_a_training_script_keeps_its_loss_curve_when_the_import_changes() -> None:
    tokens = torch.randint(11, (4, 9))

    def step(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    curves = []
    for attention in (Tutorial, MultiHeadAttention):
        torch.manual_seed(1)
        curves.append(losses(Model(attention), step))
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=2e-5, atol=2e-5)
    assert curves[0][-1] < 0.7 * curves[0][0]


def test_no_weights_are_stored_before_the_first_call_and_a_layer_that_has_run_can_be_copied() -> None:
    layer, x = MultiHeadedAttention(2, 4, 0.5), torch.randn(1, 3, 4)
    assert layer.attn is None
    layer(x, x, x)
    assert layer.attn is not None
    assert copy.deepcopy(layer).attn is None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_both_classes_can_be_observed_in_training_too(dropout: float) -> None:
    x = torch.randn(2, 5, 4)
    for layer in (MultiHeadAttention(4, 2, dropout), MultiHeadedAttention(2, 4, dropout)):
        with mh.observe(layer) as seen:
            layer(x, x, x)
        rows = seen[type(layer).__name__].weights(sample=1).sum(-1)  # of weights before dropout
        torch.testing.assert_close(rows, torch.ones(2, 5))


def test_what_does_not_fit_is_rejected() -> None:
    layer, harvard, x = MultiHeadAttention(4, 2), MultiHeadedAttention(2, 4), torch.zeros(2, 3, 4)

    def refused(error: type[Exception], sentence: str) -> object:
        return pytest.raises(error, match=f"^{re.escape(sentence)}$")

    place = "and its first dimension would broadcast to the heads of (batch, h, queries, keys)."
    finding = f"mask has shape (2, 3, 3), {place}"
    with refused(
        MaskError,
        f"{finding} Give mask[:, None] if it is (batch, queries, keys), mask[None] if it is (h, queries, keys).",
    ):
        layer(x, x, x, torch.ones(2, 3, 3))
    finding = "mask has shape (), and must broadcast to (batch, h, queries, keys)."
    with refused(MaskError, f"{finding} Give (queries, keys), or 4 dimensions, each of that size or 1."):
        layer(x, x, x, torch.tensor(1))
    finding = "Keep(<bool tensor (4, 3)>, 'queries keys') has 4 queries, and the call has 3."
    with refused(
        MaskError, f"{finding} Give a tensor that broadcasts to (batch, heads, queries, keys) = (2, 2, 3, 3)."
    ):
        layer(x, x, x, torch.ones(4, 3))
    finding = "mask has shape (3, 3), and this class inserts the head dimension itself."
    mend = "Give (batch, queries, keys), with 1 for the batch or the queries where they share the mask."
    with refused(MaskError, f"{finding} {mend}"):
        harvard(x, x, x, torch.ones(3, 3))
    with refused(ShapeError, "K has shape (2, 3, 5). Give (batch, length, d_model) with 4 features."):
        layer(x, torch.zeros(2, 3, 5), x)
    with refused(ShapeError, "query has shape (3, 4). Give (batch, length, d_model) with 4 features."):
        harvard(x[0], x, x)
    finding = "d_model is 4, and 3 heads do not divide it."
    for make in (lambda: MultiHeadAttention(4, 3), lambda: MultiHeadedAttention(3, 4)):
        with refused(ArgumentError, f"{finding} Give 1, 2 or 4 heads, or a width that is a multiple of 3."):
            make()
