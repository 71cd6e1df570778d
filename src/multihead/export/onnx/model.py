"""Export a layer as an ONNX model with the standard operator Attention."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from torch import Tensor

from multihead.errors.given import check_path
from multihead.export.onnx.context import ExportContext
from multihead.export.onnx.forward import add_layer_nodes
from multihead.export.onnx.graph import Graph
from multihead.export.onnx.spec import check_spec
from multihead.files import check_writable, write_atomically
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
    """Build an ONNX model that computes the output of a layer in eval mode.

    The mask is computed in the graph from the sizes of its inputs, so batch and lengths may change from call to call,
    unless the mask itself contains lists or tensors of fixed sizes.

    Args:
        layer: the layer to export; its parameters are copied.
        inputs: inputs of the model, named as in the layer's call: "x" (batch, queries, embed_dim), "memory",
            "values"; "lengths", "memory_lengths" (padding on the right) and "query_start" (batch,) int64; "head_gates"
            (batch or 1, heads or 1, queries or 1); "bias" (batch or 1, heads or 1, queries or 1, keys or 1), added to
            the scores. "keep" is a bool mask of the same shape, True = visible; "past" is for decoding: the inputs
            "past_key" and "past_value" (batch, kv_heads, past, dim) precede the new keys, and the outputs "present_key"
            and "present_value" are the "past" of the next call.
        mask: which keys each query may see.
        query_start: position of the first query among the keys, see `multihead.attention`.
        opset: 23, 24 or 25, the version of the standard operators.
        batch: the number of samples if it is fixed; None = any.
        queries: the number of queries if it is fixed; None = any.
        keys: the number of keys if it is fixed; None = any.

    Returns:
        the model; its output "output" is (batch, queries, output_dim).

    Raises:
        MissingPackageError: the package onnx is not installed.
        ArgumentError: the layer has options that the operators do not support.
        MaskError: the mask does not fit the layer or the sizes.

    As in the layer, the attention of a query that sees no key is 0, and padding given by lengths has no effect. Not
    guaranteed: in most runtimes NaN in a key that a mask hides reaches the output; onnxruntime 1.31 rejects a batch,
    queries or keys of 0, and has no bfloat16 on the CPU. The operator takes any mask except `Full` and `Causal` as a
    table of queries x keys, and biases and sinks as one table per head, which the runtime holds in memory; lengths with
    `Full` need no table from opset 24 on.

    Source: onnx.ai/onnx/operators/onnx__Attention.html.

    >>> from multihead import masks
    >>> layer = MultiHeadAttention(embed_dim=16, num_heads=4, num_kv_heads=2).eval()
    >>> [node.op_type for node in to_model(layer, mask=masks.Causal()).graph.node]
    ['MatMul', 'Add', 'MatMul', 'Add', 'MatMul', 'Add', 'Attention', 'MatMul', 'Add']
    """
    graph = Graph()
    spec = check_spec(layer, inputs, mask, query_start, opset, {"batch": batch, "queries": queries, "keys": keys})
    add_layer_nodes(ExportContext(graph, layer, spec))
    origin = {"multihead.mask": repr(mask), "multihead.query_start": repr(query_start)}
    return graph.build_model(opset=opset, name="MultiHeadAttention", metadata=origin, version=_version_of_library())


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
    """Export a layer to an ONNX file; see `to_model` for the other arguments.

    Raises:
        ArgumentError, MaskError: see `to_model`.
        InputError: the file cannot be written.

    >>> import tempfile
    >>> layer = MultiHeadAttention(embed_dim=16, num_heads=4).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(layer, f"{folder}/layer.onnx", inputs=("x", "lengths"))
    """
    check_path("path", path)
    check_writable([os.fspath(path)])
    model = to_model(
        layer, inputs=inputs, mask=mask, query_start=query_start, opset=opset, batch=batch, queries=queries, keys=keys
    )
    write_atomically(path, model.SerializeToString())


def _version_of_library() -> str:
    try:
        return metadata.version("multihead")
    except metadata.PackageNotFoundError:  # multihead is imported from a source tree, and not installed
        return ""
