"""The per-query and per-key statistics ("parts") that kernels measure, and from which probes are computed.

A part is a sum over a row of attention weights, one looked-up weight, or a weighted column. This module defines all
parts. Kernels measure some parts, `probes/streaming.py` and `probes/lookups.py` the others, and each probe names the
parts that it needs. Further inputs of a probe (`probes/context.py`: token ids, sets of tokens, an output projection)
and its shape follow from its parts. Several probes share one pass over the attention weights, and a user-defined probe
is as cheap as a built-in one.
"""

from __future__ import annotations

from typing import TypeAlias

from multihead.errors import ArgumentError

PartName: TypeAlias = "str | tuple[str, int | str]"
"""The name of a part (a statistic): a key of `PARTS`, or (key of `PART_FAMILIES`, argument): ("offset_mass", -1)."""

PARTS: dict[str, str] = {
    "entropy": "-Σ_j p_ij ln p_ij, nats",
    "mean_distance": "mean of |position_i - j| under p_ij / Σ_j p_ij, tokens",
    "distance_spread": "standard deviation of that distance, tokens",
    "largest_weight": "max_j p_ij",
    "largest_key": "the first key with the largest weight, int64; -1 where a query sees no key",
    "sink_mass": "the weight of the learned sink",
    "logsumexp": "ln Σ_j exp(s_ij), the learned sink included, nats",
    "position": "position of the query among the keys of its text, from 0",
    "duplicate_mass": "Σ p_ij over the earlier keys with the query's own token",
    "induction_mass": "Σ p_ij over the keys right after those",
    "contribution": "Σ_j p_ij ‖f_h(x_j)‖, f_h(x_j) = W_O^h v_j",
    "output_norm": "‖Σ_j p_ij f_h(x_j)‖",
    "received": "Σ_i p_ij, (batch, heads, keys)",
    "pooled_map": "the map in blocks, (batch, heads, row blocks, column blocks); NaN where no cell is visible",
}
"""Name of a part -> definition. The shape is (batch, heads, queries) unless stated; 0 where a query sees no key."""

PART_FAMILIES: dict[str, tuple[type, str]] = {
    "offset_mass": (int, "p_ij at j = position_i + offset"),
    "first_keys_mass": (int, "Σ p_ij over the first keys of the sample, this many"),
    "tokens_mass": (str, "Σ p_ij over the keys of a set"),
}
"""Name of a family of parts -> type of its argument (offset, count, name of a set), definition of a part
(batch, heads, queries)."""


def check_part(part: object) -> None:
    """Raise an ArgumentError if `part` is not defined in PARTS or PART_FAMILIES.

    >>> check_part("entropy")
    >>> check_part(("offset_mass", -5))
    """
    if isinstance(part, str) and part in PARTS:
        return
    match part:
        case (str(family), argument) if family in PART_FAMILIES:
            expected = PART_FAMILIES[family][0]
            if isinstance(argument, expected) and not isinstance(argument, bool):
                return
    families = (f"({name!r}, {kind.__name__})" for name, (kind, _) in PART_FAMILIES.items())
    raise ArgumentError(f"There is no part {part!r}.", f"Give some of {', '.join([*map(repr, PARTS), *families])}.")
