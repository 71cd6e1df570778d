"""Statistics over keys on several ranks are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import probes
from multihead.kernels.call import AttentionCall, listen
from multihead.kernels.native.library import reason_of_absence
from multihead.kernels.parts import PartName
from multihead.parallel import context_parallel, measuring
from multihead.parallel.layout import Layout
from multihead.probes.statistics import parts_of_probes, resolve_probes
from tests.parallel import cases
from tests.parallel.processes import Processes

PROBES = (
    *("entropy", "mean_distance", "distance_spread", "self_mass", "previous_mass", "next_mass", "first_mass"),
    *("largest_weight", "largest_key", "largest_score", probes.offset_mass(-5), probes.first_keys_mass(3)),
)
WANTED = parts_of_probes(resolve_probes(PROBES))
CASES = (
    *(("full", "all"), ("causal", "none"), ("window", "none"), ("lengths", "all")),
    *(("prefix", "all"), ("user-defined", "none"), ("a tensor", "all")),
)


class Heard:
    """Keeps the statistics of the calls."""

    requested_statistics = WANTED

    def __init__(self) -> None:
        self.found: list[dict[PartName, Tensor]] = []

    def receive(self, call: AttentionCall) -> None:
        self.found.append(call.result.statistics)


def options(given: dict[str, Tensor], terms: str) -> dict[str, Any]:
    return {"sinks": given["sinks"], "softcap": 2.0, "bias": given["bias"]} if terms == "all" else {}


def split(
    group: Any, rank: int, layout: Any, strategy: Any, dtype: torch.dtype, todo: tuple[tuple[str, str], ...]
) -> list[dict[Any, Tensor]]:
    """Return the statistics of a rank's tokens, and check that an observed call has the output of any other."""
    found = []
    given, taken = cases.tensors(dtype), Layout(layout, 4)
    q, k, v = (taken.select_tokens_of_rank(given[name], rank, 2) for name in "qkv")
    for mask, terms in todo:
        heard, call = Heard(), {"mask": cases.MASKS[mask](), **options(given, terms)}
        with context_parallel(group, strategy=strategy, layout=layout):
            alone = mh.attention(q, k, v, **call)
        with listen(heard), context_parallel(group, strategy=strategy, layout=layout):
            assert torch.equal(mh.attention(q, k, v, **call), alone)
        (each,) = heard.found
        found.append(each)
    return found


def whole(dtype: torch.dtype, todo: tuple[tuple[str, str], ...]) -> list[dict[str, Tensor]]:
    given = cases.tensors(dtype)
    return [
        mh.statistics(given["q"], given["k"], mask=cases.MASKS[mask](), probes=PROBES, **options(given, terms))
        for mask, terms in todo
    ]


@pytest.mark.parametrize(
    ("strategy", "layout", "dtype"),
    [
        ("ring", "contiguous", torch.float64),
        ("ring", "balanced", torch.float64),
        ("ulysses", "balanced", torch.float64),
        ("gather", "balanced", torch.float64),
        pytest.param(
            "ring", "balanced", torch.float32, marks=pytest.mark.skipif(reason_of_absence() is not None, reason="slow")
        ),
    ],
)
def test_statistics_are_those_of_one_process(four: Processes, strategy: str, layout: str, dtype: torch.dtype) -> None:
    # A mask meets the order of the tokens in a ring; others see all keys of their queries, whatever the mask is. A
    # contiguous ring takes the masks in another order of blocks, and float32 another kernel.
    every = (strategy, layout, dtype) == ("ring", "balanced", torch.float64)
    todo = CASES if every else CASES[::2]
    expected = whole(dtype, todo)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    of_ranks = four.results(split, layout, strategy, dtype, todo)
    for case, found, statistics in zip(todo, zip(*of_ranks, strict=True), expected, strict=True):
        parts = {part: Layout(layout, 4).join_tokens_of_ranks([each[part] for each in found], 2) for part in found[0]}
        for probe in resolve_probes(PROBES):
            torch.testing.assert_close(
                probe.of(parts).nan_to_num(neginf=0),  # the largest score of a query without keys
                statistics[probe.name],
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, at=(*case, probe.name): f"{at}: {text}",
            )


def test_equal_largest_weights_take_the_first_key() -> None:
    like = torch.zeros(1, 1, 1)
    for distance in (0.0, 1e-7, -1e-7):  # the weights differ by less than the rounding of the logsumexp
        merged = measuring.MergedStatistics(frozenset({"largest_key"}), like)
        for key, weight in ((9, 0.5), (5, 0.5 + distance)):
            part: dict[PartName, torch.Tensor] = {
                "largest_weight": torch.full_like(like, weight),
                "largest_key": torch.full_like(like, key, dtype=torch.int64),
            }
            merged.add(slice(0, 1), torch.zeros_like(like), part)
        assert merged.results(torch.full_like(like, 2.0).log())["largest_key"].item() == 5


def test_a_position_is_that_of_the_subsets_of_which_a_query_sees_a_key() -> None:
    """The first query sees keys of the second subset, the second of the first, and the third of both."""
    merged = measuring.MergedStatistics(frozenset({"position", "largest_key"}), torch.zeros(1, 1, 3))
    for seen, keys in ((torch.tensor([False, True, True]), [0, 2, 1]), (torch.tensor([True, False, True]), [5, 0, 6])):
        found: dict[PartName, torch.Tensor] = {
            "position": torch.tensor([[[3.0, 4.0, 7.0]]]) * seen,
            "largest_weight": seen[None, None].float(),
            "largest_key": torch.tensor([[keys]]).where(seen, -1),
        }
        merged.add(slice(0, 3), torch.where(seen, 0.0, -torch.inf)[None, None], found)
    results = merged.results(torch.tensor([[[0.0, 0.0, 2.0]]]))
    assert {name: value[0, 0].tolist() for name, value in results.items()} == {
        "position": [3, 4, 7],
        "largest_key": [5, 2, 1],
    }


def test_a_part_that_does_not_combine_is_left_to_a_measurement_over_all_keys() -> None:
    assert measuring.MergedStatistics(frozenset({"received", "output_norm"}), torch.zeros(1, 1, 1)).parts == {}
