"""A mask defined outside the package runs wherever the package's own masks run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import MaskError
from multihead.kernels.plan.bounds import key_bounds
from multihead.masks.base import find_mask_class
from multihead.masks.positions import TilePositions
from tests.drawing import Every
from tests.kernel_names import EACH, exactest, rounding

LENGTH = 9


@dataclass(frozen=True)
class BlockMask(masks.Mask):
    """Keys of the query's own block; its rows are intervals that depend on absolute positions."""

    size: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries // self.size == keys // self.size

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        start = queries // self.size * self.size
        return start, start + self.size


@dataclass(frozen=True, eq=False)
class Anchors(masks.Mask):
    """One key per sample is visible, besides the query's own."""

    keys: Tensor

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys == self.keys.view(-1, 1, 1, 1)) | (keys == queries)

    def select_sample(self, index: int) -> Anchors:
        return Anchors(self.keys[index : index + 1])


@dataclass(frozen=True)
class PerHead(masks.Mask):
    """Another step in each head, without a tensor that holds them."""

    heads: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries - keys) % (torch.arange(self.heads).view(1, -1, 1, 1) + 1) == 0


def strided(size: int = LENGTH, n: int = 3) -> Tensor:
    """(size, size) bool, by a loop."""
    return torch.tensor([[(i - j) % n == 0 for j in range(size)] for i in range(size)])


