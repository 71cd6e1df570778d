"""Chance levels of statistics, and standard errors of differences from them.

The chance level of a probe is its value for a head that spreads its attention evenly over the visible keys, measured on
the same call with all scores set to 0: under a causal mask the second query puts 50 % on the previous token by chance,
and the hundredth query 1 %. So user-defined probes have chance levels too. Biases and learned sinks are left out.

A kind that is defined by a share of attention is assigned to a head only if the share exceeds its chance level by 35
percentage points and by three standard errors. Earlier versions computed chance levels by a closed formula per
statistic, which agreed with the measured levels to 2e-14. The formulas took no time; at 100,000 tokens measuring a
chance level takes seconds. Statistical significance alone is not enough: a random model has small but systematic
preferences, such as 6.1 % on the previous token where chance is 4.8 %, which any number of queries confirms. The
threshold is a difference in percentage points and not a multiple of chance, so that one rule holds for short and long
texts. Tiny random models of eight families, with weights of twenty times the usual size, gave one false finding in 456
heads.

The standard error of a mean over one text is computed from the means of eight blocks of consecutive queries. The
standard error is that of value - chance, so that differences between queries that only the mask causes do not increase
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from multihead.errors import MaskError
from multihead.functional import measure_request
from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import first_key_of_samples, visible_cells
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks import Mask
from multihead.masks.documents import Chunks
from multihead.probes.context import ProbeContext
from multihead.probes.probe import Probe, Statistic
from multihead.probes.statistics import possible_probes
from multihead.record.sample import SampleRecord
from multihead.scores.bias import values_of, with_values
from multihead.tensors.precision import widest_float
from multihead.tensors.shapes import consecutive_slices

BLOCKS_PER_TEXT = 8
"""Number of blocks of consecutive queries into which a text is divided to estimate a standard error."""

MIN_STANDARD_ERRORS = 3
"""Number of standard errors that a difference from chance must exceed."""

MIN_OBSERVATIONS = 4
"""Smallest number of texts or blocks from which a standard error is estimated; with fewer it is infinite."""

MIN_FLOAT32_KEYS = 4096
"""Number of keys from which chance levels are computed in float32 by the native kernel, instead of float64."""

QUERIES_PER_BLOCK = 4096
"""Number of queries per block, after which `progress` is called."""

Progress: TypeAlias = Callable[[int, int], None]
"""Function (queries done, all queries), called to show progress."""

ChanceCache: TypeAlias = dict[object, Tensor]
"""Cache of chance levels: (probe, mask, positions, ids) -> (heads or 1, queries)."""

Moments: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Moments of sets of numbers: count, mean, and sum of the squared deviations from the mean; (rows,) each."""


@dataclass(frozen=True, eq=False)
class ChanceComparison:
    """A statistic of the heads of a layer compared with its chance level.

    Attributes:
        mean: (heads,) float64, mean of the statistic over the queries that count.
        chance: (heads,) float64, chance level (even weights over the visible keys), mean over the queries that count.
        standard_error: (heads,) float64, standard error of mean - chance; inf if there are too few queries to estimate
            it.
        num_observations: (heads,) float64, number of queries that count, or of texts of repeated random tokens.
    """

    mean: Tensor
    chance: Tensor
    standard_error: Tensor
    num_observations: Tensor


