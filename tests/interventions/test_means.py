"""Means of heads are those of the tokens of their reference, and another text's output is never a text's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, InputError
from multihead.interventions.replacements import _choose_other_texts
from tests.families import batch_of, family
from tests.interventions.changed_layers import attend_by_hand, scaled, unchanged

LENGTHS = (5, 3, 1)


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def layer_and_texts() -> tuple[mh.MultiHeadAttention, list[Tensor]]:
    layer = mh.MultiHeadAttention(8, 4, num_kv_heads=2).double().eval()
    return layer, [torch.randn(length, 8, dtype=torch.float64) for length in LENGTHS]


def batches(texts: list[Tensor]) -> dict[str, list[Any]]:
    """The same texts as a reference of several forms."""
    padded = {side: nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_side=side) for side in ("right", "left")}
    row, packing = mh.pack(padded["right"], LENGTHS)
    right = {"x": padded["right"], "lengths": LENGTHS, "mask": masks.Causal()}
    left = {"x": padded["left"], "lengths": LENGTHS, "mask": masks.Causal(), "padding_side": "left"}
    return {
        "one by one": [{"x": text[None], "mask": masks.Causal()} for text in texts],
        "right padding": [right],
        "left padding": [left],
        "packed": [{"x": row, "packing": packing, "mask": masks.Causal()}],
        "twice": [left, right],
    }


@pytest.mark.parametrize("over", ["text", "position"])
@pytest.mark.parametrize("form", ["one by one", "right padding", "left padding", "packed", "twice"])
def test_means_are_those_of_each_texts_first_token_and_of_all_others_or_of_each_position(form: str, over: Any) -> None:
    layer, texts = layer_and_texts()
    outputs = [attend_by_hand(layer, text, unchanged, causal=True)[2].transpose(0, 1) for text in texts]
    if over == "text":
        rows = [torch.stack([each[0] for each in outputs]), torch.cat([each[1:] for each in outputs])]
    else:
        rows = [torch.stack([each[at] for each in outputs if len(each) > at]) for at in range(max(LENGTHS))]
    means = mh.head_means(layer, batches(texts)[form], over=over)
    times = 2 if form == "twice" else 1
    assert list(means.vectors) == list(means.counts) == ["MultiHeadAttention"]
    assert means.counts["MultiHeadAttention"].tolist() == [times * len(each) for each in rows]
    equal(means.vectors["MultiHeadAttention"], torch.stack([each.mean(0) for each in rows]))
    assert repr(means) == f"<HeadMeans of 1 layers over {9 * times} tokens, by {over}>"


def test_the_first_token_has_a_mean_of_its_own() -> None:
    layer, texts = layer_and_texts()
    means = mh.head_means(layer, batches(texts)["left padding"])
    rows = torch.randn(2, 2, dtype=torch.float64)
    means.vectors["MultiHeadAttention"][:, 1] = rows

    def change(output: Tensor) -> Tensor:
        new = output.clone()
        new[1, :1], new[1, 1:] = rows[0], rows[1]
        return new

    for form in ("right padding", "left padding"):
        (given,) = batches(texts)[form]
        with mh.ablate(layer, "L0 H1", by="mean", reference=means):
            output = layer(**given)
        for row, text in enumerate(texts):
            own = output[row, : len(text)] if form == "right padding" else output[row, 5 - len(text) :]
            equal(own, attend_by_hand(layer, text, change, causal=True)[0])


def test_means_over_positions_are_put_at_their_positions() -> None:
    layer, texts = layer_and_texts()
    means = mh.head_means(layer, batches(texts)["one by one"], over="position")
    vectors = means.vectors["MultiHeadAttention"]

    def change(output: Tensor) -> Tensor:
        return torch.cat([output[:3], vectors[: output.shape[1], 3][None]])

    (given,) = batches(texts)["left padding"]
    for mean_over in ("position", "text"):  # the means themselves know over what they are
        with mh.ablate(layer, "L0 H3", by="mean", reference=means, mean_over=mean_over):  # type: ignore[arg-type]
            output = layer(**given)
        for row, text in enumerate(texts):
            equal(output[row, 5 - len(text) :], attend_by_hand(layer, text, change, causal=True)[0])


def test_means_are_computed_without_gradients_and_with_the_heads_that_are_on() -> None:
    layer, texts = layer_and_texts()
    reference = batches(texts)["right padding"]
    means = mh.head_means(layer, reference)
    assert not means.vectors["MultiHeadAttention"].requires_grad
    assert layer.q_proj.weight.grad is None
    with mh.scale_heads(layer, {"L0 H1": 3.0}):  # the reference runs in the context, so its heads are changed
        within = mh.head_means(layer, reference)
    equal(within.vectors["MultiHeadAttention"][:, 1], 3 * means.vectors["MultiHeadAttention"][:, 1])
    equal(within.vectors["MultiHeadAttention"][:, 0], means.vectors["MultiHeadAttention"][:, 0])


def test_a_reference_is_batches_one_batch_or_its_means() -> None:
    model, inputs = family("llama"), batch_of("llama", padding="left")
    found = []
    for reference in (
        mh.head_means(model, [inputs]),
        [inputs],
        inputs,
        iter([inputs]),
        [(inputs["input_ids"], inputs["attention_mask"])],
    ):
        with torch.no_grad(), mh.ablate(model, "L1 H2", by="mean", reference=reference):
            found.append(model(**inputs).logits)
    assert all(torch.equal(each, found[0]) for each in found)
    assert not torch.equal(found[0], model(**inputs).logits)


@pytest.mark.parametrize("over", ["text", "position"])
def test_saved_means_are_loaded_as_they_were(over: Any, tmp_path: Path) -> None:
    model, inputs = family("t5"), batch_of("t5", padding="left")
    means = mh.head_means(model, [inputs], over=over)
    means.save(tmp_path / "means.safetensors")
    loaded = mh.HeadMeans.load(str(tmp_path / "means.safetensors"))
    assert loaded.over == over
    assert repr(loaded) == repr(means)
    for found, expected in ((loaded.vectors, means.vectors), (loaded.counts, means.counts)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
    outputs = []
    for reference in (means, loaded):
        with torch.no_grad(), mh.ablate(model, ["L0 H1", "L3 H2"], by="mean", reference=reference):
            outputs.append(model(**inputs)[0])
    assert torch.equal(*outputs)


def test_a_file_without_means_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    layer = mh.MultiHeadAttention(8, 2)
    with mh.observe(layer) as seen:
        layer(torch.randn(1, 4, 8))
    seen.save(tmp_path / "record")
    fix = "Give a file that HeadMeans.save wrote."
    with pytest.raises(InputError) as caught:
        mh.HeadMeans.load(tmp_path / "record")
    assert str(caught.value) == f"'{tmp_path / 'record'}' has no means of heads. {fix}"
    for name in ("text", "nothing"):
        with pytest.raises(InputError, match="cannot be read: ") as caught:
            mh.HeadMeans.load(tmp_path / name)
        assert str(caught.value).endswith(fix)


def test_means_over_another_thing_are_an_error() -> None:
    with pytest.raises(ArgumentError) as caught:
        mh.head_means(mh.MultiHeadAttention(8, 2), [torch.randn(1, 4, 8)], over="token")  # type: ignore[arg-type]
    assert str(caught.value) == 'over is \'token\'. Give "text" or "position".'


# ---- resample


@pytest.mark.parametrize("texts", [2, 3, 4, 17])
def test_each_text_gets_another_one_and_each_is_given_once(texts: int) -> None:
    drawn = [_choose_other_texts(texts, seed) for seed in range(20)]
    for other in drawn:
        assert sorted(other.tolist()) == list(range(texts))
        assert not bool((other == torch.arange(texts)).any())
    assert torch.equal(_choose_other_texts(texts, 3), drawn[3])
    assert len({tuple(each.tolist()) for each in drawn}) > 1 or texts == 2


@pytest.mark.parametrize("form", ["padded left", "padded right", "packed", "whole"])
def test_another_texts_output_is_taken_at_the_same_position_without_padding(form: str) -> None:
    layer, _ = layer_and_texts()
    texts = torch.randn(4, 3, 8, dtype=torch.float64)
    outputs = torch.stack([attend_by_hand(layer, text, unchanged, causal=True)[2][2] for text in texts])
    other = _choose_other_texts(4, 5)

    def expected(row: int) -> Tensor:
        def change(output: Tensor) -> Tensor:
            return torch.cat([output[:2], outputs[other[row]][None], output[3:]])

        return attend_by_hand(layer, texts[row], change, causal=True)[0]

    nothing = torch.full((4, 2, 8), 9.0, dtype=torch.float64)
    given: dict[str, Any] = {"x": texts, "mask": masks.Causal()}
    if form == "packed":
        row, packing = mh.pack(texts, (3, 3, 3, 3))
        given |= {"x": row, "packing": packing}
    elif form != "whole":
        side = form.split()[1]
        x = torch.cat([nothing, texts] if side == "left" else [texts, nothing], 1)
        given |= {"x": x, "lengths": (3, 3, 3, 3), "padding_side": side}
    with mh.ablate(layer, "L0 H2", by="resample", seed=5):
        output = layer(**given)
        again = layer(**given)
    assert torch.equal(again, output)
    output = output.view(4, 3, 8) if form == "packed" else output
    output = output[:, 2:] if form == "padded left" else output[:, :3]
    equal(output, torch.stack([expected(row) for row in range(4)]))
    with mh.ablate(layer, "L0 H2", by="resample", seed=6):
        assert not torch.equal(layer(**given), again)
    assert _choose_other_texts(4, 6).tolist() != other.tolist()


def test_only_the_chosen_tokens_and_texts_get_another_texts_output() -> None:
    layer, _ = layer_and_texts()
    texts = torch.randn(2, 3, 8, dtype=torch.float64)
    outputs = [attend_by_hand(layer, text, unchanged, causal=True)[2] for text in texts]

    def change(output: Tensor) -> Tensor:
        new = output.clone()
        new[1, 2] = outputs[0][1, 2]
        return new

    with mh.ablate(layer, "L0 H1", by="resample", positions=2, samples=1):
        found = layer(texts, mask=masks.Causal())
    equal(found[0], attend_by_hand(layer, texts[0], scaled({}), causal=True)[0])
    equal(found[1], attend_by_hand(layer, texts[1], change, causal=True)[0])
