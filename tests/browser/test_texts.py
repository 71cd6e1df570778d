"""A record of several texts: a switch between them, and what the heads do over all of them, served and in one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from multihead.viewer import write_report
from tests.browser.records import TEXTS, several
from tests.browser.shown import DESKTOP, PHONE, Shown, serious

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Opened = Callable[..., Shown]


@pytest.fixture(params=["served", "file"])
def shown(
    request: pytest.FixtureRequest, opened: Opened, browser: Browser, checked: Callable[[Shown], Shown], tmp_path: Path
) -> Opened:
    """Open the record of three texts, from the viewer or from its report."""

    def open_page(place: str = "", lang: str = "en", **options: Any) -> Shown:
        if request.param == "served":
            return opened("several", place=place, lang=lang, **options)
        write_report(several(), tmp_path / "page.html", title="a model", lang=lang)
        page = checked(Shown(browser.new_context(**DESKTOP | options), (tmp_path / "page.html").as_uri()))
        page.visit(place)
        return page

    return open_page


def test_texts_are_chosen_by_the_list_the_buttons_and_the_keyboard(shown: Opened) -> None:
    page = shown()
    openings = ["the keeper wrote a letter to", "القطة جلست على", "猫坐在垫子上，狗坐在门"]
    for option, number, opening in zip(page.texts("#sample option"), (1, 2, 3), openings, strict=True):
        assert option.startswith(f"text {number} of 3: ")
        assert opening in option
    assert page.at("#textbefore").is_disabled()
    page.at("#textafter").click()
    page.settle()
    assert page.text("#lead") == "6 attention heads, as they read text 2 of 3, of 9 tokens."
    assert page.place["t"] == "1"
    assert page.at("#words").get_attribute("dir") == "rtl"
    page.press(".")
    assert page.text("#lead").startswith("6 attention heads, as they read text 3 of 3, of ")
    assert "".join(page.texts("#words .tk")[1:]) == "".join(TEXTS["zh"])
    assert page.at("#textafter").is_disabled()
    page.press(".", ",", ",")
    assert "t" not in page.place
    page.at("#sample").select_option("2")
    page.settle()
    assert page.place["t"] == "2"


def test_a_head_stays_in_view_and_its_map_is_that_of_the_other_text(shown: Opened) -> None:
    page = shown("#a=L1H2&x=3&y=3&n=4&q=2&c=root&s=0")
    page.press(".")
    assert {**page.place, "c": ""} == {"a": "L1H2", "t": "1", "x": "0", "y": "0", "n": "9", "q": "5", "c": "", "s": "0"}
    assert "9 tokens" in page.text("#facts")
    page.at("#map[data-whole=true]").wait_for()
    page.at("#back").click()
    page.settle()
    assert page.text("#lead").startswith("6 attention heads, as they read text 2 of 3")


def test_findings_are_over_all_texts_or_on_the_chosen_one(shown: Opened) -> None:
    page, record = shown("#t=1"), several()
    assert page.texts("#findsof button") == ["Over all 3 texts", "On text 2"]
    assert "The maps are those of text 2." in page.text("#findsof")
    page.page.wait_for_function("!document.querySelector('#finds progress')")
    found = record.findings()
    assert [name.split(" ")[:4] for name in page.texts("#finds li b")] == [
        ["Layer", str(one.layer), "head", str(one.head)] for one in found
    ]
    for one, small in zip(found, page.texts("#finds small"), strict=True):
        assert one.over_texts is not None
        assert small.startswith(one.over_texts.sentence.replace("\u00a0", " "))
    page.at("#findsof button").nth(1).click()
    alone = record.findings(sample=1)
    assert len(page.texts("#finds li b")) == len(alone)
    assert "standard deviation" not in page.text("#finds")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_phone_shows_the_switch_whole_and_the_page_is_accessible(shown: Opened, lang: str) -> None:
    page = shown("#t=1", lang=lang, **PHONE | {"color_scheme": "dark"})
    box, wide = page.at("#textpick").bounding_box(), page.at("#sample").bounding_box()
    assert box is not None
    assert wide is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert wide["width"] > 200
    assert (
        page.at("#sample")
        .evaluate("each => each.selectedOptions[0].text")
        .startswith({"en": "text 2 of 3: ", "zh": "文本 2/3："}[lang])
    )
    assert serious(page.page) == []
