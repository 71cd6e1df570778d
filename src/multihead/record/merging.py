"""Join the records of several ranks, over which heads or the tokens of a sequence were split, into one record."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate

import torch

from multihead.errors import ArgumentError
from multihead.kernels.call import AttentionRequest
from multihead.masks import Mask
from multihead.probes.catalogue import statistic
from multihead.record.layer import LayerRecord, LayerTexts, RecordContents
from multihead.record.running_summary import RunningSummary, StatisticSums, concatenate_moments
from multihead.record.sample import SampleRecord
from multihead.record.segments import Segment
from multihead.record.serialization import TensorStore, mask_as_json
from multihead.record.split import IndexRange, JoinedRows, LayerPartOfRank, TensorPiece, count_tokens
from multihead.record.text_table import RowsInTensor, RowsOfText
from multihead.scores.bias import Bias, values_of, with_values
from multihead.tensors.shapes import AttentionShape


def merge_records(records: Sequence[RecordContents]) -> RecordContents:
    """Join the records of some ranks into one, over heads, tokens or both.

    Args:
        records: one record per rank, in any order.

    Returns:
        one record, which may still lack the heads or tokens of other ranks.

    Raises:
        ArgumentError: the records are not of one run, or the record of a rank is missing.
    """
    first = records[0]
    if len(records) == 1:
        return first
    names = [[(layer.number, layer.name, layer.num_samples) for layer in each.layers] for each in records]
    if any(each != names[0] for each in names):
        raise _mismatch_error("they have different layers or numbers of texts")
    layers = [_merge_layer([each.layers[index] for each in records]) for index in range(len(first.layers))]
    samples = {
        id(old): new
        for before, after in zip(first.layers, layers, strict=True)
        for old, new in zip(before.samples, after.samples, strict=True)
    }
    calls = [(samples[id(sample)], call) for sample, call in first.calls]
    # The id must not depend on the order of the records, because the viewer names its files by it.
    name = hashlib.sha256("".join(sorted(each.id for each in records)).encode()).hexdigest()[:32]
    return RecordContents(layers, first.title, name, calls, first.statistics)


def merge_all_ranks(records: Sequence[RecordContents]) -> RecordContents:
    """Join the records of all ranks, and check that no head and no token is missing.

    Raises:
        ArgumentError: the records are not of one run, or the record of a rank is missing.
    """
    found = merge_records(records)
    missing = [layer.split.describe() for layer in found.layers if layer.split is not None]
    if missing:
        raise _mismatch_error(f"together they hold {missing[0]}")
    return found


def _mismatch_error(reason: str) -> ArgumentError:
    return ArgumentError(
        f"The records of the ranks do not belong together: {reason}.",
        "Give the records of one run, one from each rank, with equal layers and options.",
    )


def _merge_layer(layers: Sequence[LayerRecord]) -> LayerRecord:
    splits = [layer.split for layer in layers]
    if any(split is None for split in splits):
        raise _mismatch_error(f"{layers[0].name} of one of them was not split over ranks")
    of_heads: dict[IndexRange, list[tuple[LayerPartOfRank, LayerRecord]]] = {}
    for split, layer in zip(splits, layers, strict=True):
        assert split is not None
        of_heads.setdefault(split.heads, []).append((split, layer))
    by_heads = []
    for heads in sorted(of_heads):
        by_rank = sorted(of_heads[heads], key=lambda each: each[0].rank)
        by_heads.append(_merge_tokens([split for split, _ in by_rank], [layer for _, layer in by_rank]))
    return by_heads[0] if len(by_heads) == 1 else _merge_heads(by_heads)


def _merge_tokens(splits: list[LayerPartOfRank], layers: list[LayerRecord]) -> LayerRecord:
    """Join one layer's records from ranks with the same heads and different tokens."""
    split, layer = splits[0], layers[0]
    if len(layers) == 1:
        return layer
    if split.ranks == 1:
        raise _mismatch_error("several of them hold the same heads")
    if [each.rank for each in splits] != list(range(split.ranks)):
        listed = ", ".join(str(each.rank) for each in splits)
        raise _mismatch_error(f"the sequence is split over {split.ranks} ranks, and these are {listed}")
    return replace(
        layer,
        texts=LayerTexts([_merge_sample_tokens(each) for each in zip(*(one.samples for one in layers), strict=True)]),
        split=_none_if_whole(split._replace(rank=0, ranks=1)),
        running_summary=_merge_summaries(layers, same_heads=True),
    )


def _none_if_whole(split: LayerPartOfRank) -> LayerPartOfRank | None:
    return None if split.is_whole else split


