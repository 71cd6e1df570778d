"""Entry points: what `observe` records of a batch is what it records of each text alone, for each `keep`."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead import probes
from multihead.record.sample import SampleRecord
from tests import oracle
from tests.fuzz.draw import Draw, Mismatch, check_error
from tests.fuzz.layers import Texts, called

PROBES: tuple[Any, ...] = (
    "entropy",
    "largest_weight",
    "mean_distance",
    "self_mass",
    "previous_mass",
    "first_mass",
    "received",
    probes.first_keys_mass(2),
    probes.offset_mass(2),
)
SLACK = 4  # the native kernel rounds in base 2


def observed(draw: Draw) -> None:
    """Records of padded, packed and cached batches, kept in each way, saved and loaded."""
    texts = Texts(draw)
    way = draw.pick("way", "right", "right", "left", "packed", "documents", "stepped")
    keep = draw.feature("keep", "cpu", "device", "statistics", "summary", share=0.6)
    options: dict[str, Any] = {"keep": keep}
    if draw.has("probes", 0.7):
        options["probes"] = PROBES
    draw.notes |= {"way": way, "keep": keep}
    if not any(texts.lengths) or "own position bias" in draw.used or "table" in draw.used:
        return  # nothing is recorded; a bias of absolute positions is judged by `texts`
    with torch.no_grad():
        plain = called(texts, way)
        if plain is None:
            return
        with mh.observe(texts.layer, **options) as seen:
            found = called(texts, way)
        assert found is not None
        for one, other in zip(plain, found, strict=True):
            if not torch.equal(one, other):
                raise Mismatch("an observed output differs from the one that is not observed")
        if keep == "summary":
            _compare_summary(texts, way, options, seen)
            return
        if draw.has("saved", 0.15):
            seen = _loaded(seen)
        _compare_samples(texts, seen, options)


def _compare_summary(texts: Texts, way: str, options: dict[str, Any], seen: mh.Record) -> None:
    with mh.observe(texts.layer, **options | {"keep": "statistics"}) as kept:
        called(texts, way)
    means, expected = seen.layers[0].means(), kept.layers[0].means()
    if means.keys() != expected.keys():
        raise Mismatch(f"a summary has other statistics: {sorted(means.keys() ^ expected.keys())}")
    for name, value in means.items():
        allowed = 1e-5 * max(1.0, float(torch.nan_to_num(expected[name]).abs().max()))
        check_error(f"the mean of {name} in a summary", oracle.difference(value, expected[name]), allowed)


def _loaded(seen: mh.Record) -> mh.Record:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.safetensors"
        seen.save(path)
        return mh.Record.load(path, mapped=False)


def _compare_samples(texts: Texts, seen: mh.Record, options: dict[str, Any]) -> None:
    """Compare each sample with the record of the text alone, in float64."""
    layer = seen.layers[0]
    double = copy.deepcopy(texts.layer).double()
    there = [index for index, length in enumerate(texts.lengths) if length]
    if layer.num_samples not in (len(texts.lengths), len(there)):
        raise Mismatch(f"a record has another number of texts: {layer.num_samples} instead of {len(texts.lengths)}")
    places = there if layer.num_samples == len(there) else range(len(texts.lengths))
    for sample, index in enumerate(places):
        if not texts.lengths[index]:
            continue
        with mh.observe(double, **options) as of_exact:
            texts.alone(index, double, torch.float64)
        with mh.observe(texts.layer, **options) as of_plain:
            texts.alone(index)
        found, exact, plain = layer.sample(sample), of_exact.layers[0].sample(), of_plain.layers[0].sample()
        # Queries at the end that see no key, and keys at the end that nobody sees, may be left out.
        added = int(texts.layer.bias_k is not None)
        most = texts.lengths[index], texts.lengths[index] + added
        for value, right, limit in zip(_sizes(found), _sizes(exact), most, strict=True):
            if not right <= value <= limit and right != value:
                sizes = [_sizes(found), _sizes(exact)]
                raise Mismatch(f"a record of a text has other sizes than that of the text alone: {sizes}")
        _compare_sample(found, exact, plain)


def _sizes(sample: SampleRecord) -> tuple[int, int]:
    return sample.num_queries, sample.num_keys


def _compare_sample(found: SampleRecord, exact: SampleRecord, plain: SampleRecord) -> None:
    pairs: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, value in found.statistics.items():
        if name not in ("largest_key", "pooled_map"):
            pairs[name] = (value, exact.statistics[name], plain.statistics[name])
    if found.keeps_weights and exact.keeps_weights:
        pairs["weights"] = (found.weights(), exact.weights(), plain.weights())
    for name, (whole, right, near) in pairs.items():
        value = whole[tuple(slice(0, n) for n in right.shape)]
        if value.shape != right.shape:
            raise Mismatch(f"recorded {name} has another shape: {tuple(value.shape)} instead of {tuple(right.shape)}")
        allowed = SLACK * (oracle.budget(right.double(), near) + 64 * torch.finfo(near.dtype).eps)
        check_error(
            f"recorded {name} of a text next to that of the text alone",
            oracle.difference(value, right.double()),
            allowed,
        )
