"""A record becomes one page: whole, safe, within its size, and nothing half-written."""

from __future__ import annotations

import inspect
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.errors import ArgumentError, InputError, MultiheadError, ShapeError
from multihead.masks import Full
from multihead.record.layer import layer_profiles
from multihead.record.texts import Text
from multihead.viewer import write_report
from multihead.viewer.page_budget import StoredMaps
from multihead.viewer.report import format_rounding_error, sentence_on_stored_maps
from tests.dense_record import DenseLayer, DenseRecord, DenseSample, random_weights, record_of
from tests.observation.recorded import Tokenizer, ids, read
from tests.viewer.page import Page
from tests.viewer.watching import watch

TOKENS = ["[CLS]", *[f"w{i}" for i in range(18)], "[SEP]"]
SPECIAL = [True, *[False] * 18, True]
ATTACK = "</script><script>alert(1)</script>"


def a_record(length: int = 20, **given: Any) -> Any:
    return record_of(random_weights(3, length, length), random_weights(2, length, length), **given)


def write(record: Any, path: Path, **given: Any) -> Any:
    return write_report(record, path, **{"title": "a model", "tokens": TOKENS, "special": SPECIAL} | given)


def test_the_page_holds_every_weight_of_a_short_text(tmp_path: Path) -> None:
    record = a_record(special=SPECIAL)
    summary = write(record, tmp_path / "report.html")
    page = Page(summary.path)
    for layer, heads in enumerate((3, 2)):
        for head in range(heads):
            difference = page.weights(layer, head) - record.layers[layer].sample().weights(head)
            assert difference.abs().max() <= summary.rounding + 1e-12
    assert (summary.mode, summary.bits, summary.left_out) == ("whole", 16, "")
    assert summary.num_bytes == summary.path.stat().st_size
    assert str(summary) == f"{summary.path} ({summary.num_bytes / 1000:.0f} kB, every weight)"


def test_a_page_of_several_texts_holds_each_of_them_and_what_the_heads_do_over_all(tmp_path: Path) -> None:
    record = watch(40, heads=2, layers=2, lengths=(40, 12, 25))
    summary = record.report(tmp_path / "page.html")
    page = Page(summary.path)
    assert (summary.mode, summary.left_out) == ("whole", "")
    for sample in range(3):
        for layer in record.layers:
            right = layer.weights(1, sample=sample)
            assert (page.weights(layer.number, 1, sample) - right).abs().max() <= summary.rounding + 1e-12
    plain = page.held["plain"]
    assert [plain[f"runs/0/samples/{sample}"]["lead"] for sample in range(3)] == [
        "4 attention heads, as they read text 1 of 3, of 40 tokens.",
        "4 attention heads, as they read text 2 of 3, of 12 tokens.",
        "4 attention heads, as they read text 3 of 3, of 25 tokens.",
    ]
    assert [one["keys"] for one in page.view["runs"][0]["samples"]] == [40, 12, 25]
    found = plain["runs/0/texts"]["findings"]
    assert [(one["layer"], one["head"], one["over_texts"]) for one in found] == [
        (one.layer, one.head, None if one.over_texts is None else vars(one.over_texts)) for one in record.findings()
    ]


def test_a_page_of_one_of_several_texts_says_so(tmp_path: Path) -> None:
    record = watch(40, heads=2, lengths=(40, 12))
    page = Page(record.report(tmp_path / "page.html", sample=1).path)
    assert page.data["lead"] == "2 attention heads, as they read text 2 of 2, of 12 tokens."
    assert [one["number"] for one in page.view["runs"][0]["samples"]] == [2]
    assert "runs/0/texts" not in page.held["plain"]
    page = Page(record.report(tmp_path / "page.html", sample=1, lang="zh").path)
    assert page.data["lead"] == "2 个注意力头，读第 2 段文本（共 2 段），12 个词元。"


