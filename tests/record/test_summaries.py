"""Means, medians and percentiles count the queries that have what is measured, over all texts."""

from __future__ import annotations

import pytest
import torch

from multihead import masks
from multihead.errors import ArgumentError
from tests.observation.recorded import asked, ids, read


@pytest.mark.parametrize(("of", "share"), [("median", 0.5), ("p95", 0.95), ("max", 1.0)])
def test_a_percentile_is_that_of_torch_over_the_queries_that_see_a_key(of: str, share: float) -> None:
    mask = masks.Lengths((tuple([0, 0] + [9] * 7),))
    sample = asked(mask=mask).layers[0].sample()
    expected = sample.statistics["entropy"][:, 2:].double().quantile(share, dim=-1)
    torch.testing.assert_close(sample.summary(of)["entropy"], expected)  # type: ignore[arg-type]


def test_texts_of_different_lengths_count_by_their_queries() -> None:
    record = read(ids(1, 9), ids(1, 4))
    layer = record.layers[0]
    whole = torch.cat([each.statistics["entropy"] for each in layer.samples], 1).double()
    torch.testing.assert_close(layer.summary()["entropy"], whole.mean(-1))
    torch.testing.assert_close(layer.summary("median")["entropy"], whole.quantile(0.5, dim=-1))


def test_duplicates_count_the_queries_whose_token_was_there_before() -> None:
    record = read(torch.tensor([[3, 4, 3, 5, 4, 4]]))
    sample = record.layers[0].sample()
    measured = sample.measured()
    assert measured["duplicate_mass"].counted[0].tolist() == [False, False, True, False, True, True]
    assert measured["induction_mass"].counted.equal(measured["duplicate_mass"].counted)
    expected = sample.statistics["duplicate_mass"][:, [2, 4, 5]].double().mean(-1)
    torch.testing.assert_close(sample.means["duplicate_mass"], expected)


def test_where_no_query_counts_the_sum_is_0() -> None:
    sample = asked(mask=masks.Lengths((0,))).layers[0].sample()
    for of in ("mean", "median", "p95", "max"):
        assert torch.equal(sample.summary(of)["entropy"], torch.zeros(4, dtype=torch.float64))  # type: ignore[arg-type]


def test_a_row_of_nan_makes_its_heads_summary_nan() -> None:
    sample = asked().layers[0].sample()
    sample._per_query["entropy"].whole()[1, 3] = torch.nan
    for of in ("mean", "median", "p95", "max"):
        assert sample.summary(of)["entropy"].isnan().tolist() == [False, True, False, False]  # type: ignore[arg-type]


def test_another_way_to_sum_up_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        asked().layers[0].summary("mode")  # type: ignore[arg-type]
    assert str(caught.value) == 'of is \'mode\'. Give "mean", "median", "p95" or "max".'


def test_a_table_shows_the_summary_that_is_asked_for() -> None:
    record = read(ids(1, 9))
    assert [row["entropy"] for row in record.table(of="p95").rows][:4] == record.layers[0].summary("p95")[
        "entropy"
    ].tolist()
