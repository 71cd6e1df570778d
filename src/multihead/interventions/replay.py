"""Run a model again from one of its blocks on, with the stored outputs of the blocks before it.

A block is an element of the list of layers of a transformer. The model's own forward pass runs, in which a block that
is left out returns its stored output; so embeddings, masks, norms and heads are those of the model. A replay is exact
only if blocks pass nothing but their outputs to each other, which `Replay.check_exactness` tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from multihead.interventions.heads import attention_layers
from multihead.tensors.undo import Undo

ForwardPass = Callable[[], "Tensor | list[Tensor]"]
"""A forward pass of a model on one text or batch; it returns what is compared, such as the logits."""


@dataclass(eq=False)
class Replay:
    """The blocks of a model, and the output of each block in one forward pass.

    Attributes:
        model: the model.
        blocks: the blocks in the order of the model's list of layers; [] where it has no such list.
        block_outputs: the output of each block; filled by `store_block_outputs`.
        is_exact: whether `check_exactness` found that a replay gives equal results.
    """

    model: nn.Module
    blocks: list[nn.Module] = field(init=False)
    block_outputs: dict[int, Any] = field(default_factory=dict)
    is_exact: bool = False

    def __post_init__(self) -> None:
        self._names = _find_block_names(self.model)
        self.blocks = [self.model.get_submodule(name) for name in self._names]

    def block_of(self, layer: str) -> int:
        """Return the index of the block that contains the attention layer with a qualified name."""
        module = layer.partition("#")[0]
        return next(index for index, name in enumerate(self._names) if f"{module}.".startswith(f"{name}."))

    @contextmanager
    def store_block_outputs(self) -> Iterator[None]:
        """Store the outputs of the blocks in the forward pass that runs in this context.

        A Hugging Face model must run on this library's attention (`mh.use`), as it does while heads are off.
        """
        runs = [0] * len(self.blocks)
        self.block_outputs.clear()

        def store_output(index: int, _module: nn.Module, _args: object, output: Any) -> None:
            runs[index] += 1
            self.block_outputs[index] = output

        with Undo() as undo:
            for index, block in enumerate(self.blocks):
                undo.hook_after_forward(block, partial(store_output, index))
            yield
        if any(count != 1 for count in runs):
            self.block_outputs.clear()  # a block that runs several times has several outputs

    @contextmanager
    def start_at_block(self, first: int) -> Iterator[None]:
        """Leave out the blocks before `first` in the forward passes in this context; 0 runs the whole model."""
        with Undo() as undo:
            for index, block in enumerate(self.blocks[:first]):
                output = self.block_outputs[index]
                undo.replace_method(block, "forward", lambda *_args, output=output, **_kwargs: output)
            yield

    def check_exactness(self, forward: ForwardPass, expected: Tensor | list[Tensor]) -> bool:
        """Set and return `is_exact`: whether unchanged replays from the middle and the last block give `expected`."""
        count = len(self.blocks)
        self.is_exact = len(self.block_outputs) == count > 1 and all(
            self._gives_equal_output_from(first, forward, expected) for first in sorted({count // 2, count - 1})
        )
        return self.is_exact

    def _gives_equal_output_from(self, first: int, forward: ForwardPass, expected: Tensor | list[Tensor]) -> bool:
        wanted = [expected] if isinstance(expected, Tensor) else expected
        try:
            with self.start_at_block(first):
                found = forward()
            pairs = zip([found] if isinstance(found, Tensor) else found, wanted, strict=True)
            return all(torch.equal(*pair) for pair in pairs)
        except Exception:  # noqa: BLE001 - a model that needs more than the outputs of blocks can raise any error
            return False


def repeat_batch(value: Any, copies: int) -> Any:
    """Repeat the batch of all tensors in a value, (batch, ...) -> (copies * batch, ...); one copy is the value."""
    if copies == 1:
        return value
    return tree_map(
        lambda each: each.repeat(copies, *[1] * (each.dim() - 1)) if isinstance(each, Tensor) else each, value
    )


def _find_block_names(model: nn.Module) -> list[str]:
    """Return the qualified names of the elements of the list of layers that contains all attention layers, or []."""
    modules = dict(model.named_modules())
    lists: set[str] = set()
    for layer in attention_layers(model):
        parts = layer.name.split(".")
        around = (".".join(parts[:stop]) for stop in range(1, len(parts)))
        lists.add(next((name for name in around if isinstance(modules.get(name), nn.ModuleList)), ""))
    if len(lists) != 1 or "" in lists:
        return []
    (name,) = lists
    return [f"{name}.{child}" for child, _ in modules[name].named_children()]
