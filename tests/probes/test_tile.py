"""One tile of the map is the same as that part of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import masks
from multihead.errors import ArgumentError, ShapeError
from multihead.functional import attention_weights, attention_with_logsumexp, request_of, statistics
from multihead.masks.positions import TilePositions
from multihead.probes import tile as tiles
from multihead.probes.tile import (
    LARGE_LOGSUMEXP,
    RowLogsumexps,
    has_large_logsumexp,
    head_indices,
    is_finite_and_small,
    tile,
)
from multihead.scores import RelativeBias
from tests import oracle
from tests.drawing import Drawn, calls
from tests.exactness import SIZES, Case, check_exact, drawn

MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(20),
    "no interval": masks.Keep(torch.arange(70 * 90).view(1, 1, 70, 90) % 7 > 2),
}


@settings(max_examples=40)
@given(case=calls(), data=st.data())
def test_a_tile_is_that_part_of_the_full_softmax(case: Drawn, data: st.DataObject) -> None:
    q, k = case.q.double(), case.k.double()
    options = {name: value.double() if isinstance(value, Tensor) else value for name, value in case.options.items()}
    queries = slice(data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12)))
    keys = slice(data.draw(st.integers(-5, 12)), None, data.draw(st.integers(1, 3)))
    heads = data.draw(st.lists(st.integers(0, case.size.heads - 1), min_size=1, max_size=4))
    seen = oracle.shown(case.mask, case.size.cells, case.query_start)
    whole = oracle.attend(q, k, k, seen, **options).weights
    tile = attention_weights(
        q, k, mask=case.mask, query_start=case.query_start, heads=heads, queries=queries, keys=keys, **options
    )
    assert oracle.difference(tile, whole[:, heads][:, :, queries, keys]) <= 1e-13


@pytest.mark.parametrize("heads", [2, -1, [0, 3], (1,), slice(1, 3), slice(None)], ids=str)
def test_heads_are_named_by_an_index_several_or_a_slice(heads: Any) -> None:
    q = torch.randn(2, 4, 3, 8)
    chosen = [heads] if isinstance(heads, int) else list(heads) if not isinstance(heads, slice) else heads
    assert torch.allclose(attention_weights(q, q, heads=heads), (q @ q.mT / 8**0.5).softmax(-1)[:, chosen], atol=1e-6)


def test_each_head_of_a_group_looks_at_the_keys_of_its_group() -> None:
    q, k = torch.randn(1, 6, 3, 8), torch.randn(1, 2, 5, 8)
    whole = (q @ k.repeat_interleave(3, 1).mT / 8**0.5).softmax(-1)
    for head in range(6):
        assert torch.allclose(attention_weights(q, k, heads=head)[0, 0], whole[0, head], atol=1e-6)


def test_a_logsumexp_at_hand_is_used() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    _, logsumexp = attention_with_logsumexp(q, k, v)
    assert torch.allclose(attention_weights(q, k, logsumexp=logsumexp), attention_weights(q, k), atol=1e-7)
    shifted = attention_weights(q, k, logsumexp=logsumexp - 1)
    assert torch.allclose(shifted, torch.e * attention_weights(q, k), atol=1e-5)


def test_a_logsumexp_of_another_shape_is_refused() -> None:
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ShapeError) as refusal:
        attention_weights(q, q, logsumexp=torch.zeros(1, 2, 4))
    assert str(refusal.value) == "logsumexp has shape (1, 2, 4). Give (batch, heads, queries) = (1, 2, 5)."


@pytest.mark.parametrize("head", [4, -5])
def test_a_head_that_does_not_exist_is_refused(head: int) -> None:
    q = torch.zeros(1, 4, 5, 8)
    with pytest.raises(ArgumentError) as refusal:
        attention_weights(q, q, heads=[0, head])
    assert str(refusal.value) == f"There is no head {head}. Give heads from 0 to 3."


@pytest.mark.parametrize("heads", [[], slice(2, 2)])
def test_no_head_at_all_is_refused(heads: list[int] | slice) -> None:
    with pytest.raises(ArgumentError, match=r"^No head was chosen\. Give heads from 0 to 2\.$"):
        head_indices(heads, 3)


def in_tiles(q: Tensor, k: Tensor, *, width: int = 23, **options: Any) -> Tensor:
    """Put the map together from tiles that have a part of the keys and of the queries each."""
    rows = (slice(0, 31), slice(31, None))
    columns = [slice(first, first + width) for first in range(0, k.shape[2], width)]
    return torch.cat(
        [
            torch.cat([attention_weights(q, k, queries=row, keys=column, **options) for column in columns], 3)
            for row in rows
        ],
        2,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_weights_are_exact_at_any_size_of_the_scores(size: float, mask: str) -> None:
    q, k = drawn(size)
    options = {"mask": MASKS[mask], "query_start": 20}
    case = Case(q, k, shown=MASKS[mask].tile(TilePositions.from_sizes(70, 90, query_start=20)))
    check_exact(attention_weights(q, k, **options), case)
    check_exact(in_tiles(q, k, **options), case)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("term", ["bias", "distance", "softcap", "sinks", "bfloat16"])
def test_weights_are_exact_whatever_is_done_to_the_scores(size: float, term: str) -> None:
    q, k = drawn(size, dtype=torch.bfloat16 if term == "bfloat16" else torch.float32)
    options: dict[str, Any] = {}
    if term == "bias":
        options["bias"] = torch.randn(1, 4, 70, 90) * size
    if term == "distance":
        options["bias"] = RelativeBias(-torch.arange(159).flip(0) * torch.tensor([0.5, 0.25, size, 4.0]).view(1, 4, 1))
    if term == "softcap":
        options["softcap"] = 3 * size
    if term == "sinks":
        options["sinks"] = torch.tensor([0.0, size, 2 * size, -size])
    written = options | ({"bias": options["bias"].tile(70, 90)} if term == "distance" else {})
    check_exact(attention_weights(q, k, **options), Case(q, k, **written))
    check_exact(in_tiles(q, k, **options), Case(q, k, **written))


@pytest.mark.parametrize("size", SIZES)
def test_a_tile_has_the_numbers_of_the_whole(size: float) -> None:
    q, k = drawn(size)
    assert (in_tiles(q, k) - attention_weights(q, k)).abs().max() <= 2.0**-22


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e16, 1e20, 1e26])
def test_no_weight_is_above_1_however_large_the_scores(size: float, dtype: torch.dtype) -> None:
    """The logsumexp is rounded to a number whose neighbours are far away, and so is each score."""
    q, k = (tensor.to(dtype) for tensor in drawn(size))
    exact = Case(q, k).softmax(torch.float64)
    found = statistics(q, k, probes=("largest_weight", "self_mass", "first_mass", "received"))
    received = found.pop("received") / 70
    for weights in (attention_weights(q, k), in_tiles(q, k), received, *found.values()):
        assert bool((weights <= 1).all() & (weights >= 0).all())
    assert (attention_weights(q, k).double() - exact).abs().max() <= 1e-6


def test_a_logsumexp_of_other_arithmetic_leaves_weights_exact() -> None:
    q, k = drawn(400.0)
    _, logsumexp = attention_with_logsumexp(q, k, k)
    for rounded in (logsumexp * (1 + 3e-7), logsumexp * (1 - 3e-7)):
        check_exact(attention_weights(q, k, logsumexp=rounded), Case(q, k))
        check_exact(in_tiles(q, k, logsumexp=rounded), Case(q, k))


def test_a_hidden_key_that_is_nan_leaves_the_weights_of_a_row_of_the_lowest_bias() -> None:
    """Whether a logsumexp is that of its row is judged by the norms of the keys, without those that are not finite."""
    q, k = torch.tensor([[[[0.2], [-0.6]]]]), torch.tensor([[[[0.7], [torch.nan]]]])
    mask = masks.Keep(torch.eye(2).bool(), "queries keys")
    found = statistics(q, k, mask=mask, bias=torch.full((1, 1, 1, 1), torch.finfo().min))
    assert found["self_mass"][..., 0].tolist() == [[1]]
    assert bool(found["self_mass"][..., 1].isnan().all())


def test_a_logsumexp_over_more_keys_than_these_is_used() -> None:
    q, k = drawn(1.0)
    _, logsumexp = attention_with_logsumexp(q, k, k)
    whole, part = attention_weights(q, k), attention_weights(q, k[:, :, :50], logsumexp=logsumexp)
    torch.testing.assert_close(part, whole[..., :50], rtol=0, atol=1e-6)
    narrow = attention_weights(q, k[:, :, :50], logsumexp=logsumexp, keys=slice(10, 30))
    torch.testing.assert_close(narrow, whole[..., 10:30], rtol=0, atol=1e-6)


def test_tiles_are_computed_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(30.0, queries=100, keys=130)
    expected, narrow = attention_weights(q, k), attention_weights(q, k, keys=slice(20, 110))
    for name, value in (("MAX_SCORES_PER_BLOCK", 500), ("MIN_ROWS_PER_BLOCK", 8), ("MIN_BLOCK_KEYS", 16)):
        monkeypatch.setattr(tiles, name, value)
    torch.testing.assert_close(attention_weights(q, k), expected, rtol=0, atol=2.0**-22)
    torch.testing.assert_close(attention_weights(q, k, keys=slice(20, 110)), narrow, rtol=0, atol=2.0**-22)


def test_totals_of_rows_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(400.0)
    request, totals = request_of(q, k, k), RowLogsumexps()
    logsumexp = attention_with_logsumexp(q, k, k)[1]
    rows: list[slice] = []
    streamed = tiles._logsumexp_block_by_block
    monkeypatch.setattr(tiles, "_logsumexp_block_by_block", lambda *given: rows.append(given[2]) or streamed(*given))
    found = [
        tile(request, logsumexp, queries=slice(first, first + 40), keys=slice(0, 9), totals=totals)
        for first in (0, 10, 30, 0)
    ]
    assert rows == [slice(0, 40, 1), slice(10, 50, 1), slice(30, 70, 1)]
    assert torch.equal(found[0], found[3])


def test_the_usual_logsumexp_is_that_of_rows_with_keys_without_nan_and_not_large() -> None:
    for value, usual, large in (
        (3.0, True, False),
        (-torch.inf, False, False),
        (torch.nan, False, False),
        (LARGE_LOGSUMEXP + 1, False, True),
        (-LARGE_LOGSUMEXP - 1, False, True),
    ):
        logsumexp = torch.tensor([[[0.5, value, -2.0]]])
        assert (is_finite_and_small(logsumexp), has_large_logsumexp(logsumexp)) == (usual, large)
    assert is_finite_and_small(torch.zeros(1, 2, 0))
