"""Small records that the widget shows in tests."""

from __future__ import annotations

from functools import cache

from multihead import masks
from multihead.observation.record import Record
from multihead.record.texts import Text
from tests.viewer.watching import watch


@cache
def small() -> Record:
    """Three layers of two heads on 40 tokens."""
    record = watch(40, mask=masks.Causal(), layers=3)
    record.title = "a <b>model</b>"
    record.set_text(Text(None, [f"<img src=x>{place}" for place in range(40)], [False] * 40))
    return record


@cache
def long() -> Record:
    """One layer on 600 tokens, whose weights take more than one message."""
    return watch(600, mask=masks.Causal())


@cache
def statistics_only() -> Record:
    """A record without q and k."""
    return watch(40, mask=masks.Causal(), layers=3, keep="statistics")
