"""Int8 keys and values in the native kernel, compared with the same call on expanded keys in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.functional import attend, request_of
from multihead.kernels.call import AttentionRequest, find_surroundings
from multihead.kernels.native import kernel, library, short_call
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.quantised import Int8Scales, quantise
from multihead.layer import attention
from multihead.masks import Mask
from multihead.probes import PROBES
from tests.kernel_names import NATIVE_DTYPES, needs_native

pytestmark = needs_native
SETS = [each.name for each in library.instruction_sets() if each.is_supported_by_cpu]
PARTS = frozenset().union(
    *(PROBES[name].parts for name in ("entropy", "mean_distance", "first_mass", "largest_weight"))
)
MASKS: dict[str, Mask] = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(70),
    "lengths": masks.Lengths((100, 641)),
    "keys": masks.Keep(torch.rand(2, 700, generator=torch.Generator().manual_seed(3)) < 0.7, "batch keys"),
}


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    with library.using_instruction_set(request.param):
        yield request.param


def drawn(
    *,
    queries: int = 1,
    keys: int = 700,
    group: int = 2,
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype,
    **given: Any,
) -> AttentionRequest:
    """A request whose keys are views of longer buffers, as those of a cache."""
    q = torch.randn(2, 2 * group, queries, dims[0]).to(dtype)
    (k, k_scales), (v, v_scales) = (quantise(torch.randn(2, 2, keys + 5, dim)) for dim in dims)
    k, k_scales, v, v_scales = (each[:, :, 2 : 2 + keys] for each in (k, k_scales, v, v_scales))
    return request_of(
        q, k, v, scales=Int8Scales(k_scales[..., 0], v_scales[..., 0]), query_start=keys - queries, **given
    )


def expected(request: AttentionRequest) -> Tensor:
    wide = replace(request, q=request.q.double(), shape=request.shape._replace(dtype=torch.float64))
    return attend(wide.with_dequantised_keys(), kernel="reference").output


def assert_near(found: Tensor, request: AttentionRequest) -> None:
    assert found.dtype == request.shape.dtype
    within = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(found.dtype, 1e-4)
    torch.testing.assert_close(found.double(), expected(request), rtol=within, atol=within, equal_nan=True)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_it_agrees_with_expanded_keys(instructions: str, name: str, dtype: torch.dtype) -> None:
    for queries in (1, 4):
        request = drawn(queries=queries, dtype=dtype, mask=MASKS[name])
        assert kernel.reads_int8(request)
        assert_near(kernel.attend(request, bounds_of(request)).output, request)


@pytest.mark.parametrize("dims", [(128, 128), (80, 33), (7, 40), (600, 1)], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_any_widths_and_groups_agree(instructions: str, dims: tuple[int, int], group: int) -> None:
    request = drawn(group=group, dims=dims, keys=90, dtype=torch.float32)
    assert_near(kernel.attend(request, bounds_of(request)).output, request)


def test_bias_softcap_and_sinks_agree(instructions: str) -> None:
    terms: dict[str, Any] = {"bias": torch.randn(2, 4, 2, 700), "softcap": 3.0, "sinks": torch.randn(4)}
    request = drawn(queries=2, dtype=torch.float32, **terms)
    assert_near(kernel.attend(request, bounds_of(request)).output, request)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_a_key_of_nan_makes_only_those_queries_nan_that_see_it(instructions: str, dtype: torch.dtype) -> None:
    request = drawn(queries=3, dtype=dtype, mask=masks.Causal())
    assert request.scales is not None
    request.scales.k[0, 1, 698] = torch.nan  # the last two queries of sample 0 see it, in the heads of kv head 1
    request.scales.v[1, 0, 699] = torch.nan  # the last query of sample 1 sees it, in the heads of kv head 0
    found = kernel.attend(request, bounds_of(request)).output
    rows = torch.zeros(2, 4, 3, dtype=torch.bool)
    rows[0, 2:, 1:] = True
    rows[1, :2, 2] = True
    assert torch.equal(found.isnan().all(-1), rows)
    assert torch.equal(found.isnan().any(-1), rows)
    assert_near(found, request)


def test_a_query_of_nan_is_nan_alone(instructions: str) -> None:
    request = drawn(queries=2, dtype=torch.float32)
    request.q[1, 0, 1, 3] = torch.nan
    found = kernel.attend(request, bounds_of(request)).output.isnan().any(-1)
    assert found.nonzero().tolist() == [[1, 0, 1]]


def test_statistics_are_those_of_the_expanded_keys_and_change_no_bit(instructions: str) -> None:
    request = drawn(queries=2, dtype=torch.float32, mask=masks.Causal())
    quiet = kernel.attend(request, bounds_of(request))
    watched = kernel.attend(replace(request, requested_statistics=PARTS), bounds_of(request))
    assert torch.equal(quiet.output, watched.output)
    wanted = kernel.attend(
        replace(request.with_dequantised_keys(), requested_statistics=PARTS), bounds_of(request)
    ).statistics
    for part, value in watched.statistics.items():
        torch.testing.assert_close(value, wanted[part], rtol=1e-3, atol=1e-3)


def unplanned(request: AttentionRequest) -> tuple[Tensor, ...] | None:
    terms = (request.mask, None, request.softcap, None, request.scale, 0.0, request.query_start)
    around = find_surroundings()
    return short_call.attend(request.q, request.k, request.v, terms, around, lambda *_: None, None, request.scales)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("name", [name for name, mask in MASKS.items() if mask.band is not None])
def test_a_call_without_a_plan_gives_the_bits_of_a_planned_one(name: str, dtype: torch.dtype) -> None:
    for queries, softcap in ((1, None), (4, 3.0)):
        request = drawn(queries=queries, dims=(40, 24), dtype=dtype, mask=MASKS[name], softcap=softcap)
        found, planned = unplanned(request), kernel.attend(request, bounds_of(request))
        assert found is not None
        assert torch.equal(found[0], planned.output)
        assert torch.equal(found[1], planned.logsumexp)
        assert found[0].stride() == planned.output.stride()


def test_a_plan_is_made_where_the_keys_must_be_expanded_or_do_not_fit() -> None:
    assert unplanned(drawn(queries=5, dtype=torch.float32)) is None
    request = drawn(dtype=torch.float32)
    assert request.scales is not None
    assert unplanned(replace(request, scales=Int8Scales(request.scales.k, request.scales.v[:, :, 1:]))) is None
    assert unplanned(replace(request, q=request.q.clone().requires_grad_())) is None


def test_a_decoding_step_needs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = mh.MultiHeadAttention(32, 4, num_kv_heads=2), torch.randn(2, 9, 32)
    cache, planned = mh.KeyValueCache(dtype="int8"), mh.KeyValueCache(dtype="int8")
    with torch.no_grad():
        for each in (cache, planned):
            layer(x[:, :8], mask=masks.Causal(), cache=each)
        with monkeypatch.context() as patched:
            patched.setattr(short_call, "takes", lambda *_: None)
            expected = layer(x[:, 8:], mask=masks.Causal(), cache=planned)
        monkeypatch.setattr(attention, "attend", None)
        assert torch.equal(layer(x[:, 8:], mask=masks.Causal(), cache=cache), expected)


def test_more_queries_and_gradients_expand_the_keys_once() -> None:
    assert not kernel.reads_int8(drawn(queries=5, dtype=torch.float32))
    request = drawn(dtype=torch.float32)
    q = request.q.clone().requires_grad_()
    request = replace(request, q=q)
    assert not kernel.reads_int8(request)
    attend(request).output.sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        assert kernel.reads_int8(request)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_other_kernels_compute_the_same_from_expanded_keys(name: str) -> None:
    request = drawn(queries=2, dtype=torch.float32, mask=masks.Causal())
    with torch.no_grad():
        assert_near(attend(request, kernel=name).output, request)
