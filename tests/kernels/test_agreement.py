"""Every kernel against an independent float64 oracle: outputs, logsumexp and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from multihead import functional, masks
from multihead.functional import attention, attention_with_logsumexp
from tests import oracle
from tests.agreeing import Results, assert_within_budget, leaves, loss, with_gradients
from tests.drawing import Drawn, Sizes, calls
from tests.kernel_names import EACH, exactest, rounding


@settings(max_examples=80)
@given(case=calls())
def test_the_reference_kernel_agrees_with_the_oracle(case: Drawn) -> None:
    assert_within_budget(case, "reference")


@settings(max_examples=150)
@given(case=calls(softcap=False))
def test_the_fused_kernel_agrees_with_the_oracle(case: Drawn) -> None:
    assert_within_budget(case, "sdpa")


MASKS: dict[str, masks.Mask] = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Window(40),
    "window both ways": masks.Window(5, after=30),
    "lengths": masks.Lengths((300, 37)),
    "causal lengths": masks.Causal() & masks.Lengths((300, 37)),
    "lengths a query": masks.Lengths(torch.arange(600).view(2, 300) % 301),
    "documents": masks.Documents(((150, 100, 50), (7, 1, 200))),
    "causal documents": masks.Causal() & masks.Documents((150, 100, 20)),
    "prefix": masks.Causal() | masks.Prefix((100, 3)),
    "gaps": masks.Window(20) | masks.Prefix(5),
    "dense": masks.Keep(torch.rand(2, 1, 300, 300, generator=torch.Generator().manual_seed(1)) < 0.4),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rectangles_of_long_rows_join_to_the_whole(name: str, dtype: torch.dtype) -> None:
    """300 queries are more than one block of rows, so blocks, runs and merged rectangles are all covered."""
    size = Sizes(2, 2, 1, 300, 300, 8, 8)
    q, k, v = (torch.randn(2, n, 300, 8, dtype=torch.float64).to(dtype) for n in (2, 1, 1))
    visible = oracle_shown(MASKS[name])
    case = Drawn(q, k, v, size, masks.Keep(visible), 0)
    exact, plain = with_kept(case, torch.float64, visible), with_kept(case, dtype, visible)
    case.mask = MASKS[name]
    for part, value in with_gradients(case, dtype, "sdpa").items():
        allowed = oracle.budget(exact[part], plain[part].to(dtype))
        assert oracle.difference(value, exact[part]) <= allowed, part


def oracle_shown(mask: masks.Mask) -> Tensor:
    """The dense mask at 300 x 300; loops over heads would be slow, and no mask here depends on the head."""
    return oracle.shown(mask, (2, 1, 300, 300), 0)


def with_kept(case: Drawn, dtype: torch.dtype, visible: Tensor) -> Results:
    (q, k, v), _ = leaves(case, dtype)
    dense = oracle.attend(q, k, v, visible)
    grads = torch.autograd.grad(loss(dense.output, dense.logsumexp), (q, k, v))
    found = {"output": dense.output.detach(), "logsumexp": dense.logsumexp.detach()}
    return found | {f"gradient of {name}": grad for name, grad in zip("qkv", grads, strict=True)}


@pytest.mark.parametrize("kernel", EACH)
class TestOutsideImplementations:
    def test_torch_scaled_dot_product_attention(self, kernel: str) -> None:
        q, k, v = torch.randn(3, 2, 6, 33, 8).unbind()
        k, v = k[:, :2], v[:, :2]
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        ours = attention(q, k, v, mask=masks.Causal(), kernel=kernel)
        assert oracle.difference(ours, theirs.double()) < 1e-6

    def test_torch_scaled_dot_product_attention_with_a_mask(self, kernel: str) -> None:
        q, k, v = torch.randn(3, 2, 3, 9, 8).unbind()
        seen = torch.rand(2, 1, 9, 9) < 0.6
        seen[..., 0] = True
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.7)
        ours = attention(q, k, v, mask=masks.Keep(seen), scale=0.7, kernel=kernel)
        assert oracle.difference(ours, theirs.double()) < 1e-6

    def test_nn_multihead_attention(self, kernel: str) -> None:
        theirs = nn.MultiheadAttention(12, 3, batch_first=True).to(exactest(kernel))
        x = torch.randn(2, 7, 12, dtype=exactest(kernel))
        padding = torch.arange(7) >= torch.tensor([[7], [4]])
        expected, expected_weights = theirs(x, x, x, key_padding_mask=padding, average_attn_weights=False)
        q, k, v = (
            part.unflatten(-1, (3, 4)).transpose(1, 2)
            for part in F.linear(x, theirs.in_proj_weight, theirs.in_proj_bias).chunk(3, -1)
        )
        output = attention(q, k, v, mask=masks.Lengths((7, 4)), kernel=kernel)
        assert torch.allclose(theirs.out_proj(output.transpose(1, 2).flatten(2)), expected, atol=rounding(kernel))
        ours = functional.attention_weights(q, k, mask=masks.Lengths((7, 4)))
        assert torch.allclose(ours, expected_weights, atol=rounding(kernel))

    def test_the_formula_of_numpy_by_hand(self, kernel: str) -> None:
        q = torch.tensor([[[[1.0, 0.0]]]], dtype=exactest(kernel))
        k = torch.tensor([[[[2.0, 0.0], [0.0, 5.0]]]], dtype=exactest(kernel))
        v = torch.tensor([[[[1.0], [3.0]]]], dtype=exactest(kernel))
        output, logsumexp = attention_with_logsumexp(q, k, v, scale=0.5, kernel=kernel)
        e = torch.e
        assert output.item() == pytest.approx((e * 1 + 1 * 3) / (e + 1), abs=rounding(kernel))
        assert logsumexp.item() == pytest.approx(float(torch.tensor(e + 1).log()), abs=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torch_flex_attention_with_a_softcap_a_window_and_grouped_heads() -> None:
    q, k, v = torch.randn(1, 4, 32, 16), torch.randn(1, 2, 32, 16), torch.randn(1, 2, 32, 16)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return 2.0 * torch.tanh(score / 2.0)

    def window(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < 5)

    block_mask = create_block_mask(window, 1, 1, 32, 32, device="cpu")
    theirs: Any = flex_attention(
        q, k, v, score_mod=capped, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    output, logsumexp = attention_with_logsumexp(q, k, v, softcap=2.0, mask=masks.Window(5))
    assert oracle.difference(output, theirs[0].double()) < 1e-6
    assert oracle.difference(logsumexp, theirs[1].lse.double()) < 1e-6
