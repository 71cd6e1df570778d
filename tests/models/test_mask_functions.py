"""Known mask functions are converted to equal masks, and unknown ones become dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as library

from multihead import masks
from multihead.models.huggingface import transformers_mask
from multihead.models.lazy_mask import LazyMask
from multihead.models.mask_functions import MaskExtent, mask_of_function

LEFT = torch.tensor([0, 2])
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 0, 1]])


def even_keys(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key % 2 == 0


# For each function: it, and what is read out of it at 9 queries and keys; None where nothing is.
FUNCTIONS: dict[str, tuple[Callable[..., Any], masks.Mask | None]] = {
    "causal": (library.causal_mask_function, masks.Causal()),
    "both ways": (library.bidirectional_mask_function, masks.Full()),
    "window": (library.sliding_window_causal_mask_function(4), masks.Window(4)),
    "window both ways": (library.sliding_window_bidirectional_mask_function(2), masks.Window(3, after=2)),
    "overlay alone": (library.sliding_window_overlay(3), masks.Window(3, after=9)),
    "causal or window": (
        library.or_masks(library.causal_mask_function, library.sliding_window_bidirectional_overlay(1)),
        masks.Causal() | masks.Window(2, after=1),
    ),
    "a function of the user's": (library.and_masks(library.causal_mask_function, even_keys), None),
    "blocks": (
        library.or_masks(library.causal_mask_function, library.blockwise_overlay(PACKED - 1)),
        None,
    ),
}


def extent(**changes: Any) -> MaskExtent:
    sizes: dict[str, Any] = {"batch": 2, "queries": 9, "keys": 9, "query_offset": 0, "key_offset": 0}
    return MaskExtent(**{**sizes, **changes}, device=torch.device("cpu"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_known_function_is_converted_to_the_same_mask(name: str) -> None:
    function, expected = FUNCTIONS[name]
    assert mask_of_function(function, extent()) == expected


PLACES = [(9, 9, 0, 0), (1, 9, 8, 0), (3, 9, 6, 0), (1, 5, 8, 4), (2, 5, 9, 6)]
CASES = [(name, *place) for name in FUNCTIONS for place in PLACES if name != "blocks" or place[0] + place[2] <= 9]


@pytest.mark.parametrize(("name", "queries", "keys", "query_offset", "key_offset"), CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_equals_that_of_transformers(
    name: str, queries: int, keys: int, query_offset: int, key_offset: int, padded: bool
) -> None:
    padding = torch.ones(2, query_offset + queries, dtype=torch.bool)
    padding[1, :2] = padding[0, -1:] = False
    call = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": query_offset,
        "kv_offset": key_offset,
        "mask_function": FUNCTIONS[name][0],
        "attention_mask": padding if padded else None,
    }
    assert_alike(transformers_mask(**call), library.sdpa_mask(**call, allow_is_causal_skip=False))


def assert_alike(found: Tensor, expected: Tensor | None) -> None:
    assert isinstance(found, LazyMask)
    assert expected is not None
    assert torch.equal(found.as_bool_tensor(), expected.expand(found.shape))


@pytest.mark.skipif(
    not hasattr(library, "packed_sequence_compatibility_function"), reason="this transformers has no such function"
)
@pytest.mark.parametrize("inner", [library.causal_mask_function, library.sliding_window_causal_mask_function(2)])
def test_packed_sequences_become_documents(inner: Callable[..., Any]) -> None:
    function = library.packed_sequence_compatibility_function(inner, POSITIONS, PACKED)
    mask = mask_of_function(function, extent())
    assert mask is not None
    assert "Documents" in repr(mask)
    call = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": function}
    assert_alike(transformers_mask(**call), library.sdpa_mask(**call, allow_is_causal_skip=False))


@given(size=st.integers(1, 7), length=st.integers(1, 20), left=st.integers(0, 6))
def test_chunks_become_documents_that_start_at_the_first_token(size: int, length: int, left: int) -> None:
    function = library.chunked_causal_mask_function(size, torch.tensor([0, min(left, length)]))
    assert mask_of_function(function, extent(queries=length, keys=length)) is not None
    call = {"batch_size": 2, "q_length": length, "kv_length": length, "mask_function": function}
    assert_alike(transformers_mask(**call), library.sdpa_mask(**call, allow_is_causal_skip=False))


def test_a_function_with_the_name_of_a_known_one_is_not_recognised() -> None:
    def impostor(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key >= query

    impostor.__qualname__ = "causal_mask_function"
    assert mask_of_function(impostor, extent()) is None
    call = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": impostor}
    assert_alike(transformers_mask(**call), library.sdpa_mask(**call, allow_is_causal_skip=False))


def test_a_function_of_single_indices_is_made_dense() -> None:
    table = torch.rand(9, 9) > 0.5

    def by_index(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return table[query, key]

    function = library.and_masks(library.causal_mask_function, by_index)
    call = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": function, "use_vmap": True}
    assert_alike(transformers_mask(**call), library.sdpa_mask(**call, allow_is_causal_skip=False))


def test_a_long_mask_holds_no_tensor_of_queries_x_keys() -> None:
    length = 200_000  # 40 GB, were it written down
    padding = torch.ones(1, length, dtype=torch.bool)
    padding[:, -7:] = False
    mask = transformers_mask(
        batch_size=1,
        q_length=length,
        kv_length=length,
        mask_function=library.sliding_window_causal_mask_function(4096),
        attention_mask=padding,
    )
    assert mask.shape == (1, 1, length, length)
    assert isinstance(mask, LazyMask)
    assert repr(mask.mask) == "Window(4096) & Lengths(<int64 tensor (1,)>)"


def test_a_batch_without_padding_has_no_padding_in_its_mask() -> None:
    mask = transformers_mask(batch_size=2, q_length=4, kv_length=4, attention_mask=torch.ones(2, 4, dtype=torch.bool))
    assert isinstance(mask, LazyMask)
    assert mask.mask == masks.Causal()