def chance_of_probes(
    sample: SampleRecord,
    probes: Iterable[Statistic],
    *,
    special: Sequence[bool] | None = None,
    known: ChanceCache | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Compute the chance level per query of each probe that has a chance level.

    Args:
        sample: one text in one layer.
        probes: statistics; left out are statistics without a function or a chance level, and probes that lack an input,
            such as token ids.
        special: one flag per key, True for special tokens.
        known: cache of chance levels of the same record, to which the results are added.
        progress: called after each block of queries.

    Returns:
        name of a statistic -> chance levels, (heads or 1, queries) float64, 0 for queries without visible keys; {} if
        the mask is unknown.
    """
    known = {} if known is None else known
    marks = None if special is None else torch.tensor(list(special), dtype=torch.bool)
    wanted = [each for each in probes if isinstance(each, Probe) and each.chance and each.axes == "queries"]
    try:
        places = _visibility_key_of_sample(sample)
    except MaskError:  # the mask's class is not defined in this process
        return {}
    inputs = {"ids": content_key(sample.text.ids), "special_keys": content_key(marks)}
    if any({"places", "sets"} & each.needs for each in wanted):
        inputs["places"] = inputs["sets"] = _key_of_places(sample)
    keys = {each: (each, places, *(inputs.get(need) for need in sorted(each.needs))) for each in wanted}
    missing = [each for each in wanted if keys[each] not in known]
    if missing:
        found = _measure_chance_levels_of_sample(sample, missing, marks, progress)
        known |= {keys[each]: found[each.name] for each in missing if each.name in found}
    return {each.name: known[keys[each]] for each in wanted if keys[each] in known}


def compare_with_chance(
    values: Sequence[Tensor], expected: Sequence[Tensor], counted: Sequence[Tensor]
) -> ChanceComparison:
    """Compare a statistic with its chance level over one or more texts.

    With at least `MIN_OBSERVATIONS` texts, the standard error is computed over texts. Otherwise each text is divided
    into `BLOCKS_PER_TEXT` blocks of consecutive queries, and the standard error is computed over blocks, because
    neighbouring queries are similar, and so are not independent observations.

    Args:
        values: the statistic per query, (heads, queries), one tensor per text.
        expected: the chance level per query, (heads or 1, queries), one tensor per text.
        counted: which queries count, (heads, queries) bool, one tensor per text.
    """
    blocks = 1 if len(values) >= MIN_OBSERVATIONS else BLOCKS_PER_TEXT
    totals, levels, numbers, units = [], [], [], []
    for value, even, counts in zip(values, expected, counted, strict=True):
        level = even.double().expand_as(value).masked_fill(~counts, 0)
        known = value.double().masked_fill(~counts, 0)
        totals.append(known.sum(-1))
        levels.append(level.sum(-1))
        numbers.append(counts.sum(-1))
        units.append(means_of_blocks(known - level, counts, blocks))
    count = torch.stack(numbers).sum(0)
    number = count.clamp(min=1)
    mean, level = torch.stack(totals).sum(0) / number, torch.stack(levels).sum(0) / number
    error = _masked_standard_error(*(torch.cat(each, 1) for each in zip(*units, strict=True)))
    return ChanceComparison(mean, level, error, count.double())


def means_of_blocks(values: Tensor, counted: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the means of blocks of consecutive queries, each head's counted ones divided as evenly as possible.

    Args:
        values: (heads, queries) float64, of any value where they do not count.
        counted: (heads, queries) bool.
        blocks: number of blocks.

    Returns:
        the means, (heads, blocks), and which blocks have a query, (heads, blocks) bool.
    """
    number = counted.sum(-1, keepdim=True)
    place = ((counted.cumsum(-1) - 1).clamp(min=0) * number.clamp(max=blocks)) // number.clamp(min=1)
    sums = values.new_zeros(len(values), blocks).scatter_add_(1, place, values.masked_fill(~counted, 0))
    sizes = values.new_zeros(len(values), blocks).scatter_add_(1, place, counted.double())
    return sums / sizes.clamp(min=1), sizes > 0


def moments_of_units(units: Tensor, full: Tensor) -> Moments:
    """Return the moments of `units`, (rows, units), where `full`, (rows, units) bool, is True."""
    count = full.sum(-1)
    mean = units.masked_fill(~full, 0).sum(-1) / count.clamp(min=1)
    return count, mean, torch.where(full, units - mean[:, None], 0.0).square().sum(-1)


def standard_error(units: Tensor) -> Tensor:
    """Return the standard error of the mean over the first axis: (numbers, heads) -> (heads,).

    >>> standard_error(torch.tensor([[1.0], [2.0], [3.0], [2.0]])), standard_error(torch.zeros(3, 1))
    (tensor([0.4082]), tensor([inf]))
    """
    return _masked_standard_error(units.mT, torch.ones_like(units.mT, dtype=torch.bool))


def error_of_mean(count: Tensor, squares: Tensor) -> Tensor:
    """Return the standard error of means, given counts and sums of squared deviations; (heads,) each."""
    error = (squares / ((count - 1) * count).clamp(min=1)).sqrt()
    return error.masked_fill(count < MIN_OBSERVATIONS, torch.inf)


def exceeds_chance(excess: Tensor, error: Tensor, least: float) -> Tensor:
    """Return whether a difference from chance is at least `least`, and exceeds `MIN_STANDARD_ERRORS` times its error.

    >>> exceeds_chance(torch.tensor([0.5, 0.5, 0.1]), torch.tensor([0.1, 0.2, 0.01]), 0.35)
    tensor([ True, False, False])
    """
    return (excess >= least) & (excess > MIN_STANDARD_ERRORS * error)


def _masked_standard_error(units: Tensor, full: Tensor) -> Tensor:
    """Return the standard error of the mean of `units`, (heads, units), where `full` is True: (heads,)."""
    count, _, squares = moments_of_units(units, full)
    return error_of_mean(count, squares)


def _measure_chance_levels_of_sample(
    sample: SampleRecord, probes: Sequence[Probe], special: Tensor | None, progress: Progress | None
) -> dict[str, Tensor]:
    """Measure probes with all scores 0: name -> (heads or 1, queries) float64; skip probes that lack an input."""
    windows = any(segment.is_window for segment in sample.segments)  # each window is measured as a separate call
    requests = [
        with_zero_scores(segment.request, 0 if windows else segment.key_start, exact=sample.num_keys < MIN_FLOAT32_KEYS)
        for segment in sample.segments
    ]
    first = [
        int(each) for request in requests for each in first_key_of_samples(request, bounds_of(request)) if each >= 0
    ]
    ids, parts, done = sample.text.ids, [], 0
    for segment, request in zip(sample.segments, requests, strict=True):
        keys = slice(segment.key_start if windows else 0, segment.key_stop)
        device = request.shape.device
        context = ProbeContext(
            special_keys=None if special is None else special[None, keys].to(device),
            ids=None if ids is None else ids[None, keys].to(device),
            first_key=None if windows else min(first, default=0),
        )
        if any({"places", "sets"} & probe.needs for probe in probes) and not sample.cross_attention:
            context = sample.growing_key_text.add_places(context, keys.start, keys.stop)
        chosen = possible_probes(probes, request, context, has_values=False)
        for part in _split_queries(request):
            found = measure_request(part, chosen, context)
            parts.append({name: value[0].cpu().double() for name, value in found.items()})
            done += part.shape.query_length
            if progress is not None:
                progress(done, sample.num_queries)
    heads = max(request.shape.num_heads for request in requests)
    return {name: torch.cat([each[name].expand(heads, -1) for each in parts], -1) for name in parts[0]}


def with_zero_scores(request: AttentionRequest, before: int = 0, *, exact: bool) -> AttentionRequest:
    """Return a call with the same visible keys and all scores 0, with one head unless heads see different keys.

    Args:
        request: the call with the mask.
        before: number of hidden keys to insert before the keys of the call.
        exact: use float64 if the device supports it, else float32.
    """
    mask, shape = request.mask, request.shape
    if before:  # dropped keys are inserted as hidden keys, so that positions are right
        mask = mask.after_dropping_keys(-before) & Chunks((before, shape.key_length))
    dtype = widest_float(shape.device) if exact else torch.float32
    bias = None
    if request.bias is not None and bool((hides := values_of(request.bias) == -torch.inf).any()):
        hidden = torch.zeros(hides.shape, dtype=dtype, device=hides.device).masked_fill_(hides, -torch.inf)
        bias = with_values(request.bias, pad(hidden, (before if hides.shape[-1] > 1 else 0, 0)))
    shape = shape._replace(key_length=before + shape.key_length, num_kv_heads=1, head_dim=1, value_dim=1, dtype=dtype)
    start = before + request.query_start
    request = replace(request, mask=mask, shape=shape, query_start=start, bias=bias)
    shape = shape._replace(num_heads=visible_cells(request, slice(0, 1), slice(0, 1)).shape[1])
    q = torch.zeros(shape.batch, shape.num_heads, shape.query_length, 1, dtype=dtype, device=shape.device)
    k = torch.zeros(shape.batch, 1, shape.key_length, 1, dtype=dtype, device=shape.device)
    return AttentionRequest(q, k, k, shape, mask, 1.0, start, bias)


def _split_queries(request: AttentionRequest) -> Iterator[AttentionRequest]:
    """Yield a call in blocks of `QUERIES_PER_BLOCK` queries; in one block if it has a bias or its mask has tensors."""
    queries = request.shape.query_length
    if queries <= QUERIES_PER_BLOCK or request.bias is not None or request.mask.holds_tensors:
        yield request
        return
    for rows in consecutive_slices(queries, QUERIES_PER_BLOCK):
        q = request.q[:, :, rows]
        shape = request.shape._replace(query_length=q.shape[2])
        yield replace(request, q=q, shape=shape, query_start=request.query_start + rows.start)


def _key_of_places(sample: SampleRecord) -> object:
    """Return a hashable key that is equal for samples whose keys have equal places in pictures."""
    pictures = sample.growing_key_text.pictures
    if pictures is None:
        return None
    return sample.growing_key_text.ids is None, *map(content_key, pictures.boxes.columns)


def _visibility_key_of_sample(sample: SampleRecord) -> tuple[object, ...]:
    """Return a hashable key that is equal for samples whose queries have equal positions and visible keys."""
    intervals = sample.intervals()
    if intervals is not None:
        windows = tuple(each.key_start for each in sample.segments if each.is_window)
        return sample.num_keys, windows, *map(content_key, (*intervals, sample.positions))
    return tuple(
        (
            *(each.key_start, each.query_start, each.num_queries, each.key_stop, each.is_window),
            *visibility_key(each.request),
        )
        for each in sample.segments
    )


def visibility_key(request: AttentionRequest) -> tuple[object, object]:
    """Return a hashable key of the hidden keys of a call, to compare calls of equal shape and `query_start`."""
    bias = request.bias
    hidden = None if bias is None else (type(bias), content_key(values_of(bias) == -torch.inf))
    return content_key(request.mask), hidden


def content_key(value: object) -> object:
    """Return a hashable key of a value; tensors, and masks with tensors, are compared by content."""
    if isinstance(value, Tensor):
        numbers = value.cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
        return tuple(value.shape), value.dtype, hashlib.blake2b(numbers.data).digest()
    if isinstance(value, Mask):
        return type(value), *map(content_key, value.values().values())
    return tuple(map(content_key, value)) if isinstance(value, (tuple, list)) else value
