"""Write a record into one safetensors file: what it says as JSON in the header, its numbers as tensors."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead.errors import ArgumentError, InputError
from multihead.files import refuse_unless_writable
from multihead.observation.pieces import Piece
from multihead.observation.written import Tensors, written_bias, written_mask
from multihead.scores.bias import values_of

if TYPE_CHECKING:
    from multihead.observation.record import Record
    from multihead.observation.sample import SampleRecord
    from multihead.observation.summed import Summed
    from multihead.observation.texts import Text

FORMAT = "multihead record"
VERSION = 1
HEADER = 100_000_000  # bytes: the most that safetensors reads


def save(record: Record, file: str | os.PathLike[str], *, keep: str = "all") -> None:
    """Write a record; see `Record.save`."""
    if keep not in ("all", "statistics"):
        raise ArgumentError(f"keep is {keep!r}.", 'Give "all" or "statistics".')
    target = os.fspath(file)
    refuse_unless_writable([target])
    refuse_unless_installed()
    from safetensors.torch import save_file

    said, tensors = written(record, keep=keep)
    metadata = {"format": FORMAT, "version": str(VERSION), "id": record.id, "record": said}
    if len(said) + 120 * len(tensors) > HEADER:
        raise InputError(
            f"The record holds {max((each.num_samples for each in record.layers), default=0):,} samples in each of "
            f"{len(record.layers)} layers, more than one file can list.",
            "Save fewer samples a file.",
        )
    place = Path(target).absolute()
    handle, beside = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file({name: _alone(name, tensor) for name, tensor in tensors.items()}, beside, metadata)
        mask = os.umask(0)
        os.umask(mask)
        Path(beside).chmod(0o666 & ~mask)  # mkstemp makes files for their owner's eyes only
        Path(beside).replace(place)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _alone(name: str, tensor: Tensor) -> Tensor:
    """Lay a tensor out as a file holds it; what masks and biases are cut out of may be cut out for others too."""
    tensor = tensor.detach().cpu().contiguous()
    shares = tensor.untyped_storage().nbytes() != tensor.nbytes and name.rsplit(".", 1)[-1] not in ("q", "k")
    return tensor.clone() if shares else tensor


def refuse_unless_installed() -> None:
    """Refuse to save or open a record where safetensors is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise InputError(
            "A record is saved as safetensors, and that package is not installed.",
            'Run pip install "multihead[view]".',
        ) from error


def written(record: Record, *, keep: str) -> tuple[str, dict[str, Tensor]]:
    """Write a record as JSON and tensors."""
    tensors, texts = Tensors(), _Texts()
    layers = []
    places = {}
    for index, layer in enumerate(record.layers):
        samples = []
        for number, one in enumerate(layer.samples):
            places[id(one)] = (index, number)
            samples.append(_written_sample(one, tensors, texts, f"{index}.{number}", kept=keep == "all"))
        summed = _written_sums(layer.summed, tensors, index)
        layers.append({"name": layer.name, "number": layer.number, "samples": samples, "summed": summed})
    order = [(*places[id(sample)], call) for sample, call in record.calls if id(sample) in places]
    tensors.put("calls", torch.tensor(order, dtype=torch.int64).reshape(-1, 3))
    said = {
        "title": record.title,
        "keep": "all" if keep == "all" and record.keeps_weights else "statistics",
        "texts": texts.written(tensors),
        "layers": layers,
    }
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"), allow_nan=False), tensors.named


def _written_sums(summed: Summed | None, tensors: Tensors, layer: int) -> dict[str, Any] | None:
    if summed is None:
        return None
    said = {}
    for name, each in summed.statistics.items():
        parts = {"total": each.total, "count": each.count, "bins": each.bins}
        said[name] = {part: tensors.put(f"{layer}.{name}.{part}", tensor) for part, tensor in parts.items()}
    return {"heads": summed.num_heads, "samples": summed.num_samples, "statistics": said}


class _Texts:
    """The texts of a record, each written once."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], int] = {}
        self.texts: list[Text] = []

    def put(self, text: Text) -> int | None:
        if not text.length:
            return None
        ids = None if text.ids is None else tuple(text.ids.tolist())
        tokens = None if text.tokens is None else tuple(text.tokens)
        special = None if text.special is None else tuple(text.special)
        key = (ids, tokens, special)
        if key not in self.known:
            self.known[key] = len(self.texts)
            self.texts.append(text)
        return self.known[key]

    def written(self, tensors: Tensors) -> list[dict[str, Any]]:
        return [
            {
                "ids": None if text.ids is None else tensors.put(f"texts.{index}.ids", text.ids),
                "tokens": text.tokens,
                "special": None if text.special is None else [int(each) for each in text.special],
            }
            for index, text in enumerate(self.texts)
        ]


def _written_sample(one: SampleRecord, tensors: Tensors, texts: _Texts, name: str, *, kept: bool) -> dict[str, Any]:
    shape = one.pieces[0].request.shape
    kept = kept and one.keeps_weights
    if kept:
        assert one.q is not None
        assert one.k is not None
        tensors.put(f"{name}.q", one.q.whole())
        tensors.put(f"{name}.k", one.k.whole())
    tensors.put(f"{name}.logsumexp", one.logsumexp.whole())
    statistics = one.statistics
    return {
        "name": name,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "value_dim": shape.value_dim,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "map_size": one.map_size,
        "map_pool": one.map_pool,
        "kept": kept,
        "crosses": one.crosses,
        "text": texts.put(one.text),
        "query_text": texts.put(one.query_text) if one.crosses else None,
        "statistics": {key: tensors.put(f"{name}.statistics.{key}", value) for key, value in statistics.items()},
        "pieces": [
            _written_piece(piece, tensors, f"{name}.{index}", kept=kept) for index, piece in enumerate(one.pieces)
        ],
        "calls": tensors.put(
            f"{name}.calls",
            torch.tensor([(*rows, *keys) for rows, keys in one.calls], dtype=torch.int64).reshape(-1, 4),
        ),
    }


def _written_piece(piece: Piece, tensors: Tensors, name: str, *, kept: bool) -> dict[str, Any]:
    request = piece.request
    bias = request.bias
    if bias is not None and not kept and not bool((values_of(bias) == -torch.inf).any()):
        bias = None  # it hides no key, and nothing else of it will be asked for
    return {
        "queries": request.shape.query_length,
        "keys": request.shape.key_length,
        "key_start": piece.key_start,
        "query_start": int(request.query_start),
        "scale": request.scale,
        "softcap": request.softcap,
        "mask": written_mask(request.mask, tensors, f"{name}.mask"),
        "bias": written_bias(bias, tensors, f"{name}.bias"),
        "sinks": tensors.put(f"{name}.sinks", request.sinks) if kept and request.sinks is not None else None,
    }
