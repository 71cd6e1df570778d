"""Every statistic against brute force on dense weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from multihead import masks
from multihead.errors import ProbeError
from multihead.functional import request_of, statistics
from multihead.kernels.call import AttentionCall, AttentionResult
from multihead.kernels.native import kernel
from multihead.kernels.parts import PartName
from multihead.probes import (
    DEFAULT,
    PROBES,
    Probe,
    ProbeContext,
    first_keys_mass,
    offset_mass,
    repeats,
    streaming,
    tokens_mass,
)
from multihead.probes.catalogue import needs_pictures
from multihead.probes.statistics import resolve_probes, statistics_of_call
from multihead.scores import RelativeBias
from tests import oracle
from tests.drawing import Drawn, calls
from tests.kernel_names import needs_native
from tests.kernels.test_sdpa import LargestTensor
from tests.native_runs import native_runs
from tests.probes.definitions import Known, every, largest_of_blocks

COMMAS = (3, 5)
MADE = (
    *map(offset_mass, (-5, -2, 3)),
    first_keys_mass(4),
    tokens_mass("commas", COMMAS),
    tokens_mass("given"),
    Probe("first_special_mass", itemgetter("first_special_mass"), {"first_special_mass"}),
)
OF_TEXTS = tuple(name for name, probe in PROBES.items() if not needs_pictures(probe))
EVERY: tuple[str | Probe, ...] = (*OF_TEXTS, *MADE)


@dataclass
class Case:
    """One call. Four heads; sizes are (batch, kv_heads, queries, keys)."""

    sizes: tuple[int, int, int, int] = (2, 2, 16, 150)
    mask: masks.Mask = field(default_factory=masks.Full)
    start: int | str | Tensor = "end"
    terms: dict[str, Any] = field(default_factory=dict)


def random(*size: int, seed: int = 5) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


RAGGED = torch.tensor([-3, 90])
CASES = {
    "full": Case(),
    "full, ragged starts": Case(start=RAGGED),
    "causal": Case(mask=masks.Causal()),
    "causal, square": Case((1, 4, 150, 150), masks.Causal(), 0),
    "causal, more queries than keys": Case((1, 1, 150, 70), masks.Causal(), 0),
    "causal, ragged starts": Case(mask=masks.Causal(), start=RAGGED),
    "window": Case(mask=masks.Window(70)),
    "window both ways": Case((2, 1, 150, 150), masks.Window(3, after=66), 0),
    "padded": Case(mask=masks.Lengths((150, 20))),
    "padded and causal, a sample that sees nothing": Case(mask=masks.Causal() & masks.Lengths((0, 141))),
    "lengths a query, some of them 0": Case(mask=masks.Lengths(torch.arange(32).view(2, 16) * 4 % 100)),
    "documents, tokens after the last": Case((2, 2, 16, 16), masks.Documents((5,)), 0),
    "documents": Case((2, 2, 150, 150), masks.Documents(((30, 20, 90), (150,))), 0),
    "prefix": Case(mask=masks.Causal() | masks.Prefix((20, 70))),
    "gaps": Case(mask=masks.Window(20) | masks.Prefix(3)),
    "given": Case(mask=masks.Keep(torch.rand(2, 1, 16, 150, generator=torch.Generator().manual_seed(3)) < 0.2)),
    "given a head, rows that see nothing": Case(mask=masks.Keep(random(2, 4, 16, 150) > 2.6)),
    "one key": Case((1, 2, 5, 1), start=0),
    "one query": Case((2, 4, 1, 150), masks.Causal()),
    "sinks": Case(mask=masks.Causal(), terms={"sinks": torch.tensor([2.0, -1.0, 0.0, 9.0], dtype=torch.float64)}),
    "bias": Case(mask=masks.Causal(), terms={"bias": random(1, 4, 16, 150)}),
    "bias that hides": Case(terms={"bias": random(2, 1, 1, 150).masked_fill(random(150) > 1, -torch.inf)}),
    "bias along diagonals": Case(mask=masks.Causal(), terms={"bias": RelativeBias(random(1, 4, 165))}),
    "softcap": Case(mask=masks.Causal(), terms={"softcap": 0.8}),
    "softcap and sinks": Case((2, 1, 150, 150), masks.Causal(), 0, {"softcap": 2.0, "sinks": random(4)}),
    "scale": Case(terms={"scale": 3.0}),
    "scale 0": Case(terms={"scale": 0.0}),
}


def terms_of(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    def cast(value: object) -> object:
        if isinstance(value, RelativeBias):
            return RelativeBias(value.values.to(dtype))
        return value.to(dtype) if isinstance(value, Tensor) else value

    return {name: cast(value) for name, value in case.terms.items()}


def differences(case: Case, dtype: torch.dtype, *, map_size: int = 5) -> dict[str, tuple[float, float]]:
    """Measure a case, and return how far each statistic is from its definition, and how far it may be in a dtype.

    A weight is exp(s - L): what is rounded of a score is a share of the weight.
    """
    batch, _, queries, keys = case.sizes
    q, k, v = (random(*size, seed=seed) for seed, size in enumerate(_sizes(case)))
    ids = torch.randint(0, 12, (batch, keys), generator=torch.Generator().manual_seed(8))
    special, given_ = random(batch, keys) < -0.6, random(batch, keys) > 0.3
    weight = random(13, 4 * 6)
    terms = terms_of(case, dtype)
    context = ProbeContext(
        special_keys=special, ids=ids, sets={"given": given_}, output_weight=weight.to(dtype), map_size=map_size
    )
    tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    probes = [probe for probe in EVERY if "sinks" in terms or probe != "sink_mass"]
    found = statistics(**tensors, mask=case.mask, query_start=case.start, probes=probes, context=context, **terms)

    start = oracle.positions_of_first(case.start, batch, queries, keys)
    seen = oracle.shown(case.mask, (batch, 4, queries, keys), case.start)
    exact, largest_score, weights = {}, 1.0, torch.empty(0)
    for name, made in (("exact", torch.float64), ("plain", dtype)):
        dense_terms = terms_of(case, made)
        if isinstance(dense_terms.get("bias"), RelativeBias):
            dense_terms["bias"] = dense_terms["bias"].tile(queries, keys)
        visible = seen & (dense_terms["bias"] != -torch.inf) if "bias" in dense_terms else seen
        dense = oracle.attend(q.to(dtype).to(made), k.to(dtype).to(made), v.to(made), visible, **dense_terms)
        commas = torch.isin(ids, torch.tensor(COMMAS))
        known = Known(
            start, special, commas, given_, ids, v.to(dtype).to(made), weight.to(dtype).to(made),
            dense_terms.get("sinks"), map_size, case.mask,
        )  # fmt: skip
        exact[name] = every(dense, visible, known)
        if made == torch.float64:
            logs = dense.weights.log() + dense.logsumexp[..., None]  # the scores
            largest_score = max(1.0, float(logs[logs.isfinite()].abs().max())) if bool(visible.any()) else 1.0
            weights = dense.weights
    assert set(found) == set(exact["exact"])
    apart = {}
    for name, given_value in found.items():
        value = given_value
        assert value.dtype == (torch.int64 if name == "largest_key" else dtype), name
        assert value.shape == exact["exact"][name].shape, name
        expected, plain = exact["exact"][name], exact["plain"][name]
        if name == "largest_key":  # of keys that are equal but for rounding, either may be the largest
            assert torch.equal(value == -1, expected == -1)
            value = weights.gather(-1, value.clamp(min=0)[..., None])[..., 0]
            expected, plain = exact["exact"]["largest_weight"], exact["plain"]["largest_weight"]
        apart[name] = oracle.difference(value, expected), largest_score * oracle.budget(expected, plain)
    return apart


def _sizes(case: Case) -> tuple[tuple[int, int, int, int], ...]:
    batch, kv_heads, queries, keys = case.sizes
    return (batch, 4, queries, 8), (batch, kv_heads, keys, 8), (batch, kv_heads, keys, 6)


@pytest.fixture(params=["one tile", "many tiles"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as it is, and once with tiles of 7 queries and 64 keys and few tokens, so that sums cross many of them."""
    if request.param == "many tiles":
        monkeypatch.setattr(streaming, "TILE_QUERIES", 7)
        monkeypatch.setattr(streaming, "TILE_KEYS", 64)
        monkeypatch.setattr(streaming, "TILE_WEIGHTS", 1)
        monkeypatch.setattr(repeats, "MAX_WEIGHTS_AT_ONCE", 300)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("case", CASES)
