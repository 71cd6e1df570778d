"""Judge a call of attention by the oracle in float64: which rows are numbers, and how far each element may be off.

The rounding of a call is followed to first order: a score whose terms have the sum of magnitudes A is off by A
roundings, a weight p by p (A + mean A), and what is summed of them by the sum of that. Only scores that are off by
a part of 1 or more, of magnitudes from a million on, need the exponential itself: their largest key may be another.
So the band of an element depends on its own row, and one huge number hides no fault in another row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

import torch
from torch import Tensor

from tests import oracle
from tests.fuzz.draw import BUDGET, Mismatch

HUGE = {torch.float16: 1e3}  # products of three such numbers may overflow, in gradients only
SINGLE_HUGE = 1e15
LIMITS = {torch.float64: 1e300}  # sums of magnitudes above it may overflow; the bound of float32 for all others
SINGLE_LIMIT = 1e37
UNDERFLOW = 1e-30  # weights below the smallest float32 are 0; as a multiple of a rounding
FUZZY = 0.1  # a weight whose score is off by more may be another one when it is computed again
FAR = 1e25  # a term of this size absorbs scores in float64, too


@dataclass
class Call:
    """The tensors of a call, as they are given.

    Fields:
        v: None where the entry point takes no values.
        seen: (batch, heads, queries, keys) bool, what the mask shows.
        bias: broadcasts to seen; None for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    seen: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    scale: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype


@dataclass
class Rows:
    """What is known of each row before it is computed: (batch, heads, queries) bool.

    Fields:
        visible: (batch, heads, queries, keys), what a query sees; a bias of -inf hides.
        empty: sees no key.
        nan: sees a NaN or an infinity, and must be NaN; with a gradient of 0 it changes no other gradient.
        free: a sum may overflow; anything may come out.
        heavy: holds so large numbers that gradients may overflow, or so large a bias that they are not defined, or
            scores of a million and more, whose roundings change weights when the backward pass computes them again;
            what comes out is judged, and gradients are not.
        large: holds so large numbers in q, k or v.
        roundings: (batch, heads, queries, keys) float64, by how many roundings each scaled product is off.
    """

    visible: Tensor
    empty: Tensor
    nan: Tensor
    free: Tensor
    heavy: Tensor
    large: Tensor
    roundings: Tensor

    @property
    def judged(self) -> Tensor:
        return ~(self.nan | self.free)

    @property
    def with_gradient(self) -> Tensor:
        return self.judged & ~self.heavy & ~self.empty


@dataclass
class Judged:
    """What each result should be: name -> float64, how far it may be off, and which elements are judged."""

    rows: Rows
    exact: dict[str, Tensor] = field(default_factory=dict)
    band: dict[str, Tensor] = field(default_factory=dict)
    judged: dict[str, Tensor] = field(default_factory=dict)