def test_maps_and_texts_that_do_not_fit_into_the_page_are_named(tmp_path: Path) -> None:
    def size(record: mh.Record) -> int:
        return round(record.report(tmp_path / "page.html").path.stat().st_size, -3)

    texts: dict[str, Any] = {"heads": 4, "lengths": (90, 5, 90, 6), "layers": 2}
    most = size(watch(90, keep="statistics", **texts)) + 36_000
    summary = watch(90, **texts).report(tmp_path / "page.html", max_bytes=most)
    assert summary.path.stat().st_size <= most
    page = Page(summary.path)
    assert page.arrays["0/1/0/0"]["shape"] == [5, 5]
    assert summary.left_out.startswith("Means over blocks and each query’s largest weights alone: texts 1, 3. ")
    assert summary.left_out.endswith(f" A page has at most {most // 1000} kB.")
    assert summary.left_out in page.view["foot"]
    stored = [page.held["plain"][f"runs/0/samples/{sample}"]["stored"] for sample in range(4)]
    assert [sentence.startswith("Every weight is stored") for sentence in stored] == [False, True, False, True]
    statistics = watch(9, lengths=(9, 5), keep="statistics").report(tmp_path / "page.html")
    assert statistics.left_out == "q and k were not recorded, so there is no map."
    many: dict[str, Any] = {"heads": 4, "layers": 4}
    most = size(watch(4, batch=1, **many)) + 50_000
    summary = watch(4, batch=30, **many).report(tmp_path / "page.html", max_bytes=most)
    held = len(Page(summary.path).view["runs"][0]["samples"])
    assert 1 < held < 30
    assert summary.left_out == f"{30 - held} of 30 texts are not in this file. A page has at most {most // 1000} kB."


def test_a_cell_that_may_not_be_seen_is_no_zero_on_the_page(tmp_path: Path) -> None:
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    seen[4] = False
    record = record_of(random_weights(2, 20, 20, seen=seen), seen=seen)
    page = Page(write(record, tmp_path / "report.html").path)
    assert torch.equal(~page.weights(0, 1).isnan(), seen)
    layer = page.data["layers"][0]
    assert (layer["hides"], layer["pattern"], layer["blind"]) == (True, "causal", 1)


def test_the_numbers_on_the_page_are_those_of_the_record(tmp_path: Path) -> None:
    record = a_record(special=SPECIAL)
    data = Page(write(record, tmp_path / "report.html").path).data
    means = [layer.sample().means for layer in record.layers]
    for name in ("entropy", "largest_weight", "previous_mass"):
        expected = torch.cat([one[name] for one in means])
        torch.testing.assert_close(
            torch.tensor(data["metrics"][name], dtype=torch.float64), expected, rtol=1e-5, atol=0
        )
    separator = torch.cat([one["special_mass"] - one["first_mass"] for one in means])
    torch.testing.assert_close(
        torch.tensor(data["metrics"]["separator_mass"], dtype=torch.float64), separator, rtol=1e-5, atol=1e-9
    )
    assert [layer["name"] for layer in data["layers"]] == [layer.name for layer in record.layers]


