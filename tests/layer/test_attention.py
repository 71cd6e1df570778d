"""The layer against PyTorch's own, sample by sample, and in what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, DtypeError, MaskError, ShapeError
from multihead.kernels.call import listen
from multihead.kernels.native import short_call

EMBED, HEADS, BATCH, QUERIES, KEYS = 24, 4, 3, 7, 9
LENGTHS = (7, 4, 0)
MEMORY_LENGTHS = (5, 9, 2)
MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(3),
    "prefix": masks.Causal() | masks.Prefix((2, 4, 1)),
    "keep": masks.Keep(torch.tensor([[True, True, False, True, True, False, True]]), "batch keys"),
}


def layer_like(original: nn.MultiheadAttention) -> mh.MultiHeadAttention:
    """Make our layer with the weights of PyTorch's."""
    assert original.kdim is not None
    assert original.vdim is not None
    ours = mh.MultiHeadAttention(
        original.embed_dim, original.num_heads, key_dim=original.kdim, value_dim=original.vdim, dtype=torch.float64
    )
    if original.in_proj_weight is not None:
        weights = original.in_proj_weight.chunk(3)
    else:
        weights = (original.q_proj_weight, original.k_proj_weight, original.v_proj_weight)
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        for projection, weight, bias in zip(projections, weights, original.in_proj_bias.chunk(3), strict=True):
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
        assert ours.out_proj is not None
        ours.out_proj.load_state_dict(original.out_proj.state_dict())
    return ours


def original(**options: int) -> nn.MultiheadAttention:
    """Make PyTorch's layer in float64, with biases that are not zero."""
    made = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **options)
    nn.init.normal_(made.in_proj_bias)
    nn.init.normal_(made.out_proj.bias)
    return made


def floats(*size: int, grad: bool = False) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_pytorchs_layer(*, causal: bool) -> None:
    theirs, x = original(), floats(BATCH, QUERIES, EMBED)
    hidden = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1) if causal else None
    expected = theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
    actual = layer_like(theirs)(x, mask=masks.Causal() if causal else masks.Full())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_cross_attention_with_other_widths_equals_pytorchs_layer() -> None:
    theirs = original(kdim=10, vdim=11)
    x, memory, values = floats(BATCH, QUERIES, EMBED), floats(BATCH, KEYS, 10), floats(BATCH, KEYS, 11)
    padding = torch.arange(KEYS) >= torch.tensor(MEMORY_LENGTHS)[:, None]
    expected = theirs(x, memory, values, key_padding_mask=padding, need_weights=False)[0]
    ours = layer_like(theirs)
    by_mask = ours(x, memory, values, mask=masks.Lengths(MEMORY_LENGTHS))
    by_lengths = ours(x, memory, values, memory_lengths=MEMORY_LENGTHS)
    torch.testing.assert_close(by_mask, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(by_lengths, expected, rtol=0, atol=1e-12)


def test_gradients_equal_those_of_pytorchs_layer() -> None:
    theirs = original()
    ours = layer_like(theirs)
    x, y = floats(BATCH, QUERIES, EMBED, grad=True), floats(BATCH, QUERIES, EMBED)
    (theirs(x, x, x, need_weights=False)[0] * y).sum().backward()
    of_x, x.grad = x.grad, None
    (ours(x) * y).sum().backward()
    torch.testing.assert_close(x.grad, of_x, rtol=0, atol=1e-10)
    stacked = torch.cat([ours.q_proj.weight.grad, ours.k_proj.weight.grad, ours.v_proj.weight.grad])  # type: ignore[list-item]
    torch.testing.assert_close(stacked, theirs.in_proj_weight.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads", [{}, {"num_kv_heads": 2, "value_head_dim": 5}])
def test_a_padded_batch_is_its_samples_one_by_one_and_its_padding_is_zero(name: str, heads: dict[str, int]) -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS, dtype=torch.float64, **heads)  # type: ignore[arg-type]
    x = floats(BATCH, QUERIES, EMBED)
    output = layer(x, mask=MASKS[name], lengths=LENGTHS)
    for sample, length in enumerate(LENGTHS):
        mask = alone(MASKS[name], sample, length)
        expected = layer(x[sample : sample + 1, :length], mask=mask)
        torch.testing.assert_close(output[sample : sample + 1, :length], expected, rtol=0, atol=1e-12)
        assert (output[sample, length:] == 0).all()


def alone(mask: masks.Mask, sample: int, length: int) -> masks.Mask:
    """Say what a mask of the batch means for one sample of it, cut to its length."""
    if isinstance(mask, masks.Keep):
        return masks.Keep(mask.tensor[:, :length], "batch keys")
    if mask == MASKS["prefix"]:
        return masks.Causal() | masks.Prefix(min((2, 4, 1)[sample], length))
    return mask


@pytest.mark.parametrize("name", MASKS)
def test_nan_in_padding_is_as_if_it_were_zero_in_output_and_in_every_gradient(name: str) -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS, dtype=torch.float64)
    inside = torch.arange(QUERIES) < torch.tensor(LENGTHS)[:, None]
    x = floats(BATCH, QUERIES, EMBED)
    found = []
    for padding in (0.0, torch.nan, torch.inf):
        padded = x.masked_fill(~inside[..., None], padding).requires_grad_()
        output = layer(padded, mask=MASKS[name], lengths=LENGTHS)
        grads = torch.autograd.grad(output.square().sum(), [padded, *layer.parameters()])
        found.append([output, *grads])
    for other in found[1:]:
        for clean, restore_nan in zip(found[0], other, strict=True):
            assert torch.equal(clean, restore_nan)


