"""Entry point: `statistics` with every probe, against their definitions on the dense weights in float64."""

from __future__ import annotations

import torch
from torch import Tensor

import multihead as mh
from multihead import probes
from multihead.probes import PROBES
from multihead.probes.catalogue import needs_pictures
from tests import oracle
from tests.fuzz.calls import Drawn
from tests.fuzz.draw import Draw, Mismatch
from tests.fuzz.judge import Call, Judged, Rows, dense_of, finite, judge, outside, sentence, wide
from tests.fuzz.on_device import there
from tests.probes import definitions

MADE = {
    "offset_minus_5_mass": probes.offset_mass(-5),
    "offset_plus_3_mass": probes.offset_mass(3),
    "first_4_mass": probes.first_keys_mass(4),
    "commas_mass": probes.tokens_mass("commas", ids=(1, 2)),
    "given_mass": probes.tokens_mass("given"),
}
FAR = 1 << 31  # from here on, distances have no room in float32


def statistics(draw: Draw) -> None:
    """Statistics of a call: those that are computed by default, all of them, or some."""
    drawn = Drawn(draw)
    call, options = drawn.call, drawn.given()
    known, context = _known(draw, drawn)
    which = draw.feature("probes", "default", "all", "all", "some", share=0.65)
    if which == "all":
        options["probes"] = [*_usable(drawn), *MADE.values()]
    elif which == "some":
        random = draw.stream("some probes")
        many = [*_usable(drawn), *MADE.values()]
        options["probes"] = random.sample(many, random.randint(1, 3))
        draw.notes["probes"] = [getattr(each, "name", each) for each in options["probes"]]
    if which != "default":
        options |= {"context": context, "v": call.v}
    found = there(mh.statistics)(call.q, call.k, **options)
    if not call.seen.numel():
        _compare_empty(found)
        return
    call.v = call.v if "v" in options else None
    judged = judge(call)
    judged.rows.free |= judged.rows.large & ~judged.rows.nan  # squares of such numbers overflow
    dense, given = dense_of(call, judged.rows, torch.float64, leaves=False)
    if call.v is not None:
        known.v = given["v"]
    exact = definitions.every(dense, judged.rows.visible, known)
    if context.map_pool == "max":
        exact["pooled_map"] = definitions.largest_of_blocks(dense.weights, judged.rows.visible, known.map_size)
    hides_more = not torch.equal(judged.rows.visible, call.seen)
    for name, value in found.items():
        if hides_more and name.startswith("first"):
            continue  # whether a bias hides the first key is left open
        _compare(draw, name, value, _Exact(call, judged, exact, dense, known, context.map_pool))


def _compare_empty(found: dict[str, Tensor]) -> None:
    """Without queries, keys or samples there is no weight anywhere."""
    for name, value in found.items():
        expected = -1 if name == "largest_key" else 0
        if not bool(((value == expected) | (value.isnan() if name == "pooled_map" else False)).all()):
            raise Mismatch(f"{name} of a call without cells is not {expected}")


def _usable(drawn: Drawn) -> list[str]:
    usable = [name for name, probe in PROBES.items() if not needs_pictures(probe)]
    return [name for name in usable if name != "sink_mass" or drawn.call.sinks is not None]


def _known(draw: Draw, drawn: Drawn) -> tuple[definitions.Known, probes.ProbeContext]:
    size = drawn.size
    flags = {name: draw.cells(name, (size.batch, size.keys), 0.3) for name in ("special", "given")}
    ids = torch.randint(0, 5, (size.batch, size.keys), generator=draw.generator("ids"))
    weight = draw.normal("output_weight", 3, size.heads * size.value_dim).to(drawn.dtype)
    start = oracle.positions_of_first(drawn.start, size.batch, size.queries, size.keys)
    assert drawn.call.v is not None
    sinks = None if drawn.call.sinks is None else drawn.call.sinks.double()
    map_size = draw.pick("map_size", 1, 2, 3, 64)
    values = torch.nan_to_num(drawn.call.v.double(), nan=0.0, posinf=0.0, neginf=0.0)
    commas = (ids == 1) | (ids == 2)
    known = definitions.Known(
        start, flags["special"], commas, flags["given"], ids, values, weight.double(), sinks, map_size, drawn.mask
    )
    context = probes.ProbeContext(
        special_keys=flags["special"],
        ids=ids,
        sets={"given": flags["given"]},
        output_weight=weight,
        map_size=map_size,
        map_pool="max" if draw.has("map_pool max", 0.2) else "mean",
    )
    return known, context


