"""Call a layer in each of the ways that people do, and hold what it gives to the oracle in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import multihead as mh
from multihead import functional
from multihead.kernels.native import short_call
from multihead.kernels.plan import rectangles
from multihead.layer.cache import KeyValueCache
from tests import oracle
from tests.agreeing import SLACK
from tests.layer.layer_drawing import LayerCase, Leaves, built, leaves
from tests.layer.layer_oracle import Whole, layer_by_the_book

# Besides the attention, a layer rounds in its projections, norms, rotation, gates and output projection.
LAYER_SLACK = 2
MEASURED = ("entropy", "largest_weight", "received")

Results = dict[str, Tensor]


@contextmanager
def only(kernel: str | None) -> Iterator[None]:
    """Let every call inside run by one kernel, or by the one that is chosen; a refusal is an error.

    Rectangles are as small as they are cheap, so that short calls are covered by several of them, as long ones are.
    """
    planned = functional.plan_call if kernel is None else partial(_planned, functional.plan_call, kernel)
    unplanned = short_call.takes if kernel is None else _need_plan
    try:
        with (
            mock.patch.object(functional, "plan_call", planned),
            mock.patch.object(short_call, "takes", unplanned),
            mock.patch.multiple(rectangles, CALL_COST_IN_CELLS=1, BLOCK_ROWS=3),
        ):
            yield
    finally:
        rectangles._RECTANGLES_OF_BOUNDS.clear()


def _planned(plan: Any, only_kernel: str, request: Any, *, kernel: str | None = None) -> Any:
    assert kernel is None
    return plan(request, kernel=only_kernel)


def _need_plan(*_: object) -> None:
    """Replace `short_call.takes`, so that each call needs a plan."""


def called(case: LayerCase, layer: mh.MultiHeadAttention, given: Leaves) -> Tensor:
    """Call the layer in the way of the case: (batch, queries, output_dim), every sample from its first place on."""
    if "cached" in case.way:
        return _in_steps(case, layer, given)
    said: dict[str, Any] = {"mask": case.mask, "bias": given.bias, "head_gates": given.head_gates}
    said["query_start"] = case.query_start
    if case.way == "unbatched":
        return layer(given.x[0], **said)[None]
    x = padded(given.x, case.counts, case.side)
    if case.way == "packed":
        tokens, packing = mh.pack(x, case.counts, padding_side=case.side)  # type: ignore[arg-type]
        return aligned(mh.unpack(layer(tokens, packing=packing, **said), packing), case.counts, case.side)
    said |= _lengths(case)
    memory, values = _padded_memory(case, given)
    return aligned(layer(x, memory, values, **said), case.counts, case.side)


def _lengths(case: LayerCase) -> dict[str, Any]:
    """Say the lengths of what is padded, as numbers or as a tensor."""
    found: dict[str, Any] = {"padding_side": case.side}
    if case.way == "padded" or case.counts != [case.size.queries] * case.size.batch:
        found["lengths"] = torch.tensor(case.counts) if case.seed % 2 else tuple(case.counts)
    if case.parts[0] and case.key_counts != [case.size.keys] * case.size.batch:
        found["memory_lengths"] = torch.tensor(case.key_counts) if case.seed % 3 else case.key_counts
    return found


def _padded_memory(case: LayerCase, given: Leaves) -> tuple[Tensor | None, Tensor | None]:
    counts, side = case.key_counts, case.side
    memory, values = (None if each is None else padded(each, counts, side) for each in (given.memory, given.values))
    return memory, values


def _in_steps(case: LayerCase, layer: mh.MultiHeadAttention, given: Leaves) -> Tensor:
    """Call the layer step by step; a sample's tokens of a step may be fewer than another's."""
    cache = KeyValueCache(**case.cache)
    said = _lengths(case)
    said.pop("lengths", None)
    memory, values = _padded_memory(case, given)
    done, found = [0] * case.size.batch, [[] for _ in range(case.size.batch)]
    for step in case.steps:
        width = max(1, *step)
        rows = [row[first : first + count] for row, first, count in zip(given.x, done, step, strict=True)]
        x = torch.stack([_filled(row, width, case.side) for row in rows])
        if step != [width] * len(step):
            said["lengths"] = tuple(step)
        else:
            said.pop("lengths", None)
        output = layer(x, memory, values, mask=case.mask, head_gates=given.head_gates, cache=cache, **said)
        output = aligned(output, step, case.side)
        for sample, count in enumerate(step):
            found[sample].append(output[sample, :count])
            done[sample] += count
    whole = [torch.cat(parts) for parts in found]
    return torch.stack([_filled(row, case.size.queries, "right", 0.0) for row in whole])


def padded(x: Tensor, counts: list[int], side: str) -> Tensor:
    """Put NaN where there is no token."""
    return torch.stack([_filled(row[:count], x.shape[1], side) for row, count in zip(x, counts, strict=True)])


def _filled(row: Tensor, length: int, side: str, value: float = torch.nan) -> Tensor:
    filling = row.new_full((length - len(row), row.shape[1]), value)
    return torch.cat([row, filling] if side == "right" else [filling, row])


def aligned(y: Tensor, counts: list[int], side: str) -> Tensor:
    """Let every sample begin at its first place; what is given for padding must be 0."""
    length = y.shape[1]
    found = []
    for row, count in zip(y, counts, strict=True):
        first = 0 if side == "right" else length - count
        padding = torch.cat([row[:first], row[first + count :]])
        assert bool((padding == 0).all()), f"padding is {padding}"
        found.append(_filled(row[first : first + count], length, "right", 0.0))
    return torch.stack(found)


def by_the_book(case: LayerCase, layer: mh.MultiHeadAttention, dtype: torch.dtype) -> tuple[Results, Whole]:
    """The oracle's output and gradients."""
    state = {name: tensor.detach().to(dtype).requires_grad_(case.follows) for name, tensor in layer.named_parameters()}
    given = leaves(case, dtype)
    whole = layer_by_the_book(case, state, given)
    return _with_gradients(case, whole.output, given.wanting | (state if case.follows else {})), whole


