"""Take a written page apart again: its data, its packs, the weights they hold."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Page:
    """A page as a browser would read it."""

    def __init__(self, page: Path | bytes) -> None:
        self.html = page.decode() if isinstance(page, bytes) else page.read_text("utf-8")
        self.packs = dict(re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', self.html))
        (found,) = re.findall(r'<script type="application/json" id="held">(.*?)</script>', self.html, re.DOTALL)
        self.held: dict[str, Any] = json.loads(found)
        self.arrays: dict[str, dict[str, Any]] = self.held["arrays"]
        self.view: dict[str, Any] = self.held["plain"]["view"]
        self.data: dict[str, Any] = self.held["plain"]["runs/0/samples/0"]

    def unpacked(self, name: str) -> Tensor:
        raw = bytearray(zlib.decompress(base64.b64decode(self.packs[name]), -15))
        return torch.frombuffer(raw, dtype=torch.uint8).int()

    def root(self, name: str) -> Tensor:
        """An array of weights on a square-root scale, NaN where a key may not be seen."""
        shape, bits = self.arrays[name]["shape"], int(self.arrays[name]["coding"].removeprefix("root"))
        planes, count = self.unpacked(name), math.prod(shape)
        if bits == 12:
            low = torch.stack((planes[count:] >> 4, planes[count:] & 15), -1).flatten()[:count]
            code = planes[:count] << 4 | low
        else:
            code = planes[:count] << 8 | planes[count : 2 * count] if bits == 16 else planes[:count]
        return decoded(code, bits).view(shape)

    def weights(self, layer: int, head: int, sample: int = 0) -> Tensor:
        """One head's weights on a text of the page, (queries, keys)."""
        return self.root(f"0/{sample}/{layer}/{head}")

    def largest(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """One head's largest weights and their keys, (queries, number) each."""
        name = f"0/0/{layer}/{head} largest"
        planes = self.unpacked(name).view(-1, *self.arrays[name]["shape"])
        steps = torch.zeros_like(planes[0])
        for plane in planes[1 if self.arrays[name]["coding"] == "root8" else 2 :]:
            steps = steps << 8 | plane
        return self.root(name), steps.cumsum(-1)

    def maps(self, layer: int) -> Tensor:
        """The pooled maps of a layer."""
        return self.root(f"runs/0/samples/0/layers/{layer}/maps")


def decoded(code: Tensor, bits: int) -> Tensor:
    share = ((code.double() - 1) / ((1 << bits) - 2)) ** 2
    return torch.where(code == 0, torch.nan, share)
