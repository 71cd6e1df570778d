"""The statistics of a head: what each one means, its unit and its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from inspect import cleandoc

from torch import Tensor

from multihead.errors import ProbeError
from multihead.probes.probe import Axes, Need, Part, Parts, Probe


def entropy(parts: Parts) -> Tensor:
    """Shannon entropy of each query's weights.

    Returns: (batch, heads, queries), nats; 0 = one key, ln(keys) = all of them evenly.
    Source: H_i = -sum_j p_ij ln p_ij, with ln p_ij = s_ij - L_i. A sink's weight is not counted in.
    """
    return parts["surprisal"].clamp(min=0)  # one key alone can come out at -1e-7 by rounding


def effective_keys(parts: Parts) -> Tensor:
    """How many keys a query spreads over, as if evenly.

    Returns: (batch, heads, queries), keys; 0 where a query sees none.
    Source: exp(H_i), the perplexity of the weights.
    """
    return parts["surprisal"].clamp(min=0).exp()


def mean_distance(parts: Parts) -> Tensor:
    """Mean distance between a query and the keys it attends to.

    Returns: (batch, heads, queries), tokens.
    Source: sum_j p_ij |position_i - j| / sum_j p_ij; the mean attention distance of arXiv:2010.11929, in one dimension.
    """
    return parts["mean_distance"]


def distance_spread(parts: Parts) -> Tensor:
    """Standard deviation of that distance, over a query's weights.

    Returns: (batch, heads, queries), tokens; 0 = all weight at one distance.
    Source: sqrt(E[(|d| - E|d|)^2]) under p_ij / sum_j p_ij.
    """
    return parts["distance_spread"]


def mass_at_offset(parts: Parts, offset: int) -> Tensor:
    """Weight on the key at an offset from the query's own position.

    Returns: (batch, heads, queries), a share 0..1; 0 where that key is hidden or does not exist.
    Source: p_ij at j = position_i + offset. Offset -1: the "previous token heads" of arXiv:1905.09418 and 2209.11895;
        1: arXiv:1906.04341, section 3.1.
    """
    return parts["at", offset]


def mass_on_first(parts: Parts, count: int) -> Tensor:
    """Weight on the first keys of the sample, from the first that any of its queries may see.

    Returns: (batch, heads, queries), a share 0..1.
    Source: sum_{j < count} p_ij; "attention sinks", arXiv:2309.17453, which keeps the first four.
    """
    return parts["first", count]


def mass_on_set(parts: Parts, name: str) -> Tensor:
    """Weight on the keys of a set, such as separators or punctuation.

    Returns: (batch, heads, queries), a share 0..1.
    Source: the sum of p_ij over the set; arXiv:1906.04341, section 3.2.
    """
    return parts["on", name]


def largest_weight(parts: Parts) -> Tensor:
    """The largest weight of each query.

    Returns: (batch, heads, queries), a share 0..1; 0 where a query sees no key.
    Source: max_j p_ij; its mean is the "confidence" of a head in arXiv:1905.09418.
    """
    return parts["largest"]


def largest_key(parts: Parts) -> Tensor:
    """The key with the largest weight, of equal ones the first.

    Returns: (batch, heads, queries), int64; -1 where a query sees no key.
    Source: argmax_j p_ij.
    """
    return parts["largest_key"]


def duplicate_mass(parts: Parts) -> Tensor:
    """Weight on earlier keys that are the same token as the query.

    Returns: (batch, heads, queries), a share 0..1; 0 where the token has not been there, or the query is no key.
    Source: the sum of p_ij over j < position_i with id_j = id_i; "duplicate token heads", arXiv:2211.00593.
    """
    return parts["duplicate"]


def induction_mass(parts: Parts) -> Tensor:
    """Weight on the keys right after an earlier occurrence of the query's token.

    Returns: (batch, heads, queries), a share 0..1. Where a token comes twice running, that key is the query's own.
    Source: the sum of p_ij over j <= position_i with id_{j-1} = id_i; the prefix matching of arXiv:2209.11895, which
        measures it on repeated random tokens.
    """
    return parts["induction"]


def sink_mass(parts: Parts) -> Tensor:
    """Weight that the head's learned sink takes from the keys.

    Returns: (batch, heads, queries), a share 0..1; 0 where a query sees no key.
    Source: exp(sink_h - L_i) = 1 - sum_j p_ij; GPT-OSS, arXiv:2508.10925.
    """
    return parts["sink"]


def contribution(parts: Parts) -> Tensor:
    """Norms of the transformed values that a query gathers, weighed: what its keys contribute before they cancel.

    Returns: (batch, heads, queries), in units of the layer's output.
    Source: sum_j p_ij ||f_h(x_j)||, with f_h(x_j) = W_O^h v_j; the norm-based analysis of arXiv:2004.10102.
    """
    return parts["contribution"]


def output_norm(parts: Parts) -> Tensor:
    """Norm of what a head adds to the layer's output.

    Returns: (batch, heads, queries), in units of the layer's output; at most the contribution.
    Source: ||sum_j p_ij f_h(x_j)||, with f_h(x_j) = W_O^h v_j; arXiv:2004.10102.
    """
    return parts["output_norm"]


def received(parts: Parts) -> Tensor:
    """Attention each key receives.

    Returns: (batch, heads, keys), weights summed over the queries; 1 = as much as one query gives.
    Source: the column sums of P, sum_i p_ij.
    """
    return parts["received"]


def coverage(parts: Parts) -> Tensor:
    """How far each key was attended to at all.

    Returns: (batch, heads, keys), 0..1; 1 = as much as one query gives, or more.
    Source: min(1, sum_i p_ij), whose logarithms are the coverage penalty of arXiv:1609.08144, equation 14.
    """
    return parts["received"].clamp(max=1)


def pooled_map(parts: Parts) -> Tensor:
    """The attention map in blocks.

    Returns: (batch, heads, rows, columns), the mean (or on request the largest) weight over the cells of a block that
        may be seen; NaN where none may.
    Source: the block means, or maxima, of P.
    """
    return parts["pooled"]


def _probe(
    of: Callable[[Parts], Tensor],
    *parts: Part,
    name: str | None = None,
    needs: Iterable[Need] = (),
    axes: Axes = "queries",
    tokens: frozenset[int] | None = None,
) -> Probe:
    function = of.func if isinstance(of, partial) else of
    about = cleandoc(function.__doc__ or "")
    return Probe(name or function.__name__, of, frozenset(parts), frozenset(needs), axes, tokens, about)


def _at(offset: int, name: str) -> Probe:
    return _probe(partial(mass_at_offset, offset=offset), ("at", offset), name=name)


def _first(count: int, name: str) -> Probe:
    return _probe(partial(mass_on_first, count=count), ("first", count), name=name)


def _on(name: str, need: Need, tokens: frozenset[int] | None = None) -> Probe:
    return _probe(partial(mass_on_set, name=name), ("on", name), name=f"{name}_mass", needs=(need,), tokens=tokens)


_LISTED = (
    _probe(entropy, "surprisal"),
    _probe(effective_keys, "surprisal"),
    _probe(mean_distance, "mean_distance"),
    _probe(distance_spread, "distance_spread"),
    _at(0, "self_mass"),
    _at(-1, "previous_mass"),
    _at(1, "next_mass"),
    _first(1, "first_mass"),
    _on("special", "special_keys"),
    _probe(largest_weight, "largest"),
    _probe(largest_key, "largest_key"),
    _probe(sink_mass, "sink", needs=("sinks",)),
    _probe(duplicate_mass, "duplicate", needs=("ids",)),
    _probe(induction_mass, "induction", needs=("ids",)),
    _probe(contribution, "contribution", needs=("values", "output_weight")),
    _probe(output_norm, "output_norm", needs=("values", "output_weight")),
    _probe(received, "received", axes="keys"),
    _probe(coverage, "received", axes="keys"),
    _probe(pooled_map, "pooled", axes="map"),
)
PROBES: dict[str, Probe] = {probe.name: probe for probe in _LISTED}
DEFAULT = tuple(PROBES)[: tuple(PROBES).index("sink_mass") + 1]
"""What costs next to nothing: all that the native kernel gives in its one pass, and the learned sink's mass."""


