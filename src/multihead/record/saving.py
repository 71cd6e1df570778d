"""Write a record to one safetensors file: structure as JSON in the header, numbers as tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, InputError
from multihead.errors.given import check_path
from multihead.errors.optional import require
from multihead.files import check_writable, open_atomically
from multihead.probes.catalogue import REPEAT_PROBES, statistic
from multihead.probes.head_statistic import HeadStatistic
from multihead.probes.places import PlaceTable
from multihead.probes.probe import Probe
from multihead.record.grey_copies import Picture
from multihead.record.layer import RecordContents, empty_layer_error
from multihead.record.repeated import RepeatedTokens
from multihead.record.running_summary import RunningSummary
from multihead.record.sample import SampleRecord
from multihead.record.segments import Segment
from multihead.record.serialization import JoinedParts, TensorStore, bias_as_json, mask_as_json
from multihead.record.texts import Text
from multihead.scores.bias import values_of

FORMAT_NAME = "multihead record"
FORMAT_VERSION = 3  # 2: other histogram bins of running summaries; 3: one table per layer instead of tensors per text
MAX_HEADER_BYTES = 100_000_000  # bytes; safetensors rejects longer headers
SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""Dtypes that a record's file may contain -> their names in safetensors."""

_INTEGER_DTYPE_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # number of bytes -> dtype


def save(record: RecordContents, file: str | os.PathLike[str], *, keep: str = "all") -> None:
    """Write the contents of a record to a file; see `Record.save`."""
    if keep not in ("all", "statistics"):
        raise ArgumentError(f"keep is {keep!r}.", 'Give "all" or "statistics".')
    check_path("file", file)
    target = os.fspath(file)
    check_writable([target])
    require("safetensors", purpose="Saving a record", extra="view")
    data, store = record_as_json(record, keep=keep)
    tensors: dict[str, Tensor | JoinedParts] = {**store.by_name, **store.joined}
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise DtypeError(
                f"{name} is a {tensor.dtype} tensor, which a record cannot hold.", "Convert it to float32 or int64."
            )
    metadata = {"format": FORMAT_NAME, "version": str(FORMAT_VERSION), "id": record.id, "record": data}
    # The widest dtypes come first, so that each tensor starts at a multiple of its item size.
    named = sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0]))
    header = safetensors_header(named, metadata)
    if len(header) > MAX_HEADER_BYTES:
        raise InputError(
            f"The record holds {max((each.num_samples for each in record.layers), default=0):,} samples in each of "
            f"{len(record.layers)} layers, more than one file can list.",
            "Save fewer samples per file.",
        )
    with open_atomically(target) as opened:
        opened.write(header)
        for _, tensor in named:
            opened.write(_little_endian_bytes(tensor if isinstance(tensor, Tensor) else tensor.read()))


