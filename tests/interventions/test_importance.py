"""The effect of each head equals a loop over heads of eager attention that is changed by hand, in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ArgumentError, ModelError
from multihead.interventions import prepared
from multihead.interventions.importance import EffectsOfLayer
from multihead.record.head_numbers import NumbersOverTexts, chance_beyond
from tests.families import ENCODER, TEXT, batch_of, family
from tests.interventions.changed_eager import Change, changed_eager, compute_in_float64, replaced, scaled
from tests.interventions.tiny_models import batch, double, real_queries

FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3")  # grouped heads, softcap, sinks, values of another width
CASES = [
    *[(name, padding, by) for name in FAMILIES for padding in ("right", "left") for by in ("zero", "mean")],
    *[(name, "none", "resample") for name in FAMILIES],
]
Losses = Callable[[Any, dict[str, Tensor]], Tensor]


def losses_by_hand(output: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of the next token of each text alone."""
    found = []
    for row, (logits, ids) in enumerate(zip(output.logits, inputs["input_ids"], strict=True)):
        real = inputs["attention_mask"][row].bool() if "attention_mask" in inputs else torch.ones_like(ids).bool()
        found.append(nn.functional.cross_entropy(logits[real][:-1], ids[real][1:]))
    return torch.stack(found)


def changes_by_hand(name: str, model: Any, inputs: dict[str, Tensor], by: str) -> Callable[[int, int], Change]:
    """Return a function of a call and a head that returns what becomes of its output."""
    with torch.no_grad(), changed_eager(model, {}) as plain:
        model(**inputs)
    outputs = plain.outputs

    def change(call: int, head: int) -> Change:
        if by == "zero":
            return scaled({head: 0})
        if by == "resample":  # of two texts, each has the other
            return replaced(head, outputs[call][:, :, head].flip(0))
        real = real_queries(name, inputs, call, outputs[call])
        own, first = outputs[call][:, :, head], (real.cumsum(1) == 1) & real
        vectors = torch.where(first[..., None], own[first].mean(0), own[real & ~first].mean(0))
        return replaced(head, vectors, real)

    return change


def effects_by_hand(
    model: Any, inputs: dict[str, Tensor], change: Callable[[int, int], Change], measure: Losses
) -> list[Tensor]:
    """Switch off each head of each call in a run of its own: per call (texts, heads)."""

    def run(changes: dict[int, Change]) -> tuple[Tensor, list[Tensor]]:
        with torch.no_grad(), changed_eager(model, changes) as ran:
            return measure(model(**inputs), inputs), ran.outputs

    before, outputs = run({})
    return [
        torch.stack([run({call: change(call, head)})[0] - before for head in range(output.shape[2])], 1)
        for call, output in enumerate(outputs)
    ]


@pytest.mark.parametrize(("name", "padding", "by"), CASES)
def test_effects_are_those_of_a_loop_over_heads(
    name: str, padding: str, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding=padding)
    options = {"reference": [inputs]} if by == "mean" else {}
    found = mh.importance(model, [inputs], by=by, **options)
    expected = effects_by_hand(model, inputs, changes_by_hand(name, model, inputs, by), losses_by_hand)
    assert found.replayed
    for layer, effects in zip(found.layers, expected, strict=True):
        torch.testing.assert_close(found.effects_of_texts[layer.name], effects, rtol=0, atol=1e-9)
    whole = torch.stack(expected, 1)  # (texts, layers, heads)
    torch.testing.assert_close(found.effects, whole.mean(0), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.standard_errors, whole.std(0) / math.sqrt(2), rtol=0, atol=1e-9)


def classifier() -> tuple[Any, dict[str, Tensor], Any, Losses]:
    sizes = {key: value for key, value in ENCODER.items() if key != "max_position_embeddings"}
    model = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3))
    return model, batch("vit"), mh.class_logit(2), lambda output, _: output.logits[:, 2]


