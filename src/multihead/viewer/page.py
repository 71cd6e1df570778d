"""Build self-contained HTML pages: read their files, bundle their scripts, and embed data that cannot become markup.

The pages share JavaScript modules. A page in one file has a module and its imports in one script, each module as a
function that returns its exports, so no build tool is needed and names cannot collide.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata, resources
from itertools import chain
from typing import TYPE_CHECKING, Any

from multihead.errors.optional import require
from multihead.locale.texts import section, text

if TYPE_CHECKING:
    import jinja2
    from numpy.typing import NDArray
    from torch import Tensor

STYLE_SHEETS = ("shared/base.css", "shared/heads.css", "view/view.css")
"""Paths of the style sheets of the viewer's page, in the order in which they apply."""

# Regular expressions of the import and export statements that bundled JavaScript modules may use.
_IMPORT_STATEMENT = re.compile(r"^import (?P<names>\{[\w$,\s]+\}) from '(?P<path>\.[^']+)';$", re.MULTILINE)
_EXPORT_STATEMENT = re.compile(r"^export (?=(?:const|class|function|async function) (?P<name>[\w$]+))", re.MULTILINE)
# Comments that begin a line, empty lines, and indentation.
_NOT_NEEDED_BY_BROWSERS = re.compile(r"^[ \t]*(?://.*\n|/\*(?s:.*?)\*/[ \t]*\n|\n)|^[ \t]+", re.MULTILINE)


def json_in_script(data: Mapping[str, Any]) -> str:
    r"""Write JSON that is safe inside a script tag: no `<`, `>` or `&`, nothing beyond ASCII.

    >>> json_in_script({"token": "</script>"})
    '{"token":"\\u003c/script\\u003e"}'
    """
    written = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def round_for_json(value: float | None, digits: int = 17) -> float | None:
    """Round a number for JSON to some significant digits; None where it is missing or not finite.

    >>> round_for_json(0.123456, digits=4), round_for_json(float("nan"))
    (0.1235, None)
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def round_all_for_json(values: Tensor | NDArray[Any], digits: int = 6) -> list[float | None]:
    """Round the numbers of a tensor or an array for JSON, see `round_for_json`."""
    return [round_for_json(value, digits) for value in values.tolist()]


def hash_of_script(source: str) -> str:
    """Return the hash by which a page's Content-Security-Policy allows this script and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


@cache
def read_package_file(path: str) -> str:
    """Read a text file of the package multihead, or of the package whose name the path begins with.

    >>> colours = read_package_file("multihead/viewer/static/shared/base.css")
    >>> colours == read_package_file("viewer/static/shared/base.css")
    True
    """
    root, _, rest = path.partition("/")
    package, name = (root, rest) if root.startswith("multihead") else ("multihead", path)
    return (resources.files(package) / name).read_text("utf-8")


def compact(source: str) -> str:
    r"""Leave out of JavaScript or CSS what no browser needs: comments that begin a line, empty lines, and indentation.

    >>> compact("/** Adds.\n * @param {number} a\n */\nconst add = a =>\n  a + 1; // one\n")
    'const add = a =>\na + 1; // one\n'
    """
    return _NOT_NEEDED_BY_BROWSERS.sub("", source)


@cache
def load_template(path: str) -> jinja2.Template:
    """Compile a Jinja template, which escapes values and rejects missing ones; it may extend a template by path."""
    require("jinja2", purpose="Writing a page", extra="view")
    import jinja2

    loader = jinja2.FunctionLoader(read_package_file)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined).get_template(path)


@cache
def bundle_script(path: str, replacements: tuple[tuple[str, str], ...] = ()) -> str:
    """Bundle a JavaScript module and the modules it imports into one script, for a page that is a single file.

    Each module becomes a function that runs after the modules it imports and returns its exports. Lines that are
    comments, and indentation, are left out.

    Args:
        path: the entry module, which no other module imports.
        replacements: (module, expression) for modules that are not bundled; the value of the JavaScript expression has
            the module's exports.

    Raises:
        ValueError: a module uses a form of import or export that cannot be bundled, or a template of several lines.
    """
    expression_of_module = dict(replacements)
    lines = [
        f"modules['{each}'] = {expression_of_module[each]};" if each in expression_of_module else _bundle_module(each)
        for each in list_bundled_modules(path)
    ]
    return "\n".join(["'use strict';", "const modules = {};", *lines])


