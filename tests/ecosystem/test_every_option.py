"""Every option of the layer goes through what the other tests of this folder try with a plain one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

import multihead as mh
from multihead import masks, scores
from tests.ecosystem.ways import BATCH, EMBED, HEADS, LENGTHS, QUERIES, layer

# Options of different steps of the layer share a case: each is one step, which runs whatever the others are, and a case
# has one of each step. Added keys exclude a position bias.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "rotary, softcap, T5's bias, sinks and gates": lambda: {
        "rotary": mh.Rotary(),
        "num_kv_heads": 2,
        "softcap": 5.0,
        "position_bias": scores.T5Bias(HEADS, both_ways=True),
        "sinks": True,
        "head_gates": True,
    },
    "a part turned, norms, ALiBi": lambda: {
        "rotary": mh.Rotary(dim=4, interleaved=True),
        "qk_norm": mh.QKNorm("rms"),
        "position_bias": scores.ALiBi(HEADS),
    },
    "norms of length, a learned bias": lambda: {
        "qk_norm": mh.QKNorm("l2"),
        "position_bias": scores.LearnedBias(HEADS, 20, 20),
    },
    "added keys, heads averaged": lambda: {
        "add_bias_kv": True,
        "add_zero_attn": True,
        "merge": "mean",
        "value_head_dim": 5,
        "output_projection": False,
    },
}
each_option = pytest.mark.parametrize("option", OPTIONS)


def made(option: str, **others: Any) -> mh.MultiHeadAttention:
    """Make a layer with an option whose learned numbers are none of the first ones, 0 and 1."""
    ours = layer(**OPTIONS[option](), **others)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return ours


def outcome(model: Callable[..., Tensor], ours: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Run forward and backward: the output, and the gradients of x and of what is learned."""
    leaf = x.detach().clone().requires_grad_()
    output = model(leaf, **options)
    return [output, *torch.autograd.grad(output.square().sum(), [leaf, *ours.parameters()], materialize_grads=True)]


def tokens() -> Tensor:
    return torch.randn(BATCH, QUERIES, EMBED)


@each_option
def test_copies_give_bit_for_bit_the_same(option: str, tmp_path: Path) -> None:
    ours, x = made(option), tokens()
    expected = ours(x, lengths=LENGTHS, mask=masks.Causal())
    save_model(ours, str(tmp_path / "model.safetensors"))
    loaded = made(option)
    assert load_model(loaded, tmp_path / "model.safetensors") == (set(), [])
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded):
        assert torch.equal(again(x, lengths=LENGTHS, mask=masks.Causal()), expected)


@each_option
def test_under_autocast_the_output_is_half_and_near(option: str) -> None:
    ours, x = made(option), tokens()
    expected = ours(x, lengths=LENGTHS, mask=masks.Causal())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours(x, lengths=LENGTHS, mask=masks.Causal())
        found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert {each.dtype for each in ours.parameters()} == {torch.float32}
    # Half precision turns a score of 10 by 0.04, and a weight by as much of itself.
    allowed = 0.06 * max(1.0, float(expected.detach().abs().max()))
    assert float((found.float() - expected).detach().abs().max()) <= allowed


@each_option
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_moved_to_another_dtype_it_computes_in_it(option: str, dtype: torch.dtype) -> None:
    ours, x = made(option), tokens()
    expected = copy.deepcopy(ours).double()(x.double(), lengths=LENGTHS)
    found = ours.to(dtype)(x.to(dtype), lengths=LENGTHS)
    assert found.dtype == dtype
    allowed = 0.06 if dtype == torch.bfloat16 else 1e-12
    assert float((found.double() - expected).detach().abs().max()) <= allowed * max(
        1.0, float(expected.detach().abs().max())
    )


@each_option
def test_checkpointed_its_gradients_are_bit_for_bit_the_same(option: str) -> None:
    ours, x = made(option), tokens()

    def run(x: Tensor, **options: Any) -> Tensor:
        return checkpoint(ours, x, use_reentrant=False, **options)  # type: ignore[no-any-return]

    expected = outcome(ours, ours, x, lengths=LENGTHS, mask=masks.Causal())
    found = outcome(run, ours, x, lengths=LENGTHS, mask=masks.Causal())
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


