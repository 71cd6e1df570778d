"""Gates on the outputs of heads, 1 where a head writes its own output, 0 where it is replaced, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.interventions.ablate import Positions, chosen_queries
from multihead.interventions.followed import FollowedCall, follow_calls
from multihead.interventions.means import run_batch
from multihead.interventions.measures import Measure, SeveralMeasures
from multihead.interventions.prepared import numbers_of_texts
from multihead.interventions.replacements import Replacement, gated
from multihead.interventions.swept import ReadLayers
from multihead.tensors.undo import Undo


@dataclass(eq=False)
class GradientsOfGates:
    """The gradients of a measure for the gates of one batch.

    Attributes:
        layers: the layers that ran.
        baseline: (texts,) or (texts, numbers) float64, the measure; all gates are 1.
        gradients: name of a layer -> (texts, heads) or (texts, heads, numbers), the gradient of the measure, summed
            over texts, for the gates of each text.
    """

    layers: ReadLayers
    baseline: Tensor
    gradients: dict[str, Tensor]


@dataclass(eq=False)
class _Gates:
    """Gates on the outputs of all heads, made when a layer first runs; a layer that is recomputed has the same ones."""

    rule: Replacement
    positions: Positions
    layers: ReadLayers = field(default_factory=ReadLayers)
    of_layers: dict[str, Tensor] = field(default_factory=dict)  # name of a layer -> (texts, heads)

    def apply(self, call: FollowedCall, output: Tensor) -> tuple[Tensor, None]:
        """Multiply the output of a call, (batch, heads, queries, value_dim), by its gates, as `scale_heads` does."""
        text = call.tokens.text_index.to(output.device)  # (batch, queries)
        if call.layer_name not in self.of_layers:
            self.layers.add(call, output)
            texts, dtype = call.tokens.num_texts, torch.promote_types(output.dtype, torch.float32)
            self.of_layers[call.layer_name] = torch.ones(
                texts, output.shape[1], dtype=dtype, device=output.device, requires_grad=True
            )
        gates = self.of_layers[call.layer_name].to(output.dtype)[text].transpose(1, 2)  # (batch, heads, queries)
        heads = torch.arange(output.shape[1], device=output.device)
        new, _ = self.rule.replace(call, output, heads, gates)
        if self.positions is not None or self.rule.needs_tokens:
            new = torch.where(chosen_queries(call, self.positions)[:, None, :, None].to(output.device), new, output)
        return new, None


def gradients_of_gates(
    model: nn.Module,
    batch: Any,
    measure: Measure | SeveralMeasures,
    replacement: Replacement,
    positions: Positions,
) -> GradientsOfGates:
    """Run a model forward and backward on a batch with a gate of 1 on every head of every text.

    Args:
        model: the model.
        batch: what it is called with.
        measure: the number of each text, or several: a backward pass each.
        replacement: what a head writes where its gate is 0.
        positions: the tokens with gates, see `ablate`.

    Raises:
        ArgumentError: the measure has no gradient.
    """
    gates = _Gates(gated(replacement), positions)
    with torch.enable_grad(), Undo() as undo, follow_calls(model, gates.apply):
        for parameter in model.parameters():  # no gradients of parameters, which take memory and time
            undo.set_attribute(parameter, "requires_grad", value=False)
        output = run_batch(model, batch)
        values = measure.of_texts(output, batch, numbers_of_texts(batch, gates.layers))
        leaves = list(gates.of_layers.values())
        if not values.requires_grad:
            raise ArgumentError(
                f"The measure {measure.name} has no gradient for the outputs of heads, as with quantised weights.",
                'Give method="exact", or a measure and weights through which gradients pass.',
            )
        sums = values.sum(0).reshape(-1)
        rows = [
            torch.autograd.grad(
                each, leaves, retain_graph=index + 1 < len(sums), allow_unused=True, materialize_grads=True
            )
            for index, each in enumerate(sums)
        ]
    found = [torch.stack(each, -1) if values.dim() > 1 else each[0] for each in zip(*rows, strict=True)]
    return GradientsOfGates(gates.layers, values.detach(), dict(zip(gates.of_layers, found, strict=True)))
