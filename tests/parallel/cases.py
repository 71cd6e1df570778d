"""The calls of test_sequence.py, in one process and split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import multihead as mh
from multihead import masks, scores
from multihead.errors import ArgumentError, MaskError, MultiheadError, ShapeError
from multihead.kernels import sequence_split
from multihead.parallel import context_parallel, sequence, shard, unshard
from multihead.parallel.layout import Layout

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 16, 4, 2, 4, 3


@dataclass(frozen=True)
class Strided(masks.Mask):
    """A mask as a user defines it: no interval, and no other method."""

    step: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return ((queries - keys) % self.step == 0) | (keys == 1)


@dataclass(frozen=True)
class Alternating(masks.Mask):
    """A mask of one's own that differs between heads, and holds no tensor."""

    heads: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries - keys) % (torch.arange(self.heads).view(1, -1, 1, 1) + 1) == 0


def _cells() -> Tensor:
    return torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.4


MASKS: dict[str, Callable[[], masks.Mask]] = {
    "full": masks.Full,
    "causal": masks.Causal,
    "window": lambda: masks.Causal() & masks.Window(4),
    "documents": lambda: masks.Causal() & masks.Documents((3, 7, 0, 5)),
    "documents of each sample": lambda: masks.Documents(((3, 7, 6), (1, 8, 2))),
    "lengths": lambda: masks.Causal() & masks.Lengths((11, 6)),
    "prefix": lambda: masks.Causal() | masks.Prefix((5, 2)),
    "user-defined": lambda: masks.Causal() & Strided(3),
    "user-defined of each head": lambda: masks.Causal() & Alternating(HEADS),
    "a tensor": lambda: masks.Keep(_cells()),
}
TERMS = ("none", "bias", "bias of keys", "relative bias", "sinks", "softcap", "all")


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": drawn(BATCH, HEADS, LENGTH, HEAD_DIM),
        "k": drawn(BATCH, KV_HEADS, LENGTH, HEAD_DIM),
        "v": drawn(BATCH, KV_HEADS, LENGTH, VALUE_DIM),
        "bias": drawn(1, HEADS, LENGTH, LENGTH),
        "bias of keys": drawn(BATCH, 1, 1, LENGTH),
        "relative bias": drawn(1, HEADS, 2 * LENGTH - 1),
        "sinks": drawn(HEADS),
        "of output": drawn(BATCH, HEADS, LENGTH, VALUE_DIM),
        "of logsumexp": drawn(BATCH, HEADS, LENGTH),
    }