def test_every_statistic_is_what_it_says(case: str) -> None:
    """In float64, by tiles, gathers and PyTorch's fused kernel."""
    apart = {name: found for name, (found, _) in differences(CASES[case], torch.float64).items()}
    assert {name: found for name, found in apart.items() if not found <= 1e-10} == {}


@needs_native
@pytest.mark.parametrize("case", CASES)
def test_every_statistic_is_what_it_says_in_float32_by_the_native_kernel(case: str) -> None:
    apart = differences(CASES[case], torch.float32)
    assert {name: both for name, both in apart.items() if not both[0] <= both[1]} == {}


@pytest.mark.parametrize("case", CASES)
def test_every_statistic_is_what_it_says_in_float32_without_the_native_kernel(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "refusal", lambda request, bounds: "it is not there")
    apart = differences(CASES[case], torch.float32)
    assert {name: both for name, both in apart.items() if not both[0] <= both[1]} == {}


@pytest.mark.parametrize(
    "name",
    [
        *("causal", "given a head, rows that see nothing", "bias that hides", "padded"),
        "documents, tokens after the last",
    ],
)
@pytest.mark.parametrize("size", [1, 5, 64])
def test_a_map_of_maxima_holds_the_largest_weight_of_each_block(name: str, size: int) -> None:
    case = CASES[name]
    q, k = (random(*sizes, seed=seed) for seed, sizes in enumerate(_sizes(case)[:2]))
    found = statistics(
        q,
        k,
        mask=case.mask,
        query_start=case.start,
        probes=("pooled_map",),
        context=ProbeContext(map_size=size, map_pool="max"),
        **case.terms,
    )["pooled_map"]
    seen = oracle.shown(case.mask, (2, 4, *case.sizes[2:]), case.start)
    seen = seen & (case.terms["bias"] != -torch.inf) if "bias" in case.terms else seen
    p = oracle.attend(q, k, k, seen, **case.terms).weights
    assert oracle.difference(found, largest_of_blocks(p, seen, size)) <= 1e-12


