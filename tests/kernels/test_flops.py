"""FlopCounterMode: an attention counts the cells that may be seen, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from multihead import masks
from multihead.compat.torch_nn import MultiheadAttention
from tests import oracle
from tests.ecosystem.ways import BATCH, EMBED, HEADS, QUERIES, layer
from tests.kernel_names import needs_native

DIM, VALUE_DIM = 8, 6
MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(3),
    "documents": masks.Documents((3, 4)),
    "lengths": masks.Lengths((7, 4, 0)),
    "lengths in a tensor": masks.Lengths(torch.tensor((2, 4, 6))),
    "gaps": masks.Window(1) | masks.Lengths((2, 3, 1)),
    "cells of all": masks.Keep(torch.arange(QUERIES) % 3 != 1, "keys"),
    "cells of heads": masks.Drop(torch.arange(HEADS * QUERIES).view(HEADS, QUERIES) % 5 == 1, "heads queries"),
}


def drawn(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (HEADS, DIM), (2, DIM), (2, VALUE_DIM)
    q, k, v = (torch.randn(BATCH, heads, QUERIES, dim, **options) for heads, dim in sizes)
    return q, k, v


def counted(counter: FlopCounterMode) -> int:
    return int(counter.get_total_flops())


@needs_native
@pytest.mark.parametrize("name", MASKS)
def test_the_cells_that_may_be_seen_are_counted(name: str) -> None:
    cells = int(oracle.shown(MASKS[name], (BATCH, HEADS, QUERIES, QUERIES)).sum())
    tensors = drawn(requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        output = mh.attention(*tensors, mask=MASKS[name])
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert counted(forward) == 2 * cells * (DIM + VALUE_DIM)
    assert counted(backward) == 2 * cells * (3 * DIM + 2 * VALUE_DIM)


@pytest.mark.parametrize("kernel", [pytest.param("native", marks=needs_native), "sdpa", "reference"])
def test_full_attention_counts_what_its_matrix_products_count(kernel: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8, requires_grad=True).unbind()
    with FlopCounterMode(display=False) as expected:
        (q @ k.mT).softmax(-1) @ v
    with FlopCounterMode(display=False) as found:
        mh.attention(q, k, v, kernel=kernel)
    assert counted(found) == counted(expected)


def test_the_fused_attention_of_pytorch_is_counted_on_the_cpu_as_on_other_devices() -> None:
    q = torch.randn(2, 4, 6, 8)
    with FlopCounterMode(display=False) as counter:
        scaled_dot_product_attention(q, q, q)
    assert counted(counter) == 2 * 2 * (2 * 4 * 6 * 6) * 8


def test_fake_tensors_count_all_cells() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        mh.attention(*drawn(), mask=masks.Causal() & masks.Lengths((7, 4, 0)))
    assert counted(counter) == 2 * BATCH * HEADS * QUERIES**2 * (DIM + VALUE_DIM)


@needs_native
def test_the_layer_and_the_drop_in_count_projections_and_attention() -> None:
    x, projections = torch.randn(BATCH, QUERIES, EMBED), 4 * 2 * BATCH * QUERIES * EMBED**2
    seen = BATCH * HEADS * QUERIES * (QUERIES + 1) // 2
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer()(x, mask=masks.Causal())
    assert counted(counter) == projections + 4 * seen * EMBED // HEADS
    drop_in = MultiheadAttention(EMBED, HEADS, batch_first=True).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        drop_in(x, x, x, need_weights=False)
    assert counted(counter) == projections + 4 * BATCH * HEADS * QUERIES**2 * EMBED // HEADS


@needs_native
def test_counting_changes_no_number() -> None:
    tensors = drawn()
    expected = mh.attention(*tensors, mask=masks.Causal())
    with FlopCounterMode(display=False):
        assert torch.equal(mh.attention(*tensors, mask=masks.Causal()), expected)


@needs_native
def test_a_compiled_attention_is_counted_too() -> None:
    torch.compiler.reset()
    attend = torch.compile(lambda q, k, v: mh.attention(q, k, v, mask=masks.Causal()), backend="aot_eager")
    tensors = drawn()
    attend(*tensors)
    with FlopCounterMode(display=False) as counter:
        attend(*tensors)
    cells = BATCH * HEADS * QUERIES * (QUERIES + 1) // 2
    assert counted(counter) == 2 * cells * (DIM + VALUE_DIM)
