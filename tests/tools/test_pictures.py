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
