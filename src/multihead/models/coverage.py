"""Find attention that a model computes without transformers' AttentionInterface, where our kernels would not run.

transformers accepts `attn_implementation="multihead"` for every model, but only layers that look this name up in
`ALL_ATTENTION_FUNCTIONS` call our function. Other layers compute attention themselves, and some of them also misread
the mask that was made for our function. The bytecode of a class's forward, read once per class, shows whether the class
looks the name up.

A class computes attention itself if its name contains "attn" or "atten", its forward (with the methods and functions
that it calls in the same file) uses a softmax and a matrix product, and it does not look up `ALL_ATTENTION_FUNCTIONS`.
`nn.MultiheadAttention` and calls of PyTorch's fused attention count too. A model with such a layer is rejected with an
error that names the layer. Reading a class takes about a millisecond.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from multihead.errors import ModelError
from multihead.models.pretrained import pretrained_models

IMPLEMENTATION_NAME = "multihead"
"""Name of this library's attention in transformers."""

_LOAD_OPCODES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR"})
_FUSED_FUNCTIONS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
_SOFTMAX_NAME = re.compile(r"softmax|logsumexp|mra2_attention", re.IGNORECASE)
_MATRIX_PRODUCT_NAME = re.compile(
    r"matmul|bmm|einsum|irfft|natten|mra2_attention"
)  # irfft is used for the autocorrelation of Autoformer
_ATTENTION_NAME = re.compile(r"atten|attn", re.IGNORECASE)
# Classes named after attention that do not attend from tokens to tokens, but for example to layers.
_NOT_TOKEN_ATTENTION = re.compile(r"AttentionMap$|AttentionResidual$|AttentionGRUCell$|RowAttentionPooling$")


def attention_outside_interface(model: nn.Module) -> dict[str, str]:
    """Find the submodules that compute attention without transformers' AttentionInterface.

    Attention here means softmax weights between queries and keys. Linear attention, state-space layers and deformable
    attention, whose weights do not depend on the keys, are not reported: none of our kernels could compute them.

    Args:
        model: any module; usually a Hugging Face model.

    Returns:
        qualified name of a submodule -> why it bypasses the interface, in one sentence; empty if all attention uses the
        interface.
    """
    return {
        name: reason
        for name, module in model.named_modules()
        if (reason := _reason_module_unsupported(module) or _reason_eager_differs(module)) is not None
    }


def package_of(kind: type | FunctionType) -> str:
    """Return the name of the top-level package that defines a class or a function."""
    return kind.__module__.split(".")[0]


def uses_attention_interface(kind: Any) -> bool:
    """Whether the forward of a class looks attention up in transformers' AttentionInterface."""
    return package_of(kind) not in ("multihead", "torch") and _interface_is_named(_read_class_forward(kind).names)


def whole_model_advice(module: nn.Module) -> str | None:
    """Return how to fix a call that was given a part of a Hugging Face model; None if the module is not such a part."""
    if pretrained_models(module) or not any(uses_attention_interface(type(each)) for each in module.modules()):
        return None
    return f"{type(module).__name__} is a part of a Hugging Face model: give the whole model, and name layers of it."


def first_base_using_interface(bases: tuple[Any, ...]) -> Any:
    """Return the first class whose own forward uses transformers' AttentionInterface, or None."""
    return next((base for base in bases if "forward" in vars(base) and uses_attention_interface(base)), None)


def multiplies_matrices(kind: Any) -> bool:
    """Whether the forward of a class multiplies matrices, as attention does."""
    return any(_MATRIX_PRODUCT_NAME.search(name) for name in _read_class_forward(kind).names)


@cache
def names_in_eager_attention(kind: Any) -> frozenset[str] | None:
    """Return the names of variables and the string constants in a class's eager attention; None if it is unknown."""
    functions = _read_class_forward(kind).default_functions
    names = [{*each.__code__.co_varnames, *map(str, each.__code__.co_consts)} for each in functions]
    return frozenset().union(*names) if names else None


def require_attention_interface(model: nn.Module, is_checked: Callable[[str], bool] = lambda name: True) -> None:
    """Check that attention of a model goes through transformers' AttentionInterface.

    Args:
        model: any module; usually a Hugging Face model.
        is_checked: whether the submodule with a qualified name is checked; all are by default.

    Raises:
        ModelError: a module computes attention without it; the error names the first one.
    """
    elsewhere = {name: reason for name, reason in attention_outside_interface(model).items() if is_checked(name)}
    if elsewhere:
        raise unsupported_model_error(type(model), elsewhere)


def unsupported_model_error(kind: type[nn.Module], elsewhere: dict[str, str]) -> ModelError:
    """Return the error for a model of a class whose attention would not run on our kernels.

    Args:
        kind: the class of the model.
        elsewhere: name of a submodule -> why our kernels cannot compute its attention; at least one entry.
    """
    name, reason = next(iter(elsewhere.items()))
    others = f" (and {len(elsewhere) - 1} more)" if len(elsewhere) > 1 else ""
    return ModelError(
        f"{kind.__name__} computes attention where it cannot be replaced: {name or 'the model'}{others}. {reason}",
        "Use a family that supports transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5.",
    )