class _Exact:
    """What a statistic should be, how far it may be off, and where it is judged."""

    def __init__(
        self,
        call: Call,
        judged: Judged,
        exact: dict[str, Tensor],
        dense: oracle.Dense,
        known: definitions.Known,
        pool: str,
    ) -> None:
        self.call, self.judged, self.exact, self.known, self.pool = call, judged, exact, known, pool
        self.p, self.off = dense.weights, judged.band["weights"]
        self.rows: Rows = judged.rows

    def band(self, name: str) -> Tensor:
        """How far a statistic may be off, in roundings."""
        value, total = finite(self.exact[name].double()).abs(), self.off.sum(-1)
        logsumexp: Tensor = self.judged.band["logsumexp"]
        if name == "received" or name == "coverage":
            return 8 + self.off.sum(-2) + value
        if name == "pooled_map":
            if self.pool == "max":
                largest = definitions.largest_of_blocks(self.off, self.rows.visible, self.known.map_size)
                return 8 + torch.nan_to_num(largest)
            return 8 + torch.nan_to_num(oracle.pooled(self.off, self.rows.visible, self.known.map_size))
        if name in ("entropy", "effective_keys"):
            of_entropy = 8 + (self.off * (1 - self.p.clamp(min=1e-45).log())).sum(-1)
            return of_entropy if name == "entropy" else (of_entropy + 8) * value
        if name == "largest_score":
            return 8 + logsumexp + total / self.p.amax(-1).clamp(min=1e-30) + value
        if name in ("mean_distance", "distance_spread"):
            return self._of_distance(name)
        if name in ("contribution", "output_norm"):
            width, heads = self.known.v.shape[-1], self.p.shape[1]
            values = wide(self.known.v, heads).abs()
            parts = [
                values[:, h] @ self.known.output_weight[:, h * width : (h + 1) * width].abs().mT for h in range(heads)
            ]
            size: Tensor = torch.linalg.vector_norm(torch.stack(parts, 1), dim=-1)
            return 8 + 8 * (self.off * size[:, :, None]).sum(-1)
        return 8 + total + logsumexp * float(name == "sink_mass")

    def _of_distance(self, name: str) -> Tensor:
        at = torch.tensor(self.known.start).reshape(-1, 1, 1, 1) + torch.arange(self.p.shape[2])[:, None]
        distance = (torch.arange(self.p.shape[3]) - at).abs().double().expand(self.p.shape)
        mass = self.p.sum(-1).clamp(min=1e-300)
        if name == "mean_distance":
            return 8 + 2 * (self.off * distance).sum(-1) / mass + 8 * self.exact[name]
        return 8 + 4 * (self.off * distance.square()).sum(-1) / mass  # of its square

    def where(self, name: str) -> Tensor:
        """Which elements are judged."""
        judged, value = self.rows.judged, self.exact[name]
        if name in ("received", "coverage"):
            return ~(self.rows.visible & ~judged[..., None]).any(2)
        if name == "pooled_map":
            return judged.all(-1)[..., None, None].expand(value.shape)
        if name in ("mean_distance", "distance_spread"):
            far = torch.tensor([abs(start) > FAR for start in self.known.start], dtype=torch.bool)
            return judged & (self.p.sum(-1) > 1e-20) & ~far[:, None, None]
        if name == "largest_score":  # it is computed from the largest weight, which must not be 0
            return judged & (self.p.amax(-1) > 1e-30)
        return judged


def _compare(draw: Draw, name: str, value: Tensor, exact: _Exact) -> None:
    right = exact.exact[name].double()
    if value.shape != right.shape:
        raise Mismatch(f"{name} has another shape: {tuple(value.shape)} instead of {tuple(right.shape)}")
    info = torch.finfo(torch.float64 if exact.call.dtype == torch.float64 else torch.float32)
    where = exact.where(name)
    if name == "largest_key":
        _compare_largest_key(value, exact, info.eps)
        return
    if name == "distance_spread":
        value, right = value.double().square(), right.square()
    band = info.eps * exact.band(name) + info.tiny
    wrong = outside(value, right, band, where)
    if bool(wrong.any()):
        raise Mismatch(f"{name}: " + sentence("it", value, right, band.expand(wrong.shape), wrong))
    bad = exact.rows.nan
    if name == "entropy" and bool(bad.any()) and not bool(value[bad].isnan().all()):
        raise Mismatch("entropy of a row that sees NaN or an infinity is a number")


def _compare_largest_key(value: Tensor, exact: _Exact, eps: float) -> None:
    """A largest key is right if its weight is the largest but for rounding."""
    rows = exact.rows.judged
    if not value.numel() or not exact.p.shape[-1]:
        wrong = rows & (value != -1)
    else:
        there = value.clamp(min=0)[..., None]
        off = exact.p.amax(-1) - exact.p.gather(-1, there)[..., 0]
        near = off <= 4 * eps * (exact.off.amax(-1) + 8)
        seen = exact.rows.visible.gather(-1, there)[..., 0]
        wrong = rows & torch.where(exact.rows.empty, value != -1, (value < 0) | ~near | ~seen)
    if bool(wrong.any()):
        index = tuple(int(each) for each in wrong.nonzero()[0])
        raise Mismatch(f"largest_key: it is {int(value[index])} at {index}")
