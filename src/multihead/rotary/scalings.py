"""Frequency scalings of rotary embeddings, for contexts longer than in training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_integer


def frequencies_of(base: float, dim: int) -> tuple[float, ...]:
    """Return the frequency of each pair c of `dim` features, radians per token: base ** (-2 c / dim).

    Source: arXiv:2104.09864, equation 15.

    >>> frequencies_of(10_000.0, 4)
    (1.0, 0.01)
    """
    return tuple(base ** (-column / dim) for column in range(0, dim, 2))


def check_above(name: str, value: object, limit: float = 0) -> None:
    """Raise an ArgumentError unless a value is a finite number above the limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not limit < value < math.inf:
        raise ArgumentError(f"{name} is {value!r}.", f"Give a number above {limit}.")


@dataclass(frozen=True)
class Linear:
    """Position interpolation: divide every frequency by a factor.

    Args:
        factor: ratio of the maximum context length to that in training.

    Source: arXiv:2306.15595.

    >>> Linear(2.0).frequencies(10_000.0, 4)
    (0.5, 0.005)
    """

    factor: float
    gain: ClassVar[float] = 1.0  # factor by which rotated features are multiplied

    def __post_init__(self) -> None:
        check_above("factor", self.factor)

    def frequencies(self, base: float, dim: int) -> tuple[float, ...]:
        """Return the frequency of each pair, radians per token."""
        return tuple(frequency / self.factor for frequency in frequencies_of(base, dim))


@dataclass(frozen=True)
class Llama3:
    """Divide low frequencies by a factor, keep high ones, and interpolate between them (Llama 3.1).

    Args:
        factor: divisor of the low frequencies.
        low_freq_factor: wavelengths above original_length / low_freq_factor tokens count as low frequencies.
        high_freq_factor: wavelengths below original_length / high_freq_factor tokens count as high frequencies.
        original_length: maximum context length in training, tokens.

    Source: Llama 3.1, arXiv:2407.21783; formula of the published code.

    >>> [f"{frequency:.2g}" for frequency in Llama3(8.0).frequencies(500_000.0, 8)]
    ['1', '0.038', '0.00052', '6.6e-06']
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    gain: ClassVar[float] = 1.0  # factor by which rotated features are multiplied

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_above(name, getattr(self, name))
        check_integer("original_length", self.original_length)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ArgumentError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor is {self.high_freq_factor}.",
                "Give a low_freq_factor below high_freq_factor.",
            )

    def frequencies(self, base: float, dim: int) -> tuple[float, ...]:
        """Return the frequency of each pair, radians per token."""
        band = self.high_freq_factor - self.low_freq_factor
        scaled = []
        for frequency in frequencies_of(base, dim):
            turns = self.original_length * frequency / (2 * math.pi)  # full rotations within the training context
            kept = min(max((turns - self.low_freq_factor) / band, 0.0), 1.0)
            scaled.append(kept * frequency + (1 - kept) * frequency / self.factor)
        return tuple(scaled)


@dataclass(frozen=True)
class Yarn:
    """YaRN: keep frequencies with many rotations in training, interpolate those with few, and scale rotated features.

    Args:
        factor: ratio of the maximum context length to that in training.
        original_length: maximum context length in training, tokens.
        beta_fast: pairs with more rotations than this within original_length keep their frequency.
        beta_slow: pairs with fewer rotations than this have their frequency divided by the factor.
        attention_factor: factor by which rotated features are multiplied, so scores grow by its square; 0.1 ln(factor)
            + 1 if None.
        mscale: with mscale_all_dim, sets attention_factor to (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim
            ln(factor) + 1), as DeepSeek does.
        mscale_all_dim: see mscale.
        truncate: whether the first and last interpolated pair are rounded outward to integers.

    Source: arXiv:2309.00071, section 3.

    >>> Yarn(4.0, 4096).gain == 0.1 * math.log(4) + 1
    True
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow"):
            check_above(name, getattr(self, name))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_above(name, getattr(self, name))
        check_integer("original_length", self.original_length)
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ArgumentError(
                f"mscale is {self.mscale} and mscale_all_dim is {self.mscale_all_dim}.",
                "Give both, or attention_factor, or none of the three.",
            )

    @property
    def gain(self) -> float:
        """Factor by which rotated features are multiplied."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.factor <= 1:
            return 1.0
        stretched = 0.1 * math.log(self.factor)
        if self.mscale is None or self.mscale_all_dim is None:
            return stretched + 1.0
        return (self.mscale * stretched + 1.0) / (self.mscale_all_dim * stretched + 1.0)

    def frequencies(self, base: float, dim: int) -> tuple[float, ...]:
        """Return the frequency of each pair, radians per token."""

        def pair_with_rotations(count: float) -> float:
            return dim * math.log(self.original_length / (count * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_with_rotations(self.beta_fast), pair_with_rotations(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = 0.001 if low == high else high - low
        scaled = []
        for pair, frequency in enumerate(frequencies_of(base, dim)):
            stretched = min(max((pair - low) / width, 0.0), 1.0)
            scaled.append(stretched * frequency / self.factor + (1 - stretched) * frequency)
        return tuple(scaled)
