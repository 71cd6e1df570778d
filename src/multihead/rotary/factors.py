"""Cosines and sines of rotary embeddings: computed in float64, rounded once, and cached between calls."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multihead.tensors.precision import widest_float

# Tables start at position 0 and double their length as they grow, up to this many positions; of larger positions only
# the last range is cached.
MAX_POSITIONS = 65_536
_MIN_CACHED_POSITIONS = 1_024  # in a table


class RotationFactors(NamedTuple):
    """Factors of a rotation: feature x becomes x * cosine + partner * sine; partner is the other feature of its pair.

    Attributes:
        cosine: (batch or none, length, 1, dim).
        sine: (batch or none, length, 1, dim), negated for the first feature of a pair.
        from_table: whether the factors are from a table, so that no trace or transform is active and in-place
            operations are safe.
    """

    cosine: Tensor
    sine: Tensor
    from_table: bool


def compute_rotation_factors(angles: Tensor, gain: float, dtype: torch.dtype, *, interleaved: bool) -> RotationFactors:
    """Compute the factors of angles (batch or none, length, pairs), radians, with operations that transforms support.

    `gain` is a factor of cosine and sine. The features of a pair are adjacent (`interleaved`), or dim / 2 apart.
    """
    cosine, sine = (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)
    if interleaved:
        cosine, sine = torch.stack([cosine, cosine], -1).flatten(-2), torch.stack([-sine, sine], -1).flatten(-2)
    else:
        cosine, sine = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
    return RotationFactors(cosine[..., None, :], sine[..., None, :], from_table=False)


def rotate_columns(x: Tensor, factors: RotationFactors | Tensor, *, interleaved: bool) -> Tensor:
    """Rotate all pairs of features of x: (batch, length, heads, dim), in the dtype of the factors and the layout of x.

    To save memory passes, this is one complex product for adjacent pairs, and otherwise a roll and in-place operations.
    """
    if isinstance(factors, Tensor):
        pairs = torch.view_as_complex(_with_even_strides(x).unflatten(-1, (-1, 2)))  # (batch, length, heads, pairs)
        return torch.view_as_real(pairs * factors).flatten(-2)
    if factors.from_table and not interleaved:
        if x.requires_grad and torch.is_grad_enabled():
            return _Rotation.apply(x, factors.cosine, factors.sine)  # type: ignore[no-any-return, no-untyped-call]
        return _rotate_halves(x, factors.cosine, factors.sine)
    if interleaved:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        # Not torch.roll, which branches on the number of tokens: in a graph it may be symbolic.
        partner = torch.cat((second, first), -1)
    return torch.addcmul(partner * factors.sine, x, factors.cosine)


def _rotate_halves(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1).mul_(sine).addcmul_(x, cosine)


class _Rotation(torch.autograd.Function):
    """Autograd function of a rotation; its backward pass is the inverse rotation, with two memory passes fewer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.factors = cosine, sine
        return _rotate_halves(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.factors
        return _Rotation.apply(gradient, cosine, -sine), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _rotate_halves(tangent, *ctx.factors)


def _with_even_strides(x: Tensor) -> Tensor:
    """Return x, or a copy if it has no complex view (which needs even strides and offset, and a last stride of 1)."""
    if x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _PositionRange(NamedTuple):
    """The rotation factors of the positions p, low <= p < high."""

    low: int
    high: int
    factors: RotationFactors | Tensor


class RotationTables:
    """Cached cosines and sines of one rotary in one dtype on one device.

    Args:
        frequencies: frequency of each pair, radians per token.
        gain: factor of cosine and sine.
        dtype: float32 or float64.
        device: device of the tables.
        interleaved: whether the tables contain one complex number per pair; otherwise `RotationFactors`.

    >>> RotationTables((1.0,), 1.0, torch.float32, torch.device("cpu"), interleaved=True).factors_between(0, 2).shape
    torch.Size([2, 1, 1])
    """

    def __init__(
        self,
        frequencies: tuple[float, ...],
        gain: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        interleaved: bool,
    ) -> None:
        self._frequencies, self._gain, self._interleaved = np.array(frequencies), gain, interleaved
        self._dtype, self._device, self._lock = dtype, device, Lock()
        self.frequencies = self._to_tensor(self._frequencies, widest_float(device))  # (pairs,)
        self._cached_range: _PositionRange | None = None
        # The last requested range: in decoding all layers request the same positions.
        self._last_range: _PositionRange | None = None

    def factors_between(self, low: int, high: int) -> RotationFactors | Tensor:
        """Return the factors of the positions low <= p < high: (length, 1, features or pairs)."""
        last = self._last_range
        if last is not None and last.low == low and last.high == high:
            return last.factors
        cached = self._range_containing(low, high)
        factors = _select_factors(cached.factors, slice(low - cached.low, high - cached.low))
        self._last_range = _PositionRange(low, high, factors)
        return factors

    def factors_at(self, positions: Tensor) -> RotationFactors | Tensor | None:
        """Return the factors, (batch or 1, length, 1, features or pairs), of positions (batch or 1, length) on the CPU.

        Return None if a position is outside the tables.
        """
        if not positions.numel():
            return None
        low, high = (int(end) for end in positions.aminmax())
        if low < 0 or high >= MAX_POSITIONS:
            return None
        # For positions of one rank of a split sequence the table would cover the whole sequence.
        if _MIN_CACHED_POSITIONS <= 2 * positions.numel() <= high + 1:
            return self._compute_factors(positions.numpy())
        cached = self._range_containing(0, high + 1)
        return _select_factors(cached.factors, positions.long() - cached.low)

    def _range_containing(self, low: int, high: int) -> _PositionRange:
        cached = self._cached_range
        if cached is None or not cached.low <= low <= high <= cached.high:
            with self._lock:
                cached = self._cached_range
                if cached is None or not cached.low <= low <= high <= cached.high:
                    if low >= 0 and high <= MAX_POSITIONS:
                        ends = 0, max(128, 1 << (high - 1).bit_length())
                    else:
                        ends = low, max(high, low + _MIN_CACHED_POSITIONS)
                    cached = self._cached_range = _PositionRange(*ends, self._compute_factors(np.arange(*ends)))
        return cached

    def _compute_factors(self, positions: np.ndarray) -> RotationFactors | Tensor:
        """Compute the factors of positions with numpy, because torch modes and transforms do not intercept it."""
        angles = positions[..., None, None] * self._frequencies  # (..., length, 1, pairs)
        cosine, sine = np.cos(angles) * self._gain, np.sin(angles) * self._gain
        if self._interleaved:
            return self._to_tensor(cosine + 1j * sine, self._dtype.to_complex())
        cosine, sine = np.concatenate([cosine, cosine], -1), np.concatenate([-sine, sine], -1)
        return RotationFactors(
            self._to_tensor(cosine, self._dtype), self._to_tensor(sine, self._dtype), from_table=True
        )

    def _to_tensor(self, numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
        # A tensor created in inference mode could not be used in training later.
        with torch.inference_mode(mode=False):
            return torch.from_numpy(numbers).to(self._device, dtype)


def _select_factors(factors: RotationFactors | Tensor, index: slice | Tensor) -> RotationFactors | Tensor:
    if isinstance(factors, Tensor):
        return factors[index]
    return RotationFactors(factors.cosine[index], factors.sine[index], from_table=True)
