"""Entry point: a sequence split over two gloo processes, against the judge in one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.parallel import context_parallel, unshard
from multihead.parallel.layout import Layout
from tests import oracle
from tests.drawing import Sizes
from tests.fuzz.draw import Draw, Mismatch
from tests.fuzz.judge import Call, compare, judge, masked_cotangents
from tests.fuzz.masks import drawn_mask
from tests.parallel.processes import Processes, processes

_open = ExitStack()
_started: list[Processes] = []


def two() -> Processes:
    """The processes, started for the first case."""
    if not _started:
        _started.append(_open.enter_context(processes(timeout=20)))
    return _started[0]


def split_over_ranks(
    group: Any,
    rank: int,
    way: tuple[Any, Any],
    tensors: dict[str, Tensor],
    mask: masks.Mask,
    options: dict[str, Any],
    kept: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """Compute a call and its gradients over ranks, and join what they found."""
    strategy, layout = way
    taken = Layout(layout, 2)
    leaves = {
        name: taken.select_tokens_of_rank(each, rank, 2).clone().requires_grad_() for name, each in tensors.items()
    }
    with context_parallel(group, strategy=strategy, layout=layout):
        output, logsumexp = mh.attention_with_logsumexp(leaves["q"], leaves["k"], leaves["v"], mask=mask, **options)
        of = [taken.select_tokens_of_rank(each, rank, 2) for each in kept]
        grads = torch.autograd.grad(
            (output, logsumexp), list(leaves.values()), of, materialize_grads=True, allow_unused=True
        )
    found = {"output": output.detach(), "logsumexp": logsumexp.detach()}
    found |= {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: unshard(group, each, layout=layout, dim=2) for name, each in found.items()}


def of_two_dtypes(group: Any, rank: int, way: tuple[Any, Any], tensors: dict[str, Tensor]) -> str:
    """Call with bfloat16 on one rank and float16 on the other (R1): which error each rank raises."""
    taken, dtype = Layout(way[1], 2), (torch.bfloat16, torch.float16)[rank]
    q, k, v = (taken.select_tokens_of_rank(each, rank, 2).to(dtype) for each in tensors.values())
    try:
        with context_parallel(group, strategy=way[0], layout=way[1]):
            mh.attention(q, k, v)
    except mh.errors.MultiheadError as error:
        return type(error).__name__
    return "nothing"


def ranks(draw: Draw) -> None:
    """A call over two processes, in each strategy and layout; and calls whose ranks differ in dtype."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    heads = draw.pick("heads", 2, 4)
    length = draw.pick("length", 4, 8, 12, 24)
    size = Sizes(
        draw.pick("batch", 1, 2), heads, 2, length, length, draw.pick("head_dim", 2, 4, 8), draw.pick("value_dim", 2, 5)
    )
    dtype = draw.feature("dtype", torch.float32, torch.float64, torch.bfloat16, share=0.5)
    way = draw.pick("strategy", "gather", "ulysses", "ring"), draw.pick("layout", "contiguous", "balanced")
    shapes = {"q": (heads, size.head_dim), "k": (2, size.head_dim), "v": (2, size.value_dim)}
    tensors = {n: draw.normal(n, size.batch, h, length, d).to(dtype) for n, (h, d) in shapes.items()}
    draw.notes |= {"way": way, "size": size.cells, "dtype": dtype}
    if draw.has("two dtypes", 0.1):
        raised = two().results(of_two_dtypes, way, tensors, ranks=2)
        if "nothing" in raised:
            raise Mismatch(f"ranks that differ in dtype raise {' and '.join(raised)}")
        return
    mask = drawn_mask(draw, size)
    draw.notes["mask"] = mask
    options: dict[str, Any] = {"softcap": 3.0} if draw.has("softcap", 0.2) else {}
    if draw.has("sinks", 0.2):
        options["sinks"] = draw.normal("sinks", heads).to(dtype)
    call = Call(tensors["q"], tensors["k"], tensors["v"], oracle.shown(mask, size.cells), **options)
    of_output = draw.normal("gradient of output", size.batch, heads, length, size.value_dim).to(dtype)
    of_logsumexp = draw.normal("gradient of logsumexp", *size.cells[:3]).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    judged = judge(call, of_output, of_logsumexp)
    kept: Any = masked_cotangents(judged.rows, of_output, of_logsumexp)
    for found in two().results(split_over_ranks, way, tensors, mask, options, kept, ranks=2):
        compare(call, judged, found, kept)
