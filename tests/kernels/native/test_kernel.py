"""The native kernel against the oracle, on every instruction set that runs here; what it skips, holds and refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from multihead import masks
from multihead.errors import ArgumentError
from multihead.functional import attention, attention_weights, attention_with_logsumexp, explain, request_of, statistics
from multihead.kernels.native import kernel, library
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks.positions import TilePositions
from multihead.probes import PROBES
from tests import oracle
from tests.agreeing import assert_within_budget
from tests.drawing import LAYOUTS, Drawn, Sizes, calls, laid_out
from tests.kernel_names import NATIVE_DTYPES, needs_native

pytestmark = needs_native
SETS = [each.name for each in library.instruction_sets() if each.is_supported_by_cpu]


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    with library.using_instruction_set(request.param):
        yield request.param


def long(*, queries: int = 210, keys: int = 530, dtype: torch.dtype = torch.float32, **given: Any) -> Drawn:
    """A call that crosses blocks of 96 queries and 256 keys, with grouped heads and values wider than queries."""
    size = Sizes(2, 4, 2, queries, keys, 24, 40)
    q, k = torch.randn(2, 4, queries, 24), torch.randn(2, 2, keys, 24)
    v = torch.randn(2, 2, keys, 40)
    case = Drawn(q.to(dtype), k.to(dtype), v.to(dtype), size, masks.Full(), keys - queries)
    return replace(case, **given)


def seen_by(case: Drawn) -> Tensor:
    """What the mask of a long call shows, by its dense meaning: cell by cell takes seconds."""
    start: Any = case.query_start
    place = TilePositions.from_sizes(case.size.queries, case.size.keys, query_start=start)
    return case.mask.tile(place).expand(case.size.cells)


@settings(max_examples=40)
@given(case=calls(dtypes=NATIVE_DTYPES))
def test_it_agrees_with_the_oracle_with_every_gradient(case: Drawn) -> None:
    assert_within_budget(case, "native", of_bias=True, instruction_sets=SETS)


MASKS: dict[str, masks.Mask] = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Window(40, after=3),
    "lengths": masks.Causal() & masks.Lengths((300, 37)),
    "lengths a query": masks.Lengths(torch.arange(420).view(2, 210) % 531),
    "documents": masks.Documents(((330, 100, 100), (7, 323, 200))),
    "gaps": masks.Window(20) | masks.Prefix(5),
    "dense": masks.Keep(torch.rand(2, 4, 210, 530, generator=torch.Generator().manual_seed(1)) < 0.4),
    "dense a key": masks.Keep(torch.arange(530) % 3 != 1, "keys"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in MASKS),
        *product(("full", "lengths", "gaps"), (torch.bfloat16, torch.float16)),
    ],
)
def test_long_calls_agree_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    case = long(dtype=dtype, mask=MASKS[name])
    assert_within_budget(case, "native", seen=seen_by(case), instruction_sets=SETS)


@pytest.mark.parametrize(
    ("queries", "dtype"), [(1, torch.float32), (8, torch.float32), *product((4, 5, 9), (torch.bfloat16, torch.float16))]
)
def test_few_queries_over_many_keys_agree_with_the_oracle(queries: int, dtype: torch.dtype) -> None:
    for mask in (masks.Window(900), masks.Lengths((0, 1090)) & masks.Drop(torch.arange(1100) % 9 == 2, "keys")):
        case = long(queries=queries, keys=1100, dtype=dtype, mask=mask, options={"sinks": torch.randn(4)})
        assert_within_budget(case, "native", seen=seen_by(case), instruction_sets=SETS)


def test_more_heads_than_are_packed_together_agree_with_the_oracle() -> None:
    size = Sizes(2, 70, 70, 12, 530, 24, 40)
    q, k, v = (torch.randn(2, 70, n, d) for n, d in ((12, 24), (530, 24), (530, 40)))
    case = Drawn(q, k, v, size, masks.Causal(), 518)
    assert_within_budget(case, "native", seen=seen_by(case))


@pytest.mark.parametrize("kernel", ["native", None])
@pytest.mark.parametrize("layouts", list(product(LAYOUTS, repeat=3))[::7], ids=", ".join)
def test_every_layout_of_memory_gives_the_same_bits(layouts: tuple[str, str, str], kernel: str | None) -> None:
    case = long(queries=50, keys=70, mask=masks.Causal())

    def run(tensors: list[Tensor], kernel: str | None) -> list[Tensor]:
        taught = [tensor.detach().requires_grad_() for tensor in tensors]
        output, logsumexp = attention_with_logsumexp(*taught, mask=masks.Causal(), query_start=20, kernel=kernel)
        of_output = torch.linspace(-1, 1, output.numel()).view_as(output)
        return [output.detach(), logsumexp.detach(), *torch.autograd.grad(output, taught, of_output)]

    plain = run([case.q, case.k, case.v], "native")
    moved = [laid_out(each, layout) for each, layout in zip((case.q, case.k, case.v), layouts, strict=True)]
    assert all(torch.equal(one, two) for one, two in zip(run(moved, kernel), plain, strict=True))
    repeated = [each[..., :1].expand_as(each) for each in moved]
    copied = run([each.contiguous() for each in repeated], "native")
    assert all(torch.equal(one, two) for one, two in zip(run(repeated, kernel), copied, strict=True))


@pytest.mark.parametrize("pattern", list(product((True, False), repeat=4)), ids=str)
def test_the_gradient_of_a_bias_is_summed_over_what_it_is_spread_over(pattern: tuple[bool, ...]) -> None:
    case = long(queries=30, keys=41)
    shape = [n if whole else 1 for n, whole in zip(case.size.cells, pattern, strict=True)]
    case.options = {"bias": torch.randn(shape), "softcap": 1.5, "sinks": torch.randn(4)}
    case.mask = masks.Causal() if pattern[0] else masks.Window(9) | masks.Prefix(2)
    assert_within_budget(case, "native", of_bias=True, seen=seen_by(case), instruction_sets=SETS)


def test_blocks_of_rows_of_a_dense_mask_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is no interval is written down for a block of rows at a time, and added up in float32."""
    bias = torch.randn(1, 4, 210, 530)
    case = long(mask=MASKS["dense"], options={"bias": bias, "sinks": torch.randn(4)})
    monkeypatch.setattr("multihead.kernels.native.call.DENSE_BLOCK_BYTES", 0)
    assert_within_budget(case, "native", of_bias=True, seen=seen_by(case), instruction_sets=SETS)
    case = long(mask=MASKS["gaps"], dtype=torch.bfloat16, options={"bias": bias[:, :, :1]})
    assert_within_budget(case, "native", of_bias=True, seen=seen_by(case))


