"""Open a saved record: everything in the file is checked, and nothing in it is executed."""

from __future__ import annotations

import glob
import json
import math
import os
import re
import sys
from collections import ChainMap
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multihead.errors import InputError, MultiheadError
from multihead.errors.given import check_path
from multihead.errors.optional import require
from multihead.files import RandomAccessFile, check_file_name, is_folder
from multihead.functional import request_of
from multihead.kernels.parts import PartAxes
from multihead.probes.catalogue import REPEAT_PROBES, probe_of_part, statistic
from multihead.probes.head_statistic import HEAD_NUMBERS, HeadStatistic, HeadsTogether
from multihead.probes.places import NO_PLACE, PlaceTable
from multihead.probes.probe import Statistic
from multihead.record.grey_copies import LONGEST_SIDE, Picture
from multihead.record.layer import LayerRecord, LayerTexts, RecordContents
from multihead.record.repeated import RepeatedTokens
from multihead.record.running_summary import (
    NUM_BINS,
    RunningSummary,
    StatisticSums,
    bin_of_value,
    concatenate_moments,
    empty_histograms,
)
from multihead.record.sample import OwnStatistics, SampleRecord
from multihead.record.saving import FORMAT_NAME, FORMAT_VERSION, MAX_HEADER_BYTES, SAFETENSORS_NAMES
from multihead.record.segments import Segment
from multihead.record.serialization import read_bias, read_mask
from multihead.record.split import LayerPartOfRank, TokensOfRank, count_tokens
from multihead.record.stored import HeadCache, StoredRows, bytes_of_tensor
from multihead.record.text_table import RowsInTensor, RowsOfText
from multihead.record.texts import GrowingText, Text

MAX_COUNT = 1 << 40  # largest count without a tighter limit

MAX_TOKENS = 1 << 28
"""Largest number of queries or keys of a sample; the longest contexts of models have 2^24 tokens. A damaged file can
claim more tokens in a few bytes, and reading that file would take minutes or run out of memory."""

MAX_KEYS_WITHOUT_DATA = 1 << 22
"""Largest number of keys of a sample for which the file stores nothing per key: neither k, ids nor a statistic."""

MAX_HEADS = 1 << 16
"""Largest number of heads of all layers together; the largest models have 2^14. Heads without queries take no bytes in
a file, but listing them takes time."""

MAX_HEAD_DIM = 1 << 20
"""Largest head_dim and value_dim; models have at most 2^9."""

MAX_LABEL_LENGTH = 100
"""Largest number of characters of a label or a unit, which pages show as column headings."""

_MAX_SHARE = 1 + 1e-3  # upper limit of a share: 1 and a margin for rounding
_NUM_BINS_OF_VERSION_1 = 2095  # number of bins of a running summary in files of version 1
_DTYPES_BY_NAME = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_MAX_QUOTED = 300  # largest number of characters that an error message quotes
MODEL_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
JSON_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


def load(file: str | os.PathLike[str], *, mapped: bool = True) -> RecordContents:
    """Read and check the contents of a record's file; see `Record.load`.

    Args:
        file: path of the file.
        mapped: map the file into memory; truncating it then kills the process. If False, q and k are read when they
            are needed and everything else at once, and reading raises InputError if the file has changed.
    """
    target = os.fspath(file)
    # Reading without mapping does not convert the file's little-endian numbers, so big-endian machines always map.
    metadata, tensors, stored = _open_file(target, mapped=mapped or sys.byteorder == "big")
    if metadata.get("format") != FORMAT_NAME:
        raise InputError(
            f"{target!r} is a safetensors file, but not a record of multihead.", "Give a file that Record.save wrote."
        )
    version = metadata.get("version", "")
    if not re.fullmatch(r"[0-9]{1,9}", version, re.ASCII) or int(version) < 1:
        raise _damage_error(target, f"its version is {version!r}")
    if int(version) > FORMAT_VERSION:
        raise InputError(
            f"{target!r} was saved by a newer multihead: its format has version {int(version)}, and this one reads "
            f"{FORMAT_VERSION}.",
            "Update multihead: pip install --upgrade multihead.",
        )
    try:
        return _record_of_metadata(metadata, tensors, stored, int(version))
    except _InvalidValueError as error:
        raise _damage_error(target, str(error)) from None
    except MultiheadError as error:
        raise _damage_error(target, error.finding.rstrip(".")) from error
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, RuntimeError) as error:
        raise _damage_error(target, "its contents are inconsistent") from error


def matching_files(file: str | os.PathLike[str]) -> list[str]:
    """Return the sorted files that match a pattern such as "run.*.safetensors", or the file if it is a plain name.

    Raises:
        InputError: no file matches the pattern.
    """
    check_path("file", file)
    target = os.fspath(file)
    if not glob.has_magic(target) or Path(target).exists():
        return [target]
    found = sorted(glob.glob(target))  # noqa: PTH207 - a pattern may begin at the root
    if not found:
        raise InputError(f"No file matches {target!r}.", "Check the pattern, and the folder.")
    return found


