"""The page of `multihead try`: heads are switched off, and it shows at once what changed."""

from __future__ import annotations

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import multihead as mh
from multihead.models.loading import LoadedModel, describe, load
from multihead.models.source import find_model
from multihead.models.use import use
from multihead.record.repeated import RepeatedTokens
from multihead.viewer import trial
from multihead.viewer.trial_routes import TrialSite
from tests.browser.shown import DESKTOP, PHONE, Shown, percent, ruled, serious
from tests.viewer.serving import TOKEN, serving_site
from tests.word_models import save_word_models

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Route

IMAGE = "<img src=x onerror='window.broken=1'>"
READY = "() => document.documentElement.dataset.busy === 'false'"
MODELS = {"language": "llama", "encoder": "bert"}
LAYERS, HEADS = 6, 4
TEXTS = {
    "language": "the key is under a door and nobody saw it before the key is under a door and nobody saw",
    "encoder": "the key is under a door\nnobody saw it before\na door is a door\nthe key and the door",
}
INDUCTION = {(2, 1): 0.9, (3, 0): 0.8, (4, 2): 0.7, (4, 0): 0.6}
"""What the heads do on repeated random tokens, which a model of random weights does not."""


class SlowTrial(trial.Trial):
    """A trial whose model takes as long as a test needs."""

    delay = 0.0

    def __init__(self, loaded: LoadedModel, *given: Any) -> None:
        super().__init__(loaded, *given)
        loaded.model.register_forward_pre_hook(lambda *_: time.sleep(self.delay))


def open_trial(folder: Path, kind: str) -> SlowTrial:
    """Load a tiny model for the page."""
    loaded = trial.load_for_trial(describe(find_model(str(folder / MODELS[kind]))), device="cpu", dtype="float32")
    use(loaded.model)
    repeated = {}
    for layer in range(LAYERS if kind == "language" else 0):
        shares = torch.tensor([[INDUCTION.get((layer, head), 0.01) for head in range(HEADS)]] * 4, dtype=torch.float64)
        level = {"repeated_induction": torch.full((HEADS,), 0.012, dtype=torch.float64)}
        repeated[f"model.layers.{layer}.self_attn"] = RepeatedTokens(64, 3, True, {"repeated_induction": shares}, level)
    return SlowTrial(loaded, TEXTS[kind], repeated)


class TrialPage(Shown):
    """The page, and the answers that it shows."""

    def __init__(self, context: Any, address: str, kind: str, server: SlowTrial) -> None:
        super().__init__(context, address)
        self.given, self.server = TEXTS[kind], server

    def close(self) -> None:
        super().close()
        self.server.delay = 0.0

    def settle(self) -> None:
        """Wait until every answer that the page asked for has arrived."""
        self.page.wait_for_function(READY)

    def api(self, name: str, **given: object) -> Any:
        with urllib.request.urlopen(f"{self.address}api/{name}?{urllib.parse.urlencode(given)}") as answer:
            return json.load(answer)

    def change(self, heads: str, **given: object) -> Any:
        return self.api("change", text=self.given, heads=heads, **given)

    def cell_of(self, layer: int, head: int) -> Any:
        return self.at(f"#grid [aria-label^='Layer {layer} head {head},']")

    def click(self, selector: str) -> None:
        self.at(selector).click()
        self.settle()

    def switch(self, layer: int, head: int, **options: Any) -> None:
        self.cell_of(layer, head).click(**options)
        self.settle()

    @property
    def off(self) -> list[str]:
        """The heads that are changed, as the address names them."""
        return [each for each in self.place.get("heads", "").split(",") if each]

    def apply(self, text: str) -> None:
        self.at("#edit").click()
        self.at("#typed").fill(text)
        self.page.keyboard.press("Control+Enter")
        self.settle()