def safetensors_header(named: Sequence[tuple[str, Tensor | JoinedParts]], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file: 8 bytes with its length, then JSON with the offsets of each tensor."""
    data: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name, tensor in named:
        offsets = [place, place := place + math.prod(tensor.shape) * tensor.dtype.itemsize]
        data[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _little_endian_bytes(tensor: Tensor) -> memoryview:
    """Return the contiguous, little-endian bytes of a tensor, as safetensors stores them."""
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    size = whole.itemsize
    return whole.view(_INTEGER_DTYPE_BY_SIZE[size]).numpy().astype(np.dtype(f"<i{size}"), copy=False).data


def record_as_json(record: RecordContents, *, keep: str) -> tuple[str, TensorStore]:
    """Convert a record to JSON text, and the tensors to which the JSON refers by name."""
    tensors, texts = TensorStore(), _StoredTexts()
    layers = []
    places: dict[int, tuple[int, int]] = {}
    for index, layer in enumerate(record.layers):
        places |= {id(one): (index, number) for number, one in enumerate(layer.samples)}
        if not layer.samples and layer.running_summary is None:
            raise empty_layer_error(layer.name)
        running_summary = _summary_as_json(layer.running_summary, tensors, index)
        data = {
            "name": layer.name,
            "number": layer.number,
            "tables": _tables_as_json(layer.samples, tensors, texts, str(index), kept=keep == "all"),
            "summed": running_summary,
            "repeated": _repeated_tokens_as_json(layer.repeated, tensors, index),
        }
        if layer.numbers:
            data["numbers"] = {
                name: tensors.add_tensor(f"{index}.numbers.{name}", each) for name, each in layer.numbers.items()
            }
        if layer.split is not None:
            heads, count, kv_heads, kv_count, rank, ranks = layer.split
            data["split"] = [*heads, count, *kv_heads, kv_count, rank, ranks]
        if layer.alignment_heads:
            data["alignment"] = list(layer.alignment_heads)
        layers.append(data)
    order = [(*places[id(sample)], call) for sample, call in record.calls if id(sample) in places]
    tensors.add_tensor("calls", torch.tensor(order, dtype=torch.int64).reshape(-1, 3))
    data = {
        "title": record.title,
        "keep": "all" if keep == "all" and record.keeps_weights else "statistics",
        "statistics": {name: each.display() for name, each in record.statistics.items()},
        "texts": texts.as_json(tensors),
        "layers": layers,
    }
    # `counted` and `axes` are separate entries, so that earlier versions of the library, whose statistics lack these
    # fields, can open the file.
    counted = {name: each.counted for name, each in record.statistics.items() if each.counted != "all"}
    if counted:
        data["counted"] = counted
    axes = {name: each.axes for name, each in record.statistics.items() if each.axes != "queries"}
    if axes:
        data["axes"] = axes
    of_heads = [each for each in record.statistics.values() if isinstance(each, HeadStatistic)]
    if of_heads:
        data["of heads"] = {each.name: _measure_as_json(each) for each in of_heads}
    probes = [each for each in record.statistics.values() if isinstance(each, Probe)]
    parts = {
        each.name: [*each.only_part, None if each.tokens is None else sorted(each.tokens)]
        for each in probes
        if each.only_part is not None and not isinstance(each.only_part, str)
    }
    if parts:  # parts and argument of the probes, from which they are restored; user-defined functions are not stored
        data["parts"] = parts
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A token may be half of a surrogate pair, which UTF-8 cannot encode but JSON can, as \\ud83d.
    return text.encode("utf-8", "backslashreplace").decode("utf-8"), tensors


def _measure_as_json(shown: HeadStatistic) -> list[Any]:
    """Convert what a number of heads is to JSON."""
    together = None if shown.together is None else vars(shown.together)
    return [shown.what, shown.measure, shown.by, shown.better, together]


def _summary_as_json(running_summary: RunningSummary | None, tensors: TensorStore, layer: int) -> dict[str, Any] | None:
    if running_summary is None:
        return None
    data: dict[str, dict[str, str]] = {}
    sums, blocks = running_summary.sums, running_summary.blocks
    for name, rows in running_summary.rows_of_statistics().items():
        part = sums.rows(rows)
        below, above = running_summary.bins[rows].tensor_split(2, 1)
        # Earlier versions of the library read these.
        parts = {"total": part.mean * part.num_queries, "count": part.num_queries.double(), "bins": above}
        parts |= {} if bool(part.minimum.isnan().any()) else {"minimum": part.minimum, "maximum": part.maximum}
        parts |= {"negative_bins": below} if bool(below.any()) else {}
        parts["sums"] = torch.stack([column.double() for column in part])
        if blocks is not None:
            parts["blocks"] = torch.stack([column[rows].double() for column in blocks])
        data[name] = {each: tensors.add_tensor(f"{layer}.{name}.{each}", tensor) for each, tensor in parts.items()}
    counts = {"heads": running_summary.num_heads, "samples": running_summary.num_samples}
    return counts | {"cross_attention": running_summary.cross_attention, "statistics": data}


def _repeated_tokens_as_json(
    repeated: RepeatedTokens | None, tensors: TensorStore, layer: int
) -> dict[str, Any] | None:
    if repeated is None:
        return None
    known = [
        name for name in repeated.shares if name in REPEAT_PROBES
    ]  # statistics of user-defined kinds are not stored
    return {
        "length": repeated.length,
        "times": repeated.times,
        "start": repeated.start,
        "start_token": repeated.start_token,
        "shares": {name: tensors.add_tensor(f"{layer}.{name}.shares", repeated.shares[name]) for name in known},
        "chance": {
            name: tensors.add_tensor(f"{layer}.{name}.chance", repeated.chance[name])
            for name in known
            if name in repeated.chance
        },
    }


class _StoredTexts:
    """Collects the texts of a record for saving; equal texts are stored once."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], int] = {}
        self.texts: list[Text] = []

    def add_text(self, text: Text) -> int | None:
        if not text.length:
            return None
        ids = None if text.ids is None else text.ids.tolist()
        parts = (ids, text.tokens, text.special, text.gaps)
        key = *(None if part is None else tuple(part) for part in parts), _content_of_pictures(text)
        if key not in self.known:
            self.known[key] = len(self.texts)
            self.texts.append(text)
        return self.known[key]

    def as_json(self, tensors: TensorStore) -> list[dict[str, Any]]:
        return [
            {
                "ids": None if text.ids is None else tensors.add_tensor(f"texts.{index}.ids", text.ids),
                "tokens": text.tokens,
                "special": None if text.special is None else [int(each) for each in text.special],
                **({} if text.gaps is None else {"gaps": text.gaps}),
                **({} if text.boxes is None else {"boxes": _boxes_as_json(text.boxes, tensors, f"texts.{index}")}),
                **({"pictures": list(map(partial(_picture_as_json, tensors), text.pictures))} if text.pictures else {}),
            }
            for index, text in enumerate(self.texts)
        ]


def _content_of_pictures(text: Text) -> bytes:
    """Return bytes that are equal for texts with equal pictures, and equal places of their tokens in these."""
    parts = [each.grey for each in text.pictures] + ([] if text.boxes is None else text.boxes.columns)
    return b"".join(bytes(_little_endian_bytes(each)) for each in parts)


def _picture_as_json(tensors: TensorStore, picture: Picture) -> dict[str, Any]:
    """Store the copy of a picture, once if texts share it, and return its size and the name of the tensor."""
    name = tensors.add_tensor(f"pictures.{len(tensors.by_name)}", picture.grey)
    return {"width": picture.width, "height": picture.height, "grey": name}


def _boxes_as_json(boxes: PlaceTable, tensors: TensorStore, name: str) -> dict[str, str]:
    """Store the places of the tokens of a text, and return the names of the tensors."""
    return {each.name: tensors.add_tensor(f"{name}.{each.name}", getattr(boxes, each.name)) for each in fields(boxes)}


def _tables_as_json(
    samples: Sequence[SampleRecord], tensors: TensorStore, texts: _StoredTexts, name: str, *, kept: bool
) -> list[dict[str, Any]]:
    """Convert the texts of a layer to JSON: one table, unless texts differ in their dtype or in their statistics."""
    alike: dict[str, tuple[dict[str, Any], list[_SavedText]]] = {}
    for number, one in enumerate(samples):
        text = _SavedText(number, one, one.statistics)
        common = text.common(kept=kept)
        alike.setdefault(json.dumps([common, [*text.rows]]), (common, []))[1].append(text)
    return [
        _table_as_json(common, of_table, tensors, texts, f"{name}.{number}")
        for number, (common, of_table) in enumerate(alike.values())
    ]


class _SavedText(NamedTuple):
    """A text of a table: its place in the layer, its sample and the statistics of the sample."""

    number: int
    sample: SampleRecord
    statistics: dict[str, Tensor]

    def common(self, *, kept: bool) -> dict[str, Any]:
        """Return what the texts of a table have in common."""
        one, shape = self.sample, self.sample.segments[0].request.shape
        return {
            "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "value_dim": shape.value_dim,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "map_size": one.map_size,
            "map_pool": one.map_pool,
            "kept": kept and one.q is not None,
            "crosses": one.cross_attention,
        }

    @property
    def rows(self) -> dict[str, str]:
        """The statistics with a number per query or per key: name -> dtype."""
        found = self.statistics.items()
        return {name: str(value.dtype) for name, value in found if statistic(name, self.sample.own).axes != "map"}


def _table_as_json(
    common: dict[str, Any], of_table: list[_SavedText], tensors: TensorStore, texts: _StoredTexts, name: str
) -> dict[str, Any]:
    """Convert a table to JSON; its tensors have the rows of the texts one after another, (heads, rows, ...)."""
    samples = [text.sample for text in of_table]
    if common["kept"]:
        tensors.add_rows(f"{name}.q", [one.q.all_rows()[0] for one in samples if one.q is not None])
        tensors.add_rows(f"{name}.k", [one.k.all_rows()[0] for one in samples if one.k is not None])
    tensors.add_rows(f"{name}.logsumexp", [one.logsumexp.all_rows()[0] for one in samples])
    calls = [(*rows, *keys) for one in samples for rows, keys in one.calls]
    statistics = {
        key: tensors.add_rows(f"{name}.statistics.{key}", [text.statistics[key] for text in of_table])
        for key in of_table[0].rows
    }
    return common | {
        "name": name,
        "statistics": statistics,
        "calls": tensors.add_tensor(f"{name}.calls", torch.tensor(calls, dtype=torch.int64).reshape(-1, 4)),
        "texts": [
            _text_as_json(text, tensors, texts, f"{name}.{index}", kept=common["kept"])
            for index, text in enumerate(of_table)
        ],
    }


def _text_as_json(
    text: _SavedText, tensors: TensorStore, texts: _StoredTexts, name: str, *, kept: bool
) -> dict[str, Any]:
    one = text.sample
    data: dict[str, Any] = {
        "number": text.number,
        "text": texts.add_text(one.text),
        "query_text": texts.add_text(one.query_text) if one.cross_attention else None,
        "pieces": [
            _segment_as_json(segment, tensors, f"{name}.{index}", kept=kept)
            for index, segment in enumerate(one.segments)
        ],
        "rows": [one.num_queries, one.num_keys, 0 if one.k is None else one.k.length, len(one.calls)],
    }
    maps = {
        key: tensors.add_tensor(f"{name}.statistics.{key}", value)
        for key, value in text.statistics.items()
        if key not in text.rows
    }
    if maps:
        data["maps"] = maps
    if one.split is not None:
        data["split"] = [list(map(list, each)) for each in one.split]
    return data


def _segment_as_json(segment: Segment, tensors: TensorStore, name: str, *, kept: bool) -> dict[str, Any]:
    request = segment.request
    bias = request.bias
    if bias is not None and not kept and not bool((values_of(bias) == -torch.inf).any()):
        bias = None  # without q and k, a bias matters only if it hides keys
    return {
        "queries": request.shape.query_length,
        "keys": request.shape.key_length,
        "key_start": segment.key_start,
        "apart": segment.is_window,
        "query_start": int(request.query_start),
        "scale": request.scale,
        "softcap": request.softcap,
        "mask": mask_as_json(request.mask, tensors, f"{name}.mask"),
        "bias": bias_as_json(bias, tensors, f"{name}.bias"),
        "sinks": tensors.add_tensor(f"{name}.sinks", request.sinks) if kept and request.sinks is not None else None,
    }
