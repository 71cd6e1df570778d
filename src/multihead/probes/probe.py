"""What a probe is: a name, a small function, the parts it is made of, and what it needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

Part: TypeAlias = "str | tuple[str, int | str]"
"""What is measured of a map, (batch, heads, queries) unless said, 0 where a query sees no key:

- "surprisal": -sum_j p_ij ln p_ij, nats.
- "mean_distance", "distance_spread": mean and standard deviation of |position_i - j| under p_ij / sum_j p_ij, tokens.
- "largest", "largest_key": max_j p_ij, and the first key that has it, int64.
- ("at", offset): p_ij at j = position_i + offset.
- ("first", count): sum of p_ij over the first keys of the sample.
- ("on", name): sum of p_ij over a set of keys.
- "duplicate": sum of p_ij over earlier keys with the query's own token.
- "induction": sum of p_ij over the keys right after those.
- "sink": the weight of the learned sink.
- "contribution": sum_j p_ij ||f_h(x_j)||; "output_norm": ||sum_j p_ij f_h(x_j)||.
- "received": (batch, heads, keys), sum_i p_ij.
- "pooled": (batch, heads, rows, columns), the map in blocks, NaN where no cell may be seen.
"""
Parts: TypeAlias = Mapping[Part, Tensor]

Need = Literal["special_keys", "ids", "sets", "output_weight", "values", "sinks"]
Axes = Literal["queries", "keys", "map"]


@dataclass(frozen=True)
class Probe:
    """One statistic. Two of the same name and fields are the same.

    Fields:
        name: what it is called in a result.
        of: makes it of its parts.
        parts: the names of those.
        needs: what must be known beside q and k.
        axes: whether it has a number a query, a number a key, or is a map.
        tokens: the token ids that it counts; None where a set of keys says it, or nothing is counted.
        about: its definition and source.
    """

    name: str
    of: Callable[[Parts], Tensor] = field(compare=False, repr=False)
    parts: frozenset[Part] = field(repr=False)
    needs: frozenset[Need] = field(default=frozenset(), repr=False)
    axes: Axes = field(default="queries", repr=False)
    tokens: frozenset[int] | None = field(default=None, repr=False)
    about: str = field(default="", compare=False, repr=False)
