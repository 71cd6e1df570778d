"""Check arguments, and reject unknown keywords with an error that names the keyword to use instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from math import isfinite
from typing import Any, NoReturn, ParamSpec, TypeVar

from multihead.errors import ArgumentError

KEEP_OR_DROP_ADVICE = (
    "mask=masks.Keep(t) if True may be seen, mask=masks.Drop(t) if True is hidden, bias=t if it is added to the scores"
)
KEYWORD_REPLACEMENTS = {
    "is_causal": "mask=masks.Causal()",
    "causal": "mask=masks.Causal()",
    "attn_mask": KEEP_OR_DROP_ADVICE,
    "attn_bias": "bias=t",
    "dropout_p": "dropout=",
    **dict.fromkeys(("sliding_window", "window", "window_size"), "mask=masks.Causal() & masks.Window(size)"),
    "alibi_slopes": "bias=, or position_bias=mh.scores.ALiBi(num_heads) of mh.MultiHeadAttention",
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens", "document_ids"), "mask=masks.Documents(lengths)"),
}
"""Argument names of other libraries -> what to use in this library, for functions and layers."""

FUNCTION_REPLACEMENTS = KEYWORD_REPLACEMENTS | {
    "key_padding_mask": 'mask=masks.Lengths(...), or mask=masks.Drop(key_padding_mask, "batch keys")',
    "attention_mask": 'mask=masks.Keep(attention_mask.bool(), "batch keys")',
    **dict.fromkeys(("valid_lens", "seq_lens", "lengths"), "mask=masks.Lengths(...)"),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), "scale="),
    "score_mod": "bias=, softcap= or sinks=",
    "block_mask": "mask=, a value of multihead.masks",
    "enable_gqa": "k and v with fewer heads than q; no argument is needed",
    "need_weights": "mh.attention_weights(q, k), which computes the weights",
    "s_aux": "sinks=",
}
LAYER_REPLACEMENTS = KEYWORD_REPLACEMENTS | {
    "key_padding_mask": (
        "lengths=, the number of tokens of each sample (memory_lengths= for a memory), or "
        'mask=masks.Drop(key_padding_mask, "batch keys")'
    ),
    "attention_mask": 'lengths=attention_mask.sum(1), with padding_side="left" where the padding comes first',
    **dict.fromkeys(
        ("src_key_padding_mask", "valid_lens", "valid_len", "seq_lens", "seq_len", "sequence_lengths"),
        "lengths=, the number of tokens of each sample",
    ),
    **dict.fromkeys(
        ("context", "encoder_hidden_states", "key_value_states", "cross_attention_states", "kv"),
        "memory=, the tokens that give keys and values",
    ),
    **dict.fromkeys(("key_mask", "attn_padding_mask"), 'mask=masks.Keep(t, "batch keys") if True may be seen'),
    "need_weights": "mh.observe(layer), which computes the weights",
    "average_attn_weights": "mh.observe(layer), which computes the weights",
    "output_attentions": "mh.observe(layer), which computes the weights",
    "return_attention_scores": "mh.observe(layer), which computes the weights",
    "past_key_value": "cache=mh.KeyValueCache()",
    "past_key_values": "cache=mh.KeyValueCache()",
    "use_cache": "cache=mh.KeyValueCache()",
    "position_ids": "query_start=, the position of the first query",
    "query": "layer(x), layer(x, memory) or layer(x, memory, values)",
    "key": "layer(x), layer(x, memory) or layer(x, memory, values)",
    "value": "layer(x), layer(x, memory) or layer(x, memory, values)",
}
CONSTRUCTOR_REPLACEMENTS = {
    **dict.fromkeys(("d_model", "dim", "hidden_size", "model_dim", "n_embd", "num_hiddens", "query_dim"), "embed_dim="),
    **dict.fromkeys(("h", "heads", "n_head", "n_heads", "nhead", "num_attention_heads"), "num_heads="),
    "dim_head": "head_dim=",
    "kdim": "key_dim=",
    "vdim": "value_dim=",
    "batch_first": "inputs of shape (batch, length, features); no argument is needed",
    "is_causal": "mask=masks.Causal() in each call",
    "causal": "mask=masks.Causal() in each call",
    "qkv_bias": "bias=",
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "kv_heads", "num_query_groups"), "num_kv_heads="),
    **dict.fromkeys(("rope", "rotary_emb", "use_rope", "rotary_embedding"), "rotary=mh.Rotary()"),
    **dict.fromkeys(("alibi", "use_alibi"), "position_bias=mh.scores.ALiBi(num_heads)"),
    **dict.fromkeys(
        ("window", "window_size", "sliding_window"), "mask=masks.Causal() & masks.Window(size) in each call"
    ),
    **dict.fromkeys(("attn_drop", "attention_dropout", "dropout_p", "attn_dropout"), "dropout="),
    **dict.fromkeys(("head_size", "d_head", "dim_per_head"), "head_dim="),
    **dict.fromkeys(("bias_k", "bias_v"), "add_bias_kv="),
    **dict.fromkeys(("max_seq_len", "max_len"), "mh.KeyValueCache(capacity=...) in each call"),
}
_ARGUMENTS_OF_D2L = frozenset({"key_size", "query_size", "value_size", "num_hiddens"})  # Dive into Deep Learning


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def rejects_unknown_keywords(
    replacements: Mapping[str, str],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that rejects unknown keywords before Python raises its own TypeError."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        known = frozenset(inspect.signature(function).parameters)

        @wraps(function)
        def checked(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
            if unknown := {name: value for name, value in named.items() if name not in known}:
                raise_unknown_keywords(function, unknown, replacements)
            return function(*args, **named)

        return checked

    return decorate


def raise_unknown_keywords(
    function: Callable[..., Any], unknown: Mapping[str, Any], replacements: Mapping[str, str]
) -> NoReturn:
    """Raise an ArgumentError for keywords that a function does not have, with what to use instead."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ours = [each.name for each in inspect.signature(function).parameters.values() if each.kind not in kinds]
    ours = [each for each in ours if each != "self"]
    if len(_ARGUMENTS_OF_D2L & unknown.keys()) > 1:
        mends = ["multihead.compat.d2l.MultiHeadAttention is the class with these arguments."]
    else:
        mends = _advice_for_keywords(list(unknown), ours, replacements)
    place, names = function.__qualname__.removesuffix(".__init__"), " or ".join(map(repr, unknown))
    raise ArgumentError(f"{place} has no argument {names}.", " ".join(mends))


