"""torch.compile(fullgraph=True): any mask, one compilation for all batches, and what comes out without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.testing import CompileCounterWithBackend

import multihead as mh
from multihead import masks
from tests.ecosystem.ways import BATCH, EMBED, KEYS, QUERIES, layer

Values = dict[str, Tensor]


def drawn(highest: int, *size: int) -> Tensor:
    return torch.randint(0, highest + 1, size)


# What a mask holds is drawn anew for each call; what is written in ints stays.
MASKS: dict[str, Callable[[], masks.Mask]] = {
    "full": masks.Full,
    "causal": masks.Causal,
    "window": lambda: masks.Causal() & masks.Window(3),
    "lengths of ints": lambda: masks.Lengths((7, 4, 0)),
    "lengths": lambda: masks.Lengths(drawn(QUERIES, BATCH)),
    "lengths of queries": lambda: masks.Lengths(drawn(QUERIES, BATCH, QUERIES)),
    "documents": lambda: masks.Documents(torch.stack([part := drawn(QUERIES, BATCH), QUERIES - part], 1)),
    "prefix": lambda: masks.Causal() | masks.Prefix(drawn(QUERIES, BATCH)),
    "keep": lambda: masks.Keep(torch.rand(BATCH, QUERIES) > 0.3, "batch keys"),
    "drop, causal": lambda: masks.Causal() & masks.Drop(torch.rand(BATCH, 1, QUERIES, QUERIES) > 0.6),
}

TRAINED = ("documents", "drop, causal")  # the backward pass knows of bounds and cells alone


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counted:
    """A model compiled in one graph, and how often that was."""

    def __init__(self, model: nn.Module, *, backend: str = "aot_eager", dynamic: bool | None = None) -> None:
        self.counter = CompileCounterWithBackend(backend)
        self.model, self.compiled = model, torch.compile(model, backend=self.counter, fullgraph=True, dynamic=dynamic)

    @property
    def times(self) -> int:
        return int(self.counter.frame_count)

    def assert_same(self, *given: Tensor, training: bool = False, **options: Any) -> None:
        """Compare output and gradients with those of the model that is not compiled."""
        if not training:
            with torch.no_grad():
                torch.testing.assert_close(self.compiled(*given, **options), self.model(*given, **options))
            return
        found: list[Tensor] = []
        expected: list[Tensor] = []
        for model, kept in ((self.compiled, found), (self.model, expected)):
            leaves = [each.detach().clone().requires_grad_() for each in given]
            output = model(*leaves, **options)
            kept += [output, *torch.autograd.grad(output.square().sum(), [*leaves, *self.model.parameters()])]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "training"), [(name, name in TRAINED) for name in MASKS])
def test_a_mask_is_compiled_once_whatever_it_holds(name: str, *, training: bool) -> None:
    counted = Counted(layer(num_kv_heads=2), backend="aot_eager" if training else "eager")
    for _ in range(2):
        counted.assert_same(torch.randn(BATCH, QUERIES, EMBED), mask=MASKS[name](), training=training)
    assert counted.times == 1


def test_padded_batches_of_any_lengths_are_compiled_once_and_nan_in_padding_is_left_out() -> None:
    """Training; batches of other sizes, below, are padded too, and are read without gradients."""
    counted = Counted(layer())
    for lengths in (torch.tensor((7, 4, 0)), torch.tensor((1, 2, 3)), torch.tensor((7, 7, 7))):
        x = torch.randn(BATCH, QUERIES, EMBED)
        x[torch.arange(QUERIES) >= lengths[:, None]] = torch.nan
        counted.assert_same(x, lengths=lengths, mask=masks.Causal(), training=True)
    assert counted.times == 1


def test_cross_attention_with_padding_on_both_sides_is_compiled_once() -> None:
    counted = Counted(layer())
    for _ in range(2):
        x, memory = torch.randn(BATCH, QUERIES, EMBED), torch.randn(BATCH, KEYS, EMBED)
        lengths, memory_lengths = drawn(QUERIES, BATCH), drawn(KEYS, BATCH)
        counted.assert_same(x, memory, lengths=lengths, memory_lengths=memory_lengths, training=True)
    assert counted.times == 1


def test_batches_of_other_sizes_are_compiled_once_more_and_then_never_again() -> None:
    counted = Counted(layer(), backend="eager")  # Dynamo decides it, before a backend has the graph
    for batch, length in ((3, 7), (4, 9), (6, 8)):
        counted.assert_same(torch.randn(batch, length, EMBED), lengths=drawn(length, batch), mask=masks.Causal())
        expected = 1 if (batch, length) == (3, 7) else 2
        assert counted.times <= expected


def test_a_bias_and_a_mask_that_is_no_interval_go_through_a_graph() -> None:
    counted = Counted(layer())
    for _ in range(2):
        x, bias = torch.randn(BATCH, QUERIES, EMBED), torch.randn(1, 4, QUERIES, QUERIES)
        counted.assert_same(x, bias=bias, mask=MASKS["keep"](), training=True)
    assert counted.times == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_are_compiled_too(dtype: torch.dtype) -> None:
    """A graph may have another kernel than the layer alone: in float16 they differ by a rounding."""
    ours, x = layer(dtype=dtype), torch.randn(BATCH, QUERIES, EMBED, dtype=dtype)
    with torch.no_grad():
        found = torch.compile(ours, backend="aot_eager", fullgraph=True)(x, mask=masks.Causal())
    assert found.dtype == dtype
    torch.testing.assert_close(found, ours(x, mask=masks.Causal()), rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_autocast_holds_inside_a_graph() -> None:
    counted = Counted(layer())
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        x = torch.randn(BATCH, QUERIES, EMBED)
        assert counted.compiled(x, mask=masks.Causal()).dtype == torch.bfloat16
        counted.assert_same(x, mask=masks.Causal())


def test_inductor_trains_a_block_on_padded_batches() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attend, self.wide = nn.LayerNorm(EMBED), layer(), nn.Linear(EMBED, EMBED)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x = x + self.attend(self.norm(x), lengths=lengths, mask=masks.Causal())
            return x + self.wide(x).relu()  # type: ignore[no-any-return]

    model = Block()
    counted = Counted(model, backend="inductor")
    for lengths in ((7, 4, 0), (1, 2, 3)):
        x = torch.randn(BATCH, QUERIES, EMBED)
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        output, expected = counted.compiled(leaf, torch.tensor(lengths)), model(other, torch.tensor(lengths))
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        found = torch.autograd.grad(output.square().sum(), [leaf, *model.parameters()])
        exact = torch.autograd.grad(expected.square().sum(), [other, *model.parameters()])
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    assert counted.times == 1


def test_the_function_itself_is_compiled_with_its_logsumexp() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return mh.attention_with_logsumexp(q, k, v, mask=masks.Lengths(lengths), query_start="end")

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    torch.testing.assert_close(compiled(q, k, v, torch.tensor((9, 0))), both(q, k, v, torch.tensor((9, 0))))


def test_a_strict_context_holds_while_a_graph_is_made() -> None:
    """Dynamo wraps what is raised while it traces, and repeats its sentence."""
    compiled = torch.compile(layer(dtype=torch.float64), backend="aot_eager", fullgraph=True)
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    with mh.strict(), pytest.raises(InternalTorchDynamoError, match=r"^SlowPathError: The reference kernel would run"):
        compiled(x, mask=masks.Causal())


def test_a_watched_model_that_is_compiled_is_watched() -> None:
    ours = layer()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = torch.randn(BATCH, QUERIES, EMBED)
    before = compiled(x, mask=masks.Causal())
    with mh.observe(compiled) as seen:
        compiled(x, mask=masks.Causal())
    assert seen.layers[0].num_samples == BATCH
    torch.testing.assert_close(compiled(x, mask=masks.Causal()), before)
