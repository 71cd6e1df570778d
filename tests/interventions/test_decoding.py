"""Heads are off while a model decodes with a cache, and a cache belongs to the heads under which it was filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import multihead as mh
from multihead import masks
from multihead.errors import ModelError
from tests.families import LENGTH
from tests.interventions.changed_eager import changed_eager, scaled
from tests.interventions.tiny_models import batch, double

DECODERS = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "t5")
GENERATION = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
FACTORS = {"L0 H1": 0.0, "L1 H0": -2.0}
CHANGES = {0: scaled({1: 0.0}), 1: scaled({0: -2.0})}
ON_THEN_OFF = (
    "The key/value cache was filled with all heads on, and is continued with heads switched off. Start with an empty "
    "cache, or give allow_mixed=True to mh.ablate or mh.scale_heads."
)
OFF_THEN_ON = (
    "The key/value cache was filled with heads switched off, and is continued with all heads on. Start with an empty "
    "cache, or give allow_mixed=True to mh.ablate or mh.scale_heads."
)
OTHERS = (
    "The key/value cache was filled with heads switched off, and is continued with other heads switched off. Start "
    "with an empty cache, or give allow_mixed=True to mh.ablate or mh.scale_heads."
)


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@torch.no_grad()
def in_steps(model: Any, inputs: dict[str, Tensor], cache: Any, steps: tuple[int, ...] = (8, 1, 1, 2)) -> Tensor:
    """Run a padded batch in parts with a cache; return the logits of all its tokens."""
    ids, real = inputs["input_ids"], inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    positions = (real.cumsum(1) - 1).clamp(min=0)
    found, start = [], 0
    for size in steps:
        part = slice(start, start + size)
        output = model(
            input_ids=ids[:, part],
            attention_mask=real[:, : part.stop],
            position_ids=positions[:, part],
            past_key_values=cache,
            use_cache=True,
        )
        found.append(output.logits)
        start += size
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_each_step_with_a_cache_has_the_heads_off(
    name: str, padding: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding=padding)

    def new_cache() -> Any:
        return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, LENGTH)

    with changed_eager(model, CHANGES):
        expected = in_steps(model, inputs, new_cache())
    with mh.scale_heads(model, FACTORS):
        found = in_steps(model, inputs, new_cache())
    real = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    equal(found[real], expected[real])


@pytest.mark.parametrize("padding", ["none", "left"])
def test_positions_in_a_cache_count_from_the_first_token_of_each_text(
    padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double("llama", monkeypatch), batch("llama", padding=padding)
    real = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    chosen = real & ((real.cumsum(1) - 1 == 5) | (real.cumsum(1) - 1 == 0))
    with torch.no_grad(), changed_eager(model, {1: scaled({2: 0.0}, chosen)}):
        expected = model(**inputs, position_ids=(real.cumsum(1) - 1).clamp(min=0)).logits
    for steps in ((8, 1, 1, 2), (1,) * LENGTH, (LENGTH,)):
        with mh.ablate(model, "L1 H2", positions=[0, 5]):
            found = in_steps(model, inputs, DynamicCache(config=model.config), steps)
        equal(found[real], expected[real])


@pytest.mark.parametrize("padding", ["none", "left"])
def test_means_while_decoding_are_those_of_the_whole_text(padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("llama", monkeypatch), batch("llama", padding=padding)
    real = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    for over in ("text", "position"):
        means = mh.head_means(model, [batch("llama")], over=over)
        with mh.ablate(model, "L1 H2", by="mean", reference=means):
            whole = in_steps(model, inputs, DynamicCache(config=model.config), (LENGTH,))
        with mh.ablate(model, "L1 H2", by="mean", reference=means):
            found = in_steps(model, inputs, DynamicCache(config=model.config))
        equal(found[real], whole[real])


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_positions_in_cross_attention_while_decoding_are_those_of_the_whole_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double(name, monkeypatch), batch(name)
    ids = inputs["decoder_input_ids"]
    changed = mh.ablate(model, ["L3 H1", "L5 H2"], positions=[0, 3, 4])
    with changed:
        whole = model(**inputs).logits
        encoded = model.get_encoder()(inputs["input_ids"] if name != "whisper" else inputs["input_features"])
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for start, stop in ((0, 3), (3, 4), (4, 7)):
            step = model(encoder_outputs=encoded, decoder_input_ids=ids[:, start:stop], past_key_values=cache)
            equal(step.logits, whole[:, start:stop])
    assert not torch.allclose(model(**inputs).logits, whole)


class Decoder(nn.Module):
    """Self-attention with a cache, and cross-attention, with a cache or without, of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = (mh.MultiHeadAttention(8, num_heads=2).double() for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor, own: Any = None, cross: Any = None, **padding: Any) -> Tensor:
        x = x + self.own(x, mask=masks.Causal(), cache=own, **padding)
        output: Tensor = x + self.cross(x, memory, cache=cross, **padding)
        return output


