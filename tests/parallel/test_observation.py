"""Heads that are observed over ranks, whose joined record is that of one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import multihead as mh
from multihead import masks, probes, scores
from multihead.errors import ArgumentError, ProbeError
from multihead.observation.record import Record
from multihead.parallel import context_parallel, parallelize, shard
from tests.parallel.processes import Processes

LENGTH = 16
PROBES = (
    *(*mh.probes.DEFAULT, "largest_score", "duplicate_mass", "induction_mass", "contribution", "output_norm"),
    *("received", "coverage", probes.offset_mass(-3), probes.first_keys_mass(2), probes.tokens_mass("odd", (3, 5))),
)
MASKS = {
    "padded": masks.Causal() & masks.Lengths((LENGTH, 9)),
    "documents": masks.Causal() & masks.Documents((6, 10)),
    # Ranks without a token of a text, and a text without any.
    "short": masks.Causal() & masks.Documents(((2,), (16,))),
    "a sample that sees nothing": masks.Lengths((LENGTH, 0)),
}
STRATEGIES = [("ring", "balanced"), ("ring", "contiguous"), ("ulysses", "balanced"), ("gather", "contiguous")]


class Model(nn.Module):
    """Two layers over token ids, as models of this library are written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(8, 16)
        self.first = mh.MultiHeadAttention(16, 4, num_kv_heads=2, rotary=mh.Rotary(), sinks=True)
        self.second = mh.MultiHeadAttention(16, 4, position_bias=scores.ALiBi(4), head_gates=True)
        self.double()

    def forward(self, input_ids: Tensor, mask: masks.Mask) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.first(x, mask=mask)
        output: Tensor = x + self.second(x, mask=mask)
        return output


def ids() -> Tensor:
    return torch.randint(8, (2, LENGTH), generator=torch.Generator().manual_seed(2))


@cache
def one_process(name: str, keep: Any = "cpu") -> Record:
    model = Model()
    with mh.observe(model, probes=PROBES, special_ids=(0, 1), keep=keep) as seen, torch.no_grad():
        model(ids(), MASKS[name])
    return seen


def split(mesh: Any, name: str, strategy: Any, layout: Any, keep: Any, model: Model | None = None) -> Record:
    model = Model() if model is None else model
    part = shard(mesh, input_ids=ids(), layout=layout)
    with (
        mh.observe(model, probes=PROBES, special_ids=(0, 1), keep=keep) as seen,
        context_parallel(mesh, strategy=strategy, layout=layout),
    ):
        model(part["input_ids"], MASKS[name])
    return seen


