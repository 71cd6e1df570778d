"""Accumulate the mean and standard deviation of the distance between queries and keys, tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEYS_PER_GROUP = 32  # keys per group; squared distances are summed about the middle of their group


@dataclass(eq=False)
class DistanceMoments:
    """Running sums of a distance over keys, where p_ij are the weights and d_ij = |position_i - j| the distances.

    The difference of sum p d^2 and (sum p d)^2 / sum p would cancel; squares about means are merged without a
    difference (Chan, Golub and LeVeque 1979, equation 1.5).

    Attributes, (heads, rows) float64:
        mass: sum_j p_ij.
        weighted_distance: sum_j p_ij d_ij.
        squared_deviations: sum_j p_ij (d_ij - weighted_distance / mass)^2.
    """

    mass: Tensor
    weighted_distance: Tensor
    squared_deviations: Tensor

    @staticmethod
    def zero(like: Tensor) -> DistanceMoments:
        """Create sums of 0 with the shape of `like`, (heads, rows)."""
        return DistanceMoments(torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like))

    def add(self, weights: Tensor, positions: Tensor, columns: tuple[int, int], side: int) -> None:
        """Add the weights of a tile.

        Args:
            weights: (heads, rows, columns), 0 where hidden.
            positions: (rows,), positions of the queries among the keys.
            columns: range of the keys, [first, stop).
            side: 1 if all keys are at or before all positions, -1 if at or after, 0 if neither.
        """
        first, stop = columns
        middle = first + (stop - first) // KEYS_PER_GROUP * KEYS_PER_GROUP if side else first
        if middle > first:
            self._add_one_sided_keys(weights[..., : middle - first], positions, first, side)
        if stop > middle:
            self._add_any_keys(weights[..., middle - first :], positions, (middle, stop))

    def _add_one_sided_keys(self, weights: Tensor, positions: Tensor, first: int, side: int) -> None:
        """Add keys that are all before or all after the queries: distance is linear, so groups of GROUP keys suffice.

        About the middle of a group the squares are at most 240, so float32 rounds them by far less than a token.
        """
        half = (KEYS_PER_GROUP - 1) / 2
        about = torch.arange(KEYS_PER_GROUP, device=weights.device, dtype=weights.dtype) - half
        parts = weights.unflatten(-1, (-1, KEYS_PER_GROUP))  # (heads, rows, parts, GROUP)
        mass, once, twice = parts.sum(-1).double(), (parts @ about).double(), (parts @ about.square()).double()
        number = torch.arange(parts.shape[2], device=weights.device, dtype=torch.float64)
        middles = number * KEYS_PER_GROUP + half
        whole = mass.sum(-1)
        mean = (mass * middles + once).sum(-1) / _zeros_to_ones(whole)  # counted from the first key
        # sum p (c + m - mean)^2 = sum p c^2 + 2 (m - mean) sum p c + (m - mean)^2 sum p, with c about the middle m.
        away = middles - mean[..., None]
        squares = (twice + away * (2 * once + away * mass)).sum(-1).clamp(min=0)
        sharp = squares < whole
        if bool(sharp.any()):
            # For a spread below one token this difference cancels, so its squares are summed about the mean itself.
            key = torch.arange(weights.shape[-1], device=weights.device, dtype=weights.dtype)
            apart = key - mean[sharp][:, None].to(weights.dtype)
            squares[sharp] = torch.linalg.vecdot(weights[sharp], apart.square_()).double()
        self._join_sums(whole, side * (positions - first - mean), squares)

    def _add_any_keys(self, weights: Tensor, positions: Tensor, columns: tuple[int, int]) -> None:
        """Add keys on any side of the queries, with the distance of each."""
        distance = (positions[:, None] - torch.arange(*columns, device=weights.device)).abs().to(weights.dtype)
        mass, once = weights.sum(-1), torch.linalg.vecdot(weights, distance)  # (heads, rows)
        mean = once / _zeros_to_ones(mass)
        squares = torch.linalg.vecdot((distance - mean[..., None]).square_(), weights)
        self._join_sums(mass.double(), mean.double(), squares.double())

    def _join_sums(self, mass: Tensor, mean: Tensor, squares: Tensor) -> None:
        """Merge a tile, given its mass, its mean distance and its squares about this mean; (heads, rows) each."""
        both = _zeros_to_ones(self.mass + mass)
        mean_before = self.weighted_distance / _zeros_to_ones(self.mass)
        self.squared_deviations += squares + (mean - mean_before).square() * (self.mass * mass / both)
        self.mass += mass
        self.weighted_distance += mean * mass

    def mean(self) -> Tensor:
        """Return the mean distance: (heads, rows), 0 for a mass of 0."""
        return self.weighted_distance / _zeros_to_ones(self.mass)

    def spread(self) -> Tensor:
        """Return the standard deviation of the distance: (heads, rows)."""
        return (self.squared_deviations / _zeros_to_ones(self.mass)).sqrt()


def _zeros_to_ones(mass: Tensor) -> Tensor:
    return mass.masked_fill(mass == 0, 1)
