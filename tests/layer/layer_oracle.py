"""What the whole layer means, written a second time from the papers: loops, plain matrices, no call of its code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multihead.scores.bias import RelativeBias
from tests import oracle
from tests.layer.layer_drawing import LayerCase, Leaves


@dataclass
class Whole:
    """A call of the layer, every tensor of its map written down.

    Fields:
        output: (batch, queries, output_dim), 0 in padding.
        weights: (batch, heads, queries, keys), the learned key first where there is one; the key of 0 is left out.
        seen: as weights, bool, whether the query may see the key.
    """

    output: Tensor
    weights: Tensor
    seen: Tensor


def layer_by_the_book(case: LayerCase, state: Mapping[str, Tensor], given: Leaves) -> Whole:
    """Compute a call in the dtype of its tensors; every sample's tokens stand at its first places."""
    said = case.options
    heads, kv_heads = case.size.heads, case.size.kv_heads
    memory = given.x if given.memory is None else given.memory
    values = memory if given.values is None else given.values
    q = apart(linear(state, "q_proj", given.x), heads)
    k, v = apart(linear(state, "k_proj", memory), kv_heads), apart(linear(state, "v_proj", values), kv_heads)
    if said.get("qk_norm") is not None:
        q, k = normed(said["qk_norm"], state, q, k)
    start = oracle.positions_of_first(case.query_start, case.size.batch, case.size.queries, case.size.keys)
    if said.get("rotary") is not None:
        q = turned(said["rotary"], q, [[first + i for i in range(q.shape[2])] for first in start])
        k = turned(said["rotary"], k, [list(range(k.shape[2]))] * case.size.batch)
    seen = oracle.shown(case.mask, case.size.cells, torch.tensor(start)) & real_cells(case)
    bias = None if given.bias is None else written_out(given.bias, case)
    if case.position is not None:
        of_position = position_bias(case, state, start, q.dtype)
        bias = of_position if bias is None else bias + of_position
    for key, value in extra_keys(case, state, q):
        k, v = torch.cat([key, k], 2), torch.cat([value, v], 2)
        seen = torch.nn.functional.pad(seen, (1, 0), value=True)
        bias = None if bias is None else torch.nn.functional.pad(bias, (1, 0))
    dense = oracle.attend(
        q, k, v, seen, bias=bias, softcap=said.get("softcap"), sinks=state.get("sinks"), scale=said.get("scale")
    )
    output = dense.output
    for gates in (state.get("head_gates"), given.head_gates):
        if gates is not None:
            output = output * (gates.view(1, -1, 1) if gates.dim() == 1 else gates)[..., None]
    rows = output.transpose(1, 2)  # (batch, queries, heads, value_dim)
    merged = rows.sum(2) / heads if said.get("merge") == "mean" else rows.flatten(2)
    if said.get("output_projection", True):
        merged = linear(state, "out_proj", merged)
    real = torch.arange(case.size.queries) < torch.tensor(case.counts)[:, None]
    if bias is not None:
        seen = seen & (bias != -torch.inf)
    kept = slice(int(said.get("add_zero_attn", False)), None)
    return Whole(torch.where(real[..., None], merged, 0), dense.weights[..., kept], seen[..., kept])


def real_cells(case: LayerCase) -> Tensor:
    """(batch, 1, queries, keys): neither the query nor the key is padding."""
    rows = torch.arange(case.size.queries) < torch.tensor(case.counts)[:, None]
    columns = torch.arange(case.size.keys) < torch.tensor(case.key_counts)[:, None]
    return rows[:, None, :, None] & columns[:, None, None, :]


