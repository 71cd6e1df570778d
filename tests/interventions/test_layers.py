"""Changed heads of this library's layers and of the drop-ins are those of attention that is written out, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import multihead as mh
from multihead import masks
from multihead.compat import annotated, d2l, per_head, torch_nn
from tests.interventions.changed_layers import Change, attend_by_hand, parts_of, scaled, unchanged

LENGTHS, LONGEST, CAUSAL = (7, 4, 1), 7, masks.Causal()


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def texts() -> list[Tensor]:
    return [torch.randn(length, 8, dtype=torch.float64) for length in LENGTHS]


class Causal(nn.Module):
    """Two causal layers of this library, one with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mh.MultiHeadAttention(8, 4, num_kv_heads=2), mh.MultiHeadAttention(8, 2)])
        self.double()

    def forward(self, x: Tensor, caches: Any = (None, None), mask: masks.Mask = CAUSAL, **padding: Any) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, mask=mask, cache=cache, **padding)
        return x

    def by_hand(self, x: Tensor, first: Change, second: Change) -> Tensor:
        for layer, change in zip(self.layers, (first, second), strict=True):
            x = x + attend_by_hand(layer, x, change, causal=True)[0]
        return x


def in_a_padded_batch(model: Causal, batch: list[Tensor], side: str) -> list[Tensor]:
    x = torch.zeros(len(batch), LONGEST, 8, dtype=torch.float64)
    places = [slice(0, n) if side == "right" else slice(LONGEST - n, None) for n in map(len, batch)]
    for row, (place, text) in enumerate(zip(places, batch, strict=True)):
        x[row, place] = text
    output = model(x, lengths=LENGTHS, padding_side=side)
    return [output[row, place] for row, place in enumerate(places)]


def in_one_row(model: Causal, batch: list[Tensor]) -> list[Tensor]:
    x, packing = mh.pack(nn.utils.rnn.pad_sequence(batch, batch_first=True), LENGTHS)
    return list(model(x, packing=packing)[0].split(LENGTHS))


def in_steps(model: Causal, batch: list[Tensor], **options: Any) -> list[Tensor]:
    """All texts with one cache per layer; a step has up to 3 tokens of each text, and of some texts none."""
    caches, found = [mh.KeyValueCache(**options) for _ in model.layers], [text[:0] for text in batch]
    for start in range(0, LONGEST, 3):
        parts = [text[start : start + 3] for text in batch]
        step = model(
            nn.utils.rnn.pad_sequence(parts, batch_first=True), caches=caches, lengths=[len(part) for part in parts]
        )
        found = [torch.cat([done, step[row, : len(parts[row])]]) for row, done in enumerate(found)]
    return found


def token_by_token(model: Causal, batch: list[Tensor]) -> list[Tensor]:
    found = []
    for text in batch:
        caches = [mh.KeyValueCache() for _ in model.layers]
        found.append(torch.cat([model(token[None, None], caches=caches)[0] for token in text]))
    return found


def as_documents(model: Causal, batch: list[Tensor]) -> list[Tensor]:
    """The last text is alone in a second row, and both rows have a token more, which is in no text."""
    rows = [torch.cat([*batch[:-1], torch.ones(1, 8)]), torch.cat([batch[-1], torch.ones(1, 8)])]
    mask = masks.Causal() & masks.Documents((LENGTHS[:-1], LENGTHS[-1:]))
    output = model(nn.utils.rnn.pad_sequence(rows, batch_first=True), mask=mask)
    first = list(output[0, : sum(LENGTHS[:-1])].split(LENGTHS[:-1]))
    return [*first, output[1, : LENGTHS[-1]]]


def as_documents_in_steps(model: Causal, batch: list[Tensor]) -> list[Tensor]:
    row, mask, caches = torch.cat(batch)[None], masks.Causal() & masks.Documents(LENGTHS), _caches(model)
    steps = [model(part, caches=caches, mask=mask) for part in row.split(3, 1)]
    return list(torch.cat(steps, 1)[0].split(LENGTHS))


