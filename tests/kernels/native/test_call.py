"""What is handed to the native kernel: blocks of rows, bounds of any shape, tensors of any strides and any contents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.functional import attention_with_logsumexp, request_of
from multihead.functional import statistics as statistics_of
from multihead.kernels.native import call, kernel, library, statistics
from multihead.kernels.native.call import ALL_QUERIES, OperatorCall, QueryBlock, iterate_query_blocks, queries_per_block
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks.base import KeyBounds
from multihead.masks.positions import TilePositions
from tests import oracle
from tests.kernel_names import NATIVE_DTYPES, needs_native

pytestmark = needs_native
SETS = [each.name for each in library.instruction_sets() if each.is_supported_by_cpu]
# Lengths around the widths of registers, panels and blocks.
EDGES = (1, 8, 15, 17, 32, 63, 65, 255, 257)


def test_rows_go_together_where_their_intervals_say_it_all() -> None:
    q = torch.zeros(1, 1, 300, 4)
    request = request_of(q, q, q, masks.Causal())
    (rows,) = iterate_query_blocks(request, bounds_of(request))
    assert rows.queries is ALL_QUERIES
    assert rows.visible is None
    assert rows.slice_queries(q) is q


def test_blocks_of_a_dense_mask_cover_each_row_once_and_see_what_the_mask_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.zeros(2, 1, 300, 4)
    request = request_of(q, q, q, masks.Window(5) | masks.Prefix((3, 9)))
    bounds = bounds_of(request)
    monkeypatch.setattr(call, "DENSE_BLOCK_BYTES", 0)
    assert queries_per_block(request, bounds) == 96
    shown = request.mask.tile(TilePositions.from_sizes(300, 300))
    for step, heights in ((1, [96, 96, 96, 12]), (50, [100, 100, 100])):
        found = list(iterate_query_blocks(request, bounds, step=step))
        assert [rows.queries.stop - rows.queries.start for rows in found] == heights
        for rows in found:
            assert rows.visible is not None
            assert torch.equal(rows.visible.expand(2, 1, -1, 300), shown[:, :, rows.queries].expand(2, 1, -1, 300))
            assert torch.equal(rows.bounds.stop, bounds.stop[:, rows.queries])


def test_a_block_of_a_dense_mask_is_bounded_in_bytes_whatever_the_mask_speaks_of() -> None:
    q = torch.zeros(1, 1, 1, 1).expand(4, 8, 20000, 4)
    tensor = torch.rand(4, 1, 1, 20000) < 0.5
    for mask, factor in ((masks.Window(5) | masks.Prefix(3), 1), (masks.Keep(tensor), 32)):
        request = request_of(q, q, q, mask)
        assert queries_per_block(request, bounds_of(request)) == max(96, call.DENSE_BLOCK_BYTES // (20000 * factor))


# ------------------------------------------------------------------------------------------------ bounds of any shape


def bounded(monkeypatch: pytest.MonkeyPatch, start: Tensor, stop: Tensor) -> None:
    """Replace the bounds of every call by these: (batch or 1, queries)."""
    plain = call.operator_arguments

    def replaced(job: OperatorCall, rows: QueryBlock) -> tuple[Any, ...]:
        given = plain(job, rows)
        return (*given[:3], start, stop, *given[5:])

    for module in (call, statistics):
        monkeypatch.setattr(module, "operator_arguments", replaced)


@pytest.mark.parametrize("queries", [3, 120])
@pytest.mark.parametrize("samples", [1, 2])
def test_bounds_may_differ_by_sample(monkeypatch: pytest.MonkeyPatch, samples: int, queries: int) -> None:
    """Forward, backward and statistics, with crossed bounds and empty rows among them."""
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 300, 8), torch.randn(2, 2, 300, 12)
    start, stop = torch.randint(0, 301, (2, samples, queries))
    stop[..., ::2] = start[..., ::2].maximum(stop[..., ::2])
    keys = torch.arange(300)
    seen = ((keys >= start[..., None]) & (keys < stop[..., None]))[:, None].expand(2, 4, queries, 300)
    bounded(monkeypatch, start, stop)
    double = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    dense = oracle.attend(*double, seen)
    expected = torch.autograd.grad(dense.output.square().sum(), double)
    exact = oracle.statistics(dense.weights.detach(), seen, start=[0, 0])
    for name in SETS:
        with library.using_instruction_set(name):
            single = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            output, logsumexp = attention_with_logsumexp(*single, kernel="native")
            assert oracle.difference(output.detach(), dense.output.detach()) < 2e-6
            assert oracle.difference(logsumexp.detach(), dense.logsumexp.detach()) < 2e-6
            for one, two in zip(torch.autograd.grad(output.square().sum(), single), expected, strict=True):
                assert oracle.difference(one, two) < 2e-5
            found = statistics_of(q, k, probes=("entropy", "received", "mean_distance"), logsumexp=logsumexp.detach())
            for probe, value in found.items():
                torch.testing.assert_close(value.double(), exact[probe], atol=2e-5, rtol=1e-5, msg=probe)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 6), (6, 3), (2, 1 << 40), (0, -1)])
def test_bounds_outside_the_keys_are_refused_before_anything_is_read(start: int, stop: int) -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    bounds = KeyBounds(torch.tensor([[0, start, 0]]), torch.tensor([[5, stop, 5]]))
    for run in (
        lambda: kernel.attend(request_of(q, k, k), bounds),
        lambda: statistics.measure_in_one_pass(request_of(q, k, k), bounds, ("entropy",), None),
        lambda: statistics.sum_weights_per_key(request_of(q, k, k), bounds, torch.zeros(1, 2, 3), cell=None),
    ):
        with pytest.raises(RuntimeError) as refusal:
            run()
        assert str(refusal.value) == ("The bounds of some query lie outside the 5 keys. Give bounds from 0 to 5.")


# ------------------------------------------------------------------------------------------------- what is not finite

ALL = ("entropy", "mean_distance", "distance_spread", "self_mass", "largest_weight", "largest_key", "received")


def everything(q: Tensor, k: Tensor, v: Tensor, counted: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Outputs, gradients of the counted rows (batch, heads, queries), and statistics in both passes."""
    taught = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    output, logsumexp = attention_with_logsumexp(*taught, kernel="native", **options)
    rows = logsumexp != -torch.inf if counted is None else counted & (logsumexp != -torch.inf)
    total = output[rows].float().square().sum() + logsumexp[rows].sum()
    grads = torch.autograd.grad(total, taught)
    measured = statistics_of(q, k, logsumexp=logsumexp.detach(), probes=ALL, **options)
    return [output.detach(), logsumexp.detach(), *grads, *measured.values()]


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("queries", [2, 40])
def test_what_is_not_finite_beside_the_bounds_edge_changes_no_bit(queries: int, dtype: torch.dtype) -> None:
    """Wherever the edge falls within a register, a panel or a block; in keys, in values and in the bias."""
    for edge in EDGES:
        q, k, v = (torch.randn(2, 2, n, 9).to(dtype) for n in (queries, 300, 300))
        bias = torch.randn(1, 2, 1, 300)
        options: dict[str, Any] = {"mask": masks.Lengths((edge, 300 - edge))}
        bad_k, bad_v, bad_bias = k.clone(), v.clone(), bias.expand(2, 2, queries, 300).clone()
        for sample, first in enumerate((edge, 300 - edge)):
            bad_k[sample, :, first::2] = torch.nan
            bad_v[sample, :, first:] = torch.inf
            bad_bias[sample, :, :, first:] = torch.nan
        for name in SETS:
            with library.using_instruction_set(name):
                clean = everything(q, k, v, **options)
                assert_same_bits(everything(q, bad_k, bad_v, **options), clean)
                clean = everything(q, k, v, bias=bias.expand(2, 2, queries, 300).contiguous(), **options)
                assert_same_bits(everything(q, bad_k, bad_v, bias=bad_bias, **options), clean)