def test_nan_in_padded_memory_reaches_neither_output_nor_parameters() -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS, key_dim=10, dtype=torch.float64)
    x, memory = floats(BATCH, QUERIES, EMBED), floats(BATCH, KEYS, 10)
    outside = torch.arange(KEYS) >= torch.tensor(MEMORY_LENGTHS)[:, None]
    output = layer(x, memory.masked_fill(outside[..., None], torch.nan), memory_lengths=MEMORY_LENGTHS)
    expected = layer(x, memory, mask=masks.Lengths(MEMORY_LENGTHS))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(output.sum(), list(layer.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


def test_queries_and_memory_may_both_be_padded() -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS, dtype=torch.float64)
    x, memory = floats(BATCH, QUERIES, EMBED), floats(BATCH, KEYS, EMBED)
    output = layer(x, memory, lengths=LENGTHS, memory_lengths=MEMORY_LENGTHS)
    for sample, (length, keys) in enumerate(zip(LENGTHS, MEMORY_LENGTHS, strict=True)):
        expected = layer(x[sample : sample + 1, :length], memory[sample : sample + 1, :keys])
        torch.testing.assert_close(output[sample : sample + 1, :length], expected, rtol=0, atol=1e-12)
        assert (output[sample, length:] == 0).all()


def test_lengths_as_a_tensor_are_lengths_as_ints() -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS)
    x = torch.randn(BATCH, QUERIES, EMBED)
    assert torch.equal(layer(x, lengths=torch.tensor(LENGTHS)), layer(x, lengths=LENGTHS))
    assert torch.equal(layer(x, memory_lengths=LENGTHS), layer(x, lengths=LENGTHS))


