"""Find attention that a model computes without transformers' AttentionInterface, where our kernels would not run.

transformers accepts the name of an attention for every model, but only layers that look the name up in
`ALL_ATTENTION_FUNCTIONS` call the function of that name. Other layers compute attention themselves. Some of them also
misread the mask, which is made for the function of that name. Whether a class looks the name up is read from the code
of its forward, once per class.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from multihead.errors import ModelError

_FUSED = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
_SOFTMAX = re.compile(r"softmax|logsumexp|mra2_attention", re.IGNORECASE)
_PRODUCT = re.compile(r"matmul|bmm|einsum|irfft|natten|mra2_attention")  # irfft: the autocorrelation of Autoformer
_ATTENTION = re.compile(r"atten|attn", re.IGNORECASE)
# Weights over layers, over a map without values, or without queries: no attention between tokens.
_OF_SOMETHING_ELSE = re.compile(r"AttentionMap$|AttentionResidual$|AttentionGRUCell$|RowAttentionPooling$")


def attention_elsewhere(model: nn.Module) -> dict[str, str]:
    """Find the submodules that compute attention without transformers' AttentionInterface.

    Attention here means softmax weights between queries and keys. Linear attention, state-space layers and deformable
    attention, whose weights are no function of the keys, are not reported: no kernel of ours could compute them.

    Args:
        model: any module; usually a Hugging Face model.

    Returns:
        one sentence with the reason per qualified name; empty if all attention goes through the interface.
    """
    return {name: reason for name, module in model.named_modules() if (reason := _reason(module.__class__)) is not None}


def looks_up(kind: Any) -> bool:
    """Whether modules of a class look their attention up in transformers' AttentionInterface."""
    return kind.__module__.split(".")[0] not in ("multihead", "torch") and _look_up(_names_of_forward(kind))


def require_coverage(model: nn.Module) -> None:
    """Check that all attention of a model goes through transformers' AttentionInterface.

    Raises:
        ModelError: some does not; the error names the first such module.
    """
    elsewhere = attention_elsewhere(model)
    if elsewhere:
        raise rejection(type(model), elsewhere)


def rejection(kind: type[nn.Module], elsewhere: dict[str, str]) -> ModelError:
    """Return the error for a model of a class whose attention would not run on our kernels.

    Args:
        kind: the class of the model.
        elsewhere: the reason per name of an attention that would not; at least one.
    """
    name, reason = next(iter(elsewhere.items()))
    others = f" (and {len(elsewhere) - 1} more)" if len(elsewhere) > 1 else ""
    return ModelError(
        f"{kind.__name__} computes attention where it cannot be replaced: {name or 'the model'}{others}. {reason}",
        "Use a family that supports transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5.",
    )


def chosen_by_name(kind: type[nn.Module], implementation: str) -> dict[str, str]:
    """Find attention classes that a model class looks up by the name of an implementation, in a dict of its file.

    Such a model cannot be created with another name: transformers raises a KeyError.

    Args:
        kind: the class of a model.
        implementation: the name.

    Returns:
        one sentence with the reason per class for eager attention; empty if every dict has the name, or there is none.
    """
    tables = vars(sys.modules.get(kind.__module__, sys)).items()
    without = [
        table["eager"] for name, table in tables if name.endswith("ATTENTION_CLASSES") and implementation not in table
    ]
    return {
        each.__name__: f"{each.__name__} is chosen by the name of the implementation, among those of transformers."
        for each in without
    }


@cache
def _reason(kind: Any) -> str | None:
    """Return why attention in modules of a class would not run on our kernels; None if it would, or if it has none."""
    if kind.__module__.split(".")[0] == "multihead":
        return None
    if issubclass(kind, nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention computes its attention itself."
    if kind.__module__.split(".")[0] == "torch":
        return None
    names = _names_of_forward(kind)
    if _look_up(names) or _OF_SOMETHING_ELSE.search(kind.__name__):
        return None
    if fused := names & _FUSED:
        return f"{kind.__name__} calls torch's {min(fused)} itself."
    if (
        _ATTENTION.search(kind.__name__)
        and any(_SOFTMAX.search(name) for name in names)
        and any(_PRODUCT.search(name) for name in names)
    ):
        return f"{kind.__name__} computes its weights itself, without transformers' AttentionInterface."
    return None


def _look_up(names: frozenset[str]) -> bool:
    # `getattr(ALL_ATTENTION_FUNCTIONS, name, eager)` always returns the default: the names are keys, not attributes.
    return "ALL_ATTENTION_FUNCTIONS" in names and ("getattr" not in names or "get_interface" in names)


@cache
def _names_of_forward(kind: Any) -> frozenset[str]:
    """Return all names in a class's forward, and in the methods and functions of the same files that it uses."""
    files = {base.__module__ for base in kind.__mro__ if base is not nn.Module}
    names: set[str] = set()
    waiting: list[Any] = [kind.forward]
    seen: set[CodeType] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        function = getattr(function, "__func__", function)  # that of a static method or a class method
        if not inspect.isfunction(function) or function.__code__ in seen:
            continue
        if function.__module__ not in files and function is not kind.forward:
            continue
        seen.add(function.__code__)
        own = _names_of_code(function.__code__)
        names |= own
        waiting += [inspect.getattr_static(kind, name, None) for name in own]
        waiting += [function.__globals__.get(name) for name in own]
    return frozenset(names)


def _names_of_code(code: CodeType) -> frozenset[str]:
    """Return the names in a code object and in those nested in it; `a @ b` is named matmul."""
    names = {*code.co_names, *code.co_freevars}
    names |= {"matmul" for step in dis.get_instructions(code) if step.opname == "BINARY_OP" and step.argrepr == "@"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_of_code(constant)
    return frozenset(names)
