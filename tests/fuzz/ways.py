"""Entry points: attention under autocast, checkpointing, vmap, torch.func, make_fx and threads; second derivatives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import multihead as mh
from tests import oracle
from tests.fuzz.calls import Drawn, drawn_cotangents, gradients, leaves_of
from tests.fuzz.draw import Draw, Mismatch, check_error
from tests.fuzz.judge import Call, compare, judge, masked_cotangents

Results = dict[str, Tensor]


class Way:
    """A call with its judge: `of` is called with q, k, v and gives output and logsumexp."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.drawn = draw, Drawn(draw)
        self.call: Call = self.drawn.call
        self.options = self.drawn.given()

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return mh.attention_with_logsumexp(q, k, v, **self.options)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.call.v is not None
        return self.call.q, self.call.k, self.call.v

    def compare(self, output: Tensor, logsumexp: Tensor, leaves: dict[str, Tensor] | None = None) -> None:
        """Compare output and logsumexp, and the gradients of leaves where there are some."""
        found = {"output": output.detach(), "logsumexp": logsumexp.detach()}
        if not leaves or not output.requires_grad:
            compare(self.call, judge(self.call), found)
            return
        cotangents: tuple[Tensor | None, Tensor | None] = drawn_cotangents(self.draw, output, logsumexp)
        judged = judge(self.call, *cotangents)
        kept = masked_cotangents(judged.rows, *cotangents)
        assert kept is not None
        found |= gradients(self.draw, leaves, output, logsumexp, kept)
        compare(self.call, judged, found, kept)


def checkpointed(draw: Draw) -> None:
    """Gradients through `torch.utils.checkpoint`."""
    way = Way(draw)
    leaves = leaves_of(way.drawn)
    way.options = way.drawn.given()
    way.compare(*checkpoint(way.of, *way.tensors, use_reentrant=False), leaves)


def autocast(draw: Draw) -> None:
    """Attention under autocast computes in the dtype of its tensors."""
    way = Way(draw)
    with torch.autocast("cpu", dtype=draw.pick("autocast to", torch.bfloat16, torch.float16)):
        output, logsumexp = way.of(*way.tensors)
    way.compare(output, logsumexp)


def mapped(draw: Draw) -> None:
    """`vmap` over a new axis of some of q, k and v."""
    way = Way(draw)
    tensors, dims = [], []
    for name, each in zip("qkv", way.tensors, strict=True):
        over = draw.pick(f"mapped {name}", True, True, False)
        tensors.append(torch.stack([each, each]) if over else each)
        dims.append(0 if over else None)
    if dims == [None] * 3:
        return
    output, logsumexp = vmap(way.of, in_dims=tuple(dims))(*tensors)
    way.compare(output[1], logsumexp[1])


def functional(draw: Draw) -> None:
    """`torch.func.grad` of the sum of the output."""
    way = Way(draw)
    found = grad(lambda *qkv: way.of(*qkv)[0].sum(), argnums=(0, 1, 2))(*way.tensors)
    judged = judge(way.call, torch.ones((*way.drawn.size.cells[:3], way.drawn.size.value_dim), dtype=way.drawn.dtype))
    if bool(judged.rows.with_gradient.logical_or(judged.rows.empty).all()):
        ones = torch.ones((*found[0].shape[:3], way.drawn.size.value_dim), dtype=way.drawn.dtype)
        compare(
            way.call, judged, {f"gradient of {n}": each for n, each in zip("qkv", found, strict=True)}, (ones, None)
        )


def traced(draw: Draw) -> None:
    """`make_fx` records a graph that gives the same for other numbers with the same strides."""
    way = Way(draw)
    others = []
    for each in way.tensors:
        numbers = 1 + sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
        others.append(torch.randn(max(0, numbers), dtype=each.dtype).as_strided(each.shape, each.stride()))
    # A method would have an argument more.
    graph = make_fx(lambda q, k, v: way.of(q, k, v))(*others)  # noqa: PLW0108
    output, logsumexp = graph(*way.tensors)
    way.compare(output, logsumexp)


