"""Who takes part: every peer's name, how it is made, and the kinds of case it is a contender of its own in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

from benchmarks import peers_libraries as libraries
from benchmarks import peers_torch as by_torch
from benchmarks.peers_cases import HAND_WRITTEN, Case, Kind, Trial
from benchmarks.peers_contender import Contender

ALL = get_args(Kind)
UNCACHED = tuple(kind for kind in ALL if kind != "decoding")


class Peer(NamedTuple):
    """A contender beside our layer.

    Fields:
        name: what the tables call it.
        make: sets it up with a trial's weights.
        kinds: of the cases that it is asked for.
    """

    name: str
    make: Callable[[Trial], Contender]
    kinds: tuple[Kind, ...] = ALL


PEERS = [
    Peer(HAND_WRITTEN, by_torch.by_hand, UNCACHED),
    Peer(HAND_WRITTEN, by_torch.by_hand_decoding, ("decoding",)),
    Peer(f"{HAND_WRITTEN}, one q k v product", by_torch.by_hand_together, ("full", "causal")),
    Peer(f"{HAND_WRITTEN}, in pieces", by_torch.by_hand_in_pieces, ("ragged", "documents", "window")),
    Peer("nn.MultiheadAttention", by_torch.torch_layer),
    Peer("nn.MultiheadAttention, nested tensor", by_torch.torch_layer_nested, ("ragged",)),
    Peer("nn.MultiheadAttention, weights", by_torch.torch_layer_with_weights),
    Peer("x-transformers", libraries.x_transformers),
    Peer("torchtune", libraries.torchtune),
    Peer("Keras", libraries.keras),
    Peer("Hugging Face, sdpa", libraries.hugging_face_sdpa),
    Peer("Hugging Face, eager", libraries.hugging_face_eager),
    Peer("flex_attention, compiled", by_torch.flex),
]


def peers_of(case: Case) -> list[Peer]:
    """Return the peers that a case is meant for."""
    return [peer for peer in PEERS if case.kind in peer.kinds and (not case.rivals or peer.name in case.rivals)]
