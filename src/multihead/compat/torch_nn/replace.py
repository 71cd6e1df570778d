"""Exchange every nn.MultiheadAttention of a model for the drop-in, list them, and undo it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Generic, TypeVar

from torch import nn

from multihead.compat.torch_nn.attention import MultiheadAttention, keep_from_bypassing, let_bypass

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Replaced(Generic[Model]):
    """A model whose attention was exchanged; `str()` lists it, `restore()` or leaving a `with` block undoes it.

    Fields:
        model: the model with drop-ins.
        names: of the modules that were exchanged, the model itself being "".
        left: for each nn.MultiheadAttention that stays, why, in words.
    """

    model: Model
    names: tuple[str, ...]
    left: dict[str, str]

    def restore(self) -> Model:
        """Make each exchanged module the original again, with the parameters that it has now."""
        for name in self.names:
            module = self.model.get_submodule(name)
            if type(module) is MultiheadAttention:
                _become(module, nn.MultiheadAttention)
        return self.model

    def __enter__(self) -> Replaced[Model]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __str__(self) -> str:
        count = len(self.names)
        lines = [f"{count or 'No'} nn.MultiheadAttention {'was' if count < 2 else 'were'} exchanged."]
        lines += [f"  {name or 'the model itself'}" for name in self.names]
        lines += [f"  {name or 'the model itself'} stays: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def replace(model: Model, *, inplace: bool = False) -> Replaced[Model]:
    """Exchange every nn.MultiheadAttention of a model, the model itself included, for the drop-in.

    Parameters stay the very same, so an optimizer that has them goes on; hooks, device, dtype, mode and
    requires_grad stay too. Subclasses and modules with a forward of their own stay what they are, and are listed.

    Args:
        model: any model.
        inplace: whether the model itself is changed. Otherwise a copy is, which shares its parameters and buffers.

    Returns: the model and the names of what was exchanged.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 2, enable_nested_tensor=False)
    >>> print(replaced := replace(encoder, inplace=True))
    2 nn.MultiheadAttention were exchanged.
      layers.0.self_attn
      layers.1.self_attn
    >>> replaced.restore() is encoder
    True
    """
    if not inplace:
        shared = chain(model.parameters(), model.buffers())
        model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    names, left = [], {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or isinstance(module, MultiheadAttention):
            continue
        if type(module) is not nn.MultiheadAttention:
            left[name] = f"it is a {type(module).__name__}, whose forward may be another."
        elif "forward" in module.__dict__:
            left[name] = "its forward was set on the instance."
        else:
            _become(module, MultiheadAttention)
            names.append(name)
    return Replaced(model, tuple(names), left)


def _become(module: nn.Module, kind: type[nn.MultiheadAttention]) -> None:
    """Change the class of a module. The drop-in has the original's attributes and one hook: the object stays."""
    module.__class__ = kind
    assert isinstance(module, nn.MultiheadAttention)
    if kind is MultiheadAttention:
        keep_from_bypassing(module)
    else:
        let_bypass(module)