@torch.no_grad()
@pytest.mark.parametrize("cached", [False, True])
def test_queries_of_cross_attention_of_this_library_are_counted_through_a_cache(*, cached: bool) -> None:
    model = Decoder()
    x, memory = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64)
    hidden = x + model.own(x, mask=masks.Causal())
    expected = hidden + model.cross(hidden, memory)
    with mh.ablate(model.cross, "L0 H1"):
        chosen = [1, 4]
        expected[:, chosen] = hidden[:, chosen] + model.cross(hidden, memory)[:, chosen]
    caches = {"own": mh.KeyValueCache(), "cross": mh.KeyValueCache() if cached else None}
    with mh.ablate(model, "L1 H1", positions=chosen):
        steps = [model(x[:, part], memory, **caches) for part in (slice(0, 3), slice(3, 4), slice(4, 6))]
        equal(model(x, memory), expected)
    equal(torch.cat(steps, 1), expected)
    for side, columns in (("left", slice(3, 6)), ("right", slice(0, 3))):
        with mh.ablate(model, "L1 H1", positions=1):
            padded = model(x, memory, lengths=(6, 3), padding_side=side)
            equal(padded[1:, columns], model(x[1:, columns], memory[1:]))


@torch.no_grad()
@pytest.mark.parametrize(("padding", "changed"), [({}, 1), ({"lengths": (6, 3), "padding_side": "left"}, 4)])
def test_cross_attention_of_this_library_counts_columns_without_the_lengths_of_its_queries(
    padding: dict[str, Any], changed: int
) -> None:
    layer, x, memory = mh.MultiHeadAttention(8, num_heads=2), torch.randn(2, 6, 8), torch.randn(2, 4, 8)
    before = layer(x, memory, memory_lengths=(4, 3), **padding)
    with mh.ablate(layer, "L0 H1", positions=1):
        after = layer(x, memory, memory_lengths=(4, 3), **padding)
    assert (after != before).any(-1)[1].nonzero().flatten().tolist() == [changed]


# One of two prompts that are padded has no padding; one decoder and one with an encoder have every pair.
@pytest.mark.parametrize(
    ("name", "padding", "beams"),
    [
        *((name, "left", 3) for name in DECODERS),
        *((name, *pair) for name in ("llama", "t5") for pair in (("left", 1), ("none", 1), ("none", 3))),
    ],
)
def test_generation_gives_the_tokens_of_changed_eager_attention(
    name: str, padding: str, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding=padding)
    inputs = {key: each for key, each in inputs.items() if not key.startswith("decoder")}
    if name == "t5":  # L0 and L1 are its encoder, which runs once; L2 H0 is in the decoder
        changes, factors = {**CHANGES, 2: scaled({0: 0.0})}, {**FACTORS, "L2 H0": 0.0}
        model.generation_config.decoder_start_token_id = 0
    else:
        changes, factors = CHANGES, FACTORS
    plain = model.generate(**inputs, **GENERATION, num_beams=beams)
    with changed_eager(model, changes):
        expected = model.generate(**inputs, **GENERATION, num_beams=beams)
    with mh.scale_heads(model, factors):
        found = model.generate(**inputs, **GENERATION, num_beams=beams)
    assert not torch.equal(expected, plain)
    assert torch.equal(found, expected)
    assert torch.equal(model.generate(**inputs, **GENERATION, num_beams=beams), plain)


