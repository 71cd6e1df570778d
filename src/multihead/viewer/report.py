"""Write a record as one self-contained HTML page: every head, its numbers, its map.

A report is the viewer's page with its data: `static/view/offline.js` replaces `fetch`. The data determines what the
page can show: `blocks` of a layer lists the cell sizes of its map in weights, `rows` which weights of a query are
stored (all, the largest, none), and `margins` which strips of numbers; `served`, `similar` and `precision` state which
requests are answered, and how exact the weights are. The page computes means over blocks from the stored weights.

Similar heads are computed by the script of the page, from every weight on the page, with the formula of
`Record.nearest`. Computing similar heads while a report is written would compare all pairs of heads, of which a reader
opens few. A report that stores only some weights has no similar heads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihead.errors import ArgumentError, InputError, ShapeError
from multihead.errors.given import check_path
from multihead.files import check_writable, write_atomically
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import check_language
from multihead.locale.texts import text as locale
from multihead.record.profiles import LayerProfile
from multihead.viewer.facts import readable_size
from multihead.viewer.offline import answers_in_file, offline_page
from multihead.viewer.page import installed_version
from multihead.viewer.page_budget import Progress, StoredMaps, encode_fitting_maps
from multihead.viewer.payload import (
    PageText,
    RecordedRun,
    cross_attention_text,
    describe_run,
    describe_sample,
    describe_view,
    texts_of_record,
)
from multihead.viewer.tokens import layout_of_tokens

if TYPE_CHECKING:
    from multihead.observation.record import Record


@dataclass(frozen=True)
class ReportSummary:
    """Path, size and contents of a written page.

    Attributes:
        path: path of the page.
        num_bytes: size of the page in bytes.
        mode: which attention weights the page stores: "whole" (all), "largest" (the largest of each query), "pooled"
            (only means over blocks) or "none".
        bits: bits per stored attention weight; 0 if the page stores pooled maps or statistics alone.
        largest_per_query: number of weights stored per query if only the largest are stored, else 0.
        rounding: largest difference between an attention weight and its stored value (weights are from 0 to 1).
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
        size = readable_size(self.num_bytes, self.lang)
        holds = locale(f"report.holds.{self.mode}", self.lang)
        return f"{escape_controls(self.path)} ({size}, {holds}){' ' + self.left_out if self.left_out else ''}"


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

    All errors are raised before anything is written.

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
    check_path("path", path)
    path = Path(path)
    _check_arguments(record, path, sample, max_bytes, lang)
    texts = texts_of_record(record, sample)
    if tokens is not None:
        _check_tokens(record, tokens, sample)
        layout = layout_of_tokens(tokens, special=special, unknown=unknown, text=text, offsets=offsets)
        texts[0] = PageText(len(tokens), tokens, special, layout, given_by_caller=True)
        if (other := cross_attention_text(record, sample, tokens)) is not None:
            texts[1:] = [PageText.from_text(other, other.length)]
    if key_tokens is not None:
        texts[1:] = [PageText(len(key_tokens), key_tokens, None, layout_of_tokens(key_tokens), given_by_caller=True)]
    title = escape_controls(title or record.title)
    run = RecordedRun(title, record)
    described = describe_sample(run, sample, lang, texts=texts, profiles=profiles)
    described["facts"] = [*described["facts"], *(facts or {}).items()]
    run_data = describe_run(run)
    run_data |= {"title": title, "samples": [run_data["samples"][sample]]}
    # The maps get the bytes that the other parts of the page leave; some bytes are reserved for the sentences about the
    # maps.
    bare = len(_render_page(described, run_data, StoredMaps(why_incomplete="room"), max_bytes, lang)) + 2000
    if bare > max_bytes:
        raise ArgumentError(
            f"max_bytes is {max_bytes:,}, and this page needs {bare:,} bytes without any map.",
            "Increase max_bytes, or use a shorter text.",
        )
    store = encode_fitting_maps(record, sample=sample, room=max_bytes - bare, progress=progress)
    page = _render_page(described, run_data, store, max_bytes, lang)
    write_atomically(path, page)
    return ReportSummary(
        path=path,
        num_bytes=len(page),
        mode=store.mode,
        bits=store.bits_per_weight,
        largest_per_query=store.weights_per_query,
        rounding=store.largest_rounding_error,
        left_out="" if store.mode == "whole" else sentence_on_stored_maps(store, max_bytes=max_bytes, lang=lang),
        lang=lang,
    )


def _check_arguments(record: Record, path: Path, sample: int, max_bytes: int, lang: str) -> None:
    """Reject arguments that cannot produce a page, before anything is read or written."""
    check_language(lang)
    if max_bytes <= 0:
        raise ArgumentError(f"max_bytes is {max_bytes}, and must be positive.", "Give a positive number of bytes.")
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


def _render_page(described: dict[str, Any], run: dict[str, Any], store: StoredMaps, max_bytes: int, lang: str) -> bytes:
    """Render the page as UTF-8 bytes, given the description of its text and of its run."""
    layers = [store.limit_layer_to_stored_maps(index, layer) for index, layer in enumerate(described["layers"])]
    stored = sentence_on_stored_maps(store, max_bytes=max_bytes, lang=lang)
    foot = locale("viewer.foot file", lang, version=installed_version())
    view = describe_view([run], lang, similar=store.mode == "whole") | {
        "foot": foot + locale("common.join.sentences", lang) + stored,
        "precision": locale("viewer.within", lang, rounding=format_rounding_error(store.largest_rounding_error)),
    }
    sample = described | {"layers": layers, "noMaps": "" if store.mode != "none" else described["noMaps"] or stored}
    return offline_page(answers_in_file(view, [sample]), store.arrays)


def sentence_on_stored_maps(store: StoredMaps, *, max_bytes: int, lang: str) -> str:
    """Return a sentence on what the page stores, the precision of its weights, and what it leaves out and why."""
    rows, columns = store.map_size
    key = store.mode
    if store.mode == "largest" and store.weights_per_query == 1:
        key = "largest 1"
    if store.why_incomplete in ("statistics", "time"):
        key = f"{key} {store.why_incomplete}"
    return locale(
        f"report.stored.{key}",
        lang,
        bits=store.bits_per_weight,
        rounding=format_rounding_error(store.largest_rounding_error),
        rows=rows,
        columns=columns,
        n=store.weights_per_query,
        size=readable_size(max_bytes, lang),
    )


def format_rounding_error(rounding: float) -> str:
    """Format the largest rounding error of weights in percentage points: two digits, rounded up so that it is a bound.

    >>> format_rounding_error(0.0000152), format_rounding_error(0.0)
    ('0.0016', '0')
    """
    points = rounding * 100
    if points <= 0:
        return "0"
    decimals = 1 - math.floor(math.log10(points))
    return f"{math.ceil(points * 10**decimals) / 10**decimals:.{max(0, decimals)}f}"
