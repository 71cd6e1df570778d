"""The function `mh.use`: run the attention of Hugging Face models on this library's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import nn

from multihead.errors import ArgumentError, ModelError
from multihead.errors.optional import require
from multihead.kernels.call import AttentionCall, listen
from multihead.kernels.explanation import Explanation, explain_request
from multihead.kernels.parts import PartName
from multihead.models.coverage import whole_model_advice
from multihead.models.huggingface import install, register_in_transformers
from multihead.models.packed import leave_out_padding
from multihead.models.pretrained import pretrained_models
from multihead.tensors.undo import Undo


@overload
def use() -> None: ...
@overload
def use(model: nn.Module, *, packed: bool = False) -> Used: ...
def use(model: nn.Module | None = None, *, packed: bool = False) -> Used | None:
    """Run the attention of Hugging Face models on this library's kernels.

    `use()` registers the name "multihead" in transformers for the rest of the process. Then
    `from_pretrained(..., attn_implementation="multihead")` and `model.set_attn_implementation("multihead")` work.
    `use(model)` changes one loaded model, permanently or as a context manager. Attention is not recorded. When the
    model runs, a module that computes attention or reads the attention mask, but never calls these kernels, raises a
    ModelError with its name.

    Args:
        model: a model of transformers, or a module that contains some (an adapter of PEFT, a class of your own).
        packed: leave padding out of all layers of the model, see docs/packed-models.md.

    Returns:
        for a model, the handle that restores its attention; else None.

    Raises:
        ModelError: `model` contains no model of transformers, or a layer of it computes attention without transformers'
            AttentionInterface (`attn_implementation="multihead"` raises this too), or `packed` does not support it.
        ArgumentError: `packed` was given without a model.
        MissingPackageError: transformers is not installed.

    >>> import torch, multihead as mh
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
    >>> with mh.use(model):
    ...     model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 16])
    >>> model.config._attn_implementation
    'sdpa'
    """
    require("transformers", purpose="mh.use", extra="hf")
    if model is None:
        if packed:
            raise ArgumentError("packed=True was given without a model.", "Give the model: mh.use(model, packed=True).")
        register_in_transformers()
        return None
    if not isinstance(model, nn.Module) or not pretrained_models(model):
        raise ModelError(
            f"{type(model).__name__} contains no model of transformers.",
            (isinstance(model, nn.Module) and whole_model_advice(model))
            or "Give one, or build layers with mh.MultiHeadAttention.",
        )
    return Used(model, leave_out_padding(model) if packed else install(model))


@dataclass(frozen=True, eq=False, repr=False)
class Used:
    """A model that runs on this library's kernels, until `undo()` or the end of a `with` block.

    Attributes:
        model: the model.
    """

    model: nn.Module
    _undo: Undo

    def __post_init__(self) -> None:
        self._undo.permanent = True  # deleting the handle must not restore the model

    def undo(self) -> None:
        """Restore the attention that the model had before."""
        self._undo.close()

    def explain(self, *args: Any, **kwargs: Any) -> dict[str, Explanation]:
        """Run the model once, without gradients, and explain its attention calls.

        Args:
            args: the arguments of the model.
            kwargs: the arguments of the model.

        Returns:
            qualified name of a layer -> the kernel that runs its first call, why other kernels cannot, and which keys
            are skipped.
        """
        found = _KernelsOfFirstCalls({id(module): name for name, module in self.model.named_modules()}, {})
        with torch.no_grad(), listen(found):
            self.model(*args, **kwargs)
        return found.explanation_by_name

    def __enter__(self) -> Used:
        self._undo.permanent = False
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Used: {type(self.model).__name__}>"


@dataclass(frozen=True, eq=False)
class _KernelsOfFirstCalls:
    """A listener that stores which kernel runs the first attention call of each layer of a model, and why.

    Attributes:
        names: id of a module -> its qualified name.
        explanation_by_name: qualified name of a layer -> the explanation of its first call.
    """

    names: dict[int, str]
    explanation_by_name: dict[str, Explanation]
    requested_statistics: frozenset[PartName] = frozenset()

    def receive(self, call: AttentionCall) -> None:
        """Store the explanation of a call if it is the first one of its layer."""
        origin = call.request.origin
        name = None if origin is None else self.names.get(id(origin.layer))
        if name is not None and name not in self.explanation_by_name:
            self.explanation_by_name[name] = explain_request(call.request)
