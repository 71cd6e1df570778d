"""Attention as functions: check, plan, choose, run, publish."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Never

import torch
from torch import Tensor, nn

from multihead import listeners
from multihead.batch_dims import BatchDims
from multihead.call import Attended, AttentionCall, AttentionRequest, Continued
from multihead.errors import (
    ArgumentError,
    DtypeError,
    ShapeError,
    refuse_unless_scale,
    refuse_unless_share,
    refuse_unless_slice,
)
from multihead.explanation import Explanation, explained
from multihead.kernels.choose import KERNELS, choose
from multihead.kernels.dense_tile import without_autocast, working_dtype
from multihead.kernels.nonfinite import restore_nan, without_nonfinite
from multihead.masks import Full, Mask
from multihead.masks.base import check_is_mask
from multihead.masks.place import CallSize
from multihead.plan.bounds import bounds_of
from multihead.probes import DEFAULT, Probe, ProbeContext
from multihead.probes import statistics as measuring
from multihead.probes import tile as tiles
from multihead.probes.statistics import NOTHING
from multihead.scores.bias import Bias, refuse_unless_bias_fits
from multihead.scores.sinks import refuse_unless_sinks_fit
from multihead.scores.softcap import refuse_unless_softcap
from multihead.shapes import AttentionShape, resolved_query_start
from multihead.spelling import OF_FUNCTIONS, refuse_unknown
from multihead.tracing import traced, transformed

_FULL = Full()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    query_start: int | Tensor | str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor:
    """Multi-head attention: output_i = sum_j softmax_j(scale * q_i . k_j) v_j over the keys that query i may see.

    A query that sees no key gives 0. What a query may not see does not reach it, not even NaN.

    Args:
        q: (batch, heads, queries, head_dim); instead of the batch any number of dimensions, or none.
        k: (batch, kv_heads, keys, head_dim); heads is a multiple of kv_heads.
        v: (batch, kv_heads, keys, value_dim).
        mask: which keys each query may see; of several leading dimensions it sees one batch, in their order.
        bias: added to the scores, a tensor broadcasting to (batch, heads, queries, keys), or `scores.RelativeBias` if
            it depends on the distance only; -inf hides a key.
        softcap: c of c * tanh(scores / c), before the bias.
        sinks: (heads,), a learned logit a head that takes weight and gives no value.
        scale: what q . k is multiplied by, 1 / sqrt(head_dim) if None.
        dropout: share of the weights dropped, 0 to 1.
        query_start: where the first query stands among the keys: an int, one a sample, or "end".
        kernel: the name of a kernel to insist on; None chooses the fastest that does not refuse.
        unknown: none; names of other libraries, such as is_causal, are rejected with the name here.

    Returns: (batch, heads, queries, value_dim), in the dtype of q.

    Raises:
        ShapeError, DtypeError, MaskError, ArgumentError: in words, before anything is computed.

    Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762, equation 1.

    >>> from multihead import masks
    >>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind()
    >>> attention(q, k, v, mask=masks.Causal()).shape
    torch.Size([2, 8, 5, 16])
    """
    if unknown:
        refuse_unknown(attention, unknown, OF_FUNCTIONS)
    leading = BatchDims.of(q)
    if leading is not None:
        (q, k, v), bias = _joined(leading, q, k, v), leading.joined_bias(bias)
        query_start = leading.joined_start(query_start)
    request = request_of(q, k, v, mask, bias, softcap, sinks, scale, dropout, query_start)
    output = attend(request, kernel=kernel).output
    return output if leading is None else leading.apart(output)


def attention_with_logsumexp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    query_start: int | Tensor | str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Attention, and the logsumexp of each query's scores, both differentiable.

    Takes what `attention` takes.

    Returns: the output (batch, heads, queries, value_dim), and the logsumexp (batch, heads, queries) in nats,
        float32 (float64 for float64), -inf where a query sees no key.

    >>> q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    >>> output, logsumexp = attention_with_logsumexp(q, k, v)
    >>> scores = q @ k.mT / 8**0.5
    >>> torch.allclose((scores - logsumexp[..., None]).exp() @ v, output, atol=1e-5)
    True
    """
    if unknown:
        refuse_unknown(attention_with_logsumexp, unknown, OF_FUNCTIONS)
    leading = BatchDims.of(q)
    if leading is not None:
        (q, k, v), bias = _joined(leading, q, k, v), leading.joined_bias(bias)
        query_start = leading.joined_start(query_start)
    request = request_of(q, k, v, mask, bias, softcap, sinks, scale, dropout, query_start)
    attended = attend(request, kernel=kernel)
    if leading is None:
        return attended.output, attended.logsumexp
    return leading.apart(attended.output), leading.apart(attended.logsumexp)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    query_start: int | Tensor | str | None = None,
    logsumexp: Tensor | None = None,
    heads: int | Sequence[int] | slice = slice(None),
    queries: slice = slice(None),
    keys: slice = slice(None),
    **unknown: Never,
) -> Tensor:
    """Compute one tile of the attention map, exactly at any size of the scores, in the memory of that tile.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        mask: as for `attention`; so are bias, softcap, sinks, scale and query_start.
        bias: see `attention`.
        softcap: see `attention`.
        sinks: see `attention`.
        scale: see `attention`.
        query_start: see `attention`.
        logsumexp: (batch, heads, queries) of the whole call if you have it; else it is computed first. It may be over
            more keys than k has.
        heads: which heads.
        queries: which queries.
        keys: which keys.
        unknown: none; names of other libraries, such as is_causal, are rejected with the name here.

    Returns: (batch, heads, queries, keys) of the tile, float32 (float64 for float64); 0 where hidden.

    Source: p_ij = exp(s_ij - L_i), with L the logsumexp over all keys; s and L in float64.

    >>> q, k = torch.randn(2, 1, 8, 100, 16).unbind()
    >>> tile = attention_weights(q, k, heads=3, queries=slice(0, 10), keys=slice(50, 100))
    >>> tile.shape
    torch.Size([1, 1, 10, 50])
    """
    if unknown:
        refuse_unknown(attention_weights, unknown, OF_FUNCTIONS)
    refuse_unless_slice("queries", queries)
    refuse_unless_slice("keys", keys)
    leading = BatchDims.of(q)
    if leading is not None:
        (q, k), bias = _joined(leading, q, k), leading.joined_bias(bias)
        query_start = leading.joined_start(query_start)
        logsumexp = None if logsumexp is None else leading.joined("logsumexp", logsumexp)
    request = request_of(q, k, k, mask, bias, softcap, sinks, scale, 0.0, query_start)
    tile = tiles.tile(request, _logsumexp(request, logsumexp), heads=heads, queries=queries, keys=keys)
    return tile if leading is None else leading.apart(tile)