def test_long_sums_stay_within_two_hundred_thousandths() -> None:
    q, k, v = torch.randn(3, 1, 1, 4096, 64).unbind()
    q = q[:, :, :120]
    output, logsumexp = attention_with_logsumexp(q, k, v, kernel="native")
    exact = oracle.attend(q.double(), k.double(), v.double(), torch.ones(1, 1, 1, 1, dtype=torch.bool))
    assert oracle.difference(output, exact.output) < 2e-5
    assert oracle.difference(logsumexp, exact.logsumexp) < 2e-5


# ---------------------------------------------------------------------------------------------------------- dropout


def dropped(seed: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    return attention(q, k, v, kernel="native", **options)


def kept_by(seed: int, case: Drawn, share: float) -> Tensor:
    """Which weights a seed keeps, read off an output whose values are the unit vectors."""
    identity = torch.eye(case.size.keys).expand(2, 2, -1, -1)
    return dropped(seed, case.q, case.k, identity, dropout=share) != 0


@pytest.mark.parametrize("queries", [6, 110])
def test_dropout_has_the_gradient_of_the_weights_that_it_keeps(instructions: str, queries: int) -> None:
    case = long(queries=queries, keys=270)
    kept = kept_by(3, case, 0.4)
    single = [tensor.requires_grad_() for tensor in (case.q, case.k, case.v)]
    double = [tensor.detach().double().requires_grad_() for tensor in single]
    dense = oracle.attend(*double, torch.ones(1, dtype=torch.bool))
    expected = dense.weights * kept / 0.6 @ double[2].repeat_interleave(2, 1)
    output = dropped(3, *single, dropout=0.4)
    assert oracle.difference(output.detach(), expected.detach()) < 3e-6
    of_output = torch.randn(output.shape)
    found = torch.autograd.grad(output, single, of_output)
    for one, two in zip(found, torch.autograd.grad(expected, double, of_output.double()), strict=True):
        assert oracle.difference(one, two) < 3e-5


def test_dropout_drops_its_share_independently_of_row_head_and_sample() -> None:
    case = long()
    kept = kept_by(1, case, 0.3).double()

    def assert_near(found: Tensor, expected: float) -> None:
        deviation = (expected * (1 - expected) / found.numel()) ** 0.5
        assert abs(float(found.mean()) - expected) < 5 * deviation

    assert_near(kept, 0.7)
    assert_near(kept[0] * kept[1], 0.49)
    assert_near(kept[:, 1:] * kept[:, :-1], 0.49)
    assert_near(kept[:, :, 1:] * kept[:, :, :-1], 0.49)
    assert_near(kept[..., 1:] * kept[..., :-1], 0.49)
    assert torch.equal(kept_by(1, case, 0.3).double(), kept)
    assert_near(kept_by(2, case, 0.3) * kept, 0.49)


def test_dropout_is_the_same_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = long()
    whole = dropped(1, case.q, case.k, case.v, dropout=0.3, mask=MASKS["dense"])
    monkeypatch.setattr("multihead.kernels.native.call.DENSE_BLOCK_BYTES", 0)
    assert torch.equal(dropped(1, case.q, case.k, case.v, dropout=0.3, mask=MASKS["dense"]), whole)


# ----------------------------------------------------------------------------------------------------- the same bits


def everything(case: Drawn, **options: Any) -> list[Tensor]:
    """Outputs, gradients and statistics of a call."""
    taught = [tensor.detach().clone().requires_grad_() for tensor in (case.q, case.k, case.v)]
    where: dict[str, Any] = {"mask": case.mask, "query_start": case.query_start, **options}
    output, logsumexp = attention_with_logsumexp(*taught, kernel="native", **where)
    of_output = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    finite = logsumexp.masked_fill(logsumexp == -torch.inf, 0)
    grads = torch.autograd.grad((output * of_output).sum() + finite.sum().to(output.dtype), taught)
    measured = statistics(case.q, case.k, logsumexp=logsumexp, probes=(*STATISTICS, "received", "pooled_map"), **where)
    return [output.detach(), logsumexp.detach(), *grads, *measured.values()]


STATISTICS = ("entropy", "mean_distance", "distance_spread", "self_mass", "first_mass", "largest_weight", "largest_key")
PARTS = frozenset().union(*(PROBES[name].parts for name in STATISTICS))


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one.nan_to_num(7), two.nan_to_num(7)) for one, two in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("queries", [5, 210])
def test_any_number_of_threads_gives_the_same_bits_each_time(queries: int, dtype: torch.dtype) -> None:
    case = long(queries=queries, keys=1100, dtype=dtype, mask=masks.Window(800) | masks.Prefix(2))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            found.append(everything(case))
    finally:
        torch.set_num_threads(before)
    assert all(equal(each, found[0]) for each in found)


