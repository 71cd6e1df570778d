"""The attention layers that a model runs, and their heads that are switched off one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from multihead.errors import ArgumentError, ModelError
from multihead.errors.arguments import join_first
from multihead.interventions.followed import FollowedCall
from multihead.interventions.heads import HeadKey, require_head_of_layer


@dataclass(frozen=True)
class SweptLayer:
    """A layer whose heads are switched off one by one.

    Attributes:
        number: number of the layer.
        name: name of the layer.
        num_heads: number of its heads.
        heads: the heads that are switched off.
        texts: number of texts of the batch, as the layer counts them; None if which token belongs to which text is
            unknown, so that each head needs a forward pass of its own.
    """

    number: int
    name: str
    num_heads: int
    heads: Sequence[int]
    texts: int | None


def cost_of_layer(layers: Sequence[SweptLayer], layer: SweptLayer, *, replayed: bool) -> int:
    """Return how many layers run for the heads of one of some layers: a replay runs the layers from it on."""
    return len(layer.heads) * (len(layers) - layers.index(layer) * replayed)


@dataclass(eq=False)
class ReadLayers:
    """The layers that run in one forward pass, in the order in which they ran.

    Attributes:
        found: name of a layer -> the layer, with all of its heads.
        tokens: name of a layer -> the number of tokens of each text; without layers where it is unknown.
    """

    found: dict[str, SweptLayer] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, call: FollowedCall, output: Tensor) -> tuple[Tensor, None]:
        """Add the layer of a call; the output stays as it is."""
        call.require_all_heads("heads cannot be switched off")
        try:
            text, position = call.tokens
            self.tokens[call.layer_name] = text[position >= 0].bincount().tolist()
            texts = call.tokens.num_texts
        except ModelError:  # which token belongs to which text is unknown
            texts = None
        heads = call.request.shape.num_heads
        self.found[call.layer_name] = SweptLayer(call.layer_number, call.layer_name, heads, range(heads), texts)
        return output, None

    def choose(self, keys: Sequence[HeadKey] | None) -> list[SweptLayer]:
        """Return the layers with those of their heads that are named; None names all.

        Raises:
            ModelError: a layer never ran.
            ArgumentError: a layer has fewer heads, or the model has one head.
        """
        layers = sorted(self.found.values(), key=lambda layer: layer.number)
        if sum(layer.num_heads for layer in layers) == 1:
            raise ArgumentError("The model has one head, and nothing is left without it.", "Give a model with several.")
        if keys is None:
            return layers
        chosen: dict[str, set[int]] = {layer.name: set() for layer in layers}
        for key in keys:
            layer = next((each for each in layers if key.layer in (each.number, each.name)), None)
            if layer is None:
                ran = join_first([f"L{each.number} {each.name}" for each in layers], 4) or "none"
                raise ModelError(f"{key} was never reached. The layers that ran are {ran}.", "Give some of them.")
            require_head_of_layer(layer.number, layer.name, layer.num_heads, key.head or 0)
            chosen[layer.name] |= {*range(layer.num_heads)} if key.head is None else {key.head}
        return [replace(layer, heads=sorted(chosen[layer.name])) for layer in layers]
