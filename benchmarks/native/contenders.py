"""Set up the native kernel and its rivals: the inputs, both computations, and how each output is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

import multihead as mh
from benchmarks.measure import Duel, seconds
from benchmarks.native.definition import Defined, defined, defined_gradients
from multihead import masks
from multihead.functional import request_of
from multihead.kernels.native import kernel, library
from multihead.kernels.native.statistics import PARTS_OF_ONE_PASS, sum_weights_per_key
from multihead.kernels.parts import SPECIAL_MASS
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks.positions import TilePositions

HEADS = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The largest difference from float64 that is rounding: values are below 6, and bf16 has 8 bits.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
# Eight documents of a text of 2,048 tokens.
DOCUMENTS = (300, 120, 480, 124, 476, 30, 270, 248)
COLD = 160 << 20  # bytes of keys and values that are used in turn, so that no CPU cache holds them

Tensors = tuple[Tensor, ...]


def inputs(batch: int, length: int, dim: int, dtype: str, *, value_dim: int | None = None) -> Tensors:
    """Draw q, k and v, (batch, heads, length, dim) each."""
    sizes = (dim, dim, dim if value_dim is None else value_dim)
    return tuple(torch.randn(batch, HEADS, length, size).to(DTYPES[dtype]) for size in sizes)


def prefill(length: int, dim: int, dtype: str, *, causal: bool, value_dim: int | None = None) -> Duel:
    """Full or causal attention, against SDPA, whose fused kernel needs equal query and value dims."""
    q, k, v = inputs(1, length, dim, dtype, value_dim=value_dim)
    mask = masks.Causal() if causal else masks.Full()
    return _forward(q, k, v, mask, lambda: scaled_dot_product_attention(q, k, v, is_causal=causal), dtype)


def few_queries(queries: int, keys: int, dim: int, dtype: str) -> Duel:
    """Full attention of a few queries, against SDPA; called as users do, since naming a kernel takes a plan."""
    q = inputs(1, queries, dim, dtype)[0]
    _, k, v = inputs(1, keys, dim, dtype)
    duel = _forward(q, k, v, masks.Full(), lambda: scaled_dot_product_attention(q, k, v), dtype)
    return replace(duel, ours=lambda: mh.attention(q, k, v))


def matrix_product(dim: int, size: int = 2048) -> Duel:
    """Full attention, against a matrix product of as many operations: 2 size^3 = 4 size^2 dim heads."""
    q, k, v = torch.randn(3, 1, size // (2 * dim), size, dim).unbind()
    a, b = torch.randn(2, size, size).unbind()
    attention = _forward(q, k, v, masks.Full(), lambda: torch.mm(a, b), "fp32")
    right = a.double() @ b.double()
    return replace(attention, check_rival=lambda product: _relative(product, right))


def masked(kind: str, rival: str, dim: int, dtype: str) -> Duel:
    """A mask over 2,048 keys, against a dense bool mask or the calls that a user would write instead."""
    mask, batch = _mask_of(kind)
    q, k, v = inputs(batch, 2048, dim, dtype)
    call = _rival_of(kind, rival, mask, batch)
    return _forward(q, k, v, mask, lambda: call(q, k, v), dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, rival: Callable[[], Tensor], dtype: str) -> Duel:
    right = defined(q, k, v, mask).output

    def check(output: Tensor) -> float:
        return _largest(output, right)

    ours = lambda: mh.attention(q, k, v, mask=mask, kernel="native")  # noqa: E731
    return Duel(ours, rival, check, check, TOLERANCE[dtype])


def _mask_of(kind: str) -> tuple[masks.Mask, int]:
    """Return a mask over 2,048 keys, and its batch."""
    if kind == "half padded":
        return masks.Lengths(tuple(torch.linspace(0.1 * 2048, 0.9 * 2048, 4).long().tolist())), 4
    mask = {
        "full": masks.Full(),
        "causal": masks.Causal(),
        "window": masks.Window(256),
        "documents": masks.Documents(DOCUMENTS),
        "documents and causal": masks.Documents(DOCUMENTS) & masks.Causal(),
    }[kind]
    return mask, 1 if kind in ("full", "causal") else 2


def _rival_of(kind: str, rival: str, mask: masks.Mask, batch: int) -> Callable[..., Tensor]:
    """Return the rival as a function of q, k and v."""
    if rival == "dense bool":
        # A mask that does not depend on the query keeps one row, which is faster in PyTorch too.
        shown = mask.tile(TilePositions.from_sizes(2048, 2048)).contiguous()
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=shown.expand(batch, 1, -1, -1))
    if rival == "loop":
        return lambda q, k, v: torch.cat(
            [
                scaled_dot_product_attention(*parts, is_causal="causal" in kind)
                for parts in zip(*(tensor.split(DOCUMENTS, 2) for tensor in (q, k, v)), strict=True)
            ],
            2,
        )
    if rival == "blocks":
        return window_in_blocks
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=kind == "causal")


def window_in_blocks(q: Tensor, k: Tensor, v: Tensor, size: int = 256) -> Tensor:
    """Compute a window as one call on blocks of `size` queries, each with its keys and the `size` keys before them."""
    row, column = torch.arange(size)[:, None], torch.arange(2 * size)[None]
    shown = (column > row) & (column <= row + size)
    batch, heads, length, dim = q.shape
    count = length // size
    shown = shown.expand(count, size, 2 * size).clone()
    shown[0] &= column >= size  # there are no keys before the first block

    def overlapping(tensor: Tensor) -> Tensor:
        blocks = functional.pad(tensor, (0, 0, size, 0)).unfold(2, 2 * size, size)  # (batch, heads, count, dim, keys)
        return blocks.mT.reshape(batch * heads, count, 2 * size, dim)

    output = scaled_dot_product_attention(
        q.reshape(batch * heads, count, size, dim), overlapping(k), overlapping(v), attn_mask=shown[None]
    )
    return output.reshape(q.shape)


def decoding(keys: int, dim: int, dtype: str, *, stream: bool) -> Duel:
    """One query of 32 heads over 8 kv heads, against PyTorch's fused kernel or against reading the same bytes."""
    q = torch.randn(1, 32, 1, dim).to(DTYPES[dtype])
    each = 2 * 8 * keys * dim * q.itemsize
    pairs = [tuple(torch.randn(2, 1, 8, keys, dim).to(q.dtype).unbind()) for _ in range(max(2, COLD // each + 1))]
    right = defined(q, *pairs[0], masks.Full()).output
    ours_next, rival_next = cycle(pairs), cycle(pairs)
    reads: Iterator[tuple[Tensor, ...]] = cycle(pairs)

    def ours() -> Tensor:
        return mh.attention(q, *next(ours_next), kernel="native")

    def rival() -> Tensor:
        return scaled_dot_product_attention(q, *next(rival_next), enable_gqa=True)

    def read_by_sum() -> None:
        for tensor in next(reads):
            tensor.sum()

    def read_by_product() -> None:
        k, v = next(reads)
        torch.dot(k.view(-1), v.view(-1))

    def check(output: Tensor | None) -> float:
        return 0.0 if output is None else _largest(output, right)

    if stream:
        # The faster of two ways to read everything once is the rival.
        reading = min((read_by_sum, read_by_product), key=lambda read: _least_seconds(read, 2 * len(pairs)))
        return Duel(ours, reading, check, check, TOLERANCE[dtype])
    return Duel(ours, rival, check, check, TOLERANCE[dtype])


def flex(kind: str, dtype: str) -> Duel:
    """Attention against compiled flex_attention, whose block mask is made before."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if library.chosen_instruction_set().name == "avx2":
        torch._inductor.config.cpp.simdlen = 256  # noqa: SLF001 - the only way to limit the compiler to AVX2
    mask, _ = _mask_of(kind)
    q, k, v = inputs(1, 2048, 64, dtype)
    compiled = torch.compile(flex_attention, dynamic=False)
    shown = {
        "causal": lambda _b, _h, query, key: query >= key,
        "window": lambda _b, _h, query, key: (query >= key) & (query - key < 256),
    }.get(kind)
    block_mask = None if shown is None else create_block_mask(shown, 1, 1, 2048, 2048, device="cpu")
    return _forward(q, k, v, mask, lambda: compiled(q, k, v, block_mask=block_mask), dtype)


def statistics(kind: str, length: int, dim: int, dtype: str, *, rising: bool = False) -> Duel:
    """A call without statistics as ours, with all one-pass statistics as the rival: the ratio is their cost."""
    q, k, v = inputs(1, length, dim, dtype)
    if rising:
        # Scores increase by 20 along the row, so every key is a new maximum: the worst case of an argmax.
        q[..., 0] = 8
        k[..., 0] = torch.arange(length) * (20 / length)
    mask = masks.Window(256) if kind == "window" else _mask_of(kind)[0]
    request = request_of(q, k, v, mask)
    bounds = bounds_of(request)
    watched = replace(
        request, requested_statistics=PARTS_OF_ONE_PASS - {SPECIAL_MASS.name}
    )  # these need the special keys as an input
    right = defined(q, k, v, mask)

    def check(attended: Any) -> float:
        found = attended.statistics
        differences = [_largest(attended.output, right.output)]
        if found:
            differences += [_largest(found["entropy"], right.entropy), float(misplaced(found["largest_key"], right))]
        return max(differences)

    return Duel(
        lambda: kernel.attend(request, bounds), lambda: kernel.attend(watched, bounds), check, check, TOLERANCE[dtype]
    )


def statistics_alone(length: int, dtype: str, *, causal: bool) -> Duel:
    """A call as ours, the default statistics without the output as the rival: the ratio is their cost."""
    q, k, v = inputs(1, length, 64, dtype)
    mask = masks.Causal() if causal else masks.Full()
    right = defined(q, k, v, mask)

    def check(found: dict[str, Tensor]) -> float:
        return max(_largest(found["entropy"], right.entropy), float(misplaced(found["largest_key"], right)))

    return Duel(
        lambda: mh.attention(q, k, v, mask=mask),
        lambda: mh.statistics(q, k, mask=mask),
        lambda output: _largest(output, right.output),
        check,
        TOLERANCE[dtype],
    )


def misplaced(largest_key: Tensor, right: Defined) -> int:
    """Return the number of queries whose largest key differs from float64, though their two largest scores differ."""
    apart = right.largest[..., 0] - right.largest[..., -1] > 1e-5
    return int(((largest_key != right.largest_key) & apart).sum())


def received(kind: str, length: int, dim: int) -> Duel:
    """A forward pass as ours, the pass for attention received and a 64 x 64 map as the rival: the ratio is its cost."""
    q, k, v = inputs(1, length, dim, "fp32")
    mask = masks.Window(256) if kind == "window" else _mask_of(kind)[0]
    request = request_of(q, k, v, mask)
    bounds = bounds_of(request)
    logsumexp = kernel.attend(request, bounds).logsumexp
    right = defined(q, k, v, mask)
    cell = (length // 64, length // 64)

    def check_second(found: tuple[Tensor, Tensor]) -> float:
        of_map = found[1].sum(2)  # (batch, heads, key cells)
        summed = right.received.unflatten(2, (-1, cell[1])).sum(3)
        # Relative errors, because each value is a sum of as many weights as there are queries.
        return max(_relative(found[0], right.received), _relative(of_map, summed))

    return Duel(
        lambda: kernel.attend(request, bounds),
        lambda: sum_weights_per_key(request, bounds, logsumexp, cell=cell),
        lambda attended: _largest(attended.output, right.output),
        check_second,
        TOLERANCE["fp32"],
    )


def backward(kind: str, rival: str, length: int, dim: int, dtype: str) -> Duel:
    """The backward pass alone, by autograd, of the same outputs."""
    mask, batch = _mask_of(kind)
    q, k, v = inputs(batch, length, dim, dtype)
    of_output = torch.randn(q.shape).to(q.dtype)
    call = _rival_of(kind, rival, mask, batch)
    right = defined_gradients(q, k, v, of_output, mask)
    check = lambda found: max(map(_relative, found, right))  # noqa: E731
    ours = _gradients(lambda *leaves: mh.attention(*leaves, mask=mask, kernel="native"), (q, k, v), of_output)
    return Duel(ours, _gradients(call, (q, k, v), of_output), check, check, TOLERANCE[dtype])


def backward_bf16_over_fp32(kind: str, length: int, dim: int) -> Duel:
    """The backward pass in float32 as ours, in bfloat16 as the rival: the ratio is how much longer bfloat16 takes."""
    mask, batch = _mask_of(kind)
    q, k, v = inputs(batch, length, dim, "fp32")
    of_output = torch.randn(q.shape)
    right = defined_gradients(q, k, v, of_output, mask)
    call = lambda *leaves: mh.attention(*leaves, mask=mask, kernel="native")  # noqa: E731
    half = tuple(tensor.bfloat16() for tensor in (q, k, v, of_output))
    right_of_half = defined_gradients(*half, mask)
    return Duel(
        _gradients(call, (q, k, v), of_output),
        _gradients(call, half[:3], half[3]),
        # Scaled to the tolerance of bf16, which applies to both.
        lambda found: max(map(_relative, found, right)) * TOLERANCE["bf16"] / TOLERANCE["fp32"],
        lambda found: max(map(_relative, found, right_of_half)),
        TOLERANCE["bf16"],
    )


def _gradients(call: Callable[..., Tensor], tensors: Tensors, of_output: Tensor) -> Callable[[], Tensors]:
    """Run a forward pass once, and return a function that runs its backward pass."""
    with torch.enable_grad():
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = call(*leaves)
    return lambda: torch.autograd.grad(output, leaves, of_output, retain_graph=True)


def overhead(*, grad: bool) -> Duel:
    """A tiny call of PyTorch as ours, of `mh.attention` as the rival: the ratio is how much longer a call takes."""
    q, k, v = (tensor.requires_grad_(grad) for tensor in torch.randn(3, 1, 2, 4, 16).unbind())
    right = defined(q.detach(), k.detach(), v.detach(), masks.Full()).output

    def of(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.set_grad_enabled(grad):
                return attend(q, k, v)

        return run

    check = lambda output: _largest(output, right)  # noqa: E731
    return Duel(of(scaled_dot_product_attention), of(mh.attention), check, check, TOLERANCE["fp32"])


def _largest(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right).abs().max())


def _relative(found: Tensor, right: Tensor) -> float:
    return _largest(found, right) / float(right.abs().max())


def _least_seconds(run: Callable[[], object], times: int) -> float:
    return min(seconds(run) for _ in range(times))
