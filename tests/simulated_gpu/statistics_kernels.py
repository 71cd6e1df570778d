"""The kernels of `kernels/triton/`, written a second time in float64 from their arguments: strides, numbers, constants.

`make test` has no Triton, so a launch on the simulated GPU runs these. `tests/gpu_code/` runs the kernels themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
AXES = ("batch", "head", "row", "key")


def _at(tensor: Tensor, *strided: tuple[Tensor, int], first: int = 0) -> Tensor:
    """The numbers at indices along axes with strides, counted from the first number of a tensor."""
    memory = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    place = tensor.storage_offset() + first + sum((index * stride for index, stride in strided), torch.tensor(0))
    return memory[place]


def _axes(*sizes: int) -> list[Tensor]:
    """An index along each axis, which broadcast to the sizes."""
    return [torch.arange(n).view([n if at == axis else 1 for at in range(len(sizes))]) for axis, n in enumerate(sizes)]


class _Call:
    """Scores and visible keys of a launch, (batch, heads, queries, keys)."""

    def __init__(self, given: dict[str, Any], batch: int) -> None:
        heads, queries, keys, dim = (given[name] for name in ("num_heads", "num_queries", "num_keys", "head_dim"))
        b, h, i, j = _axes(batch, heads, queries, keys)
        column = torch.arange(dim)
        kv = h // given["heads_per_kv_head"]
        strides = [
            [
                (index[..., None], given[f"{name}_{axis}"])
                for index, axis in zip(at, ("batch", "head", "row"), strict=True)
            ]
            for name, at in (("q", (b, h, i)), ("k", (b, kv, j)))
        ]
        q, k = (_at(given[name], *of, (column, 1)).double() for name, of in zip("qk", strides, strict=True))
        scores = (q * k).sum(-1) * (given["scale"] / LOG2_E)
        if given["capped"]:
            scores = given["softcap"] * torch.tanh(scores / given["softcap"])
        starts, stops = (_at(given[name], (b, given["bounds_batch"]), (i, 1)) for name in ("starts", "stops"))
        self.seen = ((j >= starts) & (j < stops)).expand(batch, heads, -1, -1)
        for name, used in (("shown", "has_shown"), ("bias", "has_bias")):
            if not given[used]:
                continue
            of = [(each, given[f"{name}_{axis}"]) for each, axis in zip((b, h, i, j), AXES, strict=True)]
            cells = _at(given[name], *of, first=given["bias_first"] if name == "bias" else 0)
            self.seen = self.seen & ((cells != 0) if name == "shown" else (cells != -torch.inf))
            if name == "bias":
                scores = scores + cells.double().masked_fill(cells == -torch.inf, 0)
        self.scores = scores.masked_fill(~self.seen, -torch.inf)
        self.size, self.indices = (batch, heads, queries, keys), (b, h, i, j)

    def weights(self, logsumexp: Tensor) -> Tensor:
        return (self.scores - logsumexp[..., None]).exp().masked_fill(~self.seen, 0)


def _known_logsumexp(given: dict[str, Any], call: _Call) -> Tensor:
    b, h, i, _ = call.indices
    of = [(each, given[f"known_{axis}"]) for each, axis in zip((b, h, i), AXES, strict=False)]
    return _at(given["known_logsumexp"], *of)[..., 0].double()


def measure_queries(programs: int, given: dict[str, Any]) -> None:
    """`kernels/triton/device/per_query.py`."""
    blocks = -(-given["num_queries"] // given["tile_queries"])
    batch = programs // blocks // given["num_heads"]
    assert batch * blocks * given["num_heads"] == programs
    call = _Call(given, batch)
    b, _, i, j = call.indices
    sinks = given["sinks"].double()[:, None] if given["has_sinks"] else torch.tensor(-torch.inf)
    some = call.seen.any(-1)
    exact = torch.logaddexp(call.scores.logsumexp(-1), sinks).masked_fill(~some, -torch.inf)
    logsumexp = _known_logsumexp(given, call) if given["known"] else exact
    p = call.weights(logsumexp.masked_fill(~some, 0))
    position = i + given["query_start"]
    if given["has_starts"]:
        position = position + _at(given["query_starts"], (b, given["query_starts_batch"]))
    distance = (j - position).abs().double()
    mass = p.sum(-1)
    share = p / torch.where(mass == 0, 1, mass)[..., None]
    mean = (share * distance).sum(-1)
    entropy = -torch.xlogy(p, p).sum(-1)
    largest = call.scores.amax(-1)
    of_text = torch.full((1, 1, 1, 1), -1)
    if given["num_counts"] or given["first_special"]:
        of_text = _at(given["first_keys"], (b, given["first_keys_batch"]), (i, given["first_keys_row"]))
    flags = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    if given["sets"]:
        flags = _at(given["flags"], (b, given["flags_batch"]), (j, given["flags_key"])).long()
    rows = [logsumexp, entropy, mean, (share * (distance - mean[..., None]) ** 2).sum(-1).sqrt(), p.amax(-1)]
    if given["has_sinks"]:
        rows.append((sinks - logsumexp).exp())
    rows += [(p * ((flags >> bit) & 1)).sum(-1) for bit in range(given["sets"])]
    places = given["places"].tolist()
    offsets, counts = places[: given["num_places"]], places[given["num_places"] :]
    rows += [(p * (j - position == offset)).sum(-1) for offset in offsets[: given["num_kept"]]]
    rows += [(p * ((j >= of_text) & (j < of_text + n))).sum(-1) for n in counts[: given["num_counts"]]]
    if given["first_special"]:
        rows += [(p * ((flags & 1) * same)).sum(-1) for same in ((j == of_text), (j != of_text))]
    near = sum((j - position == offset).double() for offset in offsets if abs(offset) <= given["near_reach"])
    rows.append((p * near).sum(-1))
    key = torch.where(some, call.scores.argmax(-1), -1)
    is_bad = some & (~(logsumexp < torch.inf) | p.isnan().any(-1))
    _write_rows(given, [entropy.exp(), largest, *rows], key, some, is_bad)


def _write_rows(given: dict[str, Any], rows: list[Tensor], key: Tensor, some: Tensor, is_bad: Tensor) -> None:
    """Write two numbers, the key and the parts of each query to the memory of the launch."""
    found, found_key = given["found"], given["found_key"]
    batch, heads, queries = key.shape
    for row, values in enumerate(rows):
        empty = -torch.inf if row in (1, 2) else 0
        written = values.masked_fill(~some, empty).masked_fill(is_bad, torch.nan).float()
        skipped = 2 if row >= 2 else 0
        first = found.storage_offset() + (row + skipped) * given["found_part"]
        strides = (heads * given["found_head"], given["found_head"], 1)
        torch.as_strided(found, (batch, heads, queries), strides, first).copy_(written)
    strides = (heads * given["found_head"], given["found_head"], 1)
    torch.as_strided(found_key, (batch, heads, queries), strides, found_key.storage_offset()).copy_(
        key.masked_fill(is_bad, -1)
    )


def sum_keys(programs: int, given: dict[str, Any]) -> None:
    """`kernels/triton/device/per_key.py`."""
    tiles = given["map_columns"] * given["tiles_per_column"]
    batch = programs // tiles // given["num_heads"]
    assert batch * tiles * given["num_heads"] == programs
    call = _Call(given, batch)
    logsumexp = _known_logsumexp(given, call)
    adds = ~(logsumexp.isnan() | (logsumexp == -torch.inf))
    p = call.weights(logsumexp.masked_fill(~adds, 0)).masked_fill(~adds[..., None], 0)
    given["received_by_keys"].copy_(p.sum(-2).float())
    if not given["pool"]:
        return
    # The tiles of a column of cells: each cell is written by the first of them here, the others add nothing.
    cells, seen = given["cells_of_map"], given["cells_seen"]
    cells.fill_(0.0 if given["pool"] == 1 else -1.0)
    if given["pool"] == 1:
        seen.fill_(0)
    for row in range(given["map_rows"]):
        for column in range(given["map_columns"]):
            height, width = given["cell_queries"], given["cell_keys"]
            place = (..., slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
            if given["pool"] == 1:
                cells[:, :, row, column, 0] = p[place].sum((-2, -1)).float()
                seen[:, :, row, column, 0] = call.seen[place].sum((-2, -1)).int()
            else:
                largest = p[place].masked_fill(~call.seen[place], -1).amax((-2, -1))
                cells[:, :, row, column, 0] = largest.float()


KERNELS = {"measure_queries": measure_queries, "sum_keys": sum_keys}