Opened = Callable[..., TrialPage]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny language model and a tiny encoder."""
    made = tmp_path_factory.mktemp("models")
    save_word_models(made, layers=LAYERS)
    return made


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[Callable[[str], tuple[str, SlowTrial]]]:
    """Serve the page of the language model and that of the encoder, each once."""
    with ExitStack() as running:
        kept: dict[str, tuple[str, SlowTrial]] = {}

        def serve(kind: str) -> tuple[str, SlowTrial]:
            if kind not in kept:
                made = open_trial(folder, kind)
                port = running.enter_context(serving_site(TrialSite(made))).port
                kept[kind] = (f"http://127.0.0.1:{port}/{TOKEN}/", made)
            return kept[kind]

        yield serve


@pytest.fixture
def opened(
    browser: Browser, servers: Callable[[str], tuple[str, SlowTrial]], checked: Callable[[TrialPage], TrialPage]
) -> Opened:
    """Open pages of models."""

    def open_page(kind: str = "language", place: str = "", **options: Any) -> TrialPage:
        address, server = servers(kind)
        page = checked(TrialPage(browser.new_context(**DESKTOP | options), address, kind, server))
        page.visit(place)
        return page

    return open_page


def shares(shown: TrialPage, column: int) -> list[float]:
    """The numbers of a column of the table of next tokens."""
    return [percent(each) for each in shown.texts(f"#answer tr > :nth-child({column})")[1:]]


def top(change: Any) -> Any:
    return max(change["next"], key=lambda one: one["before"])


def tokens_of_the_table(change: Any) -> list[str]:
    return [*(f"“{one['token']}”" for one in change["next"]), "all others"]


class TestTheSentence:
    def test_it_names_the_likeliest_token_and_its_probability(self, opened: Opened) -> None:
        shown = opened()
        first = top(shown.change(""))
        assert shown.at("#sentence").inner_text().startswith("The model expects “")
        said = shown.text("#sentence").replace("\u2068", "").replace("\u2069", "")
        assert said.startswith(f"The model expects “{first['token']}” next, with ")
        assert said.endswith("Choose a head to switch it off.")
        assert percent(said.split("with ")[1]) == pytest.approx(first["before"], abs=0.006)

    def test_without_heads_it_compares_both_probabilities_and_counts_the_worse_predictions(
        self, opened: Opened
    ) -> None:
        shown = opened()
        shown.click("#strongest")
        change = shown.change(",".join(shown.off))
        said = re.fullmatch(
            r"Without 3 heads it expects “.*?” with (\S+ %) instead of (\S+ %).*; (\d+) of (\d+) predictions "
            r"got worse by more than 0\.5 nats: less than 61 % as likely as before\.",
            shown.text("#sentence"),
        )
        assert said is not None
        assert percent(said[1]) == pytest.approx(top(change)["after"], abs=0.006)
        assert percent(said[2]) == pytest.approx(top(change)["before"], abs=0.006)
        assert (int(said[3]), int(said[4])) == (change["worse"], change["predictions"])

    def test_one_head_is_named(self, opened: Opened) -> None:
        shown = opened()
        shown.switch(1, 2)
        assert shown.text("#sentence").startswith("Without L1 H2 it expects “")


class TestTheNextToken:
    def test_the_table_has_the_numbers_of_the_answer(self, opened: Opened) -> None:
        shown = opened()
        shown.switch(1, 2)
        change = shown.change("1.2")
        names = [each.replace("\u2068", "").replace("\u2069", "") for each in shown.texts("#answer tbody th")]
        assert names == [each.strip() for each in tokens_of_the_table(change)]
        rows = [*change["next"], change["others"]]
        assert shares(shown, 3) == pytest.approx([one["before"] for one in rows], abs=0.006)
        assert shares(shown, 4) == pytest.approx([one["after"] for one in rows], abs=0.006)
        points = [float(each.replace("−", "-")) for each in shown.texts("#answer tbody td:last-child")]
        assert points == pytest.approx([100 * (one["after"] - one["before"]) for one in rows], abs=0.51)
        assert shown.text("#divergence") == f"KL(before ‖ after) {change['kl']:.2f} nats"

    def test_ten_rows_are_in_sight_at_first(self, opened: Opened) -> None:
        shown = opened()
        foot = shown.at("#foot").bounding_box()
        rows = [each.bounding_box() for each in shown.at("#answer tbody tr").all()]
        assert foot is not None
        assert sum(one is not None and one["y"] + one["height"] <= foot["y"] for one in rows) >= 10


@pytest.fixture(scope="module")
def logits(folder: Path) -> tuple[Any, Tensor, Tensor, Tensor]:
    loaded = load(str(folder / "llama"), head="language")
    model: Any = loaded.model
    ids = loaded.tokenizer(TEXTS["language"], return_tensors="pt").input_ids
    with torch.no_grad():
        before = model(ids).logits[0].double()
        with mh.ablate(model, ["L1 H2", "L3 H0"]):
            after = model(ids).logits[0].double()
    return loaded.tokenizer, ids[0], before, after


class TestTheNumbers:
    """The page and `mh.ablate` say the same about the same model."""

    def opened(self, opened: Opened) -> TrialPage:
        shown = opened()
        shown.switch(1, 2)
        shown.switch(3, 0)
        return shown

    def test_of_the_losses(self, opened: Opened, logits: tuple[Any, Tensor, Tensor, Tensor]) -> None:
        shown, (_, ids, *sides) = self.opened(opened), logits
        before, after = (cross_entropy(side[:-1], ids[1:], reduction="none") for side in sides)
        titles = shown.page.eval_on_selector_all("#words .tk", "all => all.map(one => one.title)")[1:]
        assert [float(re.search(r"loss ([\d.]+)", title)[1]) for title in titles] == pytest.approx(
            before.tolist(), abs=0.0051
        )
        changes = [re.search(r"change ([+−]?[\d.]+)", title) for title in titles]
        assert [float(one[1].replace("−", "-")) if one else 0.0 for one in changes] == pytest.approx(
            (after - before).tolist(), abs=0.0051
        )
        assert (after - before).abs().max() > 0.05
        worse = int((after - before > 0.5).sum())
        assert f"; {worse} of {len(before)} predictions got worse" in shown.text("#sentence")

    def test_of_the_next_token(self, opened: Opened, logits: tuple[Any, Tensor, Tensor, Tensor]) -> None:
        shown, (tokenizer, _, *sides) = self.opened(opened), logits
        before, after = (side[-1].softmax(-1) for side in sides)
        rows = shown.at("#answer tbody tr").all()[:-1]
        assert len(rows) >= 10
        for row in rows:
            token = re.sub("[“”\u2068\u2069]", "", row.locator("th").inner_text()).strip()
            id_ = tokenizer.convert_tokens_to_ids(token)
            cells = row.locator("td").all_inner_texts()
            assert percent(cells[1]) == pytest.approx(float(before[id_]), abs=0.0051)
            assert percent(cells[2]) == pytest.approx(float(after[id_]), abs=0.0051)
        divergence = float((before * (before / after).log()).sum())
        assert shown.text("#divergence") == f"KL(before ‖ after) {divergence:.2f} nats"
        best = before.argmax()
        said = re.search(r"with (\S+ %) instead of (\S+ %)", shown.text("#sentence"))
        assert said is not None
        assert [percent(each) for each in said.groups()] == pytest.approx(
            [float(after[best]), float(before[best])], abs=0.0051
        )


class TestTheText:
    def test_each_token_has_its_loss_and_the_change_of_it(self, opened: Opened) -> None:
        shown = opened()
        text = shown.api("text", text=shown.given)
        titles = shown.page.eval_on_selector_all("#words .tk", "all => all.map(one => one.title)")
        assert len(titles) == len(text["tokens"])
        assert "loss" not in titles[0]
        for title, token in list(zip(titles, text["tokens"], strict=True))[1:]:
            assert title.endswith(f"loss {token['loss']:.2f} nats")
        shown.switch(1, 2)
        losses = shown.change("1.2")["losses"]
        titles = shown.page.eval_on_selector_all("#words .tk", "all => all.map(one => one.title)")
        for title, token, after in list(zip(titles, text["tokens"], losses, strict=True))[1:]:
            found = re.search(r"change ([+−]?)([\d.]+) nats$", title)
            change = 0.0 if found is None else float(found[2]) * (-1 if found[1] == "−" else 1)
            assert change == pytest.approx(after - token["loss"], abs=0.0051)

    def test_a_token_that_is_clicked_is_the_place_whose_next_token_is_shown(self, opened: Opened) -> None:
        shown = opened()
        shown.click("#words .tk >> nth=4")
        assert shown.place["at"] == "4"
        change = shown.change("", at=4)
        assert shares(shown, 3)[0] == pytest.approx(change["next"][0]["before"], abs=0.006)
        assert " after “" in shown.text("#sentence")
        assert shown.at("#words .tk.on").get_attribute("data-p") == "4"
        shown.press("ArrowRight", "Enter")
        assert shown.place["at"] == "5"
        assert shown.page.evaluate("document.activeElement.dataset.p") == "5"

    def test_it_is_edited_in_place(self, opened: Opened) -> None:
        shown = opened()
        shown.page.keyboard.press("e")
        assert shown.at("#typed").input_value() == shown.given
        shown.at("#typed").fill("nobody saw the key before it")
        shown.page.keyboard.press("Control+Enter")
        shown.settle()
        assert shown.at("#editing").is_hidden()
        assert shown.place["text"] == "nobody saw the key before it"
        assert shown.text("#words").replace("\n", " ").startswith("nobody saw the key")
        shown.at("#edit").click()
        shown.at("#typed").fill("it is a key")
        shown.page.keyboard.press("Escape")
        assert shown.place["text"] == "nobody saw the key before it"
        shown.at("#edit").click()
        shown.at("#typed").fill("the door is it")
        shown.at("#foot").click()
        shown.page.wait_for_function("() => location.hash.includes('the+door')")
        shown.settle()

    def test_a_text_that_the_server_refuses_leaves_the_last_state(self, opened: Opened) -> None:
        shown = opened()
        before = shown.text("#sentence"), shown.place
        shown.apply("key " * 2 * shown.api("model")["most_tokens"])
        assert shown.at("#gone").is_visible()
        assert shown.text("#gone").count(".") >= 1
        assert (shown.text("#sentence"), shown.place) == before
        assert shown.at("#typed").is_visible()
        shown.page.keyboard.press("Escape")
        shown.switch(1, 2)
        assert shown.at("#gone").is_hidden()
        assert shown.off == ["1.2"]
        shown.complaints.clear()  # Chromium logs every status of 400

    def test_a_hostile_text_is_only_text(self, opened: Opened) -> None:
        shown = opened("encoder")
        shown.apply(f"the key {IMAGE}\n{IMAGE}\na door")
        assert IMAGE in shown.text("#answer ol")
        assert shown.at("main img").count() == 0
        assert shown.page.evaluate("() => window.broken === undefined")


class TestTheGrid:
    def test_a_click_switches_a_head_off_and_on(self, opened: Opened) -> None:
        shown = opened()
        shown.switch(1, 2)
        assert shown.off == ["1.2"]
        assert "off" in (shown.cell_of(1, 2).get_attribute("class") or "").split()
        assert shown.cell_of(1, 2).get_attribute("aria-pressed") == "true"
        shown.switch(1, 2)
        assert shown.off == []
        assert shown.text("#sentence").startswith("The model expects")

    def test_shift_and_a_click_switches_a_layer(self, opened: Opened) -> None:
        shown = opened()
        shown.switch(1, 0, modifiers=["Shift"])
        assert shown.off == [f"1.{head}" for head in range(HEADS)]
        shown.at("#grid .ax.l").nth(1).click()
        shown.settle()
        assert shown.off == []

    def test_the_keyboard_alone_is_enough(self, opened: Opened) -> None:
        shown = opened()
        shown.cell_of(0, 0).focus()
        shown.press("ArrowRight", "ArrowDown", "Enter")
        assert shown.off == ["1.1"]
        shown.press("ArrowLeft", " ")
        assert shown.off == ["1.1", "1.0"]
        shown.press("Control+z")
        assert shown.off == ["1.1"]
        shown.press("Shift+Enter")
        assert len(shown.off) == HEADS
        shown.press("x")
        assert shown.off == []
        shown.press("Control+z", "Control+z", "Control+z")
        assert shown.off == []
        assert shown.at("#undo").is_disabled()

    def test_all_heads_of_a_kind_are_switched_off(self, opened: Opened) -> None:
        shown = opened()
        chip = shown.at("#chips .chip").first
        number = int(chip.locator("i").inner_text())
        chip.click()
        assert shown.at("#grid .cell:not(.dim)").count() == number
        shown.click("#kindoff")
        assert len(shown.off) == number
        shown.click("#kindoff")
        assert shown.off == []

    def test_the_slider_scales_the_heads_and_computes_when_it_is_released(self, opened: Opened) -> None:
        shown = opened()
        assert shown.at("#scaling").is_hidden()
        shown.switch(1, 2)
        asked: list[str] = []
        shown.page.on("request", lambda request: asked.append(request.url))
        box = shown.at("#factor").bounding_box()
        assert box is not None
        shown.page.mouse.move(box["x"] + 8, box["y"] + box["height"] / 2)
        shown.page.mouse.down()
        shown.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2, steps=4)
        factor = float(shown.text("#scaled").removeprefix("Output of L1 H2 × "))
        assert 0.3 < factor < 0.7
        assert asked == []
        shown.page.mouse.up()
        shown.settle()
        assert shown.off == [f"1.2:{factor:g}"]
        assert float(shown.text("#grid .scaled")) == pytest.approx(factor, abs=0.051)
        assert shown.text("#sentence").startswith(f"With L1 H2 scaled by {factor:g} it expects")
        assert shown.text("#foot").endswith(f"multiplied by {factor:g}")

    def test_the_colours_show_how_much_maps_changed(self, opened: Opened) -> None:
        shown = opened()
        shown.switch(1, 2)
        shown.at("#colours button").nth(1).click()
        distances = {one["layer"]: one["heads"] for one in shown.change("1.2")["distances"]}
        assert shown.page.eval_on_selector("#grid .cell", "one => one.style.background") == ""
        for layer, head, distance in shown.change("1.2")["changed"]:
            assert distances[layer][head] == pytest.approx(distance)
            assert shown.cell_of(layer, head).evaluate("one => one.style.background") != ""

    def test_the_foot_says_what_ran(self, opened: Opened) -> None:
        shown = opened()
        shown.switch(1, 2)
        ran = shown.change("1.2")
        what = "the whole model ran" if ran["whole"] else f"layers {ran['layers'][0]} to {ran['layers'][1]} ran again"
        dtype = shown.api("model")["dtype"]
        assert re.fullmatch(rf"[\d.]+ s; {what}.*; {dtype}; replaced by zero", shown.text("#foot"))


class TestTheButtons:
    def test_the_strongest_induction_heads_are_switched_off(self, opened: Opened) -> None:
        shown = opened()
        found = shown.api("text", text=shown.given)["kinds"]["repeated_induction"][:3]
        shown.click("#strongest")
        assert shown.off == [f"{layer}.{head}" for layer, head in found]

    def test_the_random_heads_are_of_the_same_layers_and_the_same_each_time(self, opened: Opened) -> None:
        shown = opened()
        induction = shown.api("text", text=shown.given)["kinds"]["repeated_induction"]
        shown.click("#random")
        first = shown.off
        assert sorted(each.split(".")[0] for each in first) == sorted(str(layer) for layer, _ in induction[:3])
        assert not {f"{layer}.{head}" for layer, head in induction} & set(first)
        shown.click("#random")
        assert shown.off != first
        shown.visit()
        shown.click("#random")
        assert shown.off == first

    def test_the_effects_of_all_heads_arrive_layer_by_layer(self, opened: Opened) -> None:
        shown = opened()
        shown.server.delay = 0.1
        shown.at("#sweep").click()
        shown.page.wait_for_function("() => /^\\d+ of \\d+ layers/.test(document.getElementById('swept').textContent)")
        assert shown.text("#sweep") == "Stop"
        shown.page.wait_for_function("() => /^Each head off alone/.test(document.getElementById('swept').textContent)")
        assert shown.at("#colours [aria-pressed=true]").inner_text() == "effect on this token"
        labels = shown.page.eval_on_selector_all("#grid .cell", "all => all.map(one => one.ariaLabel)")
        assert all("this head off alone: ln p" in label for label in labels)

    @pytest.mark.parametrize(("kind", "of"), [("language", "ln p"), ("encoder", "similarity")])
    def test_estimates_come_first_by_their_name_and_exact_effects_replace_them(
        self, opened: Opened, kind: str, of: str
    ) -> None:
        shown = opened(kind)
        estimates = shown.api("estimates", text=shown.given)["effects"]
        hold(shown, "sweep")
        shown.at("#sweep").click()
        shown.at("#grid .cell.estimated").first.wait_for()
        labels = shown.page.eval_on_selector_all("#grid .cell", "all => all.map(one => one.ariaLabel)")
        found = [re.findall(rf"by gradient estimate: {of} ([+−]?[\d.]+)", each)[0].replace("−", "-") for each in labels]
        assert list(map(float, found)) == pytest.approx(estimates, abs=0.0051)
        assert "Dashed: a gradient’s estimate" in shown.text("#scale")
        shown.page.keyboard.press("Escape")
        assert shown.text("#swept").startswith("Gradient estimates (")
        shown.at("#sweep").click()
        shown.page.wait_for_function("() => /^Each head off alone/.test(document.getElementById('swept').textContent)")
        assert shown.at("#grid .cell.estimated").count() == 0

    @pytest.mark.parametrize(("peak", "memory"), [(1 << 31, " Peak memory 2,048 MiB."), (None, "")])
    def test_the_peak_memory_is_shown_where_it_is_known(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch, peak: int | None, memory: str
    ) -> None:
        monkeypatch.setattr(trial, "peak_memory_of_process", lambda: peak)  # None on Windows
        shown = opened()
        shown.at("#sweep").click()
        shown.page.wait_for_function("() => document.getElementById('sweep').title")
        title = (shown.at("#sweep").get_attribute("title") or "").replace("\u00a0", " ")
        took = r"All 24 heads in [\d.]+ s\."
        assert re.fullmatch(took + re.escape(memory), title)

    def test_measuring_is_stopped(self, opened: Opened) -> None:
        shown = opened()
        hold(shown, "estimates")
        shown.at("#sweep").click()
        shown.page.wait_for_function("() => document.getElementById('sweep').textContent === 'Stop'")
        shown.page.keyboard.press("Escape")
        assert shown.text("#sweep").startswith("Which heads matter for this token?")
        assert shown.text("#swept") == ""


def hold(shown: TrialPage, name: str) -> None:
    """Leave the first request for an answer without one, as a slow server does."""
    held: list[Route] = []

    def handle(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    shown.page.route(re.compile(rf"/api/{name}\?"), handle)


def test_a_newer_request_cancels_the_older(opened: Opened) -> None:
    shown = opened()
    failed: list[str] = []
    shown.page.on("requestfailed", lambda request: failed.append(request.url))
    hold(shown, "change")
    shown.cell_of(1, 2).click()
    shown.page.wait_for_function("() => document.documentElement.dataset.busy === 'true'")
    assert "off" in (shown.cell_of(1, 2).get_attribute("class") or "").split()
    shown.switch(1, 1)
    assert [urllib.parse.parse_qs(url.split("?")[1])["heads"] for url in failed if "api/change" in url] == [["1.2"]]
    assert shown.off == ["1.2", "1.1"]
    shown.press("Control+z")
    assert shown.off == ["1.2"]


class TestTheMaps:
    def test_a_click_on_a_head_that_matters_switches_it_off_and_shows_its_map(self, opened: Opened) -> None:
        shown = opened()
        shown.at("#sweep").click()
        shown.page.wait_for_function("() => /^Each head off alone/.test(document.getElementById('swept').textContent)")
        shown.switch(1, 2)
        assert shown.off == ["1.2"]
        assert shown.texts("#changes .name b")[0] == "L1 H2"
        assert percent(shown.texts("#changes .change:not(.heading) > :last-child")[0]) == 0
        pictures = shown.page.eval_on_selector_all("#changes canvas", "all => all.map(one => one.toDataURL())")
        assert pictures[0] == pictures[1] != pictures[2]  # its own map stays

    def test_the_five_maps_that_changed_most_are_shown_before_after_and_their_difference(self, opened: Opened) -> None:
        shown = opened()
        shown.click("#strongest")
        answer = shown.change(",".join(shown.off))
        last = [*map(int, shown.off[-1].split("."))]
        distances = {each["layer"]: each["heads"] for each in answer["distances"]}
        changed = [[*last, distances[last[0]][last[1]]], *(each for each in answer["changed"] if each[:2] != last)]
        names = [f"L{layer} H{head}" for layer, head, _ in changed]
        assert shown.texts("#changes .name b") == names
        assert shown.at("#changes canvas").count() == 3 * len(changed)
        sizes = shown.page.eval_on_selector_all("#changes canvas", "all => all.map(one => one.style.width)")
        assert set(sizes) == {"96px"}
        numbers = [percent(each) for each in shown.texts("#changes .change:not(.heading) > :last-child")]
        assert numbers == pytest.approx([distance for *_, distance in changed], abs=0.006)

    def test_without_a_change_there_is_none(self, opened: Opened) -> None:
        shown = opened()
        assert shown.at("#changes canvas").count() == 0
        assert shown.text("#changes").startswith("Switch a head off")


def test_the_continuations_stand_side_by_side_and_differing_words_are_marked(opened: Opened) -> None:
    shown = opened()
    shown.click("#strongest")
    shown.at("#further").scroll_into_view_if_needed()
    shown.page.wait_for_function("() => document.querySelectorAll('#after mark').length > 0")
    given = len(shown.text("#before span").split())
    words = {side: shown.text(f"#{side}").split()[given:] for side in ("before", "after")}
    marked = {side: shown.texts(f"#{side} mark") for side in ("before", "after")}
    kept = {side: [word for word in words[side] if word not in marked[side]] for side in words}
    assert words["before"] != words["after"]
    assert [word for word in kept["before"] if word not in marked["after"]] == [
        word for word in kept["after"] if word not in marked["before"]
    ]
    assert shown.texts(".both h3") == ["all heads on", "Without 3 heads"]


class TestTheAddress:
    def test_it_restores_the_text_the_heads_and_the_place(self, opened: Opened) -> None:
        shown = opened(place="#" + urllib.parse.urlencode({"text": "nobody saw it", "heads": "1.2:0.5,0.1", "at": 1}))
        assert shown.place == {"text": "nobody saw it", "heads": "1.2:0.5,0.1", "at": "1"}
        assert shown.text("#grid .scaled") == "0.5"
        assert shown.at("#grid .off").count() == 1
        assert shown.at("#words .tk.on").get_attribute("data-p") == "1"

    def test_wrong_parts_are_left_out(self, opened: Opened) -> None:
        shown = opened(place="#heads=999.0,x,1.2,1&at=9999")
        assert shown.off == ["1.2"]
        assert "at" not in shown.place
        assert shown.place["text"] == shown.given

    def test_the_other_language_shows_the_same_state(self, opened: Opened) -> None:
        shown = opened()
        shown.switch(1, 2)
        before = shown.place
        with shown.page.expect_navigation():
            shown.at("#language").click()
        shown.settle()
        assert shown.place == before
        assert shown.page.evaluate("document.documentElement.lang") == "zh-CN"
        assert "奈特" in shown.text("#sentence")

    def test_the_link_is_copied(self, opened: Opened) -> None:
        shown = opened(permissions=["clipboard-read", "clipboard-write"])
        shown.switch(1, 2)
        shown.at("#link").click()
        shown.page.wait_for_function("() => document.getElementById('link').textContent === 'Copied'")
        assert shown.page.evaluate("navigator.clipboard.readText()") == shown.page.url


class TestAnEncoder:
    def test_it_shows_how_the_similarities_of_sentences_change(self, opened: Opened) -> None:
        shown = opened("encoder")
        assert shown.text("#sentence").startswith("Sentences ")
        shown.switch(1, 2)
        text, change = shown.api("text", text=shown.given), shown.change("1.2")
        pairs = [(a, b) for a in range(len(text["sentences"])) for b in range(len(text["sentences"])) if a != b]
        tables = shown.at("#answer table").all()
        assert len(tables) == 3
        before, after = text["similarity"], change["similarity"]
        expected = [[m[a][b] for a, b in pairs] for m in (before, after)]
        expected.append([after[a][b] - before[a][b] for a, b in pairs])
        for table, values in zip(tables, expected, strict=True):
            cells = [each for each in table.locator("tbody td").all_inner_texts() if each]
            assert [float(each.replace("−", "-")) for each in cells] == pytest.approx(values, abs=0.00051)
        hardly = max(abs(after[a][b] - before[a][b]) for a, b in pairs) < 0.01
        said = "the similarities hardly change" if hardly else "the similarity of sentences"
        assert said in shown.text("#sentence")
        assert shown.at("#further").is_hidden()

    def test_the_maps_are_those_of_the_sentence_of_the_chosen_token(self, opened: Opened) -> None:
        shown = opened("encoder")
        shown.switch(0, 2)
        asked: list[str] = []
        shown.page.on("request", lambda request: asked.append(request.url))
        shown.click("#words .tk >> nth=0")
        assert {urllib.parse.parse_qs(url.split("?")[1])["sentence"][0] for url in asked if "api/maps" in url} == {"0"}
        assert shown.text("#hm") == "Maps that changed most in sentence 1"


class TestEveryReader:
    @pytest.mark.parametrize("kind", ["language", "encoder"])
    @pytest.mark.parametrize("width", [1440, 1024, 390])
    def test_the_page_fits_the_window(self, opened: Opened, kind: str, width: int) -> None:
        shown = opened(kind, viewport={"width": width, "height": 844})
        shown.switch(0, 2)
        assert shown.wide <= width

    def test_a_phone_has_large_buttons(self, opened: Opened) -> None:
        shown = opened(**PHONE)
        shown.switch(0, 2)
        heights = shown.page.eval_on_selector_all(
            "button:not(.cell), a.btn, .chip",
            "all => all.map(one => one.getBoundingClientRect().height).filter(Boolean)",
        )
        assert min(heights) >= 31.5

    @pytest.mark.parametrize("kind", ["language", "encoder"])
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_axe_finds_nothing_serious(self, opened: Opened, kind: str, scheme: str) -> None:
        shown = opened(kind, color_scheme=scheme, bypass_csp=True)
        shown.switch(0, 2)
        assert serious(shown.page) + ruled(shown.page) == []

    def test_the_keys_and_words_are_listed(self, opened: Opened) -> None:
        shown = opened()
        shown.page.keyboard.press("?")
        assert "all heads on" in shown.text("dialog")
        assert "KL(before ‖ after)" in shown.text("dialog")


def test_a_server_that_is_gone_is_named_with_the_command_that_starts_it(opened: Opened) -> None:
    shown = opened()
    shown.page.route(re.compile("/api/"), lambda route: route.abort())
    shown.cell_of(1, 2).click()
    shown.page.wait_for_selector("#gone code")
    assert shown.text("#gone code") == f"multihead try {shown.api('model')['name']}"
    assert shown.text("#sentence").startswith("The model expects")
    shown.page.unroute(re.compile("/api/"))
    shown.complaints.clear()  # Chromium logs every request that fails
