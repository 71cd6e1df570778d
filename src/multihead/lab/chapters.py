"""The chapters of the walk and the tensors that each of them shows; their texts are `walk.chapter` in the locale."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHAPTERS", "Chapter"]


@dataclass(frozen=True)
class Chapter:
    """One numbered chapter of the walk: the part it belongs to and the tensors it shows."""

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
