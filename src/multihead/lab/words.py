"""The chapters of the walk, and the form of the words that each language fills in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CHAPTERS", "Chapter", "Passage", "Words"]


@dataclass(frozen=True)
class Chapter:
    """One numbered halt of the walk: the part it belongs to and the tensors it shows."""

    part: str
    name: str
    steps: tuple[str, ...]


CHAPTERS = (
    Chapter("split", "x", ("x",)),
    Chapter("split", "grouped", ("grouped",)),
    Chapter("split", "by_head", ("by_head",)),
    Chapter("split", "flat", ("flat",)),
    Chapter("split", "back", ("unflat", "ungrouped", "merged")),
    Chapter("split", "wrong", ("wrong",)),
    Chapter("attention", "inputs", ("inputs",)),
    Chapter("attention", "projections", ("w_q", "w_k", "w_v", "w_o")),
    Chapter("attention", "qkv", ("q", "k", "v")),
    Chapter("attention", "qkv_heads", ("q_heads", "k_heads", "v_heads")),
    Chapter("attention", "scores", ("scores",)),
    Chapter("attention", "scaled", ("scaled",)),
    Chapter("attention", "bias", ("slopes", "bias", "biased")),
    Chapter("attention", "lengths", ("lengths", "lengths_per_head")),
    Chapter("attention", "masked", ("masked",)),
    Chapter("attention", "weights", ("weights",)),
    Chapter("attention", "z", ("z",)),
    Chapter("attention", "concat", ("concat",)),
    Chapter("attention", "output", ("output",)),
)


@dataclass(frozen=True)
class Passage:
    """A title and what there is to see below it; both take the walk's sizes by name."""

    title: str
    text: str


@dataclass(frozen=True)
class Words:
    """Everything the walk says, in one language."""

    title: str
    intro: str
    parts: dict[str, Passage]
    passages: dict[str, Passage]
    axes: dict[str, str]  # what an axis is called in a shape
    entries: dict[str, str]  # what one entry along an axis is called
    heads_of: Callable[[int, int], str]  # a number of heads, and the columns of each
    by_hand: str
    same_shape: str
    unmixed: str
    mixed_legend: str
    mixed_compare: str
    empty: str
    elided: str
    elided_again: str
    checked: str
    farewell: str
    commands: tuple[str, ...]
