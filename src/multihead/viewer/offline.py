"""Write the viewer's page as one file, in which a script answers the page's requests from data in the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from markupsafe import Markup

from multihead.locale.texts import section, text
from multihead.viewer.levels import TILE_SIDE
from multihead.viewer.page import (
    STYLE_SHEETS,
    bundle_script,
    hash_of_script,
    json_in_script,
    load_template,
    read_package_file,
)


def offline_page(
    plain: Mapping[str, Any],
    arrays: Mapping[str, Mapping[str, Any]],
    packs: Iterable[tuple[str, str]],
    *,
    title: str,
    lang: str,
    place: str = "",
    note: str = "",
) -> bytes:
    """Write the viewer's page with the data that it requests.

    Args:
        plain: path of a request -> the answer as JSON-serialisable data.
        arrays: name -> shape and coding of a stored array, see `static/view/offline.js`.
        packs: (name, numbers) of each stored array: deflated planes of bytes, in base64.
        title: the title of the window.
        lang: the language of the page.
        place: the part of the page's address after "#", which the file opens with.
        note: a sentence at the top of the page; "" for none.
    """
    words = section(lang, "common", "page", "viewer")
    held = {
        "plain": plain,
        "arrays": arrays,
        "tile": TILE_SIDE,
        "place": place,
        "absent": text("viewer.share absent", lang),
        "old": text("viewer.old browser", lang),
    }
    # Two script bundles, each in a separate block: the first answers the requests of the second.
    source = "".join(f"{{\n{bundle_script(f'viewer/static/view/{name}.js')}\n}}\n" for name in ("offline", "main"))
    html = load_template("viewer/static/view/index.html").render(
        lang="zh-CN" if lang == "zh" else lang,
        words=words,
        texts=Markup(json_in_script(words)),
        styles=[],
        offline={
            "title": title,
            "note": note,
            "style": Markup("\n".join(read_package_file(f"viewer/static/{name}") for name in STYLE_SHEETS)),
            "script": Markup(source),
            "script_hash": hash_of_script(source),
            "data": Markup(json_in_script(held)),
            "packs": [(name, Markup(content)) for name, content in packs],
        },
    )
    return html.encode("utf-8", "replace")  # UTF-8 cannot encode a lone surrogate in a title