def test_calls_from_many_threads_at_once_give_the_same_bits() -> None:
    case = long(mask=masks.Causal())
    alone = everything(case)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: everything(case), range(12)))
    assert all(equal(each, alone) for each in found)


def test_train_and_eval_and_a_listener_give_the_same_bits(instructions: str) -> None:
    for queries in (5, 210):
        case = long(queries=queries, mask=masks.Causal())
        request = request_of(case.q, case.k, case.v, case.mask, query_start=case.query_start)
        quiet = kernel.attend(request, bounds_of(request))
        watched = kernel.attend(replace(request, requested_statistics=PARTS), bounds_of(request))
        assert torch.equal(watched.output, quiet.output)
        assert torch.equal(watched.logsumexp, quiet.logsumexp)
        assert watched.statistics.keys() == PARTS


@pytest.mark.parametrize("queries", [3, 16, 33, 100])
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_statistics_change_no_bit_of_a_call_of_any_size(instructions: str, queries: int, dtype: torch.dtype) -> None:
    """Without statistics the queries may be the columns of the tiles, and with them the rows."""
    for mask in (masks.Full(), masks.Window(7), masks.Lengths((19, 300))):
        case = long(queries=queries, keys=300, mask=mask, dtype=dtype)
        request = request_of(case.q, case.k, case.v, mask, query_start=case.query_start)
        quiet = kernel.attend(request, bounds_of(request))
        watched = kernel.attend(replace(request, requested_statistics=PARTS), bounds_of(request))
        assert torch.equal(watched.output, quiet.output)
        assert torch.equal(watched.logsumexp, quiet.logsumexp)


