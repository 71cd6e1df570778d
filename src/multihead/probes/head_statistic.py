"""`HeadStatistic`: what a number of each head is that was measured on texts of its own, apart from a record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from multihead.locale.texts import text, text_or
from multihead.probes.probe import Statistic

Number = TypeVar("Number", float, Tensor)

HEAD_NUMBERS = ("effect", "estimate", "sensitivity", "recovered", "lost")
"""What a `HeadStatistic` can be, exact effects first."""


@dataclass(frozen=True)
class HeadsTogether:
    """What some heads do for a measure when all of them are off, on texts that did not choose them.

    Attributes:
        heads: (number of a layer, head), the heads that are off.
        effects: per text, the measure without them minus the measure with all heads.
        singles: per text, the sum of the effects of each of them alone.
        draws: per draw of as many random heads of the same layers, their effect together, the mean over the texts.
    """

    heads: tuple[tuple[int, int], ...]
    effects: tuple[float, ...]
    singles: tuple[float, ...]
    draws: tuple[float, ...] = ()


@dataclass(frozen=True)
class HeadStatistic(Statistic):
    """A number of each head for a measure of a model's output, see `Record.add`.

    Attributes:
        what: "effect" (the measure without the head minus the measure with it), "estimate" (the same by gradient),
            "sensitivity" (the size of the gradient), "recovered" (the share that patching clean outputs into corrupted
            texts recovers) or "lost" (the share that is lost by patching the other way).
        measure: name of the measure.
        by: what replaces the output of a head: "zero", "mean" or another.
        better: whether "more" or "less" of the measure is better; "" for neither.
        together: what the most important heads do together; None if that was not measured.
    """

    what: str = field(kw_only=True, repr=False)
    measure: str = field(kw_only=True, repr=False)
    by: str = field(kw_only=True, repr=False)
    better: str = field(default="", kw_only=True, repr=False)
    together: HeadsTogether | None = field(default=None, kw_only=True, repr=False)

    @property
    def has_sign(self) -> bool:
        """Whether numbers may be below 0; if not, a distance from 0 in standard errors means nothing."""
        return self.what != "sensitivity"

    def translated_label(self, lang: str) -> str:
        """Return the label in a language.

        >>> HeadStatistic("effect_loss_zero", what="effect", measure="loss", by="zero").translated_label("en")
        'effect on loss by zero'
        """
        return text(f"common.head number.{self.what}", lang, **self.words(lang))

    def importance_of(self, number: Number) -> Number:
        """Return how much a head with a number matters: how much worse the measure is without it.

        Of a measure without a direction the size of an effect counts.
        """
        if self.what not in ("effect", "estimate"):
            return number
        return {"more": -number, "less": number}.get(self.better, abs(number))

    def words(self, lang: str) -> dict[str, str]:
        """Return the measure, and what replaces the output, in a language: for texts with {measure} and {by}."""
        words = {"measure": self.measure, "by": self.by}
        return {key: text_or(f"common.{key}.{value}", lang, value.replace("_", " ")) for key, value in words.items()}
