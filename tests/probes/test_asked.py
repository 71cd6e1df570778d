"""Statistics asked of the native kernel: those that tiles give, and cells counted one by one."""

from __future__ import annotations

import pytest
import torch

from multihead import masks
from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels.tile import seen
from multihead.plan.bounds import bounds_of
from multihead.probes.asked import asked
from multihead.probes.statistics import PROBES, _streamed
from tests.kernel_names import needs_native
from tests.oracle import pooled

pytestmark = needs_native
MASKS = [
    masks.Full(),
    masks.Causal() & masks.Lengths((300, 7)),
    masks.Documents(((100, 200), (0, 290))),
    masks.Window(30) | masks.Prefix(3),
    masks.Keep(torch.rand(2, 4, 300, 300, generator=torch.Generator().manual_seed(3)) < 0.3),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_the_kernel_and_the_tiles_measure_the_same(mask: masks.Mask, biased: bool) -> None:
    q, k = torch.randn(2, 4, 300, 16), torch.randn(2, 2, 300, 16)
    bias = torch.randn(1, 4, 1, 300).masked_fill(torch.rand(1, 4, 1, 300) < 0.1, -torch.inf) if biased else None
    special = torch.rand(2, 300) < 0.2
    request = request_of(q, k, k, mask, bias=bias, sinks=torch.randn(4))
    bounds = bounds_of(request)
    _, logsumexp = attention_with_logsumexp(q, k, k, mask=mask, bias=bias, sinks=request.sinks, kernel="reference")
    given = asked(request, bounds, logsumexp, tuple(PROBES), special_keys=special, map_size=64)
    tiled = _streamed(request, bounds, logsumexp, tuple(PROBES), special_keys=special, map_size=64)
    assert list(given) == list(PROBES)
    for name, value in tiled.items():
        torch.testing.assert_close(given[name], value, atol=2e-5, rtol=2e-5, equal_nan=True, msg=name)


def test_a_map_has_the_means_of_the_cells_that_may_be_seen() -> None:
    q, k = torch.randn(1, 2, 70, 8), torch.randn(1, 1, 130, 8)
    request = request_of(
        q, k, k, masks.Causal() & masks.Keep(torch.rand(70, 130) < 0.7, "queries keys"), query_start=50
    )
    bounds = bounds_of(request)
    output, logsumexp = attention_with_logsumexp(q, k, k, mask=request.mask, query_start=50, kernel="reference")
    assert output.shape == (1, 2, 70, 8)
    found = asked(request, bounds, logsumexp, ("pooled_map",), special_keys=None, map_size=16)["pooled_map"]
    shown = seen(request).expand(1, 2, 70, 130)
    cells = (q.double() @ k.double().mT * 8**-0.5).masked_fill(~shown, -torch.inf)
    weights = (cells - logsumexp.double()[..., None]).exp().nan_to_num(0)
    torch.testing.assert_close(found.double(), pooled(weights, shown, 16), atol=1e-6, rtol=1e-5, equal_nan=True)
