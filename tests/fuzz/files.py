"""Entry points: a census with a damaged compressed file, one that is continued, and texts that are read from files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead.errors import ArgumentError
from multihead.files import read_text_file
from tests.fuzz.draw import Draw, Mismatch


def damaged_census(draw: Draw) -> None:
    """A damaged compressed file of a corpus is counted and named, and the others are read."""
    from tests.counting.tiny import bert, jsonl, random_texts, tokenizer
    from tests.counting.written import COMPRESSED, FORMATS

    name = draw.pick("name", *(name for name in FORMATS if Path(name).suffix in COMPRESSED))
    damage = draw.pick("damage", "cut", "cut", "flipped", "empty", "noise")
    draw.notes |= {"name": name, "damage": damage}
    random = draw.stream("damage")
    texts = random_texts(4, seed=draw.seed)
    packed = bytearray(FORMATS[name](random_texts(20, seed=draw.seed + 1), "text"))
    place = random.randrange(len(packed))
    if damage == "flipped":
        packed[place] ^= 1 << random.randrange(8)
    data = {"cut": bytes(packed[: max(place, 1)]), "empty": b"", "noise": random.randbytes(60)}.get(
        damage, bytes(packed)
    )
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        (room / name).write_bytes(data)
        good = jsonl(room / "good.jsonl", texts)
        found = mh.census(bert(), [str(room / name), good], out=room / "out", tokenizer=tokenizer(), threads=1)
        if found.texts < len(texts):
            raise Mismatch(f"a census beside a damaged file has {found.texts} texts instead of {len(texts)} or more")
        if damage in ("cut", "noise") and found.texts == len(texts) and not found.problems:
            raise Mismatch("a damaged file is not named")


def continued_census(draw: Draw) -> None:
    """A census that was stopped is continued with the same function of a probe, and refused with another one."""
    from tests.counting.tiny import bert, jsonl, random_texts, tokenizer

    before, after = draw.pick("before", 1.0, 2.0, 0.5), draw.pick("after", 1.0, 2.0, 0.5)
    place = draw.pick("place", "closure", "default", "constant", "global", "state", "partial", "class", "static")
    draw.notes |= {"factors": (before, after), "place": place}
    random = draw.stream("shards")
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        corpus = jsonl(room / "texts.jsonl", random_texts(24, seed=draw.seed))
        options = {"out": room / "out", "tokenizer": tokenizer(), "threads": 1, "shard_bytes": 500}

        def mean_of(factor: float) -> float:
            mine = mh.probes.Probe("mine", _scaled(factor, place), {("offset_mass", 0)})
            found = mh.census(bert(), [corpus], probes=(mine,), **options)
            return float(found.table().rows[0]["mine"])

        whole = mean_of(before)
        shards = sorted((room / "out" / "shards").glob("*.parquet"))
        for shard in random.sample(shards, random.randrange(1, len(shards) + 1)):
            shard.unlink()
        (room / "out" / "heads.parquet").unlink()
        try:
            again = mean_of(after)
        except ArgumentError:
            if before == after:
                raise
            return
        if before != after or again != whole:
            raise Mismatch(f"a census with the factor {before}, continued with {after}, has {again}, not {whole}")


def _scaled(factor: float, place: str) -> Callable[[Any], Any]:
    """Define a function that multiplies a part by a factor, which stands in some place of the function."""
    part = ("offset_mass", 0)
    if place == "state":
        return _Scaling(factor)
    if place == "partial":
        return partial(lambda factor, parts: parts[part] * factor, factor)
    sources = {
        "closure": "def make(factor):\n  return lambda parts: parts[part] * factor\nfound = make(FACTOR)",
        "default": "def found(parts, factor=FACTOR):\n  return parts[part] * factor",
        "constant": f"def found(parts):\n  return parts[part] * {factor}",
        "class": "class Own:\n  factor = FACTOR\ndef found(parts):\n  return parts[part] * Own.factor",
        "static": (
            f"class Own:\n  @staticmethod\n  def of():\n    return {factor}\n"
            "def found(parts):\n  return parts[part] * Own.of()"
        ),
        "global": "def found(parts):\n  return parts[part] * FACTOR",
    }
    names: dict[str, Any] = {"FACTOR": factor, "part": part, "__name__": "script"}
    exec(sources[place], names)
    function: Callable[[Any], Any] = names["found"]
    return function


class _Scaling:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, parts: Any) -> Any:
        return parts["offset_mass", 0] * self.factor


def text_file(draw: Draw) -> None:
    """A text has the same statistics in `look`'s reader, on standard input and in a census, however it was saved."""
    from tests.counting.tiny import bert, random_texts, tokenizer

    mark = draw.feature("byte order mark", "", "\ufeff")
    line_break = draw.feature("line break", "\n", "\r\n")
    name = draw.pick("name", "a.txt", "a.jsonl", "a.csv", "a")
    lines = random_texts(draw.size("texts", 1, 2, 5), seed=draw.seed)
    draw.notes |= {"mark": mark, "line break": line_break, "name": name, "texts": len(lines)}
    written = [json.dumps({"text": each}) for each in lines] if name == "a.jsonl" else lines
    rows = ["text", *written] if name == "a.csv" else written
    model, words = bert(), tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        file, plain = Path(folder) / name, Path(folder) / "plain.txt"
        file.write_bytes((mark + "".join(row + line_break for row in rows)).encode())
        plain.write_text("\n".join(rows) + "\n", encoding="utf-8")
        if read_text_file(str(file)) != plain.read_text(encoding="utf-8"):
            raise Mismatch(f"{name} is read as {read_text_file(str(file))!r}")
        counted = mh.census(model, str(file), out=Path(folder) / "out", tokenizer=words, threads=1)
    sums: dict[tuple[int, int], list[Tensor]] = {}
    for text in lines:
        with mh.observe(model, probes=("entropy",)) as seen, torch.no_grad():
            model(**words(text, return_tensors="pt", truncation=True))
        for layer in seen.layers:
            for head, values in enumerate(layer.sample().statistics["entropy"]):
                sums.setdefault((layer.number, head), []).append(values)
    for row in counted.table(kinds=False).rows:
        expected = float(torch.cat(sums[row["layer"], row["head"]]).double().mean())
        if abs(row["entropy"] - expected) > 1e-4:
            raise Mismatch(f"L{row['layer']} H{row['head']} has entropy {row['entropy']}, not {expected}")
