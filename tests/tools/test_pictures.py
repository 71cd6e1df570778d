"""The README's pictures are small enough, and show a head where it has large weights."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from multihead import masks
from tests.viewer.watching import watch
from tools import pictures


def png(picture: Image.Image) -> bytes:
    kept = io.BytesIO()
    picture.save(kept, "PNG")
    return kept.getvalue()


def noise(side: int) -> bytes:
    pixels = torch.randint(256, (side, side, 3), dtype=torch.uint8)
    return png(Image.frombytes("RGB", (side, side), pixels.numpy().tobytes()))


def test_a_plain_picture_keeps_its_size() -> None:
    packed = Image.open(io.BytesIO(pictures.packed(png(Image.new("RGB", (640, 400), "#FBFAF7")))))
    assert (packed.format, packed.size) == ("WEBP", (640, 400))


def test_a_picture_that_would_be_too_large_becomes_smaller() -> None:
    packed = pictures.packed(noise(256), most=20_000)
    assert len(packed) <= 20_000
    assert Image.open(io.BytesIO(packed)).width < 256


def test_a_picture_that_never_fits_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"A picture of 256 x 256 does not fit into 900 bytes\. Use a smaller one\."):
        pictures.packed(noise(256), most=900)


def test_an_animation_keeps_to_its_size_and_its_frames_in_their_order() -> None:
    colours = ["#FBFAF7", "#325AB4", "#150D2C"]
    packed = Image.open(io.BytesIO(pictures.moving([Image.new("RGB", (64, 40), each) for each in colours])))
    assert (packed.format, packed.size, getattr(packed, "n_frames", 1)) == ("WEBP", (64, 40), 3)
    for place, colour in enumerate(colours):
        packed.seek(place)
        shown, wanted = (each.convert("RGB").getpixel((0, 0)) for each in (packed, Image.new("RGB", (1, 1), colour)))
        assert max(abs(one - other) for one, other in zip(shown, wanted, strict=True)) < 8
    noisy = [Image.open(io.BytesIO(noise(128))).convert("RGB") for _ in range(3)]
    small = pictures.moving(noisy, most=20_000)
    assert len(small) <= 20_000
    assert Image.open(io.BytesIO(small)).width < 128


def test_an_animation_that_never_fits_is_rejected() -> None:
    noisy = [Image.open(io.BytesIO(noise(64))).convert("RGB") for _ in range(2)]
    with pytest.raises(ValueError, match=r"^2 pictures do not fit into 500 bytes\. Use fewer or smaller ones\.$"):
        pictures.moving(noisy, most=500)


def test_the_query_that_is_shown_looks_far_back() -> None:
    record = watch(200, mask=masks.Causal())
    query, key = pictures.far_pair(record, 0, 1)
    assert 100 <= query < 200
    assert 4 <= key <= query - 10
    row = record.layers[0].weights(1, queries=slice(query, query + 1))[0]
    assert float(row[key]) == float(row[4 : query - 9].max()) > 0.02


def test_the_heads_that_are_shown_are_the_clearest_of_their_kind() -> None:
    record = watch(60, heads=3, layers=2)
    rows = {(row["layer"], row["head"]): row for row in record.table().rows}
    first, second = pictures.heads(record)
    assert rows[first]["next_mass"] == max(row["next_mass"] for row in rows.values())
    assert rows[second]["previous_mass"] == max(row["previous_mass"] for row in rows.values())
