"""What is measured of every head of a model, collected batch by batch, and how long the rest takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from time import perf_counter

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.interventions.swept import SweptLayer, cost_of_layer


@dataclass(eq=False)
class CollectedNumbers:
    """What was measured of every head so far.

    Attributes:
        batches: number of batches; None if it is unknown.
        layers: the layers of the newest batch, with the heads that are measured.
        replayed: whether the blocks before each layer were left out so far.
        done: how often the heads of a layer were measured.
    """

    batches: int | None
    layers: list[SweptLayer] = field(default_factory=list)
    replayed: bool = True
    done: int = 0
    _baselines: list[Tensor] = field(default_factory=list)
    _values: dict[str, list[Tensor]] = field(default_factory=dict)  # per layer (texts, heads, places) of each batch
    _spent: Fraction = Fraction()
    _begun: float = field(default_factory=perf_counter)

    def begin(
        self, layers: list[SweptLayer], baseline: Tensor, *, replayed: bool, places: Mapping[str, int] | None = None
    ) -> None:
        """Begin a batch.

        Args:
            layers: the layers that it runs.
            baseline: (texts,) float64, the measure with all heads on.
            replayed: whether the blocks before each layer are left out.
            places: name of a layer -> at how many tokens its heads are measured apart; 1 of a layer without a name.
        """
        if self.layers and [each.name for each in layers] != [each.name for each in self.layers]:
            raise ArgumentError("Two batches ran other layers of the model.", "Give batches of one kind.")
        self.layers, self.replayed = layers, self.replayed and replayed
        self._baselines.append(baseline)
        for layer in layers:
            shape = len(baseline), layer.num_heads, (places or {}).get(layer.name, 1)
            self._values.setdefault(layer.name, []).append(torch.full(shape, torch.nan, dtype=torch.float64))

    def add(self, layer: SweptLayer, values: Tensor, place: int = 0) -> Tensor:
        """Add what was measured of those heads of a layer that are measured, (texts, heads) float64, at one place.

        Returns:
            (texts, heads) float64, of all heads of the layer; NaN for the others.
        """
        of_layer = self._values[layer.name][-1]
        of_layer[:, list(layer.heads), place] = values
        self.done += 1
        self._spent += Fraction(self._cost(layer), of_layer.shape[2])
        return of_layer[:, :, place]

    def _cost(self, layer: SweptLayer) -> int:
        return cost_of_layer(self.layers, layer, replayed=self.replayed)

    @property
    def baseline(self) -> Tensor:
        """The measure with all heads on: (texts,) float64."""
        return torch.cat(self._baselines)

    @property
    def values(self) -> dict[str, Tensor]:
        """Name of a layer -> (texts, heads, places) float64; NaN for what was not measured."""
        most = max(each.shape[2] for found in self._values.values() for each in found)
        return {
            name: torch.cat([nn.functional.pad(each, (0, most - each.shape[2]), value=torch.nan) for each in found])
            for name, found in self._values.items()
        }

    @property
    def share(self) -> float | None:
        """The estimated share of the work that is done, from 0 to 1; None if the number of batches is unknown."""
        return None if self.batches is None else float(self._spent / (self.batches * sum(map(self._cost, self.layers))))

    @property
    def seconds(self) -> float:
        """The time so far."""
        return perf_counter() - self._begun

    @property
    def seconds_left(self) -> float | None:
        """The estimated time for the rest; None if the number of batches is unknown."""
        return None if self.share is None else self.seconds * (1 / self.share - 1)
