"""Weights, sums and rollout on pictures equal dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn
from transformers.masking_utils import eager_mask

import multihead as mh
from multihead.record.pictures import keys_of_view, read_by_query
from multihead.record.texts import group_of_keys
from tests.picture_families import LANGUAGE_MODELS, PICTURE_TOKEN, random_pictures

mpl.use("agg")
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": (2,), "num_heads": (2,), "window_size": 4}


def vit() -> nn.Module:
    torch.manual_seed(0)
    return hf.ViTModel(hf.ViTConfig(**SIZES, image_size=(8, 12), patch_size=4)).double().eval()


def dense_weights(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The weights of each layer, (batch, heads, queries, keys); transformers' eager attention rounds to float32."""
    found = []

    def dense(
        _: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        scores = query @ key.mT * scaling
        found.append((scores if mask is None else scores + mask).softmax(-1))
        return (found[-1] @ value).transpose(1, 2), None

    hf.AttentionInterface.register("dense", dense)
    hf.AttentionMaskInterface.register("dense", eager_mask)
    model.set_attn_implementation("dense")
    with torch.no_grad():
        model(**inputs)
    return found


def observed(model: nn.Module, **options: Any) -> tuple[mh.Record, list[Tensor]]:
    """A record of two pictures, and the dense weights of each layer."""
    pixels = torch.randn(2, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), mh.observe(model, **options) as seen:
        model(pixel_values=pixels)
    return seen, dense_weights(model, {"pixel_values": pixels})


def test_weights_of_a_picture_are_those_of_dense_attention_times_the_number_of_visible_keys() -> None:
    seen, dense = observed(vit())
    for layer, weights in enumerate(dense):
        for query, index in (("[CLS]", 0), ("r2 c1", 4), (-1, 6)):
            expected = 7 * weights[1, :, index, 1:].reshape(2, 2, 3)
            found = [seen.image_weights(layer, head, query, sample=1) for head in (0, 1)]
            assert torch.allclose(torch.stack(found), expected, rtol=0, atol=1e-9)
            mean = seen.image_weights(layer, "mean", query, sample=1)
            assert torch.allclose(mean, expected.mean(0), rtol=0, atol=1e-9)


def test_one_reading_of_a_query_has_the_weights_of_all_heads_and_their_shares() -> None:
    seen, dense = observed(vit())
    reading = read_by_query(seen.layers[1], "r2 c1", sample=1)
    weights = dense[1][1, :, 4]
    assert reading.query == 4
    assert torch.allclose(reading.weights, 7 * weights, rtol=0, atol=1e-9)
    assert torch.allclose(reading.mean, 7 * weights.mean(0), rtol=0, atol=1e-9)
    shares = torch.stack([weights[:, 1:].sum(1), weights[:, 0], torch.zeros(2)], 1)
    assert torch.allclose(reading.shares, shares, rtol=0, atol=1e-9)
    boxes = seen.layers[1].sample().text.boxes
    assert boxes is not None
    assert boxes.views == [(0, 0, 2, 3)]
    assert keys_of_view(boxes, 0, 0).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_the_words_of_a_prompt_are_a_group_of_their_own() -> None:
    one = LANGUAGE_MODELS["LLaVA, two pictures"]()
    with torch.no_grad(), mh.observe(one.model, processor=one.processor) as seen:
        one.model(**one.process(random_pictures(one.sizes)))
    text = seen.layers[-1].sample().text
    groups = group_of_keys(text)
    assert text.ids is not None
    assert groups.tolist() == [0 if each == PICTURE_TOKEN else 2 for each in text.ids.tolist()]
    row = seen.layers[-1].weights(queries=slice(-1, None))[:, 0].double()
    shares = read_by_query(seen.layers[-1], -1).shares
    expected = torch.stack([row[:, groups == 0].sum(1), torch.zeros(len(row)), row[:, groups == 2].sum(1)], 1)
    assert torch.allclose(shares, expected, rtol=0, atol=1e-6)


def test_what_a_picture_receives_is_the_sum_over_all_queries_relative_to_an_even_spread() -> None:
    seen, dense = observed(vit())
    expected = dense[2][0, 1].sum(0)[1:].reshape(2, 3)
    assert torch.allclose(seen.image_received(2, 1), expected, rtol=0, atol=1e-9)
    expected = dense[2][0].mean(0).sum(0)[1:].reshape(2, 3)
    assert torch.allclose(seen.image_received(2, "mean"), expected, rtol=0, atol=1e-9)


def test_rollout_is_the_product_of_dense_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihead.record.pictures._CELLS_AT_ONCE", 40)  # strips of two queries
    seen, dense = observed(vit())
    for last in (2, 1):
        whole = torch.eye(7, dtype=torch.float64)
        for weights in dense[: last + 1]:
            whole = (torch.eye(7, dtype=torch.float64) + weights[1].mean(0)) / 2 @ whole
        for query in ("[CLS]", 3):
            found = seen.rollout(query, layer=last, sample=1)
            assert torch.allclose(found, whole[0 if query == "[CLS]" else 3], rtol=0, atol=1e-9)
    assert float(seen.rollout(0).sum()) == pytest.approx(1)


def test_both_parts_of_a_language_model_equal_dense_attention() -> None:
    torch.manual_seed(0)
    one = LANGUAGE_MODELS["LLaVA, two pictures"]()
    model, images = one.model.double(), random_pictures(one.sizes)
    inputs = one.process(images)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    with torch.no_grad(), mh.observe(model, processor=one.processor, images=images) as seen:
        model(**inputs)
    weights = dense_weights(model, inputs)
    tower, words = weights[:3], weights[3:]
    found = seen.image_weights("model.language_model.layers.1.self_attn", 1, -1, picture=1)
    length = inputs["input_ids"].shape[1]
    assert torch.allclose(found, length * words[1][0, 1, -1, 21:37].reshape(4, 4), rtol=0, atol=1e-9)
    early = seen.image_weights("model.language_model.layers.0.self_attn", 0, 30, picture=0)  # 31 visible keys
    assert torch.allclose(early, 31 * words[0][0, 0, 30, 3:19].reshape(4, 4), rtol=0, atol=1e-9)
    found = seen.image_weights(1, 3, 0, sample=1)
    assert torch.allclose(found, 17 * tower[1][1, 3, 0, 1:].reshape(4, 4), rtol=0, atol=1e-9)


def test_a_query_of_a_window_reads_nothing_outside_of_it() -> None:
    with torch.no_grad(), mh.observe(model := hf.SwinModel(hf.SwinConfig(**SWIN)).eval()) as seen:
        model(pixel_values=torch.randn(1, 3, 16, 16))
    found = seen.image_weights(0, 0, "r1 c6")
    assert (found[:4, 4:] > 0).all()
    assert float(found.sum()) == pytest.approx(16)
    assert int((found == 0).sum()) == 48
    with pytest.raises(mh.errors.ProbeError) as caught:
        seen.rollout(0)
    assert str(caught.value) == (
        "The tokens of encoder.layers.0.blocks.0.attention are in another order than those of "
        "encoder.layers.0.blocks.1.attention. Look at the layers one by one: image_weights."
    )


def test_a_plot_has_one_scale_and_outlines_the_query() -> None:
    seen, _ = observed(vit())
    image = Image.new("RGB", (12, 8))
    axes = seen.plot_image(1, 0, "r2 c1", image=image)
    assert axes.get_title() == "L1 H0 reads for r2 c1"
    drawn = axes.images[-1]
    assert drawn.get_clim() == (0.1, 100)
    assert drawn.get_interpolation() == "nearest"
    assert drawn.get_extent() == [0, 12, 8, 0]
    (outline,) = axes.patches
    assert outline.get_bbox().bounds == (0, 4, 4, 4)
    axes = seen.plot_image(1, "mean")
    assert axes.get_title() == "L1 mean of heads, read by all queries"
    assert not axes.patches


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda seen: seen.image_weights(0, 0, "r9 c9"),
            (
                "There is no token 'r9 c9'. "
                'Give the index of a query, or a name that one has, such as "[CLS]" or "r2 c5".'
            ),
        ),
        (
            lambda seen: seen.image_weights(0, 0, 7),
            "query is 7. Give an integer from 0 to 6, or the name of a token.",
        ),
        (lambda seen: seen.image_weights(0, "all", 0), "head is 'all'. Give the index of a head, or \"mean\"."),
        (
            lambda seen: seen.image_weights(0, 0, 0, picture=1),
            "There is no view 0 of a picture 1. Give picture=0, view=0.",
        ),
    ],
)
def test_wrong_arguments_are_rejected(call: Callable[[mh.Record], object], sentence: str) -> None:
    seen, _ = observed(vit())
    with pytest.raises(mh.errors.ArgumentError) as caught:
        call(seen)
    assert str(caught.value) == sentence


def test_a_record_of_texts_has_no_pictures() -> None:
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    with mh.observe(layer) as seen:
        layer(torch.randn(1, 5, 8))
    with pytest.raises(mh.errors.ProbeError) as caught:
        seen.image_weights(0, 0, 0)
    assert str(caught.value) == (
        "The tokens of MultiHeadAttention have no places in pictures. Observe the model with processor=, and call the "
        "processor in the context or give images=."
    )