def test_float16_is_read_and_rounded_as_pytorch_does(instructions: str) -> None:
    """One key has all the weight, so that the output is its value: every finite number, and what overflows."""
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[values.isfinite()].view(1, 1, -1, 32)  # 1,984 keys of 32 features
    q = torch.zeros(1, 1, 1984, 1, dtype=torch.float16)
    mask = masks.Window(1)
    assert torch.equal(attention(q, q, values, mask=mask, kernel="native"), values)
    many = torch.full((1, 1, 40, 1), 2000.0).half()  # the gradient of the one value is the sum of 40 rows: 80,000
    k, v = torch.ones(2, 1, 1, 1, 1).half().unbind()
    v.requires_grad_()
    grad_v = torch.autograd.grad(attention(many * 0, k, v, kernel="native"), v, many)[0]
    assert torch.equal(grad_v, torch.full_like(grad_v, torch.inf))


# ------------------------------------------------------------------------------------------- explained and refused


@pytest.mark.parametrize("name", ["full", "causal", "window", "lengths", "documents"])
def test_the_skipped_share_is_that_of_the_register_tiles(instructions: str, name: str) -> None:
    case = long(mask=MASKS[name])
    high, wide = next(each.tile for each in library.instruction_sets() if each.name == instructions)
    tiles = 0
    for sample in seen_by(case)[:, 0]:
        for group in sample.split(high):
            columns = group.any(0).nonzero().flatten() // wide
            tiles += int(columns[-1] - columns[0]) + 1 if columns.numel() else 0
    told = explain(case.q, case.k, case.v, mask=case.mask, query_start=case.query_start, kernel="native")
    cells = min(tiles * high * wide, 2 * 210 * 530) if name == "full" else tiles * high * wide
    assert told.skipped_share == pytest.approx(max(0, 1 - cells / (2 * 210 * 530)), abs=1e-9)


def test_what_it_holds_is_said_and_does_not_grow_with_the_square_of_the_length() -> None:
    def held(length: int) -> int:
        q = torch.zeros(1, 1, 1, 1).expand(1, 4, length, 64)
        return explain(q, q, q, mask=masks.Causal(), kernel="native").work.extra_memory_bytes

    assert held(4096) < 2.2 * held(2048)
    assert held(2048) < 16 << 20