@cache
def list_bundled_modules(path: str) -> tuple[str, ...]:
    """List a JavaScript module and all modules it imports, dependencies first."""
    imported = (_resolve_import(path, each["path"]) for each in _IMPORT_STATEMENT.finditer(read_package_file(path)))
    return tuple(dict.fromkeys([*chain.from_iterable(map(list_bundled_modules, imported)), path]))


def _resolve_import(path: str, relative: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), relative))


def _bundle_module(path: str) -> str:
    source = read_package_file(path)
    body = _IMPORT_STATEMENT.sub(
        lambda found: f"const {' '.join(found['names'].split())} = modules['{_resolve_import(path, found['path'])}'];",
        source,
    )
    body = compact(body)
    names = ", ".join(found["name"] for found in _EXPORT_STATEMENT.finditer(source))
    body = _EXPORT_STATEMENT.sub("", body)
    if rest := re.search(r"^(import|export)\b.*", body, re.MULTILINE):
        raise ValueError(
            f"{path}: {rest[0]!r} cannot be bundled. "
            "Write import { name } from './file.js' or export const/function/class."
        )
    if line := next((each for each in body.splitlines() if each.count("`") % 2), None):
        raise ValueError(
            f"{path}: {line!r} begins or ends a template of several lines, whose indentation a bundle would lose. "
            "Write \\n in a template of one line."
        )
    return f"modules['{path}'] = (() => {{\n{body}return {{ {names} }};\n}})();"


def render_page(
    template: str,
    script: str,
    styles: Iterable[str],
    *,
    texts: Mapping[str, Any],
    data: Mapping[str, Any],
    **values: object,
) -> str:
    """Render a page as one HTML file with its style, script and data, which makes no network requests.

    Args:
        template: the path of the template, see `load_template`.
        script: the path of the script's entry module, see `bundle_script`.
        styles: the paths of the style sheets, in the order in which they apply.
        texts: the texts that the script shows.
        data: the data of the script, embedded as JSON that cannot end the script tag.
        values: the other values of the template.
    """
    found, source = load_template(template), bundle_script(script)
    from markupsafe import Markup  # a dependency of jinja2

    return found.render(
        style=Markup(compact("\n".join(map(read_package_file, styles)))),
        script=Markup(source),
        script_hash=hash_of_script(source),
        texts=Markup(json_in_script(texts)),
        data=Markup(json_in_script(data)),
        **values,
    )


def render_heads_page(folder: str, texts_section: str, lang: str, *, data: Mapping[str, Any], **values: object) -> str:
    """Render the page of a census or of a time series as one HTML file; see `render_page`.

    Args:
        folder: the folder of the page's files in `viewer/static`: its template, its script `page.js` and its style.
        texts_section: the section of the page's texts.
        lang: the language of the page.
        data: the data of the script.
        values: the other values of the template.
    """
    path, words = f"viewer/static/{folder}", section(lang, "common", "page", texts_section)
    return render_page(
        f"{path}/{folder}.html",
        f"{path}/page.js",
        [*(f"viewer/static/shared/{name}.css" for name in ("base", "heads", "page")), f"{path}/{folder}.css"],
        texts=words,
        data=data,
        lang=lang,
        words=words,
        foot=text(f"{texts_section}.foot", lang, version=installed_version()),
        **values,
    )


def render_viewer_page(folder: str, lang: str, offline: Mapping[str, Any] | None = None) -> str:
    """Render the page of the viewer or of `multihead try` as HTML.

    Args:
        folder: the folder of the page's template in `viewer/static`: "view" or "try".
        lang: the language of the page.
        offline: what a page in one file has: see `offline.offline_page`; None for a page that loads its script and
            style sheets from a server.
    """
    from markupsafe import Markup

    own = [] if folder == "view" else [folder]  # besides the texts and style sheets of the viewer's page
    words = section(lang, "common", "page", "viewer", *own)
    return load_template(f"viewer/static/{folder}/index.html").render(
        folder=folder,
        lang="zh-CN" if lang == "zh" else lang,
        words=words,
        texts=Markup(json_in_script(words)),
        styles=[] if offline else [*STYLE_SHEETS, *(f"{each}/{each}.css" for each in own)],
        offline=offline,
    )


@cache
def viewer_style() -> str:
    """Return the style of the viewer's page: its style sheets, joined."""
    return "\n".join(read_package_file(f"viewer/static/{name}") for name in STYLE_SHEETS)


def installed_version() -> str:
    """Return the installed version of multihead, for the foot of a page."""
    try:
        return metadata.version("multihead")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
