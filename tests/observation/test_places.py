"""Each key has the place in the picture that its patches come from, or none; nothing is known about families."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn

import multihead as mh
from multihead.probes.places import NO_PICTURE, NO_PLACE, Box, Cell, Place, PlaceTable
from tests.picture_families import ENCODERS, LANGUAGE_MODELS, Family, Inputs, random_pictures
from tests.picture_oracle import judge_places

# Each differs from the others in what matters; `python -m tools.places` judges all families.
JUDGED = (
    "ViT, another size",
    "DINOv2, two pictures cropped",
    "ViT-MAE",
    "Swin",
    "Pixtral, two sizes",
    "SigLIP 2",
    "Qwen2-VL, a batch of two sizes",
    "LLaVA-NeXT, two pictures",
    "Idefics 3, a batch of other tile counts",
)


def family(name: str) -> Family:
    torch.manual_seed(0)
    return {**ENCODERS, **LANGUAGE_MODELS}[name]()


def places_of(one: Family, **options: Any) -> dict[str, PlaceTable]:
    images = random_pictures(one.sizes)
    inputs = one.process(images)
    torch.manual_seed(0)
    return mh.places(one.model, inputs, one.processor, one.nest(images), **options)


def in_bfloat16(one: Family) -> Family:
    def inputs(made: Inputs) -> Inputs:
        given = one.inputs(made)
        return {**given, "pixel_values": given["pixel_values"].bfloat16()}

    return replace(one, model=one.model.bfloat16(), inputs=inputs)


@pytest.mark.parametrize("name", JUDGED)
def test_where_a_pixel_changes_the_keys_with_its_place_change_and_no_others(name: str) -> None:
    one = family(name)
    tables = places_of(one)
    assert not any(bool((table.picture == NO_PLACE).any()) for table in tables.values())
    assert judge_places(one, tables, pixels=6) == (6, 6, [])


def test_places_are_found_in_half_precision() -> None:
    one = in_bfloat16(family("InternVL"))
    assert judge_places(one, places_of(one), pixels=6) == (6, 6, [])


def test_a_picture_in_tiles_has_the_whole_as_view_0_and_the_tiles_as_view_1() -> None:
    table = list(places_of(family("InternVL")).values())[-1]
    assert repr(table) == "<PlaceTable: 12 keys in 1 pictures, 6 outside, 0 without a place>"
    assert table.view[0].tolist() == [-1] * 3 + [1] * 8 + [0] * 4 + [-1] * 3  # two tiles, the thumbnail
    whole, tiles = (table.box[table.view == view] for view in (0, 1))
    expected = torch.tensor([[78.0 * c, 50.0 * r, 78.0 * c + 78, 50.0 * r + 50] for r in (0, 1) for c in (0, 1)])
    assert torch.allclose(whole, expected, atol=0.5)
    expected = torch.tensor([[39.0 * c, 50.0 * r] for first in (0, 2) for r in (0, 1) for c in (first, first + 1)])
    assert torch.allclose(tiles[:, :2], expected, atol=0.5)
    assert table.cell[table.view == 0].tolist() == [[r, c, 2, 2] for r in (0, 1) for c in (0, 1)]
    assert table.cell[table.view == 1].tolist() == [
        [r, c, 2, 4] for first in (0, 2) for r in (0, 1) for c in (first, first + 1)
    ]


def test_boxes_of_large_pictures_are_exact_to_half_a_pixel_though_grey_has_256_levels() -> None:
    one = family("Qwen2-VL, two pictures")
    one = replace(one, sizes=((1700, 130),))
    images = random_pictures(one.sizes)
    inputs = one.process(images)
    table = next(iter(mh.places(one.model, inputs, one.processor, images).values()))
    _, rows, columns = inputs["image_grid_thw"][0].tolist()
    width, height = 1700 / columns, 130 / rows
    steps = table.box[0] / torch.tensor([width, height, width, height])
    assert (steps - steps.round()).abs().mul(width).max() < 0.5
    assert len(steps.round().unique(dim=0)) == rows * columns


def vit(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return hf.ViTModel(hf.ViTConfig(**{**sizes, "image_size": 8, "patch_size": 4, **options}))


def test_without_a_processor_boxes_are_in_pixels_of_the_input() -> None:
    table = mh.places(vit(), {"pixel_values": torch.rand(2, 3, 8, 8)})["layers.1.attention"]
    assert table.picture.tolist() == [[NO_PICTURE, 0, 0, 0, 0], [NO_PICTURE, 1, 1, 1, 1]]
    assert table[0, 0] is None
    assert table[1, 4] == Place(picture=1, view=0, patch=3, box=Box(4.0, 4.0, 8.0, 8.0), cell=Cell(1, 1))


def test_without_a_configuration_the_first_convolution_has_the_size_of_a_patch() -> None:
    model = vit()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = type("Config", (type(module.config),), {})(**module.config.to_dict())
            module.config.patch_size = 3
    table = mh.places(model, {"pixel_values": torch.rand(1, 3, 8, 8)})["layers.0.attention"]
    assert table[0, 2] == Place(picture=0, view=0, patch=1, box=Box(4.0, 0.0, 8.0, 4.0), cell=Cell(0, 1))


def test_rows_of_patches_have_numbers_without_a_processor() -> None:
    one = family("Qwen2.5-VL")
    inputs = one.process(random_pictures(one.sizes))
    with pytest.warns(UserWarning, match="^pixel_values is rows of patches") as caught:
        tables = list(mh.places(one.model, inputs).values())
    assert str(caught[0].message) == (
        "pixel_values is rows of patches, which do not show where in the picture they are, so tokens are named by the "
        "numbers of their patches. Give processor= and images=."
    )
    assert sorted(tables[0].patch[0].tolist()) == list(range(48))
    assert tables[-1][0, 4] == Place(picture=0, view=0, patch=4, box=None, cell=None)


class Overlapping(nn.Module):
    """A layer of attention over the outputs of a convolution whose windows overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, kernel_size=6, stride=4, padding=1)
        self.attention = mh.MultiHeadAttention(embed_dim=8, num_heads=2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.attention(self.patches(pixel_values).flatten(2).mT)


def test_a_key_of_overlapping_patches_has_no_place() -> None:
    table = mh.places(Overlapping(), {"pixel_values": torch.rand(1, 3, 16, 16)})["attention"]
    assert (table.picture == NO_PLACE).all()
    assert table[0, 5] is None


def test_looking_for_places_in_a_network_of_convolutions_takes_two_runs() -> None:
    calls = []
    (model := Overlapping()).patches.register_forward_hook(lambda *_: calls.append(0))
    with torch.no_grad(), mh.observe(model) as seen:
        model(pixel_values=torch.rand(1, 3, 16, 16))
    assert len(calls) == 1
    assert seen[0].sample().text.boxes is None
    assert len(calls) == 3


def test_a_model_is_left_in_its_mode_and_random_numbers_in_their_state() -> None:
    model = vit(hidden_dropout_prob=0.5).train()
    model.layernorm.eval()
    state = torch.get_rng_state()
    table = mh.places(model, {"pixel_values": torch.rand(1, 3, 8, 8, generator=torch.Generator())})
    assert table["layers.0.attention"].has_places
    assert model.training
    assert not model.layernorm.training
    assert torch.equal(torch.get_rng_state(), state)


_SQUARE = hf.ViTImageProcessorPil(size={"height": 8, "width": 8})
_FLAT = hf.ViTImageProcessorPil(size={"height": 4, "width": 8})
_OTHER_PIXELS = (
    "The processor makes pixel_values with {} from images, and not with {}. Give the pictures nested as the processor "
    "got them, and a processor with all options of that call: "
    "functools.partial(processor.image_processor, crop_to_patches=True)."
)
REJECTED: list[tuple[dict[str, Any], str]] = [
    (
        {"inputs": {"input_ids": torch.ones(1, 2)}},
        (
            "inputs has no pixel_values; it has input_ids. "
            "Give the inputs of a call with pictures, as the model's processor returns them."
        ),
    ),
    (
        {"inputs": {"pixel_values": torch.ones(1, 3, 8, 8, dtype=torch.uint8)}},
        (
            "pixel_values is a tensor of torch.uint8 with 4 dimensions. "
            "Give floating-point pixels: (pictures, channels, height, width), or (patches, values)."
        ),
    ),
    (
        {"inputs": torch.rand(1, 3, 8, 8)},
        (
            "inputs is a tensor of shape (1, 3, 8, 8), and must be the arguments of the model's call by name. "
            "Give what the processor returns."
        ),
    ),
    (
        {"images": [Image.new("RGB", (8, 8))]},
        "images was given without processor. Give the processor that made the inputs from them.",
    ),
    (
        {"processor": _SQUARE},
        "processor was given without images. Give the pictures that the processor made the inputs from: images=.",
    ),
    (
        {"processor": _SQUARE, "images": ["cat.png"]},
        "images holds a string. Give pictures of Pillow, or arrays of (height, width, channels).",
    ),
    (
        {"processor": _SQUARE, "images": random_pictures(((9, 9),))},
        _OTHER_PIXELS.format("other values", "those of the inputs"),
    ),
    (
        {"processor": _FLAT, "images": random_pictures(((9, 9),))},
        _OTHER_PIXELS.format("(1, 3, 4, 8)", "(1, 3, 8, 8)"),
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), REJECTED)
def test_arguments_that_have_no_places_are_rejected(arguments: dict[str, Any], sentence: str) -> None:
    given = {"inputs": {"pixel_values": torch.rand(1, 3, 8, 8)}, **arguments}
    with pytest.raises(mh.errors.ArgumentError) as caught:
        mh.places(vit(), **given)
    assert str(caught.value) == sentence


def test_a_call_that_continues_a_cache_is_rejected() -> None:
    cache = hf.DynamicCache()
    cache.update(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), 0)
    with pytest.raises(mh.errors.ArgumentError) as caught:
        mh.places(vit(), {"pixel_values": torch.rand(1, 3, 8, 8), "past_key_values": cache})
    assert str(caught.value) == (
        "past_key_values holds 3 tokens, so the call continues an earlier one. Give the inputs of the call that reads "
        "the pictures."
    )


