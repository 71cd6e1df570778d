"""Records that do not belong together, or are not complete, are not joined; tests/parallel joins those of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError
from multihead.observation.record import Record
from multihead.record.split import LayerPartOfRank, TokensOfRank
from multihead.record.text_table import RowsInTensor


def whole(*, tokens: int = 4, heads: int = 2, seed: int = 0, mask: masks.Mask | None = None) -> Record:
    torch.manual_seed(seed)
    layer = mh.MultiHeadAttention(8, heads)
    with mh.observe(layer) as seen, torch.no_grad():
        layer(torch.randn(1, tokens, 8), mask=masks.Causal() if mask is None else mask)
    return seen


def of_tokens(rank: int, *, ranks: int = 2, rows: tuple[int, int] | None = None, **options: int) -> Record:
    """Return the record that one of two ranks would hold, cut out of a whole one."""
    seen = whole(**options)  # type: ignore[arg-type]
    (layer,), (sample,) = seen.layers, seen.layers[0].samples
    first, stop = (2 * rank, 2 * rank + 2) if rows is None else rows
    heads = layer.num_heads
    part = replace(sample, split=TokensOfRank(((first, stop),), ((first, stop),)))
    part.logsumexp = RowsInTensor(sample.logsumexp.rows_between(first, stop))
    part.set_statistics({name: value[:, first:stop] for name, value in sample.per_query.items()})
    part.q = part.k = None
    layer.samples[:] = [part]
    seen._calls[:] = [(part, 0)]
    layer.split = LayerPartOfRank((0, heads), heads, (0, heads), heads, rank, ranks)
    return seen


def of_heads(first: int, *, total: int = 4, **options: int | masks.Mask) -> Record:
    """Return a record of two heads of four."""
    seen = whole(seed=first, **options)  # type: ignore[arg-type]
    seen.layers[0].split = LayerPartOfRank((first, first + 2), total, (first, first + 2), total)
    return seen


def test_two_ranks_hold_the_tokens_of_one() -> None:
    expected = whole().layers[0]
    found = Record.joined([of_tokens(1), of_tokens(0)])
    assert not found.is_part
    torch.testing.assert_close(found.layers[0].samples[0].statistics, expected.samples[0].statistics)
    assert not found.keeps_weights


def test_two_ranks_hold_the_heads_of_one() -> None:
    parts = [of_heads(2), of_heads(0)]
    found = Record.joined(parts).layers[0]
    assert found.num_heads == 4
    for head in range(4):
        torch.testing.assert_close(found.weights(head), parts[head < 2].layers[0].weights(head % 2))


ALONE = "Give the records of one run, one from each rank, with equal layers and options."


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (lambda: [of_tokens(0), of_tokens(0)], "the sequence is split over 2 ranks, and these are 0, 0"),
        (lambda: [of_tokens(0), whole()], "MultiHeadAttention of one of them was not split over ranks"),
        (lambda: [of_tokens(0), of_tokens(1, tokens=6)], "the sizes of MultiHeadAttention differ"),
        (
            lambda: [of_tokens(0), of_tokens(1, rows=(1, 3))],
            "their queries do not add up to a text with 4",
        ),
        (lambda: [of_heads(0), of_heads(0)], "several of them hold the same heads"),
        (
            lambda: [of_heads(0, total=6), of_heads(2, total=6)],
            "MultiHeadAttention has 6 heads, and these are 0 to 1, 2 to 3",
        ),
        (lambda: [of_heads(0, total=6), of_heads(2)], "they hold different tokens, or heads of different layers"),
        (lambda: [of_heads(0), of_heads(2, tokens=5)], "the sizes of MultiHeadAttention differ"),
        (lambda: [of_heads(0)], "together they hold heads 0 to 1 of 4"),
        (lambda: [of_heads(0), Record()], "they have different layers or numbers of texts"),
    ],
)
def test_what_does_not_belong_together_is_not_joined(records: Callable[[], list[Record]], reason: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Record.joined(records())
    assert str(error.value) == f"The records of the ranks do not belong together: {reason}. {ALONE}"


def test_heads_with_masks_of_their_own_are_not_joined() -> None:
    hidden = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    parts = [of_heads(0), of_heads(2, mask=masks.Keep(hidden, "heads queries keys"))]
    with pytest.raises(ArgumentError) as error:
        Record.joined(parts)
    assert str(error.value).startswith("The mask Causal() differs between heads, which are split over ranks.")
