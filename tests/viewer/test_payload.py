"""The data for the page: names, lengths, tokens, kinds and every head's numbers, and null where there is none."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from multihead import masks
from multihead.kinds import KINDS, MIXED
from multihead.record.analysis import similar
from multihead.record.analysis.highlights import findings
from multihead.record.repeated import RepeatedTokens
from multihead.record.texts import Text
from multihead.viewer.payload import (
    PageText,
    RecordedRun,
    changed_heads,
    describe_run,
    describe_sample,
    table_rows_of_heads,
)
from multihead.viewer.tokens import SPECIAL_FLAG, layout_of_tokens
from tests.dense_record import DenseRecord, random_weights, record_of
from tests.viewer.watching import watch

if TYPE_CHECKING:
    from multihead.observation.record import Record


def test_a_run_says_its_name_and_how_long_its_texts_are() -> None:
    run = RecordedRun("a.safetensors", watch(9, lengths=(9, 4), mask=masks.Causal()))
    assert describe_run(run) == {
        "name": "a.safetensors",
        "title": "ModuleList",
        "keep": "all",
        "texts": 2,
        "comparable": True,
        "samples": [
            {"number": 1, "queries": 9, "keys": 9, "opening": ""},
            {"number": 2, "queries": 4, "keys": 4, "opening": ""},
        ],
    }


def test_a_text_is_named_by_its_first_words_without_special_tokens() -> None:
    record = watch(6)
    record.set_text(Text(None, ["<s>", "A", "gull", "with", "one", "leg"], [True, *[False] * 5]))
    assert describe_run(RecordedRun("a.safetensors", record))["samples"][0]["opening"] == "A gull with one leg"


def test_the_findings_of_a_sample_are_those_of_its_report() -> None:
    record = watch(60, layers=2, mask=masks.Causal())
    previous = torch.full((record.layers[0].num_heads, 60), 0.03)
    previous[1] = 0.9
    one = record.layers[1].samples[0]
    one.set_statistics(one.statistics | {"previous_mass": previous})
    shown = describe_sample(RecordedRun("a.safetensors", record), 0)
    expected = findings(record.profiles(sample=0))
    assert [(each["layer"], each["head"], each["sentence"]) for each in shown["findings"]] == [
        (each.layer, each.head, each.sentence) for each in expected
    ]
    assert (shown["findings"][0]["layer"], shown["findings"][0]["head"]) == (1, 1)
    assert shown["full"] == pytest.approx([sum(math.log(keys) for keys in range(1, 61)) / 60] * 4, rel=1e-5)


def test_without_q_and_k_it_has_statistics_and_no_levels() -> None:
    run = RecordedRun("a.safetensors", watch(9, keep="statistics"))
    assert describe_run(run)["keep"] == "statistics"
    layer = describe_sample(run, 0)["layers"][0]
    assert (layer["blocks"], layer["rows"], layer["maps"]) == ([], "", False)
    pooled = RecordedRun("b.safetensors", watch(90, keep="statistics", probes=("entropy", "pooled_map")))
    layer = describe_sample(pooled, 0)["layers"][0]
    assert (layer["blocks"], layer["rows"], layer["maps"]) == ([(2, 2)], "", True)


def test_a_sample_is_described_head_by_head() -> None:
    record = watch(70, layers=2, mask=masks.Causal())
    record.set_text(Text(tokens=[f"t{index}" for index in range(70)], special=[True] + [False] * 69))
    body = describe_sample(RecordedRun("a", record), 0)
    json.dumps(body, allow_nan=False)
    (text,) = body["texts"]
    assert (text["gaps"][:2], text["shown"][:2], text["flags"][:2]) == (["", " "], ["t0", "t1"], [SPECIAL_FLAG, 0])
    assert body["layers"][1] == {
        "number": 1,
        "name": "1",
        "heads": 2,
        "maps": True,
        "queries": 70,
        "keys": 70,
        "queryStart": 0,
        "crosses": False,
        "role": "",
        "aligned": (),
        "pattern": "causal",
        "hides": True,
        "blind": 0,
        "blocks": [(1, 1), (2, 2)],
        "rows": "all",
        "margins": ["entropy"],
        "queryText": 0,
        "keyText": 0,
    }
    assert len(body["kinds"]) == 4
    ids = [each["id"] for each in body["columns"]]
    assert {
        "entropy",
        "effective_keys",
        "mean_distance",
        "self_mass",
        "previous_mass",
        "largest_weight",
    } <= set(ids)
    assert sorted(ids) == sorted(body["metrics"])
    assert all(len(values) == 4 for values in body["metrics"].values())
    means = record.layers[1].sample().means
    assert body["metrics"]["entropy"][3] == pytest.approx(float(means["entropy"][1]))
    assert {each["id"]: each["unit"] for each in body["columns"]}["mean_distance"] == "tokens"
    legend = {each["id"]: each for each in body["legend"]}
    assert list(legend) == [kind.name for kind in (*KINDS, MIXED)]
    assert {each for each in legend if legend[each]["measured"]} == {
        *("previous", "next", "self", "first", "local", "broad", "mixed")
    }
    assert legend["previous"]["label"] == "previous"
    assert (
        legend["previous"]["about"] == "At least 35\u00a0% of the attention, beyond chance, is on the previous token."
    )


def test_a_layer_that_reads_another_text_says_so() -> None:
    record = watch(6, memory=11)
    body = describe_sample(RecordedRun("a", record), 0)
    layer = body["layers"][0]
    assert layer["crosses"]
    assert (layer["queries"], layer["keys"]) == (6, 11)


def test_a_number_that_is_none_is_null() -> None:
    record = watch(5, layers=2)
    (sample,) = record.layers[1].samples
    sample.set_statistics({name: values for name, values in sample.statistics.items() if name != "entropy"})
    body = describe_sample(RecordedRun("a", record), 0)["metrics"]["entropy"]
    assert body[2:] == [None, None]
    assert all(math.isfinite(value) for value in body[:2])


def test_the_table_has_a_row_a_head_with_its_kind() -> None:
    rows = table_rows_of_heads(RecordedRun("a", watch(30, layers=2, mask=masks.Causal())), 0)
    assert [(row["layer"], row["head"], row["name"]) for row in rows] == [
        (0, 0, "0"),
        (0, 1, "0"),
        (1, 0, "1"),
        (1, 1, "1"),
    ]
    assert all(isinstance(row["kind"], str) and isinstance(row["entropy"], float) for row in rows)


def test_names_that_a_page_shows_cannot_turn_it() -> None:
    record = watch(9)
    record.title, record.layers[0].name = "\u202etitle", "\x1b\u2066layer"
    run = RecordedRun("\u202efile", record)
    assert (describe_run(run)["name"], describe_run(run)["title"]) == ("\\u202efile", "\\u202etitle")
    assert describe_sample(run, 0)["layers"][0]["name"] == "\\x1b\\u2066layer"


def test_a_head_may_have_several_kinds_and_every_share_its_chance() -> None:
    record = watch(40, mask=masks.Causal())
    sample = record.layers[0].samples[0]
    shares = {"repeated_induction": torch.tensor([[0.9, 0.0]] * 4, dtype=torch.float64)}
    record.layers[0].repeated = RepeatedTokens(64, 3, True, shares, {"repeated_induction": torch.full((2,), 0.01)})
    previous = torch.zeros(2, 40)
    previous[0] = 0.9
    sample.set_statistics({"previous_mass": previous, "entropy": torch.zeros(2, 40)})
    body = describe_sample(RecordedRun("a", record), 0)
    assert body["kinds"][0] == ("repeated_induction", "previous")
    assert body["metrics"]["repeated_induction"] == [0.9, 0]
    assert body["chance"]["repeated_induction"] == pytest.approx([0.01, 0.01])
    expected = sum(1 / n for n in range(2, 41)) / 39
    assert body["chance"]["previous_mass"] == pytest.approx([expected, expected])
    assert {one["id"]: one["label"] for one in body["columns"]}["repeated_induction"] == "induction on random repeats"
    row = table_rows_of_heads(RecordedRun("a", record), 0)[0]
    assert row["kind"] == "repeated_induction+previous"
    assert row["previous_mass_chance"] == pytest.approx(expected)


def test_of_a_long_text_what_changed_is_read_off_some_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (RecordedRun(name, watch(40, mask=masks.Causal(), seed=seed)) for seed, name in enumerate("ab"))
    monkeypatch.setattr(similar, "DEFAULT_COMPARED_WEIGHTS", 1)
    steps: list[int] = []
    body = changed_heads(before, after, 0, 1, lambda: bool(steps.append(1)), lang="en")
    assert body["every"] == 3
    assert len(body["heads"]) == 1
    assert body["heads"][0]["divergence"] == before.record.changed(after.record, queries=16)[0].divergence
    assert steps


SPECIAL = [True, *[False] * 28, True]
TOKENS = ["[CLS]", *["word"] * 28, "[SEP]"]


def given(tokens: list[str], special: list[bool] | None = None) -> PageText:
    return PageText(len(tokens), tokens, special, layout_of_tokens(tokens), given_by_caller=True)


def described(record: DenseRecord, *texts: PageText) -> dict[str, Any]:
    return describe_sample(RecordedRun("a", cast("Record", record)), 0, texts=texts)


def test_the_texts_of_layers_without_tokens_are_found_by_their_lengths() -> None:
    record = DenseRecord(
        [
            *record_of(random_weights(1, 9, 9)).layers,
            *record_of(random_weights(1, 4, 4)).layers,
            *record_of(random_weights(1, 4, 9)).layers,
            *record_of(random_weights(1, 2, 4), query_start=2).layers,
            *record_of(random_weights(1, 3, 5)).layers,
        ]
    )
    body = described(record, given(["q"] * 4), given(["k"] * 9))
    assert [(one["queryText"], one["keyText"]) for one in body["layers"][:4]] == [(1, 1), (0, 0), (0, 1), (0, 0)]
    assert [layer["queryStart"] for layer in body["layers"]] == [0, 0, 0, 2, 0]
    last = body["layers"][4]
    assert body["texts"][last["queryText"]] is body["texts"][last["keyText"]] is None


def test_a_statistic_that_a_layer_lacks_is_no_number() -> None:
    record: Any = record_of(random_weights(1, 30, 30), random_weights(1, 30, 30))
    del record.layers[1].sample().statistics["self_mass"]
    body = described(record, given(TOKENS))
    assert body["metrics"]["self_mass"][1] is None
    assert "separator_mass" not in body["metrics"]


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
    record = record_of(random_weights(1, len(tokens), len(tokens)), special=special)
    body = described(record, given(tokens, special))
    assert [one["label"] for one in body["columns"] if one["id"] == "separator_mass"] == expected
    assert ("special_mass" in body["metrics"]) == (not expected and special is not None)


def test_what_each_token_receives_is_the_mean_over_heads_and_queries() -> None:
    one, two = random_weights(2, 30, 30), random_weights(1, 30, 30)
    received = described(record_of(one, two), given(TOKENS))["received"]
    expected = torch.cat((one, two)).double().mean((0, 1))
    torch.testing.assert_close(torch.tensor(received, dtype=torch.float64), expected, atol=1e-6, rtol=1e-5)