def _advice_for_keywords(names: list[str], ours: list[str], replacements: Mapping[str, str]) -> list[str]:
    """Return the advice for unknown keywords: the replacement or a similar name of each, else all names, once."""
    found: dict[str, str] = {}
    for name in names:
        near = difflib.get_close_matches(name, ours, n=1)
        if name in replacements:
            found[name] = f"Use {replacements[name]}"
        elif near:
            found[name] = f"Did you mean {near[0]}="
    ends = [each + ("?" if each.startswith("Did") else ".") for each in found.values()]
    if len(names) > 1 and len(set(ends)) > 1:
        ends = [f"For {name}: {each[0].lower()}{each[1:]}" for name, each in zip(found, ends, strict=True)]
    unanswered = [] if len(found) == len(names) else [f"Its arguments are {', '.join(ours)}."]
    return [*dict.fromkeys(ends), *unanswered]


def check_fraction(name: str, value: object) -> None:
    """Reject a value that is not a number from 0 to 1.

    >>> check_fraction("dropout", 0.1)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ArgumentError(f"{name} is {value!r}.", "Give a number from 0 to 1.")


def check_integer(name: str, value: object, *, least: int = 1) -> None:
    """Reject a value that is not an integer, or that is smaller than `least`.

    >>> check_integer("num_heads", 8)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} is {value!r}.", f"Give an integer of at least {least}.")


def reject_scripting(module: object) -> NoReturn:
    """Raise an ArgumentError; torch.jit.script calls this function as `__prepare_scriptable__` of a module."""
    kind = type(module)
    raise ArgumentError(
        f"torch.jit.script cannot compile {kind.__module__}.{kind.__qualname__}: its masks and the choice of its "
        "kernel are Python objects, which TorchScript does not support.",
        "Use torch.export.export, torch.compile or torch.jit.trace.",
    )


def check_scale(scale: object) -> None:
    """Reject a value that is neither a finite number nor None.

    >>> check_scale(0.125)
    """
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float)) or not isfinite(scale)):
        raise ArgumentError(f"scale is {scale!r}.", "Give a finite number, or None for 1 / sqrt(head_dim).")


def check_slice(name: str, value: object) -> None:
    """Reject a value that is not a slice of integers with a positive step.

    >>> check_slice("queries", slice(0, 64))
    """
    bounds = (value.start, value.stop, value.step) if isinstance(value, slice) else (value,)
    if isinstance(value, slice) and all(each is None or _is_integer(each) for each in bounds):
        if value.step is None or value.step > 0:
            return
        raise ArgumentError(
            f"{name} is {value!r}, whose step is not positive.", "Give a slice with a step of 1 or more."
        )
    one = f"slice({value}, {value + 1})" if _is_integer(value) and value >= 0 else "slice(3, 4)"  # type: ignore[operator]
    raise ArgumentError(
        f"{name} is {value!r}, and must be a slice of integers.",
        f"Give {name}={one} for one, {name}=slice(0, 64) for several in a row, and index the result for others.",
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def join_first(names: Sequence[str], most: int) -> str:
    """Return the first `most` names separated by commas, and how many more there are.

    >>> join_first(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