def offset_mass(offset: int) -> Probe:
    """Make the probe of the weight on the key at an offset from the query's own position; see `mass_at_offset`.

    Raises:
        ProbeError: no integer.

    >>> offset_mass(-5)
    Probe(name='offset_minus_5_mass')
    >>> offset_mass(-1)
    Probe(name='previous_mass')
    """
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ProbeError(f"offset_mass was given {offset!r}.", "Give an integer: -1 is the key before the query.")
    named = {0: "self_mass", -1: "previous_mass", 1: "next_mass"}
    if offset in named:
        return PROBES[named[offset]]
    return _at(offset, f"offset_{'minus' if offset < 0 else 'plus'}_{abs(offset)}_mass")


def first_keys_mass(count: int) -> Probe:
    """Make the probe of the weight on the first keys of the sample; see `mass_on_first`.

    Raises:
        ProbeError: no integer of at least 1.

    >>> first_keys_mass(4)
    Probe(name='first_4_mass')
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ProbeError(f"first_keys_mass was given {count!r}.", "Give an integer of at least 1.")
    return PROBES["first_mass"] if count == 1 else _first(count, f"first_{count}_mass")


def tokens_mass(name: str, ids: Iterable[int] | None = None) -> Probe:
    """Make the probe of the weight on some tokens; see `mass_on_set`.

    Args:
        name: what the set is called; the statistic is called `name_mass`.
        ids: the token ids that belong to it; None where `ProbeContext.sets` says which keys do.

    Raises:
        ProbeError: the name is no Python identifier or is taken, or the ids are no integers.

    >>> tokens_mass("punctuation", ids=(11, 13))
    Probe(name='punctuation_mass')
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ProbeError(
            f"tokens_mass was given the name {name!r}.", 'Give a Python identifier, such as "punctuation".'
        )
    if f"{name}_mass" in PROBES or name.startswith(("offset_", "first_")):
        raise ProbeError(f"{name}_mass is the name of another statistic.", "Give the set another name.")
    if ids is None:
        return _on(name, "sets")
    counted = frozenset(ids)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in counted):
        raise ProbeError(
            f"tokens_mass({name!r}) was given ids that are no integers.", "Give token ids, such as [11, 13]."
        )
    return _on(name, "ids", counted)