def _merge_heads(layers: list[LayerRecord]) -> LayerRecord:
    """Join one layer's records from ranks with the same tokens and different heads."""
    splits = [layer.split for layer in layers if layer.split is not None]
    split = splits[0]
    if len({(each.num_heads, each.rank, each.ranks) for each in splits}) > 1:
        raise _mismatch_error("they hold different tokens, or heads of different layers")
    ends = [each.heads for each in splits]
    if [first for first, _ in ends] != [0, *(stop for _, stop in ends[:-1])] or ends[-1][1] != split.num_heads:
        listed = ", ".join(f"{first} to {stop - 1}" for first, stop in ends)
        raise _mismatch_error(f"{layers[0].name} has {split.num_heads} heads, and these are {listed}")
    # Several ranks may have the same key/value heads, which are taken from the first of these ranks.
    kv = list({split.kv_heads: index for index, split in reversed(list(enumerate(splits)))}.values())[::-1]
    whole = split._replace(heads=(0, split.num_heads), kv_heads=(0, split.num_kv_heads))
    samples = [_merge_sample_heads(each, whole, kv) for each in zip(*(one.samples for one in layers), strict=True)]
    return replace(
        layers[0],
        texts=LayerTexts(samples),
        split=_none_if_whole(whole),
        running_summary=_merge_summaries(layers, same_heads=False),
        alignment_heads=(),
    )


def _merge_summaries(layers: list[LayerRecord], *, same_heads: bool) -> RunningSummary | None:
    """Join the running summaries of ranks: of the same heads on different tokens, or of different heads."""
    summaries = [each.running_summary for each in layers if each.running_summary is not None]
    if not summaries:
        return None
    first = summaries[0]
    places = [each.rows_of_statistics() for each in summaries]
    names = [name for name in first.names if all(name in each for each in places)]
    sums, bins, blocks = [StatisticSums.empty(0)], [first.bins[:0]], []
    for name in names:
        of_ranks = [(each, rows[name]) for each, rows in zip(summaries, places, strict=True)]
        parts = [each.sums.rows(rows) for each, rows in of_ranks]
        histograms = [each.bins[rows] for each, rows in of_ranks]
        if same_heads:
            sums.append(reduce(StatisticSums.merge, parts))
            bins.append(torch.stack(histograms).sum(0))
            continue
        sums.append(StatisticSums.concatenate(parts))
        bins.append(torch.cat(histograms))
        for each, rows in of_ranks:
            if each.blocks is not None:
                number, mean, squares = each.blocks
                blocks.append((number[rows], mean[rows], squares[rows]))
    joined = StatisticSums.concatenate(sums)
    heads = len(joined.mean) // len(names) if names else first.num_heads
    whole = concatenate_moments(blocks) if blocks and len(blocks) == len(names) * len(summaries) else None
    found = RunningSummary.from_sums(heads, first.num_samples, names, joined, torch.cat(bins), whole)
    found.cross_attention = first.cross_attention
    return found


def _merge_sample_tokens(ranks: Sequence[SampleRecord]) -> SampleRecord:
    """Join the records of one sample from ranks with different tokens."""
    first = ranks[0]
    splits = [each.split for each in ranks if each.split is not None]
    segment = first.segments[0]
    if len(splits) < len(ranks) or any(each.segments[0].request.shape != segment.request.shape for each in ranks):
        raise _mismatch_error(f"the sizes of {first.name} differ")
    _check_same_text(ranks)
    shape = segment.request.shape
    of_queries, of_keys = (_sort_ranges([split[index] for split in splits]) for index in (0, 1))
    for name, places, length in (("queries", of_queries, shape.query_length), ("keys", of_keys, shape.key_length)):
        ends = [0, *(stop for _, (_, stop), _ in places)]
        if [start for _, (start, _), _ in places] != ends[:-1] or ends[-1] != length:
            raise _mismatch_error(f"their {name} do not add up to a text with {length}")

    before = [0, *accumulate(each.num_queries for each in ranks)]
    pieces = [torch.arange(at, at + stop - start) + before[rank] for rank, (start, stop), at in of_queries]
    order = torch.cat([torch.arange(0), *pieces])  # of the queries of all ranks, rank after rank
    found = replace(first, split=None)
    found.logsumexp = RowsInTensor(torch.cat([each.logsumexp.all_rows() for each in ranks], 2)[:, :, order])
    if all(each.q is not None and each.k is not None for each in ranks):
        found.q = _join_rows([each.q for each in ranks], of_queries, shape.num_heads, shape.query_length, shape)
        found.k = _join_rows([each.k for each in ranks], of_keys, shape.num_kv_heads, shape.key_length, shape)
    joined = first.join_queries([each.statistics for each in ranks])
    found.calls = [((0, shape.query_length), (segment.key_start, segment.key_stop))]
    found.set_statistics(
        {
            name: value[:, order] if statistic(name, found.own).axes == "queries" else value
            for name, value in joined.items()
        }
    )
    return found


