"""The page of the widget is that of the viewer: same scripts, same style, same markup."""

from __future__ import annotations

import re

import pytest

from multihead.viewer.page import list_bundled_modules, read_package_file
from multihead.viewer.widget.page import javascript_module, markup_of_page, stylesheet, translate_to_container

HOSTS = ("viewer/static/shared/host.js", "viewer/static/view/host.js")


def test_the_module_holds_every_script_of_the_viewer_once() -> None:
    for path in list_bundled_modules("viewer/static/view/main.js"):
        assert javascript_module().count(f"modules['{path}'] = ") == 1, path
    assert javascript_module().count("export default") == 1
    assert not re.search(r"^import\b", javascript_module(), re.MULTILINE)


def test_the_widget_provides_all_that_the_scripts_take_from_their_host() -> None:
    host = read_package_file("viewer/widget/static/widget.js").partition("  host() {")[2].partition("\n    };")[0]
    given = set(re.findall(r"^      (\w+):", host, re.MULTILINE))
    assert given == {
        name for path in HOSTS for name in re.findall(r"^export const (\w+)", read_package_file(path), re.MULTILINE)
    }


@pytest.mark.parametrize("path", [*list_bundled_modules("viewer/static/view/main.js")])
def test_only_the_host_reaches_the_document_and_the_window(path: str) -> None:
    if path in HOSTS:
        return
    code = re.sub(r"//.*|document\.createElement(NS)?|location\.href", "", read_package_file(path))
    assert not re.search(r"\b(document|location|history|innerWidth|innerHeight|onhashchange|scrollTo)\b", code)
    assert not re.search(r"(?<![.\w])(addEventListener|fetch|localStorage|sessionStorage)\(", code)


def test_the_style_says_nothing_of_the_document_or_its_window() -> None:
    css = re.sub(r"/\*.*?\*/", "", stylesheet(), flags=re.DOTALL)
    assert not re.search(r"(?<![\w.#-])(html|body)\b|:root|prefers-color-scheme|\d[ds]?v[hw]\b", css)
    assert not re.search(r"@media \((max|min)-width", css)
    assert css.count("{") == css.count("}")
    assert ".page[data-scheme=dark] {\n& {" in css


def test_dark_rules_apply_to_a_dark_page() -> None:
    css = "@media (prefers-color-scheme: dark) {\n  :root { --ink: white; }\n}\nhtml { color: var(--ink); }"
    assert (
        translate_to_container(css)
        == ".page[data-scheme=dark] {\n  & { --ink: white; }\n}\n.page { color: var(--ink); }"
    )


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_markup_has_every_element_and_no_script(lang: str) -> None:
    found = markup_of_page(lang)
    assert 'id="map"' in found
    assert 'id="grid"' in found
    assert not re.search(r"<script|<link|<html|<body|\son\w+=", found)
