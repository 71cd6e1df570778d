"""Rotated queries and keys against complex numbers; the value itself; rejected arguments."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.rotary import Linear, Rotary, Yarn
from tests.oracle import budget, difference
from tests.rotary.turning import LENGTH, POSITIONS, ROTARIES, both_forms, drawn, each, oracle


@each
@pytest.mark.parametrize(
    "positions",
    [0, 3, -2, POSITIONS, POSITIONS[:1], POSITIONS - 5],
    ids=["start", "late start", "negative start", "given", "one row", "negative"],
)
def test_each_pair_is_a_complex_number_that_is_rotated(rotary: Rotary, positions: int | Tensor) -> None:
    x = drawn()
    torch.testing.assert_close(rotary.rotate(x, positions), oracle(rotary, x, positions), rtol=0, atol=1e-14)


@each
@settings(max_examples=25)
@given(
    sizes=st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 4), st.integers(2, 5)),
    start=st.integers(-70_000, 70_000),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    given_one_by_one=st.booleans(),
    strided=st.booleans(),
)
def test_any_sizes_positions_and_dtypes_stay_within_rounding(
    rotary: Rotary,
    sizes: tuple[int, int, int, int],
    start: int,
    dtype: torch.dtype,
    given_one_by_one: bool,
    strided: bool,
) -> None:
    batch, heads, length, pairs = sizes
    x = torch.randn(batch, heads, length, 2 * pairs, dtype=torch.float64).to(dtype)
    x = x.mT.contiguous().mT if strided else x
    positions = torch.arange(start, start + length)[None] if given_one_by_one else start
    exact = oracle(rotary, x, positions)
    turned = rotary.rotate(x, positions)
    assert turned.dtype == dtype
    assert difference(turned, exact) <= budget(exact, exact.to(dtype))


@each
@settings(max_examples=20)
@given(shift=st.integers(-1000, 60_000))
def test_scores_depend_on_the_difference_of_positions_only(rotary: Rotary, shift: int) -> None:
    q, k = drawn(), drawn()
    here = rotary.rotate(q, 4) @ rotary.rotate(k, 0).mT
    there = rotary.rotate(q, 4 + shift) @ rotary.rotate(k, shift).mT
    torch.testing.assert_close(there, here, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dim", [4, 8])
@both_forms
def test_a_rotation_keeps_lengths_and_other_columns(interleaved: bool, dim: int) -> None:
    x = drawn()
    turned = Rotary(dim=dim, interleaved=interleaved).rotate(x, 11)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.equal(turned[..., dim:], x[..., dim:])


@each
@pytest.mark.parametrize("length", [1, LENGTH])
def test_the_layout_of_a_projection_is_kept(rotary: Rotary, length: int) -> None:
    x = drawn(length=length)
    turned = rotary.rotate(x, 0).transpose(1, 2)
    assert turned.is_contiguous()
    assert turned.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@each
def test_the_input_is_not_changed(rotary: Rotary) -> None:
    x = drawn()
    before = x.clone()
    for positions in (0, POSITIONS):
        rotary.rotate(x, positions)
        rotary.rotate(x.clone().requires_grad_(), positions).sum().backward()
    assert torch.equal(x, before)


@pytest.mark.parametrize("positions", [5, POSITIONS], ids=["start", "given"])
def test_queries_and_keys_are_rotated_alike(positions: int | Tensor) -> None:
    q, k = drawn(), drawn()[:, :1]
    for rotary in ROTARIES.values():
        found = rotary.rotate_both(q, k, positions)
        assert torch.equal(found[0], rotary.rotate(q, positions))
        assert torch.equal(found[1], rotary.rotate(k, positions))
    mixed = Rotary().rotate_both(q, k.float(), positions)
    assert torch.equal(mixed[1], Rotary().rotate(k.float(), positions))


class TestTheValue:
    def test_equal_ones_are_one_and_share_their_tables(self) -> None:
        one, other = Rotary(base=77.0, scaling=Linear(2.0)), Rotary(base=77.0, scaling=Linear(2.0))
        assert one == other
        assert hash(one) == hash(other)
        assert len({one, other, Rotary(base=77.0)}) == 2
        one.rotate(drawn(), 0)
        other.rotate(drawn(), 0)
        assert [*one._tables.values()] == [*other._tables.values()]

    def test_its_repr_shows_its_parameters(self) -> None:
        assert repr(Rotary(dim=4)) == "Rotary(base=10000.0, dim=4, interleaved=False, scaling=None)"

    def test_asdict_and_replace_see_its_parameters_only(self) -> None:
        rotary = Rotary(dim=4, scaling=Linear(2.0))
        rotary.rotate(drawn(), 0)
        expected = {"base": 10_000.0, "dim": 4, "interleaved": False, "scaling": {"factor": 2.0}}
        assert dataclasses.asdict(rotary) == expected
        assert dataclasses.replace(rotary, scaling=None) == Rotary(dim=4)

    def test_a_copy_is_equal_and_carries_no_tables(self) -> None:
        rotary = Rotary(scaling=Yarn(4.0, 32))
        rotary.rotate(drawn(), 0)
        for copied in (copy.deepcopy(rotary), copy.copy(rotary), pickle.loads(pickle.dumps(rotary))):
            assert copied == rotary
            assert "_tables" not in vars(copied)
            assert torch.equal(copied.rotate(x := drawn(), 2), rotary.rotate(x, 2))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: Rotary(base=0.0), "base is 0.0. Give a number above 1."),
        (lambda: Rotary(base="10"), "base is '10'. Give a number above 1."),  # type: ignore[arg-type]
        (lambda: Rotary(dim=3), "dim is 3, and columns are rotated in pairs. Give an even number."),
        (lambda: Rotary(dim=0), "dim is 0. Give an integer of at least 2."),
        (
            lambda: Rotary(scaling="yarn"),  # type: ignore[arg-type]
            "scaling is a str. Give Linear(...), Llama3(...), Yarn(...) or None.",
        ),
    ],
)
def test_arguments_out_of_range_are_rejected(made: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        made()


GIVE = "Give the position of the first token as an integer, or an integer tensor with that of each token."


@pytest.mark.parametrize(
    ("rotary", "x", "positions", "kind", "sentence"),
    [
        (
            Rotary(),
            torch.zeros(3, 5, 8),
            0,
            ShapeError,
            "x has shape (3, 5, 8), and must have four dimensions. Give (batch, heads, length, head_dim).",
        ),
        (
            Rotary(),
            torch.zeros(2, 3, 5, 7),
            0,
            ShapeError,
            (
                "x has a head_dim of 7, and Rotary rotates columns in pairs. "
                "Give an even head_dim, or rotate some of the columns: Rotary(dim=6)."
            ),
        ),
        (
            Rotary(dim=10),
            torch.zeros(2, 3, 5, 8),
            0,
            ShapeError,
            "x has a head_dim of 8, and Rotary rotates 10 columns of each head. Give Rotary a dim of at most 8.",
        ),
        (
            Rotary(),
            torch.zeros(2, 3, 5, 8, dtype=torch.int64),
            0,
            DtypeError,
            "x has dtype torch.int64. Give float32, float64, bfloat16 or float16.",
        ),
        (Rotary(), torch.zeros(2, 3, 5, 8), 1.0, DtypeError, f"positions is a float. {GIVE}"),
        (
            Rotary(),
            torch.zeros(2, 3, 5, 8),
            torch.ones(1, 5),
            DtypeError,
            f"positions is a torch.float32 tensor. {GIVE}",
        ),
        (
            Rotary(),
            torch.zeros(2, 3, 5, 8),
            torch.zeros(1, 5, dtype=torch.int64, device="meta"),
            DtypeError,
            "positions is on meta and x is on cpu. Move it: positions.to(x.device).",
        ),
        (
            Rotary(),
            torch.zeros(2, 3, 5, 8),
            torch.zeros(3, 5, dtype=torch.int64),
            ShapeError,
            (
                "positions has shape (3, 5), and there are 2 samples of 5 tokens. "
                "Give (2, 5), or (1, 5) where all samples share the positions."
            ),
        ),
    ],
    ids=["three axes", "an odd width", "too few columns", "integers", "a float", "floats", "another device", "samples"],
)
def test_tensors_that_do_not_fit_are_rejected(
    rotary: Rotary, x: Tensor, positions: Any, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        rotary.rotate(x, positions)