def computed(
    given: dict[str, Tensor], mask: masks.Mask, terms: str, take: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return output, logsumexp and all gradients of a call on the tokens that `take` takes."""
    leaves = {name: (take(x) if name in "qkv" else x).clone().requires_grad_() for name, x in given.items()}
    options: dict[str, Any] = {}
    used = ["q", "k", "v"]
    for name in ("bias", "bias of keys", "relative bias"):
        if terms == name or (terms == "all" and name == "relative bias"):
            options["bias"] = scores.RelativeBias(leaves[name]) if name == "relative bias" else leaves[name]
            used.append(name)
    if terms in ("sinks", "all"):
        options["sinks"] = leaves["sinks"]
        used.append("sinks")
    if terms in ("softcap", "all"):
        options["softcap"] = 2.0
    output, logsumexp = mh.functional.attention_with_logsumexp(
        leaves["q"], leaves["k"], leaves["v"], mask=mask, **options
    )
    finite = logsumexp.masked_fill(logsumexp == -torch.inf, 0)
    ((output * take(given["of output"])).sum() + (finite * take(given["of logsumexp"])).sum()).backward()
    found = {"output": output.detach(), "logsumexp": logsumexp.detach()}
    return found | {f"gradient of {name}": leaves[name].grad for name in used if leaves[name].grad is not None}


def split_call(
    group: Any, rank: int, ranks: int, strategy: Any, layout: Any, mask: str, terms: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Compute a call over ranks: what this rank found of its tokens."""
    with context_parallel(group, strategy=strategy, layout=layout):
        taken = Layout(layout, ranks)
        return computed(tensors(dtype), MASKS[mask](), terms, lambda x: taken.select_tokens_of_rank(x, rank, 2))


def joined(found: Sequence[dict[str, Tensor]], layout: Any) -> dict[str, Tensor]:
    """Join what each rank found of its tokens, and sum the gradients of what all tokens share."""
    assert all(each.keys() == found[0].keys() for each in found)
    whole = {}
    for name in found[0]:
        parts = [each[name] for each in found]
        of_tokens = name in ("output", "logsumexp", "gradient of q", "gradient of k", "gradient of v")
        whole[name] = (
            Layout(layout, len(found)).join_tokens_of_ranks(parts, 2) if of_tokens else torch.stack(parts).sum(0)
        )
    return whole


def split_calls(group: Any, rank: int, ranks: int, cases: list[tuple[Any, ...]]) -> list[dict[str, Tensor]]:
    return [split_call(group, rank, ranks, *case) for case in cases]


def whole_call(mask: str, terms: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return computed(tensors(dtype), MASKS[mask](), terms, lambda x: x)


LAYERS: dict[str, dict[str, Any]] = {
    "rotary": {"num_kv_heads": 2, "rotary": mh.Rotary(), "qk_norm": mh.QKNorm("rms"), "sinks": True},
    "ALiBi": {"position_bias": lambda: scores.ALiBi(4), "head_gates": True, "softcap": 3.0},
    "T5": {"position_bias": lambda: scores.T5Bias(4, both_ways=False), "merge": "mean", "add_zero_attn": True},
    "table": {"position_bias": lambda: scores.LearnedBias(4, LENGTH, LENGTH)},
}


def _layer(name: str) -> tuple[mh.MultiHeadAttention, Tensor, Tensor]:
    torch.manual_seed(5)
    options = {key: each() if key == "position_bias" else each for key, each in LAYERS[name].items()}
    layer = mh.MultiHeadAttention(8, 4, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x, gradient = torch.randn(2, BATCH, LENGTH, 8, dtype=torch.float64).unbind()
    return layer, x, gradient


def _trained(
    layer: mh.MultiHeadAttention, x: Tensor, gradient: Tensor, *, recomputed: bool = False
) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    call = {"mask": masks.Causal(), "lengths": (13, LENGTH)}
    output = checkpoint(layer, x, use_reentrant=False, **call) if recomputed else layer(x, **call)
    (output * gradient[..., : output.shape[2]]).sum().backward()
    found = {"output": output.detach(), "gradient of x": x.grad}
    return found | {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}


def whole_layer(name: str) -> dict[str, Tensor]:
    return _trained(*_layer(name))


def split_layer(
    group: Any, rank: int, strategy: Any, layout: Any, name: str, recomputed: bool = False
) -> dict[str, Tensor]:
    layer, x, gradient = _layer(name)
    parts = shard(group, layout=layout, x=x, gradient=gradient)
    with context_parallel(group, strategy=strategy, layout=layout):
        found = _trained(layer, parts["x"], parts["gradient"], recomputed=recomputed)
    for key, each in found.items():
        if key in ("output", "gradient of x"):
            found[key] = unshard(group, each, layout=layout)
        else:
            torch.distributed.all_reduce(each, group=group)
    return found


def chosen_strategies(group: Any, rank: int) -> dict[str, str]:
    """Return what "auto" takes, of calls of 4 heads and 4 key/value heads."""
    found = {}
    for name, mask, heads in (
        ("window", masks.Causal() & masks.Window(2), 4),
        ("documents", masks.Documents((4, 4, 4, 4)), 4),
        ("full", masks.Full(), 4),
        ("heads that do not divide", masks.Full(), 3),
    ):
        q = torch.zeros(1, heads, 4, 8)
        with context_parallel(group):
            split = sequence_split.active_split
            assert isinstance(split, sequence._SplitOverRanks)
            shape = sequence.AttentionShape.from_tensors(q, q, q)
            found[name], _ = split._choose_strategy(shape, sequence.plan_ring(mask, 16, split.layout, rank))
            torch.testing.assert_close(mh.attention(q, q, q, mask=mask), q)
    return found


def shared_out(group: Any, rank: int, ids: Tensor, layout: Any) -> dict[str, Tensor]:
    part = shard(group, input_ids=ids, labels=ids, layout=layout)
    assert part.layout == layout
    assert part["input_ids"].shape == (2, 6)
    return {
        "joined": unshard(group, part["input_ids"], layout=layout),
        "labels": unshard(group, part["labels"], layout=layout),
        "positions": unshard(group, part.position_ids, layout=layout),
    }


def chosen_layouts(group: Any, rank: int) -> dict[str, str]:
    ids = torch.zeros(1, 64)
    wanted = {"full": masks.Full(), "causal": masks.Causal(), "window": masks.Causal() & masks.Window(4)}
    found = {name: shard(group, mask=mask, ids=ids).layout for name, mask in wanted.items()}
    return {**found, "of 6 tokens": shard(group, mask=masks.Causal(), ids=torch.zeros(1, 6)).layout}


def dropped(take: Callable[[Tensor], Tensor], mask: str) -> dict[str, Tensor]:
    """Return the weights of two calls with dropout, and the gradients, of the tokens that `take` takes."""
    given = tensors(torch.float32)
    identity = torch.eye(LENGTH).expand(BATCH, KV_HEADS, -1, -1)  # the output is the weights after dropout
    q, k, v = (take(x).clone().requires_grad_() for x in (given["q"], given["k"], identity))
    gradient = torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(8))
    torch.manual_seed(11)
    first, second = (mh.attention(q, k, v, mask=MASKS[mask](), dropout=0.4) for _ in range(2))
    ((first + 2 * second) * take(gradient)).sum().backward()
    found = {"first": first.detach(), "second": second.detach()}
    return found | {
        f"gradient of {name}": x.grad for name, x in zip("qkv", (q, k, v), strict=True) if x.grad is not None
    }


def with_nan(take: Callable[[Tensor], Tensor], *, hidden: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the result of a call with keys that are NaN: all hidden ones, or one whose queries the loss leaves out."""
    given = tensors(dtype)
    if hidden:
        given["k"][0, :, 11:], given["v"][1, :, 6:] = torch.nan, torch.inf
    else:
        given["k"][0, 0, 3] = torch.nan  # which the first two heads see from query 3 on
        given["of output"][0, :2, 3:], given["of logsumexp"][0, :2, 3:] = 0, 0
    return computed(given, MASKS["lengths"](), "sinks", take)


def split_with_nan(
    group: Any, rank: int, ranks: int, strategy: Any, layout: Any, hidden: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    taken = Layout(layout, ranks)
    with context_parallel(group, strategy=strategy, layout=layout):
        return with_nan(lambda x: taken.select_tokens_of_rank(x, rank, 2), hidden=hidden, dtype=dtype)


def split_dropped(
    group: Any, rank: int, ranks: int, strategy: Any, layout: Any, mask: str, check: Any
) -> dict[str, Tensor]:
    taken = Layout(layout, ranks)
    with context_parallel(group, strategy=strategy, layout=layout, check=check):
        found = dropped(lambda x: taken.select_tokens_of_rank(x, rank, 2), mask)
    return {name: unshard(group, each, layout=layout, dim=2) for name, each in found.items()}


def _call(
    group: Any,
    queries: int = 4,
    keys: int = 4,
    *,
    strategy: Any = "ring",
    check: Any = "every call",
    dtype: Any = torch.float32,
    **options: Any,
) -> Tensor:
    q, k = torch.zeros(1, 3, queries, 4, dtype=dtype), torch.zeros(1, 3, keys, 4, dtype=dtype)
    with context_parallel(group, strategy=strategy, check=check):
        return mh.attention(q, k, k, **options)


def _layer_call(group: Any, **options: Any) -> Tensor:
    with context_parallel(group):
        output: Tensor = mh.MultiHeadAttention(4, 2)(torch.zeros(1, 4, 4), **options)
    return output


def _nested(group: Any) -> None:
    with context_parallel(group), context_parallel(group):
        pass


def _measured(group: Any, function: Callable[..., Any]) -> None:
    with context_parallel(group):
        function(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4))


_ELSEWHERE = "cannot be used in context_parallel, where a rank has part of the tokens."
REFUSED: dict[str, tuple[Callable[[Any], Any], type[MultiheadError], str]] = {
    "cross-attention": (
        lambda group: _call(group, 4, 6),
        ArgumentError,
        (
            "The call has 4 queries and 6 keys, and context_parallel splits sequences only in self-attention. "
            "Compute cross-attention and decoding with a cache outside of this context."
        ),
    ),
    "dropout in float64": (
        lambda group: _call(group, dropout=0.5, dtype=torch.float64),
        ArgumentError,
        (
            "dropout is 0.5, and only the native kernel drops the same weights on any number of ranks; it computes "
            "float32, bfloat16 and float16, and the tensors are float64. Give dropout=0.0, or call model.eval()."
        ),
    ),
    "dropout of another kernel": (
        lambda group: _call(group, dropout=0.5, kernel="reference"),
        ArgumentError,
        (
            "dropout is 0.5, and only the native kernel drops the same weights on any number of ranks; kernel is "
            "'reference'. Give dropout=0.0, or call model.eval()."
        ),
    ),
    "query_start": (
        lambda group: _call(group, query_start=2),
        ArgumentError,
        "query_start is 2, and context_parallel knows the position of each token. Leave it out.",
    ),
    "ulysses with 3 heads": (
        lambda group: _call(group, strategy="ulysses"),
        ArgumentError,
        (
            'strategy is "ulysses", and 3 heads with 3 key/value heads cannot be divided over 2 ranks. Take a number '
            'of ranks that divides the heads, or strategy="ring".'
        ),
    ),
    "a mask of a rank's tokens": (
        lambda group: _call(group, mask=masks.Keep(torch.ones(4, 4, dtype=torch.bool), "queries keys")),
        MaskError,
        (
            "Keep(<bool tensor (4, 4)>, 'queries keys') has 4 queries, and the call has 8. Give a tensor that "
            "broadcasts to (batch, heads, queries, keys) = (1, 3, 8, 8)."
        ),
    ),
    "a bias of a rank's tokens": (
        lambda group: _call(group, bias=torch.zeros(1, 1, 4, 4)),
        ShapeError,
        (
            "bias has shape (1, 1, 4, 4), and it is added to (batch, heads, queries, keys) = (1, 3, 8, 8). Give four "
            "dimensions, each of that size or 1."
        ),
    ),
    "two contexts": (_nested, ArgumentError, "This is inside another context_parallel. Leave the outer one first."),
    "an unknown strategy": (
        lambda group: _call(group, strategy="rings"),
        ArgumentError,
        'strategy is \'rings\'. Give "ring", "ulysses", "gather" or "auto".',
    ),
    "an unknown check": (
        lambda group: _call(group, check="no call"),
        ArgumentError,
        'check is \'no call\'. Give "every call" or "first call".',
    ),
    "an unknown layout": (
        lambda group: shard(group, layout="zigzag", x=torch.zeros(1, 4)),  # type: ignore[arg-type]
        ArgumentError,
        'layout is \'zigzag\'. Give "contiguous" or "balanced".',
    ),
    "a length that does not divide": (
        lambda group: shard(group, x=torch.zeros(1, 5)),
        ShapeError,
        (
            "The sequence has 5 tokens, and 2 ranks hold 2 equal chunks of it. Pad or cut it to 4 or 6 tokens, and "
            "hide padding with mask=masks.Lengths(...)."
        ),
    ),
    "tensors of two lengths": (
        lambda group: shard(group, x=torch.zeros(1, 4), y=torch.zeros(1, 6)),
        ShapeError,
        "The tensors of a sequence have one length, and x has 4, y has 6. Give (batch, tokens, ...) each.",
    ),
    "a name that is not there": (
        lambda group: shard(group, x=torch.zeros(1, 4))["y"],
        ArgumentError,
        "The shard has no 'y'. Read one of x.",
    ),
    "no group": (
        lambda group: _call("cp"),
        ArgumentError,
        "The ranks are 'cp'. Give a process group, or a DeviceMesh of one dimension.",
    ),
    "lengths of a memory": (
        lambda group: _layer_call(group, memory_lengths=(3,)),
        ArgumentError,
        f"memory_lengths= {_ELSEWHERE} Give lengths=, with the lengths of the whole sequences.",
    ),
    "padding in front": (
        lambda group: _layer_call(group, lengths=(3,), padding_side="left"),
        ArgumentError,
        f"padding_side='left' {_ELSEWHERE} Put the padding after the tokens of each sample.",
    ),
    "packed tokens": (
        lambda group: _layer_call(group, packing=mh.pack(torch.zeros(1, 4, 4), (4,))[1]),
        ArgumentError,
        f"packing= {_ELSEWHERE} Give mask=masks.Documents(lengths), with the lengths of all documents.",
    ),
    "a cache": (
        lambda group: _layer_call(group, cache=mh.KeyValueCache()),
        ArgumentError,
        f"A cache {_ELSEWHERE} Decode outside of context_parallel.",
    ),
    "a memory": (
        lambda group: _layer_call(group, memory=torch.zeros(1, 4, 4)),
        ArgumentError,
        f"Cross-attention {_ELSEWHERE} Compute it outside of context_parallel.",
    ),
    "weights": (
        lambda group: _measured(group, mh.attention_weights),
        ArgumentError,
        f"attention_weights {_ELSEWHERE} Compute them from all tokens, outside of context_parallel.",
    ),
    "statistics": (
        lambda group: _measured(group, mh.statistics),
        ArgumentError,
        f"statistics {_ELSEWHERE} Compute them from all tokens, outside of context_parallel.",
    ),
}


def refused(group: Any, rank: int, name: str) -> Any:
    return REFUSED[name][0](group)


def left_by_an_error(group: Any, rank: int) -> bool:
    try:
        with context_parallel(group):
            raise KeyError
    except KeyError:
        return sequence_split.active_split is None