def _sort_ranges(of_ranks: list[tuple[IndexRange, ...]]) -> list[tuple[int, IndexRange, int]]:
    """Return all token ranges of all ranks in order: rank, range, and index of its first token in the rank's tokens."""
    found = [
        (rank, each, count_tokens(ranges[:index]))
        for rank, ranges in enumerate(of_ranks)
        for index, each in enumerate(ranges)
        if each[0] < each[1]
    ]
    return sorted(found, key=lambda each: each[1])


def _join_rows(
    rows: Sequence[RowsOfText | None],
    places: list[tuple[int, IndexRange, int]],
    heads: int,
    length: int,
    shape: AttentionShape,
) -> JoinedRows:
    pieces = []
    for rank, (start, stop), at in places:
        source = rows[rank]
        assert source is not None
        pieces.append(TensorPiece(source, (at, at + stop - start), start, (0, heads)))
    return JoinedRows(pieces, heads=heads, length=length, width=shape.head_dim, dtype=shape.dtype)


def _check_same_text(ranks: Sequence[SampleRecord]) -> None:
    known = [each.growing_key_text.ids for each in ranks if each.growing_key_text.ids is not None]
    if any(not torch.equal(each, known[0]) for each in known):
        raise _mismatch_error("they read different texts")


def _merge_sample_heads(ranks: Sequence[SampleRecord], whole: LayerPartOfRank, kv: list[int]) -> SampleRecord:
    """Join the records of one sample from ranks with different heads; key/value heads are taken from the ranks `kv`."""
    first = ranks[0]
    sizes = {(each.num_queries, each.num_keys, len(each.segments), each.split) for each in ranks}
    if len(sizes) > 1:
        raise _mismatch_error(f"the sizes of {first.name} differ")
    _check_same_text(ranks)
    found = replace(first)
    found.segments = [_merge_segment(each, whole) for each in zip(*(one.segments for one in ranks), strict=True)]
    found.logsumexp = RowsInTensor(torch.cat([each.logsumexp.all_rows() for each in ranks], 1))
    if all(each.q is not None and each.k is not None for each in ranks):
        shape = found.segments[0].request.shape
        found.q = _stack_heads([each.q for each in ranks], shape.num_heads, shape)
        found.k = _stack_heads([ranks[index].k for index in kv], shape.num_kv_heads, shape)
    of_ranks = [each.statistics for each in ranks]
    common = set(of_ranks[0]).intersection(*of_ranks)
    found.set_statistics({name: torch.cat([each[name] for each in of_ranks]) for name in of_ranks[0] if name in common})
    return found


def _stack_heads(rows: Sequence[RowsOfText | None], heads: int, shape: AttentionShape) -> JoinedRows:
    pieces, first, length = [], 0, 0
    for source in rows:
        assert source is not None
        count, length = heads // len(rows), source.length
        pieces.append(TensorPiece(source, (0, length), 0, (first, first + count)))
        first += count
    return JoinedRows(pieces, heads=heads, length=length, width=shape.head_dim, dtype=shape.dtype)


def _merge_segment(ranks: Sequence[Segment], whole: LayerPartOfRank) -> Segment:
    """Join the records of one segment from ranks with different heads."""
    requests = [each.request for each in ranks]
    first = requests[0]
    if not all(_are_equal_masks(each.mask, first.mask) for each in requests):
        raise ArgumentError(
            f"The mask {first.mask!r} differs between heads, which are split over ranks.",
            "Observe with a mask that all heads share, or read each rank's record alone.",
        )
    return replace(
        ranks[0],
        request=replace(
            first,
            shape=first.shape._replace(num_heads=whole.num_heads, num_kv_heads=whole.num_kv_heads),
            bias=_merge_biases(requests),
            sinks=None if first.sinks is None else torch.cat([x.sinks for x in requests if x.sinks is not None]),
        ),
    )


def _are_equal_masks(mask: Mask, other: Mask) -> bool:
    """Whether two masks have the same class and fields; tensors are compared by value."""
    if mask == other:
        return True
    tensors, others = TensorStore(), TensorStore()
    fields = mask_as_json(mask, tensors, "mask") == mask_as_json(other, others, "mask")
    return fields and all(torch.equal(each, others.by_name[name]) for name, each in tensors.by_name.items())


def _merge_biases(requests: list[AttentionRequest]) -> Bias | None:
    biases = [each.bias for each in requests if each.bias is not None]
    if len(biases) < len(requests):
        return None
    values = [values_of(each) for each in biases]
    shared = all(each.shape[1] == 1 and torch.equal(each, values[0]) for each in values)
    return biases[0] if shared else with_values(biases[0], torch.cat(values, 1))
