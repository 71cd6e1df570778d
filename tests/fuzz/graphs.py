"""Entry points that cost seconds: torch.compile, and a program that is exported, saved and loaded in a new process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from multihead import masks
from multihead.errors import MultiheadError
from tests.fuzz.calls import leaves_of
from tests.fuzz.draw import Draw, Mismatch
from tests.fuzz.layers import made_layer
from tests.fuzz.ways import Way


def compiled(draw: Draw) -> None:
    """`torch.compile` of a call, forward and backward."""
    torch.compiler.reset()
    way = Way(draw)
    for name in ("q", "k", "v", "bias", "sinks"):  # inductor of PyTorch 2.13 ignores the negative bit of inputs
        tensor = getattr(way.call, name)
        if tensor is not None:
            setattr(way.call, name, tensor.resolve_neg())
            if name in way.drawn.options and isinstance(way.drawn.options[name], Tensor):
                way.drawn.options[name] = getattr(way.call, name)
    leaves = leaves_of(way.drawn)
    way.options = way.drawn.given()
    backend = draw.pick("backend", "aot_eager", "aot_eager", "eager", "inductor")
    draw.notes["backend"] = backend
    way.compare(*torch.compile(way.of, backend=backend)(*way.tensors), leaves)


class Masked(nn.Module):
    """A layer with its mask inside; lengths come from outside."""

    def __init__(self, layer: nn.Module, mask: masks.Mask) -> None:
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.layer(x, mask=self.mask & masks.Lengths(lengths))  # type: ignore[no-any-return]


_LOAD = """
import sys, torch, multihead as mh
mh.attention  # registers the operators
program = torch.export.load(sys.argv[1]).module()
given = torch.load(sys.argv[2])
torch.save(program(*given), sys.argv[3])
"""


def exported(draw: Draw) -> None:
    """A layer that is exported for any batch and length, saved, loaded in a new process and called there."""
    layer = made_layer(draw, draw.pick("heads", 2, 4), 40)
    plain: list[masks.Mask] = [masks.Full(), masks.Causal(), masks.Causal() & masks.Window(3), masks.Window(2, after=2)]
    model = Masked(layer, draw.pick("mask", *plain)).eval()
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=32)
    shapes = {"x": {0: batch, 1: length}, "lengths": {0: batch}}
    draw.notes["mask"] = model.mask
    example = draw.normal("example", 3, 7, 12).float(), torch.tensor([7, 3, 0])
    try:
        program = torch.export.export(model, example, dynamic_shapes=shapes)
    except (MultiheadError, torch._dynamo.exc.UserError):
        if "own position bias" in draw.used:  # it reads sizes
            return
        raise
    b, n = draw.pick("batch", 2, 5), draw.size("length", 2, 5, 16, 32)
    given = draw.normal("x", b, n, 12).float(), torch.randint(0, n + 1, (b,), generator=draw.generator("lengths"))
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("program.pt2", "given.pt", "found.pt")]
        torch.export.save(program, paths[0])
        torch.save(given, paths[1])
        ended = subprocess.run([sys.executable, "-c", _LOAD, *paths], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise Mismatch(f"a saved program does not run in a new process: {ended.stderr.strip().splitlines()[-1]}")
        found = torch.load(paths[2])
    with torch.no_grad():
        expected = model(*given)
    apart = (found - expected).abs().max()
    if not float(apart) <= 1e-4 * max(1.0, float(expected.abs().max())):
        raise Mismatch(f"a loaded program is off by {float(apart):.3g}")