def statistics(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    query_start: int | Tensor | str | None = None,
    logsumexp: Tensor | None = None,
    v: Tensor | None = None,
    probes: str | Probe | Iterable[str | Probe] | None = None,
    context: ProbeContext = NOTHING,
    **unknown: Never,
) -> dict[str, Tensor]:
    """Measure every head exactly, in memory that grows with the length and not with its square.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        mask: as for `attention`; so are bias, softcap, sinks, scale and query_start.
        bias: see `attention`.
        softcap: see `attention`.
        sinks: see `attention`.
        scale: see `attention`.
        query_start: see `attention`.
        logsumexp: (batch, heads, queries) of the whole call if you have it; else it is computed first.
        v: (batch, kv_heads, keys, value_dim), for `contribution` and `output_norm`.
        probes: names of statistics, or one, or what the functions of `multihead.probes` make; None = those of
            `multihead.probes.DEFAULT` for which nothing is missing.
        context: what some of them need beside q and k, such as which keys are special.
        unknown: none; names of other libraries, such as is_causal, are rejected with the name here.

    Returns: a dict from name to tensor, (batch, heads, queries) each; `received` and `coverage` are
        (batch, heads, keys), `pooled_map` (batch, heads, rows, columns). float32 (float64 for float64), `largest_key`
        int64.

    Raises:
        ProbeError: a name is unknown, or a statistic needs what was not given, such as `special_mass` its keys.
        ArgumentError: torch.jit.trace, make_fx or FakeTensorMode runs this code.

    >>> q, k = torch.zeros(2, 1, 2, 4, 8).unbind()
    >>> statistics(q, k, probes=("effective_keys",))["effective_keys"][0, 0]
    tensor([4., 4., 4., 4.])
    """
    if unknown:
        refuse_unknown(statistics, unknown, OF_FUNCTIONS)
    if traced() and not transformed() and not torch.compiler.is_compiling():
        raise ArgumentError(
            "mh.statistics reads values, and torch.jit.trace, make_fx or FakeTensorMode runs this code, where they "
            "cannot be read.",
            "Call it outside of them, on the tensors themselves.",
        )
    leading = BatchDims.of(q)
    if leading is not None:
        (q, k), bias = _joined(leading, q, k), leading.joined_bias(bias)
        query_start = leading.joined_start(query_start)
        logsumexp = None if logsumexp is None else leading.joined("logsumexp", logsumexp)
        v = None if v is None else leading.joined("v", v)
    request = request_of(q, k, k if v is None else v, mask, bias, softcap, sinks, scale, 0.0, query_start)
    found = _statistics(request, logsumexp, probes, context, has_values=v is not None)
    return found if leading is None else {name: leading.apart(value) for name, value in found.items()}


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    query_start: int | Tensor | str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Explanation:
    """Say which kernel a call would run, why others refuse it, what it skips and the memory it will take.

    Takes what `attention` takes, and computes nothing.

    >>> from multihead import masks
    >>> q = k = v = torch.zeros(1, 8, 1000, 64)
    >>> print(explain(q, k, v, mask=masks.Lengths((256,)), kernel="sdpa"))
    kernel   sdpa
    skipped  74.4% of the score matrix; its intervals hide 74.4%
    memory   about 2.0 MiB beside q, k and v
    """
    if unknown:
        refuse_unknown(explain, unknown, OF_FUNCTIONS)
    leading = BatchDims.of(q)
    if leading is not None:
        (q, k, v), bias = _joined(leading, q, k, v), leading.joined_bias(bias)
        query_start = leading.joined_start(query_start)
    return explained(request_of(q, k, v, mask, bias, softcap, sinks, scale, dropout, query_start), kernel=kernel)


