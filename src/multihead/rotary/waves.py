"""Cosines and sines of positions: computed in float64, rounded once, and cached between calls."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Tables start at position 0 and double as they grow, up to this many positions; farther ones are cached as one range.
MAX_POSITIONS = 65_536
_MIN_RANGE = 1_024


class RotationFactors(NamedTuple):
    """Factors of a rotation: a column x becomes x * cosine + partner * sine; partner is the other column of its pair.

    Attributes:
        cosine: (batch or none, length, 1, dim).
        sine: (batch or none, length, 1, dim), negated for the first column of a pair.
        from_table: whether the factors come from a table: then no trace or transform is active, and in-place operations
            are safe.
    """

    cosine: Tensor
    sine: Tensor
    from_table: bool


def angle_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which angles are computed on a device: float64, or float32 where that is missing."""
    return torch.float32 if device.type == "mps" else torch.float64


def compute_rotation_factors(angles: Tensor, gain: float, dtype: torch.dtype, *, interleaved: bool) -> RotationFactors:
    """Compute the factors of angles (batch or none, length, pairs), radians, as every torch transform can.

    `gain` is a factor of cosine and sine. The columns of a pair are adjacent (`interleaved`), or half of the columns
    apart.
    """
    cosine, sine = (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)
    if interleaved:
        cosine, sine = torch.stack([cosine, cosine], -1).flatten(-2), torch.stack([-sine, sine], -1).flatten(-2)
    else:
        cosine, sine = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
    return RotationFactors(cosine[..., None, :], sine[..., None, :], from_table=False)


def rotate_columns(x: Tensor, waves: RotationFactors | Tensor, *, interleaved: bool) -> Tensor:
    """Rotate every pair of columns: (batch, length, heads, dim), in the dtype of the waves, layout as x.

    It takes few passes over memory: one complex product for adjacent pairs, and otherwise a roll followed
    by in-place operations.
    """
    if isinstance(waves, Tensor):
        pairs = torch.view_as_complex(_with_even_strides(x).unflatten(-1, (-1, 2)))  # (batch, length, heads, pairs)
        return torch.view_as_real(pairs * waves).flatten(-2)
    if waves.from_table and not interleaved:
        if x.requires_grad and torch.is_grad_enabled():
            return _Rotation.apply(x, waves.cosine, waves.sine)  # type: ignore[no-any-return, no-untyped-call]
        return _rotate_halves(x, waves.cosine, waves.sine)
    if interleaved:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        partner = torch.cat((second, first), -1)  # a roll branches on the number of tokens, which may be symbolic
    return torch.addcmul(partner * waves.sine, x, waves.cosine)


def _rotate_halves(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1).mul_(sine).addcmul_(x, cosine)


class _Rotation(torch.autograd.Function):
    """A rotation whose gradient is the inverse rotation: two passes over memory fewer than with autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.waves = cosine, sine
        return _rotate_halves(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.waves
        return _Rotation.apply(gradient, cosine, -sine), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _rotate_halves(tangent, *ctx.waves)


def _with_even_strides(x: Tensor) -> Tensor:
    """Return x, copied if a complex view of it is impossible: that needs even strides and offset, and last stride 1."""
    if x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _PositionRange(NamedTuple):
    """The factors of the positions low <= p < high."""

    low: int
    high: int
    waves: RotationFactors | Tensor


class RotationTables:
    """Cached cosines and sines of one rotary in one dtype on one device.

    Args:
        frequencies: frequency of each pair, radians per token.
        gain: factor of cosine and sine.
        dtype: float32 or float64.
        device: device of the tables.
        interleaved: whether the tables hold one complex number per pair; else `RotationFactors`.

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
        self.frequencies = self._to_tensor(self._frequencies, angle_dtype(device))  # (pairs,)
        self._cached: _PositionRange | None = None
        self._last: _PositionRange | None = None  # the last range: in decoding every layer requests the same positions

    def factors_between(self, low: int, high: int) -> RotationFactors | Tensor:
        """Return the factors of the positions low <= p < high: (length, 1, columns or pairs)."""
        last = self._last
        if last is not None and last.low == low and last.high == high:
            return last.waves
        cached = self._range_containing(low, high)
        waves = _select_factors(cached.waves, slice(low - cached.low, high - cached.low))
        self._last = _PositionRange(low, high, waves)
        return waves

    def factors_at(self, positions: Tensor) -> RotationFactors | Tensor | None:
        """Return the factors, (batch or 1, length, 1, columns or pairs), of positions (batch or 1, length) on the CPU.

        Return None where some positions are outside of the tables.
        """
        if not positions.numel():
            return None
        low, high = (int(end) for end in positions.aminmax())
        if low < 0 or high >= MAX_POSITIONS:
            return None
        if (
            _MIN_RANGE <= 2 * positions.numel() <= high + 1
        ):  # a rank's part of a text: a table would be that of the text
            return self._compute_factors(positions.numpy())
        cached = self._range_containing(0, high + 1)
        return _select_factors(cached.waves, positions.long() - cached.low)

    def _range_containing(self, low: int, high: int) -> _PositionRange:
        cached = self._cached
        if cached is None or not cached.low <= low <= high <= cached.high:
            with self._lock:
                cached = self._cached
                if cached is None or not cached.low <= low <= high <= cached.high:
                    if low >= 0 and high <= MAX_POSITIONS:
                        ends = 0, max(128, 1 << (high - 1).bit_length())
                    else:
                        ends = low, max(high, low + _MIN_RANGE)
                    cached = self._cached = _PositionRange(*ends, self._compute_factors(np.arange(*ends)))
        return cached

    def _compute_factors(self, positions: np.ndarray) -> RotationFactors | Tensor:
        """Compute the factors of positions with numpy, which no active torch mode or transform intercepts."""
        angles = positions[..., None, None] * self._frequencies  # (..., length, 1, pairs)
        cosine, sine = np.cos(angles) * self._gain, np.sin(angles) * self._gain
        if self._interleaved:
            return self._to_tensor(
                (cosine + 1j * sine), torch.complex64 if self._dtype == torch.float32 else torch.complex128
            )
        cosine, sine = np.concatenate([cosine, cosine], -1), np.concatenate([-sine, sine], -1)
        return RotationFactors(
            self._to_tensor(cosine, self._dtype), self._to_tensor(sine, self._dtype), from_table=True
        )

    def _to_tensor(self, numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
        # A tensor created in inference mode could not be used in training later.
        with torch.inference_mode(mode=False):
            return torch.from_numpy(numbers).to(self._device, dtype)


def _select_factors(waves: RotationFactors | Tensor, index: slice | Tensor) -> RotationFactors | Tensor:
    return (
        waves[index]
        if isinstance(waves, Tensor)
        else RotationFactors(waves.cosine[index], waves.sine[index], from_table=True)
    )
