"""Find the attention layers of a model before it runs, and the heads that names such as "L17 H4" stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from torch import nn

from multihead.errors import ArgumentError, ModelError
from multihead.errors.arguments import join_first
from multihead.errors.given import check_module
from multihead.models.coverage import require_attention_interface, uses_attention_interface, whole_model_advice
from multihead.models.pretrained import pretrained_models

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attention_heads_per_layer", "h")
_HEAD_NAME = re.compile(r"[Ll](\d+)(?:\s*[Hh](\d+))?")
_HEAD_ADVICE = 'Give for example "L17 H4", (17, 4), "L17" for a layer, a list of them, or what seen.find(...) returns.'


@runtime_checkable
class NamedHead(Protocol):
    """A head that a record found, as `Record.find`, `kinds` and `nearest` return it."""

    @property
    def head(self) -> int:
        """Index of the head in the layer."""

    @property
    def name(self) -> str:
        """Name of the layer."""


Head: TypeAlias = "str | tuple[int | str, int] | NamedHead"
"""A head: "L17 H4", (17, 4), (name of the layer, 4), or a head that a record found; or a layer: "L17"."""


class HeadKey(NamedTuple):
    """A head, or all heads of a layer.

    Attributes:
        layer: number of the layer, as tables have it, or its name.
        head: index of the head; None for all heads of the layer.
    """

    layer: int | str
    head: int | None

    def __str__(self) -> str:
        layer = f"L{self.layer}" if isinstance(self.layer, int) else self.layer
        return layer if self.head is None else f"{layer} H{self.head}"


class AttentionLayer(NamedTuple):
    """A module that computes attention.

    Attributes:
        number: index among the attention layers, in the order of the modules. Tables number layers in the order in
            which they run, which is the same in most models.
        name: qualified name of the module.
        num_heads: number of query heads; None if unknown before the layer runs.
    """

    number: int
    name: str
    num_heads: int | None


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Return the attention layers of a model: layers of this library, its drop-ins, and Hugging Face layers.

    Raises:
        ModelError: the model has none, or is of an unsupported family.
    """
    inside = bool(pretrained_models(model))
    found: list[AttentionLayer] = []
    for name, module in model.named_modules():
        ours = type(module).__module__.startswith("multihead.")
        heads = _count_heads(module)
        torch_layer = inside and type(module) is nn.MultiheadAttention  # replaced while the context is active
        if (ours and heads is not None) or torch_layer or (inside and uses_attention_interface(type(module))):
            found.append(AttentionLayer(len(found), name or type(module).__name__, heads))
    if not found:
        if inside:
            require_attention_interface(model)  # raises for an unsupported family
        raise ModelError(
            f"{type(model).__name__} has no attention layer of this library or of a Hugging Face model.",
            whole_model_advice(model)
            or "Call multihead.compat.torch_nn.replace(model, inplace=True) for layers of torch.nn, or build the model "
            "with mh.MultiHeadAttention.",
        )
    return found


def _count_heads(module: Any) -> int | None:
    """Return the number of query heads of an attention layer; None if no attribute of the module contains it."""
    q_proj, head_dim = getattr(module, "q_proj", None), getattr(module, "head_dim", None)
    if isinstance(q_proj, nn.Linear) and isinstance(head_dim, int) and q_proj.out_features % head_dim == 0:
        return q_proj.out_features // head_dim  # not always the number in the configuration
    for owner in (module, getattr(module, "config", None)):
        for name in _HEAD_COUNTS:
            count = getattr(owner, name, None)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return None


def resolve_heads(model: nn.Module, heads: Head | Iterable[Head]) -> list[HeadKey]:
    """Return the heads that the argument of `mh.ablate` names, each once.

    Raises:
        ArgumentError: the argument names no head, or one that does not exist; the error names the nearest that does.
        ModelError: the model has no attention layers.
    """
    check_module(model)
    single = isinstance(heads, str | NamedHead) or _is_pair(heads)
    if not single and (isinstance(heads, Mapping) or not isinstance(heads, Iterable)):
        raise ArgumentError(f"The heads are {heads!r}.", _HEAD_ADVICE)
    items: list[Any] = [heads] if single else list(heads)  # type: ignore[arg-type]
    keys = [parse_head(item) for item in items]
    if not keys:
        raise ArgumentError("No head is named.", _HEAD_ADVICE)
    layers = attention_layers(model)
    return list(dict.fromkeys(_check_key_exists(model, key, layers) for key in keys))