def agree(found: Record, expected: Record) -> None:
    """Compare what two records hold: statistics, summaries, weights, texts and calls."""
    assert [(each.name, each.number, each.split) for each in found.layers] == [
        (each.name, each.number, None) for each in expected.layers
    ]
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert list(ours.means()) == list(theirs.means())  # pages show them in this order
        torch.testing.assert_close(ours.means(), theirs.means(), rtol=1e-9, atol=1e-9)
        largest = [layer.summary("max", ("largest_score",)) for layer in (ours, theirs)]
        torch.testing.assert_close(*largest, rtol=1e-9, atol=1e-9)
        assert len(ours.samples) == len(theirs.samples)
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert one.statistics.keys() == other.statistics.keys()
            torch.testing.assert_close(one.statistics, other.statistics, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(one.logsumexp.all_rows(), other.logsumexp.all_rows(), rtol=1e-9, atol=1e-9)
            assert (one.calls, one.positions.tolist()) == (other.calls, other.positions.tolist())
            assert torch.equal(one.visible(), other.visible())
            if other.keeps_weights:
                torch.testing.assert_close(one.weights(), other.weights(), rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(one.weights(1), other.weights(1), rtol=1e-9, atol=1e-9)
    assert [None if text.ids is None else text.ids.tolist() for text in found.texts] == [
        None if text.ids is None else text.ids.tolist() for text in expected.texts
    ]
    if found.layers[0].samples:
        assert [one.num_queries for one in found] == [one.num_queries for one in expected]


def reduced(group: Any, rank: int, *options: Any) -> Record | None:
    return split(group, *options).reduce(group)


# What a rank has of a text depends on the order of the tokens and on the lengths: one order meets every mask, and each
# other way of splitting the masks where a rank has no token of a text and where a sample sees nothing. In a ring of
# four, a rank also passes on what it was sent: also where it has no token of a text.
JOINED = [
    *((*STRATEGIES[0], mask, 4 if mask in ("documents", "short") else 2) for mask in MASKS),
    *((*each, mask, 2) for each in STRATEGIES[1:] for mask in ("short", "a sample that sees nothing")),
]


@pytest.mark.parametrize(("strategy", "layout", "mask", "ranks"), JOINED)
def test_the_joined_record_of_tokens_is_that_of_one_process(
    four: Processes, strategy: str, layout: str, mask: str, ranks: int
) -> None:
    found, *others = four.results(reduced, mask, strategy, layout, "cpu", ranks=ranks)
    assert others == [None] * (ranks - 1)
    agree(found, one_process(mask))


def test_sums_of_ranks_are_those_of_one_process(four: Processes) -> None:
    found = four.results(reduced, "padded", "ring", "balanced", "summary")[0]
    agree(found, one_process("padded", "summary"))
    with pytest.raises(ProbeError) as caught:  # a rank knows no chance of a text of which it has some tokens
        found.kinds()
    assert str(caught.value) == (
        f"{found.layers[0].name} was summarised without chance levels, so no kinds of heads can be told. "
        'Observe it again with keep="summary"; where a sequence is split over ranks, with keep="statistics", '
        "and join the records with seen.reduce(group)."
    )


def kinds_of_joined_statistics(group: Any, rank: int) -> list[str]:
    record = split(group, "padded", "ring", "balanced", "statistics").reduce(group)
    return [] if record is None else [str(each) for each in record.kinds()]


def test_the_kinds_of_heads_are_told_from_the_joined_statistics_of_ranks(four: Processes) -> None:
    expected = [str(each) for each in one_process("padded", "statistics").kinds()]
    assert expected
    assert four.results(kinds_of_joined_statistics) == [expected, [], [], []]


def of_short_texts(group: Any, layout: Any) -> tuple[Record, dict[str, float]]:
    """The sums and the watched numbers of texts of 16 and 2 tokens; without a group, of one process."""
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(8, 2), torch.randn(2, 16, 8)
    part = {"x": x} if group is None else shard(group, x=x, layout=layout)
    watch = mh.Watch(layer, every=1)
    with nullcontext() if group is None else context_parallel(group, strategy="ring", layout=layout):
        with mh.observe(layer, keep="summary") as seen, torch.no_grad():
            layer(part["x"], mask=masks.Causal(), lengths=[16, 2])
        with watch:
            layer(part["x"], mask=masks.Causal(), lengths=[16, 2]).sum().backward()
    return seen, watch.numbers


def sums_of_short_texts(group: Any, rank: int, layout: Any) -> tuple[Record | None, dict[str, float]]:
    seen, numbers = of_short_texts(group, layout)
    return seen.reduce(group), numbers


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
def test_a_rank_without_a_token_of_a_text_adds_nothing_to_the_sums(four: Processes, layout: str) -> None:
    (found, _), *others = four.results(sums_of_short_texts, layout)
    expected, _ = of_short_texts(None, layout)
    torch.testing.assert_close(found.layers[0].means(), expected.layers[0].means(), rtol=1e-5, atol=1e-6)
    assert all("heads/entropy/L00/mean" in numbers for _, numbers in others)


def kinds_of_a_part(group: Any, rank: int) -> str:
    layer, x = mh.MultiHeadAttention(8, 2), torch.randn(1, 16, 8)
    with (
        context_parallel(group, strategy="ring", layout="contiguous"),
        pytest.raises(ProbeError) as caught,
        mh.Watch(layer, kinds=True),
    ):
        layer(shard(group, x=x, layout="contiguous")["x"], mask=masks.Causal())
    return str(caught.value)


def test_the_kinds_of_heads_are_not_told_from_a_part_of_the_tokens(four: Processes) -> None:
    sentence = "MultiHeadAttention has its tokens on 4 ranks, and the kinds of its heads are known of whole texts only."
    assert four.results(kinds_of_a_part) == [f"{sentence} Leave out kinds, or watch the training on one rank."] * 4


def by_heads(group: Any, rank: int, keep: Any) -> tuple[str, Record | None]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = parallelize(Model(), mesh["tp"])
    with mh.observe(model, probes=PROBES, special_ids=(0, 1), keep=keep) as seen, torch.no_grad():
        model(ids(), MASKS["padded"])
    return repr(seen), seen.reduce(mesh["tp"], to=2)


@pytest.mark.parametrize("keep", ["cpu", "statistics", "summary"])
def test_the_joined_record_of_heads_is_that_of_one_process(four: Processes, keep: str) -> None:
    found = four.results(by_heads, keep)
    assert [record is None for _, record in found] == [True, True, False, True]
    agree(found[2][1], one_process("padded", keep))
    assert "; head 3 of 4>" in found[3][0]


def by_both(group: Any, rank: int) -> tuple[Record | None, dict[str, tuple[str, Record | None]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = parallelize(Model(), mesh["tp"])
    seen = split(mesh["cp"], "padded", "ring", "balanced", "cpu", model)
    in_steps = {}
    for first, second in (("cp", "tp"), ("tp", "cp")):
        half = seen.reduce(mesh[first], to=None)
        assert half is not None
        in_steps[first] = (repr(half), half.reduce(mesh[second]))
    return seen.reduce(group), in_steps


def test_heads_and_tokens_are_joined_at_once_or_one_after_the_other(four: Processes) -> None:
    at_once, in_steps = four.results(by_both)[0]
    agree(at_once, one_process("padded"))
    for first, left in (
        ("cp", "4 heads, 2 texts of up to 16 tokens; heads 0 to 1 of 4"),
        ("tp", "8 heads, 2 texts of up to 16 tokens; rank 0 of 2 of the sequence"),
    ):
        part, joined = in_steps[first]
        assert part == f"<Record of Model: 2 layers, {left}>"
        agree(joined, one_process("padded"))


def saved(group: Any, rank: int, folder: Path, keep: Any) -> None:
    split(group, "padded", "ring", "balanced", "cpu").save(folder / f"run.{rank}.safetensors", keep=keep)


@pytest.mark.parametrize(("keep", "mapped"), [("all", True), ("statistics", False)])
def test_the_files_of_the_ranks_open_as_one_record(four: Processes, tmp_path: Path, keep: str, mapped: bool) -> None:
    four.results(saved, tmp_path, keep, ranks=2)
    found = Record.load(tmp_path / "run.*.safetensors", mapped=mapped)
    agree(found, one_process("padded", "cpu" if keep == "all" else "statistics"))
    assert found.id == Record.load(tmp_path / "run.[01].safetensors").id
    found.save(tmp_path / "joined.safetensors")
    agree(Record.load(tmp_path / "joined.safetensors"), one_process("padded", "cpu" if keep == "all" else "statistics"))
    alone = Record.load(tmp_path / "run.0.safetensors", mapped=mapped)
    assert repr(alone).endswith("; rank 0 of 2 of the sequence>")
    (tmp_path / "run.0.safetensors").unlink()
    (tmp_path / "run.1.safetensors").rename(tmp_path / "run.7.safetensors")
    alone.save(tmp_path / "run.8.safetensors")
    alone.save(tmp_path / "run.9.safetensors")
    with pytest.raises(ArgumentError) as error:
        Record.load(tmp_path / "run.*.safetensors")
    assert str(error.value) == (
        "The records of the ranks do not belong together: the sequence is split over 2 ranks, and these are 0, 0, 1. "
        "Give the records of one run, one from each rank, with equal layers and options."
    )


def test_a_rank_sees_its_queries_and_has_no_map(four: Processes) -> None:
    found = four.results(whole_record, "padded")
    samples = [seen.layers[0].samples[1] for seen in found]
    queries = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert [sample.positions.tolist() for sample in samples] == queries
    assert [(sample.num_queries, sample.num_keys) for sample in samples] == [(4, 9)] * 4
    assert repr(samples[0]) == "<SampleRecord of first: 4 heads, 4 queries and 9 keys; statistics only>"
    assert len(found[0].table().rows) == 8
    layer = found[1].layers[0]
    for read in (lambda: layer.weights(0), layer.samples[0].visible):
        with pytest.raises(ProbeError) as error:
            read()
        assert str(error.value) == (
            "first was observed on one of several ranks, which has 4 queries of the text and not all keys. Join the "
            'records of all ranks: seen.reduce(group), or Record.load("run.*.safetensors") after each rank has saved '
            "its own."
        )


def whole_record(group: Any, rank: int, mask: str) -> Record:
    return split(group, mask, "ring", "balanced", "cpu")


def with_map(group: Any, rank: int) -> None:
    layer = mh.MultiHeadAttention(8, 2)
    with mh.observe(layer, probes="pooled_map"), context_parallel(group):
        layer(torch.zeros(1, 2, 8))


def test_a_map_of_blocks_is_made_of_the_joined_record(four: Processes) -> None:
    for found in four.run(with_map):
        assert type(found) is ProbeError
        assert str(found) == (
            "pooled_map needs the whole attention map, and this rank has only some of the queries. Leave it out, join "
            "the records with seen.reduce(group), and call seen.layers[0].map()."
        )


def only_one(group: Any, rank: int) -> None:
    layer, x = mh.MultiHeadAttention(8, 2), torch.zeros(1, 2, 8)
    if rank == 0:
        with mh.observe(layer), context_parallel(group):
            layer(x)
    else:
        with context_parallel(group):
            layer(x)


def test_all_ranks_observe_or_none(four: Processes) -> None:
    for found in four.run(only_one, ranks=2):
        assert str(found) == (
            "Whether the call is observed differs between ranks: True on rank 0, False on rank 1. Give all "
            "ranks equal sizes and options."
        )
