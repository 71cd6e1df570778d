"""Mean and standard deviation of the distance between a query and its keys, joined tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PART = 32  # keys whose squares are summed about a middle of their own


@dataclass(eq=False)
class Moments:
    """Sums over the keys seen so far; p_ij are the weights, d_ij = |position_i - j| the distance.

    A spread taken as the difference of sum p d^2 and (sum p d)^2 / sum p would lose its digits; squares about
    a mean are joined without a difference (Chan, Golub and LeVeque 1979, equation 1.5).

    Fields, (heads, rows) float64:
        mass: sum_j p_ij.
        distance: sum_j p_ij d_ij.
        squares: sum_j p_ij (d_ij - distance / mass)^2.
    """

    mass: Tensor
    distance: Tensor
    squares: Tensor

    @staticmethod
    def zero(like: Tensor) -> Moments:
        """Make the sums of nothing."""
        return Moments(torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like))

    def add(self, weights: Tensor, positions: Tensor, columns: tuple[int, int], side: int) -> None:
        """Add a tile.

        Args:
            weights: (heads, rows, columns), 0 where hidden.
            positions: (rows,), where the queries stand among the keys.
            columns: first key and the one behind the last.
            side: 1 if all keys stand at or before all positions, -1 if at or behind, 0 if neither.
        """
        first, behind = columns
        keys = torch.arange(first, behind, device=weights.device)
        distance = (positions[:, None] - keys).abs().to(weights.dtype)  # (rows, columns)
        mass, once = weights.sum(-1), torch.linalg.vecdot(weights, distance)  # (heads, rows)
        mean = once / mass.masked_fill(mass == 0, 1)
        squares = torch.linalg.vecdot((distance - mean[..., None]).square_(), weights)
        self._join(mass.double(), mean.double(), squares.double())

    def _join(self, mass: Tensor, mean: Tensor, squares: Tensor) -> None:
        """Join the sums of a tile: its mass, its mean distance and the squares about that."""
        both = _nonzero(self.mass + mass)
        mean_before = self.distance / _nonzero(self.mass)
        self.squares += squares + (mean - mean_before).square() * (self.mass * mass / both)
        self.mass += mass
        self.distance += mean * mass

    def mean(self) -> Tensor:
        """Return the mean distance: (heads, rows), 0 where nothing was seen."""
        return self.distance / _nonzero(self.mass)

    def spread(self) -> Tensor:
        """Return the standard deviation of the distance: (heads, rows)."""
        return (self.squares / _nonzero(self.mass)).sqrt()


def _nonzero(mass: Tensor) -> Tensor:
    return mass.masked_fill(mass == 0, 1)