def parse_head(head: Head) -> HeadKey:
    """Return the key of one head or layer.

    Raises:
        ArgumentError: it is not the name of a head.

    >>> parse_head("L17 H4"), parse_head((2, 0)), parse_head("L3")
    (HeadKey(layer=17, head=4), HeadKey(layer=2, head=0), HeadKey(layer=3, head=None))
    """
    if isinstance(head, HeadKey):
        return head
    if isinstance(head, str) and (match := _HEAD_NAME.fullmatch(head.strip())) is not None:
        layer, index = match.groups()
        return HeadKey(int(layer), None if index is None else int(index))
    if _is_pair(head):
        first, index = cast("tuple[int | str, int]", head)
        if isinstance(first, str) and (match := _HEAD_NAME.fullmatch(first.strip())) is not None and match[2] is None:
            first = int(match[1])
        return HeadKey(first, int(index))
    if isinstance(head, NamedHead):
        return HeadKey(head.name, head.head)
    raise ArgumentError(f"{head!r} is not the name of a head.", _HEAD_ADVICE)


def _is_pair(value: object) -> bool:
    """Whether a value is (layer, head)."""
    if not isinstance(value, tuple) or isinstance(value, HeadKey) or len(value) != 2:
        return isinstance(value, HeadKey)
    first, second = value
    return isinstance(first, int | str) and isinstance(second, int) and not isinstance(first, bool)


def _check_key_exists(model: nn.Module, key: HeadKey, layers: list[AttentionLayer]) -> HeadKey:
    """Return a key with the qualified name of its layer if it has a name; reject a head that no layer can have."""
    if isinstance(key.layer, str):
        module, sign, count = key.layer.partition("#")  # a further call of a layer is named "name#2"
        named = [each for each in layers if _is_same_module(each.name, module)]
        if len(named) != 1:
            raise ArgumentError(
                f"The model has {len(named) or 'no'} attention layers {key.layer!r}.",
                f"Its layers are {join_first([each.name for each in layers], 6)}.",
            )
        key, most = HeadKey(named[0].name + sign + count, key.head), named[0].num_heads
    else:
        # A module that runs several times counts as several layers.
        configs: list[Any] = [each.config for each in pretrained_models(model).values()]
        counts = [getattr(config, "num_hidden_layers", 0) for config in configs]
        repeated = max((count for count in counts if isinstance(count, int)), default=0)
        if not 0 <= key.layer < max(len(layers), repeated):
            raise _missing_head_error(key, layers)
        # The order of the modules may not be that in which they run: a head that some layer has is checked later.
        most = None if None in (known := [each.num_heads for each in layers]) else max(filter(None, known))
    if key.head is not None and (key.head < 0 or (most is not None and key.head >= most)):
        raise _missing_head_error(key, layers)
    return key


def _is_same_module(name: str, other: str) -> bool:
    """Whether two qualified names may be those of one module, in a model and in a larger model around it."""
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def count_named_heads(model: nn.Module, keys: Sequence[HeadKey] | None) -> tuple[int, int] | None:
    """Return how many heads of a model are named, all for None, and how many it has; None if that is unknown."""
    layers = attention_layers(model)
    if any(layer.num_heads is None for layer in layers):
        return None
    heads = [(layer.number, layer.name, head) for layer in layers for head in range(layer.num_heads or 0)]
    if keys is None:
        return len(heads), len(heads)
    named = [each for each in heads if any(key.layer in each[:2] and key.head in (None, each[2]) for key in keys)]
    return len(named), len(heads)


def require_head_of_layer(number: int, name: str, num_heads: int, head: int) -> None:
    """Raise an ArgumentError if a layer that ran has fewer heads."""
    if head >= num_heads:
        raise ArgumentError(
            f"{name}, which ran as L{number}, has heads H0 to H{num_heads - 1}, and no H{head}.",
            f"The nearest is L{number} H{num_heads - 1}.",
        )


def _missing_head_error(key: HeadKey, layers: list[AttentionLayer]) -> ArgumentError:
    """Return the error for a head that does not exist, with the nearest that does."""
    if isinstance(key.layer, str):
        number = next(each.number for each in layers if each.name == key.layer.partition("#")[0])
    else:
        number = min(max(key.layer, 0), len(layers) - 1)
    layer = layers[number]
    nearest = f"L{number}"
    if key.head is not None and layer.num_heads is not None:
        nearest += f" H{min(max(key.head, 0), layer.num_heads - 1)}"
    heads = "" if layer.num_heads is None else f", and L{number} has heads H0 to H{layer.num_heads - 1}"
    return ArgumentError(
        f"There is no head {key}: the model has layers L0 to L{len(layers) - 1}{heads}.",
        f"The nearest is {nearest}.",
    )