class _InvalidValueError(Exception):
    """A value in a file has a wrong type, shape or range."""


def _damage_error(target: str, what: str) -> InputError:
    what = what if len(what) <= _MAX_QUOTED else f"{what[: _MAX_QUOTED - 1]}…"
    return InputError(f"{target!r} is damaged: {what}.", "Save the record again.")


def _open_file(target: str, *, mapped: bool) -> tuple[dict[str, str], dict[str, Tensor], dict[str, StoredRows]]:
    """Open a safetensors file.

    Returns:
        metadata, tensors by name, and tensors (q and k) by name that are read from the file only when needed.

    Raises:
        InputError: the file does not exist, is not a safetensors file, or is truncated.
    """
    require("safetensors", purpose="Opening a record", extra="view")
    from safetensors import SafetensorError, safe_open

    check_file_name(target)
    try:
        with safe_open(target, framework="pt", device="cpu") as opened:
            if not mapped:
                return _read_without_mapping(target)
            return opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}, {}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"There is no file {target!r}.", "Check its name.") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if is_folder(target):
            raise InputError(f"{target!r} is a folder.", "Give a file that Record.save wrote.") from None
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{target!r} cannot be read: {error.strerror}.", "Check its name and rights.") from None
        if not Path(target).stat().st_size:
            raise InputError(f"{target!r} is empty.", "Give a file that Record.save wrote.") from None
        if _begins_as_safetensors(target):
            raise InputError(
                f"{target!r} is truncated or damaged: it starts as a safetensors file but does not continue as one.",
                "Copy it again, or save the record again.",
            ) from error
        raise InputError(f"{target!r} is not a safetensors file.", "Give a file that Record.save wrote.") from error


def _read_without_mapping(target: str) -> tuple[dict[str, str], dict[str, Tensor], dict[str, StoredRows]]:
    """Read a file that safetensors has validated, except q and k, which are read when needed.

    Raises:
        ValueError: the file has changed since the validation.
    """
    parts = RandomAccessFile(Path(target), keep_open=True)
    parts.read_into(0, memoryview(size := bytearray(8)))
    begin = 8 + int.from_bytes(size, "little")
    if begin > min(parts.size, MAX_HEADER_BYTES + 8):
        raise ValueError("The header is longer than the file.")
    parts.read_into(8, memoryview(text := bytearray(begin - 8)))
    header = json.loads(text)
    metadata = header.pop("__metadata__", {})
    held = HeadCache(parts)
    tensors: dict[str, Tensor] = {}
    stored: dict[str, StoredRows] = {}
    for name, data in header.items():
        dtype, shape, (first, stop) = _DTYPES_BY_NAME.get(data["dtype"]), tuple(data["shape"]), data["data_offsets"]
        if dtype is None:
            continue  # a dtype that no record has
        if stop - first != math.prod(shape) * dtype.itemsize or begin + stop > parts.size:
            raise ValueError(f"{name} is not at the offset in the header.")
        if re.fullmatch(r"[0-9]+\.[0-9]+\.[qk]", name) and len(shape) in (3, 4) and shape[:-3] in ((), (1,)):
            stored[name] = StoredRows(held, begin + first, (1, *shape[-3:]), dtype)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype)
            parts.read_into(begin + first, bytes_of_tensor(tensors[name]))
    return metadata, tensors, stored


def _begins_as_safetensors(target: str) -> bool:
    with Path(target).open("rb") as file:
        start = file.read(9)
    return len(start) < 9 or start[8:] == b"{"


def _record_of_metadata(
    metadata: dict[str, str], tensors: dict[str, Tensor], stored: dict[str, StoredRows], version: int
) -> RecordContents:
    data = _checked_type(json.loads(metadata["record"], parse_constant=_reject_constant), dict, "the record")
    if not re.fullmatch(r"[0-9a-f]{32}", metadata.get("id", ""), re.ASCII):
        raise _InvalidValueError("its id is not 32 hexadecimal digits")
    texts = [_read_text(each, tensors) for each in _checked_items(data["texts"], dict, "the texts", "a text")]
    statistics = _read_statistics(data)
    layers: list[LayerRecord] = []
    heads, claimed, numbers = 0, set[str](), set[int]()
    for place, each in enumerate(_checked_items(data["layers"], dict, "the layers", "a layer")):
        name = _checked_type(each["name"], str, "a layer's name")
        layer = _LayerInFile(name, tensors, stored, texts, statistics, claimed)
        samples = _read_tables(each["tables"], layer) if version > 2 else _read_samples(each["samples"], layer)
        running_summary = (
            None
            if each["summed"] is None
            else _read_running_summary(_checked_type(each["summed"], dict, "the sums"), tensors, version)
        )
        if len({one.num_heads for one in samples}) > 1 or bool(samples) is (running_summary is not None):
            raise _InvalidValueError(f"the samples of layer {name!r} are inconsistent")
        # Records of earlier versions have no numbers; a layer's number was its index in the file.
        number = _checked_count(each.get("number", place), "a layer's number")
        if number in numbers:
            raise _InvalidValueError("two layers have the same number")
        numbers.add(number)
        layers.append(LayerRecord(name, LayerTexts(samples), running_summary, number))
        layers[-1].alignment_heads = _read_alignment_heads(each, layers[-1].num_heads)
        layers[-1].split = _read_layer_split(each.get("split"), layers[-1].num_heads)
        if any(one.split is not None and layers[-1].split is None for one in samples):
            raise _InvalidValueError("a sample is split over ranks, but its layer is not")
        layers[-1].repeated = _read_repeated_tokens(each.get("repeated"), tensors, layers[-1].num_heads)
        layers[-1].numbers = _read_numbers(each.get("numbers", {}), tensors, layers[-1].num_heads, statistics)
        heads += layers[-1].num_heads
        if heads > MAX_HEADS:
            raise _InvalidValueError(f"its layers have more than {MAX_HEADS:,} heads")
    order = _checked_tensor(tensors["calls"], (None, 3), "calls", torch.int64).tolist()
    calls = []
    for layer, sample, call in order:
        one = layers[_checked_index(layer, len(layers))].samples
        chosen = one[_checked_index(sample, len(one))]
        calls.append((chosen, _checked_index(call, len(chosen.calls))))
    return RecordContents(layers, _checked_type(data["title"], str, "its title"), metadata["id"], calls, statistics)