GROWN = """
import sys
import torch
from benchmarks.peak_memory import peak
from multihead import masks
from multihead.kernels.call import AttentionRequest
from multihead.functional import attend, request_of
from multihead.kernels.native import call, kernel
from multihead.kernels.native.statistics import PARTS_OF_ONE_PASS
from multihead.kernels.parts import SPECIAL_MASS
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.quantised import Int8Scales, quantise
from dataclasses import replace

torch.set_num_threads(1)
call.DENSE_BLOCK_BYTES = 2 << 20

def run(length, way):
    q, k, v = torch.randn(3, 1, 1, length, 16).unbind()
    options = {"dropout": 0.2} if "dropout" in way else {}
    scales = None
    if "int8" in way:
        (k, k_scales), (v, v_scales) = quantise(k), quantise(v)
        scales = Int8Scales(k_scales[..., 0], v_scales[..., 0])
    leaves = [x.requires_grad_("gradients" in way) for x in (q,)] + [k, v]
    request = request_of(*leaves, masks.Window(64) | masks.Prefix(8), scales=scales, **options)
    if "statistics" in way:
        request = replace(request, requested_statistics=PARTS_OF_ONE_PASS - {SPECIAL_MASS.name})
    output = kernel.attend(request, bounds_of(request)).output
    if "gradients" in way:
        output.sum().backward()

for way in sys.argv[1:]:
    run(300, way)
    print(peak(lambda: run(4_000, way)))
"""
GROWING = ("plain", "gradients", "dropout, gradients", "statistics", "int8", "int8, statistics")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not reset the peak of a process")
def test_a_mask_that_is_no_interval_takes_memory_linear_in_the_length() -> None:
    """The mask of 4,000 tokens takes 16 MB as bool, and the weights of one head 64 MB.

    With a fixed threshold the allocator returns every large block at once, so one process measures all ways. Without
    one glibc raises it to 32 MB, and keeps blocks in a heap whose size differs from run to run.
    """
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", GROWN, *GROWING]
    fixed = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    found = subprocess.run(command, cwd=root, env=fixed, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    peaks = dict(zip(GROWING, map(int, found.stdout.split()), strict=True))
    assert {way: peak for way, peak in peaks.items() if peak >= 14 << 20} == {}


def test_other_python_threads_run_while_an_operator_computes() -> None:
    """The operators release the GIL."""
    q = torch.randn(1, 4, 3000, 64)
    counted, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        time.sleep(0.05)
        before = counted[0]
        torch.ops.multihead.attention.short_call(q, q, q, None, -1, -1, 0, None, None)
        after = counted[0]
    finally:
        done.set()
        thread.join()
    assert after - before > 20  # a few switches may happen before and after the call


def test_it_says_why_it_refuses() -> None:
    q = torch.zeros(1, 2, 4, 8, dtype=torch.float64)
    with pytest.raises(ArgumentError) as refusal:
        attention(q, q, q, kernel="native")
    assert str(refusal.value) == (
        "Kernel 'native' refuses: it computes float32, bfloat16 and float16, and the tensors are float64. "
        "Leave kernel out to use the fastest kernel that supports the call."
    )
    q = torch.zeros(1, 2, 4, 8, device="meta")
    request = request_of(q, q, q)
    assert kernel.refusal(request, bounds_of(request)) == "it runs on the CPU, and the tensors are on meta"


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    sinks = torch.randn(2, requires_grad=True)
    attention(q, k, v, sinks=sinks, kernel="native").sum().backward()
    assert sinks.grad is not None
    v = v.clone().requires_grad_()
    attention(q, k, v, kernel="native").sum().backward()
    assert v.grad is not None
    assert torch.allclose(v.grad.sum(), torch.tensor(2.0 * 5 * 4))
    assert torch.allclose(v.grad[..., 0], attention_weights(q, k).sum(2), atol=1e-6)


def test_an_input_changed_before_the_backward_pass_is_refused() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    k = k.clone().requires_grad_()
    output = attention(q, k, v, kernel="native")
    v.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_tensors_that_hold_no_memory_of_their_own_are_refused() -> None:
    """A tracer's tensors have no address, and reading there ended the process."""
    with FakeTensorMode():
        q = torch.randn(1, 2, 5, 4)
    reason = kernel.refusal(request_of(q, q, q), bounds_of(request_of(*torch.zeros(3, 1, 2, 5, 4))))
    assert reason == "it reads plain tensors, and one is a FakeTensor"
