"""The attention of a layer's heads on repeated random tokens, where only the repetition can be predicted.

Statistics of repeated random tokens are stored per layer, text and head, so that the file has what the standard error
needs. They are part of the means of a layer, and by that of every table, page and search; they have no medians over
queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RepeatedTokens:
    """The attention of one layer on texts of random tokens that repeat, see `observation.textbook`.

    Attributes:
        length: how many random tokens a text has.
        times: how often the same random tokens occur in a text.
        start: whether the text begins with a start token.
        shares: statistic of `probes.catalogue.REPEATED` -> (texts, heads) float64, the mean share in each text.
        chance: the same statistics -> (heads,) float64, what an even spread over the visible keys gives.
    """

    length: int
    times: int
    start: bool
    shares: dict[str, Tensor]
    chance: dict[str, Tensor]

    def means(self) -> dict[str, Tensor]:
        """Mean share of each statistic over the texts: (heads,) float64."""
        return {name: shares.mean(0) for name, shares in self.shares.items()}
