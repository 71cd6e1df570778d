"""The panel "Which heads matter": its numbers, its hatching, its names, and the way to a head and back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from multihead.viewer import write_report
from tests.browser.records import important
from tests.browser.shown import DESKTOP, PHONE, Shown, serious
from tests.head_numbers import Numbers, found, record

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Opened = Callable[..., Shown]
CELLS = "#importantgrid a"


def numbers(shown: Shown) -> list[str]:
    """The number of each cell, as it is read out: the effect without its error."""
    labels = [each.get_attribute("aria-label") or "" for each in shown.at(CELLS).all()]
    found = [re.search(r"([+−]?)([\d.]+) (?:±|nats)", each.replace("\u00a0", " ")) for each in labels]
    return [("-" if each[1] == "−" else "") + each[2] for each in found if each]


def assert_shows(shown: Shown, effects: Tensor) -> None:
    """Check that the cells show (layers, heads) numbers, to half a unit of their last decimal."""
    read = numbers(shown)
    unit = torch.tensor([0.1 ** len(each.partition(".")[2]) for each in read])
    off = (torch.tensor([*map(float, read)]) - effects.flatten()).abs()
    assert bool((off <= 0.501 * unit).all()), (read, effects)


def test_the_cells_have_the_numbers_of_importance_and_are_hatched_within_two_errors_of_0(opened: Opened) -> None:
    shown = opened("important")
    effects = found()
    assert_shows(shown, effects.effects)
    within = (effects.effects.abs() <= 2 * effects.standard_errors).flatten().tolist()
    assert 0 < sum(within) < len(within)
    assert shown.at(CELLS).evaluate_all("all => all.map(e => e.classList.contains('within'))") == within
    labels = shown.at(CELLS).evaluate_all("all => all.map(e => e.ariaLabel)")
    assert [each.endswith("within two standard errors of 0") for each in labels] == within
    assert shown.text("#importantlead") == effects.describe().partition(".")[0] + "."
    assert [each.split()[0:2] for each in shown.texts("#mostheads li")] == [
        [f"L{each.layer}", f"H{each.head}"] for each in effects.heads(10)
    ]
    assert shown.texts("#togetherrows td") == ["+0.600 ± 0.058 nats", "+0.300 ± 0.029 nats", "+0.20 ± 0.14 nats"]


def test_an_estimate_has_its_name_wherever_it_is_shown_and_the_address_keeps_it(opened: Opened) -> None:
    shown = opened("important")
    shown.at("#importantchoice button").nth(1).focus()
    shown.press("Enter")
    assert shown.text("#importantchoice [aria-pressed=true]") == "gradient estimate"
    assert shown.place["m"] == "estimate_surprise_zero"
    assert_shows(shown, found("gradient").effects)
    assert shown.text("#mosttitle") == "Most, by gradient estimate"
    assert shown.text("#importantabout").startswith("Gradient estimate:")
    assert shown.text("#importantscale b") == "gradient estimate, nats"
    assert "gradient estimate" in (shown.at(CELLS).first.get_attribute("aria-label") or "")
    assert shown.at("#together").is_hidden()
    shown.visit("#m=sensitivity_surprise_zero")
    assert shown.text("#importantchoice [aria-pressed=true]") == "sensitivity"
    assert shown.at(f"{CELLS}.within").count() == 0


def test_a_head_is_opened_from_the_grid_and_the_list_and_the_way_back_leads_there(opened: Opened) -> None:
    shown = opened("important")
    best = found().heads(1)[0]
    shown.at(f"{CELLS}[tabindex='0']").focus()  # the head that matters most
    assert shown.text("#importantread").startswith(f"Layer {best.layer} head {best.head}")
    shown.press("Home", "ArrowRight", "ArrowDown" if best.layer == 0 else "ArrowUp", "Enter")
    assert shown.place["a"] == f"L{1 - best.layer}H1"
    shown.press("Escape")
    focused = shown.page.evaluate("[document.activeElement.parentElement.role, document.activeElement.ariaLabel]")
    assert focused[0] == "gridcell"
    assert focused[1].startswith(f"Layer {1 - best.layer} head 1")
    assert ": exact " in focused[1]
    shown.at("#mostheads a").nth(2).focus()
    shown.press("Enter")
    third = found().heads(3)[2]
    assert shown.place["a"] == f"L{third.layer}H{third.head}"
    shown.press("Escape")
    assert shown.at("#mostheads a").nth(2).evaluate("e => e === document.activeElement")
    shown.at("#filter").fill("L0")
    shown.settle()
    assert shown.at(f"{CELLS}.dim").count() == 4


@pytest.mark.parametrize(("options", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_the_panel_fits_and_is_accessible(opened: Opened, options: Any, scheme: str) -> None:
    shown = opened("important", **options | {"color_scheme": scheme})
    assert serious(shown.page, "#important") == []
    assert shown.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_report_has_the_panel_too_and_neither_one_text_nor_a_head_that_was_not_measured_is_hatched(
    browser: Browser, tmp_path: Path, checked: Callable[[Shown], Shown]
) -> None:
    one, part = record(), record()
    one.add(found(texts=1))
    name = found().layers[1].name
    part.add(Numbers(found().statistic, {name: found().effects_of_texts[name]}))
    for seen, hatched in ((important(), True), (one, False)):
        write_report(seen, tmp_path / "page.html", title="a model")
        shown = checked(Shown(browser.new_context(**DESKTOP), (tmp_path / "page.html").as_uri()))
        shown.visit()
        assert (shown.at(f"{CELLS}.within").count() > 0) is hatched
        assert ("nothing is hatched" in shown.text("#importantscale")) is not hatched
        assert_shows(shown, found(texts=12 if hatched else 1).effects)
    write_report(part, tmp_path / "part.html", title="a model")
    shown = checked(Shown(browser.new_context(**DESKTOP), (tmp_path / "part.html").as_uri()))
    shown.visit()
    assert shown.at(f"{CELLS}.unmeasured:not(.within)").count() == 4  # those of the other layer
    assert len(numbers(shown)) == 4
