"""Means, medians and percentiles count the queries that have what is measured, over all texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import multihead as mh
from multihead import masks, probes
from multihead.errors import ArgumentError
from multihead.observation.record import Record
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


def test_what_is_not_finite_counts_in_no_summary_and_is_nan_where_nothing_else_is_left() -> None:
    sample = asked().layers[0].sample()
    entropy = sample.per_query["entropy"]
    whole = sample.summary()["entropy"]
    entropy[1, 3], entropy[2, :2], entropy[3] = torch.nan, torch.inf, torch.nan
    measured = sample.measured()["entropy"]
    assert measured.nonfinite is not None
    assert measured.nonfinite.sum(-1).tolist() == [0, 1, 2, entropy.shape[1]]
    expected = [whole[0], entropy[1][entropy[1].isfinite()].double().mean(), entropy[2, 2:].double().mean()]
    assert torch.allclose(sample.summary()["entropy"][:3], torch.stack(expected), atol=1e-12)
    for of in ("mean", "median", "p95", "max"):
        found = sample.summary(of)["entropy"]  # type: ignore[arg-type]
        assert found.isnan().tolist() == [False, False, False, True]


def test_another_way_to_sum_up_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        asked().layers[0].summary("mode")  # type: ignore[arg-type]
    assert str(caught.value) == 'of is \'mode\'. Give "mean", "median", "p95" or "max".'


def test_a_table_shows_the_summary_that_is_asked_for() -> None:
    record = read(ids(1, 9))
    assert [row["entropy"] for row in record.table(of="p95").rows][:4] == record.layers[0].summary("p95")[
        "entropy"
    ].tolist()


def test_a_probe_says_which_queries_count_in_its_mean_also_in_a_file_and_in_running_sums(tmp_path: Path) -> None:
    """Even weights of 10 keys: 0.1 on each key that exists; the mean over all queries would be less."""
    layer = mh.MultiHeadAttention(8, 2).eval()
    torch.nn.init.zeros_(layer.q_proj.weight)
    far = probes.offset_mass(-5)
    own = probes.Probe("mine", lambda parts: parts["offset_mass", -2], {("offset_mass", -2)}, counted="offset -2")
    wanted = ("previous_mass", far, own)
    records = {}
    for keep in ("cpu", "summary"):
        with mh.observe(layer, probes=wanted, keep=keep) as records[keep], torch.no_grad():
            layer(torch.randn(2, 10, 8), lengths=(10, 4))
            layer(torch.randn(1, 10, 8))
    records["cpu"].save(tmp_path / "seen.safetensors")
    records["file"] = Record.load(tmp_path / "seen.safetensors")
    expected = {"previous_mass": (18 * 0.1 + 3 * 0.25) / 21, "offset_minus_5_mass": 0.1, "mine": (1.6 + 0.5) / 18}
    for record in records.values():
        means = record.layers[0].means()
        assert {name: means[name].tolist() for name in expected} == {
            name: pytest.approx([value] * 2) for name, value in expected.items()
        }
