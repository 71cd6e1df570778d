"""Parts measured by the native kernel, compared with those of the tiles and with cells counted one by one."""

from __future__ import annotations

import pytest
import torch

from multihead import masks
from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels.call import AttentionCall, AttentionResult
from multihead.kernels.dense_tile import visible_cells
from multihead.kernels.native.statistics import FIRST_KEY_WEIGHT
from multihead.kernels.parts import SPECIAL_MASS, PartName
from multihead.probes.context import ProbeContext
from multihead.probes.from_kernels import measure_natively, native_parts
from multihead.probes.lookups import weight_at_offset, weight_on_first_keys
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.statistics import resolve_probes, statistics_of_call
from multihead.probes.streaming import STREAMED_PARTS, measure_in_tiles
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
GATHERED: set[PartName] = {("offset_mass", 0), ("offset_mass", -1), ("offset_mass", 1), FIRST_KEY_WEIGHT}
PARTS: set[PartName] = GATHERED | (STREAMED_PARTS - {"duplicate_mass", "induction_mass"})


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_the_kernel_and_the_tiles_measure_the_same(mask: masks.Mask, biased: bool) -> None:
    q, k = torch.randn(2, 4, 300, 16), torch.randn(2, 2, 300, 16)
    bias = torch.randn(1, 4, 1, 300).masked_fill(torch.rand(1, 4, 1, 300) < 0.1, -torch.inf) if biased else None
    special = torch.rand(2, 300) < 0.2
    request = request_of(q, k, k, mask, bias=bias, sinks=torch.randn(4))
    _, logsumexp = attention_with_logsumexp(q, k, k, mask=mask, bias=bias, sinks=request.sinks, kernel="reference")
    subject = MeasuredCall.from_request(request, logsumexp, ProbeContext(special_keys=special))
    assert native_parts(subject.context, PARTS | {("tokens_mass", "special"), "duplicate_mass"}) == PARTS | {
        ("tokens_mass", "special")
    }
    found = measure_natively(subject, PARTS | {("tokens_mass", "special")})
    # The kernel is given the first keys of several texts in a row in the place of special keys.
    looked_up = {FIRST_KEY_WEIGHT: weight_on_first_keys(subject, 1)} if mask.row_texts is not None else {}
    assert found.keys() | looked_up.keys() == PARTS | {("tokens_mass", "special")}
    found |= looked_up
    tiled, on_special = measure_in_tiles(subject, PARTS - GATHERED, special[:, None, :, None].expand(-1, 2, -1, 1))
    assert on_special is not None
    tiled |= {part: weight_at_offset(subject, int(part[1])) for part in GATHERED if part[0] == "offset_mass"}
    tiled |= {FIRST_KEY_WEIGHT: weight_on_first_keys(subject, 1), SPECIAL_MASS.name: on_special[..., 0]}
    for part, value in tiled.items():
        # What a row that sees nothing comes to is decided later.
        left_out = torch.zeros_like(value, dtype=torch.bool)
        if value.shape == logsumexp.shape:
            left_out = logsumexp == -torch.inf
        expected = value.to(found[part].dtype).masked_fill(left_out, 0)
        got = found[part].masked_fill(left_out, 0)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, equal_nan=True, msg=str(part))


def test_parts_that_the_kernel_would_measure_otherwise_are_not_available() -> None:
    context = ProbeContext(first_key=1, map_pool="max")
    assert native_parts(context, {FIRST_KEY_WEIGHT, "pooled_map", SPECIAL_MASS.name, "received"}) == {"received"}


def test_a_map_has_the_means_of_the_cells_that_may_be_seen() -> None:
    q, k = torch.randn(1, 2, 70, 8), torch.randn(1, 1, 130, 8)
    request = request_of(
        q, k, k, masks.Causal() & masks.Keep(torch.rand(70, 130) < 0.7, "queries keys"), query_start=50
    )
    output, logsumexp = attention_with_logsumexp(q, k, k, mask=request.mask, query_start=50, kernel="reference")
    assert output.shape == (1, 2, 70, 8)
    found = measure_natively(MeasuredCall.from_request(request, logsumexp, ProbeContext(map_size=16)), {"pooled_map"})[
        "pooled_map"
    ]
    shown = visible_cells(request).expand(1, 2, 70, 130)
    cells = (q.double() @ k.double().mT * 8**-0.5).masked_fill(~shown, -torch.inf)
    weights = (cells - logsumexp.double()[..., None]).exp().nan_to_num(0)
    torch.testing.assert_close(found.double(), pooled(weights, shown, 16), atol=1e-6, rtol=1e-5, equal_nan=True)


def test_the_first_key_of_the_context_replaces_that_of_the_kernel() -> None:
    q = torch.zeros(1, 1, 2, 4)
    ready = AttentionResult(q, torch.full((1, 1, 2), 2.0).log(), {FIRST_KEY_WEIGHT: torch.full((1, 1, 2), 0.5)})
    found = statistics_of_call(
        AttentionCall(request_of(q, q, q), ready), resolve_probes("first_mass"), ProbeContext(first_key=-1)
    )
    assert found["first_mass"].tolist() == [[[0, 0]]]
