"""Tables of cosines and sines: exact far out, kept between calls, shared by threads and by modes of torch."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from multihead.rotary.factors import (
    MAX_POSITIONS,
    RotationFactors,
    RotationTables,
    compute_rotation_factors,
    rotate_columns,
)

CPU = torch.device("cpu")
FREQUENCIES = (1.0, 0.01)
both_forms = pytest.mark.parametrize("interleaved", [False, True])


def tables(dtype: torch.dtype = torch.float64, *, interleaved: bool = False) -> RotationTables:
    return RotationTables(FREQUENCIES, 1.5, dtype, CPU, interleaved=interleaved)


def as_pairs(waves: RotationFactors | Tensor) -> Tensor:
    """The complex number that each pair is multiplied by, whatever form it is kept in: (length, pairs)."""
    if isinstance(waves, Tensor):
        return waves[:, 0]
    return torch.complex(waves.cosine, waves.sine)[:, 0, len(FREQUENCIES) :]


def expected_pairs(low: int, high: int) -> Tensor:
    numbers = [[1.5 * complex(math.cos(p * f), math.sin(p * f)) for f in FREQUENCIES] for p in range(low, high)]
    return torch.tensor(numbers, dtype=torch.complex128)


@both_forms
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 1),
        (0, 200),
        (5, 6),
        (127, 129),
        (-3, 2),
        (MAX_POSITIONS - 2, MAX_POSITIONS + 2),
        (MAX_POSITIONS, MAX_POSITIONS + 2000),
        (10**6, 10**6 + 3),
        (10**9, 10**9 + 1),
    ],
)
def test_waves_are_those_of_the_requested_positions(low: int, high: int, interleaved: bool) -> None:
    kept = tables(interleaved=interleaved)
    for _ in range(2):
        torch.testing.assert_close(
            as_pairs(kept.factors_between(low, high)), expected_pairs(low, high), rtol=0, atol=1e-14
        )
    kept.factors_between(0, 1)
    torch.testing.assert_close(as_pairs(kept.factors_between(low, high)), expected_pairs(low, high), rtol=0, atol=1e-14)


@both_forms
def test_no_positions_have_no_waves(interleaved: bool) -> None:
    assert len(as_pairs(tables(interleaved=interleaved).factors_between(7, 7))) == 0
    assert tables(interleaved=interleaved).factors_at(torch.zeros(1, 0, dtype=torch.int64)) is None


@both_forms
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_waves_of_given_positions_are_rows_of_the_table(dtype: torch.dtype, interleaved: bool) -> None:
    positions = torch.tensor([[3, 0, 200], [1, 1, 9]], dtype=dtype)
    waves = tables(interleaved=interleaved).factors_at(positions)
    assert waves is not None
    for sample, row in enumerate(positions.tolist()):
        part = (
            waves[sample]
            if isinstance(waves, Tensor)
            else RotationFactors(waves.cosine[sample], waves.sine[sample], True)
        )
        expected = torch.cat([expected_pairs(p, p + 1) for p in row])
        torch.testing.assert_close(as_pairs(part), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("far", [-1, MAX_POSITIONS])
def test_far_positions_are_in_no_table(far: int) -> None:
    assert tables().factors_at(torch.tensor([[0, far]])) is None


def test_a_float32_table_is_rounded_once() -> None:
    far = 10**6
    waves = tables(torch.float32).factors_between(far, far + 4)
    assert isinstance(waves, RotationFactors)
    exact = expected_pairs(far, far + 4)
    assert torch.equal(waves.cosine[:, 0, :2], exact.real.float())
    assert torch.equal(waves.sine[:, 0, 2:], exact.imag.float())


def test_the_same_positions_are_looked_up_once() -> None:
    kept = tables()
    assert kept.factors_between(40, 41) is kept.factors_between(40, 41)


def test_a_table_grows_by_doubling() -> None:
    kept, made = tables(), []
    plain = kept._compute_factors
    kept._compute_factors = lambda of: (made.append((int(of[0]), int(of[-1]) + 1)), plain(of))[1]  # type: ignore[method-assign]
    for position in range(600):
        kept.factors_between(position, position + 1)
    assert made == [(0, 128), (0, 256), (0, 512), (0, 1024)]


def test_threads_that_grow_a_table_together_each_get_their_waves() -> None:
    kept = tables()

    def right(start: int) -> bool:
        return torch.equal(
            as_pairs(kept.factors_between(start, start + 3)), as_pairs(tables().factors_between(start, start + 3))
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, [start * 37 % 5000 for start in range(400)]))


@both_forms
def test_a_table_made_in_inference_mode_can_be_trained_with(interleaved: bool) -> None:
    kept = tables(interleaved=interleaved)
    with torch.inference_mode():
        kept.factors_between(0, 3)
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    rotate_columns(x, kept.factors_between(0, 3), interleaved=interleaved).sum().backward()
    assert x.grad is not None


@both_forms
def test_a_table_is_made_on_its_own_device_whatever_the_default(interleaved: bool) -> None:
    with torch.device("meta"):
        assert as_pairs(tables(interleaved=interleaved).factors_between(0, 3)).device == CPU


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_waves_made_in_a_graph_are_those_of_the_table(dtype: torch.dtype, interleaved: bool) -> None:
    angles = torch.arange(5)[:, None] * torch.tensor(FREQUENCIES, dtype=torch.float64)
    x = torch.randn(2, 5, 3, 4, dtype=dtype)
    traced = compute_rotation_factors(angles, 1.5, dtype, interleaved=interleaved)
    found = [
        rotate_columns(x, waves, interleaved=interleaved)
        for waves in (traced, tables(dtype, interleaved=interleaved).factors_between(0, 5))
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("start", [0, 1])
def test_adjacent_pairs_are_rotated_whatever_their_strides(start: int) -> None:
    """A complex view needs an even offset, even strides and adjacent columns."""
    storage = torch.randn(2 * 5 * 3 * 5 + 1, dtype=torch.float64)
    waves = tables(interleaved=True).factors_between(0, 5)
    odd_start = storage[start : start + 120].view(2, 5, 3, 4)
    odd_steps = storage[start : start + 150].view(2, 5, 3, 5)[..., :4]
    apart = torch.randn(2, 5, 3, 8, dtype=torch.float64)[..., ::2]
    for x in (odd_start, odd_steps, apart):
        expected = rotate_columns(x.clone(memory_format=torch.contiguous_format), waves, interleaved=True)
        assert torch.equal(rotate_columns(x, waves, interleaved=True), expected)


def test_positions_of_a_rank_are_computed_without_the_table_of_the_whole_text() -> None:
    tables = RotationTables((1.0, 0.01), 1.0, torch.float32, torch.device("cpu"), interleaved=False)
    positions = torch.cat([torch.arange(512), torch.arange(7680, 8192)])[None]
    found = tables.factors_at(positions)
    assert tables._cached_range is None
    assert isinstance(found, RotationFactors)
    table = tables.factors_between(0, 8192)
    assert isinstance(table, RotationFactors)
    for one, other in zip(found[:2], table[:2], strict=True):
        assert torch.equal(one, other[positions])
    assert found.from_table
