"""Write a record as one self-contained HTML page: every head, its numbers, its map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from multihead.errors import ArgumentError, InputError, ShapeError
from multihead.files import check_writable, is_folder, write_atomically
from multihead.locale.escaping import visible
from multihead.locale.texts import check_language, section, text
from multihead.record.analysis.highlights import LayerProfile, findings
from multihead.viewer import report_data
from multihead.viewer.page import (
    bundle_script,
    hash_of_script,
    installed_version,
    json_in_script,
    load_template,
    read_package_file,
)
from multihead.viewer.page_budget import Progress, StoredMaps, encode_fitting_maps
from multihead.viewer.payload import cross_attention_text, main_sample
from multihead.viewer.tokens import layout_of_tokens

if TYPE_CHECKING:
    from multihead.observation.record import Record


STYLES = ("shared/base.css", "shared/heads.css", "report/report.css")
"""The style sheets of the page, in their order."""


@dataclass(frozen=True)
class ReportSummary:
    """Path, size and contents of a written page.

    Attributes:
        path: the page.
        num_bytes: its size.
        mode: which weights it stores: "whole" (all), "largest" (of each query), "pooled" (only maps of means) or
            "none".
        bits: bits per weight if every weight is stored, else 0.
        largest_per_query: weights stored per query if only the largest are stored, else 0.
        rounding: the largest difference between a weight and its stored value, as a share (0 to 1).
        left_out: a sentence on what the page leaves out and why; empty if it leaves out nothing.
        lang: the language of the page and of this summary.

    >>> print(ReportSummary(Path("run.html"), 2_000_000, "whole", 8, 0, 0.002, "", "en"))
    run.html (2 MB, every weight)
    """

    path: Path
    num_bytes: int
    mode: str
    bits: int
    largest_per_query: int
    rounding: float
    left_out: str
    lang: str

    def __str__(self) -> str:
        """Return one line: the path, the size, and what the page contains or leaves out."""
        size = report_data.readable_size(self.num_bytes, self.lang)
        holds = text(f"report.holds.{self.mode}", self.lang)
        return f"{visible(self.path)} ({size}, {holds}){' ' + self.left_out if self.left_out else ''}"


def write_report(
    record: Record,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
    text: str | None = None,
    offsets: Sequence[tuple[int, int]] | None = None,
    unknown: Sequence[bool] | None = None,
    key_tokens: Sequence[str] | None = None,
    facts: Mapping[str, str] | None = None,
    sample: int = 0,
    max_bytes: int = 20_000_000,
    lang: str = "en",
    profiles: Sequence[LayerProfile] | None = None,
    progress: Progress | None = None,
) -> ReportSummary:
    """Write a record as one self-contained page.

    The page stores every weight if it stays under `max_bytes`; otherwise it stores pooled maps and as many of each
    query's largest weights as fit, and lists what it leaves out. Maps are read layer by layer and head by head. The
    page is written to a temporary file next to `path` and renamed, so that a failure leaves no partial file.

    Args:
        record: the result of `observe`.
        path: the file to write; an existing one is replaced.
        title: the page's heading, such as the model's name; by default the title of the record.
        tokens: the tokens of the text, decoded, one per position; by default those of the record, else positions.
        special: one flag per token, True for a special token such as [CLS].
        text: the original text; with `offsets` the page keeps its spelling and spaces.
        offsets: (start, stop) of each token in `text`, in characters; (0, 0) for a special token.
        unknown: one flag per token, True for a token missing from the vocabulary.
        key_tokens: the tokens of the other text, if some layers attend to one (cross-attention).
        facts: label -> value, added to the row of facts (head size, precision).
        sample: index of the text in the record.
        max_bytes: maximum size of the page, in bytes.
        lang: "en" or "zh".
        profiles: the result of `layer_profiles` for this sample; computed if None.
        progress: called with (heads done, total heads) while maps are stored.

    Returns:
        Path, size and contents of the page.

    Raises:
        ArgumentError: lang, sample or max_bytes is invalid, or max_bytes is too small for this page.
        ShapeError: the tokens do not match the lengths of the layers.
        InputError: the path cannot be written, or the record has no layer.

    All are raised before anything is written.

    >>> import tempfile
    >>> import torch
    >>> import multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> with mh.observe(layer) as seen:
    ...     y = layer(torch.randn(1, 5, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(seen, Path(folder) / "report.html").mode
    'whole'
    """
    path = Path(path)
    _check_arguments(record, path, sample, max_bytes, lang)
    gaps = None
    if tokens is None:
        main = main_sample(record, sample)
        tokens = main.text.tokens or [str(position) for position in range(main.num_keys)]
        gaps = main.text.gaps
    _check_tokens(record, tokens, sample)
    title = visible(title or record.title)
    read = profiles if profiles is not None else record.profiles(sample=sample, special=special)
    texts = {"main": layout_of_tokens(tokens, special=special, unknown=unknown, text=text, offsets=offsets, gaps=gaps)}
    other = None
    if key_tokens is not None:
        texts["keys"] = layout_of_tokens(key_tokens)
    else:
        other = cross_attention_text(record, sample, tokens)
        if other is not None and other.tokens is not None:
            texts["other"] = layout_of_tokens(other.tokens, special=other.special, gaps=other.gaps)
    data = report_data.page_data(
        record,
        read,
        texts,
        sample=sample,
        special=special,
        tokens=tokens,
        other=None if other is None else other.tokens,
        lang=lang,
    )
    named = tokens if other is None else None  # of two texts, a first token has no name
    found = findings(
        record.layers, sample=sample, tokens=named, special=special, lang=lang, profiles=read, among=record.all_kinds
    )
    data |= {"findings": [asdict(one) for one in found], "title": title}
    shell = {
        "title": title,
        "lang": lang,
        "words": section(lang, "common", "page", "report"),
        "lead": report_data.lead_sentence(record, read, len(tokens), sample=sample, lang=lang),
        "facts": [*report_data.facts_of_record(record, read, texts, sample=sample, lang=lang), *(facts or {}).items()],
        "ends": "previous_mass" in data["metrics"] and "next_mass" in data["metrics"],
    }
    # The maps get what the rest of the page leaves; some bytes are reserved for the sentences about them.
    bare = len(_render_page(data, shell, StoredMaps(), max_bytes)) + 1000 + 400 * len(read)
    if bare > max_bytes:
        raise ArgumentError(
            f"max_bytes is {max_bytes:,}, and this page needs {bare:,} bytes without any map.",
            "Increase max_bytes, or use a shorter text.",
        )
    store = encode_fitting_maps(record, sample=sample, room=max_bytes - bare, progress=progress)
    page = _render_page(data, shell, store, max_bytes)
    write_atomically(path, page)
    return ReportSummary(
        path=path,
        num_bytes=len(page),
        mode=store.mode,
        bits=store.bits if store.mode == "whole" else 0,
        largest_per_query=store.number,
        rounding=store.rounding,
        left_out=""
        if store.mode == "whole"
        else report_data.sentence_on_stored_maps(store, max_bytes=max_bytes, lang=lang),
        lang=lang,
    )


def _check_arguments(record: Record, path: Path, sample: int, max_bytes: int, lang: str) -> None:
    """Reject arguments that cannot produce a page, before anything is read or written."""
    check_language(lang)
    if max_bytes <= 0:
        raise ArgumentError(f"max_bytes is {max_bytes}, and must be positive.", "Give a positive number of bytes.")
    if not is_folder(path.parent):
        raise InputError(f'The folder "{path.parent}" does not exist.', "Create it, or give another path.")
    if is_folder(path):
        raise InputError(f'"{path}" is a folder.', "Give the name of a file in it.")
    check_writable([os.fspath(path)])
    if not record.layers:
        raise InputError("The record has no layer.", "Run the model inside observe() first.")
    samples = record.layers[0].num_samples
    if not 0 <= sample < samples:
        raise ArgumentError(
            f"sample is {sample}, and the record has {samples} sample{'' if samples == 1 else 's'}.",
            "Give 0." if samples == 1 else f"Give 0 to {samples - 1}.",
        )


def _check_tokens(record: Record, tokens: Sequence[str], sample: int) -> None:
    """Reject tokens whose number is neither the number of queries nor of keys of any layer."""
    ones = [layer.sample(sample) for layer in record.layers]
    lengths = sorted({length for one in ones for length in (one.num_queries, one.num_keys)})
    if len(tokens) not in lengths:
        raise ShapeError(
            f"There are {len(tokens)} tokens, and the layers recorded {' and '.join(map(str, lengths))} positions.",
            "Give one token per position: include special tokens such as [CLS], leave out padding.",
        )


def _render_page(data: dict[str, Any], shell: dict[str, Any], store: StoredMaps, max_bytes: int) -> bytes:
    """Render the page as UTF-8 bytes. Data is JSON that cannot end its script tag, never HTML."""
    words, lang = shell["words"], shell["lang"]
    layers = [
        layer | kept
        for layer, kept in zip(data["layers"], _stored_maps_as_json(store, len(data["layers"])), strict=True)
    ]
    reason = {"room": "no room", "statistics": "no maps", "": ""}[store.reason]
    store_data = {"mode": store.mode, "bits": store.bits, "number": store.number, "reason": reason}
    foot = (
        text("report.foot", lang, version=installed_version()),
        report_data.sentence_on_stored_maps(store, max_bytes=max_bytes, lang=lang),
    )
    source = bundle_script("viewer/static/report/page.js")
    html = load_template("viewer/static/report/report.html").render(
        **shell,
        style=Markup("\n".join(read_package_file(f"viewer/static/{name}") for name in STYLES)),
        script=Markup(source),
        script_hash=hash_of_script(source),
        texts=Markup(json_in_script(words)),
        data=Markup(json_in_script(data | {"layers": layers, "store": store_data})),
        packs=[(name, Markup(packed)) for name, packed in store.packs],
        foot=words["join.sentences"].join(foot),
    )
    return html.encode("utf-8", "replace")  # UTF-8 cannot encode a lone surrogate in a title


def _stored_maps_as_json(store: StoredMaps, layers: int) -> list[dict[str, Any]]:
    names = {"row_block": "rowBlock", "col_block": "colBlock"}
    kept = [{names.get(key, key): value for key, value in asdict(one).items()} for one in store.layers]
    return kept or [{}] * layers
