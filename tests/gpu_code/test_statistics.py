"""Statistics on the simulated GPU by the interpreted Triton kernels, compared with dense attention in float64.

CASES=200 draws more cases. Values in half precision are upcast, because the interpreter computes with them otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.functional import request_of
from multihead.kernels.parts import ENTROPY, LARGEST_KEY
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.proven import UNPROVEN_VARIABLE
from multihead.kernels.triton.statistics import measure_in_one_pass
from multihead.probes import ProbeContext, first_keys_mass, offset_mass
from tests import drawing, oracle
from tests.gpu_code.interpreter import interpreted_gpu, nan_in_searches
from tests.simulated_gpu.device import Gpu, to_cpu, to_gpu

CASES = int(os.environ.get("CASES", "24"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PER_QUERY = ("entropy", "effective_keys", "mean_distance", "distance_spread", "self_mass", "previous_mass", "next_mass")
PER_QUERY += ("near_mass", "first_mass", "largest_weight", "largest_key", "largest_score")
SUMS = ("received", "pooled_map")
DISTANCES = ("mean_distance", "distance_spread")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNPROVEN_VARIABLE, "statistics")
        with interpreted_gpu() as gpu, torch.no_grad():
            yield gpu


def upcast(tensor: Tensor) -> Tensor:
    """The values in float32, with the same strides."""
    return torch.empty_strided(tensor.size(), tensor.stride()).copy_(tensor)


def options_on_gpu(options: dict[str, object]) -> dict[str, object]:
    return {name: to_gpu(each.float()) if isinstance(each, Tensor) else each for name, each in options.items()}


def compare(name: str, got: Tensor, exact: Tensor, rounding: float) -> None:
    """Numbers are near the exact ones, and NaN where they are."""
    assert got.shape == exact.shape, name
    assert torch.equal(got.isnan(), exact.isnan()), name
    size = torch.ones_like(exact)
    if name in DISTANCES:
        size = size * 10  # of about a hundred tokens
    if name in ("effective_keys", "largest_score", "received"):
        size = exact.abs().clamp(min=1)
    error = ((got.double() - exact) / size).masked_fill(got == exact, 0).nan_to_num(0)
    assert float(error.abs().max() if error.numel() else 0) <= rounding, name


drawn_calls = given(
    case=drawing.calls(longest=96, most=2, dtypes=DTYPES),
    spoiled=st.integers(0, 3),
    sharp=st.integers(0, 3),
    is_nan_found=st.booleans(),
    pool=st.sampled_from(("mean", "max")),
    size=st.sampled_from((1, 3, 8)),
)
half_of_the_cases = settings(max_examples=CASES // 2, phases=[Phase.explicit, Phase.generate], deadline=None)


# The two tests that take a minute are the first and the last one, so that each of two processes gets one.
@half_of_the_cases
@drawn_calls
def test_every_statistic_with_a_known_logsumexp_is_that_of_dense_attention(gpu: Gpu, **drawn: Any) -> None:
    check_statistics(gpu, **drawn, is_known=True)


def check_statistics(
    gpu: Gpu,
    *,
    case: drawing.Drawn,
    spoiled: int,
    sharp: int,
    is_nan_found: bool,
    pool: str,
    size: int,
    is_known: bool,
) -> None:
    """Compare all statistics of a call with those of dense attention in float64.

    `spoiled` 0: q and k have NaN; `sharp` 0: the scores are 30 times as large.
    """
    q, k = upcast(case.q), upcast(case.k)
    if sharp == 0:
        q *= 30
    if spoiled == 0:
        q[:, 0, 0] = torch.nan
        k[:, -1, k.shape[2] // 2, 0] = torch.nan
    options = {name: each.double() if isinstance(each, Tensor) else each for name, each in case.options.items()}
    seen = oracle.shown(case.mask, case.size.cells, case.query_start)
    dense = oracle.attend(q.double(), k.double(), k.double(), seen, **options)
    if "bias" in options:
        seen = seen & (options["bias"] != -torch.inf)
    start = oracle.positions_of_first(case.query_start, case.size.batch, case.size.queries, case.size.keys)
    bad = dense.logsumexp.isnan()
    weights = dense.weights.masked_fill(bad[..., None], 0)
    special = torch.arange(case.size.keys).remainder(5).eq(2).expand(case.size.batch, -1)
    exact = oracle.statistics(weights, seen, start=start, special_keys=special, mask=case.mask, map_size=size)
    if pool == "max":
        exact["pooled_map"] = largest_of_cells(weights, seen, size)
    exact["largest_score"] = dense.scores.amax(-1)
    place = torch.arange(case.size.keys) - torch.tensor(start).view(-1, 1, 1, 1)
    place = place - torch.arange(case.size.queries)[:, None]
    exact["offset_minus_5_mass"] = (weights * (place == -5)).sum(-1)
    names = [*PER_QUERY, "special_mass", offset_mass(-5), *SUMS]
    if "sinks" in options:
        names.append("sink_mass")
        exact["sink_mass"] = (options["sinks"][:, None] - dense.logsumexp).exp().masked_fill(~seen.any(-1), 0)
    context = ProbeContext(special_keys=to_gpu(special), map_size=size, map_pool=pool)
    start_on_gpu = to_gpu(case.query_start)
    given = {"mask": case.mask, "query_start": start_on_gpu, "probes": names, "context": context}
    if is_known:
        given["logsumexp"] = to_gpu(dense.logsumexp.float())
    gpu.counts.launches.clear()
    with nan_in_searches(is_found=is_nan_found):
        found = mh.statistics(to_gpu(q), to_gpu(k), **given, **options_on_gpu(case.options))
    blocks = gpu.counts.launches["measure_queries"]
    assert blocks >= 1
    assert gpu.counts.launches["sum_keys"] == blocks
    rounding = 1e-4 if sharp == 0 or case.options.get("scale") == 1.0 else 1e-5
    for name, value in found.items():
        got = to_cpu(value)
        right = exact[name]
        if name == "largest_key":
            right = right.masked_fill(bad, -1)
            at_key = weights.gather(-1, got.clamp(min=0)[..., None])[..., 0]
            assert torch.equal(got < 0, right < 0)
            assert float((weights.amax(-1) - at_key).max()) <= rounding, name
        elif name in SUMS:
            compare(name, got, right, rounding)
        else:
            compare(name, got, right.masked_fill(bad, torch.nan), rounding)


def largest_of_cells(p: Tensor, seen: Tensor, size: int) -> Tensor:
    """The largest weight of each cell of a map, NaN where no key is visible."""
    height, width = (-(-n // size) for n in p.shape[-2:])
    p = p.masked_fill(~seen, -1)
    rows = torch.stack([part.amax(-2) for part in p.split(height, -2)], -2)
    cells = torch.stack([part.amax(-1) for part in rows.split(width, -1)], -1)
    return cells.masked_fill(cells < 0, torch.nan)


def test_distances_are_exact_far_from_the_keys_and_for_wide_heads(gpu: Gpu) -> None:
    q, k = torch.randn(1, 2, 20, 80) * 3, torch.randn(1, 1, 70, 80)
    given = {"query_start": 1_000_003, "probes": DISTANCES}
    found = mh.statistics(to_gpu(q), to_gpu(k), **given)
    exact = mh.statistics(q.double(), k.double(), **given)
    assert float((to_cpu(found["mean_distance"]).double() - exact["mean_distance"]).abs().max()) <= 0.04  # half a digit
    assert float((to_cpu(found["distance_spread"]).double() - exact["distance_spread"]).abs().max()) <= 1e-4


def test_first_keys_of_packed_texts_and_sets_of_tokens(gpu: Gpu) -> None:
    q, k, ids = torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16), torch.arange(100).view(2, 50) % 7
    mask = masks.Documents((20, 3, 27)) & masks.Causal()
    sets = [mh.probes.tokens_mass(f"of_{n}", ids=(n, n + 1)) for n in range(6)]
    names = [first_keys_mass(4), "first_mass", *sets]
    found = mh.statistics(to_gpu(q), to_gpu(k), mask=mask, probes=names, context=ProbeContext(ids=to_gpu(ids)))
    exact = mh.statistics(q.double(), k.double(), mask=mask, probes=names, context=ProbeContext(ids=ids))
    for name, value in exact.items():
        compare(name, to_cpu(found[name]), value, 1e-5)


def test_a_logsumexp_is_read_as_kernels_write_it(gpu: Gpu) -> None:
    """Inf for a query that sees a NaN, or is in a tile with a hidden one, and anything for one that sees no key."""
    q, k = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    q[:, :, 3] = torch.nan
    mask = masks.Window(4) & masks.Lengths((20,))
    exact = mh.attention_with_logsumexp(q.double(), k.double(), k.double(), mask=mask)[1].float()
    written = exact.clone()
    written[:, :, (3, 10)] = torch.inf
    written[:, :, 23:30], written[:, :, 30:35], written[:, :, 35:] = torch.nan, torch.inf, 7.0
    request = request_of(to_gpu(q), to_gpu(k), to_gpu(k), mask)
    wanted = {ENTROPY.name, LARGEST_KEY.name}
    measured = measure_in_one_pass(request, bounds_of(request), wanted, logsumexp=to_gpu(written))
    assert measured is not None
    logsumexp, entropy, key = map(to_cpu, (measured.logsumexp, *map(measured.parts(wanted).get, sorted(wanted))))
    bad = torch.arange(40).eq(3) | torch.arange(40).eq(10)
    torch.testing.assert_close(logsumexp[:, :, ~bad], exact[:, :, ~bad], rtol=3e-7, atol=0)
    assert bool((logsumexp[:, :, bad].isnan() & entropy[:, :, bad].isnan() & (key[:, :, bad] == -1)).all())
    assert bool(((entropy[:, :, 23:] == 0) & (key[:, :, 23:] == -1)).all())
    assert not bool(entropy[:, :, ~bad].isnan().any())


@half_of_the_cases
@drawn_calls
def test_every_statistic_with_a_logsumexp_of_its_own_is_that_of_dense_attention(gpu: Gpu, **drawn: Any) -> None:
    check_statistics(gpu, **drawn, is_known=False)
