"""Heads of two runs are compared query by query, and those that changed most come first."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ProbeError
from multihead.masks import Mask
from multihead.observation.record import Record
from multihead.record.analysis import similar
from multihead.record.analysis.changes import changes
from multihead.record.repeated import RepeatedTokens
from multihead.record.sample import SampleRecord
from multihead.record.texts import Text
from tests.dense_record import record_of
from tests.record.analysis.test_similar import by_hand

LAYERS, HEADS, LENGTH = 2, 4, 24


class Model(torch.nn.Module):
    """Two layers of attention on embedded tokens."""

    def __init__(self, mask: Mask, *, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.layers = torch.nn.ModuleList(mh.MultiHeadAttention(32, HEADS, num_kv_heads=2) for _ in range(layers))
        self.mask = mask

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, mask=self.mask)
        return x


MASKS: dict[str, Callable[[], Mask]] = {
    "full": masks.Full,
    "causal": masks.Causal,
    "window": lambda: masks.Causal() & masks.Window(5),
    "cells": lambda: masks.Keep(torch.rand(LENGTH, LENGTH) < 0.5, "queries keys"),
}


def two_runs(
    mask: str = "causal", *, text: int = 0, keep: mh.observation.observe.Keep = "cpu"
) -> tuple[Record, Record]:
    """A model before and after a change of one query projection, that of layer 1 head 2."""
    torch.manual_seed(0)
    model = Model(MASKS[mask]()).eval()
    ids = torch.randint(0, 50, (1, LENGTH))
    records = []
    for ids_read in (ids, (ids + text) % 50):
        with torch.no_grad(), mh.observe(model, keep=keep) as seen:
            model(ids_read)
        records.append(seen)
        with torch.no_grad():
            model.layers[1].q_proj.weight[16:24] *= -4  # type: ignore[union-attr, index]
    return records[0], records[1]


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("tile", [1, 1 << 21])
def test_every_head_has_the_divergence_of_its_whole_maps(mask: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similar, "MAX_WEIGHTS_PER_TILE", tile)
    before, after = two_runs(mask)
    found = before.changed(after)
    assert len(found) == LAYERS * HEADS
    for one in found:
        p, q = (run.layers[one.layer].weights(one.head) for run in (before, after))
        sees = p.sum(-1) > 0
        assert one.divergence == pytest.approx(by_hand(p[sees], q[sees]), abs=1e-6)
        assert one.queries == LENGTH
    assert (found[0].layer, found[0].head) == (1, 2)
    assert [one.divergence for one in found] == sorted((one.divergence for one in found), reverse=True)
    assert all(one.divergence == 0 for one in found if (one.layer, one.head) != (1, 2))


def test_a_changed_head_has_its_statistics_and_kinds_of_both_runs() -> None:
    before, after = two_runs()
    for record, share in ((before, 0.9), (after, 0.1)):
        shares = {"repeated_induction": torch.full((4, HEADS), share, dtype=torch.float64)}
        chance = {"repeated_induction": torch.full((HEADS,), 0.01, dtype=torch.float64)}
        record.layers[1].repeated = RepeatedTokens(64, 3, True, shares, chance)
    one = before.changed(after, top=1)[0]
    tables = [run.table().rows[HEADS + 2] for run in (before, after)]
    assert one.before["entropy"] == pytest.approx(tables[0]["entropy"])
    assert one.differences["entropy"] == pytest.approx(tables[1]["entropy"] - tables[0]["entropy"])
    assert one.largest_difference == "repeated_induction"
    assert (one.kinds_before[0], "repeated_induction" in one.kinds_after) == ("repeated_induction", False)
    assert str(one).startswith(f"L1 H2: {one.divergence:.3f} nats; induction on random repeats 90 % -> 10 %; ")
    assert str(one).endswith(f"{', '.join(one.kinds_before)} -> {', '.join(one.kinds_after)}")
    row = one.row()
    assert (row["layer"], row["head"], row["divergence"]) == (1, 2, one.divergence)
    assert row["repeated_induction_difference"] == pytest.approx(-0.8)


def test_of_some_queries_the_divergence_is_that_of_these() -> None:
    before, after = two_runs()
    (one,) = before.changed(after, top=1, queries=4)
    p, q = (run.layers[1].weights(2, queries=slice(5, None, 6)) for run in (before, after))
    assert one.queries == 4
    assert one.divergence == pytest.approx(by_hand(p, q), abs=1e-6)


def test_no_tile_holds_more_than_a_few_queries_of_a_long_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similar, "MAX_WEIGHTS_PER_TILE", 200)
    before, after = two_runs()
    sizes: list[int] = []
    weights = SampleRecord.weights

    def measured(*args: object, **kwargs: object) -> torch.Tensor:
        tile: torch.Tensor = weights(*args, **kwargs)  # type: ignore[arg-type]
        sizes.append(tile.numel())
        return tile

    monkeypatch.setattr(SampleRecord, "weights", measured)
    before.changed(after)
    assert max(sizes) <= 200
    assert sum(sizes) > 200 * LAYERS


def test_the_progress_ends_at_the_number_of_all_queries() -> None:
    before, after = two_runs()
    steps: list[tuple[int, int]] = []
    before.changed(after, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (LAYERS * LENGTH, LAYERS * LENGTH)


def test_a_head_without_finite_weights_comes_last() -> None:
    before, after = two_runs()
    sample = after.layers[0].sample()
    assert sample.q is not None
    sample.q.all_rows()[:, 1] = math.nan
    last = before.changed(after)[-1]
    assert (last.layer, last.head, math.isnan(last.divergence)) == (0, 1, True)


def test_layers_that_only_one_run_has_are_left_out(tmp_path: Path) -> None:
    before, after = two_runs()
    del after.layers[0]
    after.save(tmp_path / "after.safetensors")
    assert {one.layer for one in before.changed(Record.load(tmp_path / "after.safetensors"))} == {1}


def test_on_other_texts_heads_are_ranked_by_their_changes_beyond_chance() -> None:
    before, after = two_runs(text=1)
    found = before.changed(after)
    assert {(one.compares_weights, one.queries, math.isnan(one.divergence)) for one in found} == {(False, 0, True)}
    clear = [one.is_clear for one in found]
    assert clear == sorted(clear, reverse=True)
    assert {len(one.changes) for one in found} == {10}
    for one in found:  # chance is the same, so that each change counts whole
        for name, change in one.changes.items():
            difference = one.differences[name]
            if before.statistic(name).number_format != "share":
                difference /= one.chance_after[name]
            assert change.size == pytest.approx(difference, abs=1e-9)
    row = found[0].row()
    assert math.isnan(float(row["divergence"]))
    assert row["entropy_beyond_chance"] == found[0].changes["entropy"].size
    for record, token in ((before, "a"), (after, "b")):
        for layer in record.layers:
            layer.samples[0].growing_key_text.append_ids(None, start=0)
        record.set_text(Text(None, [token] * LENGTH))
    assert not before.changed(after)[0].compares_weights


def test_the_lengths_of_texts_alone_change_no_head() -> None:
    """Even heads, heads on the previous token and mixtures of both do the same at any length."""

    def heads(length: int) -> torch.Tensor:
        even = torch.full((length, length), 1 / length)
        back = torch.eye(length).roll(-1, 1)
        return torch.stack([even, back, (even + back) / 2, (3 * even + back) / 4])

    short, long = (record_of(heads(length)) for length in (24, 200))
    found = changes(short.layers, long.layers)
    assert [one.is_clear for one in found] == [False] * 4
    assert max(abs(change.size) for one in found for change in one.changes.values()) < 0.1
    other = record_of(heads(200)[[1, 0, 2, 3]])
    assert {one.head for one in changes(short.layers, other.layers) if one.is_clear} == {0, 1}


def test_several_texts_are_compared_together_and_two_texts_of_one_record() -> None:
    torch.manual_seed(0)
    model = Model(MASKS["causal"]()).eval()
    ids = torch.randint(0, 50, (2, LENGTH))
    records = []
    for factor in (1.0, -4.0):
        with torch.no_grad(), mh.observe(model) as seen:
            model.layers[1].q_proj.weight[16:24] *= factor  # type: ignore[union-attr, index]
            model(ids)
            model(ids[:1, :9])
        records.append(seen)
    before, after = records
    together = {(one.layer, one.head): one for one in before.changed(after)}
    alone = [{(one.layer, one.head): one for one in before.changed(after, sample=each)} for each in range(3)]
    assert together[1, 2].queries == 2 * LENGTH + 9
    expected = sum(each[1, 2].divergence * each[1, 2].queries for each in alone) / (2 * LENGTH + 9)
    assert together[1, 2].divergence == pytest.approx(expected, abs=1e-12)
    (first, *_) = before.changed(before, sample=0, after_sample=2)
    assert not first.compares_weights
    same = before.changed(before, sample=0, after_sample=0)
    assert {one.divergence for one in same} == {0.0}


def test_other_models_are_compared_kind_by_kind() -> None:
    before, _ = two_runs()
    with torch.no_grad(), mh.observe(other := Model(MASKS["causal"](), layers=3).eval()) as after:
        other(torch.randint(0, 50, (1, 40)))
    assert before.has_heads_of(before)
    assert not before.has_heads_of(after)
    found = before.compared_kinds(after)
    kinds = [[each.kind for each in record.kinds()] for record in (before, after)]
    for one in found:
        assert (one.number_before, one.number_after) == tuple(each.count(one.kind) for each in kinds)
        assert (one.heads_before, one.heads_after) == (LAYERS * HEADS, 3 * HEADS)
        shares = [each.share for each in before.kinds() if each.kind == one.kind]
        assert (None if one.best_before is None else one.best_before.share) == max(shares, default=None)
        assert one.row()["number_after"] == one.number_after
    assert (
        str(found[0]) == f"{found[0].kind}: {found[0].number_before} of 8 heads -> {found[0].number_after} of 12 heads"
    )


def test_records_without_a_common_layer_and_runs_without_weights_are_refused() -> None:
    before, _ = two_runs()
    with pytest.raises(ArgumentError) as caught:
        before.changed(Record())
    assert str(caught.value) == (
        "The two records have no layer with the same number, heads and length. Compare two runs of one model; "
        "heads of different models can be compared kind by kind: before.compared_kinds(after)."
    )
    before, after = two_runs(keep="statistics")
    with pytest.raises(ProbeError) as refused:
        before.changed(after)
    assert str(refused.value) == (
        'layers.0 was observed with keep="statistics", so its weights cannot be computed. '
        'Observe with keep="cpu" or keep="device".'
    )