def _read_layer_split(data: Any, heads: int) -> LayerPartOfRank | None:
    """Read which heads and tokens of a layer a rank computed; None if the layer was not split over ranks."""
    if data is None:
        return None
    numbers = [_checked_count(each, "a part of a layer") for each in _checked_type(data, list, "the part of a layer")]
    if len(numbers) != 8:
        raise _InvalidValueError(f"the split of a layer has {len(numbers)} numbers")
    first, stop, count, first_kv, stop_kv, kv_count, rank, ranks = numbers
    within = 0 <= first < stop <= count <= MAX_HEADS and 0 <= first_kv < stop_kv <= kv_count <= count
    if not within or stop - first != heads or not 0 <= rank < ranks:
        raise _InvalidValueError("the heads of a rank are not a valid range")
    return LayerPartOfRank((first, stop), count, (first_kv, stop_kv), kv_count, rank, ranks)


def _read_ranges(data: Any, length: int) -> tuple[tuple[int, int], ...]:
    """Read ranges of tokens, and check that they are in order and within a text of `length` tokens."""
    found, place = [], 0
    for each in _checked_type(data, list, "the tokens of a rank"):
        first, stop = (
            _checked_count(end, "a token of a rank") for end in _checked_type(each, list, "the tokens of a rank")
        )
        if not place <= first < stop <= length:
            raise _InvalidValueError("the tokens of a rank are not in order")
        found.append((first, stop))
        place = stop
    return tuple(found)


def _read_alignment_heads(layer: dict[str, Any], heads: int) -> tuple[int, ...]:
    """Read the indices of a layer's alignment heads; () if the layer has none."""
    listed = _checked_type(layer.get("alignment", []), list, "the alignment heads")
    found = tuple(_checked_count(each, "an alignment head", most=heads - 1) for each in listed)
    if sorted(set(found)) != list(found):
        raise _InvalidValueError("the alignment heads of a layer are not in ascending order")
    return found


def _read_statistics(data: dict[str, Any]) -> OwnStatistics:
    """Read the statistics that are not built in."""
    found = OwnStatistics()
    counted = _checked_type(data.get("counted", {}), dict, "the queries that count")
    axes = _checked_type(data.get("axes", {}), dict, "the axes of statistics")
    parts = _checked_type(data.get("parts", {}), dict, "the parts of statistics")
    of_heads = _checked_type(data.get("of heads", {}), dict, "the measures of heads")
    for name, fields in _checked_type(data.get("statistics", {}), dict, "the labels of statistics").items():
        shown = {
            key: _checked_type(value, str, f"the {key} of a statistic")
            for key, value in _checked_type(fields, dict, "the label of a statistic").items()
        }
        if any(len(text) > MAX_LABEL_LENGTH for text in shown.values()):
            raise _InvalidValueError(f"a label of a statistic has more than {MAX_LABEL_LENGTH} characters")
        shown["counted"] = _checked_type(counted.get(name, "all"), str, "the queries that count")
        shown["axes"] = _checked_type(axes.get(name, "queries"), str, "the axes of a statistic")
        found[name] = (
            _read_head_statistic(name, shown, of_heads[name]) if name in of_heads else Statistic(name, **shown)
        )
        if name in parts:
            family, argument, tokens = _checked_type(parts[name], list, "the part of a statistic")
            probe = probe_of_part((family, argument), tokens)
            if probe.name != name:
                raise _InvalidValueError(f"the part of {name} belongs to {probe.name}")
            found[name] = replace(probe, **shown)
    return found


