"""Follow the attention calls of a model: the layer that makes each, and the tokens of its queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torch import Tensor, nn

from multihead.errors import ModelError
from multihead.interventions.tokens import QueryTokens, TokenFinder
from multihead.kernels.call import AttentionRequest, CallOrigin
from multihead.kernels.head_changes import apply_change
from multihead.layer.sharding import rank_heads
from multihead.models import huggingface
from multihead.models.pretrained import InputTracker, track_inputs
from multihead.observation.layer_names import LayerNamer, module_names
from multihead.tensors.tracing import is_in_backward_pass, original_module, run_uncompiled


@dataclass(frozen=True, eq=False)
class FollowedCall:
    """An attention call of a model.

    Attributes:
        layer_name: name of the layer, with "#2" and so on for further calls in one forward pass.
        layer_number: number of the layer, in the order in which the layers first ran.
        request: the call.
        forward_passes: number of forward passes of the model so far.
    """

    layer_name: str
    layer_number: int
    request: AttentionRequest
    forward_passes: int
    _finder: TokenFinder

    @cached_property
    def tokens(self) -> QueryTokens:
        """The tokens that are the queries of the call."""
        return self._finder.find(self.request, self.layer_name.partition("#")[0])

    def require_all_heads(self, what: str) -> None:
        """Raise a ModelError if other ranks compute some of the layer's heads, where `what` is impossible."""
        if rank_heads(self.request.known_origin.layer, self.request.shape.head_dim) is not None:
            raise ModelError(
                f"The heads of {self.layer_name} are split over ranks, where {what}.", "Run the model on one process."
            )


OutputChange: TypeAlias = Callable[[FollowedCall, Tensor], tuple[Tensor, Tensor | None]]
"""Function that changes the output of a call; arguments and results are those of `HeadChange.change_output`."""


@dataclass(eq=False)
class _CallFollower:
    """The `HeadChange` that passes each call of a model to a function."""

    output_change: OutputChange
    inputs: InputTracker
    names: dict[int, str]
    state: object = None
    _newest_origin: CallOrigin | None = None  # the origin of the newest call

    def __post_init__(self) -> None:
        self.namer, self.finder = LayerNamer(self.names, self.inputs), TokenFinder(self.inputs)

    def applies_to(self, module: nn.Module) -> bool:
        """Whether a module is the model or a part of it, and runs in the thread whose model inputs are tracked."""
        return id(module) in self.names and (self.inputs.is_recording or is_in_backward_pass())

    def replace_attention(self, request: AttentionRequest) -> None:
        """Return None, because the function takes the output of the attention."""

    def change_output(self, request: AttentionRequest, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pass a call and its output to `function`, and return the result of `function`."""
        module, again = request.known_origin.layer, request.origin is self._newest_origin
        self._newest_origin = request.origin
        # `again`: with dropout, listeners have received a call with the same origin before.
        if again or is_in_backward_pass():
            name = self.namer.name_recomputed_call(module)
        else:
            self.namer.begins_pass()
            name = self.namer.name_call(request, module)
        self.finder.follow(request, name.partition("#")[0])
        call = FollowedCall(name, self.namer.numbers[name], request, self.inputs.num_passes, self.finder)
        return self.output_change(call, output)


@contextmanager
def run_followable(model: nn.Module) -> Iterator[None]:
    """Make Hugging Face models in a module call this library's attention, and compiled ones run eagerly, until it ends.

    `follow_calls` does so too; several of its contexts inside of this one prepare the models once.
    """
    with huggingface.install(model), run_uncompiled():
        yield


@contextmanager
def follow_calls(model: nn.Module, function: OutputChange, *, state: object = None) -> Iterator[InputTracker]:
    """Pass the output of each attention call of a model to a function that may change it, while in this context.

    A Hugging Face model calls this library's attention in this context, and a compiled model runs eagerly.

    Args:
        model: the model.
        function: receives each call.
        state: see `HeadChange.state`.
    """
    root = original_module(model)
    with (
        run_followable(root),
        track_inputs(root) as inputs,
        apply_change(_CallFollower(function, inputs, module_names(root), state)),
    ):
        yield inputs
