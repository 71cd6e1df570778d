"""Write the viewer's page as one file, in which a script answers the page's requests from data in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack

from markupsafe import Markup

from multihead.locale.texts import text
from multihead.viewer.levels import TILE_SIDE
from multihead.viewer.page import (
    bundle_script,
    compact,
    hash_of_script,
    json_in_script,
    render_viewer_page,
    viewer_style,
)
from multihead.viewer.page_types import (
    AllTextsDescription,
    LevelsProgress,
    OfflineData,
    SampleDescription,
    StoredArray,
    ViewDescription,
)


class PageFullError(Exception):
    """The page has no room for another array."""


@dataclass(eq=False)
class PackedArrays:
    """The packed arrays of a page in one file, and the number of bytes that they take in the file.

    Attributes:
        max_bytes: largest number of bytes that the arrays may take.
        num_bytes: number of bytes that the arrays take, with their script tags and descriptions.
        contents: name of an array -> its numbers: deflated planes of bytes, in base64.
        descriptions: name of an array -> its shape, coding and other properties for the page's script, see
            `static/offline/arrays.js`.
    """

    max_bytes: float = math.inf
    num_bytes: int = 0
    contents: dict[str, str] = field(default_factory=dict)
    descriptions: dict[str, StoredArray] = field(default_factory=dict)

    def add(self, name: str, content: str, **description: Unpack[StoredArray]) -> None:
        """Add an array.

        Raises:
            PageFullError: the arrays would take more than `max_bytes`.
        """
        num_bytes = self.num_bytes + len(content) + 2 * len(name) + 120
        if num_bytes > self.max_bytes:
            raise PageFullError
        self.num_bytes = num_bytes
        self.contents[name] = content
        self.descriptions[name] = description

    @contextmanager
    def adding_all_or_none(self) -> Iterator[PackedArrays]:
        """Yield a group with the room that is left here; its arrays are added when the block ends without an error."""
        group = PackedArrays(self.max_bytes, self.num_bytes)
        yield group
        self.num_bytes = group.num_bytes
        self.contents |= group.contents
        self.descriptions |= group.descriptions


def answers_in_file(
    view: ViewDescription,
    samples: Sequence[Sequence[SampleDescription]],
    all_texts: AllTextsDescription | None = None,
) -> dict[str, Mapping[str, Any]]:
    """Return path of a request -> its answer as JSON, for the requests that a page in one file answers itself.

    Args:
        view: the result of `payload.describe_view`.
        samples: per record of the page, the result of `payload.describe_sample` for each of its texts.
        all_texts: the result of `payload.describe_all_texts` for the first record; None if the page has one text.
    """
    answers: dict[str, Mapping[str, Any]] = {"view": view}
    for run, of_run in enumerate(samples):
        for place, sample in enumerate(of_run):
            path = f"runs/{run}/samples/{place}"
            answers[path] = sample
            answers[f"{path}/levels"] = LevelsProgress(state="ready", done=1, total=1, inMemory=False)
    return answers if all_texts is None else answers | {"runs/0/texts": all_texts}


def offline_page(
    answers: Mapping[str, Mapping[str, Any]], arrays: PackedArrays, *, fragment: str = "", note: str = ""
) -> bytes:
    """Write the viewer's page with the data that it requests, under the title of its first record.

    Args:
        answers: the result of `answers_in_file`.
        arrays: the stored arrays.
        fragment: the part of the page's address after "#" with which the file opens.
        note: a sentence at the top of the page; "" for none.
    """
    lang, first = answers["view"]["lang"], answers["view"]["runs"][0]
    held: OfflineData = {
        "plain": answers,
        "arrays": arrays.descriptions,
        "tile": TILE_SIDE,
        "place": fragment,
        "absent": text("viewer.share absent", lang),
        "old": text("viewer.old browser", lang),
    }
    # Two script bundles, each in a separate block: the first answers the requests of the second.
    source = "".join(
        f"{{\n{bundle_script(f'viewer/static/{entry}.js')}\n}}\n" for entry in ("offline/answers", "view/main")
    )
    html = render_viewer_page(
        "view",
        lang,
        offline={
            "title": first["title"] or first["name"],
            "note": note,
            "style": Markup(compact(viewer_style())),
            "script": Markup(source),
            "script_hash": hash_of_script(source),
            "data": Markup(json_in_script(held)),
            "packs": [(name, Markup(content)) for name, content in arrays.contents.items()],
        },
    )
    return html.encode("utf-8", "replace")  # UTF-8 cannot encode a lone surrogate in a title
