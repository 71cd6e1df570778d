"""Heads cannot be switched off where a sequence or the heads are split over ranks, and each rank says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import multihead as mh
from multihead import masks
from multihead.errors import ModelError
from multihead.kernels import head_changes
from multihead.parallel import context_parallel, parallelize, shard
from tests.families import family
from tests.parallel.processes import Processes

X = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(8)[None] + 3
NAMES = {"own": "0", "llama": "model.layers.1.self_attn"}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return family("llama") if name == "llama" else nn.Sequential(mh.MultiHeadAttention(16, 8, num_kv_heads=4))


def outputs(module: nn.Module, name: str, group: Any = None) -> Tensor:
    """Run a model on the whole text, or on this rank's part of it."""
    given: Any = {"x": X, "ids": IDS} if group is None else shard(group, x=X, ids=IDS)
    with torch.no_grad():
        if name == "own":
            return module[0](given["x"], mask=masks.Causal())  # type: ignore[index, no-any-return]
        return module(input_ids=given["ids"]).logits  # type: ignore[no-any-return]


def ours(module: nn.Module) -> AbstractContextManager[object]:
    """Let a Hugging Face model call this library's attention."""
    return nullcontext() if isinstance(module, nn.Sequential) else mh.use(module)


def interventions(module: nn.Module, number: int) -> list[Callable[[], Any]]:
    return [
        lambda: mh.ablate(module, (number, 1)),
        lambda: mh.ablate(module, (number, 1), by="resample", seed=1),
        lambda: mh.scale_heads(module, {f"L{number}": 2.0}),
    ]


def refused(run: Callable[[], Tensor], made: list[Callable[[], Any]]) -> list[str]:
    """What each intervention raises as the model runs; nothing of it may stay."""
    found, before = [], run()
    for make in made:
        with pytest.raises(ModelError) as caught, make():
            run()
        found.append(str(caught.value))
        assert head_changes.active_changes == ()
        assert torch.equal(run(), before)
    return found


def split_sequence(group: Any, rank: int, name: str, strategy: Any) -> list[str]:
    module = model(name)
    with ours(module), context_parallel(group, strategy=strategy):
        return refused(lambda: outputs(module, name, group), interventions(module, int(name == "llama")))


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "gather"])
@pytest.mark.parametrize("name", NAMES)
def test_in_a_split_sequence(four: Processes, name: str, strategy: str) -> None:
    sentence = (
        "Heads cannot be switched off in context_parallel, where a rank has part of the tokens. Run the model on one "
        "process."
    )
    for found in four.results(split_sequence, name, strategy, ranks=2):
        assert found == [sentence] * 3


def split_heads(group: Any, rank: int, name: str) -> list[str]:
    module = model(name)
    parallelize(module, DeviceMesh.from_group(group, "cpu"))
    with ours(module):
        return refused(lambda: outputs(module, name), interventions(module, int(name == "llama")))


@pytest.mark.parametrize("name", NAMES)
def test_where_heads_are_split(four: Processes, name: str) -> None:
    sentence = (
        f"The heads of {NAMES[name]} are split over ranks, where heads cannot be switched off. Run the model on one "
        "process."
    )
    for found in four.results(split_heads, name, ranks=2):
        assert found == [sentence] * 3


def means(group: Any, rank: int) -> str:
    module = model("own")
    with pytest.raises(ModelError) as caught, context_parallel(group):
        mh.head_means(module, [{"input": shard(group, x=X)["x"]}])
    return str(caught.value)


def test_means_of_a_part_of_the_tokens_are_an_error(four: Processes) -> None:
    sentence = (
        "The means of heads cannot be computed in context_parallel, where a rank has part of the tokens. Run the model "
        "on one process."
    )
    assert four.results(means, ranks=2) == [sentence] * 2


def means_of_split_heads(group: Any, rank: int, name: str) -> str:
    module = model(name)
    parallelize(module, DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(ModelError) as caught:
        mh.head_means(module, [{"input": X} if name == "own" else {"input_ids": IDS}])
    return str(caught.value)


@pytest.mark.parametrize(("name", "layer"), [("own", "0"), ("llama", "model.layers.0.self_attn")])
def test_means_where_heads_are_split_are_an_error(four: Processes, name: str, layer: str) -> None:
    sentence = (
        f"The heads of {layer} are split over ranks, where their means cannot be computed. Run the model on one "
        "process."
    )
    assert four.results(means_of_split_heads, name, ranks=2) == [sentence] * 2


def whole_on_each_rank(group: Any, rank: int) -> Tensor:
    module = model("own")
    with mh.ablate(module, "L0 H1"):
        return outputs(module, "own")


def test_a_process_of_a_group_may_switch_heads_of_a_whole_model_off(four: Processes) -> None:
    module = model("own")
    with mh.ablate(module, "L0 H1"):
        expected = outputs(module, "own")
    for found in four.results(whole_on_each_rank, ranks=2):
        torch.testing.assert_close(found, expected)
