"""The page of the widget, made from the files of the viewer's page: one script, one style sheet, one markup."""

from __future__ import annotations

import re
from functools import cache

from multihead.viewer.page import script, static
from multihead.viewer.responses import STYLES, page_response

_MAIN = "viewer/static/view/main.js"
_HEAD = "viewer/static/view/head.js"
_HOSTS = ("viewer/static/shared/host.js", "viewer/static/view/host.js")

# What a style sheet says of the document and of its window, and how that is said of the widget and of its box.
_DARK = re.compile(r"@media (?:screen and )?\(prefers-color-scheme: dark\) \{(?P<rules>.*?)\n\}", re.DOTALL)
_NARROW = re.compile(r"@media (?=\((?:max|min)-width:)")
_DOCUMENT = re.compile(r"(?<![\w.#-])(?:html|body)(?=[\s.{,:])")
_WINDOW = re.compile(r"(?<=\d)[ds]?v(?=[hw]\b)")


@cache
def javascript_module() -> str:
    """Return the script of the widget as an ECMAScript module.

    The modules of the viewer become a function that makes a page, so that each view in a notebook has variables of its
    own.
    """
    bundle = script(_MAIN, given=tuple((path, "host") for path in _HOSTS))
    return (
        f"function viewer(host) {{\n{bundle}\nreturn {{ ...modules['{_HEAD}'], ...modules['{_MAIN}'] }};\n}}\n"
        f"{static('viewer/widget/static/widget.js')}"
    )


@cache
def stylesheet() -> str:
    """Return the style sheet of the viewer for an element with a size of its own, and that of the widget."""
    sheets = "\n".join(static(f"viewer/static/{name}") for name in STYLES)
    return within_box(sheets) + static("viewer/widget/static/widget.css")


def within_box(css: str) -> str:
    """Translate the style sheet of a page to one of an element `.page` in a box of some size.

    >>> within_box("body.map { height: 100dvh; }")
    '.page.map { height: 100cqh; }'
    >>> within_box("@media (max-width: 640px) { .all { padding: 0; } }")
    '@container (max-width: 640px) { .all { padding: 0; } }'
    """
    css = css.replace(":root, :host", ":root")
    # Notebooks have themes of their own, so the widget finds out whether its page is dark.
    css = _DARK.sub(lambda found: f".page[data-scheme=dark] {{{found['rules'].replace(':root', '&')}\n}}", css)
    css = _DOCUMENT.sub(".page", css.replace(":root", ".page"))
    return _WINDOW.sub("cq", _NARROW.sub("@container ", css))


@cache
def markup_of_page(lang: str) -> str:
    """Return what the viewer's page has between <body> and </body>, in a language."""
    html = bytes(page_response(lang).body).decode()
    return html.partition("<body>")[2].partition("</body>")[0]
