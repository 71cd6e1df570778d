"""Entry point: a statistic of one's own of every part, on every road to a number, against the text alone in float64."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, Mismatch
from tests.probes.roads import GROUPS, ROADS, Case, judged, what_is_wrong


def statistics_on_roads(draw: Draw) -> None:
    """A statistic of one's own of every part: padded, packed, cached, generated, kept in each way, counted."""
    road, group = draw.pick("road", *ROADS), draw.pick("group", *GROUPS)
    heads = draw.pick("heads", 2, 4)
    # In float64 the scores are products of torch, which may round those of equal keys differently.
    other = torch.float32 if "equal tokens" in road else torch.float64
    case = Case(
        lengths=(max(draw.size("first length", 6, 9, 12, 17), 4), draw.pick("second length", 4, 5, 7, 12)),
        heads=heads,
        kv_heads=draw.pick("kv heads", 1, 2),
        dtype=draw.feature("dtype", torch.float32, other, share=0.3),
        window=draw.pick("window", 2, 4, 8),
        chunks=draw.pick("chunks", (5, 1, 1, 3, 1, 1, 20), (1,) * 20, (3, 4, 20), (20,)),
        seed=draw.stream("seed").getrandbits(32),
    )
    draw.notes |= {"road": road, "group": group, "case": case}
    wrong = what_is_wrong(road, group, judged(road, group, case))
    if wrong:
        raise Mismatch(wrong[0])
