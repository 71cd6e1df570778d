"""Take a written page apart again: its data, its packs, the weights they hold."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Page:
    """A page as a browser would read it."""

    def __init__(self, path: Path) -> None:
        self.html = path.read_text("utf-8")
        self.packs = dict(re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', self.html))
        (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', self.html, re.DOTALL)
        self.data: dict[str, Any] = json.loads(found)

    def unpacked(self, name: str) -> Tensor:
        raw = bytearray(zlib.decompress(base64.b64decode(self.packs[name]), -15))
        return torch.frombuffer(raw, dtype=torch.uint8).int()

    def weights(self, layer: int, head: int) -> Tensor:
        """One head's weights, NaN where a key may not be seen."""
        kept = self.data["layers"][layer]
        bits, count = self.data["store"]["bits"], kept["queries"] * kept["keys"]
        planes = self.unpacked(f"w{layer}.{head}")
        if bits == 16:
            code = planes[:count] << 8 | planes[count:]
        else:
            low = torch.stack((planes[count:] >> 4, planes[count:] & 15), -1).flatten()[:count]
            code = planes[:count] << 4 | low
        return decoded(code, bits).view(kept["queries"], kept["keys"])

    def largest(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """One head's largest weights and their keys, (queries, number) each."""
        kept = self.data["layers"][layer]
        number = min(self.data["store"]["number"], kept["keys"])
        planes = self.unpacked(f"k{layer}.{head}").view(-1, kept["queries"], number)
        steps = torch.zeros_like(planes[0])
        for plane in planes[2:]:
            steps = steps << 8 | plane
        return decoded(planes[0] << 8 | planes[1], 16), steps.cumsum(-1)

    def maps(self, layer: int) -> Tensor:
        """The pooled maps of a layer."""
        kept = self.data["layers"][layer]
        planes = self.unpacked(f"m{layer}").view(2, kept["heads"], kept["rows"], kept["cols"])
        return decoded(planes[0] << 8 | planes[1], 16)


def decoded(code: Tensor, bits: int) -> Tensor:
    share = ((code.double() - 1) / ((1 << bits) - 2)) ** 2
    return torch.where(code == 0, torch.nan, share)