def counting(_: nn.Module, __: tuple[Any, ...], output: Tensor, *, calls: list[int]) -> Tensor:
    calls.append(0)
    return output + len(calls)


def test_a_model_that_does_not_run_alike_has_no_places() -> None:
    model = Overlapping()
    model.patches.register_forward_hook(partial(counting, calls=[]))
    with pytest.raises(mh.errors.ModelError) as caught:
        mh.places(model, {"pixel_values": torch.rand(1, 3, 16, 16)})
    assert str(caught.value) == (
        "The tokens have no places in pictures: keys of attention change from run to run with equal inputs and equal "
        "random numbers. Observe the model without processor=, or give a model and inputs that run alike each time."
    )
    model = Overlapping()
    nn.init.constant_(model.patches.weight, torch.nan)
    with pytest.raises(mh.errors.ModelError) as caught:
        mh.places(model, {"pixel_values": torch.rand(1, 3, 16, 16)})
    assert str(caught.value) == (
        "The tokens have no places in pictures: keys of attention are NaN or infinite without attention. Observe the "
        "model without processor=, or give a model and inputs that run alike each time."
    )


def test_places_of_an_encoder_of_twelve_layers_take_six_runs_and_those_that_end_in_its_first_layer() -> None:
    model, ran, reported = vit(num_hidden_layers=12, image_size=56), [0] * 12, []
    for number, block in enumerate(model.layers):
        block.register_forward_hook(lambda *_, number=number: ran.__setitem__(number, ran[number] + 1))
    mh.places(model, {"pixel_values": torch.rand(1, 3, 56, 56)}, progress=lambda *each: reported.append(each))
    assert ran == [6] * 11 + [1]  # five end with the keys of the last layer
    assert reported == [(done, 25) for done in range(25)]


@pytest.mark.parametrize("name", ["LLaVA, two pictures", "Qwen2-VL, two pictures", "Idefics 3, two pictures"])
def test_for_the_layers_of_a_language_model_the_image_encoder_runs_from_its_last_block_in_use_on(name: str) -> None:
    one, runs = family(name), [0]

    def count(*_: object) -> None:
        runs[0] += 1

    blocks = next(module for module in one.model.modules() if isinstance(module, nn.ModuleList))
    list(blocks[0].children())[-1].register_forward_hook(count)
    reported: list[tuple[int, int]] = []
    *_, last = places_of(one, progress=lambda *each: reported.append(each)).values()
    assert last.has_places
    done, expected = reported[-1]
    assert reported[0][1] < expected  # the language model is measured by itself
    assert expected - 4 <= done < expected
    assert runs[0] <= 9  # two runs of unchanged pixels, four checks, one of all pixels, and one or two to store outputs