def wide(x: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads for their query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


def rows_of(call: Call) -> Rows:
    """Look for what is not finite, and for what may overflow."""
    heads = call.q.shape[1]
    q, k = call.q.double(), wide(call.k.double(), heads)
    visible = call.seen
    bias = None if call.bias is None else call.bias.double().expand(visible.shape)
    if bias is not None:
        visible = visible & (bias != -torch.inf)
    some = visible.any(-1)
    bad_key = ~k.isfinite().all(-1)
    magnitude = finite(q).abs() @ finite(k).abs().mT * max(1.0, 1.5 * abs(scale_of(call)))
    single = call.dtype != torch.float64
    limit = SINGLE_LIMIT if single else LIMITS[call.dtype]
    largest = torch.finfo(torch.float32 if single else torch.float64).max
    huge = HUGE.get(call.dtype, SINGLE_HUGE)
    nan = some & ~q.isfinite().all(-1)
    over = visible & ~(magnitude <= limit)
    scaled = finite(q).abs() * 1.5 * abs(scale_of(call))  # kernels may scale q before the product
    over = over | (visible & ~(scaled <= largest).all(-1, keepdim=True))
    heavy = some & (finite(q).abs().amax(-1, keepdim=False) > huge if q.shape[-1] else torch.zeros_like(some))
    large_key = finite(k).abs().amax(-1) > huge if k.shape[-1] else torch.zeros_like(bad_key)
    if call.v is not None:
        v = wide(call.v.double(), heads)
        bad_key = bad_key | ~v.isfinite().all(-1)
        large_key = large_key | (finite(v).abs().amax(-1) > huge if v.shape[-1] else False)
        total = visible.double() @ finite(v).abs()
        over = over | ~(total <= 0.88 * largest).all(-1, keepdim=True)
    nan = nan | (visible & bad_key[:, :, None]).any(-1)
    large = heavy = heavy | (visible & large_key[:, :, None]).any(-1)
    roundings = roundings_of_products(call)
    heavy = heavy | (visible & (score_eps(call) * roundings > FUZZY)).any(-1)
    if bias is not None:
        nan = nan | (visible & ~bias.isfinite()).any(-1)
        over = over | (visible & (bias.abs() > 0.1 * largest) & (magnitude > 1e-8 * limit))
        heavy = heavy | (visible & (bias.abs() > FAR)).any(-1)
    if call.sinks is not None:
        sinks = call.sinks.double()[None, :, None]
        if bias is not None:
            # A logsumexp of this size absorbs the number of keys, so that the share of an equal sink is undefined.
            apart = 8 * torch.finfo(torch.float32 if single else torch.float64).eps * bias.abs()
            over = over | (visible & (bias.abs() > FAR) & ((bias - sinks[..., None]).abs() <= apart))
        sees_one = some & ~over.any(-1)  # where every score overflows to -inf, there may be none
        nan = nan | (sees_one & (sinks.isnan() | (sinks == torch.inf)))
        heavy = heavy | (some & (sinks.abs() > FAR))
    return Rows(visible, ~some, nan, over.any(-1) & ~nan, heavy, large, roundings)


def score_eps(call: Call) -> float:
    """One rounding of a score, which is float32 where q and k have half precision."""
    return torch.finfo(torch.promote_types(call.dtype, torch.float32)).eps


def roundings_of_products(call: Call) -> Tensor:
    """Return by how many roundings each scaled product is off: (batch, heads, queries, keys)."""
    q, k = (finite(each.detach().double()).abs() for each in (call.q, call.k))
    # Products of one sign are rounded at sums that grow to A, in head_dim steps; those of equal ones the same way.
    steps = call.q.shape[-1]
    expanded = call.q.stride(-1) == call.k.stride(-1) == 0
    return max(1.0, (steps if expanded else steps**0.5) / 4) * (q @ wide(k, q.shape[1]).mT) * abs(scale_of(call))


def scale_of(call: Call) -> float:
    return call.q.shape[-1] ** -0.5 if call.scale is None else call.scale


def dense_of(call: Call, rows: Rows, dtype: torch.dtype, *, leaves: bool) -> tuple[oracle.Dense, dict[str, Tensor]]:
    """Compute the judged rows by the oracle; keys that none of them sees, and queries that see none, are 0."""
    heads, group = call.q.shape[1], call.q.shape[1] // call.k.shape[1]
    seen = rows.visible & rows.judged[..., None]
    used_rows = (rows.judged & ~rows.empty)[..., None]
    used = seen.any(2).unflatten(1, (call.k.shape[1], group)).any(2)[..., None]  # (batch, kv_heads, keys, 1)
    given = {"q": torch.where(used_rows, finite(call.q.detach().to(dtype)), 0)}
    given["k"] = torch.where(used, finite(call.k.detach().to(dtype)), 0)
    values = call.k if call.v is None else call.v
    given["v"] = torch.where(used, finite(values.detach().to(dtype)), 0)
    if call.bias is not None:
        bias = call.bias.detach().to(dtype)
        given["bias"] = torch.where(bias == -torch.inf, bias, finite(bias))
    if call.sinks is not None:
        given["sinks"] = torch.nan_to_num(call.sinks.detach().to(dtype), nan=0.0, posinf=0.0, neginf=-torch.inf)
    given = {name: each.detach().requires_grad_(leaves) for name, each in given.items()}
    options = {"bias": given.get("bias"), "sinks": given.get("sinks"), "softcap": call.softcap, "scale": call.scale}
    del heads
    return oracle.attend(given["q"], given["k"], given["v"], seen, **options), given  # type: ignore[arg-type]


def judge(call: Call, of_output: Tensor | None = None, of_logsumexp: Tensor | None = None) -> Judged:
    """Judge output and logsumexp, and the gradients of all tensors for these cotangents."""
    rows = rows_of(call)
    dense, given = dense_of(call, rows, torch.float64, leaves=True)
    judged = Judged(rows)
    judged.exact |= {"output": dense.output.detach(), "logsumexp": dense.logsumexp.detach()}
    judged.exact["weights"] = dense.weights.detach()
    judged.judged |= {"output": rows.judged[..., None], "logsumexp": rows.judged, "weights": rows.judged[..., None]}
    cotangents = masked_cotangents(rows, of_output, of_logsumexp)
    if cotangents is not None:
        add_gradients(judged, dense, given, cotangents)
    _add_bands(judged, call, dense, cotangents)
    _judge_gradients_at(judged, call)
    return judged


def masked_cotangents(
    rows: Rows, of_output: Tensor | None, of_logsumexp: Tensor | None
) -> tuple[Tensor | None, Tensor | None] | None:
    """Cotangents that are 0 in the rows whose gradients are not judged; None where there are none."""
    if of_output is None and of_logsumexp is None:
        return None
    kept = rows.with_gradient
    if bool(kept.all()):  # an expanded gradient stays one
        return of_output, of_logsumexp
    output = None if of_output is None else torch.where(kept[..., None], of_output, 0)
    return output, None if of_logsumexp is None else torch.where(kept, of_logsumexp, 0)


def add_gradients(
    judged: Judged,
    dense: oracle.Dense,
    given: dict[str, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> None:
    """Let autograd differentiate the oracle."""
    of_output, of_logsumexp = cotangents
    outputs, of_outputs = [], []
    if of_output is not None:
        outputs.append(dense.output)
        of_outputs.append(of_output.to(dense.output.dtype))
    if of_logsumexp is not None:
        outputs.append(dense.logsumexp)
        of_outputs.append(of_logsumexp.to(dense.logsumexp.dtype))
    grads = torch.autograd.grad(outputs, list(given.values()), of_outputs, materialize_grads=True, allow_unused=True)
    # A sink of -inf next to no key divides 0 by 0.
    judged.exact |= {
        f"gradient of {name}": torch.nan_to_num(each, nan=0.0) for name, each in zip(given, grads, strict=True)
    }


def _add_bands(
    judged: Judged, call: Call, dense: oracle.Dense, cotangents: tuple[Tensor | None, Tensor | None] | None
) -> None:
    """Follow one rounding per step: (batch, heads, queries, keys) each, then summed as the results are."""
    heads = call.q.shape[1]
    rows, band = judged.rows, judged.band
    sums = 4 + log2(1 + sum(call.seen.shape[2:]) + call.q.shape[-1])
    q, k = finite(call.q.detach().double()).abs(), wide(finite(call.k.detach().double()).abs(), heads)
    p, scale = dense.weights.detach(), abs(scale_of(call))
    off = sums + torch.where(rows.visible & rows.judged[..., None], rows.roundings, 0)
    if call.bias is not None:
        size = finite(call.bias.detach().double()).abs()
        off = off + torch.where(size > FAR, 0, size)
    one = score_eps(call)
    mean = (p * off).sum(-1, keepdim=True)
    mean = mean.maximum((p * _growth(off, one)).sum(-1, keepdim=True).mul(one).log1p() / one)
    weight = of_sink = torch.zeros_like(mean)
    logsumexp = finite(dense.logsumexp.detach())
    if call.sinks is not None:
        sinks = torch.nan_to_num(call.sinks.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)[None, :, None]
        weight = torch.where(rows.empty, 0, (sinks - logsumexp).clamp(max=0).exp())[..., None]
        size = torch.where(sinks.abs() > FAR, 0, sinks.abs())
        of_sink = weight * (sums + size[..., None])
        mean = mean + of_sink
    off_p = p * _growth(off + mean, one) + UNDERFLOW * rows.visible
    band["weights"] = off_p
    v = wide(finite((call.k if call.v is None else call.v).detach().double()).abs(), heads)
    band["output"] = off_p @ v
    band["logsumexp"] = mean[..., 0] + logsumexp.abs()
    if cotangents is None:
        return
    of_output, of_logsumexp = (None if each is None else each.double().abs() for each in cotangents)
    moved = torch.zeros_like(p) if of_output is None else of_output @ v.mT
    moved = torch.where(rows.visible, moved, 0)
    moved_mean = (p * moved).sum(-1, keepdim=True) + (0 if of_logsumexp is None else of_logsumexp[..., None])
    off_s = off_p * (moved + moved_mean)
    group = (call.k.shape[1], heads // call.k.shape[1])
    band["gradient of q"] = scale * off_s @ k
    band["gradient of k"] = (scale * off_s.mT @ q).unflatten(1, group).sum(2)
    of_v = torch.zeros_like(v) if of_output is None else off_p.mT @ of_output
    band["gradient of v"] = of_v.unflatten(1, group).sum(2)
    if call.bias is not None:
        band["gradient of bias"] = off_s.sum_to_size(call.bias.shape)
    if call.sinks is not None:
        of_delta = (off_p * moved).sum(-1, keepdim=True)  # of dO . O, whose weights may be tiny next to the sink's
        of_sinks = (sums + of_sink + mean * of_sink / sums) * moved_mean + weight * of_delta
        band["gradient of sinks"] = of_sinks.sum((0, 2, 3))


def _growth(off: Tensor, one: float) -> Tensor:
    """Return by how many roundings the exponential of a number is off that is itself off by some of size `one`."""
    return (one * off).clamp(max=100).expm1() / one


def _judge_gradients_at(judged: Judged, call: Call) -> None:
    """Leave out the gradients of what a row that may overflow sees: a cotangent of 0 need not protect them."""
    free = judged.rows.free | judged.rows.heavy
    group = (call.k.shape[1], call.q.shape[1] // call.k.shape[1])
    cells = judged.rows.visible & free[..., None]
    keys = ~cells.any(2).unflatten(1, group).any(2)[..., None]
    judged.judged |= {"gradient of q": ~free[..., None], "gradient of k": keys, "gradient of v": keys}
    if call.bias is not None:
        judged.judged["gradient of bias"] = cells.double().sum_to_size(call.bias.shape) == 0
    if call.sinks is not None:
        judged.judged["gradient of sinks"] = ~free.any(-1).any(0)


def plain_results(
    call: Call, rows: Rows, dtype: torch.dtype, cotangents: tuple[Tensor | None, Tensor | None] | None
) -> dict[str, Tensor]:
    """The plain computation in a dtype, by which a result that is outside the band is judged once more."""
    plain = Judged(rows)
    dense, given = dense_of(call, rows, dtype, leaves=True)
    plain.exact |= {"output": dense.output, "logsumexp": dense.logsumexp, "weights": dense.weights}
    if cotangents is not None:
        add_gradients(plain, dense, given, cotangents)
    return {name: each.detach() for name, each in plain.exact.items()}


def compare(
    call: Call,
    judged: Judged,
    found: dict[str, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Hold results to what they should be.

    Args:
        call: the call.
        judged: what they should be.
        found: name -> result.
        cotangents: those of the gradients.
        dtype: that the call computes in, if it is not that of its tensors.

    Raises:
        Mismatch: an element is further off than its budget, or a row that must be NaN is none.
    """
    worked = call.dtype if dtype is None else dtype
    plain: dict[str, Tensor] | None = None
    for name, value in found.items():
        exact = judged.exact[name]
        if value.shape != exact.shape:
            raise Mismatch(f"{name} has another shape: {tuple(value.shape)} instead of {tuple(exact.shape)}")
        info = torch.finfo(torch.promote_types(worked, value.dtype) if name == "weights" else worked)
        roundings = 2 if worked == torch.float64 else 1  # the judge rounds as much
        band = roundings * torch.finfo(worked).eps * judged.band[name] + info.tiny
        if value.dtype != torch.float64:
            band = band + torch.finfo(value.dtype).eps * exact.abs() + torch.finfo(value.dtype).smallest_normal
        if not bool(outside(value, exact, band, judged.judged[name]).any()):
            continue
        if plain is None:
            plain = plain_results(call, judged.rows, worked, cotangents)
        error = (plain[name].double() - exact).abs()
        if error.dim():
            error = error.amax(-1, keepdim=True)  # that of one element may be small by chance
        wrong = outside(value, exact, band + torch.nan_to_num(error, nan=0.0, posinf=0.0), judged.judged[name])
        if bool(wrong.any()):
            raise Mismatch(sentence(name, value, exact, band + error, wrong))
    nan = judged.rows.nan
    for name in ("output", "logsumexp"):
        if name in found and bool(nan.any()) and not bool(found[name][nan].isnan().all()):
            raise Mismatch(f"{name} of a row that sees NaN or an infinity is a number")


def outside(value: Tensor, exact: Tensor, band: Tensor, judged: Tensor) -> Tensor:
    """Which elements are further off than 2 bands; too large a number for the dtype may be infinite."""
    band = BUDGET * band
    same = (value == exact) | (value.isnan() & exact.isnan())
    apart = (value.double() - exact).abs()
    near = apart <= 2 * band  # False for NaN
    too_large = exact.isfinite() & (exact.abs() + 2 * band > 0.99 * torch.finfo(value.dtype).max)
    return ~(same | near | too_large) & judged


def sentence(name: str, value: Tensor, exact: Tensor, band: Tensor, wrong: Tensor) -> str:
    """Say what is wrong; the words are the same for all cases of one kind."""
    apart = torch.where(wrong, (value.double() - exact).abs(), -1)
    place = int(torch.where(apart.isnan(), torch.inf, apart).argmax())
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(place), wrong.shape)) if wrong.dim() else ()
    seen, right = float(value[index]), float(exact[index])
    kind = "off"
    if not bool(value[index].isfinite()):
        kind = "not finite" if bool(exact[index].isfinite()) else kind
    elif not bool(exact[index].isfinite()):
        kind = "finite"
    allowed = 2 * BUDGET * float(band.expand(wrong.shape)[index])
    return (
        f"{name} is {kind}: {seen:.6g} at {index} instead of {right:.6g}, {allowed:.2g} is allowed, "
        f"{int(wrong.sum())} of {wrong.numel()} elements"
    )
