"""The weights of a record are exact at any size of the scores: live, loaded, of a decoding, whole and in tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.layer.cache import KeyValueCache
from multihead.observation.record import Record
from multihead.record.sample import SampleRecord
from multihead.record.segments import Segment
from tests.exactness import SIZES, Case, check_exact, drawn
from tests.observation.recorded import Asking

LENGTH = 70


def live(size: float) -> tuple[Record, Case]:
    """Observe a causal call of scores of a size."""
    q, k = drawn(size, keys=LENGTH)
    with mh.observe(model := Asking()) as seen:
        model(q, k, k, mask=masks.Causal(), query_start=0)
    return seen, Case(q, k, shown=torch.ones(LENGTH, LENGTH).tril().bool())


def in_tiles(sample: SampleRecord) -> Tensor:
    columns = [sample.weights(keys=slice(first, first + 19)) for first in range(0, LENGTH, 19)]
    return torch.cat(columns, 2)


def in_blocks(sample: SampleRecord) -> Tensor:
    columns = [sample.blocks(keys=slice(first, first + 32), block=1).sums for first in range(0, LENGTH, 32)]
    return torch.cat(columns, 2)


def drawn_cell_by_cell(sample: SampleRecord) -> Tensor:
    return sample.map(bins=LENGTH).nan_to_num(0.0)


WAYS: dict[str, Callable[[SampleRecord], Tensor]] = {
    "whole rows": SampleRecord.weights,
    "tiles": in_tiles,
    "blocks of one cell": in_blocks,
    "a map of one cell a bin": drawn_cell_by_cell,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_of_a_record_are_exact(way: str, size: float, tmp_path: Path) -> None:
    record, case = live(size)
    check_exact(WAYS[way](record.layers[0].sample()), case)
    record.save(tmp_path / "run.safetensors")
    loaded = Record.load(tmp_path / "run.safetensors")
    check_exact(WAYS[way](loaded.layers[0].sample()), case)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, -1])
def test_the_weight_at_an_offset_is_visibly_that_of_the_softmax(offset: int, size: float) -> None:
    record, case = live(size)
    exact = case.softmax(torch.float64)[0].diagonal(offset, 1, 2)
    found = record.layers[0].sample().at_offset(offset)[:, -offset:]
    assert (found - exact).abs().max() <= 5e-4
    assert found.dtype == torch.float32


@pytest.mark.parametrize("size", SIZES)
def test_blocks_and_what_keys_receive_are_visibly_those_of_the_softmax(size: float) -> None:
    record, case = live(size)
    exact = case.softmax(torch.float64)[0]
    sample = record.layers[0].sample()
    blocks = sample.blocks(block=10).sums
    assert (blocks - exact.unflatten(2, (7, 10)).unflatten(1, (7, 10)).sum((2, 4))).abs().max() <= 5e-3
    received = mh.statistics(
        case.q,
        case.k,
        mask=masks.Causal(),
        query_start=0,
        probes=("received", "pooled_map"),
        logsumexp=sample.logsumexp.all_rows(),
    )["received"]
    assert (received[0] - exact.sum(1)).abs().max() <= 5e-3
    assert received.sum(-1).sub(LENGTH).abs().max() <= LENGTH * 5e-4
    assert received.dtype == torch.float32


def test_tiles_of_a_text_that_grows_are_exact() -> None:
    layer, cache = mh.MultiHeadAttention(64, 4), KeyValueCache()
    with torch.no_grad():
        layer.q_proj.weight.mul_(400)
    tiles = []
    with torch.no_grad(), mh.observe(layer) as seen:
        for chunk in (9, 1, 6, 1):
            layer(torch.randn(1, chunk, 64), cache=cache, mask=masks.Causal())
            sample = seen.layers[0].sample()
            tiles.append((sample.weights(), sample.weights(keys=slice(0, 5))))
    for whole, tile in tiles:
        assert (whole.sum(-1) - 1).abs().max() <= 1e-6
        torch.testing.assert_close(tile, whole[..., :5], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_a_record_keeps_the_sinks_that_its_weights_are_divided_by(size: float, tmp_path: Path) -> None:
    q, k = drawn(size)
    sinks = torch.tensor([0.0, size, 2 * size, -size], requires_grad=True)
    with mh.observe(model := Asking()) as seen:
        model(q, k, k, sinks=sinks)
    case = Case(q, k, sinks=sinks.detach().clone())
    with torch.no_grad():
        sinks += 1  # a step of training changes no record
    seen.save(tmp_path / "run.safetensors")
    for record in (seen, Record.load(tmp_path / "run.safetensors")):
        sample = record.layers[0].sample()
        check_exact(sample.weights(), case)
        check_exact(torch.cat([sample.weights(keys=slice(0, 40)), sample.weights(keys=slice(40, 90))], 2), case)


def test_a_record_without_its_sinks_weighs_by_its_logsumexp() -> None:
    q, k = drawn(1.0)
    sinks = torch.tensor([0.0, 1.0, 2.0, 5.0])
    with mh.observe(model := Asking()) as seen:
        model(q, k, k, sinks=sinks)
    sample = seen.layers[0].sample()
    sample.segments = [
        Segment(replace(segment.request, sinks=None)) for segment in sample.segments
    ]  # as older files have it
    exact = Case(q, k, sinks=sinks).softmax(torch.float64)[0]
    for found in (sample.weights(), in_blocks(sample)):
        assert (found - exact[..., : found.shape[2]]).abs().max() <= 2e-6


def test_layers_that_share_a_mask_keep_their_own_sinks() -> None:
    layers = torch.nn.ModuleList(mh.MultiHeadAttention(16, 2, sinks=True) for _ in range(2))
    x, mask = torch.randn(2, 6, 16), masks.Causal() & masks.Lengths((6, 4))
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.sinks.fill_(3.0 * number)
    with mh.observe(layers) as seen:
        for layer in layers:
            layer(x, mask=mask)
    for layer, heard in zip(layers, seen.layers, strict=True):
        for sample, length in enumerate((6, 4)):
            q = mh.split_heads(layer.q_proj(x[sample, None]), 2).double()  # (1, heads, queries, head_dim)
            k = mh.split_heads(layer.k_proj(x[sample, None, :length]), 2).double()
            scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(6, length).triu(1) > 0, -torch.inf)
            sink = layer.sinks.detach().double()[None, :, None, None].expand(1, 2, 6, 1)
            expected = torch.cat([scores, sink], -1).softmax(-1)[0, ..., :-1]
            torch.testing.assert_close(heard.sample(sample).weights().double(), expected, atol=1e-6, rtol=0)