def test_a_hugging_face_cache_rejects_other_heads_than_it_was_filled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = double("llama", monkeypatch), batch("llama")["input_ids"]

    def step(cache: Any) -> Any:
        return model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True).past_key_values

    full = step(DynamicCache(config=model.config))
    with pytest.raises(ModelError) as caught, mh.ablate(model, "L0 H1"):
        step(full)
    assert str(caught.value) == ON_THEN_OFF
    with mh.ablate(model, "L0 H1"):
        off = step(None)  # a cache that the model makes itself
        step(off)
    for after in (lambda: step(off), lambda: model(input_ids=ids[:, :3], past_key_values=off)):
        with pytest.raises(ModelError) as caught:
            after()
        assert str(caught.value) == OFF_THEN_ON
    with pytest.raises(ModelError) as caught, mh.ablate(model, "L0 H2"):
        step(off)
    assert str(caught.value) == OTHERS
    with mh.ablate(model, "L0 H1"):
        assert step(off).get_seq_length() == 9  # an equal intervention may go on
    with mh.ablate(model, "L0 H2", allow_mixed=True):
        assert step(off).get_seq_length() == 12
        assert step(full).get_seq_length() == 6


def found_head(record: mh.Record, layer: int, head: int) -> Any:
    """Return a head as a record names it: by the name of its layer."""
    heads = record.find(largest_weight=(0.0, None))
    return next(each for each in heads if (each.layer, each.head) == (layer, head))


@pytest.mark.parametrize("named_first", [False, True])
def test_a_hugging_face_cache_is_continued_with_the_same_head_by_another_name(
    monkeypatch: pytest.MonkeyPatch, *, named_first: bool
) -> None:
    model, inputs = double("llama", monkeypatch), batch("llama")
    with torch.no_grad(), mh.observe(model) as record:
        model(**inputs)
    same = ["L1 H1", found_head(record, 1, 1)]
    first, then = reversed(same) if named_first else same
    cache, ids = DynamicCache(config=model.config), inputs["input_ids"]
    with torch.no_grad():
        with mh.ablate(model, "L1 H1"):
            expected = model(input_ids=ids).logits
        with mh.ablate(model, first):
            model(input_ids=ids[:, :3], past_key_values=cache)
        for layer, head in ((1, 0), (0, 1)):
            with pytest.raises(ModelError) as caught, mh.ablate(model, found_head(record, layer, head)):
                model(input_ids=ids[:, 3:], past_key_values=cache)
            assert str(caught.value) == OTHERS
        with mh.ablate(model, then):
            equal(model(input_ids=ids[:, 3:], past_key_values=cache).logits, expected[:, 3:])


@pytest.mark.parametrize("named_first", [False, True])
def test_a_cache_of_this_library_is_continued_with_the_same_head_by_another_name(*, named_first: bool) -> None:
    layer, x = mh.MultiHeadAttention(embed_dim=8, num_heads=2).double(), torch.randn(1, 5, 8).double()
    with mh.observe(layer) as record:
        layer(x)
    same = ["L0 H1", found_head(record, 0, 1)]
    first, then = reversed(same) if named_first else same
    cache = mh.KeyValueCache()
    with mh.ablate(layer, "L0 H1"):
        expected = layer(x, mask=masks.Causal())
    with mh.ablate(layer, first):
        layer(x[:, :3], mask=masks.Causal(), cache=cache)
    with pytest.raises(ModelError) as caught, mh.ablate(layer, found_head(record, 0, 0)):
        layer(x[:, 3:], mask=masks.Causal(), cache=cache)
    assert str(caught.value) == OTHERS
    with mh.ablate(layer, then):
        equal(layer(x[:, 3:], mask=masks.Causal(), cache=cache), expected[:, 3:])


def test_a_cache_of_this_library_rejects_other_heads_than_it_was_filled_with() -> None:
    layer, x = mh.MultiHeadAttention(embed_dim=8, num_heads=2), torch.randn(1, 3, 8)
    cache = mh.KeyValueCache()
    layer(x, mask=masks.Causal(), cache=cache)
    with pytest.raises(ModelError) as caught, mh.ablate(layer, "L0 H1"):
        layer(x, mask=masks.Causal(), cache=cache)
    assert str(caught.value) == ON_THEN_OFF
    cache.reset()
    with mh.ablate(layer, "L0 H1"):
        layer(x, mask=masks.Causal(), cache=cache)
        layer(x, mask=masks.Causal(), cache=cache)
    with pytest.raises(ModelError) as caught:
        layer(x, mask=masks.Causal(), cache=cache)
    assert str(caught.value) == OFF_THEN_ON
    with mh.ablate(layer, "L0 H0", allow_mixed=True):
        layer(x, mask=masks.Causal(), cache=cache)
    cache.reset()
    layer(x, mask=masks.Causal(), cache=cache)
    assert cache.length == 3