class Tags(HTMLParser):
    """Every start tag of a page, as a browser would meet it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_no_token_title_or_fact_can_become_markup(tmp_path: Path) -> None:
    tokens = [ATTACK, "<!--", "<img src=x onerror=alert(1)>", *TOKENS[3:]]
    text = " ".join(tokens)
    given = {"title": ATTACK, "tokens": tokens, "text": text, "facts": {ATTACK: ATTACK}, "special": None}
    record = record_of(random_weights(2, 20, 20))
    record.layers[0].name = ATTACK
    page = Page(write(record, tmp_path / "report.html", **given).path)
    clean = Page(write(record, tmp_path / "clean.html", facts={"a": "b"}, special=None).path)
    assert [tag for tag, _ in Tags(page.html).found] == [tag for tag, _ in Tags(clean.html).found]
    assert ATTACK not in page.html
    assert page.data["texts"][0]["shown"][0] == ATTACK
    assert page.data["layers"][0]["name"] == ATTACK


def test_the_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    html = write(a_record(), tmp_path / "report.html").path.read_text()
    assert not re.search(r'(?:src|href)="(?!#|data:)', html)
    script = html.replace("http%3A", "").replace("xmlns='http://www.w3.org/2000/svg'", "")
    assert not re.search(r"@import|url\(|XMLHttpRequest|WebSocket|https?://(?!www\.w3\.org/2000/svg)", script)
    assert html.index("globalThis.fetch = ") < html.index("fetch(")  # requests are answered from the file
    policy = next(attrs["content"] for tag, attrs in Tags(html).found if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "script-src 'sha256-" in policy


def test_no_script_of_the_page_sets_markup() -> None:
    source = Path(__file__).parents[2] / "src" / "multihead"
    scripts = sorted(source.rglob("*.js"))
    assert len(scripts) > 30
    for script in scripts:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script.read_text()), (
            script.name
        )


@pytest.mark.parametrize("text", ["注意力是一种选择", "👩‍💻🎉", "\ud800", "مرحبا"])
def test_every_text_can_stand_on_the_page(tmp_path: Path, text: str) -> None:
    tokens = [text] * 20
    page = Page(write(record_of(random_weights(1, 20, 20)), tmp_path / "report.html", tokens=tokens, title=text).path)
    assert page.data["texts"][0]["shown"] == tokens


def test_readings_at_hand_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = a_record(special=SPECIAL)
    read = layer_profiles(record.layers, special=SPECIAL)
    first = write(record, tmp_path / "first.html").path.read_bytes()
    monkeypatch.delattr("tests.dense_record.DenseRecord.profiles")
    assert write(record, tmp_path / "second.html", profiles=read).path.read_bytes() == first


def test_a_page_speaks_chinese(tmp_path: Path) -> None:
    record = a_record()
    record.layers[0].samples[0] = record_of(torch.eye(20).roll(-1, 1).expand(3, -1, -1)).layers[0].samples[0]
    page = Page(write(record, tmp_path / "report.html", lang="zh").path)
    assert '<html lang="zh-CN"' in page.html
    assert page.data["lead"] == "5 个注意力头，读一段 20 个词元的文本。"
    assert page.data["findings"][0]["sentence"][0] > "\u4e00"


def test_layers_may_differ_in_heads_and_in_keys(tmp_path: Path) -> None:
    record = DenseRecord([*a_record().layers, *record_of(random_weights(4, 20, 33)).layers])
    record.layers[2].number = 2
    page = Page(write(record, tmp_path / "report.html", key_tokens=[f"k{i}" for i in range(33)]).path)
    assert [layer["heads"] for layer in page.data["layers"]] == [3, 2, 4]
    assert (page.data["layers"][2]["queryText"], page.data["layers"][2]["keyText"]) == (0, 1)
    assert page.data["texts"][1]["shown"][32] == "k32"
    assert page.weights(2, 3).shape == (20, 33)


def test_a_record_of_statistics_gives_a_page_without_maps(tmp_path: Path) -> None:
    summary = write(a_record(keep="statistics"), tmp_path / "report.html")
    page = Page(summary.path)
    assert page.packs == {}
    assert {layer["maps"] for layer in page.data["layers"]} == {False}
    assert page.data["noMaps"] == "q and k were not recorded, so there is no map."
    assert len(page.data["metrics"]["entropy"]) == 5
    assert summary.mode == "none"
    assert summary.left_out == "q and k were not recorded, so there is no map."


class LazySample(DenseSample):
    """A sample whose weights are cut from one line of random numbers: a long text that is never held whole."""

    largest_tile = 0

    def __init__(self, name: str, heads: int, line: torch.Tensor, length: int) -> None:
        self.name, self.query_start, self.heads, self.length, self.line = name, 0, heads, length, line
        self.keep = "cpu"
        self.text = Text()
        even = torch.rand(heads, length)
        masses = ("self_mass", "previous_mass", "next_mass", "first_mass")
        self.statistics = dict.fromkeys(masses, even / 9) | {
            "entropy": even + 3,
            "effective_keys": (even + 3).exp(),
            "mean_distance": even * 100,
            "distance_spread": even * 50,
            "largest_weight": even / 4,
            "received": even,
        }

    mask = property(lambda self: Full())
    num_heads = property(lambda self: self.heads)
    num_queries = num_keys = property(lambda self: self.length)
    sees = property(lambda self: torch.ones(self.heads, self.length, dtype=torch.bool))

    def weights(
        self, head: int | None = None, *, queries: slice = slice(None), keys: slice = slice(None)
    ) -> torch.Tensor:
        rows, columns = range(self.length)[queries], range(self.length)[keys]
        first = (0 if head is None else head * 1009) + rows.start * self.length + columns.start
        shape = (self.heads if head is None else 1, len(rows), len(columns))
        tile = self.line.as_strided(shape, (1009, self.length, 1), first)
        LazySample.largest_tile = max(LazySample.largest_tile, tile.numel())
        return tile if head is None else tile[0]

    def map(self, head: int | None = None, *, bins: int = 256) -> torch.Tensor:
        block = -(-self.length // bins)
        strips = [self.weights(head, queries=slice(row, row + block)) for row in range(0, self.length, block)]
        rows = torch.stack([strip.mean(-2) for strip in strips], -2)  # (heads, rows, keys)
        whole = torch.nn.functional.pad(rows, (0, -self.length % block), value=torch.nan)
        return whole.unflatten(-1, (-1, block)).nanmean(-1)

    def at_offset(self, offset: int) -> torch.Tensor:
        query = torch.arange(self.length)
        key = (query + offset).clamp(0, self.length - 1)
        there = key == query + offset
        return self.line[torch.arange(self.heads)[:, None] * 1009 + query * self.length + key] * there

    def visible(self, *, queries: slice = slice(None), keys: slice = slice(None)) -> torch.Tensor:
        return torch.ones(len(range(self.length)[queries]), len(range(self.length)[keys]), dtype=torch.bool)


def test_a_long_text_stays_under_the_limit_and_is_never_held_whole(tmp_path: Path) -> None:
    """Of a quarter of the weights and of the limit, which is 20 MB where none is given."""
    assert inspect.signature(write_report).parameters["max_bytes"].default == 20_000_000
    layers, heads, length, limit = 3, 12, 448, 5_000_000
    line = torch.rand(length * length + heads * 1009) ** 8
    line /= line.mean() * length
    record = DenseRecord(
        [DenseLayer(f"layer.{i}", [LazySample(f"layer.{i}", heads, line, length)], i) for i in range(layers)]
    )
    LazySample.largest_tile = 0
    tokens = [f"t{i}" for i in range(length)]
    summary = write(record, tmp_path / "report.html", tokens=tokens, special=None, max_bytes=limit)
    assert limit / 2 < summary.num_bytes <= limit
    assert summary.mode == "largest"
    assert summary.largest_per_query >= 8
    assert LazySample.largest_tile <= 1 << 20  # a tile; a layer has 2 million weights
    page = Page(summary.path)
    shares, keys = page.largest(2, 3)
    true = record.layers[2].sample().weights(3)
    torch.testing.assert_close(true.gather(1, keys.long()).double(), shares, atol=2e-5, rtol=0)
    least = true.topk(summary.largest_per_query).values[:, -1]
    assert (shares.min(-1).values >= least - 2e-5).all()
    assert summary.left_out == (
        f"This page holds pooled maps (64 × 64) and each query’s {summary.largest_per_query} largest weights, within "
        f"±{page_rounding(page)} percentage points; the other weights are left out to stay under 5 MB."
    )


def page_rounding(page: Page) -> str:
    found = re.search(r"within ±([\d.]+) percentage points", page.data["stored"])
    assert found is not None
    return found[1]


def test_a_page_that_holds_less_says_so_and_keeps_to_its_size(tmp_path: Path) -> None:
    length = 200
    record, given = record_of(random_weights(6, length, length)), {"tokens": ["t"] * length, "special": None}
    with pytest.raises(ArgumentError) as refusal:
        write(record, tmp_path / "report.html", max_bytes=1, **given)
    needed = re.search(r"needs ([\d,]+) bytes", str(refusal.value))
    assert needed is not None
    seen = set()
    for room in (500, 3_000, 45_000, 180_000, 315_000, 565_000):
        most = int(needed[1].replace(",", "")) + room
        summary = write(record, tmp_path / "report.html", max_bytes=most, **given)
        assert summary.num_bytes <= most
        assert (summary.left_out == "") == (summary.mode == "whole")
        seen.add(summary.mode)
    assert seen == {"none", "pooled", "largest", "whole"}


REFUSALS = [
    ({"lang": "fr"}, ArgumentError, 'lang is "fr", and must be "en" or "zh". Give "en" or "zh".'),
    ({"max_bytes": 0}, ArgumentError, "max_bytes is 0, and must be positive. Give a positive number of bytes."),
    ({"sample": 1}, ArgumentError, "sample is 1, and the record has 1 sample. Give 0."),
    ({"sample": -1}, ArgumentError, "sample is -1, and the record has 1 sample. Give 0."),
    (
        {"tokens": ["a"] * 3, "special": None},
        ShapeError,
        (
            "There are 3 tokens, and the layers recorded 20 positions. "
            "Give one token per position: include special tokens such as [CLS], leave out padding."
        ),
    ),
    (
        {"special": [True]},
        ShapeError,
        "special has 1 entries for 20 tokens. Give special one entry per token.",
    ),
]


@pytest.mark.parametrize(("given", "kind", "sentence"), REFUSALS, ids=lambda value: None)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    tmp_path: Path, given: dict[str, Any], kind: type[MultiheadError], sentence: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        write(a_record(), tmp_path / "report.html", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_the_bare_page_exceeds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as refusal:
        write(a_record(), tmp_path / "report.html", max_bytes=10_000)
    pattern = (
        r"max_bytes is 10,000, and this page needs \d{2,3},\d{3} bytes without any map\. "
        r"Increase max_bytes, or use a shorter text\."
    )
    assert re.fullmatch(pattern, str(refusal.value))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    path = str(folder / "report.html")
    sentence = f"{path!r} cannot be written: there is no folder {str(folder)!r}. Create it first."
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        write(a_record(), folder / "report.html")


def test_a_folder_in_the_place_of_the_page_is_refused(tmp_path: Path) -> None:
    sentence = f"{str(tmp_path)!r} is a folder. Give the name of a file."
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        write(a_record(), tmp_path)


def test_an_empty_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^The record has no layer\. Run the model inside observe\(\) first\.$"):
        write(DenseRecord([]), tmp_path / "report.html")


def test_a_failure_leaves_the_old_page_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old page")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("multihead.viewer.report.Path.replace", full)
    with pytest.raises(OSError, match=r"^No space left on device$"):
        write(a_record(), path)
    assert path.read_text() == "the old page"
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_is_replaced_and_readable_by_others_as_any_new_file(tmp_path: Path) -> None:
    path, other = tmp_path / "report.html", tmp_path / "other"
    path.write_text("the old page")
    other.write_text("")
    write(a_record(), path)
    assert path.read_text().startswith("<!doctype html>")
    assert path.stat().st_mode == other.stat().st_mode


def test_a_layer_of_the_page_keeps_its_number_where_only_some_were_recorded(tmp_path: Path) -> None:
    record = record_of(torch.eye(20).roll(-1, 1)[None])
    record.layers[0].number = 17
    write(record, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.data["layers"][0]["number"] == 17
    assert 17 in {one["layer"] for one in page.data["findings"]}


def test_names_on_the_page_cannot_turn_it(tmp_path: Path) -> None:
    record = a_record(special=SPECIAL)
    record.layers[0].name = "\u202elayer"
    write(record, tmp_path / "page.html", title="\u202emodel\x1b", tokens=[*TOKENS[:-1], "\u2067[SEP]"])
    page = Page(tmp_path / "page.html")
    assert page.view["runs"][0]["title"] == "\\u202emodel\\x1b"
    assert page.data["layers"][0]["name"] == "\\u202elayer"
    labels = {each["id"]: each["label"] for each in page.data["columns"]}
    assert labels["separator_mass"] == "\\u2067[SEP]"
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page.html + str(page.data))


def test_title_and_tokens_are_by_default_those_of_the_record(tmp_path: Path) -> None:
    record = read(ids(1, 6))
    write_report(record, positions := tmp_path / "positions.html")
    assert "<title>Reader" in positions.read_text(encoding="utf-8")
    record.name_tokens(Tokenizer())
    write_report(record, named := tmp_path / "named.html")
    tokens = record.texts[0].tokens
    assert tokens is not None
    assert json.dumps(tokens[1], ensure_ascii=False) in named.read_text(encoding="utf-8")


@pytest.mark.parametrize(("value", "text"), [(0.00001526, "0.0016"), (0.000244, "0.025"), (0.5, "50"), (0.0, "0")])
def test_the_rounding_that_is_printed_is_a_bound(value: float, text: str) -> None:
    assert format_rounding_error(value) == text


@pytest.mark.parametrize(
    ("store", "part"),
    [
        (
            StoredMaps(mode="whole", bits_per_weight=12, largest_rounding_error=0.000244),
            "in 12 bits on a square-root scale: a value shown is within ±0.025 ",
        ),
        (StoredMaps(mode="largest", weights_per_query=9, why_incomplete="room"), "each query’s 9 largest weights"),
        (
            StoredMaps(mode="largest", weights_per_query=1, why_incomplete="time"),
            "each query’s largest weight, within ±0 percentage points; reading all the others would take minutes",
        ),
        (StoredMaps(mode="pooled", why_incomplete="room"), "single weights are left out to stay under 20 MB."),
        (StoredMaps(mode="pooled", why_incomplete="time"), "reading every weight would take minutes"),
        (
            StoredMaps(mode="pooled", why_incomplete="statistics"),
            "q and k were not recorded, so this page holds pooled maps",
        ),
        (StoredMaps(why_incomplete="statistics"), "q and k were not recorded, so there is no map."),
        (StoredMaps(why_incomplete="room"), "All maps are left out to stay under 20 MB."),
    ],
)
def test_the_foot_says_what_the_page_holds_and_why_not_more(store: StoredMaps, part: str) -> None:
    assert part in sentence_on_stored_maps(store, max_bytes=20_000_000, lang="en")
