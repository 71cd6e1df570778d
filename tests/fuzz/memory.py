"""Lay tensors out in memory in every way that a user may: strided, expanded, negated, next to a page that traps."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

from tests.fuzz.draw import Draw

PAGE = mmap.PAGESIZE
ROOM = 256 * PAGE  # of each region; 1 MiB
PROT_NONE = 0


class Regions:
    """Memory between two pages that cannot be read; a read past its end kills the process.

    Where the system has no mmap and mprotect of POSIX, no tensor is placed there.
    """

    def __init__(self, count: int) -> None:
        self.available = sys.platform != "win32"
        self.maps: list[mmap.mmap] = []
        self.starts: list[int] = []
        self.next = 0
        if not self.available:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for _ in range(count):
            region = mmap.mmap(-1, ROOM + 2 * PAGE)
            start = ctypes.addressof(ctypes.c_char.from_buffer(region))
            for page in (start, start + PAGE + ROOM):
                if libc.mprotect(page, PAGE, PROT_NONE):
                    raise OSError(ctypes.get_errno(), "mprotect")
            self.maps.append(region)
            self.starts.append(start + PAGE)

    def copy(self, flat: Tensor, *, at_end: bool) -> Tensor | None:
        """Copy a 1-D tensor to the end or the start of the next region, or return None where it does not fit."""
        size = flat.numel() * flat.itemsize
        if not self.starts or not size or size > ROOM:
            return None
        start = self.starts[self.next % len(self.starts)] + (ROOM - size if at_end else 0)
        self.next += 1
        buffer = (ctypes.c_char * size).from_address(start)
        placed = torch.frombuffer(buffer, dtype=flat.dtype)
        placed.copy_(flat)
        return placed


_regions: list[Regions] = []


def regions() -> Regions:
    """The regions of this process: enough for the tensors of one case."""
    if not _regions:
        _regions.append(Regions(12))
    return _regions[0]


def laid_out(draw: Draw, name: str, values: Tensor, *, share: float = 0.35, expand: bool = True) -> Tensor:
    """Return the values in some layout; an expanded axis repeats its first row, and views may overlap.

    Args:
        draw: the choices of the case.
        name: of the tensor, for the report.
        values: in the dtype of the tensor.
        share: of the cases in which the layout is not contiguous.
        expand: whether an axis may be expanded, which changes the values.
    """
    feature = f"layout of {name}"
    if not draw.has(feature, share):
        return values
    random = draw.stream(feature)
    dims = values.dim()
    order = list(range(dims))
    random.shuffle(order)
    if random.random() < 0.3:
        order = sorted(order)
    expanded = [axis for axis in range(dims) if random.random() < 0.15]
    if random.random() < 0.5 or not expand:
        expanded = []
    step = random.choice((1, 1, 1, 2, 3)) if dims else 1
    kept = values[tuple(slice(0, 1) if axis in expanded else slice(None) for axis in range(dims))]
    base = kept.permute(order).contiguous()
    if step > 1:
        wide = torch.full((*base.shape[:-1], base.shape[-1] * step), torch.nan, dtype=base.dtype)
        wide[..., ::step] = base
        base = wide[..., ::step] if base.shape[-1] else base
    base, placed = _placed(base, random.choice(("plain", "plain", "offset", "end", "end", "start")))
    view = base.permute([order.index(axis) for axis in range(dims)]) if dims else base
    sign = random.choice(("plain", "plain", "plain", "plain", "negative", "conjugate"))
    if sign == "negative":
        view = torch._neg_view(-view)
    elif sign == "conjugate" and values.dtype in (torch.float32, torch.float64):
        view = torch.complex(torch.full_like(view, torch.nan), -view).conj().imag
    view = view.expand(values.shape)
    draw.notes[feature] = f"strides {view.stride()}, {placed}, {sign}"
    return view


def _placed(base: Tensor, where: str) -> tuple[Tensor, str]:
    """Copy a tensor with its strides to other memory."""
    if where == "plain" or not base.numel():
        return base, "alone"
    span = 1 + sum((size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True))
    flat = base.as_strided((span,), (1,))
    if where == "offset":
        room = torch.cat([flat.new_full((3,), torch.nan), flat, flat.new_full((5,), torch.nan)])
        return room.as_strided(base.shape, base.stride(), 3), "offset 3"
    placed = regions().copy(flat, at_end=where == "end")
    if placed is None:
        return base, "alone"
    return placed.as_strided(base.shape, base.stride()), f"at the {where} of readable memory"