@pytest.mark.parametrize("map_size", [1, 7, 64, 1000])
def test_a_map_of_any_size_is_the_block_means(map_size: int) -> None:
    q, k = torch.randn(1, 2, 50, 8, dtype=torch.float64), torch.randn(1, 2, 130, 8, dtype=torch.float64)
    found = statistics(
        q, k, mask=masks.Window(9), query_start="end", probes=("pooled_map",), context=ProbeContext(map_size=map_size)
    )["pooled_map"]
    seen = oracle.shown(masks.Window(9), (1, 2, 50, 130), "end")
    assert oracle.difference(found, oracle.pooled(oracle.attend(q, k, k, seen).weights, seen, map_size)) <= 1e-12


@settings(max_examples=40)
@given(case=calls())
def test_statistics_of_any_call_are_those_of_its_dense_weights(case: Drawn) -> None:
    q, k = case.q.double(), case.k.double()
    options = {name: value.double() if isinstance(value, Tensor) else value for name, value in case.options.items()}
    probes = tuple(name for name in DEFAULT if PROBES[name].needs == set())
    given_ = statistics(
        q, k, mask=case.mask, query_start=case.query_start, probes=(*probes, "received", "pooled_map"), **options
    )
    seen = oracle.shown(case.mask, case.size.cells, case.query_start)
    if "bias" in options:
        seen = seen & (options["bias"] != -torch.inf)
    dense = oracle.attend(q, k, k, seen, **options)
    start = oracle.positions_of_first(case.query_start, case.size.batch, case.size.queries, case.size.keys)
    expected = oracle.statistics(dense.weights, seen, start=start, mask=case.mask)
    for name, value in given_.items():
        if name == "largest_key":  # of keys that are equal but for rounding, either may be the largest
            picked = dense.weights.gather(-1, value.clamp(min=0)[..., None])[..., 0]
            assert torch.equal(value == -1, expected[name] == -1)
            assert oracle.difference(picked, expected["largest_weight"]) <= 1e-10
        else:
            assert oracle.difference(value, expected[name]) <= 1e-10, name


