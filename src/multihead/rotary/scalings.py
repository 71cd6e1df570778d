"""What changes the frequencies of rotary positions, for texts longer than those of training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multihead.errors import ArgumentError, refuse_unless_integer


def frequencies_of(base: float, dim: int) -> tuple[float, ...]:
    """Give the radians a token of each pair of dim columns: base ** (-2 c / dim).

    Source: arXiv:2104.09864, equation 15.

    >>> frequencies_of(10_000.0, 4)
    (1.0, 0.01)
    """
    return tuple(base ** (-column / dim) for column in range(0, dim, 2))


def refuse_unless_above(name: str, value: object, least: float = 0) -> None:
    """Refuse what is no number above the least."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < math.inf:
        raise ArgumentError(f"{name} is {value!r}.", f"Give a number above {least}.")


@dataclass(frozen=True)
class Linear:
    """Positions divided by a factor: every frequency is that many times lower.

    Args:
        factor: how many times longer than in training a text may be.

    Source: arXiv:2306.15595.

    >>> Linear(2.0).frequencies(10_000.0, 4)
    (0.5, 0.005)
    """

    factor: float

    def __post_init__(self) -> None:
        refuse_unless_above("factor", self.factor)

    @property
    def gain(self) -> float:
        """What turned columns are multiplied by: 1."""
        return 1.0

    def frequencies(self, base: float, dim: int) -> tuple[float, ...]:
        """Give the radians a token of each pair."""
        return tuple(frequency / self.factor for frequency in frequencies_of(base, dim))


@dataclass(frozen=True)
class Llama3:
    """Long waves stretched by a factor, short ones kept, and those between blended.

    Args:
        factor: how many times lower the frequency of a long wave becomes.
        low_freq_factor: waves longer than original_length / low_freq_factor tokens are long.
        high_freq_factor: waves shorter than original_length / high_freq_factor tokens are short.
        original_length: the longest text of training, tokens.

    Source: Llama 3.1, arXiv:2407.21783; the form is that of its published code.

    >>> [f"{frequency:.2g}" for frequency in Llama3(8.0).frequencies(500_000.0, 8)]
    ['1', '0.038', '0.00052', '6.6e-06']
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            refuse_unless_above(name, getattr(self, name))
        refuse_unless_integer("original_length", self.original_length)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ArgumentError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor is {self.high_freq_factor}.",
                "Give a smaller low_freq_factor: long waves are longer than original_length / low_freq_factor.",
            )

    @property
    def gain(self) -> float:
        """What turned columns are multiplied by: 1."""
        return 1.0

    def frequencies(self, base: float, dim: int) -> tuple[float, ...]:
        """Give the radians a token of each pair."""
        band = self.high_freq_factor - self.low_freq_factor
        found = []
        for frequency in frequencies_of(base, dim):
            waves = self.original_length * frequency / (2 * math.pi)  # how often it went round in training
            kept = min(max((waves - self.low_freq_factor) / band, 0.0), 1.0)
            found.append(kept * frequency + (1 - kept) * frequency / self.factor)
        return tuple(found)


@dataclass(frozen=True)
class Yarn:
    """Pairs that went round often in training are kept, those that hardly did are stretched; all are made longer.

    Args:
        factor: how many times longer than in training a text may be.
        original_length: the longest text of training, tokens.
        beta_fast: pairs that went round more often than this in training are kept.
        beta_slow: pairs that went round less often than this are stretched by the factor.
        attention_factor: what turned columns are multiplied by; 0.1 ln(factor) + 1 if None. Scores grow by its square.
        mscale: with mscale_all_dim, makes attention_factor (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim
            ln(factor) + 1), as DeepSeek does.
        mscale_all_dim: see mscale.
        truncate: whether the two ends of the blend are rounded outward to whole pairs.

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
            refuse_unless_above(name, getattr(self, name))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                refuse_unless_above(name, getattr(self, name))
        refuse_unless_integer("original_length", self.original_length)
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ArgumentError(
                f"mscale is {self.mscale} and mscale_all_dim is {self.mscale_all_dim}.",
                "Give both, or attention_factor, or none of the three.",
            )

    @property
    def gain(self) -> float:
        """What turned columns are multiplied by."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.factor <= 1:
            return 1.0
        stretched = 0.1 * math.log(self.factor)
        if self.mscale is None or self.mscale_all_dim is None:
            return stretched + 1.0
        return (self.mscale * stretched + 1.0) / (self.mscale_all_dim * stretched + 1.0)

    def frequencies(self, base: float, dim: int) -> tuple[float, ...]:
        """Give the radians a token of each pair."""

        def pair_that_went_round(times: float) -> float:
            return dim * math.log(self.original_length / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_that_went_round(self.beta_fast), pair_that_went_round(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = 0.001 if low == high else high - low
        found = []
        for pair, frequency in enumerate(frequencies_of(base, dim)):
            stretched = min(max((pair - low) / width, 0.0), 1.0)
            found.append(stretched * frequency / self.factor + (1 - stretched) * frequency)
        return tuple(found)