def classes_without_our_attention(kind: type[nn.Module]) -> dict[str, str]:
    """Find dicts of attention classes, in a model class's module, without an entry for this library's attention.

    A model that chooses its attention class from such a dict cannot be created: transformers raises a KeyError.

    Args:
        kind: the class of a model.

    Returns:
        name of the class for eager attention in such a dict -> what is missing, in one sentence; empty if no dict lacks
        an entry.
    """
    own = vars(sys.modules.get(kind.__module__, sys))
    tables = [table for name, table in own.items() if name.endswith("ATTENTION_CLASSES")]
    names = [table["eager"].__name__ for table in tables if IMPLEMENTATION_NAME not in table]
    return {name: f"{name} is chosen by the name of the implementation, among those of transformers." for name in names}


def _reason_module_unsupported(module: nn.Module) -> str | None:
    """Return why a module's attention would not run on our kernels; None if it would, or the module has none."""
    kind: Any = type(module)
    own = vars(module).get("forward")
    if own is None or package_of(kind) in ("multihead", "torch"):
        return _reason_class_unsupported(kind)
    replaced = _reason_code_unsupported(kind, _read_forward_code(kind, own, vars(module)), kind.__mro__)
    return replaced and f"The forward of this {kind.__name__} was replaced. {replaced}"


def _reason_eager_differs(module: nn.Module) -> str | None:
    """Return why a custom class's eager attention is not the function that we compute; None if it is.

    Our kernels would ignore whatever a custom eager attention adds, such as a bias. Classes of transformers itself are
    not tested here: `python -m tools.families` compares their outputs.
    """
    kind: Any = type(module)
    if package_of(kind) in ("multihead", "torch", "transformers"):
        return None
    for function in _read_class_forward(kind).default_functions:
        if package_of(function) != "transformers" and not _computes_softmax_attention(function, module):
            return (
                f"The eager attention of {kind.__name__}, {function.__name__}, computes something else than "
                "softmax(scaling * q k' + mask) v."
            )
    return None


def _computes_softmax_attention(function: FunctionType, module: nn.Module) -> bool:
    """Whether an eager attention function computes softmax(scaling * q k' + mask) v, tried on a small call."""
    groups, device = getattr(module, "num_key_value_groups", 1), next(module.parameters(), torch.zeros(())).device
    numbers = torch.arange(2.0 * (groups + 2) * 3 * 4, device=device).sin()
    q, k, v = numbers.view(2, groups + 2, 3, 4).split((groups, 1, 1), 1)  # (batch, heads, tokens, head_dim)
    mask = torch.full((3, 3), -torch.inf, device=device).triu(1)[None, None]
    mask = mask.clamp(min=torch.finfo(mask.dtype).min)
    try:
        with torch.no_grad():
            found = function(module, q, k, v, mask, scaling=0.7, dropout=0.0)[0]
    except Exception:  # noqa: BLE001 - the function needs other arguments
        return False
    expected = ((0.7 * q @ k.mT + mask).softmax(-1) @ v).transpose(1, 2)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


@cache
def _reason_class_unsupported(kind: Any) -> str | None:
    if package_of(kind) == "multihead":
        return None
    if kind is nn.MultiheadAttention:
        return "torch.nn.MultiheadAttention computes its attention itself; mh.use and mh.observe replace it."
    if issubclass(kind, nn.MultiheadAttention):
        return f"{kind.__name__} may replace the forward of torch.nn.MultiheadAttention."
    if package_of(kind) == "torch":
        return None
    return _reason_code_unsupported(kind, _read_class_forward(kind), kind.__mro__[1:])


def _reason_code_unsupported(kind: Any, code: _ForwardCode, bases: tuple[Any, ...]) -> str | None:
    """Return why attention in the code of a forward would not run on our kernels, or None.

    Args:
        kind: the class of the module.
        code: the names and attention functions that the forward uses.
        bases: the classes whose forward this forward replaces.
    """
    if code.called_functions:
        return f"{kind.__name__} calls {min(code.called_functions)} itself."
    if _interface_is_named(code.names) or _NOT_TOKEN_ATTENTION.search(kind.__name__):
        return None
    if fused := code.names & _FUSED_FUNCTIONS:
        return f"{kind.__name__} calls torch's {min(fused)} itself."
    if (
        any(_ATTENTION_NAME.search(base.__name__) for base in kind.__mro__)
        and any(_SOFTMAX_NAME.search(name) for name in code.names)
        and any(_MATRIX_PRODUCT_NAME.search(name) for name in code.names)
    ):
        return f"{kind.__name__} computes its weights itself, without transformers' AttentionInterface."
    if (base := first_base_using_interface(bases)) is not None:
        return f"{kind.__name__} replaces the forward of {base.__name__}, which calls transformers' AttentionInterface."
    return None