def threads(draw: Draw) -> None:
    """Four threads that call with the same tensors at once, forward and backward."""
    way = Way(draw)
    leaves = leaves_of(way.drawn)
    way.options = way.drawn.given()
    results: list[Any] = []

    def run() -> None:
        try:
            output, logsumexp = way.of(*way.tensors)
            grads: tuple[Tensor, ...] = ()
            if leaves and output.requires_grad:
                grads = torch.autograd.grad(
                    output.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
                )
            results.append((output.detach(), logsumexp.detach(), *grads))
        except Exception as error:  # noqa: BLE001 - it is raised below, in the main thread
            results.append(error)

    started = [threading.Thread(target=run) for _ in range(4)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    for each in results:
        if isinstance(each, Exception):
            raise each
    way.compare(*results[0][:2])
    for each in results[1:]:
        for one, other in zip(each, results[0], strict=True):
            if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
                raise Mismatch("threads that call at once get other numbers")


def twice(draw: Draw) -> None:
    """Second derivatives with respect to q, k and v."""
    way = Way(draw)
    call = way.call
    judged = judge(call)
    if not bool((judged.rows.with_gradient | judged.rows.empty).all()) or not call.seen.numel():
        return
    if "sharp" in draw.used or "huge bias" in draw.used or (call.scale or 0) > 1:
        return  # a second derivative by scores of hundreds is lost in rounding
    found = _second(draw, way.of, way.tensors)

    def book(dtype: torch.dtype) -> Results:
        def of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            dense = oracle.attend(q, k, v, judged.rows.visible, **_options(call, dtype))
            return dense.output, dense.logsumexp

        return _second(draw, of, tuple(_clean(each, dtype) for each in way.tensors))

    if any(bool((~each.isfinite()).any()) for each in way.tensors):
        return  # hidden numbers that are not finite: the oracle would need them cleaned
    exact, plain = book(torch.float64), book(way.drawn.dtype)
    for name, value in found.items():
        allowed = 16 * oracle.budget(exact[name], plain[name])
        if bool(plain[name].isfinite().all()):
            check_error(f"second {name}", oracle.difference(value, exact[name]), allowed)


def _clean(each: Tensor, dtype: torch.dtype) -> Tensor:
    return each.detach().to(dtype)


def _options(call: Call, dtype: torch.dtype) -> dict[str, Any]:
    found: dict[str, Any] = {"softcap": call.softcap, "scale": call.scale}
    found["bias"] = None if call.bias is None else torch.where(call.bias.isnan(), 0, call.bias).to(dtype)
    found["sinks"] = None if call.sinks is None else call.sinks.to(dtype)
    return found


def _second(draw: Draw, of: Callable[..., tuple[Tensor, Tensor]], tensors: tuple[Tensor, ...]) -> Results:
    leaves = [each.detach().requires_grad_() for each in tensors]
    output, logsumexp = of(*leaves)
    weight = draw.normal("gradient of output", *output.shape).to(output.dtype)
    total = (output * weight).sum() + torch.where(logsumexp == -torch.inf, 0, logsumexp).sum().to(output.dtype)
    first = torch.autograd.grad(total, leaves, create_graph=True)
    along = [draw.normal(f"along {n}", *each.shape).to(each.dtype) for n, each in enumerate(first)]
    total = sum(((each * other).sum() for each, other in zip(first, along, strict=True)), output.new_zeros(()))
    grads = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
    return {f"gradient of {name}": each for name, each in zip("qkv", grads, strict=True)}


WAYS: dict[str, Callable[[Draw], None]] = {
    "checkpointed": checkpointed,
    "autocast": autocast,
    "vmap": mapped,
    "torch.func": functional,
    "make_fx": traced,
    "threads": threads,
    "twice": twice,
}


def ways(draw: Draw) -> None:
    """Attention under checkpointing, autocast, vmap, torch.func, make_fx and threads, and second derivatives."""
    name = draw.pick("way", *WAYS)
    draw.notes["way"] = name
    WAYS[name](draw)