def test_a_batch_of_nothing_but_padding_is_zero() -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS)
    x = torch.full((2, 3, EMBED), torch.nan)
    output = layer(x, lengths=(0, 0))
    assert (output == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(output.sum(), list(layer.parameters())))


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads_equal_key_and_value_heads_that_are_repeated(num_kv_heads: int) -> None:
    grouped = mh.MultiHeadAttention(EMBED, HEADS, num_kv_heads=num_kv_heads, dtype=torch.float64)
    repeated = mh.MultiHeadAttention(EMBED, HEADS, dtype=torch.float64)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        heads = state[name].unflatten(0, (num_kv_heads, -1))
        state[name] = heads.repeat_interleave(HEADS // num_kv_heads, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    x = floats(BATCH, QUERIES, EMBED)
    torch.testing.assert_close(grouped(x), repeated(x), rtol=0, atol=1e-12)


def test_without_an_output_projection_the_merged_heads_are_the_output() -> None:
    x = torch.randn(1, 100, 24)
    concatenated = mh.MultiHeadAttention(24, 8, output_projection=False)
    averaged = mh.MultiHeadAttention(24, 8, output_projection=False, merge="mean")
    averaged.load_state_dict(concatenated.state_dict())
    assert concatenated.out_proj is None
    assert concatenated(x).shape == (1, 100, 24)
    assert averaged(x).shape == (1, 100, 3)
    torch.testing.assert_close(averaged(x), concatenated(x).unflatten(2, (8, 3)).mean(2))


def test_dropout_acts_in_training_only_and_repeats_for_a_seed() -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS, dropout=0.5)
    x = torch.randn(BATCH, QUERIES, EMBED)
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_hooks_on_all_four_projections_fire() -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS)
    fired: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: fired.append(name)

    for name, projection in layer.named_children():
        projection.register_forward_hook(note(name))
    layer(torch.randn(BATCH, QUERIES, EMBED), lengths=LENGTHS)
    assert fired == ["q_proj", "k_proj", "v_proj", "out_proj"]


@contextmanager
def hooked(kind: str, projection: nn.Module, note: Callable[..., None]) -> Iterator[None]:
    """Call `note` whenever a projection, or any module, runs."""
    register: dict[str, Any] = {
        "forward": projection.register_forward_hook,
        "before forward": projection.register_forward_pre_hook,
        "backward": projection.register_full_backward_hook,
        "before backward": projection.register_full_backward_pre_hook,
        "of all modules": register_module_forward_hook,
    }
    if kind in register:
        with register[kind](note):
            yield
    elif kind == "replaced forward":
        own = projection.forward
        projection.forward = lambda x: (note(), own(x))[1]
        yield
    else:
        plain = nn.Linear.forward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Linear, "forward", lambda self, x: (note(), plain(self, x))[1])
            yield


@pytest.mark.parametrize(
    "kind",
    [
        "forward",
        "before forward",
        "backward",
        "before backward",
        "of all modules",
        "replaced forward",
        "replaced forward of the class",
    ],
)
@pytest.mark.parametrize("name", ["q_proj", "out_proj"])
def test_whatever_hooks_into_a_projection_runs(kind: str, name: str) -> None:
    layer, x = mh.MultiHeadAttention(EMBED, HEADS), torch.randn(BATCH, QUERIES, EMBED, requires_grad=True)
    fired: list[str] = []
    plain = layer(x)
    with hooked(kind, getattr(layer, name), lambda *_: fired.append(kind)):
        hooked_output = layer(x)
        hooked_output.sum().backward()
    assert set(fired) == {kind}
    assert torch.equal(hooked_output, plain)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_listening_changes_no_bit_of_the_output(lengths: tuple[int, ...] | None) -> None:
    class Ear:
        requested_statistics = frozenset({"entropy"})
        owners: list[nn.Module | None] = []  # noqa: RUF012

        def receive(self, call: object) -> None:
            self.owners.append(call.request.origin.layer)  # type: ignore[attr-defined]

    layer, ear = mh.MultiHeadAttention(EMBED, HEADS), Ear()
    x = torch.randn(BATCH, QUERIES, EMBED)
    alone = layer(x, lengths=lengths)
    with listen(ear):
        heard = layer(x, lengths=lengths)
    assert torch.equal(alone, heard)
    assert ear.owners == [layer]