def _interface_is_named(names: set[str]) -> bool:
    # `getattr(ALL_ATTENTION_FUNCTIONS, name, eager)` always returns the default: the names are keys, not attributes.
    return "ALL_ATTENTION_FUNCTIONS" in names and ("getattr" not in names or "get_interface" in names)


@dataclass(eq=False)
class _ForwardCode:
    """Names and functions in the code of a forward, and in the methods and functions that it uses from the same files.

    Attributes:
        names: all names of variables, functions and attributes in this code.
        called_functions: names of the attention functions that this code calls directly, such as eager attention.
        default_functions: attention functions to which this code refers, which AttentionInterface returns for eager
            attention.
    """

    names: set[str] = field(default_factory=set)
    called_functions: set[str] = field(default_factory=set)
    default_functions: set[FunctionType] = field(default_factory=set)


@cache
def _read_class_forward(kind: Any) -> _ForwardCode:
    """Return the names and attention functions that the forward of a class uses."""
    return _read_forward_code(kind, kind.forward, {})


def _read_forward_code(kind: Any, forward: Any, own: dict[str, Any]) -> _ForwardCode:
    """Return the names and attention functions that a forward uses.

    Args:
        kind: the class of the module.
        forward: a function or method, a partial of one, or a wrapper around one.
        own: the instance attributes of the module.
    """
    files = {base.__module__ for base in kind.__mro__ if base is not nn.Module} | {getattr(forward, "__module__", "")}
    code = _ForwardCode()
    waiting = [(forward, True)]  # objects, and whether their code is read even if they are defined in another file
    seen: set[FunctionType] = set()  # not their code, which wrappers of different functions share
    for given, from_any_file in waiting:  # the body appends what the code refers to
        function = _unwrap_function(given)
        if isinstance(function, partial):
            parts = (function.func, *function.args, *function.keywords.values())
            waiting += [(each, True) for each in parts]
        if not inspect.isfunction(function) or function in seen:
            continue
        if function.__module__ not in files and not from_any_file:
            continue
        seen.add(function)
        used, called = _names_of_code(function.__code__)
        code.names |= used
        found = [function.__globals__.get(name) for name in used]
        for name in used:
            attention = _attention_functions(name, function.__globals__.get(name), found)
            if attention and name in called and not _is_attention_function(function):
                code.called_functions.add(name)
            code.default_functions |= attention
        found += [inspect.getattr_static(kind, name, None) for name in used]
        if "__class__" in function.__code__.co_freevars:  # super() runs methods of the base classes
            found += [vars(base).get(name) for name in used for base in kind.__mro__[1:]]
        held = [own.get(name) for name in used] + [_closure_cell_content(cell) for cell in function.__closure__ or ()]
        waiting += [(each, False) for each in found] + [(each, True) for each in held if callable(each)]
    return code


def _unwrap_function(given: Any) -> Any:
    """Return the function of a method, or the innermost `__wrapped__` function of a wrapper."""
    while True:
        function = getattr(given, "__func__", given)  # the function of a static method or a class method
        if inspect.isfunction(function) or isinstance(function, partial) or not hasattr(function, "__wrapped__"):
            return function
        given = function.__wrapped__


def _closure_cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # the cell is empty


def _attention_functions(name: str, function: Any, others: list[Any]) -> set[FunctionType]:
    """Return the attention functions among `function` and the functions called `name` in the modules of `others`."""
    functions = [function, *(getattr(each, name, None) for each in others if inspect.ismodule(each))]
    return {each for each in functions if _is_attention_function(each)}


def _is_attention_function(function: Any) -> bool:
    """Whether a function takes (module, query, key, value), as functions in transformers' AttentionInterface do."""
    return inspect.isfunction(function) and function.__code__.co_varnames[:4] == ("module", "query", "key", "value")


def _names_of_code(code: CodeType) -> tuple[set[str], set[str]]:
    """Return all names in a code object and its nested code, and the called names; `a @ b` counts as matmul."""
    names = {*code.co_names, *code.co_freevars}
    calls: set[str] = set()
    steps = list(dis.get_instructions(code))
    for index, step in enumerate(steps):
        if step.opname == "BINARY_OP" and step.argrepr == "@":
            names.add("matmul")
        # A call pushes NULL next to the called function: after it since Python 3.13, before it until 3.12.
        if step.opname == "PUSH_NULL" or (step.opname in _LOAD_OPCODES and "NULL" in step.argrepr):
            first = index + (step.opname == "PUSH_NULL") * (-1 if sys.version_info >= (3, 13) else 1)
            attributes = takewhile(lambda each: each.opname == "LOAD_ATTR", steps[first + 1 :])
            calls |= {str(each.argval) for each in (steps[first], *attributes) if each.opname in _LOAD_OPCODES}
        elif step.opname == "LOAD_METHOD":
            calls.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, inner_calls = _names_of_code(constant)
            names |= inner
            calls |= inner_calls
    return names, calls