def request_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    query_start: int | Tensor | str | None = None,
    *,
    to_come: bool = False,
    owner: nn.Module | None = None,
    packed_lengths: Tensor | None = None,
    continued: Continued | None = None,
) -> AttentionRequest:
    """Check what a caller gave and resolve what they left out; see `attention` for the arguments and errors.

    Where more keys are `to_come`, the mask may speak of them; for the others see `AttentionRequest`.
    """
    shape = AttentionShape.of(q, k, v)
    check_is_mask(mask)
    refuse_unless_share("dropout", dropout)
    refuse_unless_scale(scale)
    if bias is not None:
        refuse_unless_bias_fits(bias, shape)
    if softcap is not None:
        refuse_unless_softcap(softcap)
    if sinks is not None:
        refuse_unless_sinks_fit(sinks, shape)
    queries, keys = shape.query_length, shape.key_length
    if not mask.hides_nothing:
        mask.check_fits(CallSize(shape.batch, shape.num_heads, queries, keys, to_come))
    start = resolved_query_start(
        query_start, uses_positions=mask.uses_positions, batch=shape.batch, queries=queries, keys=keys
    )
    scale = shape.head_dim**-0.5 if scale is None else scale
    nobody: frozenset[str] = frozenset()
    return AttentionRequest(
        q, k, v, shape, mask, scale, start, bias, softcap, sinks, dropout, nobody, owner, packed_lengths, continued
    )


def _joined(leading: BatchDims, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(leading.joined(name, tensor) for name, tensor in zip("qkv", tensors, strict=False))


def attend(request: AttentionRequest, *, kernel: str | None = None) -> Attended:
    """Walk a checked request through plan, choice, kernel and publication."""
    if not listeners.listeners() or traced():  # no values, nothing to publish
        return _run(request, kernel)
    request = replace(request, wanted=listeners.wanted())
    attended = _run(request, kernel)
    listeners.publish(AttentionCall(request, attended))
    return attended


def _run(request: AttentionRequest, kernel: str | None = None) -> Attended:
    """Plan, choose and compute, without telling anybody."""
    bounds = bounds_of(request)
    chosen = KERNELS[choose(request, bounds, kernel=kernel).name]
    if chosen.HANDLES_NONFINITE:  # in code of its own, which autocast does not know either
        return chosen.attend(request, bounds)
    with without_autocast(request.shape.device):
        cleaned, bad_rows = without_nonfinite(request, bounds)
        attended = chosen.attend(cleaned, bounds)
        return attended if bad_rows is None else restore_nan(attended, bad_rows)


def _logsumexp(request: AttentionRequest, given: Tensor | None) -> Tensor:
    """Return the logsumexp that was given, or compute it without telling any listener."""
    shape = request.shape
    if given is None:
        with torch.no_grad():
            return _run(request).logsumexp
    if not isinstance(given, Tensor):
        raise DtypeError(f"logsumexp is a {type(given).__name__}.", "Give a tensor (batch, heads, queries).")
    if tuple(given.shape) != (shape.batch, shape.num_heads, shape.query_length):
        raise ShapeError(
            f"logsumexp has shape {tuple(given.shape)}.",
            f"Give (batch, heads, queries) = {(shape.batch, shape.num_heads, shape.query_length)}.",
        )
    return given.detach().to(working_dtype(shape.dtype))


def _statistics(
    request: AttentionRequest,
    logsumexp: Tensor | None,
    wanted: str | Probe | Iterable[str | Probe] | None,
    context: ProbeContext,
    *,
    has_values: bool,
) -> dict[str, Tensor]:
    if wanted is None:
        chosen = measuring.possible(DEFAULT, request, context, has_values=has_values)
    else:
        chosen = measuring.resolved(wanted)
        measuring.refuse_unless_possible(chosen, request, context, has_values=has_values)
    return measuring.measured(request, _logsumexp(request, logsumexp), chosen, context, has_values=has_values)