def by_the_layer(case: LayerCase, layer: mh.MultiHeadAttention) -> Results:
    """The layer's output and gradients."""
    given = leaves(case, case.dtype)
    with torch.set_grad_enabled(case.follows):
        output = called(case, layer, given)
    return _with_gradients(case, output, given.wanting | (dict(layer.named_parameters()) if case.follows else {}))


def _with_gradients(case: LayerCase, output: Tensor, wanting: dict[str, Tensor]) -> Results:
    found = {"output": output.detach()}
    if not case.follows:
        return found
    generator = torch.Generator().manual_seed(case.seed + 2)
    of_output = torch.randn(output.shape, generator=generator).to(case.dtype).to(output.dtype)
    grads = torch.autograd.grad(output, list(wanting.values()), of_output, allow_unused=True)
    for (name, tensor), grad in zip(wanting.items(), grads, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(tensor) if grad is None else grad
    return found


def assert_the_layer_agrees(case: LayerCase, kernel: str | None) -> None:
    """Hold a call to the oracle by what the oracle itself loses in the case's dtype, and watch it."""
    layer = built(case)
    exact, whole = by_the_book(case, layer, torch.float64)
    plain, plain_whole = by_the_book(case, layer, case.dtype)
    with only(kernel):
        found = by_the_layer(case, layer)
        with mh.observe(layer, probes=MEASURED) as seen:
            watched = by_the_layer(case, layer)
    slack = LAYER_SLACK * SLACK.get(kernel or "native", 1)
    for name, value in found.items():
        assert torch.equal(value, watched[name]), f"{kernel}: {name} is changed by watching: {case}"
        allowed = slack * oracle.budget(exact[name], plain[name])
        error = oracle.difference(value, exact[name])
        assert error <= allowed, f"{kernel}: {name} is {error:.3g} off, and {allowed:.3g} is allowed: {case}"
    assert_statistics_agree(case, seen, (whole, plain_whole), slack)


def assert_statistics_agree(case: LayerCase, seen: mh.Record, wholes: tuple[Whole, Whole], slack: int) -> None:
    """Hold what a record says of each sample, free of its padding, to the sums over the whole map."""
    samples, learned = seen.layers[0].samples, int(case.options.get("add_bias_kv", False))
    texts = texts_of(case)
    assert len(samples) == len(texts)
    for sample, (row, queries, keys) in enumerate(texts):
        if queries.start >= queries.stop or keys.start >= keys.stop:
            continue
        columns = slice(keys.start, keys.stop + learned)
        exact, plain = (
            oracle.statistics(
                whole.weights[row : row + 1, :, queries, columns].detach(),
                whole.seen[row : row + 1, :, queries, columns],
                start=[learned],
            )
            for whole in wholes
        )
        for name in MEASURED:
            value = samples[sample].statistics[name]
            # Queries at the end that see no key, and keys at the end that nobody sees, are left out of a record.
            value = torch.nn.functional.pad(value, (0, exact[name].shape[-1] - value.shape[-1]))
            of_plain = plain[name].to(torch.float32 if case.dtype == torch.float64 else case.dtype)
            allowed = slack * oracle.budget(exact[name], of_plain)
            error = oracle.difference(value[None], exact[name])
            assert error <= allowed, f"{name} of sample {sample} is {error:.3g} off, {allowed:.3g} is allowed: {case}"


def texts_of(case: LayerCase) -> list[tuple[int, slice, slice]]:
    """Return the row, the queries and the keys of each text of a case: a row, or a document of its mask.

    In cross-attention a row is one text, because its keys are the tokens of another one. With memory and a start of the
    queries, the keys may be those of the same text.
    """
    texts = None if case.mask is None or case.way == "across cached" else case.mask.row_texts
    counts = list(enumerate(zip(case.counts, case.key_counts, strict=True)))
    if texts is None or case.options.get("add_bias_kv", False):
        return [(row, slice(0, queries), slice(0, keys)) for row, (queries, keys) in counts]
    size, found = case.size, []
    starts = oracle.positions_of_first(case.query_start, size.batch, size.queries, size.keys)
    numbers = texts.num_texts.expand(size.batch).tolist()
    edges = texts.edges.expand(size.batch, -1).tolist()
    for row, (queries, keys) in counts:
        for first, stop in list(pairwise(edges[row]))[: numbers[row]]:
            rows = slice(max(first - starts[row], 0), min(stop - starts[row], queries))
            found.append((row, rows, slice(first, min(stop, keys))))
    return found