def dense_attention(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """The definition, in float64."""
    scores = (q.double() @ k.double().mT / q.shape[-1] ** 0.5).masked_fill(~kept, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v.double()


@pytest.mark.parametrize("kernel", EACH)
def test_visible_alone_is_enough_for_outputs_and_gradients_of_every_kernel(kernel: str) -> None:
    q, k, v = (torch.randn(2, 2, LENGTH, 16, dtype=exactest(kernel), requires_grad=True) for _ in range(3))
    kept = strided() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    output = mh.attention(q, k, v, mask=Every(3) & masks.Causal(), kernel=kernel)
    expected = dense_attention(q, k, v, kept)
    grads = torch.autograd.grad(output.square().sum(), (q, k, v))
    expected_grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close(output.double(), expected, atol=rounding(kernel), rtol=rounding(kernel))
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, atol=8 * rounding(kernel), rtol=8 * rounding(kernel))


@pytest.mark.parametrize("field", [[1, 2], ([1], 2)], ids=repr)
def test_a_field_that_is_a_list_is_refused_in_words(field: Any) -> None:
    @dataclass(frozen=True)
    class Listed(masks.Mask):
        keys: Any

        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return keys <= queries

    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(MaskError) as refusal:
        mh.attention(q, q, q, mask=Listed(field) & masks.Causal())
    assert str(refusal.value) == (
        f"The field keys of Listed is {field!r}, which is mutable, so that a plan made for it could not be cached. "
        "Store a tuple, or a tensor."
    )


def test_what_these_masks_say_about_themselves_is_true() -> None:
    for mask in (Every(3), BlockMask(3), Anchors(torch.tensor([1, 0])), BlockMask(3) & masks.Causal()):
        masks.check(mask, queries=5, keys=LENGTH)


def test_an_interval_makes_hidden_keys_skipped() -> None:
    bounds = key_bounds(BlockMask(3), queries=4, keys=8, query_start=2)
    assert (bounds.start.tolist(), bounds.stop.tolist()) == ([[0, 3, 3, 3]], [[3, 6, 6, 6]])
    assert bounds.remainder is None
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16).unbind()
    kept = torch.tensor([[i // 3 == j // 3 for j in range(LENGTH)] for i in range(LENGTH)])
    torch.testing.assert_close(
        mh.attention(q, k, v, mask=BlockMask(3)).double(), dense_attention(q, k, v, kept), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("mask", [Every(3), BlockMask(4) | masks.Causal(), Anchors(torch.tensor([1, 0, 2]))], ids=repr)
def test_padding_on_either_side_changes_nothing_for_the_tokens(mask: masks.Mask, side: str) -> None:
    layer, lengths = mh.MultiHeadAttention(16, 2), (5, LENGTH, 2)
    x = torch.randn(3, LENGTH, 16)
    output = layer(x, mask=mask, lengths=lengths, padding_side=side)
    for sample, length in enumerate(lengths):
        rows = slice(0, length) if side == "right" else slice(LENGTH - length, LENGTH)
        alone = layer(x[sample : sample + 1, rows], mask=mask.select_sample(sample))
        torch.testing.assert_close(output[sample : sample + 1, rows], alone, atol=1e-5, rtol=1e-5)


def test_packed_rows_mean_each_sample_alone() -> None:
    layer, lengths = mh.MultiHeadAttention(16, 2), (5, LENGTH, 2)
    x = torch.randn(3, LENGTH, 16)
    tokens, packing = mh.pack(x, lengths)
    output = packing.unpack(layer(tokens, mask=BlockMask(4), packing=packing))
    for sample, length in enumerate(lengths):
        alone = layer(x[sample : sample + 1, :length], mask=BlockMask(4))
        torch.testing.assert_close(output[sample : sample + 1, :length], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("mask", [Every(3), BlockMask(4)], ids=repr)
def test_a_cache_decodes_what_one_pass_computes(mask: masks.Mask, window: int | None) -> None:
    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(2, LENGTH, 16)
    mask = mask & masks.Causal() & (masks.Full() if window is None else masks.Window(window))
    whole = layer(x, mask=mask)
    cache = mh.KeyValueCache(window=window)
    steps = [layer(part, mask=mask, cache=cache) for part in (x[:, :4], *x[:, 4:].split(1, 1))]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-5)


def test_a_compiled_layer_runs_it_in_one_graph() -> None:
    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(2, LENGTH, 16)
    mask = Every(3) & masks.Causal()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", [Every(3), Anchors(torch.tensor([1, 0]))], ids=repr)
def test_it_is_observed_saved_and_loaded(mask: masks.Mask, tmp_path: Path) -> None:
    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(2, LENGTH, 16)
    with mh.observe(layer) as seen:
        layer(x, mask=mask, lengths=(LENGTH, 6))
    seen.save(tmp_path / "run.safetensors")
    opened = mh.Record.load(tmp_path / "run.safetensors")
    for sample, length in enumerate((LENGTH, 6)):
        kept = mask.select_sample(sample).visible(
            torch.arange(length).view(1, 1, -1, 1), torch.arange(length).view(1, 1, 1, -1)
        )[0, 0]
        for record in (seen, opened):
            one = record.layers[0].sample(sample)
            assert torch.equal(one.visible(), kept)
            assert torch.equal(one.weights() > 0, kept.expand(2, -1, -1))
            torch.testing.assert_close(one.weights().sum(-1), torch.ones(2, length))


def test_a_record_whose_mask_is_not_defined_here_keeps_its_statistics(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Gone(masks.Mask):
        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return keys >= queries

    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(1, LENGTH, 16)
    with mh.observe(layer) as seen:
        layer(x, mask=Gone())
    seen.save(tmp_path / "run.safetensors")
    masks.base._MASK_CLASSES.pop("Gone")
    opened = mh.Record.load(tmp_path / "run.safetensors")
    kept = seen.layers[0].sample().statistics["entropy"]
    assert torch.equal(opened.layers[0].sample().statistics["entropy"], kept)
    assert len(opened.table().rows) == 2
    with pytest.raises(MaskError) as refusal:
        opened.layers[0].weights(head=0)
    assert str(refusal.value) == (
        "The record uses the mask Gone, which is not defined here. "
        "Import the module that defines the class Gone before loading the record; "
        "with multihead view, by --import MODULE."
    )


def test_a_record_that_is_saved_again_without_the_class_keeps_the_mask(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Kept(masks.Mask):
        n: int
        marks: Tensor

        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return (queries - keys) % self.n == 0

        def select_sample(self, index: int) -> masks.Mask:
            return self

    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(1, LENGTH, 16)
    with mh.observe(layer) as seen:
        layer(x, mask=Kept(3, torch.arange(4)) & masks.Causal())
    seen.save(first := tmp_path / "first.safetensors")
    masks.base._MASK_CLASSES.pop("Kept")
    mh.Record.load(first).save(second := tmp_path / "second.safetensors")
    masks.base._MASK_CLASSES["Kept"] = Kept
    again = mh.Record.load(second).layers[0]
    assert torch.equal(again.weights(), seen.layers[0].weights())


def test_a_class_with_other_fields_than_the_record_is_another_mask(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Renamed(masks.Mask):
        n: int

        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return (queries - keys) % self.n == 0

    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(1, LENGTH, 16)
    with mh.observe(layer) as seen:
        layer(x, mask=Renamed(3))
    seen.save(tmp_path / "run.safetensors")

    @dataclass(frozen=True)
    class Newer(masks.Mask):
        step: int

    masks.base._MASK_CLASSES["Renamed"] = Newer
    opened = mh.Record.load(tmp_path / "run.safetensors")
    assert len(opened.table().rows) == 2
    with pytest.raises(MaskError, match=r"^The record uses the mask Renamed, which is not defined here\."):
        opened.layers[0].weights(head=0)


@pytest.mark.parametrize(
    ("method", "returned", "sentence"),
    [
        (
            "interval",
            lambda queries, keys: queries,
            "Wrong.interval returned a Tensor. Return two tensors, (start, stop), or None where rows are no intervals.",
        ),
        (
            "visible",
            lambda queries, keys: torch.ones(1, 1, 3, 4, dtype=torch.bool),
            (
                "Wrong.visible returned a tensor of shape (1, 1, 3, 4), which does not broadcast to (batch, heads, "
                "12 queries, 12 keys). Compute it from the positions given: (.., queries, 1) and (.., 1, keys)."
            ),
        ),
    ],
)
def test_a_method_that_returns_something_else_is_an_error_that_names_it(
    method: str, returned: Any, sentence: str
) -> None:
    wrong = dataclass(frozen=True)(type("Wrong", (masks.Mask,), {method: lambda self, *args: returned(*args)}))
    q = torch.randn(1, 2, 12, 8)
    with pytest.raises(MaskError) as caught:
        mh.attention(q, q, q, mask=wrong())
    assert str(caught.value) == sentence


def test_a_padded_batch_is_packed_only_if_the_mask_is_an_interval() -> None:
    """A packed row would be evaluated cell by cell over all samples: quadratic in their tokens."""

    @dataclass(frozen=True)
    class Fast(masks.Mask):
        n: int
        translation_invariant = True

        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            assert queries.shape[2] <= LENGTH  # not all samples in one row
            return (queries - keys) % self.n == 0

    layer, x = mh.MultiHeadAttention(16, 2).eval(), torch.randn(3, LENGTH, 16)
    mask, lengths = Fast(2) & masks.Causal(), (LENGTH, 3, 5)
    with torch.no_grad():
        output = layer(x, mask=mask, lengths=lengths)
        for row, found, length in zip(x, output, lengths, strict=True):
            torch.testing.assert_close(found[:length], layer(row[None, :length], mask=mask)[0], atol=1e-6, rtol=1e-5)


def test_some_heads_of_a_mask_that_differs_between_heads_show_what_they_show_in_it() -> None:
    mask, place = PerHead(4) & masks.Causal(), TilePositions.from_sizes(LENGTH, LENGTH)
    some = mask.select_heads(lambda x: x[:, 1:4] if x.shape[1] > 1 else x)
    assert torch.equal(some.tile(place), mask.tile(place)[:, 1:4])
    one = some.select_heads(lambda x: x[:, 2:] if x.shape[1] > 1 else x)
    assert torch.equal(one.tile(place), mask.tile(place)[:, 3:])
    assert one == some.select_heads(lambda x: x[:, 2:] if x.shape[1] > 1 else x)  # a value, so that it is planned once
    same = Every(3) & masks.Causal()
    assert same.select_heads(lambda x: x[:, :1]) == same


def test_a_mask_with_a_tensor_per_sample_must_define_select_sample() -> None:
    @dataclass(frozen=True, eq=False)
    class Limits(masks.Mask):
        last: Tensor

        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return keys <= self.last.view(-1, 1, 1, 1)

    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(2, LENGTH, 16)
    with mh.observe(layer), pytest.raises(MaskError) as refusal:
        layer(x, mask=Limits(torch.tensor([3, 4])))
    assert str(refusal.value).endswith(
        "holds a tensor, and Limits does not define select_sample(index). "
        "Define it to return the mask of one sample: with its row of the tensor, or self where samples share it."
    )


def test_a_mask_derived_from_one_of_the_package_shows_what_it_defines_itself() -> None:
    @dataclass(frozen=True, eq=False)
    class Strict(masks.Causal):
        """A query sees the keys before its own position."""

        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return keys < queries

        def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros_like(queries), queries

    q, k, v = torch.randn(3, 1, 2, LENGTH, 8).unbind()
    seen = torch.ones(LENGTH, LENGTH).tril(-1).bool()
    for mask in (Strict(), Strict() & masks.Lengths((LENGTH,))):
        expected = mh.attention(q, k, v, mask=masks.Keep(seen, "queries keys"))
        assert torch.allclose(mh.attention(q, k, v, mask=mask), expected, atol=1e-6)


def test_what_visible_returns_must_be_boolean() -> None:
    class Scores(masks.Mask):
        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return queries - keys

    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(MaskError) as refusal:
        mh.attention(q, q, q, mask=Scores())
    assert str(refusal.value) == (
        "Scores.visible returned a torch.int64 tensor. "
        "Return a bool tensor that broadcasts to (batch, heads, queries, keys), True = may be seen."
    )


def test_a_name_of_the_package_cannot_be_taken() -> None:
    with pytest.raises(MaskError) as refusal:
        type("Causal", (masks.Mask,), {})
    assert str(refusal.value) == (
        "multihead.masks already defines a mask named Causal. "
        "Give the class another name: a saved record finds a mask by the name of its class."
    )
    assert find_mask_class("Causal") is masks.Causal
