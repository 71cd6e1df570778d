"""Scores of a tile in units of log2, and the weight of a query on a single key.

Numbers that a kernel is compiled for are `constexpr`; `fast` allows instructions that only GPUs of NVIDIA have. Rows of
q and k are `width` columns wide, a power of 2, of which the first `head_dim` are in memory. A relative bias is a dense
one whose row stride is -1.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FARTHEST = tl.constexpr(2147483647)  # largest int32: no key is so far
NOTHING = tl.constexpr(-3.4e38)  # the largest score of a query that has seen no key so far
LARGEST_BIASED = tl.constexpr(1.5e38)  # scores with a bias end here, so that differences of two are finite


@triton.jit
def power_of_2(x, fast: tl.constexpr):
    """Return 2^x; the fast instruction returns 0 below 2^-126, and takes three instructions less."""
    if fast:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def load_rows(tensor, rows, row_stride, columns, inside, head_dim: tl.constexpr):
    """Load rows of q or k, (rows, width), 0 where not `inside`."""
    places = tensor + rows[:, None] * row_stride + columns[None, :]
    if columns.shape[0] > head_dim:  # a mask over the columns would prevent loads of 16 bytes
        return tl.load(places, mask=inside[:, None] & (columns[None, :] < head_dim), other=0.0)
    return tl.load(places, mask=inside[:, None], other=0.0)


@triton.jit
def load_columns(tensor, rows, row_stride, columns, inside, head_dim: tl.constexpr, masked: tl.constexpr):
    """Load rows of k as columns, (width, rows); without `masked` every row is in memory."""
    places = tensor + rows[None, :] * row_stride + columns[:, None]
    if columns.shape[0] > head_dim:
        return tl.load(places, mask=inside[None, :] & (columns[:, None] < head_dim), other=0.0)
    if masked:
        return tl.load(places, mask=inside[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def scaled(product, scale, softcap, capped: tl.constexpr):
    """Return softcap(scale * q k) in units of log2, with `scale` in these units, and `softcap` in those of scores."""
    if not capped:
        return product * scale
    x = product * (scale / (softcap * LOG2_E))
    # 1 - 2 / (e^2x + 1) loses the digits of a small tanh, which the series has: x - x^3/3 + 2 x^5/15 - 17 x^7/315.
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - square * 0.0539682540)))
    curve = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.2, series, curve) * (softcap * LOG2_E)


@triton.jit
def biased(scores, bias):
    """Add a bias to scores in units of log2: -inf hides a key, any finite number does not, and inf is NaN."""
    added = scores + bias.to(tl.float32) * LOG2_E
    added = tl.where(added < -LARGEST_BIASED, -LARGEST_BIASED, tl.where(added > LARGEST_BIASED, LARGEST_BIASED, added))
    added = tl.where(bias == float("inf"), float("nan"), added)
    return tl.where(bias == float("-inf"), float("-inf"), added)


@triton.jit
def weight_at(
    q, k, bias, shown, keys, rows, first, stop, logsumexp, q_row, k_row, bias_row, bias_key, shown_row, shown_key,
    scale, softcap, head_dim: tl.constexpr, width: tl.constexpr, step: tl.constexpr, capped: tl.constexpr,
    has_bias: tl.constexpr, has_shown: tl.constexpr,
):  # fmt: skip
    """Return the weight of each query on one key, (rows,), 0 where it is hidden; `logsumexp` is in units of log2.

    Products are of `step` columns at once, because all of them would not fit into the registers.
    """
    seen = (keys >= first) & (keys < stop)
    if has_shown:
        seen = seen & (tl.load(shown + rows * shown_row + keys * shown_key, mask=seen, other=0) != 0)
    product = tl.zeros_like(logsumexp)
    for begin in range(0, width, step):
        columns = begin + tl.arange(0, step)
        inside = seen[:, None]
        if width > head_dim:
            inside = inside & (columns[None, :] < head_dim)
        of_query = tl.load(q + rows[:, None] * q_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        of_key = tl.load(k + keys[:, None] * k_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        product += tl.sum(of_query * of_key, 1)
    scores = scaled(product, scale, softcap, capped)
    if has_bias:
        scores = biased(scores, tl.load(bias + rows * bias_row + keys * bias_key, mask=seen, other=0.0))
    # NaN stays: tl.minimum would drop it
    power = scores - logsumexp
    return tl.where(seen, tl.exp2(tl.where(power > 0.0, 0.0, power)), 0.0)