def _caches(model: Causal) -> list[mh.KeyValueCache]:
    return [mh.KeyValueCache() for _ in model.layers]


WAYS: dict[str, Callable[[Causal, list[Tensor]], list[Tensor]]] = {
    "alone": lambda model, batch: [model(text[None])[0] for text in batch],
    "right padding": lambda model, batch: in_a_padded_batch(model, batch, "right"),
    "left padding": lambda model, batch: in_a_padded_batch(model, batch, "left"),
    "packed": in_one_row,
    "documents": as_documents,
    "documents in steps": as_documents_in_steps,
    "in steps": in_steps,
    "in steps with a capacity": lambda model, batch: in_steps(model, batch, capacity=9),
    "token by token": token_by_token,
}
POSITIONS: dict[str, tuple[Any, Any]] = {
    "all": (None, slice(None)),
    "the first": (0, [0]),
    "a list": ([4, 0, 4], [0, 4]),
    "a slice": (slice(1, 6, 2), slice(1, 6, 2)),
    "a range": (range(3, 5), [3, 4]),
    "all but the first": (slice(1, None), slice(1, None)),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("way", WAYS)
def test_positions_are_those_of_each_text_however_the_texts_are_batched(way: str, positions: str) -> None:
    model, batch = Causal(), texts()
    given, by_hand = POSITIONS[positions]

    def at(text: Tensor) -> Any:
        return by_hand if isinstance(by_hand, slice) else [each for each in by_hand if each < len(text)]

    expected = [model.by_hand(text, scaled({2: 0}, at(text)), scaled({1: -2}, at(text))) for text in batch]
    with torch.no_grad(), mh.scale_heads(model, {"L0 H2": 0, "L1 H1": -2}, positions=given):
        found = WAYS[way](model, batch)
    for each, right in zip(found, expected, strict=True):
        equal(each, right)


@pytest.mark.parametrize(
    "way", ["right padding", "left padding", "packed", "documents", "documents in steps", "in steps"]
)
def test_samples_are_texts_also_where_they_are_one_row(way: str) -> None:
    model, batch = Causal(), texts()
    expected = [
        model.by_hand(text, unchanged, scaled({0: 0}) if index == 1 else unchanged) for index, text in enumerate(batch)
    ]
    with torch.no_grad(), mh.ablate(model, "L1 H0", samples=1):
        found = WAYS[way](model, batch)
    for each, right in zip(found, expected, strict=True):
        equal(each, right)


@pytest.mark.parametrize(
    "way", ["right padding", "left padding", "packed", "documents", "documents in steps", "in steps"]
)
def test_a_tensor_has_the_factors_of_each_text_however_the_texts_are_batched(way: str) -> None:
    model, batch = Causal(), texts()
    layer, head = torch.randn(len(batch), 4, dtype=torch.float64), torch.randn(len(batch), dtype=torch.float64)
    head[0] = layer[1, 2] = 0
    expected = [
        model.by_hand(text, scaled(dict(enumerate(layer[index].tolist()))), scaled({1: head[index].item()}))
        for index, text in enumerate(batch)
    ]
    with torch.no_grad(), mh.scale_heads(model, {"L0": layer, "L1 H1": head}):
        found = WAYS[way](model, batch)
    for each, right in zip(found, expected, strict=True):
        equal(each, right)


@pytest.mark.parametrize(
    "way", ["right padding", "left padding", "packed", "documents", "documents in steps", "in steps"]
)
def test_means_are_those_of_tokens_without_padding(way: str) -> None:
    model, batch = Causal(), texts()
    outputs = [attend_by_hand(model.layers[0], text, unchanged, causal=True)[2][3] for text in batch]
    first = torch.stack([each[0] for each in outputs]).mean(0)
    others = torch.cat([each[1:] for each in outputs]).mean(0)

    def replaced(output: Tensor) -> Tensor:
        new = output.clone()
        new[3] = others
        new[3, 0] = first
        return new

    expected = [model.by_hand(text, replaced, unchanged) for text in batch]
    reference = [(x[None],) for x in batch]
    with torch.no_grad(), mh.ablate(model, "L0 H3", by="mean", reference=reference):
        found = WAYS[way](model, batch)
    for each, right in zip(found, expected, strict=True):
        equal(each, right)


# ---- layers and drop-ins, self- and cross-attention

LAYERS: dict[str, Callable[[], Any]] = {
    "MultiHeadAttention": lambda: mh.MultiHeadAttention(8, 4),
    "grouped heads": lambda: mh.MultiHeadAttention(8, 4, num_kv_heads=2, value_head_dim=3),
    "one key/value head": lambda: mh.MultiHeadAttention(8, 4, num_kv_heads=1),
    "averaged heads": lambda: mh.MultiHeadAttention(8, 4, merge="mean"),
    "gated heads": lambda: mh.MultiHeadAttention(8, 4, head_gates=True),
    "nn.MultiheadAttention": lambda: torch_nn.MultiheadAttention(8, 4, batch_first=True),
    "(length, batch)": lambda: torch_nn.MultiheadAttention(8, 4),
    "other widths": lambda: torch_nn.MultiheadAttention(8, 4, kdim=5, vdim=5, batch_first=True),
    "d2l": lambda: d2l.MultiHeadAttention(8, 8, 8, 8, 4, 0.0, bias=True),
    "annotated": lambda: annotated.MultiHeadedAttention(4, 8, 0.0),
    "(d_model, h)": lambda: annotated.MultiHeadAttention(8, 4, 0.0),
    "one matrix per head": lambda: per_head.PerHeadAttention(8, 4),
}
CASES = [(name, crosses) for name in LAYERS for crosses in (False, True) if crosses or name != "other widths"]


def randomised(name: str) -> Any:
    layer = LAYERS[name]().double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def call(layer: Any, x: Tensor, memory: Tensor | None, **options: Any) -> Tensor:
    """Call a layer of any class: (batch, queries, features)."""
    if isinstance(layer, mh.MultiHeadAttention | per_head.PerHeadAttention):
        return layer(x, memory, **options)  # type: ignore[no-any-return]
    turned = isinstance(layer, nn.MultiheadAttention) and not layer.batch_first
    given = [x if each is None else each for each in (None, memory, memory)]
    given = [given[0].transpose(0, 1)] * 3 if turned and memory is None else given
    given = [each.transpose(0, 1) for each in given] if turned and memory is not None else given
    found = layer(*given, **options)
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output.transpose(0, 1) if turned else output


def inputs(name: str, *, crosses: bool) -> tuple[Tensor, Tensor | None]:
    features = 5 if name == "other widths" else 8
    memory = torch.randn(2, 6, features, dtype=torch.float64) if crosses else None
    return torch.randn(2, 5, 8, dtype=torch.float64), memory


def by_hand(layer: Any, x: Tensor, memory: Tensor | None, change: Change) -> Tensor:
    keys = [None] * len(x) if memory is None else list(memory)
    return torch.stack([attend_by_hand(layer, each, change, memory=key)[0] for each, key in zip(x, keys, strict=True)])


@pytest.mark.parametrize(("name", "crosses"), CASES)
def test_heads_of_any_layer(name: str, *, crosses: bool) -> None:
    layer = randomised(name)
    x, memory = inputs(name, crosses=crosses)
    for positions in (None, [1, 3]):
        change = scaled({1: 0, 2: -0.5}, slice(None) if positions is None else positions)
        with mh.scale_heads(layer, {"L0 H1": 0, "L0 H2": -0.5}, positions=positions):
            equal(call(layer, x, memory), by_hand(layer, x, memory, change))
    equal(call(layer, x, memory), by_hand(layer, x, memory, unchanged))


@pytest.mark.parametrize(("name", "crosses"), CASES)
def test_a_head_of_any_layer_replaced_by_its_mean_or_by_that_of_the_other_text(name: str, *, crosses: bool) -> None:
    layer = randomised(name)
    x, memory = inputs(name, crosses=crosses)
    keys = [None, None] if memory is None else list(memory)
    own = torch.stack(
        [attend_by_hand(layer, each, unchanged, memory=key)[2][3] for each, key in zip(x, keys, strict=True)]
    )
    mean = own.flatten(0, 1).mean(0).expand(own.shape).clone()
    mean[:, 0], mean[:, 1:] = own[:, 0].mean(0), own[:, 1:].flatten(0, 1).mean(0)

    def expected(vectors: Tensor) -> Tensor:
        made = []
        for text, key, vector in zip(x, keys, vectors, strict=True):

            def change(output: Tensor, vector: Tensor = vector) -> Tensor:
                return torch.cat([output[:3], vector[None]])

            made.append(attend_by_hand(layer, text, change, memory=key)[0])
        return torch.stack(made)

    reference = call_as_batch(layer, x, memory)
    with mh.ablate(layer, "L0 H3", by="mean", reference=[reference]):
        equal(call(layer, x, memory), expected(mean))
    with mh.ablate(layer, "L0 H3", by="resample"):
        equal(call(layer, x, memory), expected(own.flip(0)))


def call_as_batch(layer: Any, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
    """Return the arguments of a call, as a batch of a reference."""
    if isinstance(layer, mh.MultiHeadAttention | per_head.PerHeadAttention):
        return (x,) if memory is None else (x, memory)
    given = (x, x, x) if memory is None else (x, memory, memory)
    if isinstance(layer, nn.MultiheadAttention) and not layer.batch_first:
        one = x.transpose(0, 1)
        given = (one,) * 3 if memory is None else (one, memory.transpose(0, 1), memory.transpose(0, 1))
    return given


def test_a_head_that_writes_no_numbers_is_off_too() -> None:
    layer, x = randomised("MultiHeadAttention"), torch.randn(2, 5, 8, dtype=torch.float64)
    with mh.ablate(layer, "L0 H1"):
        expected = layer(x)
    with torch.no_grad():
        layer.v_proj.bias[2:4] = torch.tensor([torch.nan, torch.inf])
    with mh.ablate(layer, "L0 H1"):
        assert torch.equal(layer(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["MultiHeadAttention", "nn.MultiheadAttention"])
@pytest.mark.parametrize("added", ["add_bias_kv", "add_zero_attn"])
def test_added_keys_are_no_tokens(name: str, added: str) -> None:
    kind = mh.MultiHeadAttention if name == "MultiHeadAttention" else torch_nn.MultiheadAttention
    layer = kind(8, 4, **{added: True}, **({} if kind is mh.MultiHeadAttention else {"batch_first": True})).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = call(layer, x, None)
    with mh.ablate(layer, "L0 H1"):
        expected[:, [0, 3]] = call(layer, x, None)[:, [0, 3]]
    with mh.ablate(layer, "L0 H1", positions=[0, 3]):
        equal(call(layer, x, None), expected)
        if kind is mh.MultiHeadAttention:
            cache = mh.KeyValueCache()
            steps = [layer(x[:, part], mask=masks.Causal(), cache=cache) for part in (slice(0, 2), slice(2, 5))]
            equal(torch.cat(steps, 1), layer(x, mask=masks.Causal()))


@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}])
@pytest.mark.parametrize("gradients", [False, True])
def test_every_path_of_the_drop_in_for_torch(options: dict[str, bool], *, gradients: bool) -> None:
    layer = randomised("nn.MultiheadAttention")
    x, hidden = torch.randn(2, 5, 8, dtype=torch.float64), torch.zeros(2, 5).bool()
    hidden[1, :2] = True  # the tokens of the second text are those from 2 on
    with torch.set_grad_enabled(gradients):
        plain = layer(x, x, x, hidden, **options)
        with mh.ablate(layer, "L0 H1", positions=1):
            output, weights = layer(x, x, x, hidden, **options)
        for sample, first in ((0, 0), (1, 2)):
            text = x[sample, first:]
            equal(output[sample, first:], attend_by_hand(layer, text, scaled({1: 0}, [1]))[0])
    if weights is not None:
        assert torch.equal(weights, plain[1])


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("name", ["nn.MultiheadAttention", "(d_model, h)"])
def test_a_drop_in_that_returns_weights_under_dropout(name: str, *, observed: bool) -> None:
    layer = randomised(name).train()
    for each in layer.modules():  # the tutorial's class has a module for it
        if hasattr(each, "p"):
            each.p = 0.3
    layer.dropout = 0.3 if isinstance(layer, nn.MultiheadAttention) else layer.dropout
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    parts = parts_of(layer)
    q, k, v = (each(x).unflatten(-1, (4, -1)).transpose(1, 2) for each in (parts.q, parts.k, parts.v))
    torch.manual_seed(3)
    kept = dropout((q @ k.mT / 2**0.5).softmax(-1), 0.3)
    heads = kept @ v
    heads[:, 1] = 0
    torch.manual_seed(3)
    with mh.ablate(layer, "L0 H1"):
        if observed:
            with mh.observe(layer, probes=["output_norm"]) as seen:
                output, weights = layer(x, x, x)
            assert [each.name for each in seen.layers] == [type(layer).__name__]
            assert bool((seen.layers[0].sample(0).statistics["output_norm"][1] == 0).all())
        else:
            output, weights = layer(x, x, x)
    equal(output, parts.out(heads.transpose(1, 2).flatten(2)))
    equal(weights, kept.mean(1) if isinstance(layer, nn.MultiheadAttention) else kept)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_texts_of_a_nested_tensor_count_their_own_tokens() -> None:
    layer, batch = randomised("nn.MultiheadAttention"), texts()
    nested = torch.nested.nested_tensor(batch)
    for options in ({"need_weights": False}, {"need_weights": True}):
        with torch.no_grad(), mh.ablate(layer, "L0 H2", positions=slice(0, 2)):
            found = layer(nested, nested, nested, **options)[0]
        for each, text in zip(found.unbind(), batch, strict=True):
            equal(each, attend_by_hand(layer, text, scaled({2: 0}, slice(0, 2)))[0])


def test_a_decoder_of_torch_numbers_its_layers_as_they_run_and_counts_without_padding() -> None:
    layer = nn.TransformerDecoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
    decoder = torch_nn.replace(nn.TransformerDecoder(layer, 1), inplace=True).model.double().eval()
    x, memory = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    hidden = torch.zeros(2, 5).bool()
    hidden[1, :2] = True
    inner = decoder.layers[0]

    def alone(x: Tensor, memory: Tensor) -> Tensor:
        own = inner.norm1(x + attend_by_hand(inner.self_attn, x, scaled({1: 0}, [2]))[0])
        crossing = attend_by_hand(inner.multihead_attn, own, scaled({0: 0}, [1]), memory=memory)[0]
        own = inner.norm2(own + crossing)
        return inner.norm3(own + inner.linear2(torch.relu(inner.linear1(own))))  # type: ignore[no-any-return]

    with torch.no_grad(), mh.ablate(decoder, "L0 H1", positions=2), mh.ablate(decoder, "L1 H0", positions=1):
        found = decoder(x, memory, tgt_key_padding_mask=hidden)
    equal(found[0], alone(x[0], memory[0]))
    equal(found[1, 2:], alone(x[1, 2:], memory[1]))