@pytest.mark.parametrize("heads", [1, 6])
def test_float32_keeps_the_spread_of_a_sharp_head_that_looks_far_away(heads: int) -> None:
    """Summed in float32 about a tile's middle, the spread was off by 3 tokens at 3,000 keys: squares cancel."""
    q, k = torch.randn(1, heads, 150, 32), torch.randn(1, heads, 3000, 32)
    k[:, :, 5] = 3 * q[:, :, 140]
    k[:, :, 2900] = 3 * q[:, :, 10]
    k[:, :, 40:45] = q[:, :, 130:131]
    cheap = (*(name for name in DEFAULT if PROBES[name].needs == set()), "received")
    single = statistics(4 * q, k, mask=masks.Causal(), query_start="end", probes=cheap)
    double = statistics((4 * q).double(), k.double(), mask=masks.Causal(), query_start="end", probes=cheap)
    allowed = {"mean_distance": 1e-2, "distance_spread": 1e-2, "effective_keys": 2e-3, "received": 1e-3}
    for name, value in single.items():
        assert value.dtype == (torch.int64 if name == "largest_key" else torch.float32)
        assert oracle.difference(value, double[name]) <= allowed.get(name, 1e-4), name


def test_a_sink_that_takes_nearly_all_leaves_the_largest_key_its_name() -> None:
    """The weights underflow to 0, and the key is seen all the same: -1 is for queries that see none."""
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)
    k[0, 0, 1] = 1
    q[:] = 1
    found = statistics(q, k, sinks=torch.tensor([500.0]), probes=("largest_key", "largest_weight", "entropy"))
    assert found["largest_key"].tolist() == [[[1, 1]]]
    assert found["largest_weight"].tolist() == [[[0, 0]]]
    assert found["entropy"].tolist() == [[[0, 0]]]


def test_of_equal_weights_the_first_key_is_named_across_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "refusal", lambda request, bounds: "it is not there")
    monkeypatch.setattr(streaming, "TILE_KEYS", 64)
    q = torch.zeros(1, 1, 2, 4)
    found = statistics(q, torch.zeros(1, 1, 200, 4), probes=("largest_key",))
    assert found["largest_key"].tolist() == [[[0, 0]]]


def test_blocks_in_which_no_cell_may_be_seen_are_nan_and_others_are_not() -> None:
    q = torch.zeros(1, 1, 4, 4)
    found = statistics(q, q, mask=masks.Causal(), probes=("pooled_map",), context=ProbeContext(map_size=2))[
        "pooled_map"
    ]
    assert bool(found[0, 0, 0, 1].isnan())
    assert found[0, 0, 0, 0] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found[0, 0, 1, 0] == pytest.approx((2 / 3 + 2 / 4) / 4)