def linear(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def apart(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads * dim) -> (batch, heads, length, dim)."""
    return torch.stack(x.chunk(heads, -1), 1)


def normed(said: Any, state: Mapping[str, Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean square (arXiv:1910.07467), or unit vectors with a scale a head (arXiv:2010.04245)."""
    if said.kind == "l2":
        scale = state.get("qk_norm.scale", torch.full((q.shape[1],), said.initial_scale, dtype=q.dtype))
        unit_q, unit_k = (x / (x.square().sum(-1, keepdim=True) + said.eps).sqrt() for x in (q, k))
        return unit_q * scale.view(-1, 1, 1) * q.shape[-1] ** 0.5, unit_k

    def rms(x: Tensor, weight: Tensor | None) -> Tensor:
        width = x.shape[1] * x.shape[3] if said.over == "all" else x.shape[3]
        total = x.square().sum((1, 3) if said.over == "all" else 3, keepdim=True)
        x = x / (total / width + said.eps).sqrt()
        if weight is None:
            return x
        return x * (weight.view(x.shape[1], 1, -1) if said.over == "all" else weight)

    return rms(q, state.get("qk_norm.q_weight")), rms(k, state.get("qk_norm.k_weight"))


def turned(said: Any, x: Tensor, positions: list[list[int]]) -> Tensor:
    """Turn each pair of columns by a matrix [[cos, -sin], [sin, cos]] (arXiv:2104.09864, equation 15)."""
    dim = said.dim or x.shape[-1]
    columns = list(x.unbind(-1))
    gain, frequencies = scaled(said, dim)
    for pair, frequency in enumerate(frequencies):
        one, other = (2 * pair, 2 * pair + 1) if said.interleaved else (pair, pair + dim // 2)
        angle = torch.tensor(positions, dtype=torch.float64)[:, None] * frequency  # (batch, 1, length)
        cosine, sine = (gain * angle.cos()).to(x.dtype), (gain * angle.sin()).to(x.dtype)
        a, b = x[..., one], x[..., other]
        columns[one], columns[other] = cosine * a - sine * b, sine * a + cosine * b
    return torch.stack(columns, -1)


def scaled(said: Any, dim: int) -> tuple[float, list[float]]:
    """What turned columns are multiplied by, and the radians a token of each pair."""
    plain = [1.0 / said.base ** (2 * pair / dim) for pair in range(dim // 2)]
    scaling = said.scaling
    kind = type(scaling).__name__
    if scaling is None:
        return 1.0, plain
    if kind == "Linear":  # arXiv:2306.15595: positions are divided
        return 1.0, [frequency / scaling.factor for frequency in plain]
    found = []
    if kind == "Llama3":  # arXiv:2407.21783 and its published code
        for frequency in plain:
            wavelength = 2 * math.pi / frequency
            if wavelength < scaling.original_length / scaling.high_freq_factor:
                found.append(frequency)
            elif wavelength > scaling.original_length / scaling.low_freq_factor:
                found.append(frequency / scaling.factor)
            else:
                smooth = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                found.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
        return 1.0, found
    assert kind == "Yarn"  # arXiv:2309.00071, section 3.2 and its published code

    def edge(rotations: float) -> float:
        return dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(said.base))

    low, high = max(math.floor(edge(scaling.beta_fast)), 0), min(math.ceil(edge(scaling.beta_slow)), dim - 1)
    for pair, frequency in enumerate(plain):
        ramp = min(max((pair - low) / (high - low if high != low else 0.001), 0.0), 1.0)
        found.append(frequency / scaling.factor * ramp + frequency * (1 - ramp))
    return 0.1 * math.log(scaling.factor) + 1.0, found


def position_bias(case: LayerCase, state: Mapping[str, Tensor], start: list[int], dtype: torch.dtype) -> Tensor:
    """(batch, heads, queries, keys), cell by cell."""
    _, h, n, m = case.size.cells
    # distances[b][i][j]: how far key j stands behind query i
    distances = [[[j - first - i for j in range(m)] for i in range(n)] for first in start]
    if case.position == "alibi":
        slopes = alibi_slopes(h)
        cells = [[[[-abs(d) * slope for d in row] for row in rows] for slope in slopes] for rows in distances]
        return torch.tensor(cells, dtype=torch.float64).to(dtype)
    weight = state["position_bias.weight"]
    if case.position == "learned":
        places = [[min(max(first + i, 0), weight.shape[1] - 1) for i in range(n)] for first in start]
        return torch.stack([weight[:, rows, :m] for rows in places])
    both_ways = case.position == "t5"
    buckets = [[[t5_bucket(d, both_ways=both_ways) for d in row] for row in rows] for rows in distances]
    return weight[torch.tensor(buckets)].permute(0, 3, 1, 2)


def alibi_slopes(heads: int) -> list[float]:
    """The geometric sequence from 2 ** (-8 / n), and for other n the published rule (arXiv:2108.12409)."""
    if heads & (heads - 1) == 0:
        return [(2 ** (-8 / heads)) ** (n + 1) for n in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


T5_BUCKETS = {"t5": (8, 10), "t5 behind": (7, 11)}  # number of buckets, largest distance


def t5_bucket(distance: int, *, both_ways: bool) -> int:
    """Half of the buckets hold one distance each, the others grow to the largest (arXiv:1910.10683 and its code)."""
    number, largest = T5_BUCKETS["t5" if both_ways else "t5 behind"]
    first, behind = 0, -distance
    if both_ways:
        number //= 2
        first, behind = (number if distance > 0 else 0), abs(distance)
    behind = max(behind, 0)
    exact = number // 2
    if behind < exact:
        return first + behind
    grown = exact + int(math.log(behind / exact) / math.log(largest / exact) * (number - exact))
    return first + min(grown, number - 1)


def extra_keys(case: LayerCase, state: Mapping[str, Tensor], q: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The learned key and the key of 0 that comes before it, with their values: (batch, kv_heads, 1, dim) each."""
    found, size = [], case.size
    if "bias_k" in state:
        rows = (state[name][None, :, None].expand(size.batch, -1, -1, -1) for name in ("bias_k", "bias_v"))
        found.append(tuple(rows))
    if case.options.get("add_zero_attn"):
        dims = (size.head_dim, size.value_dim)
        found.append(tuple(q.new_zeros(size.batch, size.kv_heads, 1, dim) for dim in dims))
    return found  # type: ignore[return-value]


def written_out(bias: Tensor | RelativeBias, case: LayerCase) -> Tensor:
    """(batch, heads, queries, keys): the entry of query i and key j stands at j - i + queries - 1."""
    if isinstance(bias, Tensor):
        return bias.expand(case.size.cells)
    n, m = case.size.queries, case.size.keys
    place = torch.tensor([[j - i + n - 1 for j in range(m)] for i in range(n)])
    return bias.values[:, :, place].expand(case.size.cells)
