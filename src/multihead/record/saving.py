"""Write a record to one safetensors file: structure as JSON in the header, numbers as tensors."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, InputError
from multihead.errors.given import check_path
from multihead.errors.optional import require
from multihead.files import check_writable, open_atomically
from multihead.probes.catalogue import REPEAT_PROBES
from multihead.probes.probe import Probe
from multihead.record.layer import RecordContents, empty_layer_error
from multihead.record.places import PlaceTable
from multihead.record.repeated import RepeatedTokens
from multihead.record.running_summary import RunningSummary
from multihead.record.sample import SampleRecord
from multihead.record.segments import Segment
from multihead.record.serialization import TensorStore, bias_as_json, mask_as_json
from multihead.record.texts import Text
from multihead.scores.bias import values_of

FORMAT_NAME = "multihead record"
FORMAT_VERSION = 2  # version 2 changed the histogram bins of running summaries
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
    data, tensors = record_as_json(record, keep=keep)
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise DtypeError(
                f"{name} is a {tensor.dtype} tensor, which a record cannot hold.", "Convert it to float32 or int64."
            )
    metadata = {"format": FORMAT_NAME, "version": str(FORMAT_VERSION), "id": record.id, "record": data}
    # The widest dtypes come first, so that each tensor starts at a multiple of its item size.
    named = sorted(tensors.items(), key=lambda each: (-each[1].itemsize, each[0]))
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
            opened.write(_little_endian_bytes(tensor))


def safetensors_header(named: list[tuple[str, Tensor]], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file: 8 bytes with its length, then JSON with the offsets of each tensor."""
    data: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name, tensor in named:
        offsets = [place, place := place + tensor.nbytes]
        data[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _little_endian_bytes(tensor: Tensor) -> memoryview:
    """Return the contiguous, little-endian bytes of a tensor, as safetensors stores them."""
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    size = whole.itemsize
    return whole.view(_INTEGER_DTYPE_BY_SIZE[size]).numpy().astype(np.dtype(f"<i{size}"), copy=False).data


def record_as_json(record: RecordContents, *, keep: str) -> tuple[str, dict[str, Tensor]]:
    """Convert a record to JSON text, and the tensors to which the JSON refers by name."""
    tensors, texts = TensorStore(), _StoredTexts()
    layers = []
    places = {}
    for index, layer in enumerate(record.layers):
        samples = []
        for number, one in enumerate(layer.samples):
            places[id(one)] = (index, number)
            samples.append(_sample_as_json(one, tensors, texts, f"{index}.{number}", kept=keep == "all"))
        if not samples and layer.running_summary is None:
            raise empty_layer_error(layer.name)
        running_summary = _summary_as_json(layer.running_summary, tensors, index)
        data = {
            "name": layer.name,
            "number": layer.number,
            "samples": samples,
            "summed": running_summary,
            "repeated": _repeated_tokens_as_json(layer.repeated, tensors, index),
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
    return text.encode("utf-8", "backslashreplace").decode("utf-8"), tensors.by_name


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
        key = *(None if part is None else tuple(part) for part in parts), _content_of_boxes(text)
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
            }
            for index, text in enumerate(self.texts)
        ]


def _content_of_boxes(text: Text) -> bytes:
    """Return bytes that are equal for equal places of the tokens of texts."""
    return b"" if text.boxes is None else b"".join(bytes(_little_endian_bytes(each)) for each in text.boxes.columns)


def _boxes_as_json(boxes: PlaceTable, tensors: TensorStore, name: str) -> dict[str, str]:
    """Store the places of the tokens of a text, and return the names of the tensors."""
    return {each.name: tensors.add_tensor(f"{name}.{each.name}", getattr(boxes, each.name)) for each in fields(boxes)}


def _sample_as_json(
    one: SampleRecord, tensors: TensorStore, texts: _StoredTexts, name: str, *, kept: bool
) -> dict[str, Any]:
    shape = one.segments[0].request.shape
    kept = kept and one.q is not None
    if one.q is not None and one.k is not None and kept:
        tensors.add_tensor(f"{name}.q", one.q.all_rows())
        tensors.add_tensor(f"{name}.k", one.k.all_rows())
    tensors.add_tensor(f"{name}.logsumexp", one.logsumexp.all_rows())
    statistics = one.statistics
    split = {} if one.split is None else {"split": [list(map(list, each)) for each in one.split]}
    return split | {
        "name": name,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "value_dim": shape.value_dim,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "map_size": one.map_size,
        "map_pool": one.map_pool,
        "kept": kept,
        "crosses": one.cross_attention,
        "text": texts.add_text(one.text),
        "query_text": texts.add_text(one.query_text) if one.cross_attention else None,
        "statistics": {key: tensors.add_tensor(f"{name}.statistics.{key}", value) for key, value in statistics.items()},
        "pieces": [
            _segment_as_json(segment, tensors, f"{name}.{index}", kept=kept)
            for index, segment in enumerate(one.segments)
        ],
        "calls": tensors.add_tensor(
            f"{name}.calls",
            torch.tensor([(*rows, *keys) for rows, keys in one.calls], dtype=torch.int64).reshape(-1, 4),
        ),
    }


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
