"""The page of the notebook widget, made from the files of the viewer's page: one script, one style sheet, one markup.

The widget shows the viewer's page with another host. The page's scripts know the document, the window, the address and
the server only through `viewer/static/shared/host.js` and `viewer/static/view/host.js`; for the widget an object
replaces these two modules (`static/widget.js`). The script becomes a function that is called once per view, so views
share no variables. The style sheet is translated from the window to a box, with container queries and units. Each view
is in a shadow root, so neither its ids nor its styles meet those of the notebook or of another view.
"""

from __future__ import annotations

import re
from functools import cache

from multihead.viewer.page import bundle_script, compact, read_package_file, viewer_style
from multihead.viewer.responses import page_response

_MAIN_MODULE = "viewer/static/view/main.js"
_HEAD_MODULE = "viewer/static/view/head.js"
_HOST_MODULES = ("viewer/static/shared/host.js", "viewer/static/view/host.js")

# Regular expressions for what `translate_to_container` replaces in the style sheet: media queries, the selectors of the
# document, html and body, and units of the window size.
_ROOTS = re.compile(r":root,\s+:host")
_DARK_MEDIA_QUERY = re.compile(r"@media (?:screen and )?\(prefers-color-scheme: dark\) \{(?P<rules>.*?)\n\}", re.DOTALL)
_WIDTH_MEDIA_QUERY = re.compile(r"@media (?=\((?:max|min)-width:)")
_DOCUMENT_SELECTOR = re.compile(r"(?<![\w.#-])(?:html|body)(?=[\s.{,:])")
_WINDOW_UNIT = re.compile(r"(?<=\d)[ds]?v(?=[hw]\b)")


@cache
def javascript_module() -> str:
    """Return the script of the widget as an ECMAScript module.

    The viewer's modules are wrapped in a function that is called once per view, so that views share no variables.
    """
    bundle = bundle_script(_MAIN_MODULE, replacements=tuple((path, "host") for path in _HOST_MODULES))
    return (
        f"function viewer(host) {{\n{bundle}\n"
        f"return {{ ...modules['{_HEAD_MODULE}'], ...modules['{_MAIN_MODULE}'] }};\n}}\n"
        f"{read_package_file('viewer/widget/static/widget.js')}"
    )


@cache
def stylesheet() -> str:
    """Return the viewer's style sheet, translated from the window to an element, and the widget's own style sheet."""
    return compact(translate_to_container(viewer_style()) + read_package_file("viewer/widget/static/widget.css"))


def translate_to_container(css: str) -> str:
    """Translate a page's style sheet to the element `.page`, with container queries in place of the window's size.

    >>> translate_to_container("body.map { height: 100dvh; }")
    '.page.map { height: 100cqh; }'
    >>> translate_to_container("@media (max-width: 640px) { .all { padding: 0; } }")
    '@container (max-width: 640px) { .all { padding: 0; } }'
    """
    css = _ROOTS.sub(":root", css)
    # A notebook may use a dark theme on a light system, so the widget's script sets data-scheme instead.
    css = _DARK_MEDIA_QUERY.sub(
        lambda found: f".page[data-scheme=dark] {{{found['rules'].replace(':root', '&')}\n}}", css
    )
    css = _DOCUMENT_SELECTOR.sub(".page", css.replace(":root", ".page"))
    return _WINDOW_UNIT.sub("cq", _WIDTH_MEDIA_QUERY.sub("@container ", css))


@cache
def markup_of_page(lang: str) -> str:
    """Return the HTML between <body> and </body> of the viewer's page, in a language."""
    html = bytes(page_response(lang).body).decode()
    return html.partition("<body>")[2].partition("</body>")[0]