def assert_same_bits(given: list[Tensor], expected: list[Tensor]) -> None:
    for one, two in zip(given, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("queries", [4, 120])
@pytest.mark.parametrize(
    "mask",
    [masks.Window(50), masks.Window(30) | masks.Prefix(9), masks.Drop(torch.arange(300) % 4 == 1, "keys")],
    ids=repr,
)
def test_rows_that_see_what_is_not_finite_are_nan_and_no_others(
    mask: masks.Mask, queries: int, dtype: torch.dtype
) -> None:
    q, k, v = (torch.randn(1, 2, n, 8).to(dtype) for n in (queries, 300, 300))
    options: dict[str, Any] = {"mask": mask, "query_start": 300 - queries}
    bad_k, bad_v = k.clone(), v.clone()
    for key in (77, 257, 265):
        bad_k[:, 0, key, 3] = torch.nan
        bad_v[:, 0, key + 5, 1] = -torch.inf
    bad = torch.zeros(300, dtype=torch.bool)
    bad[[77, 82, 257, 262, 265, 270]] = True
    seen = mask.tile(TilePositions.from_sizes(queries, 300, query_start=300 - queries)).expand(1, 2, queries, 300)
    hit = (seen & bad).any(-1)
    hit[:, 1] = False
    assert bool(hit.any())
    for name in SETS:
        with library.using_instruction_set(name):
            clean, given = (everything(q, *kv, ~hit, **options) for kv in ((k, v), (bad_k, bad_v)))
        for one, two in zip(given[:3], clean[:3], strict=True):  # output, logsumexp and the gradient of q
            assert torch.equal(one[~hit], two[~hit])
        assert bool(given[0][hit].isnan().all() & given[1][hit].isnan().all())
        assert bool((given[2][hit] == 0).all())
        for one, two in zip(given[3:5], clean[3:5], strict=True):
            assert oracle.difference(one, two.double()) < (1e-5 if dtype == torch.float32 else 0.1)
        for statistic, one, two in zip(ALL[:-1], given[5:-1], clean[5:-1], strict=True):
            assert torch.equal(one[~hit], two[~hit]), statistic


def test_a_query_that_is_not_finite_is_nan_alone_on_every_instruction_set() -> None:
    for queries in (3, 40):
        for dtype in NATIVE_DTYPES:
            q, k, v = (torch.randn(2, 2, n, 8).to(dtype) for n in (queries, 70, 70))
            bad = q.clone()
            bad[0, 1, 2, 5], bad[1, 0, 1] = torch.nan, torch.inf
            hit = torch.zeros(2, 2, queries, dtype=torch.bool)
            hit[0, 1, 2] = hit[1, 0, 1] = True
            for name in SETS:
                with library.using_instruction_set(name):
                    clean, given = everything(q, k, v, ~hit), everything(bad, k, v, ~hit)
                for one, two in zip(given[:3], clean[:3], strict=True):
                    assert torch.equal(one[~hit], two[~hit])
                assert bool(given[0][hit].isnan().all() & given[1][hit].isnan().all())
                assert all(bool(each.isfinite().all()) for each in given[2:5])


# ------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("size", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 2, 0, 0), (1, 1, 1, 1)], ids=str)
def test_none_and_one_of_each_are_no_special_case(size: tuple[int, int, int, int]) -> None:
    batch, heads, queries, keys = size
    for name in SETS:
        with library.using_instruction_set(name):
            for dtype in NATIVE_DTYPES:
                q, k, v = (torch.randn(batch, heads, n, d).to(dtype) for n, d in ((queries, 3), (keys, 3), (keys, 1)))
                found = everything(q, k, v, sinks=torch.zeros(heads))
                assert found[0].shape == (batch, heads, queries, 1)
                if not keys:
                    assert bool((found[0] == 0).all() & (found[1] == -torch.inf).all())


def test_memory_beyond_two_to_the_31_elements_is_addressed_right() -> None:
    """Only the pages that the views touch are ever there."""
    store = torch.empty((1 << 31) + (1 << 12), dtype=torch.bfloat16)
    far = 1 << 29  # elements between rows: the fifth begins at 2^31
    views = [store.as_strided((1, 2, 5, 8), (0, 16, far, 1), 64 * place) for place in range(3)]
    close = [torch.randn(1, 2, 5, 8).bfloat16() for _ in views]
    for view, values in zip(views, close, strict=True):
        view.copy_(values)
    for queries in (5, 1):
        far_ones = everything(views[0][:, :, 5 - queries :], *views[1:])
        near_ones = everything(close[0][:, :, 5 - queries :], *close[1:])
        assert_same_bits(far_ones, near_ones)
