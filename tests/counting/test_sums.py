"""Sums over batches are those of all values at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multihead.counting.batches import CurrentBatch, TextBatch
from multihead.counting.sums import LayerSums
from multihead.record.running_summary import RunningSummary
from tests.record.measured_rows import add_to_summary, drawn_rows

HEADS, EXAMPLES = 3, 4


def batch_of(texts: list[int], lengths: list[int]) -> TextBatch:
    return TextBatch.pad_texts({text: np.arange(length) for text, length in zip(texts, lengths, strict=True)}, texts)


def sums_of(heads: int, examples: int) -> LayerSums:
    return LayerSums(heads, name="layer", examples=examples, current_batch=CurrentBatch())


def add(
    sums: LayerSums,
    batch: TextBatch,
    values: torch.Tensor,
    counted: torch.Tensor | None = None,
    chance: torch.Tensor | None = None,
) -> None:
    """Add values of statistics, (statistics, heads, tokens) of a packed row; the key is the query's own.

    The chance is that of the first statistic, (heads or 1, tokens).
    """
    sums.current_batch.batch = batch
    taken = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    named = dict(zip(("one", "other"), zip(values, taken, strict=True), strict=False))
    keys = {"largest_key": batch.position_in_text.expand(sums.num_heads, -1)}
    measured = drawn_rows(named, batch.lengths.tolist(), {} if chance is None else {"one": chance}, keys)
    sums.add(measured, sums.begin_texts(len(batch.text_indices)))


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def counted(request: pytest.FixtureRequest) -> tuple[LayerSums, torch.Tensor, torch.Tensor]:
    """Sums of three batches, with all values (2 * heads, tokens) and which of them count."""
    torch.manual_seed(0)
    sums = sums_of(HEADS, EXAMPLES)
    values, taken = [], []
    for batch in (batch_of([3, 5], [7, 4]), batch_of([0], [9]), batch_of([1, 2], [2, 30])):
        shape = 2, HEADS, batch.num_tokens
        value = torch.randn(shape, dtype=request.param).exp() - 0.5  # some are negative
        count = torch.rand(shape) < 0.8
        values.append(value.flatten(0, 1))
        taken.append(count.flatten(0, 1))
        add(sums, batch, value, count)
    return sums, torch.cat(values, 1), torch.cat(taken, 1)


def test_moments_and_extremes_are_those_of_all_values(
    counted: tuple[LayerSums, torch.Tensor, torch.Tensor],
) -> None:
    sums, values, taken = counted
    for row in range(2 * HEADS):
        of_row = values[row][taken[row]].double()
        assert sums.sums.num_queries[row] == len(of_row)
        assert float(sums.sums.mean[row]) == pytest.approx(float(of_row.mean()), abs=1e-12)
        assert float(sums.sums.squares[row]) == pytest.approx(float((of_row - of_row.mean()).square().sum()), abs=1e-11)
        assert (sums.sums.minimum[row], sums.sums.maximum[row]) == (of_row.min(), of_row.max())


def test_each_bin_holds_the_values_within_one_percent_of_its_own(
    counted: tuple[LayerSums, torch.Tensor, torch.Tensor],
) -> None:
    sums, values, taken = counted
    of_row, of_bins, numbers = map(torch.from_numpy, sums.filled_bins())
    assert bool((of_row.diff() >= 0).all())
    for row in range(2 * HEADS):
        mine = of_bins[of_row == row]
        assert bool((mine.diff() > 0).all())
        spread = mine.repeat_interleave(numbers[of_row == row])
        exact = values[row][taken[row]].double().sort().values
        assert torch.allclose(spread.double(), exact, rtol=0.01, atol=1e-9)


def test_they_are_a_running_summary_too(counted: tuple[LayerSums, torch.Tensor, torch.Tensor]) -> None:
    sums, values, taken = counted
    assert sums.num_samples == 5
    summary = RunningSummary(HEADS)
    for at, name in enumerate(("one", "other")):
        rows = slice(at * HEADS, (at + 1) * HEADS)
        add_to_summary(summary, {name: (values[rows], taken[rows])})
    for of in ("mean", "median", "p95"):
        torch.testing.assert_close(sums.summary(of), summary.summary(of), rtol=1e-12, atol=1e-12)


def test_infinite_and_missing_numbers_are_counted_and_are_in_no_sum() -> None:
    sums, batch = sums_of(1, 2), batch_of([0], [4])
    values = torch.tensor([[[1.0, torch.nan, torch.inf, 3.0]]])
    add(sums, batch, values)
    found = sums.sums
    assert (found.num_queries.tolist(), found.num_nonfinite.tolist(), found.mean.tolist()) == ([2], [2], [2.0])
    assert (found.maximum.tolist(), sums.strongest.largest_value.tolist()) == ([3.0], [[3.0, -torch.inf]])


@pytest.mark.parametrize("heads", [1, HEADS], ids=["one mask", "a mask per head"])
def test_chance_is_the_mean_over_the_queries_that_count_and_its_error_that_over_texts(heads: int) -> None:
    torch.manual_seed(0)
    sums, texts = sums_of(HEADS, EXAMPLES), []
    for batch in (batch_of([3, 5], [7, 4]), batch_of([0], [9]), batch_of([1, 2], [1, 30])):
        values = torch.rand(2, HEADS, batch.num_tokens, dtype=torch.float64)
        count = torch.rand(2, HEADS, batch.num_tokens) < 0.7
        count[0, 0, batch.text_of_token == 1] = False  # a head may have a text without a query that counts
        values[0, 1, 0], values[0, 1, 1] = torch.nan, torch.inf  # in no sum
        level = torch.rand(heads, batch.num_tokens, dtype=torch.float64)
        add(sums, batch, values.clone(), count, level)
        for text in batch.text_indices.tolist():
            of_text = batch.text_of_token == text
            texts.append([each[..., of_text] for each in (values[0], level.expand(HEADS, -1), count[0])])
    for head in range(HEADS):
        whole, means = [], []
        for values, level, count in texts:
            taken = count[head] & values[head].isfinite()
            whole.append(level[head][taken])
            if bool(taken.any()):
                means.append((values[head] - level[head])[taken].mean())
        assert float(sums.sums.chance[head]) == pytest.approx(float(torch.cat(whole).mean()), abs=1e-12)
        excess = torch.stack(means)
        assert sums.sums.num_texts[head] == len(excess) > 2
        assert float(sums.sums.excess[head]) == pytest.approx(float(excess.mean()), abs=1e-12)
        assert float(sums.sums.excess_squares[head]) == pytest.approx(
            float(excess.var() * (len(excess) - 1)), abs=1e-12
        )
    unknown = slice(HEADS, None)
    assert bool(sums.sums.chance[unknown].isnan().all() and sums.sums.excess[unknown].isnan().all())
    assert bool(sums.sums.mean[unknown].isfinite().all())


class TestStrongest:
    def test_they_are_the_largest_value_of_each_text_in_any_order_of_batches(
        self, counted: tuple[LayerSums, torch.Tensor, torch.Tensor]
    ) -> None:
        sums, values, taken = counted
        texts = [torch.where(taken, values, -torch.inf).split([7, 4, 9, 2, 30], 1)[at] for at in (2, 3, 4, 0, 1)]
        best = torch.stack([each.amax(1).double() for each in texts], 1)
        value, text = best.sort(dim=1, descending=True, stable=True)
        assert torch.equal(sums.strongest.largest_value, value[:, :EXAMPLES])
        assert torch.equal(sums.strongest.text_index, torch.tensor([0, 1, 2, 3, 5])[text[:, :EXAMPLES]])

    def test_ties_go_to_the_earlier_text_and_position(self) -> None:
        sums = sums_of(1, EXAMPLES)
        for texts in ([4, 6], [2, 5], [0, 7]):
            add(sums, batch_of(texts, [3, 3]), torch.ones(1, 1, 6))
        assert sums.strongest.text_index.tolist() == [[0, 2, 4, 5]]
        assert sums.strongest.query_position.tolist() == [[0, 0, 0, 0]]

    def test_the_values_around_an_example_end_with_its_text(self) -> None:
        sums = sums_of(1, 1)
        values = torch.tensor([[[0.1, 0.2, 0.3, 0.9, 0.4]]])
        add(sums, batch_of([0, 1], [2, 3]), values, torch.tensor([[[True, True, False, True, True]]]))
        around = sums.strongest.values_around[0, 0]
        assert around[around.isfinite()].tolist() == pytest.approx([0.9, 0.4])
        assert (sums.strongest.text_index.tolist(), sums.strongest.query_position.tolist()) == ([[1]], [[1]])

    def test_a_head_with_few_texts_that_count_has_few_examples(self) -> None:
        sums = sums_of(1, 3)
        add(sums, batch_of([0, 1], [2, 1]), torch.ones(1, 1, 3), torch.tensor([[[True, True, False]]]))
        assert sums.strongest.largest_value.tolist() == [[1.0, -torch.inf, -torch.inf]]