def test_bias_reaches_the_scores() -> None:
    theirs, x, bias = original(), floats(1, QUERIES, EMBED), floats(1, HEADS, QUERIES, QUERIES)
    expected = theirs(x, x, x, attn_mask=bias[0], need_weights=False)[0]
    torch.testing.assert_close(layer_like(theirs)(x, bias=bias), expected, rtol=0, atol=1e-12)


def test_the_layer_says_its_heads() -> None:
    assert "num_heads=4, head_dim=6, num_kv_heads=2, merge='mean', dropout=0.1" in repr(
        mh.MultiHeadAttention(24, 4, num_kv_heads=2, merge="mean", dropout=0.1)
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_heads": 5}, "embed_dim is 24, and 5 heads do not divide it."),
        ({"num_heads": 0}, "num_heads is 0. Give an integer of at least 1."),
        ({"embed_dim": -24}, "embed_dim is -24. Give an integer of at least 1."),
        ({"head_dim": 0}, "head_dim is 0. Give an integer of at least 1."),
        ({"dropout": 1.5}, "dropout is 1.5. Give a number from 0 to 1."),
        ({"dropout": -0.1}, "dropout is -0.1. Give a number from 0 to 1."),
        ({"merge": "sum"}, 'merge is \'sum\'. Give "concat" or "mean".'),
        (
            {"num_kv_heads": 3},
            (
                "num_kv_heads is 3, and num_heads is 4, which is not a multiple of it. "
                "Give one of 1, 2, 4 (grouped-query attention, arXiv:2305.13245)."
            ),
        ),
        (
            {"output_projection": False, "output_dim": 5},
            (
                "output_dim is 5, and without an output projection the merged heads are 24 wide. "
                "Leave output_dim out, or keep output_projection=True."
            ),
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_words(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}"):
        mh.MultiHeadAttention(**{"embed_dim": EMBED, "num_heads": HEADS, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "arguments", "options", "sentence"),
    [
        (
            ShapeError,
            (torch.zeros(3, 7, 5),),
            {},
            "x has shape (3, 7, 5). Give (batch, length, features) with 24 features.",
        ),
        (
            DtypeError,
            (torch.zeros(3, 7, 24, dtype=torch.float64),),
            {},
            (
                "x has dtype torch.float64, and the layer has torch.float32. "
                "Convert one of them, for example x.to(torch.float32)."
            ),
        ),
        (
            ShapeError,
            (torch.zeros(3, 7, 24), torch.zeros(2, 9, 24)),
            {},
            "x has 3 samples and memory has 2. Give both the same batch.",
        ),
        (
            ShapeError,
            (torch.zeros(3, 7, 24), torch.zeros(3, 9, 24), torch.zeros(3, 8, 24)),
            {},
            "memory has 9 keys and values has 8. Give one value per key.",
        ),
        (
            ArgumentError,
            (torch.zeros(3, 7, 24),),
            {"lengths": (7, 8, 1)},
            "lengths holds 8, and the batch is padded to 7 tokens. Give lengths from 0 to 7.",
        ),
        (
            ArgumentError,
            (torch.zeros(3, 7, 24),),
            {"lengths": (7, -1, 1)},
            "lengths holds -1, and the batch is padded to 7 tokens. Give lengths from 0 to 7.",
        ),
        (
            ShapeError,
            (torch.zeros(3, 7, 24),),
            {"lengths": (7, 1)},
            "lengths has shape (2,), and the batch has 3 samples. Give one length per sample: shape (3,).",
        ),
        (
            ArgumentError,
            (torch.zeros(3, 7, 24),),
            {"lengths": (1, 2, 3), "memory_lengths": (1, 2, 3)},
            (
                "lengths and memory_lengths are both given, and there is no memory. "
                "Give lengths alone: in self-attention they are those of queries and keys."
            ),
        ),
        (
            MaskError,
            (torch.zeros(3, 7, 24),),
            {"mask": torch.ones(7, 7, dtype=torch.bool)},
            (
                "mask is a torch.bool tensor of shape (7, 7), and the meaning of its values is ambiguous. "
                "Give masks.Keep(t) if True = visible, masks.Drop(t) if True = hidden, or "
                "bias=t if it is added to scores."
            ),
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_words(
    error: type[Exception], arguments: tuple[Tensor, ...], options: dict[str, object], sentence: str
) -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS)
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        layer(*arguments, **options)


def test_a_layer_for_other_keys_asks_for_its_memory() -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS, key_dim=10)
    sentence = (
        "There is no memory, and the layer's keys are projected from 10 features, its queries from 24. "
        "Give memory: layer(x, memory)."
    )
    with pytest.raises(ShapeError, match=f"^{re.escape(sentence)}$"):
        layer(torch.zeros(3, 7, EMBED))


# Dynamo looks at .grad of what passes between its two graphs, and silences its own warning only where it may.
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_layer_gives_what_the_layer_gives() -> None:
    """Cells and padding; tests/ecosystem/test_compile.py has masks without padding, and an interval with it."""
    layer = mh.MultiHeadAttention(EMBED, HEADS, num_kv_heads=2)
    x = torch.randn(BATCH, QUERIES, EMBED)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    padded = compiled(x, mask=MASKS["keep"], lengths=torch.tensor(LENGTHS))
    torch.testing.assert_close(padded, layer(x, mask=MASKS["keep"], lengths=LENGTHS))


@pytest.mark.parametrize("queries", [2, 5])
def test_the_end_of_fewer_keys_than_queries_stands_before_the_first_query(queries: int) -> None:
    layer = mh.MultiHeadAttention(EMBED, HEADS, dtype=torch.float64)
    x, memory = floats(BATCH, queries, EMBED), floats(BATCH, 2, EMBED)
    output = layer(x, memory, mask=masks.Causal(), query_start="end")
    seen = torch.arange(2) <= torch.arange(2 - queries, 2)[:, None]
    expected = layer(x, memory, mask=masks.Keep(seen, "queries keys"))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_a_request_has_an_origin_only_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, requests = mh.MultiHeadAttention(12, 3), []
    build = layer._request_of
    monkeypatch.setattr(
        layer, "_request_of", lambda *of, **more: (requests.append(build(*of, **more)), requests[-1])[1]
    )
    x = torch.randn(2, 5, 12)
    layer(x, lengths=(5, 2))
    with mh.observe(layer):
        layer(x, lengths=(5, 2))
    assert requests[0].origin is None
    assert requests[1].origin.layer is layer
    assert requests[1].origin.input_places.index.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_explaining_a_call_leaves_its_cache_and_rejects_unknown_arguments() -> None:
    layer, cache, x = mh.MultiHeadAttention(12, 3), mh.KeyValueCache(), torch.randn(2, 5, 12)
    layer(x, cache=cache, mask=masks.Causal())
    assert layer.explain(x, cache=cache, mask=masks.Causal()).kernel == layer.explain(x).kernel
    assert cache.length == 5
    with pytest.raises(ArgumentError):
        layer.explain(x, is_causal=True)
    assert layer(x).shape == x.shape


def test_explaining_a_call_stops_before_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = mh.MultiHeadAttention(12, 3, head_gates=True), torch.randn(2, 5, 12)
    projected: list[str] = []
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: projected.append(name))
    monkeypatch.setattr(short_call, "attend", lambda *_: pytest.fail("the attention was computed"))
    layer.explain(x, lengths=(5, 2))
    assert projected == ["q_proj", "k_proj", "v_proj"]


def test_explaining_a_call_rejects_what_is_no_cache() -> None:
    with pytest.raises(ArgumentError) as refusal:
        mh.MultiHeadAttention(12, 3).explain(torch.randn(2, 5, 12), cache={})
    assert str(refusal.value) == "cache is a dict. Give a KeyValueCache() of this layer's own, the same in every call."
