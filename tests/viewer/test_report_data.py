"""The contents of the page: every fact is read off the record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.record.analysis.highlights import layer_profiles
from multihead.viewer import report_data
from multihead.viewer.page_budget import StoredMaps
from multihead.viewer.tokens import layout_of_tokens
from tests.dense_record import DenseRecord, random_weights, record_of

SPECIAL = [True, *[False] * 28, True]
TOKENS = ["[CLS]", *["word"] * 28, "[SEP]"]


def facts_of(record: Any, **given: Any) -> dict[str, str]:
    texts = {"main": layout_of_tokens(TOKENS), **given}
    return dict(report_data.facts_of_record(record, layer_profiles(record.layers), texts, sample=0, lang="en"))


def masked(seen: Tensor) -> DenseRecord:
    return record_of(random_weights(2, 30, 30, seen=seen), seen=seen)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (torch.ones(30, 30, dtype=torch.bool), "full, both ways"),
        (torch.ones(30, 30, dtype=torch.bool).tril(), "causal"),
        (torch.ones(30, 30, dtype=torch.bool).tril().triu(-4), "causal, 4 tokens back"),
        (torch.ones(30, 30, dtype=torch.bool).tril(2).triu(-4), "window, 4 back and 2 ahead"),
        (torch.rand(30, 30) > 0.5, "masked"),
    ],
    ids=["full", "causal", "causal window", "window", "other"],
)
def test_the_attention_is_read_off_the_mask(seen: Tensor, expected: str) -> None:
    assert facts_of(masked(seen))["Attention"] == expected


def test_layers_with_different_masks_are_counted() -> None:
    full = masked(torch.ones(30, 30, dtype=torch.bool))
    causal = masked(torch.ones(30, 30, dtype=torch.bool).tril())
    record = DenseRecord([*causal.layers, *full.layers, *causal.layers])
    assert facts_of(record)["Attention"] == "causal in 2 layers; full, both ways in 1 layer"


def test_layers_with_different_heads_are_counted_apart() -> None:
    found = facts_of(record_of(random_weights(2, 30, 30), random_weights(5, 30, 30)))
    assert (found["Layers"], found["Heads"]) == ("2", "7")
    assert facts_of(record_of(random_weights(2, 30, 30)))["Layers × heads"] == "1 × 2"


def test_cross_attention_is_called_so() -> None:
    found = facts_of(record_of(random_weights(2, 30, 50)), keys=layout_of_tokens(["x"] * 50))
    assert found["Attention"] == "cross-attention"
    assert found["Key tokens"] == "50"


def test_the_texts_of_a_layer_are_found_by_their_lengths() -> None:
    texts = {"main": layout_of_tokens(["q"] * 4), "keys": layout_of_tokens(["k"] * 9)}
    record = DenseRecord(
        [
            *record_of(random_weights(1, 9, 9)).layers,
            *record_of(random_weights(1, 4, 4)).layers,
            *record_of(random_weights(1, 4, 9)).layers,
            *record_of(random_weights(1, 2, 4), query_start=2).layers,
            *record_of(random_weights(1, 3, 5)).layers,
        ]
    )
    data = report_data.page_data(
        record, layer_profiles(record.layers), texts, sample=0, special=None, tokens=["q"] * 4, lang="en"
    )
    named = [
        (one["queryTokens"]["text"], one["keyTokens"]["text"], one["queryTokens"]["from"]) for one in data["layers"]
    ]
    assert named == [
        ("keys", "keys", 0),
        ("main", "main", 0),
        ("main", "keys", 0),
        ("main", "main", 2),
        ("none", "none", 0),
    ]


def test_a_statistic_that_a_layer_lacks_is_no_number() -> None:
    record: Any = record_of(random_weights(1, 30, 30), random_weights(1, 30, 30))
    del record.layers[1].sample().statistics["self_mass"]
    read = layer_profiles(record.layers)
    data = report_data.page_data(
        record, read, {"main": layout_of_tokens(TOKENS)}, sample=0, special=None, tokens=TOKENS, lang="en"
    )
    assert data["metrics"]["self_mass"][1] is None
    assert "separator_mass" not in data["metrics"]


@pytest.mark.parametrize(
    ("special", "tokens", "expected"),
    [
        (SPECIAL, TOKENS, ["[SEP]"]),
        (None, TOKENS, []),
        ([True, True, True], ["<s>", "</s>", "<pad>"], ["separator"]),
    ],
)
def test_the_separator_is_called_by_its_name_where_it_has_one(
    special: list[bool] | None, tokens: list[str], expected: list[str]
) -> None:
    record: Any = record_of(random_weights(1, len(tokens), len(tokens)), special=special)
    texts = {"main": layout_of_tokens(tokens)}
    data = report_data.page_data(
        record,
        layer_profiles(record.layers, special=special),
        texts,
        sample=0,
        special=special,
        tokens=tokens,
        lang="en",
    )
    assert [one["label"] for one in data["columns"] if one["id"] == "separator_mass"] == expected


def test_what_each_token_receives_is_the_mean_over_heads_and_queries() -> None:
    one, two = random_weights(2, 30, 30), random_weights(1, 30, 30)
    record: Any = record_of(one, two)
    data = report_data.page_data(
        record,
        layer_profiles(record.layers),
        {"main": layout_of_tokens(TOKENS)},
        sample=0,
        special=None,
        tokens=TOKENS,
        lang="en",
    )
    expected = torch.cat((one, two)).double().mean((0, 1))
    torch.testing.assert_close(torch.tensor(data["received"], dtype=torch.float64), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("value", "text"), [(0.00001526, "0.0016"), (0.000244, "0.025"), (0.5, "50"), (0.0, "0")])
def test_the_rounding_that_is_printed_is_a_bound(value: float, text: str) -> None:
    assert report_data.format_rounding_error(StoredMaps(rounding=value)) == text


@pytest.mark.parametrize(("value", "text"), [(20_000_000, "20 MB"), (1_250_000, "1.2 MB"), (80_000, "80 kB")])
def test_sizes_are_short(value: int, text: str) -> None:
    assert report_data.readable_size(value, "en") == text


@pytest.mark.parametrize(
    ("store", "part"),
    [
        (
            StoredMaps(mode="whole", bits=12, rounding=0.000244),
            "in 12 bits on a square-root scale: a value shown is within ±0.025 ",
        ),
        (StoredMaps(mode="largest", number=9, reason="room"), "each query’s 9 largest weights"),
        (
            StoredMaps(mode="largest", number=1, reason="room"),
            "each query’s largest weight, within ±0 percentage points",
        ),
        (StoredMaps(mode="pooled", reason="room"), "single weights are left out to stay under 20 MB."),
        (StoredMaps(mode="pooled", reason="statistics"), "q and k were not recorded, so this page holds pooled maps"),
        (StoredMaps(reason="statistics"), "q and k were not recorded, so there is no map."),
        (StoredMaps(reason="room"), "All maps are left out to stay under 20 MB."),
    ],
)
def test_the_foot_says_what_the_page_holds(store: StoredMaps, part: str) -> None:
    assert part in report_data.sentence_on_stored_maps(store, max_bytes=20_000_000, lang="en")