def _read_head_statistic(name: str, shown: dict[str, Any], data: Any) -> HeadStatistic:
    """Read what the numbers of heads are: `what`, measure, `by`, which measure is better, and heads off together."""
    *words, together = _checked_type(data, list, "the measures of heads")
    what, measure, by, better = (_checked_type(each, str, "a measure of heads") for each in words)
    if what not in HEAD_NUMBERS or better not in ("more", "less", "") or len(measure + by) > MAX_LABEL_LENGTH:
        raise _InvalidValueError(f"{name} is no number of heads that this version knows")
    return HeadStatistic(
        name, **shown, what=what, measure=measure, by=by, better=better, together=_read_off_together(together)
    )


def _read_off_together(data: Any) -> HeadsTogether | None:
    """Read what some heads do when all of them are off; None if that was not measured."""
    if data is None:
        return None
    fields = _checked_type(data, dict, "heads that are off together")
    heads = [(_checked_count(layer, "a layer"), _checked_count(head, "a head")) for layer, head in fields["heads"]]
    numbers = {key: tuple(map(float, fields[key])) for key in ("effects", "singles", "draws")}
    if not heads or not numbers["effects"] or len(numbers["effects"]) != len(numbers["singles"]):
        raise _InvalidValueError("the heads that are off together have no texts")
    if not all(map(math.isfinite, chain(*numbers.values()))):
        raise _InvalidValueError("the effect of heads that are off together is not finite")
    return HeadsTogether(tuple(heads), **numbers)


def _reject_constant(name: str) -> float:
    raise _InvalidValueError(f"{name} is not a number")


