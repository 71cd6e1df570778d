"""Cosines and sines of positions: computed in float64, rounded once, and kept between calls."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Tables begin at position 0 and double as they grow, up to this many positions; beyond, they are one stretch.
MOST = 65_536
_STRETCH = 1_024


class Waves(NamedTuple):
    """What columns are multiplied by, and what the other column of their pair is: (batch or none, length, 1, dim)."""

    cosine: Tensor
    sine: Tensor  # minus the sine for the first column of a pair
    from_table: bool  # if so, torch transforms nothing here, and what is turned can be worked on in place


def exact_on(device: torch.device) -> torch.dtype:
    """Give the dtype that angles are computed in: float64, or float32 where there is none."""
    return torch.float32 if device.type == "mps" else torch.float64


def waves_of(angles: Tensor, gain: float, dtype: torch.dtype, *, interleaved: bool) -> Waves:
    """Make the waves of angles, with operations that any transformation of torch can follow.

    Args:
        angles: (batch or none, length, pairs), radians.
        gain: what cosine and sine are multiplied by.
        dtype: of the waves.
        interleaved: whether the columns of a pair are neighbours, or half of the columns apart.
    """
    cosine, sine = (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)
    if interleaved:
        cosine, sine = torch.stack([cosine, cosine], -1).flatten(-2), torch.stack([-sine, sine], -1).flatten(-2)
    else:
        cosine, sine = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
    return Waves(cosine[..., None, :], sine[..., None, :], from_table=False)


def turned_columns(x: Tensor, waves: Waves | Tensor, *, interleaved: bool) -> Tensor:
    """Turn every pair of columns: (batch, length, heads, dim), in the dtype of the waves, layout as x.

    The fewest passes over memory that were found: one complex product where pairs are neighbours, and a roll whose
    result is worked on in place where they are not.
    """
    if isinstance(waves, Tensor):
        pairs = torch.view_as_complex(_even(x).unflatten(-1, (-1, 2)))  # (batch, length, heads, pairs)
        return torch.view_as_real(pairs * waves).flatten(-2)
    if waves.from_table and not interleaved:
        if x.requires_grad and torch.is_grad_enabled():
            return _Turn.apply(x, waves.cosine, waves.sine)  # type: ignore[no-any-return, no-untyped-call]
        return _turned_halves(x, waves.cosine, waves.sine)
    if interleaved:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        partner = torch.cat((second, first), -1)  # a roll asks whether there are tokens, which a graph may not know
    return torch.addcmul(partner * waves.sine, x, waves.cosine)


def _turned_halves(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1).mul_(sine).addcmul_(x, cosine)


class _Turn(torch.autograd.Function):
    """The gradient of a turn is the turn back: two passes over memory less than what autograd would do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.waves = cosine, sine
        return _turned_halves(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.waves
        return _Turn.apply(gradient, cosine, -sine), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _turned_halves(tangent, *ctx.waves)


def _even(x: Tensor) -> Tensor:
    """A complex view needs steps and a start that are even, and neighbours that lie side by side."""
    if x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Stretch(NamedTuple):
    """The waves of the positions low <= p < high."""

    low: int
    high: int
    waves: Waves | Tensor


class Tables:
    """The waves of one rotary in one dtype on one device, kept between calls.

    Args:
        frequencies: of the pairs, radians a token.
        gain: what cosine and sine are multiplied by.
        dtype: float32 or float64.
        device: where they are kept.
        interleaved: if so, waves are one complex number a pair; else `Waves`.

    >>> Tables((1.0,), 1.0, torch.float32, torch.device("cpu"), interleaved=True).between(0, 2).shape
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
        self.frequencies = self._kept(self._frequencies, exact_on(device))  # (pairs,)
        self._held: _Stretch | None = None
        self._last: _Stretch | None = None  # decoding asks for the same positions, layer after layer

    def between(self, low: int, high: int) -> Waves | Tensor:
        """Give the waves of the positions low <= p < high: (length, 1, columns or pairs)."""
        last = self._last
        if last is not None and last.low == low and last.high == high:
            return last.waves
        held = self._holding(low, high)
        waves = _rows(held.waves, slice(low - held.low, high - held.low))
        self._last = _Stretch(low, high, waves)
        return waves

    def at(self, positions: Tensor) -> Waves | Tensor | None:
        """Give the waves of positions on the CPU, (batch, length, 1, columns or pairs), or None for far ones."""
        if not positions.numel():
            return None
        low, high = (int(end) for end in positions.aminmax())
        if low < 0 or high >= MOST:
            return None
        held = self._holding(0, high + 1)
        return _rows(held.waves, positions.long() - held.low)

    def _holding(self, low: int, high: int) -> _Stretch:
        held = self._held
        if held is None or not held.low <= low <= high <= held.high:
            with self._lock:
                held = self._held
                if held is None or not held.low <= low <= high <= held.high:
                    from_zero = low >= 0 and high <= MOST
                    ends = (
                        (0, max(128, 1 << (high - 1).bit_length())) if from_zero else (low, max(high, low + _STRETCH))
                    )
                    held = self._held = _Stretch(*ends, self._made(*ends))
        return held

    def _made(self, low: int, high: int) -> Waves | Tensor:
        """Make them with numpy, which no mode or transformation of torch that is on for this call gets hold of."""
        angles = np.arange(low, high)[:, None, None] * self._frequencies  # (length, 1, pairs)
        cosine, sine = np.cos(angles) * self._gain, np.sin(angles) * self._gain
        if self._interleaved:
            return self._kept(
                (cosine + 1j * sine), torch.complex64 if self._dtype == torch.float32 else torch.complex128
            )
        cosine, sine = np.concatenate([cosine, cosine], -1), np.concatenate([-sine, sine], -1)
        return Waves(self._kept(cosine, self._dtype), self._kept(sine, self._dtype), from_table=True)

    def _kept(self, numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
        # A tensor of inference mode could not be trained with later.
        with torch.inference_mode(mode=False):
            return torch.from_numpy(numbers).to(self._device, dtype)


def _rows(waves: Waves | Tensor, which: slice | Tensor) -> Waves | Tensor:
    return waves[which] if isinstance(waves, Tensor) else Waves(waves.cosine[which], waves.sine[which], from_table=True)
