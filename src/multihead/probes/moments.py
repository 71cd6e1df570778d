"""Mean and standard deviation of the distance between a query and its keys, accumulated tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PART = 32  # keys whose squares are summed about the middle of these keys


@dataclass(eq=False)
class DistanceMoments:
    """Sums over the keys seen so far; p_ij are the weights, d_ij = |position_i - j| the distance.

    A spread taken as the difference of sum p d^2 and (sum p d)^2 / sum p would lose its digits; squares about
    a mean are joined without a difference (Chan, Golub and LeVeque 1979, equation 1.5).

    Attributes, (heads, rows) float64:
        mass: sum_j p_ij.
        distance: sum_j p_ij d_ij.
        squares: sum_j p_ij (d_ij - distance / mass)^2.
    """

    mass: Tensor
    distance: Tensor
    squares: Tensor

    @staticmethod
    def zero(like: Tensor) -> DistanceMoments:
        """Return the sums over no keys."""
        return DistanceMoments(torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like))

    def add(self, weights: Tensor, positions: Tensor, columns: tuple[int, int], side: int) -> None:
        """Add the weights of a tile.

        Args:
            weights: (heads, rows, columns), 0 where hidden.
            positions: (rows,), of the queries among the keys.
            columns: first key and the end of the keys.
            side: 1 if all keys are at or before all positions, -1 if at or after, 0 if neither.
        """
        first, stop = columns
        middle = first + (stop - first) // PART * PART if side else first
        if middle > first:
            self._add_one_sided_keys(weights[..., : middle - first], positions, first, side)
        if stop > middle:
            self._add_any_keys(weights[..., middle - first :], positions, (middle, stop))

    def _add_one_sided_keys(self, weights: Tensor, positions: Tensor, first: int, side: int) -> None:
        """Add keys on one side of all queries, where the distance is linear, in parts of PART keys.

        About the middle of such a part squares are at most 240, so what float32 rounds is far below a token.
        """
        about = torch.arange(PART, device=weights.device, dtype=weights.dtype) - (PART - 1) / 2
        parts = weights.unflatten(-1, (-1, PART))  # (heads, rows, parts, PART)
        mass, once, twice = parts.sum(-1).double(), (parts @ about).double(), (parts @ about.square()).double()
        middles = torch.arange(parts.shape[2], device=weights.device, dtype=torch.float64) * PART + (PART - 1) / 2
        whole = mass.sum(-1)
        mean = (mass * middles + once).sum(-1) / _one_where_zero(whole)  # counted from the first key
        # sum p (c + m - mean)^2 = sum p c^2 + 2 (m - mean) sum p c + (m - mean)^2 sum p, with c about the middle m.
        away = middles - mean[..., None]
        squares = (twice + away * (2 * once + away * mass)).sum(-1).clamp(min=0)
        sharp = squares < whole
        if bool(sharp.any()):
            # A spread of less than a token is lost in this difference: sum its squares about the mean itself.
            key = torch.arange(weights.shape[-1], device=weights.device, dtype=weights.dtype)
            apart = key - mean[sharp][:, None].to(weights.dtype)
            squares[sharp] = torch.linalg.vecdot(weights[sharp], apart.square_()).double()
        self._join_sums(whole, side * (positions - first - mean), squares)

    def _add_any_keys(self, weights: Tensor, positions: Tensor, columns: tuple[int, int]) -> None:
        """Add keys on either side of the queries, with the distance of each."""
        distance = (positions[:, None] - torch.arange(*columns, device=weights.device)).abs().to(weights.dtype)
        mass, once = weights.sum(-1), torch.linalg.vecdot(weights, distance)  # (heads, rows)
        mean = once / _one_where_zero(mass)
        squares = torch.linalg.vecdot((distance - mean[..., None]).square_(), weights)
        self._join_sums(mass.double(), mean.double(), squares.double())

    def _join_sums(self, mass: Tensor, mean: Tensor, squares: Tensor) -> None:
        """Join the sums of a tile: its mass, its mean distance and the squares about this mean."""
        both = _one_where_zero(self.mass + mass)
        mean_before = self.distance / _one_where_zero(self.mass)
        self.squares += squares + (mean - mean_before).square() * (self.mass * mass / both)
        self.mass += mass
        self.distance += mean * mass

    def mean(self) -> Tensor:
        """Return the mean distance: (heads, rows), 0 where nothing was seen."""
        return self.distance / _one_where_zero(self.mass)

    def spread(self) -> Tensor:
        """Return the standard deviation of the distance: (heads, rows)."""
        return (self.squares / _one_where_zero(self.mass)).sqrt()


def _one_where_zero(mass: Tensor) -> Tensor:
    return mass.masked_fill(mass == 0, 1)
