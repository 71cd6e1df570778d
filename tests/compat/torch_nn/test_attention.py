"""The drop-in against nn.MultiheadAttention: every argument, every gradient, and where the contract differs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from multihead.compat.torch_nn import MultiheadAttention
from multihead.errors import ArgumentError, DtypeError, MultiheadError, ShapeError
from multihead.kernels.call import listen

BUDGET = {torch.float32: 2e-5, torch.float64: 1e-10}
MASKS = ("none", "bool", "float", "hiding float", "bool 3-D", "float 3-D", "causal", "causal, hinted")


@dataclass(frozen=True)
class Call:
    """Options of a layer and of its call."""

    heads: int
    head_dim: int
    batch: int
    queries: int
    keys: int
    bias: bool
    add_bias_kv: bool
    add_zero_attn: bool
    widths: tuple[int | None, int | None]
    batch_first: bool
    batched: bool
    inputs: str
    attn_mask: str
    padding: str
    need_weights: bool
    average: bool
    training: bool
    dtype: torch.dtype

    @property
    def layer(self) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
        options: dict[str, Any] = {"bias": self.bias, "add_bias_kv": self.add_bias_kv, "dtype": self.dtype}
        options |= {"add_zero_attn": self.add_zero_attn, "batch_first": self.batch_first}
        if self.inputs != "self":
            of_values = self.widths[0] if self.inputs == "key = value" else self.widths[1]
            options |= {"kdim": self.widths[0], "vdim": of_values}
        theirs = nn.MultiheadAttention(self.heads * self.head_dim, self.heads, **options).train(self.training)
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.3)
        ours = MultiheadAttention(self.heads * self.head_dim, self.heads, **options).train(self.training)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    def tokens(self, length: int, width: int) -> Tensor:
        size = (length,) if not self.batched else (self.batch, length) if self.batch_first else (length, self.batch)
        return torch.randn(*size, width, dtype=self.dtype)

    def masks(self) -> dict[str, Any]:
        """Draw masks with which every query sees at least the first key."""
        batch, keys = self.batch if self.batched else 1, self.keys if self.inputs != "self" else self.queries
        shape = (batch * self.heads, self.queries, keys) if "3-D" in self.attn_mask else (self.queries, keys)
        hidden = torch.rand(shape) < 0.4
        if "causal" in self.attn_mask:
            hidden = torch.ones(shape, dtype=torch.bool).triu(1)
        hidden[..., 0] = False
        added = torch.randn(shape, dtype=self.dtype).masked_fill(hidden, -torch.inf)
        if self.attn_mask == "hiding float":
            added = torch.zeros(shape, dtype=self.dtype).masked_fill(hidden, -torch.inf)
        given: dict[str, Any] = {"attn_mask": added if "float" in self.attn_mask else hidden}
        if self.attn_mask == "none":
            given = {}
        # With is_causal and without need_weights, the original hides the added keys too.
        given["is_causal"] = "hinted" in self.attn_mask and not (self.add_bias_kv or self.add_zero_attn)
        behind = torch.arange(keys) >= torch.randint(1, keys + 1, (batch, 1))
        scattered = torch.rand(batch, keys) < 0.3
        scattered[:, 0] = False
        padding = {"lengths": behind, "scattered": scattered, "float": torch.randn(batch, keys, dtype=self.dtype)}
        if self.padding in padding:
            of_keys = padding[self.padding]
            if "float" in self.attn_mask and of_keys.dtype == torch.bool:  # the original wants one dtype for both
                of_keys = torch.zeros(batch, keys, dtype=self.dtype).masked_fill(of_keys, -torch.inf)
            elif self.attn_mask != "none" and "float" not in self.attn_mask and of_keys.is_floating_point():
                of_keys = scattered
            given["key_padding_mask"] = of_keys if self.batched else of_keys[0]
        return given


calls = st.builds(
    Call,
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    batch=st.integers(1, 3),
    queries=st.integers(1, 6),
    keys=st.integers(1, 7),
    bias=st.booleans(),
    add_bias_kv=st.booleans(),
    add_zero_attn=st.booleans(),
    widths=st.sampled_from([(None, None), (None, 5), (4, None), (4, 5)]),
    batch_first=st.booleans(),
    batched=st.booleans(),
    inputs=st.sampled_from(["self", "key = value", "three"]),
    attn_mask=st.sampled_from(MASKS),
    padding=st.sampled_from(["none", "lengths", "scattered", "float"]),
    need_weights=st.booleans(),
    average=st.booleans(),
    training=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)


def inputs_of(call: Call, layer: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """Draw query, key and value, the same tensor for several of them if the call has it so."""
    query = call.tokens(call.queries, layer.embed_dim)
    if call.inputs == "self":
        return query, query, query
    key = call.tokens(call.keys, layer.kdim or 0)
    return query, key, key if call.inputs == "key = value" else call.tokens(call.keys, layer.vdim or 0)


def run(layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...], call: Call) -> list[Tensor]:
    """Return output, weights, and all gradients of a loss of both."""
    torch.manual_seed(1)
    given = call.masks()
    distinct = {id(tensor): tensor.clone().requires_grad_() for tensor in inputs}
    added = given.get("attn_mask")
    if added is not None and added.is_floating_point() and call.attn_mask.startswith("float"):
        distinct[0] = added.requires_grad_()
    output, weights = layer(
        *(distinct[id(tensor)] for tensor in inputs),
        need_weights=call.need_weights,
        average_attn_weights=call.average,
        **given,
    )
    assert (weights is not None) == call.need_weights
    results = [output] if weights is None else [output, weights]
    sum(((tensor * torch.randn(tensor.shape)).sum() for tensor in results), torch.zeros(())).backward()
    leaves = [*layer.parameters(), *distinct.values()]
    gradients = [torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [tensor.detach() for tensor in results] + gradients


@given(calls, st.integers(0, 2**31))
@settings(max_examples=50)
def test_outputs_weights_and_gradients_are_the_originals(call: Call, seed: int) -> None:
    torch.manual_seed(seed)
    theirs, ours = call.layer
    inputs = inputs_of(call, theirs)
    for actual, expected in zip(run(ours, inputs, call), run(theirs, inputs, call), strict=True):
        budget = BUDGET[call.dtype] * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0, atol=budget)


@given(calls, st.integers(0, 2**31))
@settings(max_examples=40)
def test_without_gradients_they_are_too_and_need_weights_changes_rounding_only(call: Call, seed: int) -> None:
    torch.manual_seed(seed)
    theirs, ours = call.layer
    inputs, given = inputs_of(call, theirs), call.masks()
    with torch.no_grad():
        expected = theirs(*inputs, average_attn_weights=call.average, **given)
        actual = ours(*inputs, average_attn_weights=call.average, **given)
        alone = ours(*inputs, need_weights=False, **given)
    for mine, original in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, original, rtol=0, atol=BUDGET[call.dtype])
    assert alone[1] is None
    torch.testing.assert_close(alone[0], actual[0], rtol=0, atol=BUDGET[call.dtype])


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 5}, {"vdim": 7, "add_bias_kv": True}, {"add_bias_kv": True}, {"batch_first": True}],
)
def test_a_seed_makes_the_same_parameters_under_the_same_names(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(12, 3, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(12, 3, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    assert isinstance(ours, nn.MultiheadAttention)


def test_arguments_are_in_the_originals_order() -> None:
    given = (12, 3, 0.25, False, True, True, 5, 7, True, "cpu", torch.float64)
    theirs, ours = nn.MultiheadAttention(*given), MultiheadAttention(*given)
    public = {name: value for name, value in vars(theirs).items() if not name.startswith("_")}
    assert {name: vars(ours)[name] for name in public} == public
    assert {name: tensor.dtype for name, tensor in ours.named_parameters()} == {
        name: tensor.dtype for name, tensor in theirs.named_parameters()
    }
    x = torch.randn(2, 4, 12, dtype=torch.float64)
    memory = torch.randn(2, 6, 5, dtype=torch.float64), torch.randn(2, 6, 7, dtype=torch.float64)
    padding, hidden = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(4, 6, dtype=torch.bool)
    ours.eval().load_state_dict(theirs.eval().state_dict())
    expected = theirs(x, *memory, padding, True, hidden, False, False)
    for mine, original in zip(ours(x, *memory, padding, True, hidden, False, False), expected, strict=True):
        torch.testing.assert_close(mine, original, rtol=0, atol=1e-10)


def pair(
    *, num_heads: int = 3, batch_first: bool = True, **options: Any
) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Make both layers with the same weights, biases not zero."""
    theirs = nn.MultiheadAttention(12, num_heads, batch_first=batch_first, **options)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = MultiheadAttention(12, num_heads, batch_first=batch_first, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("average", [False, True])
def test_dropout_falls_as_in_the_original_and_the_weights_are_those_after_it(*, average: bool) -> None:
    theirs, ours = pair(dropout=0.4)
    x, results = torch.randn(2, 5, 12, requires_grad=True), []
    for layer in (theirs, ours):
        torch.manual_seed(5)
        output, weights = layer(x, x, x, average_attn_weights=average)
        (gradient,) = torch.autograd.grad((output.sum() + (weights**2).sum()), x)
        results.append((output, weights, gradient, torch.rand(1)))
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    torch.manual_seed(5)
    assert torch.equal(ours(x, x, x, need_weights=False)[0], results[1][0])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_query_that_sees_no_key_gets_the_output_projections_bias_and_weights_of_zero(
    *, need_weights: bool, training: bool
) -> None:
    _, ours = pair()
    x = torch.randn(2, 4, 12, requires_grad=True)
    padding = torch.tensor([[True] * 4, [False] * 4])
    output, weights = ours.train(training)(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    assert torch.equal(output[0], ours.out_proj.bias.expand(4, -1))
    if weights is not None:
        assert (weights[0] == 0).all()
        torch.testing.assert_close(weights[1].sum(-1), torch.ones(4))
    (output.sum() + (0 if weights is None else (weights**2).sum())).backward()
    for leaf in (x, *ours.parameters()):
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_nan_in_a_hidden_token_has_no_effect(*, cross: bool, as_float: bool, batch_first: bool) -> None:
    ours = MultiheadAttention(12, 3, batch_first=batch_first)
    padding = torch.tensor([[False, False, True, False], [False, True, True, True]])
    added = torch.zeros(2, 4).masked_fill(padding, -torch.inf) if as_float else padding
    x, memory = torch.randn(2, 4, 12), torch.randn(2, 4, 12)
    restore_nan = (memory if cross else x).masked_fill(padding[..., None], torch.nan)
    results = []
    for clean in (restore_nan, restore_nan.nan_to_num(0)):
        key = clean if batch_first else clean.transpose(0, 1)
        query = (x if batch_first else x.transpose(0, 1)) if cross else key
        ours.zero_grad()
        output, weights = ours(query, key, key, key_padding_mask=added)
        output.sum().backward()
        results.append([output, weights, *(parameter.grad.clone() for parameter in ours.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_nan_in_one_hidden_token_does_not_change_the_output_of_another() -> None:
    """A hidden token is a query too: only one that is not finite is replaced by 0."""
    _, ours = pair()
    x, hidden = torch.randn(2, 5, 12), torch.arange(5) >= torch.tensor([[3], [4]])
    expected, _ = ours(x, x, x, hidden)
    x[1, 4] = torch.nan
    actual, _ = ours(x, x, x, hidden)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(actual[1, :4], expected[1, :4], rtol=0, atol=2e-6)
    assert torch.isfinite(actual).all()


def test_a_bias_of_another_dtype_is_added_as_by_the_original() -> None:
    theirs, ours = (layer.double() for layer in pair())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for layer in (theirs, ours):
        layer.in_proj_bias = nn.Parameter(layer.in_proj_bias.detach().half())
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x), rtol=0, atol=1e-10)


def test_an_encoder_with_drop_ins_is_compiled_as_one_graph_with_padding() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 24, 0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(12, 3, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x, hidden = torch.randn(2, 5, 12), torch.arange(5) >= torch.tensor([[3], [4]])
    with torch.no_grad():
        actual = compiled(x, src_key_padding_mask=hidden)
        torch.testing.assert_close(actual, model(x, src_key_padding_mask=hidden), rtol=0, atol=2e-5)


def test_hooks_on_the_output_projection_fire_and_listeners_receive_the_layer_itself() -> None:
    heard: list[Any] = []

    class Ear:
        requested_statistics: frozenset[str] = frozenset()

        def receive(self, call: Any) -> None:
            heard.append(call)

    _, ours = pair()
    shapes: list[torch.Size] = []
    ours.out_proj.register_forward_hook(lambda module, given, output: shapes.append(output.shape))
    x = torch.randn(2, 5, 12)
    with listen(Ear()):
        ours(x, x, x)
        ours.eval().requires_grad_(False)(x, x, x)
    assert [call.request.origin.layer for call in heard] == [ours, ours]
    assert shapes == [(2, 5, 12)] * 2
    weights = (heard[1].request.q @ heard[1].request.k.mT / 2 - heard[1].result.logsumexp[..., None]).exp()
    torch.testing.assert_close(weights.mean(1), ours(x, x, x)[1])


def test_autocast_has_the_originals_dtypes_and_values() -> None:
    theirs, ours = pair(add_bias_kv=True)
    x = torch.randn(2, 5, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = theirs(x, x, x), ours(x, x, x)
    assert actual[0].dtype == expected[0].dtype
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0.05)


def layer_and_tokens() -> tuple[MultiheadAttention, Tensor]:
    return MultiheadAttention(12, 3, batch_first=True), torch.zeros(2, 5, 12)


REFUSED: dict[str, tuple[Any, type[MultiheadError], str]] = {
    "heads": (
        lambda layer, x: MultiheadAttention(12, 5),
        ArgumentError,
        (
            "embed_dim is 12, and 5 heads do not divide it. "
            "Give 1, 2, 3, 4, 6 or 12 heads, or a width that is a multiple of 5."
        ),
    ),
    "dropout": (
        lambda layer, x: MultiheadAttention(12, 3, 1.5),
        ArgumentError,
        "dropout is 1.5. Give a number from 0 to 1.",
    ),
    "width": (
        lambda layer, x: layer(x, x[..., :5], x),
        ShapeError,
        "key has shape (2, 5, 5). Give (batch, length, features), or (length, features) unbatched, with 12 features.",
    ),
    "one unbatched": (
        lambda layer, x: layer(x, x[0], x),
        ShapeError,
        "query has 3 dimensions and key has 2. Give all three a batch dimension, or none of them.",
    ),
    "dtype": (
        lambda layer, x: layer(x.double(), x, x),
        DtypeError,
        (
            "query has dtype torch.float64, and the layer has torch.float32. "
            "Convert one of them, for example query.to(torch.float32)."
        ),
    ),
    "values": (
        lambda layer, x: layer(x, x, x[:, :4]),
        ShapeError,
        "key has shape (2, 5, 12) and value has (2, 4, 12). Give one value per key.",
    ),
    "batch": (
        lambda layer, x: layer(x, x[:1], x[:1]),
        ShapeError,
        (
            "query has 2 samples and key has 1: with batch_first=True inputs are (batch, length, features). "
            "Give both the same batch size, or construct the layer with batch_first=False."
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_rejected_with_a_whole_sentence(name: str) -> None:
    call, error, sentence = REFUSED[name]
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        call(*layer_and_tokens())
