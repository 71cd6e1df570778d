"""What a page gets of pictures: views, groups of keys, and rows of weights that equal `Record.image_weights`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from multihead.locale.texts import text
from multihead.observation.record import Record
from multihead.viewer.offline import PackedArrays
from multihead.viewer.page_types import SampleDescription
from multihead.viewer.payload import RecordedRun, describe_sample
from multihead.viewer.pictures import ANSWER_GROUP, add_rows, rows_of_tokens
from tests.picture_records import encoder, generated, written
from tests.viewer.serving import serving


@cache
def described(make: Callable[[], Record]) -> tuple[Record, SampleDescription]:
    record = make()
    return record, describe_sample(RecordedRun("a", record), 0)


def test_an_image_encoder_opens_with_its_class_token_and_its_boxes_are_in_pixels_of_the_picture() -> None:
    _, sample = described(encoder)
    (part,) = sample["pictures"]
    assert part["layers"] == [0, 1, 2]
    assert part["groups"] == [1, *[0] * 6]
    assert part["opening"] == 0
    (view,) = part["views"]
    assert (view["rows"], view["columns"], view["keys"]) == (2, 3, [1, 2, 3, 4, 5, 6])
    assert view["boxes"][:8] == [0, 0, 4, 4, 4, 0, 8, 4]
    assert sample["images"][0]["width"] == 12
    assert sample["images"][0]["source"].startswith("data:image/png;base64,")
    assert sample["lead"] == text("viewer.lead image", "en", heads="6", rows="2", columns="3")


def test_a_language_model_comes_first_and_opens_with_the_first_word_of_its_answer_that_has_a_content() -> None:
    record, sample = described(generated)
    words, tower = sample["pictures"]
    assert (words["layers"], tower["layers"]) == ([3, 4], [0, 1, 2])
    answer = [key for key, group in enumerate(words["groups"]) if group == ANSWER_GROUP]
    assert answer == [40, 41, 42]
    tokens = record.layers[-1].sample().text.tokens or []
    assert [tokens[key] for key in answer] == ["the", "cat", "sits"]
    assert words["opening"] == 41
    assert [view["picture"] for view in words["views"]] == [0, 1]
    assert len(sample["images"]) == 2


def test_rows_times_the_visible_keys_are_the_weights_of_the_picture() -> None:
    record, sample = described(generated)
    part = sample["pictures"][0]
    ones = [record.layers[number].sample() for number in part["layers"]]
    for query in (39, 30):  # the row that predicts the first word; one that sees a part of the second picture
        rows = rows_of_tokens(ones, [query]).view(2, -1, len(part["groups"]))
        seen = ~rows.isnan()
        assert seen[0, 0].tolist() == [key <= query for key in range(rows.shape[2])]
        for place, number in enumerate(part["layers"]):
            for view in part["views"]:
                expected = record.image_weights(number, 1, query, picture=view["picture"]).flatten()
                found = (rows[place, 1] * seen[place, 1].sum())[view["keys"]].nan_to_num(0)
                assert torch.allclose(found, expected.float(), rtol=0, atol=1e-5)


def test_rows_that_are_read_together_are_those_read_one_by_one() -> None:
    for make in (generated, written):
        record, sample = described(make)
        for part in sample["pictures"]:
            ones = [record.layers[number].sample() for number in part["layers"]]
            tokens = [0, 5, 3, 1, *range(len(part["groups"])), 0, 0, len(part["groups"])]  # up, down, again, unknown
            alone = torch.cat([rows_of_tokens(ones, [token]) for token in tokens], 1)
            assert torch.allclose(rows_of_tokens(ones, tokens), alone, rtol=0, atol=1e-7, equal_nan=True)


def test_in_cross_attention_the_queries_follow_the_keys_and_the_words_come_first() -> None:
    record, sample = described(written)
    words, encoder_part = sample["pictures"]
    assert (words["layers"], encoder_part["layers"]) == ([3, 5], [0, 1])
    assert words["groups"] == [1, *[0] * 6, 2, *[ANSWER_GROUP] * 3]
    assert (words["keys"], words["opening"]) == (7, 8)
    ones = [record.layers[number].sample() for number in words["layers"]]
    rows = rows_of_tokens(ones, [7 + 2]).view(2, 2, 11)
    assert rows[:, :, 7:].isnan().all()
    for place, number in enumerate(words["layers"]):
        expected = record.image_weights(number, 1, 2).flatten()
        assert torch.allclose(rows[place, 1, 1:7] * 7, expected.float(), rtol=0, atol=1e-5)
    arrays = PackedArrays(60_000)
    assert add_rows(arrays, ones, words, "0/0 pictures 0") == [7, 9, 8]


@pytest.mark.parametrize("room", [60_000, 12_000])
def test_a_page_has_the_opening_row_first_and_then_as_many_as_fit(room: int) -> None:
    record, sample = described(generated)
    part = sample["pictures"][0]
    arrays = PackedArrays(room)
    stored = add_rows(arrays, [record.layers[number].sample() for number in part["layers"]], part, "0/0 pictures 0")
    assert stored[:3] == [40, 41, 39]  # the rows that predict "cat", and the other words, the last one first
    assert arrays.num_bytes <= room
    assert list(arrays.descriptions) == [f"0/0 pictures 0 {token}" for token in stored]
    heads = [each["shape"][0] for each in arrays.descriptions.values()]
    if room == 60_000:
        assert heads == [8] * len(stored)
        assert set(stored) >= set(part["views"][0]["keys"]) | set(part["views"][1]["keys"])
    else:
        assert heads == sorted(heads, reverse=True)
        assert {8, 2} == set(heads)


def test_the_viewer_answers_with_the_rows_of_all_heads() -> None:
    record, sample = described(generated)
    with serving(RecordedRun("a.safetensors", record)) as served:
        answer = served.get("api/runs/0/samples/0/pictures/0?query=41")
        expected = rows_of_tokens([record.layers[number].sample() for number in sample["pictures"][0]["layers"]], [41])[
            :, 0
        ]
        assert torch.equal(torch.tensor(answer.floats).nan_to_num(-1), expected.nan_to_num(-1))
        missing = served.get("api/runs/0/samples/0/pictures/2?query=41")
        assert (missing.status, missing.error) == (404, "There is no text with pictures 2. Give a number from 0 to 1.")
        missing = served.get("api/runs/0/samples/0/pictures/0?query=43")
        assert (missing.status, missing.error) == (404, "There is no query 43. Give a number from 0 to 42.")