@pytest.mark.parametrize("kernel_name", ["native", "none"])
@pytest.mark.parametrize("by", ["one mask", "two masks", "a bias"])
def test_the_first_key_is_the_first_that_any_query_of_the_sample_sees(
    by: str, kernel_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left padding: the first token of the sample is not key 0, whatever hides the two before it."""
    if kernel_name == "none":
        monkeypatch.setattr(kernel, "refusal", lambda request, bounds: "it is not there")
    q = torch.zeros(1, 1, 4, 4)
    hidden = torch.tensor([[True, True, False, False]])
    mask, bias = masks.Causal(), None
    if by == "one mask":
        mask &= masks.Drop(hidden, "batch keys")
    elif by == "two masks":
        mask &= masks.Drop(torch.tensor([[True, False, False, False]]), "batch keys")
        mask &= masks.Drop(torch.tensor([[False, True, False, False]]), "batch keys")
    else:
        bias = torch.zeros(1, 1, 1, 4).masked_fill(hidden, -torch.inf)
    found = statistics(q, q, mask=mask, bias=bias, probes=("first_mass", first_keys_mass(2)))
    assert found["first_mass"].tolist() == [[[0, 0, 1, 0.5]]]
    assert found["first_2_mass"].tolist() == [[[0, 0, 1, 1]]]


@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.Window(40) | masks.Prefix(4)], ids=repr)
def test_no_tensor_of_queries_by_keys_is_made(mask: masks.Mask) -> None:
    length = 8192
    q, k = torch.randn(2, 1, 1, length, 8).unbind()
    some = torch.rand(1, length) < 0.5
    ids = torch.randint(0, 200, (1, length))
    context = ProbeContext(special_keys=some, ids=ids, sets={"given": some}, output_weight=torch.randn(3, 8))
    with LargestTensor() as largest:
        statistics(q[:, :, :4096], k, v=k, mask=mask, sinks=torch.ones(1), query_start=0, probes=EVERY, context=context)
    assert 0 < largest.elements <= 4096 * length // 4


@pytest.mark.parametrize("sizes", [(0, 3, 3), (1, 0, 3), (1, 3, 0)], ids=["no sample", "no query", "no key"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_of_nothing_all_statistics_are_empty(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """torch.stack of no samples raised, and so did a view of no numbers."""
    batch, queries, keys = sizes
    q, k = torch.zeros(batch, 2, queries, 4, dtype=dtype), torch.zeros(batch, 2, keys, 4, dtype=dtype)
    flags = torch.zeros(batch, keys, dtype=torch.bool)
    context = ProbeContext(special_keys=flags, ids=flags.long(), sets={"given": flags}, output_weight=torch.ones(5, 8))
    found = statistics(q, k, v=k, sinks=torch.zeros(2), query_start=0, probes=EVERY, context=context)
    others = {"received": (batch, 2, keys), "coverage": (batch, 2, keys), "pooled_map": (batch, 2, queries, keys)}
    for name, value in found.items():
        assert value.shape == others.get(name, (batch, 2, queries)), name


def test_what_a_kernel_had_at_hand_is_not_computed_again() -> None:
    q = torch.zeros(1, 1, 2, 4)
    marked = torch.full((1, 1, 2), 3.0)
    call = AttentionCall(request_of(q, q, q), AttentionResult(q, torch.full((1, 1, 2), 2.0).log(), {"entropy": marked}))
    found = statistics_of_call(call, resolve_probes(("entropy", "effective_keys", "largest_weight")))
    assert found["entropy"] is marked
    assert found["effective_keys"].flatten().tolist() == pytest.approx([math.exp(3), math.exp(3)])
    assert found["largest_weight"].flatten().tolist() == pytest.approx([0.5, 0.5])


def test_unknown_names_are_refused_with_those_there_are() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=("entropie",))
    assert str(refusal.value) == (
        "There is no statistic 'entropie'. Give some of entropy, effective_keys, mean_distance, distance_spread, "
        "self_mass, previous_mass, next_mass, near_mass, first_mass, special_mass, separator_mass, largest_weight, "
        "largest_key, sink_mass, largest_score, duplicate_mass, induction_mass, contribution, output_norm, "
        "patch_distance, neighbour_mass, one_way_mass, picture_mass, class_mass, words_mass, received, coverage, "
        "pooled_map, or a Probe of your own."
    )


def test_special_mass_without_special_keys_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=("special_mass",))
    assert str(refusal.value) == "special_mass needs to know which keys are special. Give special_keys."


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("duplicate_mass", "the token of each key. Give ids."),
        ("induction_mass", "the token of each key. Give ids."),
        ("contribution", "the output projection of the heads. Give output_weight."),
        ("sink_mass", "the learned sinks of the heads. Give sinks, or leave it out."),
    ],
)
def test_a_statistic_that_needs_what_is_missing_is_refused(name: str, needed: str) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, v=q, probes=(name,))
    assert str(refusal.value) == f"{name} needs {needed}"


def test_values_and_sets_that_are_missing_are_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=("output_norm",), context=ProbeContext(output_weight=torch.ones(3, 4)))
    assert str(refusal.value) == "output_norm needs the values. Give v."
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=(tokens_mass("commas"),), context=ProbeContext(sets={"stops": torch.ones(1, 2) > 0}))
    assert str(refusal.value) == (
        "commas_mass needs to know which keys belong to the set. Give sets, or ids to tokens_mass."
    )


def test_two_statistics_of_one_name_are_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=(tokens_mass("stops", [1]), tokens_mass("stops", [2])))
    assert str(refusal.value) == "Two statistics are called 'stops_mass'. Give one of them another name."


def test_unless_asked_those_are_measured_for_which_nothing_is_missing() -> None:
    q = torch.zeros(1, 1, 2, 4)
    plain = [name for name in DEFAULT if PROBES[name].needs == set()]
    assert list(statistics(q, q)) == plain
    every = statistics(q, q, sinks=torch.zeros(1), context=ProbeContext(special_keys=torch.ones(1, 2) > 0))
    assert list(every) == list(DEFAULT)


def test_a_call_with_dropout_is_measured_before_it() -> None:
    """Its output has lost what was dropped."""
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    request = request_of(q, k, v, dropout=0.5)
    attended = AttentionResult(torch.zeros_like(q), (q @ k.mT / 2).logsumexp(-1))
    context = ProbeContext(output_weight=torch.eye(8, dtype=torch.float64))
    found = statistics_of_call(AttentionCall(request, attended), resolve_probes("output_norm"), context)["output_norm"]
    torch.testing.assert_close(found, ((q @ k.mT / 2).softmax(-1) @ v).norm(dim=-1), atol=1e-12, rtol=0)


def test_rows_of_nan_are_nan_and_count_as_nothing_where_rows_are_summed() -> None:
    q = torch.zeros(1, 1, 3, 4)
    q[0, 0, 1] = torch.nan
    found = statistics(q, torch.zeros(1, 1, 3, 4), probes=("entropy", "largest_key", "received", "coverage"))
    assert found["entropy"][0, 0].isnan().tolist() == [False, True, False]
    assert found["largest_key"].tolist() == [[[0, -1, 0]]]
    assert found["received"].flatten().tolist() == pytest.approx([2 / 3] * 3)
    assert found["coverage"].flatten().tolist() == pytest.approx([2 / 3] * 3)


@needs_native
@pytest.mark.parametrize(
    ("probes", "passes"),
    [
        (("effective_keys", "mean_distance", "largest_key"), ["attention of scores"]),
        (("received",), ["attention of scores", "key_sums"]),
        ((*DEFAULT[:3], "received", "pooled_map"), ["attention of scores", "key_sums"]),
    ],
)
def test_statistics_take_one_run_of_the_kernel_without_values_and_what_keys_receive_a_second(
    probes: tuple[str, ...], passes: list[str]
) -> None:
    q, k = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 30, 8)
    with native_runs() as runs:
        statistics(q, k, mask=masks.Causal(), probes=probes)
    assert runs == passes


@needs_native
def test_a_query_that_sees_a_value_of_nan_has_statistics_of_nan() -> None:
    q, v = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
    v[0, 0, 1, 2] = torch.nan
    found = statistics(q, q, v=v, mask=masks.Causal())
    assert found["entropy"][0, 0].isnan().tolist() == [False, True, True]
    assert found["largest_key"].tolist() == [[[0, -1, -1]]]


@needs_native
def test_scores_of_thousands_are_measured_in_float64() -> None:
    """In float32 such a score has no third decimal."""
    q, k = torch.randn(1, 2, 20, 64) + 16, torch.randn(1, 2, 20, 64) + 16
    single, double = statistics(q, k), statistics(q.double(), k.double())
    for name, value in single.items():
        assert oracle.difference(value, double[name]) <= 1e-5, name


def late_mass(**options: Any) -> Probe:
    own: PartName = ("offset_mass", 0)
    return Probe("late_mass", options.pop("of", lambda parts: 1 - parts[own]), {own}, **options)


def test_a_probe_of_a_script_has_zero_where_a_query_sees_no_key_and_nan_where_it_sees_nan() -> None:
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
    k[0, 0, 2] = torch.nan
    found = statistics(q, k, mask=masks.Lengths(torch.tensor([[0, 2, 3]])), query_start=0, probes=(late_mass(),))
    torch.testing.assert_close(found["late_mass"][0, 0], torch.tensor([0, 0.5, torch.nan]), equal_nan=True)


def test_a_probe_of_a_script_is_computed_from_what_the_kernel_measured() -> None:
    q, logsumexp = torch.zeros(1, 1, 2, 4), torch.tensor([[[-torch.inf, 0.5]]])
    at_hand: dict[PartName, Tensor] = {("offset_mass", 0): torch.tensor([[[0, 0.25]]])}
    call = AttentionCall(request_of(q, q, q), AttentionResult(q, logsumexp, at_hand))
    assert statistics_of_call(call, (late_mass(),))["late_mass"].tolist() == [[[0, 0.75]]]


def test_a_comparison_is_a_share_of_queries() -> None:
    q = torch.zeros(1, 1, 2, 4)
    focused = late_mass(of=lambda parts: parts["offset_mass", 0] > 0.9)
    found = statistics(q, q, mask=masks.Causal(), probes=(focused,))
    assert found["late_mass"].tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize(
    ("of", "returned"),
    [
        (lambda parts: parts["offset_mass", 0].sum(), "a tensor of shape ()"),
        (lambda parts: 3, "an object of type int"),
    ],
)
def test_a_function_that_returns_another_shape_is_refused(of: Any, returned: str) -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=(late_mass(of=of),))
    assert str(refusal.value) == (
        f"The function of late_mass returned {returned}. Return a tensor with the shape of its parts, (1, 2, 3)."
    )


def test_the_name_of_a_built_in_statistic_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=(Probe("entropy", lambda parts: parts["entropy"] / 2, {"entropy"}),))
    assert str(refusal.value) == "entropy is the name of a built-in statistic. Give your probe another name."


def test_two_sets_of_one_name_are_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    commas: PartName = ("tokens_mass", "commas")
    other = Probe("other_commas", lambda parts: parts[commas], {commas}, tokens=frozenset({7}))
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=(tokens_mass("commas", [5]), other), context=ProbeContext(ids=torch.tensor([[5, 7]])))
    assert str(refusal.value) == "Two sets of tokens are called 'commas'. Give one of them another name."


def test_a_function_that_reads_a_part_it_does_not_declare_is_an_error() -> None:
    q = torch.zeros(1, 2, 3, 4)
    probe = Probe("two_mass", lambda parts: parts["offset_mass", 0] + parts["offset_mass", -1], {("offset_mass", 0)})
    with pytest.raises(ProbeError) as caught:
        statistics(q, q, probes=[probe])
    assert str(caught.value) == (
        "The function of two_mass reads ('offset_mass', -1), which is not among its parts. "
        "Add it to the `parts` of the probe."
    )
