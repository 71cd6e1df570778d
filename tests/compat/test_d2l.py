"""The book's class against the original: outputs, weights, gradients, parameters, training, and differences."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import multihead as mh
from multihead.compat.d2l import (
    DotProductAttention,
    MultiHeadAttention,
    masked_softmax,
    transpose_output,
    transpose_qkv,
)
from multihead.errors import ArgumentError, MaskError, ShapeError
from multihead.kernels.call import AttentionCall, listen
from tests.compat.originals import Book, assert_same_step, dtypes, losses


def pair(*sizes: int, dtype: torch.dtype = torch.float64, bias: bool = False) -> tuple[MultiHeadAttention, Book]:
    """Make ours and the book's with the same weights."""
    ours, theirs = MultiHeadAttention(*sizes, 0.0, bias).to(dtype), Book(*sizes, 0.0, bias).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def floats(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def run(layer: nn.Module, x: Sequence[Tensor], lens: Tensor | list[Any] | None) -> tuple[Tensor, Tensor]:
    output = layer(*x, lens)
    weights = layer.weights if isinstance(layer, Book) else layer.attention.attention_weights
    return output, weights


@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 5),
    keys=st.integers(1, 6),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    sizes=st.tuples(*[st.integers(1, 5)] * 3),
    bias=st.booleans(),
    lens=st.sampled_from([None, 1, 2]),
    dtype=dtypes,
    data=st.data(),
)
@settings(max_examples=40)
def test_outputs_weights_and_gradients_are_the_books(
    batch: int, queries: int, keys: int, heads: int, head_dim: int, sizes: tuple[int, int, int],
    bias: bool, lens: int | None, dtype: torch.dtype, data: st.DataObject,
) -> None:  # fmt: skip
    ours, theirs = pair(*sizes, heads * head_dim, heads, dtype=dtype, bias=bias)
    key_size, query_size, value_size = sizes
    widths = ((queries, query_size), (keys, key_size), (keys, value_size))
    inputs = [torch.randn(batch, length, width, dtype=dtype) for length, width in widths]
    valid = None
    if lens is not None:  # a length above the number of keys shows all of them
        count = batch if lens == 1 else batch * queries
        drawn = data.draw(st.lists(st.integers(1, keys + 2), min_size=count, max_size=count))
        valid = torch.tensor(drawn).reshape((batch,) if lens == 1 else (batch, queries))
    assert_same_step(ours, theirs, lambda layer, x: run(layer, x, valid), inputs)


def test_the_books_own_example_has_its_shapes_and_its_weights() -> None:
    layer = MultiHeadAttention(100, 100, 100, 100, 5, 0.5).eval()
    output = layer(torch.ones(2, 4, 100), torch.ones(2, 6, 100), torch.ones(2, 6, 100), torch.tensor([3, 2]))
    assert output.shape == (2, 4, 100)
    weights = layer.attention_weights
    assert weights is not None
    assert weights is not layer.attention.attention_weights  # computed when read, not stored
    expected = torch.zeros(2, 5, 4, 6)
    expected[0, ..., :3], expected[1, ..., :2] = 1 / 3, 1 / 2
    torch.testing.assert_close(weights.detach(), expected.reshape(10, 4, 6))


def test_no_weights_are_there_before_the_first_call() -> None:
    assert MultiHeadAttention(4, 4, 4, 4, 2, 0.0).attention_weights is None


def test_a_query_that_sees_no_key_has_weights_of_zero_where_the_book_weights_all_keys_equally() -> None:
    ours, theirs = pair(4, 4, 4, 6, 2)
    x = floats(2, 3, 4)
    valid = torch.tensor([0, 2])
    expected, uniform = run(theirs, (x, x, x), valid)
    actual, weights = run(ours, (x, x, x), valid)
    assert (uniform[:2] - 1 / 3).abs().max() < 1e-12
    assert (weights[:2] == 0).all()
    assert (actual[0] == 0).all()
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-12)
    biased = MultiHeadAttention(4, 4, 4, 6, 2, 0.0, bias=True).double()
    torch.testing.assert_close(biased(x, x, x, valid)[0], biased.W_o.bias.expand(3, 6), rtol=0, atol=0)


def test_nan_in_padding_reaches_no_output_and_no_gradient() -> None:
    ours, theirs = pair(4, 4, 4, 6, 2)
    x, memory = floats(2, 3, 4), floats(2, 5, 4)
    valid = torch.tensor([2, 4])
    expected = theirs(x, memory, memory, valid)
    spoilt = memory.clone()
    spoilt[0, 2:], spoilt[1, 4:] = torch.nan, torch.inf
    actual = ours(x, spoilt, spoilt, valid)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    actual.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in ours.parameters() if parameter.grad is not None)


NUMBERS = (
    [3.5, 1.0],
    [2.0, 0.001],
    [9.5, torch.inf],
    [-1, 2],
    [-0.5, 3.0],
    [-torch.inf, 4.0],
    [[1.5, 0, -3], [2, 4.2, 7]],
)