@each_option
def test_in_one_graph_it_gives_the_same_output_and_gradients(option: str) -> None:
    ours, x, lengths = made(option), tokens(), torch.tensor(LENGTHS)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)  # test_compile.py goes on from the graph
    expected = outcome(ours, ours, x, lengths=lengths, mask=masks.Causal())
    found = outcome(compiled, ours, x, lengths=lengths, mask=masks.Causal())
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


class Causal(nn.Module):
    """A layer with its mask inside."""

    def __init__(self, attend: mh.MultiHeadAttention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.attend(x, mask=masks.Causal() & masks.Lengths(lengths))  # type: ignore[no-any-return]


@each_option
def test_it_is_exported_for_any_batch_and_length(option: str) -> None:
    model = Causal(made(option)).eval()
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=16)
    shapes = {"x": {0: batch, 1: length}, "lengths": {0: batch}}
    again = torch.export.export(model, (tokens(), torch.tensor(LENGTHS)), dynamic_shapes=shapes).module()
    for count, long in ((3, 7), (2, 2), (5, 13)):
        x, lengths = torch.randn(count, long, EMBED), torch.randint(0, long + 1, (count,))
        torch.testing.assert_close(again(x, lengths), model(x, lengths))


@each_option
def test_made_without_memory_it_is_given_some_and_drawn_anew(option: str) -> None:
    with torch.device("meta"):
        ours = mh.MultiHeadAttention(EMBED, HEADS, **OPTIONS[option]())
    assert all(each.is_meta for each in ours.parameters())
    assert ours(tokens().to("meta")).shape[:2] == (BATCH, QUERIES)
    ours.to_empty(device="cpu")
    ours.reset_parameters()
    if ours.position_bias is not None:
        ours.position_bias.reset_parameters()  # type: ignore[operator]
    x = tokens()
    assert ours(x).isfinite().all()
    full = made(option)
    ours.load_state_dict(full.state_dict())
    assert torch.equal(ours(x), full(x))


@each_option
def test_its_parameters_can_be_the_callers(option: str) -> None:
    ours, x = made(option), tokens()
    state = {name: torch.randn_like(each) for name, each in ours.named_parameters()}
    found = functional_call(ours, state, (x,), {"lengths": LENGTHS})
    ours.load_state_dict(state, strict=False)
    assert torch.equal(found, ours(x, lengths=LENGTHS))


@each_option
def test_its_gradient_by_torch_func_is_that_of_autograd(option: str) -> None:
    ours, x = made(option, dtype=torch.float64), tokens().double()
    state = {name: each.detach() for name, each in ours.named_parameters()}
    found = grad(lambda state: functional_call(ours, state, (x,), {"mask": masks.Causal()}).square().sum())(state)
    output = ours(x, mask=masks.Causal())
    expected = torch.autograd.grad(output.square().sum(), list(ours.parameters()))
    torch.testing.assert_close(list(found.values()), list(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::multihead.errors.SlowPathWarning")
@each_option
def test_its_second_derivative_is_that_of_finite_differences(option: str) -> None:
    ours, x = made(option, dtype=torch.float64), tokens().double()[:1, :3].requires_grad_()
    first = torch.autograd.grad(ours(x).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), x)[0]
    along = torch.randn_like(x)
    sides = []
    for step in (1e-5, -1e-5):
        leaf = (x.detach() + step * along).requires_grad_()
        sides.append(torch.autograd.grad(ours(leaf).sum(), leaf)[0].square().sum())
    expected = (sides[0] - sides[1]) / 2e-5
    torch.testing.assert_close((second * along).sum(), expected, rtol=1e-5, atol=1e-6)


@each_option
def test_it_is_watched(option: str) -> None:
    ours, x = made(option), tokens()
    alone = ours(x, lengths=LENGTHS, mask=masks.Causal())
    with mh.observe(ours) as seen:
        watched = ours(x, lengths=LENGTHS, mask=masks.Causal())
    assert torch.equal(alone, watched)
    sample = seen.layers[0].sample(0)
    entropy = -torch.xlogy(sample.weights(), sample.weights()).sum(-1)
    torch.testing.assert_close(sample.statistics["entropy"], entropy, atol=1e-5, rtol=1e-4)
