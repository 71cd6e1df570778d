"""The specification of a model: sizes that are fixed or may change, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from multihead import masks
from multihead.errors import ArgumentError, MaskError, MultiheadError
from multihead.export.onnx.spec import ModelSpec, check_spec
from multihead.layer import MultiHeadAttention


def checked(layer: object = None, **options: Any) -> ModelSpec:
    """Check a specification, with the defaults of `to_model`."""
    layer = MultiHeadAttention(8, 2).eval() if layer is None else layer
    sizes = {axis: options.pop(axis, None) for axis in ("batch", "queries", "keys")}
    given = {"inputs": ("x",), "mask": masks.Full(), "query_start": None, "opset": 23} | options
    return check_spec(layer, given["inputs"], given["mask"], given["query_start"], given["opset"], sizes)


def sizes(spec: ModelSpec) -> tuple[int | str, ...]:
    return spec.batch, spec.queries, spec.keys


class TestSizes:
    def test_they_may_all_change_where_nothing_fixes_them(self) -> None:
        assert sizes(checked()) == ("batch", "length", "length")
        assert sizes(checked(inputs=("x", "memory"))) == ("batch", "queries", "keys")

    def test_those_that_are_given_are_fixed(self) -> None:
        assert sizes(checked(batch=2, queries=5)) == (2, 5, 5)
        assert sizes(checked(keys=5)) == ("batch", 5, 5)
        assert sizes(checked(inputs=("x", "memory"), keys=5)) == ("batch", "queries", 5)

    def test_those_that_the_mask_is_written_with_are_fixed(self) -> None:
        assert sizes(checked(mask=masks.Lengths((5, 3)))) == (2, "length", "length")
        keep = masks.Keep(torch.ones(1, 1, 1, 6, dtype=torch.bool))
        assert sizes(checked(mask=keep)) == ("batch", 6, 6)
        assert sizes(checked(mask=keep, inputs=("x", "memory"))) == ("batch", "queries", 6)

    def test_a_start_for_each_sample_fixes_the_batch(self) -> None:
        assert checked(query_start=torch.tensor([1, 2])).batch == 2


class Turned(MultiHeadAttention):
    def forward(self, *given: Any, **options: Any) -> Any:
        return super().forward(*given, **options)


class Adapted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def adapted() -> MultiHeadAttention:
    layer = MultiHeadAttention(8, 2).eval()
    layer.v_proj = Adapted(8, 8)
    return layer


KEEP = masks.Keep(torch.ones(1, 3, 4, 6, dtype=torch.bool))
REFUSED: list[tuple[dict[str, Any], type[MultiheadError], str]] = [
    (
        {"layer": nn.MultiheadAttention(8, 2)},
        ArgumentError,
        (
            "layer is a MultiheadAttention, not a multihead.MultiHeadAttention. "
            "Convert it first; multihead.compat converts many other layers."
        ),
    ),
    (
        {"layer": Turned(8, 2)},
        ArgumentError,
        "Turned overrides forward, which cannot be exported. Give a multihead.MultiHeadAttention.",
    ),
    (
        {"layer": MultiHeadAttention(8, 2, dropout=0.1)},
        ArgumentError,
        "The layer is in training mode with a dropout of 10%, which cannot be exported. Call layer.eval() first.",
    ),
    (
        {"layer": adapted()},
        ArgumentError,
        (
            "v_proj is a Adapted, which cannot be exported. "
            "Give a layer whose projections are plain nn.Linear; merge adapters such as LoRA into them first."
        ),
    ),
    (
        {"opset": 22},
        ArgumentError,
        "opset is 22, and the operator Attention is supported for opsets 23, 24 and 25. Give one of them.",
    ),
    (
        {"inputs": ("x", "mask")},
        ArgumentError,
        (
            "inputs is ('x', 'mask'). Give \"x\", and any others of memory, values, past, lengths, "
            "memory_lengths, keep, bias, head_gates, query_start, each once."
        ),
    ),
    (
        {"inputs": "x"},
        ArgumentError,
        (
            "inputs is 'x'. Give \"x\", and any others of memory, values, past, lengths, "
            "memory_lengths, keep, bias, head_gates, query_start, each once."
        ),
    ),
    (
        {"inputs": ("x", "values")},
        ArgumentError,
        'values is an input, and memory is not. Give inputs=("x", "memory", ...) for cross-attention.',
    ),
    (
        {"layer": MultiHeadAttention(8, 2, key_dim=6)},
        ArgumentError,
        (
            "memory is not an input, and the layer's queries are computed from 8 features, its keys from 6 and its "
            "values from 6. "
            'Give inputs=("x", "memory", ...).'
        ),
    ),
    (
        {"inputs": ("x", "memory"), "mask": masks.Causal()},
        ArgumentError,
        (
            "memory is an input, and the mask or the layer depends on the positions of queries among the "
            "keys. Give the position of the first query: "
            'query_start=0 (as torch\'s is_causal) or query_start="end" (decoding).'
        ),
    ),
    (
        {"inputs": ("x", "query_start"), "query_start": 3},
        ArgumentError,
        "query_start is both an input and an argument. Remove one of them.",
    ),
    (
        {"inputs": ("x", "past", "lengths")},
        ArgumentError,
        (
            "past and lengths are both inputs. "
            "Remove one of them: with past, the keys are the past keys followed by the keys of x, without padding."
        ),
    ),
    (
        {"layer": MultiHeadAttention(8, 2, sinks=True), "inputs": ("x", "past")},
        ArgumentError,
        (
            "past is an input, and the layer adds a key of its own (add_bias_kv, add_zero_attn or sinks), which the "
            "operator would place after the past keys. Give a layer without added keys, or remove past."
        ),
    ),
    (
        {"inputs": ("x", "past"), "query_start": "end"},
        ArgumentError,
        ("query_start is 'end', and past is an input. Remove query_start: the queries follow the keys of past."),
    ),
    (
        {"query_start": "last"},
        ArgumentError,
        "query_start is 'last'. Give an int, a tensor with one int per sample, or \"end\".",
    ),
    (
        {"query_start": torch.zeros(2)},
        ArgumentError,
        "query_start is a torch.float32 tensor of shape (2,). Give one int per sample.",
    ),
    ({"query_start": -1}, ArgumentError, "query_start is -1. Give an integer of at least 0."),
    ({"mask": KEEP}, MaskError, f"{KEEP!r} has 3 heads, and the layer has 2. Give it 2 heads, or 1."),
    (
        {"mask": masks.Keep(KEEP.tensor[:, :1])},
        ArgumentError,
        (
            "There are 4 queries and 6 keys, and neither memory nor past is an input. "
            "Give the same number of both: in self-attention they are the same tokens."
        ),
    ),
    (
        {"mask": masks.Lengths((5, 3)), "batch": 3},
        MaskError,
        "Lengths((5, 3)) has 2 batch, and batch is 3. Give them the same size.",
    ),
    (
        {"inputs": ("x", "past"), "queries": 5, "keys": 3},
        ArgumentError,
        "There are 5 queries and 3 keys, including those of past. Give at least 5 keys.",
    ),
    ({"queries": 0}, ArgumentError, "queries is 0. Give an integer of at least 1."),
    (
        {"mask": torch.ones(2, 2, dtype=torch.bool)},
        MaskError,
        (
            "mask is a torch.bool tensor of shape (2, 2), and the meaning of its values is ambiguous. Give "
            "masks.Keep(t) if True = visible, masks.Drop(t) if True = hidden, or bias=t if it is added to scores."
        ),
    ),
]


@pytest.mark.parametrize(("options", "kind", "sentence"), REFUSED)
def test_what_cannot_be_exported_is_rejected(
    options: dict[str, Any], kind: type[MultiheadError], sentence: str
) -> None:
    with pytest.raises(kind) as refusal:
        checked(**options)
    assert str(refusal.value) == sentence


def test_a_layer_in_training_mode_that_drops_nothing_is_what_it_is_in_eval_mode() -> None:
    assert checked(MultiHeadAttention(8, 2).train()).batch == "batch"
