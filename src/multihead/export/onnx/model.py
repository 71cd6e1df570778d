"""Write a layer as an ONNX model around the standard operator Attention."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from torch import Tensor

from multihead.export.onnx.context import Ground
from multihead.export.onnx.forward import forward
from multihead.export.onnx.graph import Graph
from multihead.export.onnx.spec import asked
from multihead.files import refuse_unless_writable, write_whole
from multihead.layer import MultiHeadAttention
from multihead.masks import Full, Mask

if TYPE_CHECKING:
    from onnx import ModelProto

_FULL = Full()


def to_model(
    layer: MultiHeadAttention,
    *,
    inputs: Sequence[str] = ("x",),
    mask: Mask = _FULL,
    query_start: int | Tensor | str | None = None,
    opset: int = 23,
    batch: int | None = None,
    queries: int | None = None,
    keys: int | None = None,
) -> ModelProto:
    """Make an ONNX model that gives what the layer gives in eval mode.

    The mask is computed in the graph from the sizes of its inputs, so batch and lengths may change from call to call,
    except where the mask itself is written with lists or tensors of some size.

    Args:
        layer: what to write; its parameters are copied.
        inputs: what the model takes, by the names of the layer's call: "x" (batch, queries, embed_dim), "memory",
            "values"; "lengths", "memory_lengths" (padding on the right) and "query_start" (batch,) int64; "head_gates"
            (batch or 1, heads or 1, queries or 1); "bias" (batch or 1, heads or 1, queries or 1, keys or 1), added to
            the scores. Besides, "keep" of that shape, bool, True = may be seen; and "past" for decoding: "past_key"
            and "past_value" (batch, kv_heads, past, dim) come first, and "present_key" and "present_value" are given
            back for the next call.
        mask: which keys each query may see.
        query_start: where the first query stands among the keys, see `multihead.attention`.
        opset: 23, 24 or 25, the version of the standard operators.
        batch: the number of samples, if it never changes.
        queries: the number of queries, if it never changes.
        keys: the number of keys, if it never changes.

    Returns: the model; its output "output" is (batch, queries, output_dim).

    Raises:
        ArgumentError: the package onnx is missing, or the layer holds something that the operators cannot say.
        MaskError: the mask does not fit the layer or the sizes.

    A query that sees no key gives 0 as the layer does, and what lies in padding given by lengths is never read. What
    is not promised: NaN in a key that a mask hides reaches the output in most runtimes, and onnxruntime 1.31 refuses a
    batch, queries or keys of 0, and has no bfloat16 on the CPU. The operator takes any mask
    but `Full` and `Causal` as a table of queries x keys, and biases and sinks as one a head, which a runtime holds;
    lengths with `Full` need none from opset 24 on.

    Source: onnx.ai/onnx/operators/onnx__Attention.html.

    >>> from multihead import masks
    >>> layer = MultiHeadAttention(embed_dim=16, num_heads=4, num_kv_heads=2).eval()
    >>> [node.op_type for node in to_model(layer, mask=masks.Causal()).graph.node]
    ['MatMul', 'Add', 'MatMul', 'Add', 'MatMul', 'Add', 'Attention', 'MatMul', 'Add']
    """
    graph = Graph()
    wanted = asked(layer, inputs, mask, query_start, opset, {"batch": batch, "queries": queries, "keys": keys})
    forward(Ground(graph, layer, wanted))
    said = {"multihead.mask": repr(mask), "multihead.query_start": repr(query_start)}
    return graph.model(opset=opset, name="MultiHeadAttention", said=said, version=_version())


def save(
    layer: MultiHeadAttention,
    path: str | os.PathLike[str],
    *,
    inputs: Sequence[str] = ("x",),
    mask: Mask = _FULL,
    query_start: int | Tensor | str | None = None,
    opset: int = 23,
    batch: int | None = None,
    queries: int | None = None,
    keys: int | None = None,
) -> None:
    """Write a layer to a file; see `to_model`, whose arguments these are.

    Raises:
        ArgumentError, MaskError: as `to_model`.
        InputError: the file cannot be written.

    >>> import tempfile
    >>> layer = MultiHeadAttention(embed_dim=16, num_heads=4).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(layer, f"{folder}/layer.onnx", inputs=("x", "lengths"))
    """
    refuse_unless_writable([os.fspath(path)])
    made = to_model(
        layer, inputs=inputs, mask=mask, query_start=query_start, opset=opset, batch=batch, queries=queries, keys=keys
    )
    write_whole(path, made.SerializeToString())


def _version() -> str:
    try:
        return metadata.version("multihead")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return ""
