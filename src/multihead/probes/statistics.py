"""The statistics of a head: what each one means, its unit and its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multihead.call import Attended, AttentionCall, AttentionRequest
from multihead.errors import ProbeError
from multihead.kernels.quarantine import quarantined
from multihead.kernels.tile import without_autocast, working_dtype
from multihead.plan.bounds import KeyBounds, bounds_of
from multihead.probes.asked import asked, takes
from multihead.probes.sums import Sums, of_sample

MAP_SIZE = 64


def entropy(sums: Sums) -> Tensor:
    """Shannon entropy of each query's weights.

    Returns: (heads, queries), nats; 0 = one key, ln(keys) = all of them evenly.
    Source: H_i = -sum_j p_ij ln p_ij, with ln p_ij = s_ij - L_i. A sink's weight is not counted in.
    """
    return sums.surprisal.clamp(min=0)  # one key alone can come out at -1e-7 by rounding


def effective_keys(sums: Sums) -> Tensor:
    """How many keys a query spreads over, as if evenly.

    Returns: (heads, queries), keys; 0 where a query sees none.
    Source: exp(H_i), the perplexity of the weights.
    """
    return sums.surprisal.exp().masked_fill(sums.mass == 0, 0)


def mean_distance(sums: Sums) -> Tensor:
    """Mean distance between a query and the keys it attends to.

    Returns: (heads, queries), tokens.
    Source: sum_j p_ij |position_i - j| / sum_j p_ij; the mean attention distance of arXiv:2010.11929, in one dimension.
    """
    return sums.distance / _mass(sums)


def distance_spread(sums: Sums) -> Tensor:
    """Standard deviation of that distance, over a query's weights.

    Returns: (heads, queries), tokens; 0 = all weight at one distance.
    Source: sqrt(E[(|d| - E|d|)^2]) under p_ij / sum_j p_ij.
    """
    return (sums.squares / _mass(sums)).sqrt()


def self_mass(sums: Sums) -> Tensor:
    """Weight on the key at the query's own position.

    Returns: (heads, queries), a share 0..1; 0 where that key is hidden or does not exist.
    Source: p_ij at j = position_i.
    """
    return sums.at["self"]


def previous_mass(sums: Sums) -> Tensor:
    """Weight on the key before the query's own position.

    Returns: (heads, queries), a share 0..1; 0 where that key is hidden or does not exist.
    Source: p_ij at j = position_i - 1; "previous token heads" of arXiv:1905.09418 and 2209.11895.
    """
    return sums.at["previous"]


def next_mass(sums: Sums) -> Tensor:
    """Weight on the key after the query's own position.

    Returns: (heads, queries), a share 0..1; 0 where that key is hidden or does not exist.
    Source: p_ij at j = position_i + 1; arXiv:1906.04341, section 3.1.
    """
    return sums.at["next"]


def first_mass(sums: Sums) -> Tensor:
    """Weight on the first key of the sample: the first that any of its queries may see.

    Returns: (heads, queries), a share 0..1.
    Source: p_i0; "attention sinks", arXiv:2309.17453.
    """
    return sums.first


def special_mass(sums: Sums) -> Tensor:
    """Weight on the special keys, such as separators.

    Returns: (heads, queries), a share 0..1.
    Source: the sum of p_ij over the special keys; arXiv:1906.04341, section 3.2.
    """
    return sums.special


def largest_weight(sums: Sums) -> Tensor:
    """The largest weight of each query.

    Returns: (heads, queries), a share 0..1; 0 where a query sees no key.
    Source: max_j p_ij; its mean is the "confidence" of a head in arXiv:1905.09418.
    """
    return sums.largest.exp()


def largest_key(sums: Sums) -> Tensor:
    """The key with the largest weight, of equal ones the first.

    Returns: (heads, queries), int64; -1 where a query sees no key.
    Source: argmax_j p_ij.
    """
    return sums.largest_key


def received(sums: Sums) -> Tensor:
    """Attention each key receives.

    Returns: (heads, keys), weights summed over the queries; 1 = as much as one query gives.
    Source: the column sums of P, sum_i p_ij.
    """
    return sums.received


def pooled_map(sums: Sums) -> Tensor:
    """The attention map in blocks.

    Returns: (heads, rows, columns), the mean weight over the cells of a block that may be seen; NaN where none may.
    Source: the block means of P.
    """
    return sums.pooled.means()


@dataclass(frozen=True)
class Probe:
    """One statistic: how it is made of sums, and which sums it takes."""

    of: Callable[[Sums], Tensor]
    streams: frozenset[str]


PROBES: dict[str, Probe] = {
    "entropy": Probe(entropy, frozenset({"surprisal"})),
    "effective_keys": Probe(effective_keys, frozenset({"surprisal", "distance"})),
    "mean_distance": Probe(mean_distance, frozenset({"distance"})),
    "distance_spread": Probe(distance_spread, frozenset({"distance"})),
    "self_mass": Probe(self_mass, frozenset({"at"})),
    "previous_mass": Probe(previous_mass, frozenset({"at"})),
    "next_mass": Probe(next_mass, frozenset({"at"})),
    "first_mass": Probe(first_mass, frozenset({"first"})),
    "special_mass": Probe(special_mass, frozenset({"special"})),
    "largest_weight": Probe(largest_weight, frozenset({"largest"})),
    "largest_key": Probe(largest_key, frozenset({"largest"})),
    "received": Probe(received, frozenset({"received"})),
    "pooled_map": Probe(pooled_map, frozenset({"pooled"})),
}
OF_POSITIONS = frozenset({"mean_distance", "distance_spread", "self_mass", "previous_mass", "next_mass"})
DEFAULT = tuple(name for name in PROBES if name not in ("special_mass", "pooled_map"))


def refuse_unless_known(names: Sequence[str], special_keys: Tensor | None) -> None:
    """Refuse names that are no statistic, and `special_mass` where nobody said which keys are special."""
    for name in names:
        if name not in PROBES:
            raise ProbeError(f"There is no statistic {name!r}.", f"Give some of {', '.join(PROBES)}.")
    if "special_mass" in names and special_keys is None:
        raise ProbeError("special_mass was asked for, and nothing says which keys are special.", "Give special_keys.")


def measured(
    request: AttentionRequest,
    logsumexp: Tensor,
    names: Sequence[str],
    *,
    special_keys: Tensor | None = None,
    map_size: int = MAP_SIZE,
) -> dict[str, Tensor]:
    """Compute statistics without ever holding queries x keys: by the native kernel if it takes the call, else by tiles.

    Args:
        request: the call; gradients are not followed.
        logsumexp: (batch, heads, queries), nats, in float32 or float64.
        names: which statistics.
        special_keys: (batch, keys) bool, or None.
        map_size: most rows and columns of the pooled map.

    Returns: a dict from name to tensor, each with the batch in front; a row of NaN is NaN (-1 for `largest_key`),
        and counts as 0 in `received` and `pooled_map`.

    Raises:
        ProbeError: special_keys is not (batch, keys) booleans, or map_size is below 1.
    """
    shape = request.shape
    _refuse_unless_sensible(special_keys, map_size, sizes=(shape.batch, shape.key_length))
    with torch.no_grad(), without_autocast(shape.device):
        bounds = bounds_of(request)
        compute = asked if takes(request, bounds) else _streamed
        found = compute(request, bounds, logsumexp, names, special_keys=special_keys, map_size=map_size)
        bad, empty = logsumexp.isnan(), logsumexp == -torch.inf
        for name, value in found.items():
            if name not in ("received", "pooled_map"):
                of_empty, of_bad = (0, torch.nan) if value.is_floating_point() else (-1, -1)
                found[name] = value.masked_fill(empty, of_empty).masked_fill(bad, of_bad)
        return found


def _streamed(
    request: AttentionRequest,
    bounds: KeyBounds,
    logsumexp: Tensor,
    names: Sequence[str],
    *,
    special_keys: Tensor | None,
    map_size: int,
) -> dict[str, Tensor]:
    """Compute statistics tile by tile; see `measured`."""
    shape = request.shape
    cleaned, _ = quarantined(request, bounds)
    # exp(s - huge) = 0 leaves a row out; an infinite one would give 0 * inf in its entropy.
    left_out = logsumexp.isnan() | (logsumexp == -torch.inf)
    row = logsumexp.masked_fill(left_out, torch.finfo(logsumexp.dtype).max / 4)
    streams = frozenset[str]().union(*(PROBES[name].streams for name in names))
    samples = [
        of_sample(
            cleaned,
            bounds,
            row[sample],
            sample,
            streams=streams,
            special_keys=None if special_keys is None else special_keys[sample],
            map_size=map_size,
        )
        for sample in range(shape.batch)
    ]
    nothing = Sums.zero(  # what an empty batch takes its shapes from
        shape.num_heads, shape.query_length, shape.key_length, map_size=map_size, device=shape.device
    )
    found = {}
    for name in names:
        value = torch.stack([PROBES[name].of(sums) for sums in samples or [nothing]])[: shape.batch]
        found[name] = value.to(working_dtype(shape.dtype)) if value.is_floating_point() else value
    return found


def without_positions(attended: Attended) -> Attended:
    """Leave out the statistics that depend on where the queries stand among the keys."""
    kept = {name: value for name, value in attended.statistics.items() if name not in OF_POSITIONS}
    return replace(attended, statistics=kept)


def of_call(
    call: AttentionCall, names: Sequence[str], *, special_keys: Tensor | None = None, map_size: int = MAP_SIZE
) -> dict[str, Tensor]:
    """Give statistics of a call that has run: those its kernel had at hand, the others measured now."""
    refuse_unless_known(names, special_keys)
    ready = {name: call.attended.statistics[name] for name in names if name in call.attended.statistics}
    missing = [name for name in names if name not in ready]
    if missing:
        logsumexp = call.attended.logsumexp.detach()
        ready |= measured(call.request, logsumexp, missing, special_keys=special_keys, map_size=map_size)
    return ready


def _refuse_unless_sensible(special_keys: Tensor | None, map_size: object, *, sizes: tuple[int, int]) -> None:
    if special_keys is not None and (special_keys.dtype != torch.bool or tuple(special_keys.shape) != sizes):
        raise ProbeError(
            f"special_keys is a {special_keys.dtype} tensor of shape {tuple(special_keys.shape)}.",
            f"Give booleans (batch, keys) = {sizes}.",
        )
    if isinstance(map_size, bool) or not isinstance(map_size, int) or map_size < 1:
        raise ProbeError(f"map_size is {map_size!r}.", "Give an integer of at least 1.")


def _mass(sums: Sums) -> Tensor:
    return sums.mass.masked_fill(sums.mass == 0, 1)
