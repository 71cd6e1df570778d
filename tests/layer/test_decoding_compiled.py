"""A compiled layer with a cache of a capacity: one graph for all steps, whatever prompt came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import multihead as mh
from multihead import masks
from multihead.layer.cache import KeyValueCache
from multihead.rotary import Rotary

CAUSAL, WIDTH, LENGTH = masks.Causal(), 16, 12
Compiled = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


def compiled(layer: nn.Module, *, traced_again: bool = True) -> tuple[Compiled, list[int]]:
    """Compile a layer to one graph, and note each time it is compiled.

    AOTAutograd traces the graph again, into operators that change nothing in place. What is compiled anew, and when,
    is decided before.
    """
    times: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        times.append(len(times))
        return aot_eager(graph, inputs) if traced_again else graph.forward

    return torch.compile(layer, backend=backend, fullgraph=True), times


def drawn(*, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[mh.MultiHeadAttention, Tensor]:
    """Draw a layer and its input: in float32 attention is one operator of a graph, in float64 hundreds of them."""
    layer = mh.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, dtype=dtype, **options)
    return layer, torch.randn(2, LENGTH, WIDTH, dtype=dtype)


def assert_same(found: list[Tensor], whole: Tensor) -> None:
    assert float((torch.cat(found, 1) - whole).abs().max()) < (1e-12 if whole.dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({"rotary": Rotary()}, CAUSAL & masks.Documents((5, 7))),
        ({"sinks": True, "softcap": 2.0, "add_bias_kv": True, "dtype": torch.float64}, CAUSAL & masks.Window(4)),
    ],
    ids=str,
)
def test_a_step_is_compiled_once_for_all_steps_and_prompts(options: dict[str, Any], mask: masks.Mask) -> None:
    layer, x = drawn(**options)
    step, times = compiled(layer)
    whole = layer(x, mask=mask)
    for prompt in (3, 7):
        cache = KeyValueCache(capacity=LENGTH + 3)
        found = [layer(x[:, :prompt], cache=cache, mask=mask)]
        found += [step(x[:, i : i + 1], cache=cache, mask=mask) for i in range(prompt, LENGTH)]
        assert_same(found, whole)
    assert len(times) == 1


def test_samples_of_different_lengths_are_compiled_once_too() -> None:
    layer, x = drawn(rotary=Rotary())
    step, times = compiled(layer)
    for prompts in ((3, 7), (5, 1)):
        cache = KeyValueCache(capacity=LENGTH + 3)
        padded = torch.zeros(2, 7, WIDTH)
        for sample, length in enumerate(prompts):
            padded[sample, :length] = x[sample, :length]
        first = layer(padded, cache=cache, mask=CAUSAL, lengths=prompts)
        steps = []
        for i in range(4):
            token = torch.stack([x[sample, length + i] for sample, length in enumerate(prompts)])
            steps.append(step(token[:, None], cache=cache, mask=CAUSAL))
        for sample, length in enumerate(prompts):
            own = [first[sample : sample + 1, :length], *[each[sample : sample + 1] for each in steps]]
            assert_same(own, layer(x[sample : sample + 1, : length + 4], mask=CAUSAL))
    assert len(times) == 1


def test_a_compiled_prompt_of_different_lengths_and_its_steps() -> None:
    layer, x = drawn()
    step, times = compiled(layer, traced_again=False)
    cache = KeyValueCache(capacity=LENGTH)
    padded = x[:, :6].clone()
    padded[1, 2:] = torch.nan
    first = step(padded, cache=cache, mask=CAUSAL, lengths=torch.tensor([6, 2]))
    then = step(torch.stack([x[0, 6:7], x[1, 2:3]]), cache=cache, mask=CAUSAL)
    for sample, length in enumerate((6, 2)):
        own = [first[sample : sample + 1, :length], then[sample : sample + 1]]
        assert_same(own, layer(x[sample : sample + 1, : length + 1], mask=CAUSAL))
    assert cache.lengths.tolist() == [7, 3]
    assert len(times) == 2


def test_what_was_compiled_goes_on_uncompiled_and_back_until_the_capacity() -> None:
    layer, x = drawn(rotary=Rotary())
    step, _ = compiled(layer, traced_again=False)
    ways = [layer, step, step, layer, layer, step]
    cache = KeyValueCache(capacity=len(ways))
    found = [way(x[:, i : i + 1], cache=cache, mask=CAUSAL) for i, way in enumerate(ways)]
    assert_same(found, layer(x[:, : len(ways)], mask=CAUSAL))
    cache.crop(4)
    found = [*found[:4], step(x[:, 4:5], cache=cache, mask=CAUSAL), layer(x[:, 5:6], cache=cache, mask=CAUSAL)]
    assert_same(found, layer(x[:, :6], mask=CAUSAL))
    assert repr(cache).startswith("KeyValueCache(capacity=6): 6 tokens, 2 samples")
    with pytest.raises(RuntimeError, match=r"^The cache has no room for these tokens\."):  # when the graph runs
        step(x[:, 6:7], cache=cache, mask=CAUSAL)


def test_caches_of_other_capacities_share_a_graph_after_the_second() -> None:
    layer, x = drawn()
    step, times = compiled(layer)
    for capacity in (6, 9, 12, 20):
        cache = KeyValueCache(capacity=capacity)
        found = [layer(x[:, :3], cache=cache, mask=CAUSAL)]
        found += [step(x[:, i : i + 1], cache=cache, mask=CAUSAL) for i in range(3, 6)]
        assert_same(found, layer(x[:, :6], mask=CAUSAL))
    assert len(times) <= 2


def test_a_growing_cache_in_a_graph_gives_the_same_and_is_compiled_a_few_times() -> None:
    layer, x = drawn(rotary=Rotary())
    step, times = compiled(layer, traced_again=False)
    cache = KeyValueCache()
    found = [layer(x[:, :3], cache=cache, mask=CAUSAL)]
    found += [step(x[:, i : i + 1], cache=cache, mask=CAUSAL) for i in range(3, LENGTH)]
    assert_same(found, layer(x, mask=CAUSAL))
    assert len(times) <= 3


def test_a_memory_is_compiled_once_for_all_steps() -> None:
    layer, x = drawn(rotary=Rotary())
    step, times = compiled(layer)
    memory, cache = torch.randn(2, 9, WIDTH), KeyValueCache(capacity=LENGTH)
    found = [layer(x[:, :3], memory, cache=cache)]
    found += [step(x[:, i : i + 1], memory, cache=cache) for i in range(3, LENGTH)]
    assert_same(found, layer(x, memory, query_start=0))
    assert len(times) == 1
