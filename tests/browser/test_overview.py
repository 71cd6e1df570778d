"""All heads: the grid, the table, what is sorted and what is searched."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from multihead.probes import PROBES
from multihead.viewer.payload import RecordedRun, describe_sample
from tests.browser.records import HEADS, LAYERS, causal, medium, of_a_script
from tests.browser.shown import Shown, ink, percent

Opened = Callable[..., Shown]

COLOURS_OF_EACH = """all => all.map(canvas => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height), colours = new Set();
  for (let i = 0; i < data.length; i += 4) colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return colours.size;
})"""


def numbers() -> dict[str, Any]:
    return describe_sample(RecordedRun("causal", causal()), 0)


def heads(shown: Shown) -> list[str]:
    return [name.replace(" ", "") for name in shown.texts("#rows th a")]


def test_the_grid_shows_every_head_with_its_kind_and_its_map(opened: Opened) -> None:
    shown = opened()
    labels = shown.page.eval_on_selector_all("#grid [role=gridcell] a", "all => all.map(a => a.ariaLabel)")
    kinds = numbers()["kinds"]
    assert len(labels) == LAYERS * HEADS
    assert all(label.startswith(f"Layer {n // HEADS} head {n % HEADS}, ") for n, label in enumerate(labels))
    assert all(kind in label for named, label in zip(kinds, labels, strict=True) for kind in named)
    drawn = "() => [...document.querySelectorAll('.gr .ink')].every(c => c.style.width)"
    shown.page.wait_for_function(drawn)
    assert min(shown.page.eval_on_selector_all(".gr .ink", COLOURS_OF_EACH)) > 20


def test_a_click_on_a_head_opens_its_map_and_escape_goes_back_to_it(opened: Opened) -> None:
    shown = opened()
    shown.at("#grid [data-i='7']").click()
    shown.settle()
    assert shown.place["a"] == "L2H1"
    assert shown.at("#headname").inner_text().startswith("Layer 2 head 1")
    shown.press("Escape")
    shown.at("#all").wait_for()
    assert shown.page.evaluate("document.activeElement.dataset.i") == "7"


def test_the_arrows_walk_over_the_grid_and_enter_opens(opened: Opened) -> None:
    shown = opened()
    shown.at("#grid [data-i='0']").focus()
    shown.press("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp")
    assert shown.page.evaluate("document.activeElement.dataset.i") == "3"
    assert shown.text("#insp h3").startswith("Layer 1 head 0")
    assert shown.at("#grid a[tabindex='0']").count() == 1
    shown.press("Enter")
    assert shown.place["a"] == "L1H0"


@pytest.mark.parametrize("column", ["entropy", "mean_distance", "first_mass"])
def test_a_column_sorts_both_ways(opened: Opened, column: str) -> None:
    shown = opened()
    values = numbers()["metrics"][column]
    order = sorted(range(len(values)), key=lambda n: values[n])
    button = shown.at(f"#cols button:has-text('{PROBES[column].label}')").first
    orders = []
    for _ in range(2):
        button.click()
        assert shown.at("#cols [aria-sort]").count() == 1
        direction = shown.at("#cols [aria-sort]").get_attribute("aria-sort")
        expected = order if direction == "ascending" else order[::-1]
        assert heads(shown) == [f"L{n // HEADS}H{n % HEADS}" for n in expected][:12]
        orders.append(direction)
    assert set(orders) == {"ascending", "descending"}


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        ("L2", lambda layer, head, sample, n: layer == 2),
        ("h1 l3", lambda layer, head, sample, n: (layer, head) == (3, 1)),
        ("L2H0", lambda layer, head, sample, n: (layer, head) == (2, 0)),
        ("entropy<{}", lambda layer, head, sample, n: sample["entropy"][n] < sample["limit"]),
        ("prev>0.4 L1", lambda layer, head, sample, n: layer == 1 and sample["previous_mass"][n] > 0.004),
    ],
)
def test_the_filter_keeps_what_fits_in_the_table_and_fades_the_rest_of_the_grid(
    opened: Opened, words: str, holds: Callable[..., bool]
) -> None:
    shown = opened()
    sample = numbers()["metrics"]
    sample["limit"] = round(sorted(sample["entropy"])[5], 3)
    shown.at("#filter").fill(words.format(sample["limit"]))
    expected = {f"L{n // HEADS}H{n % HEADS}" for n in range(LAYERS * HEADS) if holds(n // HEADS, n % HEADS, sample, n)}
    assert set(heads(shown)) == expected
    assert expected
    assert shown.at("#grid a:not(.dim)").count() == len(expected)
    assert shown.text("#count") == f"{len(expected)} of {LAYERS * HEADS} heads"


def test_a_kind_is_found_by_its_name_and_by_its_button(opened: Opened) -> None:
    shown = opened()
    kinds = numbers()["kinds"]
    kind = kinds[0][0]
    expected = {f"L{n // HEADS}H{n % HEADS}" for n, each in enumerate(kinds) if kind in each}
    shown.at("#filter").fill(kind)
    assert set(heads(shown)) == expected
    shown.at("#filter").fill("")
    shown.at(f"#chips [data-kind={kind}]").click()
    assert set(heads(shown)) == expected
    assert shown.at(f"#chips [data-kind={kind}]").get_attribute("aria-pressed") == "true"


def test_a_filter_that_nothing_fits_says_so_and_suggests(opened: Opened) -> None:
    shown = opened()
    shown.at("#filter").fill("entropy<0")
    assert shown.text("#rows") == "No head matches this filter. Try L2, local, or prev>40."


def test_the_address_keeps_filter_kind_and_order(opened: Opened) -> None:
    shown = opened()
    shown.at("#filter").fill("L1")
    shown.at("#cols button:has-text('distance')").click()
    shown.settle()
    place, before = shown.page.url.removeprefix(shown.address), heads(shown)
    again = opened(place=place)
    assert again.at("#filter").input_value() == "L1"
    assert heads(again) == before


def test_the_numbers_of_the_table_are_those_of_the_record(opened: Opened) -> None:
    shown = opened()
    shown.at("#filter").fill("L3H2")
    sample, n = numbers(), 3 * HEADS + 2
    written = shown.texts("#rows td .v")
    for column, text in zip(sample["columns"], written, strict=True):
        value = sample["metrics"][column["id"]][n] * (100 if column["format"] == "share" else 1)
        assert math.isclose(float(text), value, abs_tol=0.06), column


def test_both_files_of_the_table_can_be_had(opened: Opened) -> None:
    shown = opened()
    for form, start in (("CSV", "layer,head"), ("JSON", "[")):
        with shown.page.expect_download() as download:
            shown.at(f"#tablelinks a:has-text('{form}')").click()
        assert download.value.path().read_text("utf-8").lstrip().startswith(start)


def test_layers_keep_their_numbers_where_only_some_were_recorded(opened: Opened) -> None:
    shown = opened("partial")
    assert shown.texts("#grid [role=rowheader]") == ["L2", "L5"]
    assert {name.split()[0] for name in shown.texts("#rows th")} == {"L2", "L5"}
    shown.press("/")
    shown.page.keyboard.type("L5H1")
    shown.settle()
    assert shown.texts("#rows th") == ["L5 H1"]
    shown.page.click("#rows a")
    shown.settle()
    assert shown.place["a"] == "L5H1"
    assert shown.page.title().startswith("L5\u00a0H1 ")
    labels = shown.page.locator("#heada optgroup").evaluate_all("all => all.map(each => each.label)")
    assert labels == ["Layer 2", "Layer 5"]
    shown.page.keyboard.press("[")
    shown.page.wait_for_function("location.hash.includes('L5H0')")


def test_two_runs_of_other_layers_are_compared_by_number(opened: Opened) -> None:
    shown = opened("whole", "partial", place="#a=L5H1")
    shown.press("c")
    assert (shown.place["a"], shown.place["b"], shown.place["rb"]) == ("L5H1", "L5H1", "1")


def test_a_probe_of_a_script_has_its_label_its_unit_and_its_number_format(opened: Opened) -> None:
    shown, record = opened("of a script"), of_a_script()
    labels = ["entropy, nats", "other keys, %", "relative <b>spread</b>, per token"]
    assert shown.texts("#cols button")[2:] == labels
    assert shown.texts("#insp th") == [labels[0], "other keys", labels[2]]
    shown.at("#filter").fill("L1H1")
    means = {name: float(value[1]) for name, value in record.layers[1].means().items()}
    expected = [record.statistic(name).number(value) for name, value in means.items()]
    assert shown.texts("#rows td .v") == expected
    shown.at("#filter").fill("other>0 relative<1000")
    assert len(shown.texts("#rows tr")) == 4
    assert opened("of a script", lang="zh").texts("#cols button")[2:] == [
        "熵（奈特）",
        "other keys（%）",
        "relative <b>spread</b>（per token）",
    ]


def test_names_that_every_object_has_are_names_like_any_other(opened: Opened) -> None:
    shown = opened("inherited")
    assert shown.texts("#cols button")[2:] == ["entropy, nats", "constructor", "proto", "toString", "hasOwnProperty"]
    assert len(shown.texts("#rows tr")) == 2
    shown.visit("#c=constructor&k=__proto__&o=toString&f=constructor>0")
    assert len(shown.texts("#rows tr")) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("banana", "No kind of head and no layer name contains “banana”."),
        ("L1 banana>5", ("There is no statistic “banana”. Recorded: entropy, effective keys, distance, spread, self, "
         "previous, next, near, first, largest.")),
        ("induction>5", "“induction” was not recorded. Observe with probes= that include \"induction_mass\"."),
        ("Induction", "“induction” was not recorded. Observe with probes= that include \"induction_mass\"."),
        ("repeated_induction>50", ("“induction on random repeats” was not measured. It needs texts of repeated random "
         "tokens: look --textbook, or add_repeated in observation.textbook.")),
        ("separator", "“separator” was not recorded. Observe with probes= that include \"separator_mass\"."),
        ("entropy", "“entropy” lacks a number, as in prev>40."),
        ("prev>", "“prev>” lacks a number, as in prev>40."),
    ],
)  # fmt: skip
def test_a_word_that_cannot_match_is_explained(opened: Opened, words: str, why: str) -> None:
    shown = opened()
    shown.at("#filter").fill(words)
    assert shown.text("#why") == why
    assert shown.text("#count") == f"0 of {LAYERS * HEADS} heads"
    shown.at("#filter").fill("L1")
    assert shown.at("#why").is_hidden()
    assert len(heads(shown)) == HEADS


def test_the_inspector_shows_single_weights_where_they_fit(opened: Opened) -> None:
    shown, weights = opened("medium"), medium().layers[0].weights(1)
    shown.at("#grid [data-i='1']").hover()
    shown.page.wait_for_selector("#insp .note:has-text('one weight')")
    assert shown.text("#insp .note") == "Each cell is one weight. The scale ends at 100 %."
    largest = int(weights.max(1).values.argmax())
    places = [(largest, int(weights[largest].argmax())), (100, 20), (149, 3)]
    for place in places:
        assert shown.inspected_colour(*place, 150) == pytest.approx(ink(math.sqrt(float(weights[place]))), abs=4)


def test_the_scale_of_means_ends_at_the_largest_of_them_and_the_legend_says_so(opened: Opened) -> None:
    shown = opened()  # 700 tokens: blocks of 16 x 16
    shown.at("#scale button:has-text('square root')").click()
    maps = [causal().layers[layer].sample().map(head, bins=44) for layer in range(LAYERS) for head in range(HEADS)]
    largest = max(float(each.nan_to_num(0).max()) for each in maps)
    assert 0.1 < largest < 0.2
    assert shown.texts("#scale .ticks span")[-1] == "20 %"
    note = "The scale ends at the largest mean shown, rounded up."
    assert note in shown.text("#scale .note")
    assert shown.text("#insp .note") == "Each cell is the mean of 16 × 16 weights. The scale ends at 20 %."
    shown.at("#scale button:has-text('log')").click()
    assert note not in shown.text("#scale .note")


def test_encoder_decoder_and_cross_attention_are_named_and_alignment_heads_marked(opened: Opened) -> None:
    shown = opened("encoder decoder")
    names = [" ".join(each.split()) for each in shown.texts("#grid [role=rowheader]")]
    roles = ["encoder", "encoder", "decoder", "cross-attention", "decoder", "cross-attention"]
    assert names == [f"L{layer} {role}" for layer, role in enumerate(roles)]
    for words, layers in (("encoder", "01"), ("decoder", "24"), ("cross", "35"), ("alignment", "3")):
        shown.at("#filter").fill(words)
        assert {name[1] for name in heads(shown)} == set(layers), words
    assert [" ".join(name.split()) for name in shown.texts("#rows th")] == ["L3 H1 cross-attention"]
    assert shown.texts("#rows .aligned") == ["alignment"]
    shown.at("#grid [data-i='13']").hover()
    assert shown.texts("#insp .aligned") == ["alignment"]
    assert shown.text("#insp .path").startswith("cross-attention")
    shown.at("#grid [data-i='13']").click()
    shown.page.wait_for_selector("#one:not([hidden])")
    shown.settle()
    assert shown.text("#shownhead").split(", ")[::2] == ["cross-attention", "alignment"]
    shown.point(2, 5)
    assert shown.texts("#read bdi") == ["d2", "e5"]


def test_a_head_has_several_kinds_and_every_share_its_chance(opened: Opened) -> None:
    shown = opened("repeated")
    labels = shown.page.eval_on_selector_all("#grid [role=gridcell] a", "all => all.map(a => a.ariaLabel)")
    assert labels[2].startswith("Layer 1 head 0, induction on random repeats, previous")
    chips = [text.replace("\n", " ") for text in shown.texts("#chips .chip")]
    assert "previous 1" in chips
    assert not any("random repeats" in chip for chip in chips)
    shown.at("#chips [role=switch]").click()
    assert shown.at("#chips [role=switch]").get_attribute("aria-checked") == "true"
    assert shown.text("#chips .chip").replace("\n", " ") == "induction on random repeats 1"
    shown.at("#chips [role=switch]").click()
    shown.at("#chips [data-kind=previous]").click()
    assert heads(shown) == ["L1H0"]
    shown.at("#chips [data-kind=previous]").click()
    shown.at("#filter").fill("induction>5")
    assert heads(shown) == ["L1H0"]
    columns = [text.replace("\n", " ") for text in shown.texts("#cols th")]
    assert "induction on random repeats, % chance 1.2" in columns
    expected = 100 * sum(1 / n for n in range(2, 61)) / 59
    assert f"previous, % chance {expected:.1f}" in columns
    assert shown.texts("#rows td .kind")[0].startswith("induction on random repeats")
    shown.at("#grid [data-i='2']").hover()
    assert shown.texts("#insp .kind") == ["induction on random repeats", "previous"]
    rows = [text.split() for text in shown.texts("#insp tr")]
    assert ["induction", "on", "random", "repeats", "90", "%", "1.2"] in rows
    assert rows[0] == ["chance"]
    assert any("induction on random repeats" in text.lower() for text in shown.texts("#defs dt"))


def test_a_text_is_one_list_of_words_and_without_received_attention_the_page_says_so(opened: Opened) -> None:
    shown = opened("other")
    assert shown.at("#words[role=listbox] [role=option]").count() > 100
    assert shown.at("#words [role=button]").count() == 0
    assert shown.at("#words").get_attribute("aria-label") == "The text"
    note = "The text is not coloured: the attention that each token receives was not recorded."
    assert shown.text("#textnote") == note + " Choose a word: who looks at it?"
    assert shown.text("#finds") == "Nothing stands out: no head exceeds chance clearly."


def test_a_link_to_a_region_reads_a_query_that_is_in_view(opened: Opened) -> None:
    shown = opened(place="#a=L1H1&x=100&y=120&n=40")
    assert 120 <= int(shown.place["q"]) < 160


def test_the_first_screen_says_what_a_head_a_query_and_a_key_are(opened: Opened) -> None:
    shown = opened()
    starts = [text.split(" is ")[0] for text in shown.texts(".plain p")]
    assert starts[:3] == ["A head", "A query", "A key"]
    assert shown.text(".plain code") == "multihead walk"
    box = shown.at(".plain").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 300


def test_a_click_on_a_word_lists_the_heads_that_look_at_it_and_colours_the_words_that_do(opened: Opened) -> None:
    shown, key = opened(), 40
    weights = torch.cat([layer.weights()[:, key:, key] for layer in causal().layers]).double()  # (heads, queries)
    shown.at("#words .tk").nth(key).click()
    shown.page.wait_for_selector("#looking li")
    order = weights.mean(-1).argsort(descending=True).tolist()[:8]
    names = [name.replace(" ", "") for name in shown.texts("#looking li > a")]
    assert names == [f"L{n // HEADS}H{n % HEADS}" for n in order]
    shares = [percent(text) for text in shown.texts("#looking .num")]
    assert shares == pytest.approx([float(weights[head].mean()) for head in order], rel=0.1)
    means = weights.mean(0)
    assert [percent(end) for end in shown.texts("#looking .ticks span")[1:]] == [0.001, 0.01, 0.1, 1]
    cell = shown.at("#looking li a[title]").first
    strongest, tokens = int(weights[order[0]].argmax()) + key, causal().texts[0].tokens or []
    assert cell.get_attribute("title") == f"query {strongest} → key {key}"
    assert cell.inner_text().startswith(f"“{tokens[strongest]}”")
    painted = shown.page.eval_on_selector_all("#words .tk", "all => all.map(each => each.style.background)")
    for query in (key, key + 1, key + 50):
        colour = tuple(int(part) for part in painted[query][4:-1].split(",")) if painted[query] else ink(0)
        assert colour == pytest.approx(ink(1 + math.log10(float(means[query - key])) / 5), abs=8), query
    assert painted[key - 1] == ""  # a token before it may not see it
    cell.click()
    shown.settle()
    assert shown.place["q"] == str(strongest)
    shown.press("Escape")
    shown.at("#looking .btn").click()
    assert shown.at("#looking").is_hidden()


def test_a_word_is_reached_and_chosen_with_the_keyboard(opened: Opened) -> None:
    shown = opened()
    shown.at("#words .tk").first.focus()
    shown.press("ArrowRight", "ArrowRight", "Enter")
    shown.page.wait_for_selector("#looking li")
    assert shown.page.evaluate("document.activeElement.dataset.p") == "2"
    assert shown.at("#words [role=option][aria-selected=true]").count() == 1
