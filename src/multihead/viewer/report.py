"""Write a record as one self-contained HTML page: every head, its numbers, its map, on one text or on several.

A report is the viewer's page with its data: `static/offline/answers.js` replaces `fetch`. The data determines what the
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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from multihead.errors import ArgumentError, InputError, ShapeError
from multihead.errors.given import check_path
from multihead.files import check_writable, write_atomically
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import check_language
from multihead.locale.texts import text as locale
from multihead.record.profiles import LayerProfile
from multihead.viewer.facts import readable_size
from multihead.viewer.offline import PackedArrays, answers_in_file, offline_page
from multihead.viewer.page import installed_version, json_in_script
from multihead.viewer.page_budget import Progress, StoredMaps, encode_maps_of_texts
from multihead.viewer.page_types import AllTextsDescription, RunDescription, SampleDescription
from multihead.viewer.payload import (
    PageText,
    RecordedRun,
    cross_attention_text,
    describe_all_texts,
    describe_run,
    describe_sample,
    describe_view,
    texts_of_record,
)
from multihead.viewer.tokens import layout_of_tokens

if TYPE_CHECKING:
    from multihead.observation.record import Record


MODES = ("whole", "largest", "pooled", "none")
"""What a page may store of the maps of a text, from all weights to nothing."""


@dataclass(frozen=True)
class ReportSummary:
    """Path, size and contents of a written page.

    Attributes:
        path: path of the page.
        num_bytes: size of the page in bytes.
        mode: which attention weights the page stores: "whole" (all), "largest" (the largest of each query), "pooled"
            (only means over blocks) or "none"; of several texts, the least of them.
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
    sample: int | None = None,
    max_bytes: int = 20_000_000,
    lang: str = "en",
    profiles: Sequence[LayerProfile] | None = None,
    progress: Progress | None = None,
    texts: Sequence[PageText] = (),
) -> ReportSummary:
    """Write a record as one self-contained page, with a switch between its texts if there are several.

    The page stores every weight if it stays under `max_bytes`; otherwise it stores pooled maps and as many of each
    query's largest weights as fit, and lists what it leaves out. Maps are read layer by layer and head by head. The
    page is written to a temporary file next to `path` and renamed, so that a failure leaves no partial file.

    Args:
        record: the result of `observe`.
        path: the file to write; an existing one is replaced.
        title: the page's heading, such as the model's name; by default the title of the record.
        tokens: the tokens of the only text of the page, decoded, one per position; by default those of the record, else
            positions.
        special: one flag per token, True for a special token such as [CLS].
        text: the original text; with `offsets` the page keeps its spelling and spaces.
        offsets: (start, stop) of each token in `text`, in characters; (0, 0) for a special token.
        unknown: one flag per token, True for a token missing from the vocabulary.
        key_tokens: the tokens of the other text, if some layers attend to one (cross-attention).
        facts: label -> value, added to the row of facts (head size, precision).
        sample: index of the only text of the page; None: all texts, or the first one if `tokens` are given.
        max_bytes: maximum size of the page, in bytes; texts that do not fit are left out, and named.
        lang: "en" or "zh".
        profiles: the result of `Record.profiles` for the only text of the page; computed if None.
        progress: called with (heads done, total heads) while maps are stored.
        texts: the texts of the record as they were written, one per sample; by default those of the record.

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
    title = escape_controls(title or record.title)
    run = RecordedRun(title, record)
    if sample is None and tokens is not None:
        sample = 0
    # A record without a text common to all layers, such as a summary, raises an error when its first text is read.
    samples = range(max(run.num_samples, 1)) if sample is None else [sample]
    written = {place: each for place, each in enumerate(texts) if place in samples}
    if tokens is not None:
        _check_tokens(record, tokens, samples[0])
        layout = layout_of_tokens(tokens, special=special, unknown=unknown, text=text, offsets=offsets)
        written[samples[0]] = PageText(len(tokens), tokens, special, layout, given_by_caller=True)

    page = _Page([], describe_run(run) | {"title": title}, None, len(samples), max_bytes, lang)
    all_samples, left = page.run["samples"], float(max_bytes)
    for each in samples:
        shown = _texts_of_page(record, each, written.get(each), key_tokens)
        one = describe_sample(run, each, lang, texts=shown, profiles=profiles if len(samples) == 1 else None)
        one["facts"] = [*one["facts"], *(facts or {}).items()]
        if page.described:
            left -= len(json_in_script(one))
            if left < 0:
                break
        page.described.append(one)
        page.run["samples"] = [all_samples[each] for each in samples[: len(page.described)]]
        if len(page.described) == 1:
            left = (max_bytes - len(page.render([StoredMaps(why_incomplete="room")]))) / 2  # the rest is for maps
    samples = samples[: len(page.described)]
    if len(samples) > 1 and page.run["comparable"]:
        page.all_texts = describe_all_texts(run, lang)
    # The maps get the bytes that the other parts of the page leave; some bytes are reserved for the sentences about the
    # maps.
    without_maps = [StoredMaps(why_incomplete="room", place=place) for place in range(len(samples))]
    bare = len(page.render(without_maps)) + 2000 + 400 * len(samples)
    if bare > max_bytes:
        raise ArgumentError(
            f"max_bytes is {max_bytes:,}, and this page needs {bare:,} bytes without any map.",
            "Increase max_bytes, or use a shorter text.",
        )
    pictures = [one["pictures"] for one in page.described]
    stores = encode_maps_of_texts(record, samples, room=max_bytes - bare, progress=progress, pictures=pictures)
    content = page.render(stores)
    write_atomically(path, content)
    least = max(stores, key=lambda store: MODES.index(store.mode))
    return ReportSummary(
        path=path,
        num_bytes=len(content),
        mode=least.mode,
        bits=least.bits_per_weight,
        largest_per_query=least.weights_per_query,
        rounding=max(store.largest_rounding_error for store in stores),
        left_out=page.sentence_on_what_is_left_out(stores),
        lang=lang,
    )


def _texts_of_page(
    record: Record, sample: int, written: PageText | None, key_tokens: Sequence[str] | None
) -> list[PageText]:
    """Return the texts that the page shows of a sample: as written, or as recorded, and that of cross-attention."""
    texts = texts_of_record(record, sample)
    if written is not None and written.tokens is not None:
        texts[0] = written
        if (other := cross_attention_text(record, sample, written.tokens)) is not None:
            texts[1:] = [PageText.from_text(other, other.length)]
    if key_tokens is not None:
        texts[1:] = [PageText(len(key_tokens), key_tokens, None, layout_of_tokens(key_tokens), given_by_caller=True)]
    return texts


def _check_arguments(record: Record, path: Path, sample: int | None, max_bytes: int, lang: str) -> None:
    """Reject arguments that cannot produce a page, before anything is read or written."""
    check_language(lang)
    if max_bytes <= 0:
        raise ArgumentError(f"max_bytes is {max_bytes}, and must be positive.", "Give a positive number of bytes.")
    check_writable([os.fspath(path)])
    if not record.layers:
        raise InputError("The record has no layer.", "Run the model inside observe() first.")
    samples = record.layers[0].num_samples
    if sample is not None and not 0 <= sample < samples:
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


@dataclass
class _Page:
    """A page without its maps.

    Attributes:
        described: the description of each of its texts.
        run: the description of the record.
        all_texts: what the heads do over all texts; None for one text.
        num_wanted: number of texts that the page should have.
        max_bytes: maximum size of the page.
        lang: the language of the page.
    """

    described: list[SampleDescription]
    run: RunDescription
    all_texts: AllTextsDescription | None
    num_wanted: int
    max_bytes: int
    lang: str

    def render(self, stores: Sequence[StoredMaps]) -> bytes:
        """Render the page as UTF-8 bytes, with the stored maps of each text."""
        parts = [locale("viewer.foot file", self.lang, version=installed_version())]
        if self.num_wanted > 1:
            parts.append(self.sentence_on_what_is_left_out(stores))
        view = describe_view([self.run], self.lang, similar=any(store.mode == "whole" for store in stores)) | {
            "foot": locale("common.join.sentences", self.lang).join(filter(None, parts))
        }
        arrays = PackedArrays()
        samples = []
        for described, store in zip(self.described, stores, strict=True):
            arrays.contents |= store.arrays.contents
            arrays.descriptions |= store.arrays.descriptions
            stored = sentence_on_stored_maps(store, max_bytes=self.max_bytes, lang=self.lang)
            layers = [store.limit_layer_to_stored_maps(place, layer) for place, layer in enumerate(described["layers"])]
            samples.append(
                described
                | {
                    "layers": layers,
                    "pictures": [
                        part if store.mode == "whole" else part | {"stored": store.rows_in_pictures.get(index, [])}
                        for index, part in enumerate(described["pictures"])
                    ],
                    "noMaps": "" if store.mode != "none" else described["noMaps"] or stored,
                    "stored": stored,
                    "precision": locale(
                        "viewer.within", self.lang, rounding=format_rounding_error(store.largest_rounding_error)
                    ),
                }
            )
        return offline_page(answers_in_file(view, [samples], self.all_texts), arrays)

    def sentence_on_what_is_left_out(self, stores: Sequence[StoredMaps]) -> str:
        """Return a sentence on the maps and the texts that the page leaves out; "" if it leaves out nothing."""
        if self.num_wanted == 1:
            (store,) = stores
            whole = store.mode == "whole"
            return "" if whole else sentence_on_stored_maps(store, max_bytes=self.max_bytes, lang=self.lang)
        numbers: dict[str, list[int]] = {}
        for one, store in zip(self.run["samples"], stores, strict=True):
            numbers.setdefault(store.mode, []).append(one["number"])
        found = [
            locale(f"report.texts.{mode}", self.lang, texts=_join_numbers(numbers[mode], self.lang))
            for mode in MODES[1:]
            if mode in numbers
        ]
        left = self.num_wanted - len(stores)
        if left:
            found.append(locale("report.texts.absent", self.lang, n=f"{left:,}", of=f"{self.run['texts']:,}"))
        if not found:
            return ""
        if not left and all(store.why_incomplete == "statistics" for store in stores):  # not for lack of room
            return sentence_on_stored_maps(stores[0], max_bytes=self.max_bytes, lang=self.lang)
        size = readable_size(self.max_bytes, self.lang)
        return locale("common.join.sentences", self.lang).join(
            [*found, locale("report.texts.why", self.lang, size=size)]
        )


def _join_numbers(numbers: Sequence[int], lang: str) -> str:
    """Join ascending numbers of texts, consecutive ones as a range.

    >>> _join_numbers([2, 3, 4, 7, 9, 10], "en")
    '2–4, 7, 9, 10'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    words = [[f"{part[0]:,}–{part[-1]:,}"] if len(part) > 2 else [f"{each:,}" for each in part] for part in parts]
    return locale("common.join.comma", lang).join(chain(*words))


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