@pytest.mark.parametrize("lens", NUMBERS, ids=str)
def test_a_key_is_visible_where_its_index_is_less_than_the_length_also_for_a_float(lens: list[Any]) -> None:
    ours, theirs = pair(4, 4, 4, 6, 2)
    x, memory = floats(2, 3, 4), floats(2, 5, 4)
    valid = torch.tensor(lens)
    limits = valid[:, None] if valid.dim() == 1 else valid
    sees = (limits > 0).expand(2, 3)  # otherwise the book shows all keys, and we show none
    expected, their_weights = run(theirs, (x, memory, memory), valid)
    for lengths in (valid, lens):
        actual, weights = run(ours, (x, memory, memory), lengths)
        torch.testing.assert_close(actual[sees], expected[sees], rtol=0, atol=1e-12)
        shown = sees.repeat_interleave(2, 0)  # (batch * heads, queries)
        torch.testing.assert_close(weights[shown], their_weights[shown], rtol=0, atol=1e-12)
        assert (weights[~shown] == 0).all()
    scores = floats(2, 3, 5)
    hidden = torch.arange(5) >= limits[..., None]
    wanted = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(masked_softmax(scores, valid), wanted, rtol=0, atol=1e-12)


def test_the_same_seed_draws_the_books_parameters_and_state_dicts_load_both_ways() -> None:
    torch.manual_seed(3)
    theirs = Book(3, 4, 5, 6, 2, 0.0, bias=True)
    torch.manual_seed(3)
    ours = MultiHeadAttention(3, 4, 5, 6, 2, 0.0, bias=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    theirs.load_state_dict(MultiHeadAttention(3, 4, 5, 6, 2, 0.0, bias=True).state_dict())


def test_print_shows_the_books_submodules() -> None:
    assert str(MultiHeadAttention(3, 4, 5, 6, 2, 0.5)).splitlines() == [
        "MultiHeadAttention(",
        "  (attention): DotProductAttention(",
        "    (dropout): Dropout(p=0.5, inplace=False)",
        "  )",
        "  (W_q): Linear(in_features=4, out_features=6, bias=False)",
        "  (W_k): Linear(in_features=3, out_features=6, bias=False)",
        "  (W_v): Linear(in_features=5, out_features=6, bias=False)",
        "  (W_o): Linear(in_features=6, out_features=6, bias=False)",
        ")",
    ]


def test_the_newer_editions_arguments_are_taken_by_keyword_and_infer_the_sizes_from_the_first_batch() -> None:
    layer = MultiHeadAttention(num_hiddens=6, num_heads=2, dropout=0.0)
    queries, keys, values = torch.randn(2, 3, 4), torch.randn(2, 5, 7), torch.randn(2, 5, 8)
    assert layer(queries, keys, values, torch.tensor([5, 1])).shape == (2, 3, 6)
    theirs = Book(7, 4, 8, 6, 2, 0.0)
    theirs.load_state_dict(layer.state_dict())
    expected = theirs(queries, keys, values, torch.tensor([5, 1]))
    torch.testing.assert_close(layer(queries, keys, values, torch.tensor([5, 1])), expected)


class Encoder(nn.Module):
    """A small encoder that a reader of the book could have written."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = attention(8, 8, 8, 8, 2, 0.0)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, valid_lens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.attention(x, x, x, valid_lens)))


def test_a_training_script_keeps_its_loss_curve_when_the_import_changes() -> None:
    tokens, valid_lens = torch.randint(11, (4, 9)), torch.tensor([9, 4, 6, 1])

    def step(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(tokens, valid_lens).flatten(0, 1), tokens.roll(1, 1).flatten())

    curves = []
    for attention in (Book, MultiHeadAttention):
        torch.manual_seed(1)
        curves.append(losses(Encoder(attention), step))
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=2e-5, atol=2e-5)
    assert curves[0][-1] < 0.7 * curves[0][0]


def test_dropout_is_on_in_training_only_and_the_weights_are_those_before_it() -> None:
    attention = DotProductAttention(0.5)
    queries, keys, eye = torch.randn(1, 40, 4), torch.randn(1, 30, 4), torch.eye(30)[None]
    dropped = attention(queries, keys, eye)  # one-hot values return the weights after dropout
    weights = attention.attention_weights
    assert weights is not None
    assert 0.4 < (dropped == 0).float().mean() < 0.6
    torch.testing.assert_close(dropped, torch.where(dropped == 0, dropped, 2 * weights))
    torch.testing.assert_close(attention.eval()(queries, keys, eye), weights)


def test_a_layer_that_has_run_can_be_copied_and_saved_without_its_last_weights() -> None:
    layer = MultiHeadAttention(4, 4, 4, 4, 2, 0.0)
    x = torch.randn(1, 3, 4)
    output = layer(x, x, x, None)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for copied in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert copied.attention_weights is None
        torch.testing.assert_close(copied(x, x, x, None), output)


class Ear:
    """Records the calls that are published."""

    requested_statistics: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def receive(self, call: AttentionCall) -> None:
        self.calls.append(call)


def test_a_call_is_published_as_the_layers_own_and_its_padding_is_skipped() -> None:
    layer, ear = MultiHeadAttention(8, 8, 8, 8, 2, 0.0), Ear()
    x = torch.randn(2, 10, 8)
    with listen(ear), torch.no_grad():
        layer(x, x, x, torch.tensor([5, 3]))
        layer.attention(x, x, x, torch.tensor([5, 3]))
    assert [call.request.origin.layer for call in ear.calls] == [layer, layer.attention]
    request = ear.calls[0].request
    explanation = mh.explain(request.q, request.k, request.v, mask=request.mask, kernel="sdpa")
    assert explanation.skipped_share == pytest.approx(0.6)


def test_a_layer_can_be_observed() -> None:
    model = nn.Sequential()
    model.add_module("block", MultiHeadAttention(8, 8, 8, 8, 2, 0.0).eval())
    x = torch.randn(2, 6, 8)
    with torch.no_grad(), mh.observe(model) as seen:
        model.block(x, x, x, torch.tensor([4, 6]))
    record = seen["block"]
    weights = model.block.attention_weights.unflatten(0, (2, 2))
    torch.testing.assert_close(record.weights(head=1, sample=1), weights[1, 1])


def test_masked_softmax_is_a_softmax_of_the_visible_scores() -> None:
    scores = floats(2, 3, 4)
    for lens in (None, torch.tensor([1, 3]), torch.tensor([[1, 2, 4], [9, 3, 1]])):
        limits = torch.tensor(4) if lens is None else lens[:, None] if lens.dim() == 1 else lens
        expected = torch.zeros(2, 3, 4, dtype=torch.float64)
        for sample, row in ((b, i) for b in range(2) for i in range(3)):
            length = int(limits.expand(2, 3)[sample, row])
            expected[sample, row, :length] = scores[sample, row, :length].softmax(-1)
        torch.testing.assert_close(masked_softmax(scores, lens), expected, rtol=0, atol=1e-12)
    assert (masked_softmax(scores, torch.tensor([0, 4]))[0] == 0).all()


def test_transposed_heads_are_in_the_batch_sample_by_sample() -> None:
    x = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    folded = transpose_qkv(x, 2)
    assert torch.equal(folded, torch.stack([x[0, :, :2], x[0, :, 2:], x[1, :, :2], x[1, :, 2:]]))
    assert torch.equal(transpose_output(folded, 2), x)


NEWER = (
    "num_hiddens, num_heads or dropout is missing. Give (key_size, query_size, value_size, num_hiddens, "
    "num_heads, dropout), or, as in the newer edition of the book, the last three by keyword: num_hiddens=100, "
    "num_heads=5, dropout=0.5."
)


def test_what_does_not_fit_is_rejected() -> None:
    layer = MultiHeadAttention(4, 4, 4, 4, 2, 0.0)
    x = torch.zeros(2, 3, 4)

    def refused(error: type[Exception], sentence: str) -> object:
        return pytest.raises(error, match=f"^{re.escape(sentence)}$")

    with refused(ArgumentError, NEWER):
        MultiHeadAttention(100, 5, 0.5)  # type: ignore[arg-type] - the newer edition's order
    with refused(
        ArgumentError, "There is no argument 'device'. Remove it; for another dtype or device use layer.to(...)."
    ):
        MultiHeadAttention(4, 4, 4, 4, 2, 0.0, device="cpu")
    sentence = (
        "num_hiddens is 4, and 3 heads do not divide it. Give 1, 2 or 4 heads, or a width that is a multiple of 3."
    )
    with refused(ArgumentError, sentence):
        MultiHeadAttention(4, 4, 4, 4, 3, 0.0)
    with refused(ShapeError, "queries has shape (3, 4). Give three dimensions: (batch, length, features)."):
        layer(x[0], x, x, None)
    with refused(ShapeError, "keys has shape (2, 3, 4) and values has (2, 2, 4). Give one value per key."):
        layer(x, x, x[:, 1:], torch.tensor([1, 1]))
    with refused(ShapeError, "k has 3 keys and v has 2. Give one value per key."):
        layer(x, x, x[:, 1:], None)
    with refused(MaskError, "valid_lens contains NaN. Give numbers of keys, (batch,) or (batch, queries)."):
        layer(x, x, x, torch.tensor([1.0, torch.nan]))
    with refused(
        MaskError,
        "Lengths was given a torch.bool tensor of shape (2,). Give integers of shape (batch,) or (batch, queries).",
    ):
        layer(x, x, x, torch.tensor([True, False]))
    with refused(
        ShapeError, "valid_lens has shape (3,), and the batch has 2 samples. Give one length per sample: shape (2,)."
    ):
        layer(x, x, x, torch.tensor([1, 2, 3]))
    two_dimensional = torch.ones(2, 4, dtype=torch.int64)
    given = "Lengths(<int64 tensor (2, 4)>) has lengths for 4 queries, and the call has 3."
    with refused(MaskError, f"{given} Give one length per sample and query."):
        layer(x, x, x, two_dimensional)
    mend = "Give (batch * heads, length, head_dim), as returned by transpose_qkv."
    with refused(ShapeError, f"X has 3 rows, which is not a multiple of 2 heads. {mend}"):
        transpose_output(torch.zeros(3, 2, 2), 2)
