"""The attention of a layer's heads on repeated random tokens.

Statistics of repeated random tokens are stored per layer, text and head, so that the file has what the standard error
needs. The means of a layer include these statistics, so every table, page and search does too. Medians over queries do
not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RepeatedTokens:
    """The attention of one layer on texts of repeated random tokens, measured by `observation.textbook`.

    Attributes:
        length: number of random tokens.
        times: number of times that the random tokens occur in a text.
        start: whether the text begins with a start token.
        shares: name of a statistic in `probes.catalogue.REPEAT_PROBES` -> (texts, heads) float64, mean share in
        each text.
        chance: name of a statistic -> (heads,) float64, its chance level (even weights over the visible keys).
        start_token: the start token as the vocabulary writes it, such as "<s>"; "" if it is unknown or there is none.
    """

    length: int
    times: int
    start: bool
    shares: dict[str, Tensor]
    chance: dict[str, Tensor]
    start_token: str = ""

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each statistic over the texts: name -> (heads,) float64."""
        return {name: shares.mean(0) for name, shares in self.shares.items()}