def _checked_type(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _InvalidValueError(
            f"{what} should be {JSON_TYPE_NAMES[kind]}, and is {JSON_TYPE_NAMES.get(type(value), 'nothing')}"
        )
    return value


def _checked_items(value: Any, kind: type, what: str, of_item: str) -> list[Any]:
    """Return a list, after checking the type of each item."""
    return [_checked_type(each, kind, of_item) for each in _checked_type(value, list, what)]


def _checked_count(value: Any, what: str, *, least: int = 0, most: int = MAX_COUNT) -> int:
    if not least <= _checked_type(value, int, what) <= most:
        raise _InvalidValueError(f"{what} is {value}")
    return int(value)


def _checked_index(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise _InvalidValueError("a call refers to a sample that does not exist")
    return index


def _checked_tensor(tensor: Tensor, shape: tuple[int | None, ...], what: str, *dtypes: torch.dtype) -> Tensor:
    """Return a tensor, after checking its shape (None: any size) and dtype."""
    fits = tensor.dim() == len(shape) and all(
        size in (None, given) for size, given in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        raise _InvalidValueError(f"{what} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)}")
    return tensor


def _read_running_summary(data: dict[str, Any], tensors: dict[str, Tensor], version: int) -> RunningSummary:
    heads = _checked_count(data["heads"], "a number of heads", least=1, most=MAX_HEADS)
    sums, bins, blocks = [StatisticSums.empty(0)], [empty_histograms(0)], []
    statistics = _checked_type(data["statistics"], dict, "the statistics")
    for parts in statistics.values():
        if version > 1:
            halves = [
                _checked_tensor(tensors[parts[part]], (heads, NUM_BINS), part, torch.int64)
                if part in parts
                else torch.zeros(heads, NUM_BINS, dtype=torch.int64)
                for part in ("negative_bins", "bins")
            ]
        else:
            old = _checked_tensor(tensors[parts["bins"]], (heads, _NUM_BINS_OF_VERSION_1), "bins", torch.int64)
            halves = [torch.zeros(heads, NUM_BINS, dtype=torch.int64), _convert_old_bins(old)]
        bins.append(torch.cat(halves, 1))
        sums.append(_read_sums(parts, tensors, heads))
        if "blocks" in parts:
            number, mean, squares = _checked_tensor(tensors[parts["blocks"]], (3, heads), "blocks", torch.float64)
            blocks.append((number.long(), mean, squares))
    found = RunningSummary.from_sums(
        heads,
        _checked_count(data["samples"], "a number of samples"),
        list(statistics),
        StatisticSums.concatenate(sums),
        torch.cat(bins),
        concatenate_moments(blocks) if blocks and len(blocks) == len(statistics) else None,
    )
    found.cross_attention = _checked_type(data.get("cross_attention", False), bool, "cross-attention")
    return found


def _read_sums(parts: dict[str, str], tensors: dict[str, Tensor], heads: int) -> StatisticSums:
    """Read the sums of one statistic; those of earlier versions have neither squares nor chance levels."""
    of_heads = {
        part: _checked_tensor(tensors[parts[part]], (heads,), part, torch.float64)
        for part in ("total", "count", *{"minimum", "maximum"}.intersection(parts))
    }
    empty = StatisticSums.empty(heads)
    if "sums" in parts:
        stored = _checked_tensor(tensors[parts["sums"]], (len(empty), heads), "sums", torch.float64)
        return StatisticSums(*(each.to(like.dtype) for each, like in zip(stored, empty, strict=True)))
    count, unknown = of_heads["count"], torch.full((heads,), torch.nan, dtype=torch.float64)
    return StatisticSums(
        num_queries=count.long(),
        num_nonfinite=empty.num_nonfinite,
        mean=of_heads["total"] / count.clamp(min=1),
        squares=unknown,
        chance=unknown,
        num_texts=empty.num_texts,
        excess=unknown,
        excess_squares=unknown,
        minimum=of_heads.get("minimum", unknown),
        maximum=of_heads.get("maximum", unknown),
    )


def _read_repeated_tokens(data: Any, tensors: dict[str, Tensor], heads: int) -> RepeatedTokens | None:
    """Read the attention of a layer on repeated random tokens; None if it was not measured."""
    if data is None:
        return None
    shares: dict[str, Tensor] = {}
    levels: dict[str, Tensor] = {}
    for part, found, shape in (("shares", shares, (None, heads)), ("chance", levels, (heads,))):
        for name, place in _checked_type(
            _checked_type(data, dict, "repeated tokens")[part], dict, f"the {part} of repeated tokens"
        ).items():
            if name not in REPEAT_PROBES:
                raise _InvalidValueError("there is an unknown statistic of repeated tokens")
            found[name] = _checked_tensor(tensors[place], shape, name, torch.float64)
            if not bool(((found[name] >= 0) & (found[name] <= _MAX_SHARE) | found[name].isnan()).all()):
                raise _InvalidValueError(f"{name} is not a share")
    if len({each.shape for each in shares.values()}) > 1 or not levels.keys() <= shares.keys():
        raise _InvalidValueError("the statistics of repeated tokens are inconsistent")
    if any(not each.shape[0] for each in shares.values()):
        raise _InvalidValueError("no text of repeated tokens was read")
    length, times = (
        _checked_count(data[each], f"the {each} of repeated tokens", least=1, most=MAX_TOKENS)
        for each in ("length", "times")
    )
    start_token = _checked_type(data.get("start_token", ""), str, "start token")  # not in files of earlier versions
    return RepeatedTokens(length, times, _checked_type(data["start"], bool, "start"), shares, levels, start_token)


def _read_numbers(data: Any, tensors: dict[str, Tensor], heads: int, own: OwnStatistics) -> dict[str, Tensor]:
    """Read the numbers of a layer's heads on other texts than those of the record, see `Record.add`."""
    found = {}
    for name, place in _checked_type(data, dict, "the numbers of heads").items():
        found[name] = _checked_tensor(tensors[place], (None, heads), name, torch.float64)
        if name not in own or not len(found[name]):
            raise _InvalidValueError("the numbers of heads have no name or no text")
    return found


def _convert_old_bins(bins: Tensor) -> Tensor:
    """Convert histograms of file version 1, with bins of ratio 1.02, to bins of values from 0: (heads, NUM_BINS)."""
    values = 1e-9 * 1.02 ** torch.arange(_NUM_BINS_OF_VERSION_1, dtype=torch.float64) * 2 / 2.02
    values[0] = 0
    return torch.zeros(len(bins), NUM_BINS, dtype=torch.int64).index_add_(1, bin_of_value(values) - NUM_BINS, bins)


def _read_text(data: dict[str, Any], tensors: dict[str, Tensor]) -> Text:
    ids = None if data["ids"] is None else _checked_tensor(tensors[data["ids"]], (None,), "a text's ids", torch.int64)
    tokens, special = data["tokens"], data["special"]
    if tokens is not None:
        tokens = _checked_items(tokens, str, "the tokens", "a token")
    if special is not None:
        special = [bool(_checked_count(each, "a mark")) for each in _checked_type(special, list, "the marks")]
    gaps = data.get("gaps")
    if gaps is not None:
        gaps = [
            None if each is None else _checked_type(each, str, "a gap")
            for each in _checked_type(gaps, list, "the gaps")
        ]
    if len({len(each) for each in (ids, tokens, special, gaps) if each is not None}) != 1:
        raise _InvalidValueError("the tokens of a text are not as many as its ids")
    length = next(len(each) for each in (ids, tokens, special, gaps) if each is not None)
    boxes = _read_boxes(data["boxes"], length, tensors) if "boxes" in data else None
    boxes = _convert_patches(data["patches"], length) if "patches" in data else boxes
    listed = _checked_items(data.get("pictures", []), dict, "the pictures", "a picture")
    pictures = [_read_picture(each, tensors) for each in listed]
    return Text(ids, tokens, special, gaps, boxes, tuple(pictures))


def _read_picture(data: dict[str, Any], tensors: dict[str, Tensor]) -> Picture:
    """Read the copy of a picture."""
    grey = _checked_tensor(tensors[data["grey"]], (None, None), "a picture", torch.uint8)
    if not 0 < max(grey.shape) <= LONGEST_SIDE or not grey.numel():
        raise _InvalidValueError(f"a picture has {grey.shape[0]} x {grey.shape[1]} pixels")
    width, height = (_checked_count(data[each], f"the {each} of a picture", least=1) for each in ("width", "height"))
    return Picture(grey, width, height)


def _read_boxes(data: Any, tokens: int, tensors: dict[str, Tensor]) -> PlaceTable:
    """Read the places of the tokens of a text in pictures."""
    columns = {}
    for name, sizes in {"picture": (), "view": (), "patch": (), "box": (4,), "cell": (4,)}.items():
        dtype = torch.float32 if name == "box" else torch.int64
        columns[name] = _checked_tensor(tensors[data[name]], (tokens, *sizes), f"the {name} of tokens", dtype)
        least = NO_PLACE if name == "picture" else -1
        if name != "box" and not bool(((columns[name] >= least) & (columns[name] <= MAX_TOKENS)).all()):
            raise _InvalidValueError(f"the {name} of a token is not one")
    cell, grid = columns["cell"].split(2, 1)
    if bool(((cell >= grid) & (cell >= 0)).any()):
        raise _InvalidValueError("the cell of a token is outside of its grid")
    return PlaceTable(**columns)


def _convert_patches(data: Any, tokens: int) -> PlaceTable:
    """Convert an image's numbers of rows and columns, whose patches are the last tokens, of files without boxes."""
    sizes = [_checked_count(each, "a size of an image", least=1) for each in _checked_type(data, list, "the image")]
    if len(sizes) != 2 or sizes[0] * sizes[1] > tokens:
        raise _InvalidValueError("the patches of an image are not its tokens")
    rows, columns = sizes
    patch = torch.arange(rows * columns)
    cell = torch.stack([patch // columns, patch % columns, patch * 0 + rows, patch * 0 + columns], 1)
    image = PlaceTable(patch * 0, patch * 0, patch, torch.full((len(patch), 4), torch.nan), cell)
    return PlaceTable.join([PlaceTable.without_places(tokens - len(patch)), image])


class _LayerInFile(NamedTuple):
    """What the samples of a layer are read from.

    Attributes:
        name: the name of the layer.
        tensors: the tensors of the file by name.
        stored: q and k by name, if they are read when they are needed.
        texts: the texts of the file.
        own: the statistics that are not built in.
        claimed: the names of the samples or tables that were read before, of all layers.
    """

    name: str
    tensors: MutableMapping[str, Tensor]
    stored: dict[str, StoredRows]
    texts: list[Text]
    own: OwnStatistics
    claimed: set[str]

    def claim(self, name: Any) -> str:
        """Return the name of a sample or table; each is read once, else a small file could list a large one often."""
        if _checked_type(name, str, "a name") in self.claimed:
            raise _InvalidValueError(f"{name!r} is listed twice")
        self.claimed.add(name)
        return str(name)


def _read_samples(data: Any, layer: _LayerInFile) -> list[SampleRecord]:
    """Read the samples of a layer from a file of version 1 or 2."""
    readers = [_SampleReader(one, layer) for one in _checked_type(data, list, "the samples")]
    for reader in readers:
        layer.claim(reader.tensor_name())
    return [reader.read() for reader in readers]


def _read_tables(data: Any, layer: _LayerInFile) -> list[SampleRecord]:
    """Read the tables of a layer, and return its samples in order."""
    found: dict[int, SampleRecord] = {}
    texts = 0
    for each in _checked_type(data, list, "the tables"):
        of_table = _TableReader(each, layer).read()
        texts += len(of_table)
        found |= of_table
    if sorted(found) != list(range(texts)):
        raise _InvalidValueError("the texts of a layer are not numbered from 0")
    return [found[number] for number in range(texts)]


class _TableReader:
    """Reads the texts of a table, whose tensors have the rows of one text after those of another."""

    def __init__(self, data: Any, layer: _LayerInFile) -> None:
        self.data, self.layer = _checked_type(data, dict, "a table"), layer
        self.name = layer.claim(self.data["name"])
        self.statistics = _checked_type(self.data["statistics"], dict, "the statistics")
        self.read_so_far = (0, 0, 0, 0)  # queries, keys, keys whose k is stored, calls

    def read(self) -> dict[int, SampleRecord]:
        """Return number in the layer -> sample."""
        texts = _checked_items(self.data["texts"], dict, "the texts of a table", "a text of a table")
        found = {}
        for index, text in enumerate(texts):
            found[_checked_count(text["number"], "the number of a text")] = self.read_text(text, f"{self.name}.{index}")
        if len(found) < len(texts):
            raise _InvalidValueError("two texts of a layer have the same number")
        for what, rows, axis, read in self.columns():
            if tuple(rows.shape[axis : axis + 1]) != (self.read_so_far[read],):
                raise _InvalidValueError(f"the rows of {what} are not those of the texts")
        return found

    def columns(self) -> Iterator[tuple[str, Tensor | StoredRows, int, int]]:
        """Yield each tensor: its name, its rows, their axis, and what they count: an index in `read_so_far`."""
        tensors = self.layer.tensors
        yield "calls", tensors[self.data["calls"]], 0, 3
        yield "logsumexp", tensors[f"{self.name}.logsumexp"], 1, 0
        for name, place in self.statistics.items():
            yield f"statistics.{name}", tensors[place], 1, 1 if statistic(name, self.layer.own).axes == "keys" else 0
        if self.data["kept"]:
            for part, counted in (("q", 0), ("k", 2)):
                name = f"{self.name}.{part}"
                stored = self.layer.stored.get(name)
                yield (part, tensors[name], 1, counted) if stored is None else (part, stored, 2, counted)

    def read_text(self, text: dict[str, Any], name: str) -> SampleRecord:
        """Read one text, as a sample of a file of version 2 with this name, whose tensors are slices of the table's."""
        counts = [_checked_count(each, "a number of rows", most=MAX_TOKENS) for each in text["rows"]]
        if len(counts) != len(self.read_so_far):
            raise _InvalidValueError(f"the rows of a text are {len(counts)} numbers")
        tensors, stored = dict[str, Tensor](), dict[str, StoredRows]()
        for part, rows, axis, read in self.columns():
            first, stop = self.read_so_far[read], self.read_so_far[read] + counts[read]
            if len(rows.shape) <= axis or stop > rows.shape[axis]:
                raise _InvalidValueError(f"the rows of {part} are not those of the texts")
            if isinstance(rows, StoredRows):
                stored[f"{name}.{part}"] = rows.slice_rows(first, stop)
                continue
            sliced = rows.narrow(axis, first, counts[read])
            tensors[f"{name}.{part}"] = sliced[None] if part in ("q", "k", "logsumexp") else sliced
        first_query, first_key, first_held, first_call = self.read_so_far
        self.read_so_far = (
            first_query + counts[0],
            first_key + counts[1],
            first_held + counts[2],
            first_call + counts[3],
        )
        maps = _checked_type(text.get("maps", {}), dict, "the maps")
        places = {each: f"{name}.statistics.{each}" for each in self.statistics} | maps
        own = {"name": name, "statistics": places, "calls": f"{name}.calls"}
        layer = self.layer._replace(tensors=ChainMap(tensors, self.layer.tensors), stored=stored)
        return _SampleReader({**self.data, **text, **own}, layer).read()


class _SampleReader:
    """Reads one sample of a file, and checks every value."""

    def __init__(self, data: Any, layer: _LayerInFile) -> None:
        self.data = _checked_type(data, dict, "a sample")
        self.name, self.tensors, self.stored, self.texts, self.own, _ = layer
        self.heads = _checked_count(self.data["heads"], "a number of heads", least=1, most=MAX_HEADS)
        self.kv_heads = _checked_count(self.data["kv_heads"], "a number of key/value heads", least=1, most=MAX_HEADS)
        self.head_dim = _checked_count(self.data["head_dim"], "a width", least=1, most=MAX_HEAD_DIM)
        self.value_dim = _checked_count(self.data["value_dim"], "a width", least=1, most=MAX_HEAD_DIM)
        if self.data["dtype"] not in MODEL_DTYPES:
            raise _InvalidValueError(f"there is no dtype {self.data['dtype']!r}")
        self.dtype = MODEL_DTYPES[self.data["dtype"]]

    def read(self) -> SampleRecord:
        one = SampleRecord(self.name, _checked_count(self.data["map_size"], "map_size", least=1), own=self.own)
        if self.data["map_pool"] not in ("mean", "max"):
            raise _InvalidValueError(f"map_pool is {self.data['map_pool']!r}")
        one.map_pool = self.data["map_pool"]
        one.cross_attention = _checked_type(self.data["crosses"], bool, "crosses")
        for each in _checked_items(self.data["pieces"], dict, "the pieces", "a piece"):
            one.segments.append(self.read_segment(each, one.segments[-1].row_stop if one.segments else 0))
        if not one.segments:
            raise _InvalidValueError("a sample has no calls")
        if self.data.get("split") is not None:
            both = _checked_type(self.data["split"], list, "the tokens of a rank")
            lengths = (one.segments[0].num_queries, one.num_keys)
            if len(both) != 2 or len(one.segments) > 1 or one.cross_attention:
                raise _InvalidValueError("the tokens of a rank do not belong to one call")
            one.split = TokensOfRank(*(_read_ranges(each, length) for each, length in zip(both, lengths, strict=True)))
        queries, keys = one.num_queries, one.num_keys
        self.read_tensors(one, queries, keys)
        one.calls = self.read_calls(one)
        one.set_statistics(self.read_statistics(queries, keys))
        if (text := self.read_text("text", keys)) is not None:
            one.growing_key_text = GrowingText.from_text(text)
        if (text := self.read_text("query_text", queries)) is not None:
            one.growing_query_text = GrowingText.from_text(text)
        held = one.k is not None or self.data["text"] is not None or one.has_statistics_per_key
        if keys > MAX_KEYS_WITHOUT_DATA and not held:
            raise _InvalidValueError(f"it stores no data for the {keys:,} keys of a sample")
        return one

    def read_segment(self, data: dict[str, Any], row_start: int) -> Segment:
        """Read a segment; its mask, shape and options are checked as in `mh.attention`."""
        queries = _checked_count(data["queries"], "a number of queries", most=MAX_TOKENS)
        keys = _checked_count(data["keys"], "a number of keys", most=MAX_TOKENS)
        numbers = [data["scale"], *([] if data["softcap"] is None else [data["softcap"]])]
        if not all(isinstance(each, (int, float)) and math.isfinite(each) for each in numbers):
            raise _InvalidValueError("a scale is not a number")
        start = _checked_type(data["query_start"], int, "the position of a query")
        if abs(start) > MAX_TOKENS:
            raise _InvalidValueError(f"the position of a query is {start}")
        blank = torch.empty((), dtype=self.dtype)  # one number, expanded to the shapes of q, k and v without memory
        request = request_of(
            blank.expand(1, self.heads, queries, self.head_dim),
            blank.expand(1, self.kv_heads, keys, self.head_dim),
            blank.expand(1, self.kv_heads, keys, self.value_dim),
            read_mask(data["mask"], self.tensors),
            read_bias(data["bias"], self.tensors),
            None if data["softcap"] is None else float(data["softcap"]),
            self.read_sinks(data),
            float(data["scale"]),
            0.0,
            start,
        )
        nothing = torch.empty(0)
        key_start = _checked_count(data["key_start"], "the index of a key", most=MAX_TOKENS)
        is_window = _checked_type(data.get("apart", False), bool, "apart")  # files of earlier versions have no windows
        return Segment(replace(request, q=nothing, k=nothing, v=nothing), key_start, row_start, is_window)

    def read_sinks(self, data: dict[str, Any]) -> Tensor | None:
        """Read the learned sinks of a segment, (heads,); None if the file does not store them."""
        name = data.get("sinks")
        if name is None:
            return None
        floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        return _checked_tensor(self.tensors[name], (self.heads,), "sinks", *floats)

    def read_tensors(self, one: SampleRecord, queries: int, keys: int) -> None:
        name = self.tensor_name()
        row = torch.float64 if self.dtype == torch.float64 else torch.float32
        one.logsumexp = RowsInTensor(
            _checked_tensor(self.tensors[f"{name}.logsumexp"], (1, self.heads, queries), "logsumexp", row)
        )
        if _checked_type(self.data["kept"], bool, "kept"):
            one.q = self.read_rows(f"{name}.q", (1, self.heads, queries, self.head_dim), "q")
            one.k = self.read_rows(f"{name}.k", (1, self.kv_heads, None, self.head_dim), "k")
            held = keys if one.split is None else count_tokens(one.split.keys)
            if one.k.length < held:
                raise _InvalidValueError(f"k has {one.k.length} keys of {held}")

    def read_rows(self, name: str, shape: tuple[int | None, ...], what: str) -> RowsOfText:
        stored = self.stored.get(name)
        if stored is None:
            return RowsInTensor(_checked_tensor(self.tensors[name], shape, what, self.dtype))
        _checked_tensor(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), shape, what, self.dtype)
        return stored

    def tensor_name(self) -> str:
        return str(_checked_type(self.data["name"], str, "a name"))

    def read_calls(self, one: SampleRecord) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Read the query and key ranges of each call, and check that calls are consecutive and within a segment."""
        data = _checked_tensor(self.tensors[self.data["calls"]], (None, 4), "calls", torch.int64).tolist()
        found: list[tuple[tuple[int, int], tuple[int, int]]] = []
        segments = iter(one.segments)
        segment, place, keys = next(segments), 0, one.num_keys
        for first, stop, first_key, stop_key in data:
            while stop > segment.row_stop and stop <= one.num_queries:
                segment = next(segments)
            rows = place == first <= stop <= segment.row_stop and segment.row_start <= first
            within = segment.key_start <= first_key <= stop_key <= segment.key_stop
            if not rows or not (within or (first == stop and 0 <= first_key <= stop_key <= keys)):
                raise _InvalidValueError("the calls of a sample do not follow each other")
            found.append(((first, stop), (first_key, stop_key)))
            place = stop
        if place != one.num_queries or not found:
            raise _InvalidValueError("the calls of a sample do not follow each other")
        return found

    def read_statistics(self, queries: int, keys: int) -> dict[str, Tensor]:
        shapes: dict[PartAxes, tuple[int | None, ...]] = {
            "queries": (self.heads, queries),
            "keys": (self.heads, keys),
            "map": (self.heads, None, None),
        }
        kinds, found = (torch.float32, torch.float64, torch.int64), {}
        for name, place in _checked_type(self.data["statistics"], dict, "the statistics").items():
            found[name] = _checked_tensor(self.tensors[place], shapes[statistic(name, self.own).axes], name, *kinds)
        return found

    def read_text(self, which: str, length: int) -> Text | None:
        index = self.data[which]
        if index is None:
            return None
        text = self.texts[_checked_index(_checked_count(index, "a text"), len(self.texts))]
        if text.length != length:
            raise _InvalidValueError(f"a text has {text.length} tokens, and its layer {length}")
        return text
