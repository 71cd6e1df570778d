"""The lab's page: it opens offline, holds what was measured, and lets no script in but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from multihead_lab.page import render_lab_page, write_page
from multihead_lab.report import build_chapters
from multihead_lab.text import load_phrases
from tests.lab.few import few_answers


def data_of(html: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(found)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_holds_every_answer_and_every_number_without_script(lang: str) -> None:
    class Reader(HTMLParser):
        seen: str = ""

        def handle_data(self, data: str) -> None:
            self.seen += data

    reader = Reader()
    reader.feed(render_lab_page(few_answers(), lang=lang))
    for chapter in build_chapters(few_answers(), load_phrases(lang)):
        for sentence in (chapter.title, chapter.short_answer, *chapter.paragraphs, *chapter.head_paragraphs):
            assert sentence in reader.seen
        for table in filter(None, (chapter.table, chapter.head_table)):
            assert all(cell in reader.seen for row in table.rows for cell in row)


def test_the_page_asks_nothing_of_the_network() -> None:
    html = render_lab_page(few_answers())
    assert not re.search(r'(?:src|href)="(?!#)', html)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|https?://", html)
    assert "default-src 'none';" in html


def test_only_the_page_s_own_script_may_run() -> None:
    html = render_lab_page(few_answers())
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_the_heads_of_the_first_seed_are_there_at_their_moments() -> None:
    tasks = data_of(render_lab_page(few_answers()))["tasks"]
    assert [task["name"] for task in tasks] == ["one", "two", "induction"]
    for task, experiment in zip(tasks, few_answers().experiments, strict=True):
        for course in task["courses"]:
            watched = experiment.models_with_head_count(course["heads"])[0]
            looked = [moment for moment in watched.learning_curve if moment.head_measurements]
            assert [moment["step"] for moment in course["moments"]] == [moment.step for moment in looked]
            shown, seen = course["moments"][-1]["looks"][-1], looked[-1].head_measurements[-1]
            assert shown["picture"] == [[round(1000 * weight) for weight in row] for row in seen.weights]


def test_every_text_of_the_script_is_on_the_page() -> None:
    html = render_lab_page(few_answers())
    data = data_of(html)
    (texts,) = re.findall(r'<script type="application/json" id="texts">(.*?)</script>', html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    own = script[script.index("modules['multihead_lab/static/lab.js']") :]
    named = set(re.findall(r"translate\(\s*'([^']+)'\s*[,)]", own)) | {"value lookup", "value induction"}
    measured = {
        "measure." + name for task in data["tasks"] for course in task["courses"]
        for look in course["moments"][0]["looks"] for name in look["measures"]
    }  # fmt: skip
    assert named | measured | {"measure.only lookup"} <= set(json.loads(texts))


def test_every_link_of_the_page_leads_somewhere() -> None:
    html = render_lab_page(few_answers())
    links = set(re.findall(r'href="#([^"]+)"', html))
    assert links <= set(re.findall(r'id="([^"]+)"', html))


def test_the_page_is_written_in_the_chosen_language(tmp_path: Path) -> None:
    path = write_page(few_answers(), tmp_path / "lab.html", lang="zh")
    text = path.read_text("utf-8")
    assert '<html lang="zh">' in text
    assert "要多少个头？" in text
