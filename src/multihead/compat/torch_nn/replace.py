"""Replace every nn.MultiheadAttention of a model by the drop-in, and subclass PyTorch's transformers to use it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from torch import nn

from multihead.compat.torch_nn.attention import MultiheadAttention, set_fused_path
from multihead.errors.given import check_module
from multihead.tensors.undo import Undo

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Replaced(Generic[Model]):
    """A model whose attention was replaced; `str()` lists it, `restore()` or leaving a `with` block undoes it.

    Attributes:
        model: the model with drop-ins.
        names: names of the modules that were replaced, "" for the model itself.
        left: for each nn.MultiheadAttention that was not replaced, its name and the reason.

    >>> replaced = replace(nn.TransformerEncoderLayer(8, 2))
    >>> replaced.names, replaced.left
    (('self_attn',), {})
    >>> type(replaced.restore().self_attn) is nn.MultiheadAttention
    True
    """

    model: Model
    names: tuple[str, ...]
    left: dict[str, str]
    _undo: Undo

    def __post_init__(self) -> None:
        self._undo.permanent = True  # deleting the handle must not restore the model

    def restore(self) -> Model:
        """Change each replaced module back to the original class, with its current parameters."""
        self._undo.close()
        return self.model

    def __enter__(self) -> Replaced[Model]:
        self._undo.permanent = False
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def __str__(self) -> str:
        count = len(self.names)
        lines = [f"{count or 'No'} nn.MultiheadAttention {'was' if count < 2 else 'were'} replaced."]
        lines += [f"  {name or 'the model itself'}" for name in self.names]
        lines += [f"  {name or 'the model itself'} was not: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def replace(model: Model, *, inplace: bool = False) -> Replaced[Model]:
    """Replace every nn.MultiheadAttention of a model, the model itself included, by the drop-in.

    The parameters are the same objects, so an optimizer that holds them keeps working; hooks, device, dtype, mode and
    requires_grad are kept. Subclasses and modules whose forward was overridden are not replaced; the result lists them
    as `left`.

    Args:
        model: any model.
        inplace: whether to change the model itself, or a copy that shares its parameters and buffers.

    Returns:
        the model and the names of the replaced modules.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 2, enable_nested_tensor=False)
    >>> print(replaced := replace(encoder, inplace=True))
    2 nn.MultiheadAttention were replaced.
      layers.0.self_attn
      layers.1.self_attn
    >>> replaced.restore() is encoder
    True
    """
    check_module(model)
    if not inplace:
        shared = chain(model.parameters(), model.buffers())
        model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    replaced: dict[str, nn.MultiheadAttention] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or isinstance(module, MultiheadAttention):
            continue
        if type(module) is not nn.MultiheadAttention:
            left[name] = f"it is a {type(module).__name__}, whose forward may differ."
        elif "forward" in module.__dict__:
            left[name] = "its forward was set on the instance."
        else:
            replaced[name] = module
    undo = Undo.run_change(partial(_make_drop_ins, replaced.values()))
    return Replaced(model, tuple(replaced), left, undo)


def replace_until_undone(undo: Undo, model: nn.Module) -> None:
    """Replace every nn.MultiheadAttention of a model in place, until `undo` restores them."""
    # A module may be a drop-in already, from an earlier use that ends before this one.
    _make_drop_ins(filter(can_replace, model.modules()), undo)


def can_replace(module: nn.Module) -> bool:
    """Whether a module is an nn.MultiheadAttention, or a drop-in, with the forward of its class."""
    return type(module) in (nn.MultiheadAttention, MultiheadAttention) and "forward" not in module.__dict__


def set_drop_in(module: Any, *, is_drop_in: bool) -> None:
    """Make an nn.MultiheadAttention a drop-in for good, or restore a module that this function made one."""
    if is_drop_in and type(module) is nn.MultiheadAttention:
        module.__dict__["was_made_drop_in"] = True
        module.__class__ = MultiheadAttention
    elif not is_drop_in and module.__dict__.pop("was_made_drop_in", False):
        module.__class__ = nn.MultiheadAttention
    set_fused_path(module)


def _make_drop_ins(modules: Iterable[Any], undo: Undo) -> None:
    """Make each nn.MultiheadAttention a drop-in until undone, which keeps encoder layers off their fused path."""
    for module in modules:
        undo.add_step(partial(set_fused_path, module))
        undo.set_attribute(module, "__class__", MultiheadAttention)
        set_fused_path(module)


class _AttentionReplacedOnInit(nn.Module):
    """Mixin for a PyTorch transformer: replaces the nn.MultiheadAttention in it on creation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace(self, inplace=True)


class TransformerEncoderLayer(_AttentionReplacedOnInit, nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer with the drop-in as `self_attn` and the same arguments.

    >>> import torch
    >>> TransformerEncoderLayer(16, 2, batch_first=True)(torch.randn(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """


class TransformerDecoderLayer(_AttentionReplacedOnInit, nn.TransformerDecoderLayer):
    """nn.TransformerDecoderLayer with the drop-in as `self_attn` and `multihead_attn`, and the same arguments.

    >>> import torch
    >>> layer = TransformerDecoderLayer(16, 2, batch_first=True)
    >>> layer(torch.randn(3, 5, 16), torch.randn(3, 7, 16)).shape
    torch.Size([3, 5, 16])
    """


class TransformerEncoder(_AttentionReplacedOnInit, nn.TransformerEncoder):
    """nn.TransformerEncoder with the drop-in as its attention, and the same arguments.

    In eval without gradients padding tokens are removed before the first layer, as in the original, and their outputs
    are 0.

    >>> import torch
    >>> layer = TransformerEncoderLayer(16, 2, batch_first=True)
    >>> TransformerEncoder(layer, num_layers=2)(torch.randn(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """


class Transformer(_AttentionReplacedOnInit, nn.Transformer):
    """nn.Transformer with the drop-in as the attention of encoder and decoder, and the same arguments.

    >>> import torch
    >>> model = Transformer(16, 2, 1, 1, 32, batch_first=True)
    >>> model(torch.randn(3, 5, 16), torch.randn(3, 4, 16)).shape
    torch.Size([3, 4, 16])
    """
