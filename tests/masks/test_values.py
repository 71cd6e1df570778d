"""Masks as values: equality, hashes, reprs, joining, and what is refused when they are made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch

from multihead import masks
from multihead.errors import ArgumentError, MaskError, MultiheadError
from multihead.functional import attention
from multihead.masks import Causal, Documents, Drop, Full, Keep, Lengths, Mask, Prefix, Window
from multihead.masks.leading_keys import LeadingKeys
from multihead.masks.positions import TilePositions
from tests import oracle

TENSOR = torch.tensor([True, False])


@pytest.mark.parametrize(
    ("mask", "written"),
    [
        (Full(), "Full()"),
        (Causal(), "Causal()"),
        (Window(3), "Window(3)"),
        (Window(3, after=2), "Window(3, after=2)"),
        (Lengths([5, 3]), "Lengths((5, 3))"),
        (Lengths([[1, 2], [3, 4]]), "Lengths(((1, 2), (3, 4)))"),
        (Lengths(torch.tensor([5, 3])), "Lengths(<int64 tensor (2,)>)"),
        (Documents((2, 1)), "Documents((2, 1))"),
        (Documents([[2, 1], [3]]), "Documents(((2, 1), (3, 0)))"),
        (Prefix(2), "Prefix(2)"),
        (Prefix([1, 2]), "Prefix((1, 2))"),
        (Keep(TENSOR, "keys"), "Keep(<bool tensor (2,)>, 'keys')"),
        (Drop(TENSOR[None], "batch keys"), "Drop(<bool tensor (1, 2)>, 'batch keys')"),
        (
            Keep(torch.ones(1, 1, 2, 2, dtype=torch.bool)),
            "Keep(<bool tensor (1, 1, 2, 2)>, 'batch heads queries keys')",
        ),
        (Causal() & Window(2), "Causal() & Window(2)"),
        (Causal() & (Prefix(2) | Window(1)), "Causal() & (Prefix(2) | Window(1))"),
        (Causal() & Window(2) | Prefix(1), "(Causal() & Window(2)) | Prefix(1)"),
        (Causal() & Window(2) & Prefix(1), "Causal() & Window(2) & Prefix(1)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mask_is_written_in_one_line_as_one_would_type_it(mask: Mask, written: str) -> None:
    assert repr(mask) == written
    if "tensor" not in written:
        assert eval(written, vars(masks).copy()) == mask


def test_masks_are_equal_where_they_are_written_alike() -> None:
    assert Lengths([5, 3]) == Lengths((5, 3))
    assert hash(Lengths([5, 3])) == hash(Lengths((5, 3)))
    assert Window(2) == Window(2, after=0)
    assert Window(2) != Window(2, after=1)
    assert Full() != Causal()
    assert Lengths((2,)) != Prefix((2,))
    assert Causal() & Window(2) != Causal() | Window(2)
    assert Causal() & Window(2) != Window(2) & Causal()  # written otherwise, though they mean the same
    assert (Causal() & Window(2)) & Prefix(1) == Causal() & (Window(2) & Prefix(1))
    assert len({Causal(), Causal(), Full(), Causal() & Window(1), Causal() & Window(1)}) == 3
    assert Causal() != "Causal()"


def test_tensors_in_masks_are_compared_by_identity() -> None:
    assert Keep(TENSOR, "keys") == Keep(TENSOR, "keys")
    assert Keep(TENSOR, "keys") != Keep(TENSOR.clone(), "keys")
    assert Keep(TENSOR, "keys") != Drop(TENSOR, "keys")
    assert Keep(TENSOR, "keys") != Keep(TENSOR, "queries")
    lengths = torch.tensor([1, 2])
    assert Lengths(lengths) == Lengths(lengths)
    assert hash(Lengths(lengths)) == hash(Lengths(lengths))


def test_a_mask_cannot_be_changed() -> None:
    for mask, name in ((Window(2), "size"), (Lengths((1,)), "lengths"), (Keep(TENSOR, "keys"), "tensor")):
        with pytest.raises(FrozenInstanceError):
            setattr(mask, name, 1)


def test_combining_with_full_changes_nothing() -> None:
    assert Full() & Causal() == Causal() & Full() == Causal()
    assert Full() | Causal() == Causal() | Full() == Full()


def test_a_mask_reports_whether_it_uses_positions_and_holds_tensors() -> None:
    assert [mask.uses_positions for mask in (Full(), Lengths((1,)), Prefix(1), Keep(TENSOR, "keys"))] == [False] * 4
    assert [mask.uses_positions for mask in (Causal(), Window(1), Documents((1,)))] == [True] * 3
    assert (Prefix(1) & Causal()).uses_positions
    assert not (Prefix(1) & Lengths((1,))).uses_positions
    assert not (Prefix(1) | Causal()).holds_tensors
    assert (Prefix(torch.tensor([1])) | Causal()).holds_tensors


NEGATIVE = "holds a negative length, -2. Give lengths of 0 or more tokens."
REFUSED: list[tuple[Callable[[], Any], type[MultiheadError], str]] = [
    (lambda: Window(0), ArgumentError, "Window size is 0. Give an integer of at least 1."),
    (lambda: Window(2.0), ArgumentError, "Window size is 2.0. Give an integer of at least 1."),  # type: ignore[arg-type]
    (lambda: Window(True), ArgumentError, "Window size is True. Give an integer of at least 1."),
    (lambda: Window(2, after=-1), ArgumentError, "Window after is -1. Give an integer of at least 0."),
    (lambda: Lengths((3, -2)), MaskError, f"Lengths {NEGATIVE}"),
    (lambda: Lengths(((3, 1), (-2, 0))), MaskError, f"Lengths {NEGATIVE}"),
    (lambda: Lengths(torch.tensor([3, -2])), MaskError, f"Lengths {NEGATIVE}"),
    (lambda: Documents((3, -2)), MaskError, f"Documents {NEGATIVE}"),
    (lambda: Prefix((1, -2)), MaskError, f"Prefix {NEGATIVE}"),
    (
        lambda: Lengths((2, 10**30)),
        MaskError,
        f"Lengths holds a length of {10**30} tokens. Give at most 1099511627776 tokens.",
    ),
    (lambda: Prefix(-2), ArgumentError, "Prefix length is -2. Give an integer of at least 0."),
    (
        lambda: Lengths(torch.tensor([1.0])),
        MaskError,
        "Lengths was given a torch.float32 tensor of shape (1,). Give integers of shape (batch,) or (batch, queries).",
    ),
    (
        lambda: Lengths(torch.tensor(3)),
        MaskError,
        "Lengths was given a torch.int64 tensor of shape (). Give integers of shape (batch,) or (batch, queries).",
    ),
    (
        lambda: Lengths(5),  # type: ignore[arg-type]
        MaskError,
        "Lengths was given 5. Give integers of shape (batch,) or (batch, queries).",
    ),
    (
        lambda: Lengths("53"),  # type: ignore[arg-type]
        MaskError,
        "Lengths was given '53'. Give integers of shape (batch,) or (batch, queries).",
    ),
    (
        lambda: Lengths((1.5, 2)),  # type: ignore[arg-type]
        MaskError,
        "Lengths was given (1.5, 2). Give integers of shape (batch,) or (batch, queries).",
    ),
    (
        lambda: Lengths((True, 2)),
        MaskError,
        "Lengths was given (True, 2). Give integers of shape (batch,) or (batch, queries).",
    ),
    (
        lambda: Lengths(((1, 2), (3,))),
        MaskError,
        "Lengths was given ((1, 2), (3,)). Give integers of shape (batch,) or (batch, queries).",
    ),
    (
        lambda: Documents((1, (2, 3))),  # type: ignore[arg-type]
        MaskError,
        "Documents was given (1, (2, 3)). Give integers of shape (documents,) or (batch, documents).",
    ),
    (
        lambda: Prefix(((1, 2),)),  # type: ignore[arg-type]
        MaskError,
        "Prefix was given ((1, 2),). Give integers of shape (batch,), or one int.",
    ),
    (
        lambda: Keep(torch.ones(2), "keys"),
        MaskError,
        (
            "Keep takes a boolean tensor, and was given a torch.float32 tensor. Compare its values, for example "
            "masks.Keep(t != 0); an additive mask is a bias: attention(bias=t)."
        ),
    ),
    (
        lambda: Drop([True], "keys"),  # type: ignore[arg-type]
        MaskError,
        (
            "Drop takes a boolean tensor, and was given a list. Compare its values, for example "
            "masks.Keep(t != 0); an additive mask is a bias: attention(bias=t)."
        ),
    ),
    (
        lambda: Keep(TENSOR),
        MaskError,
        (
            "Keep was given a tensor of 1 dimensions without axes. "
            'Name each axis, in the order of "batch heads queries keys", for example Keep(t, "batch keys").'
        ),
    ),
    (
        lambda: Drop(TENSOR[None], "keys batch"),
        MaskError,
        (
            "Drop was given a tensor of 2 dimensions with axes 'keys batch'. "
            'Name each axis, in the order of "batch heads queries keys", for example Drop(t, "batch keys").'
        ),
    ),
    (
        lambda: Keep(TENSOR, "rows"),
        MaskError,
        (
            "Keep was given a tensor of 1 dimensions with axes 'rows'. "
            'Name each axis, in the order of "batch heads queries keys", for example Keep(t, "batch keys").'
        ),
    ),
    (
        lambda: Causal() & torch.ones(2, 2, dtype=torch.bool),  # type: ignore[operator]
        MaskError,
        (
            "mask is a torch.bool tensor of shape (2, 2), and the meaning of its values is ambiguous. "
            "Give masks.Keep(t) if True = visible, masks.Drop(t) if True = hidden, or bias=t if it is added to scores."
        ),
    ),
    (
        lambda: Causal() | None,  # type: ignore[operator]
        MaskError,
        (
            "mask is a NoneType, and must be a Mask. "
            "Give one of multihead.masks, for example masks.Causal() & masks.Lengths((5, 3))."
        ),
    ),
]


@pytest.mark.parametrize(("make", "kind", "sentence"), REFUSED, ids=[sentence[:40] for *_, sentence in REFUSED])
def test_a_mask_that_cannot_be_is_refused_when_it_is_made(
    make: Callable[[], Any], kind: type[MultiheadError], sentence: str
) -> None:
    with pytest.raises(kind) as refusal:
        make()
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("mask", [torch.ones(2, 2), None, "causal"])
def test_a_call_takes_no_mask_that_is_none(mask: Any) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(MaskError) as refusal:
        attention(q, q, q, mask=mask)
    if isinstance(mask, torch.Tensor):
        assert str(refusal.value).startswith("mask is a torch.float32 tensor of shape (2, 2), and the meaning")
    else:
        assert str(refusal.value) == (
            f"mask is a {type(mask).__name__}, and must be a Mask. "
            "Give one of multihead.masks, for example masks.Causal() & masks.Lengths((5, 3))."
        )


@pytest.mark.parametrize("size", [sys.maxsize, 10**30])
def test_a_window_of_any_size_hides_nothing_within_it(size: int) -> None:
    q = torch.randn(1, 2, 5, 4)
    for start in (0, 1 << 39):
        widest = attention(q, q, q, mask=Window(size, after=size), query_start=start, kernel="reference")
        torch.testing.assert_close(widest, attention(q, q, q))
        behind = attention(q, q, q, mask=Window(size) & Keep(TENSOR.new_ones(5), "keys"), query_start=start)
        torch.testing.assert_close(behind, attention(q, q, q, mask=Causal(), query_start=start))


@dataclass(frozen=True)
class EveryNth(Mask):
    n: int

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return keys % self.n == 0


PER_HEAD = torch.rand(2, 3, 4, 9, generator=torch.Generator().manual_seed(0)) < 0.7
WITH_PARTS = [
    Full(),
    Causal(),
    Window(2, after=1),
    Prefix((3, 5)),
    Lengths((6, 9)),
    Lengths(torch.tensor([6, 9])),
    Documents((2, 3, 0, 4)),
    Documents(((2, 7, 0), (5, 1, 3))),
    Keep(PER_HEAD),
    Drop(PER_HEAD[:, 0, 0], "batch keys"),
    Causal() & Keep(PER_HEAD[0, :, 0], "heads keys"),
    Window(3) | Prefix((1, 2)),
    EveryNth(2) & Causal(),
]


@pytest.mark.parametrize("mask", WITH_PARTS, ids=str)
@pytest.mark.parametrize("outer", [None, "leading keys", "dropped keys", "dropped keys of each sample"])
def test_a_part_of_a_mask_is_that_part_of_its_cells(mask: Mask, outer: str | None) -> None:
    """Of a sample, of some heads, and of the first keys."""
    cells, start = oracle.shown(mask, (2, 3, 4, 9), 3), torch.tensor([3, 3])  # position of each sample's first query
    if outer == "leading keys":
        mask, cells, start = LeadingKeys(2, mask), torch.nn.functional.pad(cells, (2, 0), value=True), start + 2
    elif outer is not None:
        each = outer == "dropped keys of each sample" and not mask.has_key_axis
        dropped = torch.tensor([2, 1 if each else 2])
        mask, start = mask.after_dropping_keys(dropped if each else 2), start - dropped
        cells = torch.stack(
            [of_sample[..., count : count + 7] for of_sample, count in zip(cells, dropped, strict=True)]
        )
    keys = cells.shape[-1]

    def assert_shows(part: Mask, expected: torch.Tensor, start: torch.Tensor = start) -> None:
        found = part.tile(TilePositions.from_sizes(4, expected.shape[-1], query_start=start)).expand(expected.shape)
        torch.testing.assert_close(found, expected)

    for sample in range(2):
        assert_shows(mask.select_sample(sample), cells[sample : sample + 1], start[sample])
    assert_shows(mask.select_heads(lambda x: x[:, 1:] if x.shape[1] > 1 else x), cells[:, 1:])
    for count in (keys - 1, 3, 1):
        if (part := mask.restrict_to_first_keys(count)) is not None:
            assert_shows(part, cells[..., :count])
