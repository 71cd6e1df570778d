"""The list of peers: names, constructors, and the kinds of cases in which each is a separate contender."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

from benchmarks.peers import libraries, onnx_runtime, pytorch
from benchmarks.peers.cases import HAND_WRITTEN, Case, Kind, Trial
from benchmarks.peers.contender import Contender

ALL = get_args(Kind)
UNCACHED = tuple(kind for kind in ALL if kind != "decoding")


class Peer(NamedTuple):
    """A layer to compare ours with.

    Attributes:
        name: its name in the tables.
        make: sets it up with the weights of a trial.
        kinds: the kinds of cases that it computes.
        alone: whether it is attention without projections.
    """

    name: str
    make: Callable[[Trial], Contender]
    kinds: tuple[Kind, ...] = ALL
    alone: bool = False


PEERS = [
    Peer(HAND_WRITTEN, pytorch.by_hand, UNCACHED),
    Peer(HAND_WRITTEN, pytorch.by_hand_decoding, ("decoding",)),
    Peer(f"{HAND_WRITTEN}, one q k v product", pytorch.by_hand_together, ("full", "causal")),
    Peer(f"{HAND_WRITTEN}, in pieces", pytorch.by_hand_in_pieces, ("ragged", "documents", "window")),
    Peer("nn.MultiheadAttention", pytorch.torch_layer),
    Peer("nn.MultiheadAttention, nested tensor", pytorch.torch_layer_nested, ("ragged",)),
    Peer("nn.MultiheadAttention, weights", pytorch.torch_layer_with_weights),
    Peer("x-transformers", libraries.x_transformers),
    Peer("torchtune", libraries.torchtune),
    Peer("Keras", libraries.keras),
    Peer("Hugging Face, sdpa", libraries.hugging_face_sdpa),
    Peer("Hugging Face, eager", libraries.hugging_face_eager),
    Peer("flex_attention, compiled", pytorch.flex),
    Peer("ONNX Runtime", onnx_runtime.layer, ("full", "cross", "causal")),
    Peer("ONNX Runtime", onnx_runtime.attention, ("full", "causal"), alone=True),
]


def peers_of(case: Case) -> list[Peer]:
    """Return the peers of a case."""
    named = [peer for peer in PEERS if not case.rivals or peer.name in case.rivals]
    return [peer for peer in named if case.kind in peer.kinds and case.alone == peer.alone]
