"""English and Chinese hold the same texts, all of them are used, and no text of a page or command is elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from multihead.errors import ArgumentError
from multihead.kinds import KINDS, MIXED
from multihead.locale import texts
from multihead.locale.texts import LANGUAGES, section, statistic_label, text
from multihead.probes.catalogue import PROBES, REPEAT_PROBES
from multihead_lab.locale import LOCALE_PACKAGE
from multihead_lab.walk import CHAPTERS, walk
from tests.locale.sources import SOURCE, USERS, files, is_used, keys_in

STORES = (texts.__package__, LOCALE_PACKAGE)
ENGLISH, CHINESE = (
    {key: each for store in STORES for key, each in texts._texts_in_language(lang, store).items()} for lang in LANGUAGES
)
DOCS = SOURCE.parent / "docs"
HAN = re.compile("[\u4e00-\u9fff]")
PAGES = {
    "viewer/static/view": ("common", "page", "viewer"),
    "viewer/static/try": ("common", "page", "viewer", "try"),
    "viewer/static/census": ("common", "page", "census page"),
    "viewer/static/series": ("common", "page", "series"),
    "multihead_lab/static": ("common", "lab"),
}


def texts_of(lang: str, *sections: str) -> dict[str, str]:
    """The texts of some sections, each of which is in one of the stores."""
    return {key: each for store in STORES for key, each in section(lang, *sections, store=store).items()}


def placeholders(sentence: str) -> set[str]:
    return set(re.findall(r"\{(\w+)[^}]*\}", sentence))


def joined_names(sentence: str) -> set[str]:
    """Names such as PyTorch, which are not translated."""
    return set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w*", sentence))


LABELS = ("common.statistic.", "common.short statistic.", "common.unit.")  # in English those of the definitions
TRANSLATED = {key: sentence for key, sentence in CHINESE.items() if not key.startswith(LABELS)}


def test_both_languages_have_the_same_texts() -> None:
    assert list(ENGLISH) == list(TRANSLATED)


def test_every_built_in_statistic_has_a_chinese_label_and_unit() -> None:
    names = [*PROBES, *REPEAT_PROBES, "punctuation_mass"]  # which examples observe
    assert {key for key in CHINESE if key.startswith(LABELS[0])} == {LABELS[0] + name for name in names}
    assert all(key.removeprefix(LABELS[1]) in PROBES for key in CHINESE if key.startswith(LABELS[1]))
    units = {each.unit for each in PROBES.values()} - {"", "%"}
    assert {key for key in CHINESE if key.startswith(LABELS[2])} == {LABELS[2] + unit for unit in units}


@pytest.mark.parametrize("parts", [placeholders, joined_names])
def test_a_text_has_the_same_placeholders_and_names_in_both_languages(parts: Callable[[str], set[str]]) -> None:
    assert {key: parts(sentence) for key, sentence in ENGLISH.items()} == {
        key: parts(sentence) for key, sentence in TRANSLATED.items()
    }


def test_every_text_is_used() -> None:
    unused = [key for key in ENGLISH if not is_used(*key.split(".", 1))]
    assert unused == []


def test_every_section_belongs_to_a_page_or_command() -> None:
    assert {key.split(".")[0] for key in ENGLISH} == set(USERS)


@pytest.mark.parametrize(("folder", "sections"), PAGES.items())
def test_a_page_has_every_text_that_its_script_and_its_template_name(folder: str, sections: tuple[str, ...]) -> None:
    here = texts_of("en", *sections)
    named = {key for path in files([f"{folder}/*.html"]) for key in keys_in(path)[0]}
    for path in files([f"{folder}/*.js"]):
        source = path.read_text("utf-8")
        named |= set(re.findall(r"\btranslate\(\s*'([^']+)'\s*[,)]", source))
        for prefix in re.findall(r"\btranslate\(\s*'([^']+)'\s\+", source):
            assert any(key.startswith(prefix) for key in here), prefix
    assert len(named) > 9
    assert named - set(here) == set()


def test_the_shared_scripts_find_their_texts_on_every_page() -> None:
    named = set()
    for path in files(["viewer/static/shared/*.js"]):
        named |= set(re.findall(r"\btranslate\(\s*'([^']+)'\s*[,)]", path.read_text("utf-8")))
    assert named - set(section("en", "common", "page")) == set()


@pytest.mark.parametrize("sections", PAGES.values())
def test_no_key_of_a_page_is_in_two_of_its_sections(sections: tuple[str, ...]) -> None:
    assert len(texts_of("en", *sections)) == sum(len(texts_of("en", each)) for each in sections)


@pytest.mark.parametrize("path", files(["**/*.html"]), ids=lambda path: path.name)
def test_a_template_holds_no_text_of_its_own(path: Path) -> None:
    class Reader(HTMLParser):
        tag = ""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tag = tag
            found.extend(value or "" for name, value in attrs if name in ("aria-label", "placeholder", "title", "alt"))

        def handle_data(self, data: str) -> None:
            if self.tag not in ("style", "script"):
                found.append(data)

    found: list[str] = []
    command = "<code>multihead walk</code>"
    Reader().feed(re.sub(rf"\{{\{{.*?\}}\}}|\{{%.*?%\}}|{command}", "", path.read_text("utf-8"), flags=re.DOTALL))
    assert {word for each in found for word in re.findall(r"\w\w+", each)} <= {"multihead"}


@pytest.mark.parametrize("path", files(["**/*.js"]), ids=lambda path: path.name)
def test_a_script_sets_no_text_of_its_own(path: Path) -> None:
    source = re.sub(r"'code', \{ textContent: 'multihead view '", "", path.read_text("utf-8"))  # a command
    literal = r"""(?:textContent|title|placeholder|'aria-label')['"]?\s*[:=,]\s*['`][^'`$]*[a-z]{2}"""
    assert re.findall(literal, source) == []


def test_chinese_is_nowhere_but_in_its_file() -> None:
    # An example of a prompt, and the label of an axis in an example.
    allowed = {"multihead/cli/look.py", "multihead/kinds.py", "multihead/cli/console.py"}
    found = {str(path.relative_to(SOURCE)) for path in files(["**/*.py", "**/*.js", "**/*.html"]) if _has_chinese(path)}
    assert found <= allowed


def _has_chinese(path: Path) -> bool:
    return HAN.search(path.read_text("utf-8")) is not None


def test_no_english_text_is_chinese_and_no_chinese_text_is_english() -> None:
    assert [key for key, sentence in ENGLISH.items() if HAN.search(sentence)] == []
    without = {key: re.sub(r"\{.*?\}", "", sentence) for key, sentence in CHINESE.items() if not HAN.search(sentence)}
    assert {sentence for sentence in without.values() if re.search("[A-Za-z]{3}", sentence)} == {"PyTorch", "softmax"}


def test_one_chinese_term_is_used_for_each_concept() -> None:
    everything = "\n".join(CHINESE.values())
    for wrong in ("质量", "所受注意", "注意力沉", "便宜", "批量", "开始标记", "汇点"):
        assert wrong not in everything
    assert everything.count("汇聚点") == everything.count("注意力汇聚点") > 1


# The dark theme's colour scale runs from dark to bright, a phone has no mouse, a keyboard clicks nothing, and what
# is on the right of a wide window is at the end of a narrow one.
TRUE_SOMEWHERE = {
    "en": r"\b(dark|light|bright|black|white|pale|click|hover|tap|mouse|to the (left|right)|on the (left|right)"
    r"|(left|right) (side|panel|column)|leftmost|rightmost)(er|est|en|s|ed|ing)?\b",
    "zh": "深|浅|亮|黑|白色|变暗|点击|单击|悬停|鼠标|左侧|右侧|左边|右边",
}


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_texts_are_true_in_every_theme_on_every_device_and_with_every_input(lang: str) -> None:
    everything = dict(ENGLISH if lang == "en" else CHINESE)
    everything |= {f"kind {kind.name}": " ".join((kind.about[lang], kind.label(lang))) for kind in (*KINDS, MIXED)}
    found = {
        key: word[0]
        for key, each in everything.items()
        if (word := re.search(TRUE_SOMEWHERE[lang], each, re.IGNORECASE))
    }
    assert found == {}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_no_document_describes_a_map_by_how_dark_it_is(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines()
    wrong = re.compile(
        r"\b(darker|darkest|lighter|lightest|brighter|brightest)\b|[越最]深|深浅|[更越最]浅|[更越最]亮", re.IGNORECASE
    )
    assert [line for line in lines if wrong.search(line)] == []


def test_every_kind_has_its_texts_in_each_language_with_the_same_placeholders() -> None:
    for kind in (*KINDS, MIXED):
        for words in (kind.labels, kind.about, kind.sentence, kind.brief, kind.noun):
            assert tuple(words) in (LANGUAGES, ())
            if words:
                english, chinese = (words[lang] for lang in LANGUAGES)
                assert HAN.search(chinese)
                assert not HAN.search(english)
                assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", chinese))
        assert kind.labels
        assert kind.about


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_walk_has_texts_for_every_chapter_part_and_axis(lang: str) -> None:
    here = texts_of(lang, "walk")
    chapters = {f"chapter.{chapter.name}.{each}" for chapter in CHAPTERS for each in ("title", "text")}
    parts = {f"part.{chapter.part}.{each}" for chapter in CHAPTERS for each in ("title", "text")}
    axes = {f"axis.{axis}" for step in walk() for axis in step.axes}
    assert {key for key in here if key.split(".")[0] in ("chapter", "part")} == chapters | parts
    assert axes <= set(here)


def test_the_sentences_of_the_chinese_walk_have_chinese_punctuation() -> None:
    for key, sentence in texts_of("zh", "walk").items():
        if key.endswith(".text"):
            assert HAN.search(sentence)
            assert not set(sentence) & set(",;!?"), key


def test_a_text_is_filled_in() -> None:
    assert text("look.doing.loading", "en", model="gpt2") == "Loading gpt2"
    assert text("look.doing.loading", "zh", model="gpt2") == "正在加载 gpt2"


def test_a_statistic_without_a_label_in_a_language_keeps_its_own() -> None:
    assert statistic_label("entropy", "zh", "entropy") == "熵"
    assert statistic_label("share_of_verbs", "zh", "verbs") == "verbs"


def test_an_unknown_language_is_refused() -> None:
    sentence = 'lang is "fr", and must be "en" or "zh". Give "en" or "zh".'
    for look_up in (lambda: text("look.kind", "fr"), lambda: section("fr", "look")):
        with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
            look_up()


def test_looking_up_texts_needs_no_torch() -> None:
    look_up = "from multihead.locale.texts import text; text('look.kind', 'zh')"
    subprocess.run([sys.executable, "-c", f"import sys; {look_up}; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize("name", [name for name, probe in PROBES.items() if probe.axes == "queries"])
def test_every_statistic_that_a_page_shows_has_a_definition(name: str) -> None:
    if name != "largest_key":  # the index of a key has no mean, so no column
        assert all(f"page.definition.{name}" in texts for texts in (ENGLISH, CHINESE))
