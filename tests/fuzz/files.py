"""Entry point: a census over a corpus in which one compressed file is damaged."""

from __future__ import annotations

import tempfile
from pathlib import Path

import multihead as mh
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
