"""The active changes to the outputs of heads, such as heads that are switched off.

Every kernel's output passes `change_output` before listeners receive it. Calls without an active change only read one
global variable. The variable is no ContextVar, because backward passes, in which activation checkpointing recomputes a
layer, run in other threads; forward passes in other threads are not changed. `interventions/` defines the changes.

A recomputed layer must be changed as in its forward pass. Each change saves an empty tensor for the backward pass whose
shape identifies the change (`mark_changed_output`). Non-reentrant checkpointing compares the shapes of all saved
tensors, and raises a CheckpointError where a forward pass and its recomputation ran under different changes. Reentrant
checkpointing compares nothing, so it is rejected in the forward pass, and its recomputations are never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from multihead.errors import ModelError
from multihead.kernels.call import AttentionRequest
from multihead.tensors.tracing import is_in_backward_pass
from multihead.tensors.undo import Undo


class HeadChange(Protocol):
    """A change to the outputs of some heads of one model, while it is active.

    Attributes:
        state: a value that equal changes share, which a key/value cache stores; None for a change after which a cache
            may be continued without the change.
    """

    @property
    def state(self) -> object:
        """A value that equal changes share; None for a change after which a cache may be used without the change."""
        ...

    def applies_to(self, module: nn.Module) -> bool:
        """Whether a module is the changed model or a part of it, and its calls in this thread are changed."""
        ...

    def replace_attention(self, request: AttentionRequest) -> Tensor | None:
        """Return the output of a call of the model if it does not depend on its attention; None computes that."""
        ...

    def change_output(self, request: AttentionRequest, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Change the output of a call of the model, (batch, heads, queries, value_dim), before its projection.

        Returns:
            the output, which is the given tensor if the call is not changed; and the factor of each head's own output,
            (1 or batch, heads, 1 or queries), NaN where another vector replaced it, or None if it is not changed.
        """
        ...


active_changes: tuple[HeadChange, ...] = ()
"""The active changes, in the order in which they began. Like listeners, they need a call's origin (`CallOrigin`)."""


@contextmanager
def apply_change(change: HeadChange) -> Iterator[None]:
    """Apply a change in this context; contexts may end in any order."""
    global active_changes  # noqa: PLW0603

    def remove_change() -> None:
        global active_changes  # noqa: PLW0603
        active_changes = tuple(each for each in active_changes if each is not change)

    with Undo() as undo:
        undo.add_step(remove_change)
        active_changes = (*active_changes, change)
        yield


def replace_attention(request: AttentionRequest) -> Tensor | None:
    """Return the output of a call, (batch, heads, queries, value_dim), if an active change needs no attention of it."""
    found = (change.replace_attention(request) for change in _changes_of_call(request))
    return next((output for output in found if output is not None), None)


def change_output(request: AttentionRequest, output: Tensor) -> tuple[Tensor, Tensor | None]:
    """Apply the active changes to the output of a call, (batch, heads, queries, value_dim).

    Returns:
        the output, and the factors of the heads as in `AttentionResult.head_factors`.
    """
    concerned = _changes_of_call(request)
    if not concerned:
        return output, None
    if request.surroundings.traced:
        raise ModelError(
            "A layer whose heads are switched off is being traced, and a trace would keep them off.",
            "Trace, compile or export the model outside of the context.",
        )
    if _runs_in_reentrant_checkpoint():
        if is_in_backward_pass():
            return output, None
        raise ModelError(
            "A layer whose heads are switched off runs under activation checkpointing with use_reentrant=True, which "
            "could recompute it with other heads.",
            'Use use_reentrant=False; for Hugging Face models gradient_checkpointing_kwargs={"use_reentrant": False}.',
        )
    factors: Tensor | None = None
    for change in concerned:
        output, more = change.change_output(request, output)
        if more is not None:
            factors = more if factors is None else factors * more
    return output, None if factors is None else factors.expand(output.shape[:3])


def change_states_of(module: nn.Module) -> frozenset[object] | None:
    """Return the states of the active changes of the model that a module is part of; None if any cache may be used."""
    states = frozenset(change.state for change in active_changes if change.applies_to(module))
    return None if None in states else states


def check_cache_states(filled: frozenset[object], states: frozenset[object] | None) -> None:
    """Raise a ModelError if a key/value cache that was filled under `filled` is continued under other changes."""
    if states is not None and states != filled:
        then, now = ("heads switched off" if each else "all heads on" for each in (filled, states))
        now = now if then != now else "other heads switched off"
        raise ModelError(
            f"The key/value cache was filled with {then}, and is continued with {now}.",
            "Start with an empty cache, or give allow_mixed=True to mh.ablate or mh.scale_heads.",
        )


def reject_split_call(request: AttentionRequest) -> None:
    """Raise a ModelError if a call on a sequence that is split over ranks has heads that are switched off."""
    if _changes_of_call(request):
        raise ModelError(
            "Heads cannot be switched off in context_parallel, where a rank has part of the tokens.",
            "Run the model on one process.",
        )


def mark_changed_output(output: Tensor, *numbers: int) -> Tensor:
    """Save `numbers`, which identify a change, with the changed output for the backward pass; return the output."""
    if not (torch.is_grad_enabled() and output.requires_grad):
        return output
    return _ChangeMark.apply(output, numbers)  # type: ignore[no-any-return, no-untyped-call]


class _ChangeMark(torch.autograd.Function):
    """Identity that saves an empty tensor, whose shape identifies a change."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, numbers: tuple[int, ...]) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...]], output: Tensor) -> None:
        ctx.save_for_backward(torch.empty((0, *inputs[1])))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors  # noqa: B018 - a checkpoint compares its shape here
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)


def _changes_of_call(request: AttentionRequest) -> list[HeadChange]:
    """Return the active changes of the model whose layer makes a call."""
    origin = request.origin
    return [] if origin is None else [change for change in active_changes if change.applies_to(origin.layer)]


_REENTRANT_CHECKPOINT_CODE = frozenset({CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__})


def _runs_in_reentrant_checkpoint() -> bool:
    """Whether reentrant activation checkpointing runs this code; torch has no function that returns it."""
    frames = walk_stack(sys._getframe())  # noqa: SLF001 - the function that the standard library offers
    return any(frame.f_code in _REENTRANT_CHECKPOINT_CODE for frame, _ in frames)
