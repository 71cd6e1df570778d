"""Encode the attention maps of heads for a page: weights as codes on a square-root scale, deflated, in base64."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.probes.catalogue import LARGEST_KEY, LARGEST_WEIGHT
from multihead.record.blocks import query_blocks
from multihead.viewer.tiles import visible_weights

if TYPE_CHECKING:
    from multihead.record.sample import SampleRecord

MASKED_CODE = 0
"""Code of a masked cell; the code of the weight 0 is 1."""


@dataclass
class LargestRoundingError:
    """The largest difference between a weight and its decoded value, measured while encoding."""

    largest: float = 0.0

    def update(self, weights: Tensor, decoded: Tensor) -> None:
        """Update the error with one tile of weights; NaN (masked cells) and infinities do not count."""
        difference = (weights - decoded).abs()
        known = difference[difference.isfinite()]
        self.largest = max(self.largest, float(known.max()) if known.numel() else 0.0)


def encode_weights(weights: Tensor, *, bits: int, rounding: LargestRoundingError) -> Tensor:
    """Encode weights on a square-root scale, which keeps the precision of small ones.

    A share w becomes 1 + round(sqrt(w) * (2^bits - 2)); NaN becomes `MASKED_CODE`.

    Returns:
        int32, the shape of `weights`.

    >>> encode_weights(torch.tensor([0.0, 0.25, 1.0, float("nan")]), bits=12, rounding=LargestRoundingError()).tolist()
    [1, 2048, 4095, 0]
    """
    steps = (1 << bits) - 2
    wide = weights.double()
    code = wide.clamp(0, 1).sqrt().mul(steps).round()
    rounding.update(wide, (code / steps) ** 2)
    return torch.where(wide.isnan(), float(MASKED_CODE), code + 1).int()


def encode_all_weights(sample: SampleRecord, head: int, *, bits: int, rounding: LargestRoundingError) -> str:
    """Encode every weight of a head as base64: planes of bytes, high bytes first, deflated.

    Planes compress better than pairs of bytes: the high bytes of a map repeat, the low ones are noise.

    Args:
        sample: one text in one layer.
        head: index of the head.
        bits: bits per code: 16, or 12 (a plane of bytes, then a plane of half bytes).
        rounding: updated with the rounding errors.
    """
    codes = torch.empty(sample.num_queries, sample.num_keys, dtype=torch.int32)
    for block in query_blocks(sample.num_queries, sample.num_keys):
        codes[block] = encode_weights(visible_weights(sample, head, queries=block), bits=bits, rounding=rounding)
    return pack_codes(codes, bits, strategy=zlib.Z_RLE)


def pack_codes(codes: Tensor, bits: int, *, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> str:
    """Encode codes of 16 or 12 bits as base64: two planes of bytes, or one and a plane of half bytes, deflated."""
    flat = codes.flatten()
    if bits == 16:
        return compress_planes(flat >> 8, flat & 255, strategy=strategy)
    low = torch.nn.functional.pad(flat & 15, (0, flat.numel() % 2))
    return compress_planes(flat >> 4, (low[0::2] << 4) | low[1::2], strategy=strategy)


def encode_largest_weights(
    sample: SampleRecord, *, number: int, rounding: LargestRoundingError, head: int | None = None, bits: int = 16
) -> list[str]:
    """Encode each query's largest weights as base64: planes of codes, then planes of differences between keys.

    The keys of a query ascend; a query that sees fewer keys has `MASKED_CODE` in the unused entries.

    Args:
        sample: one text in one layer.
        number: weights stored per query.
        rounding: updated with the rounding errors.
        head: index of one head, or None for all heads.
        bits: bits per code: 16 (two planes), or 8 (one plane).

    Returns:
        One string per head.
    """
    number = min(number, sample.num_keys)
    heads = sample.num_heads if head is None else 1
    codes, steps = [], []
    for block in query_blocks(sample.num_queries, heads * sample.num_keys):
        tile = visible_weights(sample, head, queries=block).nan_to_num_(nan=-1.0).view(heads, -1, sample.num_keys)
        found, key = tile.topk(number, dim=-1, sorted=False)
        key = torch.where(found < 0, sample.num_keys, key)
        key, order = key.sort(dim=-1)
        found = found.gather(-1, order)
        codes.append(encode_weights(torch.where(found < 0, torch.nan, found), bits=bits, rounding=rounding))
        steps.append(key.diff(dim=-1, prepend=torch.zeros_like(key[..., :1])).int())
    code, step = torch.cat(codes, 1), torch.cat(steps, 1)  # (heads, queries, number)
    return _compress_codes_and_steps(code, step, sample.num_keys, bits)


def encode_recorded_largest_weights(sample: SampleRecord, *, rounding: LargestRoundingError) -> list[str]:
    """Encode each query's largest weight from the recorded statistics, as `encode_largest_weights(number=1)` does.

    Returns:
        One string per head.

    Raises:
        ProbeError: the largest weights and their keys were not recorded.
    """
    found = sample.statistics
    names = LARGEST_WEIGHT.name, LARGEST_KEY.name
    if not found.keys() >= {*names}:
        raise ProbeError("The record has no largest weights.", 'Observe with the probes "{}" and "{}".'.format(*names))
    weight, key = (found[name] for name in names)  # (heads, queries)
    blind = key < 0
    code = encode_weights(weight.double().masked_fill(blind, torch.nan), bits=16, rounding=rounding)
    step = key.masked_fill(blind, sample.num_keys).int()
    return _compress_codes_and_steps(code, step, sample.num_keys, 16)


def _compress_codes_and_steps(codes: Tensor, steps: Tensor, keys: int, bits: int) -> list[str]:
    """Compress the largest weights of each query, as codes, and the steps between their keys; one string per head.

    Args:
        codes: (heads, queries, stored weights).
        steps: (heads, queries, stored weights), differences between the keys of consecutive stored weights.
        keys: number of keys.
        bits: bits of a code, 16 or 8.
    """
    of_code = (8, 0) if bits == 16 else (0,)
    of_key = (16, 8, 0) if keys > 0xFFFF else (8, 0)
    return [
        compress_planes(*(c >> shift & 255 for shift in of_code), *(s >> shift & 255 for shift in of_key))
        for c, s in zip(codes, steps, strict=True)
    ]


def pack_maps(maps: Tensor, rounding: LargestRoundingError) -> str:
    """Encode small maps (heads, rows, columns) as base64: two planes of 16-bit codes, deflated."""
    return pack_codes(encode_weights(maps, bits=16, rounding=rounding), 16)


def pack_margins(values: Tensor, top: float) -> str:
    """Encode numbers from 0 to `top`, (heads, bins), as base64: two planes of linear 16-bit codes, deflated."""
    codes = (values.double().nan_to_num(nan=0.0) / (top or 1.0)).clamp(0, 1).mul(65535).round().int()
    return compress_planes(codes >> 8, codes & 255)


def average_bins(values: Tensor, number: int) -> Tensor:
    """Average runs of equal length along the last axis to at most `number` means; NaN does not count.

    >>> average_bins(torch.tensor([[1.0, 3.0, 5.0]]), 2)
    tensor([[2., 5.]])
    """
    length = values.shape[-1]
    run = max(1, -(-length // number))
    rest = -length % run
    padded = torch.nn.functional.pad(values, (0, rest), value=torch.nan)
    means: Tensor = padded.unflatten(-1, (-1, run)).nanmean(-1)
    return means


def compress_planes(*planes: Tensor, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> str:
    """Compress planes of numbers below 256, one after the other, as raw deflate in base64.

    Args:
        planes: integers, of any shape.
        strategy: the zlib strategy. In a whole map only runs of equal bytes repeat: searching for runs alone (Z_RLE)
            takes a sixth of the time and gives 1 to 5 % fewer bytes; steps from key to key repeat in other ways.
    """
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -15, zlib.DEF_MEM_LEVEL, strategy)
    parts = [squeeze.compress(plane.to(torch.uint8).contiguous().numpy().data) for plane in planes]
    return base64.b64encode(b"".join((*parts, squeeze.flush()))).decode("ascii")
