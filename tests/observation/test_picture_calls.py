"""The tokens of pictures are named by their measured places, in every call that is observed."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import multihead as mh
from tests.live_bytes import live_bytes
from tests.picture_families import ENCODERS, LANGUAGE_MODELS, Family, random_pictures
from tests.picture_records import written
from tests.viewer.page import Page

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
EIGHT = {**SIZES, "image_size": 8, "patch_size": 4}
DINO = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 24, "patch_size": 4}


def observed(model: nn.Module, height: int = 8, width: int = 12, **arguments: Any) -> mh.Record:
    with torch.no_grad(), mh.observe(model.eval()) as seen:
        model(pixel_values=torch.randn(2, 3, height, width), **arguments)
    return seen


def vit(size: int | tuple[int, int] = (8, 12)) -> nn.Module:
    return hf.ViTModel(hf.ViTConfig(**SIZES, image_size=size, patch_size=4))


def grid(rows: int, columns: int) -> list[str]:
    return [f"r{row} c{column}" for row in range(1, rows + 1) for column in range(1, columns + 1)]


def loaded(seen: mh.Record, folder: Path) -> mh.Record:
    seen.save(folder / "image.safetensors")
    return mh.Record.load(folder / "image.safetensors")


def test_an_image_is_its_class_token_and_its_patches_row_by_row(tmp_path: Path) -> None:
    seen = observed(vit())
    assert repr(seen) == "<Record of ViTModel: 1 layer, 2 heads, 2 images of 2 x 3 patches>"
    for record in (seen, loaded(seen, tmp_path)):
        assert len(record.texts) == 2
        for text in record.texts:
            assert text.tokens == ["[CLS]", *grid(2, 3)]
            assert text.special == [True] + [False] * 6
            assert text.gaps == [None, "\n", " ", " ", "\n", " ", " "]
            assert text.boxes is not None
            assert text.boxes.grid == (2, 3)
            assert text.boxes[6].box == (8.0, 4.0, 12.0, 8.0)
    page = Page(seen.report(tmp_path / "page.html").path)
    assert page.data["lead"] == "2 attention heads, as they look at one image of 2 x 3 patches. This is number 1 of 2."


def test_a_file_with_the_numbers_of_rows_and_columns_of_an_image_has_places(tmp_path: Path) -> None:
    file = tmp_path / "image.safetensors"
    loaded(observed(vit()), tmp_path)
    with safe_open(file, "pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    record = json.loads(metadata["record"])
    for text in record["texts"]:
        del text["boxes"]
        text["patches"] = [2, 3]
    save_file(tensors, file, {**metadata, "record": json.dumps(record)})
    text = mh.Record.load(file).texts[0]
    assert text.tokens == ["[CLS]", *grid(2, 3)]
    assert text.boxes is not None
    assert text.boxes.grid == (2, 3)
    assert text.boxes[6] == (0, 0, 5, None, (1, 2))


ALONE = dict  # the inputs of a model that takes pixels alone


@pytest.mark.parametrize(
    ("build", "inputs", "size", "first"),
    [
        (lambda: hf.DeiTModel(hf.DeiTConfig(**EIGHT)), ALONE, (8, 8), ["[CLS]", "[DIST]"]),
        (
            lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**EIGHT)),
            ALONE,
            (8, 8),
            ["[CLS]"],
        ),
        (lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**EIGHT)), ALONE, (8, 8), []),
        (
            lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**DINO, num_register_tokens=2)),
            ALONE,
            (24, 24),
            ["[CLS]", "[REG 1]", "[REG 2]"],
        ),
        (lambda: hf.Dinov2Model(hf.Dinov2Config(**DINO)), ALONE, (16, 36), ["[CLS]"]),
        (
            lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SIZES, image_size=24, patch_size=4, num_register_tokens=1)),
            ALONE,
            (16, 36),
            ["[CLS]", "[REG]"],
        ),
        (lambda: vit(24), partial(dict, interpolate_pos_encoding=True), (16, 36), ["[CLS]"]),
        (
            lambda: hf.PixtralVisionModel(hf.PixtralVisionConfig(**SIZES, image_size=24, patch_size=4)),
            partial(dict, image_sizes=torch.tensor([[16, 36]])),
            (16, 36),
            [],
        ),
    ],
    ids=["DeiT", "CLIP", "SigLIP", "DINOv2 with registers", "DINOv2", "DINOv3", "ViT", "Pixtral"],
)
def test_patches_are_named_in_the_picture_that_is_read_whatever_the_configuration_and_others_by_parameters(
    build: Callable[[], nn.Module], inputs: Callable[..., dict[str, Any]], size: tuple[int, int], first: list[str]
) -> None:
    model = build().eval()
    with torch.no_grad(), mh.observe(model) as seen:
        model(**inputs(pixel_values=torch.randn(1, 3, *size)))
    assert seen[0].sample().text.tokens == [*first, *grid(size[0] // 4, size[1] // 4)]


def test_the_patches_that_vit_mae_keeps_have_the_places_of_the_observed_call() -> None:
    model = hf.ViTMAEModel(hf.ViTMAEConfig(**EIGHT, mask_ratio=0.5)).eval()
    pixels, found = torch.zeros(1, 3, 8, 8), []
    torch.manual_seed(3)
    for patch in range(4):
        row, column = divmod(patch, 2)
        pixels[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = patch + 1
    model.embeddings.patch_embeddings.projection.register_forward_hook(lambda _, args, __: found.append(args[0]))
    with torch.no_grad(), mh.observe(model) as seen:
        kept = model(pixel_values=pixels).ids_restore[0]
    expected = sorted(range(4), key=lambda patch: int(kept[patch]))[:2]
    assert seen[0].sample().text.tokens == ["[CLS]", *(grid(2, 2)[patch] for patch in expected)]


def test_windows_of_a_picture_are_named_in_the_order_of_the_layer() -> None:
    config = hf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=(2, 1), num_heads=(2, 2), window_size=4)
    with torch.no_grad(), mh.observe(model := hf.SwinModel(config).eval()) as seen:
        model(pixel_values=torch.randn(2, 3, 16, 16))
    straight, shifted, merged = (layer.sample(1).text.tokens for layer in seen.layers)
    names = [[f"r{row} c{column}" for column in range(1, 9)] for row in range(1, 9)]
    assert straight[:8] == [*names[0][:4], *names[1][:4]]
    assert straight[16:20] == names[0][4:]
    assert shifted[:4] == names[2][2:6]
    assert merged == grid(4, 4)


def test_of_a_model_of_texts_and_images_the_image_encoder_is_named_without_a_processor() -> None:
    text = hf.CLIPTextConfig(**SIZES, vocab_size=20, max_position_embeddings=9)
    vision = hf.CLIPVisionConfig(**EIGHT)
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
    seen = observed(model, 8, 8, input_ids=torch.randint(3, 9, (2, 5)))
    of_layers = {layer.name.partition(".")[0]: layer.sample().text for layer in seen.layers}
    assert of_layers["vision_model"].tokens == ["[CLS]", *grid(2, 2)]
    assert of_layers["text_model"].boxes is None
    assert of_layers["text_model"].length == 5
    assert "2 texts of up to 5 tokens" in repr(seen)


class Words:
    """A tokenizer that names a token by its id."""

    all_special_ids = (1, 2)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return f"w{ids}" if isinstance(ids, int) else [f"w{each}" for each in ids]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(f"w{each}" for each in ([ids] if isinstance(ids, int) else ids))


def family(name: str) -> Family:
    torch.manual_seed(0)
    return {**ENCODERS, **LANGUAGE_MODELS}[name]()


def test_each_prompt_of_a_batch_has_its_own_picture_between_its_words(tmp_path: Path) -> None:
    one = family("Qwen2-VL, a batch of two sizes")
    with torch.no_grad(), mh.observe(one.model, processor=one.processor, tokenizer=Words()) as seen:
        one.model(**one.process(random_pictures(one.sizes)))
    for record in (seen, loaded(seen, tmp_path)):
        last = record.layers[-1]
        words = [last.sample(each).text.tokens for each in (0, 1)]
        assert words[0][2:-2] == ["w52", *grid(3, 4), "w53"]
        assert words[1][2:-2] == ["w52", *grid(5, 3), "w53"]
        text = last.sample(1).text
        assert text.boxes is not None
        assert text.boxes[3].box == pytest.approx((0, 0, 28, 28), abs=0.5)  # of 84 x 140 pixels
        assert text.special[:3] == [True, True, False]


def test_the_prompt_of_a_generation_has_places_and_the_new_words_have_none() -> None:
    one = family("LLaVA, two pictures")
    images = random_pictures(one.sizes)
    inputs = one.process(images)
    with torch.no_grad(), mh.observe(one.model, processor=one.processor, images=images, tokenizer=Words()) as seen:
        one.model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
    tower, last = seen.layers[0], seen.layers[-1]
    assert [tower.sample(each).text.tokens for each in (0, 1)] == [["[CLS]", *grid(4, 4)]] * 2
    text = last.sample().text
    prompt = inputs["input_ids"].shape[1]
    assert text.length == prompt + 2
    assert text.boxes is not None
    assert (text.boxes.picture[prompt:] < 0).all()
    assert text.tokens[3:5] == ["picture 1 r1 c1", "picture 1 r1 c2"]
    assert text.tokens[21:23] == ["picture 2 r1 c1", "picture 2 r1 c2"]


def test_the_patches_that_a_decoder_attends_to_have_places_while_it_generates() -> None:
    seen = written()
    crosses = [layer for layer in seen.layers if layer.sample().cross_attention]
    assert [layer.sample().num_queries for layer in crosses] == [4, 4]
    assert crosses[0].sample().text.tokens == ["[CLS]", *grid(2, 3)]
    row = crosses[1].weights(1)[2, 1:].view(2, 3) * 7  # times an even spread over 7 keys
    assert torch.equal(seen.image_weights(crosses[1].number, 1, 2), row)


def test_equal_shapes_with_another_text_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.observation import picture_calls

    one, measured = family("PaliGemma"), []
    measure = picture_calls.measure_places
    monkeypatch.setattr(
        picture_calls,
        "measure_places",
        lambda *given, **options: measured.append(given[1]["input_ids"]) or measure(*given, **options),
    )
    images = [random_pictures(one.sizes, seed) for seed in (0, 1, 2)]
    with torch.no_grad(), mh.observe(one.model, processor=one.processor) as seen:
        for number, each in enumerate(images):
            inputs = one.process(each)
            if number == 2:
                inputs["input_ids"] = inputs["input_ids"].roll(1, 1)
                inputs["token_type_ids"] = inputs["token_type_ids"].roll(1, 1)
            one.model(**inputs)
    assert len(measured) == 2
    firsts = [int((seen.layers[-1].sample(each).text.boxes.picture >= 0).int().argmax()) for each in range(3)]
    assert firsts == [3, 3, 4]


def test_without_pictures_there_is_one_sentence_and_a_record() -> None:
    one = family("LLaVA, two pictures")
    inputs = one.process(random_pictures(one.sizes))
    with pytest.warns(UserWarning, match="^Tokens of pictures have no places") as caught:  # noqa: SIM117
        with torch.no_grad(), mh.observe(one.model, processor=one.processor) as seen:
            one.model(**inputs)
    assert str(caught[0].message) == (
        "Tokens of pictures have no places. processor was given without images. Give the pictures that the processor "
        "made the inputs from: images=."
    )
    assert seen.layers[0].sample().text.boxes is None
    assert "preprocess" not in vars(one.processor)


def counted_passes(model: nn.Module) -> list[int]:
    """A list with the number of forward passes of a model so far."""
    passes = [0]

    def count(*_: object) -> None:
        passes[0] += 1

    model.register_forward_pre_hook(count)
    return passes


def test_places_are_measured_when_one_is_first_read_and_never_for_weights() -> None:
    model = vit()
    passes = counted_passes(model)
    seen = observed(model)
    seen.layers[0].weights(0)
    assert passes == [1]
    with torch.no_grad(), mh.observe(model) as other:  # the record of another run has no pass of this measurement
        assert seen.layers[0].means().keys() >= {"patch_distance"}
        model(pixel_values=torch.randn(1, 3, 8, 12))
    assert passes[0] > 10
    assert other.layers[0].num_samples == 1
    before = passes[0]
    assert seen.texts[1].tokens == ["[CLS]", *grid(2, 3)]
    assert seen.layers[0].kinds == (("broad",), ("broad",))
    assert passes == [before]


def test_measuring_that_takes_long_shows_a_bar_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from multihead.observation import picture_calls

    model = vit()
    assert observed(model).texts[0].boxes is not None
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(picture_calls, "_SECONDS_BEFORE_BAR", 0)
    seen = observed(model)
    assert "Places of picture tokens" not in capsys.readouterr().err
    assert seen.texts[0].boxes is not None
    assert "Places of picture tokens" in capsys.readouterr().err


def test_places_of_a_model_that_no_longer_exists_or_has_moved_are_missing_with_one_sentence(tmp_path: Path) -> None:
    model = vit()
    moved, kept, lost = observed(model), observed(vit()), observed(vit())
    model.to("meta")
    gc.collect()
    with pytest.warns(UserWarning, match="no longer exists") as caught:
        assert lost.texts[0].boxes is None
    assert len(caught) == 1
    assert str(caught[0].message) == (
        "Tokens of pictures have no places, because the model no longer exists. Read them before: record.texts; or "
        "give processor= to observe."
    )
    with pytest.warns(UserWarning, match=r"because the model has moved to meta\. Read them before: record\.texts; or"):
        assert moved.texts[0].boxes is None
    assert "patch_distance" not in lost.layers[0].means()
    with pytest.warns(UserWarning, match="no longer exists"):
        assert loaded(kept, tmp_path).texts[0].boxes is None


def test_a_copy_of_a_record_has_the_places() -> None:
    model = vit()
    copy = deepcopy(observed(model))
    del model
    gc.collect()
    assert copy.texts[0].tokens == ["[CLS]", *grid(2, 3)]


def test_a_record_keeps_a_small_grey_copy_of_each_picture(tmp_path: Path) -> None:
    one = family("LLaVA, two pictures")
    large = Image.linear_gradient("L").resize((1000, 500)).convert("RGB")
    images = [random_pictures(one.sizes)[0], large]
    with torch.no_grad(), mh.observe(one.model, processor=one.processor) as seen:
        one.model(**one.process(images))
    for record in (seen, loaded(seen, tmp_path)):
        assert list(map(repr, record[-1 + len(record.layers)].sample().text.pictures)) == [
            "<Picture: 156 x 100 pixels, kept as 156 x 100>",
            "<Picture: 1000 x 500 pixels, kept as 640 x 320>",
        ]
        (tower,) = record.layers[0].sample(1).text.pictures
        assert (tower.width, tower.height) == (1000, 500)
        shown = Image.open(BytesIO(tower.png()))
        expected = np.asarray(large.convert("L").resize((640, 320), Image.Resampling.BOX))
        assert np.array_equal(np.asarray(shown), expected)


def test_without_a_processor_the_grey_copy_is_of_the_pixels_and_of_each_sample() -> None:
    model, pixels = vit(), torch.randn(2, 3, 8, 12)
    with torch.no_grad(), mh.observe(model) as seen:
        model(pixel_values=pixels)
    for sample in (0, 1):
        (picture,) = seen.texts[sample].pictures
        levels = pixels[sample].mean(0)
        expected = (levels - levels.min()) / (levels.max() - levels.min()) * 255
        assert (picture.grey - expected).abs().max() <= 0.51


def test_places_take_at_most_a_tenth_more_live_memory_than_the_model_and_what_the_record_keeps() -> None:
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    model, images = hf.ViTModel(hf.ViTConfig(**sizes, image_size=256)).eval(), random_pictures(((256, 256),))
    processor = hf.ViTImageProcessorPil(size={"height": 256, "width": 256})
    inputs = processor(images=images, return_tensors="pt")
    with torch.no_grad(), live_bytes() as unobserved:
        model(**inputs)
    with torch.no_grad(), live_bytes() as observed, mh.observe(model) as seen:
        model(**inputs)
    with live_bytes() as at_first_read:
        found = seen.texts[0].boxes
    with live_bytes() as with_processor:
        tables = mh.places(model, inputs, processor, images)
    assert found is not None
    assert found.grid == tables["layers.0.attention"].grid == (16, 16)
    for measured in (at_first_read, with_processor):
        assert observed.kept + measured.peak <= 1.1 * (unobserved.peak + observed.kept)