def masked_words() -> tuple[Any, dict[str, Tensor], Any, Losses]:
    model = hf.BertForMaskedLM(hf.BertConfig(**ENCODER, vocab_size=100))

    def by_hand(output: Any, _: Any) -> Tensor:
        return output.logits[:, 4, 7] - output.logits[:, 4, 9]

    return model, batch("bert", padding="right"), mh.logit_difference(7, [9, 9], position=4), by_hand


def translation() -> tuple[Any, dict[str, Tensor], Any, Losses]:
    def by_hand(output: Any, inputs: dict[str, Tensor]) -> Tensor:
        target = inputs["decoder_input_ids"]
        return torch.stack(
            [
                nn.functional.cross_entropy(logits[real][:-1], ids[real][1:])
                for logits, ids, real in zip(
                    output.logits, target, inputs["decoder_attention_mask"].bool(), strict=True
                )
            ]
        )

    return family("t5"), batch("t5", padding="left"), None, by_hand


@pytest.mark.parametrize("make", [classifier, masked_words, translation])
def test_effects_in_images_masked_words_and_both_halves_of_a_translation(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inputs, measure, by_hand = make()
    model = compute_in_float64(model, monkeypatch)
    found = mh.importance(model, inputs, measure)
    expected = effects_by_hand(model, inputs, lambda _, head: scaled({head: 0}), by_hand)
    assert len(found.layers) == len(expected)
    for layer, effects in zip(found.layers, expected, strict=True):
        torch.testing.assert_close(found.effects_of_texts[layer.name], effects, rtol=0, atol=1e-9)
    whole = "whole model ran" in found.describe()
    assert whole is (make is translation) is not found.replayed


def shift(output: Tensor, _: Any) -> Tensor:
    return output.roll(1, 1)


def test_any_batching_any_replacement_and_any_memory_give_the_effects_of_ablate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = double("llama", monkeypatch)
    batches = [batch("llama", padding="left"), batch("llama"), {"input_ids": torch.arange(9)[None] + 3}]
    vector = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    steps: list[EffectsOfLayer] = []
    options: dict[str, Any] = {"heads": ["L0", "L1 H2"], "positions": slice(2, None)}

    def of_ablate(by: Any) -> Tensor:
        found = []
        for head in ("L0 H0", "L0 H1", "L0 H2", "L0 H3", "L1 H2"):
            with torch.no_grad(), mh.ablate(model, head, by=by, positions=slice(2, None)):
                found.append(torch.cat([losses_by_hand(model(**each), each) for each in batches]))
        with torch.no_grad():
            before = torch.cat([losses_by_hand(model(**each), each) for each in batches])
        return torch.stack(found, 1) - before[:, None]

    for by, name, most in (("zero", "zero", 1 << 28), (vector, "vector", 1), (shift, "function", 1 << 28)):
        monkeypatch.setattr(prepared, "_MAX_BYTES", most)
        found = mh.importance(model, batches, by=by, progress=steps.append, **options)
        chosen = torch.cat([found.effects_of_texts[layer.name] for layer in found.layers], 1)
        assert (found.texts, found.by) == (5, name)
        assert chosen[:, [4, 5, 7]].isnan().all()  # were not switched off
        torch.testing.assert_close(chosen[:, [0, 1, 2, 3, 6]], of_ablate(by), rtol=0, atol=1e-9)
    first, last = steps[0], steps[5]
    assert (first.done, first.total, first.batch, first.layer, first.replayed) == (1, 6, 0, 0, True)
    assert first.seconds_left is not None
    assert first.seconds_left > 0
    assert (last.done, last.batch, last.layer, last.seconds_left) == (6, 2, 1, 0)
    assert last.effects.shape == (1, 4)


def test_rows_of_several_texts_and_padding_that_a_layer_drops_are_counted_by_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of a batch has its own texts, also where a layer reads all texts of all copies as one row."""
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=4).double()
    x, lengths = torch.randn(3, 6, 8).double(), torch.tensor([6, 2, 4])
    of_last = mh.Measure(lambda output, _: output[torch.arange(3), lengths - 1].square().sum(1), "size")

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.layer(x, lengths=lengths)

    model = Padded()
    for options in ({}, {"by": "mean", "reference": mh.head_means(model, [(x, lengths)])}):
        found = mh.importance(model, [(x, lengths)], of_last, **options)
        for head in range(4):
            with torch.no_grad(), mh.ablate(model, (0, head), **options):
                effects = of_last(model(x, lengths), None) - found.baseline
            torch.testing.assert_close(found.effects_of_texts["layer"][:, head], effects, rtol=0, atol=1e-12)
    llama, ids = double("llama", monkeypatch), torch.arange(12)[None] * 7 % 90 + 3
    row = {"input_ids": ids, "position_ids": torch.tensor([[*range(5), *range(7)]]), "use_cache": False}
    alone = [{"input_ids": each} for each in ids.split([5, 7], 1)]
    methods: tuple[Any, ...] = ("exact", "gradient")
    for method in methods:
        in_one_row, apart = (mh.importance(llama, each, method=method) for each in (row, alone))
        assert in_one_row.texts == 2
        torch.testing.assert_close(in_one_row.effects, apart.effects, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_does_nothing_has_no_effect_not_even_a_rounding_error(dtype: torch.dtype) -> None:
    """The baseline has the batch shape and the path of the heads, so it has their rounding errors too."""
    model = family("llama").to(dtype)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 16:24] = 0  # head 2
    found = mh.importance(model, [batch_of("llama", padding="left")])
    assert found.effects[1, 2] == 0
    assert (found.effects != 0).sum() == 7


def small() -> tuple[mh.MultiHeadAttention, Tensor, mh.Measure]:
    torch.manual_seed(0)
    size = mh.Measure(lambda output, _: output.square().sum((1, 2)), "size", "units", more_is_better=True)
    return mh.MultiHeadAttention(embed_dim=8, num_heads=2).double(), torch.randn(4, 5, 8).double(), size


def test_a_record_has_effects_as_columns_and_keeps_them_in_its_file(tmp_path: Path) -> None:
    layer, x, size = small()
    with torch.no_grad(), mh.observe(layer) as seen:
        layer(x)
    found = mh.importance(layer, x, size)
    seen.add(found)
    name = "effect_size_zero"
    assert [row[name] for row in seen.table().rows] == found.effects[0].tolist()
    assert "effect on size by zero (units)" in str(seen.table())
    (best,) = seen.find(effect_size_zero=(None, float(found.effects.min())))
    assert (best.layer, best.head) == (0, found.heads(1)[0].head)  # more is better: without it there is least
    seen.save(tmp_path / "run.safetensors")
    again = mh.Record.load(tmp_path / "run.safetensors")
    assert torch.equal(again.layers[0].numbers[name], found.effects_of_texts["MultiHeadAttention"])
    assert again.table().rows == seen.table().rows
    assert again.statistic(name) == found.statistic
    with torch.no_grad(), mh.observe(layer, keep="summary") as summed:
        layer(x)
    summed.add(found)
    assert [row[name] for row in summed.table().rows] == found.effects[0].tolist()
    with pytest.raises(ArgumentError, match=r"^The numbers are of none of the layers of the record\."):
        mh.Record(layers=[], title="").add(found)


def test_the_sentence_says_how_many_effects_chance_alone_gives() -> None:
    layer, x, size = small()
    found = mh.importance(layer, x, size)
    assert found.describe() == (
        f"{found.beyond_errors} of 2 heads change the measure by more than two standard errors over 4 texts; if no "
        "head did anything, 0 would, by chance. The whole model ran for each head, because replays from the outputs of "
        "earlier blocks would not be exact."
    )
    one = mh.importance(layer, x[:1], size)
    assert one.standard_errors.isnan().all()
    assert one.describe("zh").startswith("只有一段文本，没有标准误")
    assert str(one.heads(1)[0]).count("±") == 0 < str(found.heads(1)[0]).count("±")


def test_two_standard_errors_of_twenty_normal_texts_cover_what_tables_of_students_t_say() -> None:
    found = [round(chance_beyond(2.0, freedom), 4) for freedom in (1, 2, 3, 4, 10)]
    assert found == [0.2952, 0.1835, 0.1393, 0.1161, 0.0734]
    draws = torch.randn(20, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers = NumbersOverTexts([draws])
    assert 0.92 <= 1 - numbers.beyond_errors / 2000 <= 0.96
    assert abs(numbers.beyond_errors - numbers.expected_by_chance) < 30


WRONG: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "shape": (
        lambda layer, x: mh.importance(layer, x, lambda output, _: output.sum(1)),
        (
            "The measure measure returned a torch.float64 tensor of shape (4, 8) for 4 texts. "
            "Return one floating-point number per text: a tensor of shape (4,)."
        ),
    ),
    "type": (
        lambda layer, x: mh.importance(layer, x, mh.Measure(lambda *_: 3, "three")),
        "The measure three returned int. Return one floating-point number per text: a tensor of shape (4,).",
    ),
    "NaN": (
        lambda layer, x: mh.importance(layer, x, mh.Measure(lambda output, _: output[:, 0, 0] * math.nan, "bad")),
        "The measure bad is nan for text 0 of a batch. Give texts and a measure with finite numbers.",
    ),
    "no measure": (
        lambda layer, x: mh.importance(layer, x, "loss"),
        "measure is a string, and must be a function of (output, batch). Return one number per text.",
    ),
    "one head": (
        lambda _, x: mh.importance(mh.MultiHeadAttention(embed_dim=8, num_heads=1).double(), x, small()[2]),
        "The model has one head, and nothing is left without it. Give a model with several.",
    ),
    "head": (
        lambda layer, x: mh.importance(layer, x, small()[2], heads="L3 H0"),
        "There is no head L3 H0: the model has layers L0 to L0, and L0 has heads H0 to H1. The nearest is L0 H0.",
    ),
    "method": (
        lambda layer, x: mh.importance(layer, x, small()[2], method="attribution"),
        'method is \'attribution\'. Give "exact" or "gradient".',
    ),
    "reference": (
        lambda layer, x: mh.importance(layer, x, small()[2], by="mean"),
        (
            'by="mean" needs a reference. '
            "Give batches of the model's inputs as reference=, or what mh.head_means(model, batches) returns."
        ),
    ),
    "logits": (
        mh.importance,
        (
            "The mean loss of the next token needs ids of at least two tokens, and a logit per token and word. Give a "
            "function as measure, or a batch with input_ids."
        ),
    ),
    "token": (
        lambda layer, x: mh.importance(layer, x, mh.logit_difference(3, 8)),
        "8 is no token of the model. Give ids from 0 to 7.",
    ),
    "position": (
        lambda layer, x: mh.importance(layer, x, mh.logit_difference(3, 4, position=5)),
        "position is 5, and a text has 5 tokens. Give a token that every text has, counted from 0 without padding.",
    ),
    "class": (
        lambda layer, x: mh.class_logit(9)(x[:, 0], None),
        "There is no class 9. Give one from 0 to 7.",
    ),
    "cache": (
        lambda layer, x: mh.importance(layer, {"query": x, "past_key_values": mh.KeyValueCache()}, small()[2]),
        "A batch has a key/value cache, which each forward pass would continue. Give whole texts.",
    ),
    "numbers": (
        lambda layer, x: mh.Record().add(x),  # type: ignore[arg-type]
        (
            "numbers is a tensor of shape (4, 5, 8), and must be numbers of heads. Give what mh.importance or mh.patch "
            "returned."
        ),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_one_sentence(wrong: str) -> None:
    layer, x, _ = small()
    call, sentence = WRONG[wrong]
    with pytest.raises((ArgumentError, ModelError), match=f"^{re.escape(sentence)}$"):
        call(layer, x)


def test_a_model_without_next_tokens_needs_a_measure() -> None:
    model = hf.BertModel(hf.BertConfig(**ENCODER, **TEXT)).eval()
    sentence = (
        "BertModel predicts no next token. Give a measure: mh.class_logit(index), or a function of (output, batch)"
    )
    with pytest.raises(ArgumentError, match=re.escape(sentence)):
        mh.importance(model, batch("bert"))
