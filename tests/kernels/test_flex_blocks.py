"""The blocks that a plan becomes for flex_attention."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import masks
from multihead.functional import request_of
from multihead.kernels import flex
from multihead.kernels.plan.bounds import bounds_of, key_bounds
from tests import oracle
from tests.drawing import sizes, starts, trees


def test_work_counts_the_cells_of_its_blocks() -> None:
    q = torch.zeros(2, 3, 300, 16)
    causal = request_of(q, q, q, mask=masks.Causal())
    work = flex.estimate_work(causal, bounds_of(causal))
    assert work.computed_cells == 2 * 3 * (128 * 128 + 128 * 256 + 44 * 300)
    rows, lists = 2 * 3 * 300, 2 * 4 * 3 * 3
    assert work.extra_memory_bytes == rows * (16 * 4 + 4) + lists
    looked_up = request_of(q, q, q, mask=masks.Keep(torch.eye(300).roll(1, 0) + torch.eye(300) > 0, "queries keys"))
    assert (
        flex.estimate_work(looked_up, bounds_of(looked_up)).extra_memory_bytes
        == rows * (16 * 4 + 4) + lists + 2 * 3 * 300 * 300
    )


def test_a_block_under_a_remainder_is_never_full() -> None:
    kept = torch.arange(9) % 3 > 0
    bounds = key_bounds(masks.Keep(kept, "keys"), queries=8, keys=9)
    assert bounds.remainder is not None
    blocks = flex.round_to_key_blocks(bounds, keys=9, block=2)
    assert torch.equal(blocks.first_full_block, blocks.end_of_full_blocks)
    assert (blocks.first_block.tolist(), blocks.end_of_blocks.tolist()) == ([[0] * 4], [[5] * 4])


@settings(max_examples=40)
@given(st.data())
def test_blocks_hold_every_cell_that_is_seen_and_a_full_one_no_other(data: st.DataObject) -> None:
    size = data.draw(sizes())
    mask, start = data.draw(trees(size, depth=2)), data.draw(starts(size))
    q, k = torch.zeros(size.batch, size.heads, size.queries, 1), torch.zeros(size.batch, 1, size.keys, 1)
    request = request_of(q, k, k, mask=mask, query_start=start)
    bounds = bounds_of(request)
    block = data.draw(st.sampled_from((1, 2, 3, 5)))
    made = flex.block_mask(request, bounds, backward=True, block=block)
    cells = torch.meshgrid(*(torch.arange(n) for n in size.cells), indexing="ij")
    seen = flex.mask_mod(bounds, flex.visible_in_remainder(request, bounds))(*cells)  # (batch, heads, queries, keys)
    assert torch.equal(seen, oracle.shown(mask, size.cells, start))
    partial = _listed(made.kv_num_blocks, made.kv_indices)
    if made.full_kv_num_blocks is None:
        assert bounds.remainder is not None or min(size.queries, size.keys) < block
        full = torch.zeros_like(partial)
    else:
        full = _listed(made.full_kv_num_blocks, made.full_kv_indices)
    assert not bool((partial & full).any())
    partial, full = (_cells(each, block).expand(size.batch, -1, -1) for each in (partial, full))
    within = (slice(None), slice(size.queries), slice(size.keys))
    assert not bool((seen.any(1) & ~(partial | full)[within]).any())
    assert not bool((full[within] & ~seen.all(1)).any())
    assert not bool(full[:, size.queries :].any())
    assert not bool(full[:, :, size.keys :].any())
    assert torch.equal(_listed(made.q_num_blocks, made.q_indices).mT, _listed(made.kv_num_blocks, made.kv_indices))


def _listed(counts: Tensor | None, indices: Tensor | None) -> Tensor:
    """(batch or 1, blocks of queries, blocks of keys) bool, from flex_attention's lists."""
    assert counts is not None
    assert indices is not None
    found = torch.zeros(indices.shape[0], *indices.shape[2:], dtype=torch.bool)
    for place in torch.cartesian_prod(torch.arange(found.shape[0]), torch.arange(found.shape[1])).tolist():
        sample, row = place
        found[sample, row, indices[sample, 0, row, : int(counts[sample, 0, row])].long()] = True
    return found


def _cells(blocks: Tensor, block: int) -> Tensor:
    return blocks.repeat_interleave(block, 1).repeat_interleave(block, 2)
