"""Compile the kernels of `kernels/triton/` for GPUs that are not here: python -m tools.gpu_compile [--install].

Each kernel is compiled for each target with each version of Triton that a supported torch brings, in a process per
version. `tools/on_gpu/compiled.json` has what came out: registers, bytes spilled, the matrix instruction, whether
tiles are loaded asynchronously, and instructions per score of the loop without a mask. It holds for one state of the
kernels' code, whose hash it has; a test compares that. A run that was stopped continues.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from multihead.kernels.proven import code_of
from multihead.kernels.triton.launch import CODE_ON_DEVICE, KernelName
from multihead.kernels.triton.tiles import Tile, padded_width, tile_of_keys, tile_of_queries

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tools" / "on_gpu" / "compiled.json"
TRITONS = {"3.9.0": "2.13", "3.6.0": "2.11"}  # version -> the torch whose wheel for CUDA brings it
FOLDER = ".venv/triton"  # of the newest version, which `make gpu-code` installs; another has its version in the name
NVIDIA = (80, 86, 89, 90, 100, 120)
AMD = "gfx942"
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TENSORS = {
    "known_logsumexp": "*fp32",
    "starts": "*i64",
    "stops": "*i64",
    "query_starts": "*i64",
    "first_keys": "*i64",
    "flags": "*u8",
    "places": "*i32",
    "sinks": "*fp32",
    "bias": "*fp32",
    "shown": "*u8",
    "found": "*fp32",
    "found_key": "*i64",
    "received_by_keys": "*fp32",
    "cells_of_map": "*fp32",
    "cells_seen": "*i32",
}
ALIGNED = {"q", "k", "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row"}  # multiples of 16, as of any model


@dataclass(frozen=True)
class Kind:
    """A kind of launch, for which a kernel is compiled.

    Attributes:
        kernel: name of the kernel.
        name: what is special in it.
        dtype: dtype of q and k.
        head_dim: columns of q and k.
        targets: compute capabilities of NVIDIA's GPUs for which it is compiled.
        changes: constants that differ from those of a causal call whose logsumexp is known.
    """

    kernel: KernelName
    name: str
    dtype: torch.dtype
    head_dim: int
    targets: tuple[int, ...] = (80, 90, 100)
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kernel}, {NAMES[self.dtype]}, head_dim {self.head_dim}, {self.name}"

    @property
    def tile(self) -> Tile:
        """The tile of the launch."""
        reads_cells = bool(self.changes.get("has_bias") or self.changes.get("has_shown"))
        if self.kernel == "measure_queries":
            queries = self.changes.get("queries", 4096)
            return tile_of_queries(self.dtype, self.head_dim, queries, reads_cells=reads_cells)
        cell = (64, 64) if self.changes.get("pool") else None
        return tile_of_keys(self.dtype, self.head_dim, self.changes.get("cell", cell), reads_cells=reads_cells)


def kinds() -> Iterator[Kind]:
    """Yield the kinds of launches: those of most models for every GPU, each option once."""
    half = torch.bfloat16
    for head_dim in (64, 128):
        yield Kind("measure_queries", "logsumexp known", half, head_dim, NVIDIA)
        yield Kind("measure_queries", "logsumexp computed", half, head_dim, NVIDIA, {"known": False})
        yield Kind("sum_keys", "received", half, head_dim, NVIDIA)
        for cell, name in (((128, 128), "a map of large cells"), ((32, 32), "a map of small cells")):
            yield Kind("sum_keys", name, half, head_dim, changes={"pool": 1, "cell": cell})
    for head_dim in (16, 32, 80, 256):
        yield Kind("measure_queries", "logsumexp known", half, head_dim)
        yield Kind("sum_keys", "received", half, head_dim)
    yield Kind("measure_queries", "few queries", half, 128, changes={"queries": 1})
    yield Kind("measure_queries", "logsumexp known", torch.float16, 128)
    options = {"sets": 2, "has_sinks": True, "first_special": True}
    for head_dim in (64, 128):
        yield Kind("measure_queries", "two sets and sinks", half, head_dim, changes=options)
        yield Kind("measure_queries", "softcap", half, head_dim, changes={"capped": True, "late": False})
        for term in ("has_bias", "has_shown"):
            yield Kind("measure_queries", term, half, head_dim, changes={term: True, "late": term != "has_bias"})
            yield Kind("sum_keys", term, half, head_dim, changes={term: True})
        yield Kind("measure_queries", "tf32 x 3", torch.float32, head_dim)
        yield Kind("sum_keys", "tf32 x 3", torch.float32, head_dim)


def constants_of(kind: Kind, *, nvidia: bool) -> dict[str, Any]:
    """Return the constants of a launch, as `kernels/triton/statistics.py` sets them."""
    tile, single = kind.tile, kind.dtype == torch.float32
    found = {
        "head_dim": kind.head_dim,
        "width": padded_width(kind.head_dim),
        "tile_queries": tile.queries,
        "tile_keys": tile.keys,
        "fast": nvidia,
        "precision": "tf32x3" if single and nvidia else "ieee",
        **dict.fromkeys(("capped", "has_bias", "has_shown", "wide"), False),
    }
    if kind.kernel == "measure_queries":
        found |= {"step": 16, "known": True, "late": True, "near_reach": 3, "sets": 0}
        found |= dict.fromkeys(("has_starts", "has_sinks", "first_special"), False)
    else:
        found |= {"scanned": 1024, "pool": 0}
    return found | {name: value for name, value in kind.changes.items() if name in found}


def compile_kind(kind: Kind, target: int | str, folder: Path) -> dict[str, Any]:
    """Compile a kind of launch for a target, and return what came out; an error is a sentence."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from multihead.kernels.triton.device.per_key import sum_keys
    from multihead.kernels.triton.device.per_query import measure_queries

    kernel: Any = {"measure_queries": measure_queries, "sum_keys": sum_keys}[kind.kernel]
    nvidia = isinstance(target, int)
    constants = constants_of(kind, nvidia=nvidia)
    names = list(kernel.arg_names)
    signature = {name: _type_of(name, kind, constants) for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and (name in ALIGNED or signature[name].startswith("*"))
    }
    # A stride of 1 is a constant of the compilation; a bias and a mask have it along the keys.
    values = {(names.index(name),): value for name, value in constants.items()}
    for name in ("bias_key", "shown_key", "known_row", "flags_key"):
        if name in names:
            signature[name] = "constexpr"
            values[names.index(name),] = 1
    source = ASTSource(kernel, signature, values, aligned)
    given = GPUTarget("cuda", target, 32) if isinstance(target, int) else GPUTarget("hip", target, 64)
    options = {"num_warps": kind.tile.warps, "num_stages": kind.tile.stages, "enable_fp_fusion": True}
    try:
        compiled = triton.compile(source, target=given, options=options)
    except Exception as error:  # noqa: BLE001 - a compiler raises errors of many classes
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return _read_nvidia(compiled, kind, folder) if nvidia else _read_amd(compiled)


def _type_of(name: str, kind: Kind, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in ("q", "k"):
        return f"*{NAMES[kind.dtype]}"
    return TENSORS.get(name, "fp32" if name in ("scale", "softcap") else "i32")


def _read_nvidia(compiled: Any, kind: Kind, folder: Path) -> dict[str, Any]:
    """Read registers, stack and instructions from a compiled kernel with the tools that come with Triton."""
    from triton.backends import nvidia

    tools, binary = Path(nvidia.__file__).parent / "bin", folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])

    def output_of(tool: str, *options: str) -> str:
        return subprocess.run([tools / tool, *options, binary], capture_output=True, text=True, check=True).stdout

    usage = output_of("cuobjdump", "--dump-resource-usage")
    found: dict[str, Any] = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    ptx = compiled.asm["ptx"]
    matrix = next((name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in ptx), "none")
    loop = free_loop(output_of("nvdisasm", "-c"))
    scores = kind.tile.queries * kind.tile.keys / (kind.tile.warps * 32)
    return {
        "registers": found["REG"],
        "spilled": found["STACK"],
        "shared": int(compiled.metadata.shared),
        "matrix": matrix,
        "asynchronous": any("LDGSTS" in line or "UTMALDG" in line for line in loop),
        "instructions": round(len(loop) / scores, 1) if loop else None,
    }


def free_loop(assembly: str) -> list[str]:
    """Return the instructions of the loop without a mask: of those with a matrix product, the shortest.

    A loop ends with a branch to a label before it.
    """
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[list[str]] = []
    for line in assembly.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(lines)
            continue
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if not instruction:
            continue
        lines.append(instruction[1])
        target = re.search(r"BRA.*\(?(\.L_x_\d+)", instruction[1])
        if target and target[1] in labels:
            body = lines[labels[target[1]] :]
            if any(re.search(r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|QGMMA|OMMA)", each) for each in body):
                loops.append([each for each in body if not re.match(r"(@\S+ )?NOP", each)])
    inner = [body for body in loops if not any(other is not body and _holds(body, other) for other in loops)]
    return min(inner, key=len, default=[])


def _holds(body: list[str], other: list[str]) -> bool:
    return len(other) < len(body) and body[: len(other)] != other and _position(body, other) >= 0


def _position(body: list[str], other: list[str]) -> int:
    for place in range(len(body) - len(other) + 1):
        if body[place] == other[0] and body[place : place + len(other)] == other:
            return place
    return -1


def _read_amd(compiled: Any) -> dict[str, Any]:
    """Read registers and spills from the assembly for a GPU of AMD."""
    text = compiled.asm["amdgcn"]
    numbers = {
        name: max(map(int, re.findall(rf"\.{name}:\s+(\d+)", text)), default=0)
        for name in ("vgpr_count", "private_segment_fixed_size")
    }
    matrix = "mfma" if "v_mfma" in text else "none"
    return {"registers": numbers["vgpr_count"], "spilled": numbers["private_segment_fixed_size"], "matrix": matrix}


def targets_of(kind: Kind) -> dict[str, int | str]:
    """Return name -> target of what a kind is compiled for."""
    return {**{f"sm_{target}": target for target in kind.targets}, AMD: AMD}


def read_known() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what is known of the present code: version of Triton -> kind -> target -> numbers."""
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return dict(known["triton"]) if known.get("code") == code_of(CODE_ON_DEVICE) else {}


def rows_of_docs() -> list[str]:
    """Return the rows of the table in docs/measured.md: instructions per score, with each version of Triton."""
    names = {
        ("measure_queries", "logsumexp known"): "`measure_queries`, logsumexp known",
        ("measure_queries", "logsumexp computed"): "`measure_queries`, logsumexp computed",
        ("sum_keys", "received"): "`sum_keys`",
    }
    tables, rows = read_known(), []
    for kind in kinds():
        name = names.get((kind.kernel, kind.name))
        if name is None or kind.head_dim not in (64, 128) or kind.dtype != torch.bfloat16:
            continue
        cells = []
        for target in NVIDIA:
            found = [tables[version][str(kind)][f"sm_{target}"] for version in TRITONS]
            cells.append("; ".join(f"{each['instructions']}" for each in found))
        rows.append(f"| {name}, {kind.head_dim} | {' | '.join(cells)} |")
    return rows


def compile_missing(version: str, only: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Compile what is not known yet, with the Triton that can be imported; yield kind, target and numbers."""
    known = read_known().get(version, {})
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for kind in kinds():
            for name, target in targets_of(kind).items():
                if only in f"{kind}, {name}" and name not in known.get(str(kind), {}):
                    yield str(kind), name, compile_kind(kind, target, Path(folder))


def main() -> None:
    """Compile with each version of Triton, in a process each, and write the table after each result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="install the versions of Triton that are missing")
    parser.add_argument("--only", default="", help="compile only kinds and targets whose name contains this")
    parser.add_argument("--triton", default="", choices=["", *TRITONS], help="compile with this version of Triton only")
    parser.add_argument("--version", default="", help="the version of Triton in this process; print lines of JSON")
    options = parser.parse_args()
    if options.version:
        for row in compile_missing(options.version, options.only):
            print(json.dumps(row), flush=True)
        return
    for version in [options.triton] if options.triton else TRITONS:
        folder = ROOT / (FOLDER if version == next(iter(TRITONS)) else f"{FOLDER}-{version}")
        if options.install and not (folder / "triton").exists():
            command = ["pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"triton=={version}"]
            subprocess.run([sys.executable, "-m", *command], check=True)
        command = [sys.executable, "-m", "tools.gpu_compile", "--version", version, "--only", options.only]
        environment = {**os.environ, "PYTHONPATH": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                kind, target, numbers = json.loads(line)
                print(version, kind, target, numbers, flush=True)
                tables = read_known()
                tables.setdefault(version, {}).setdefault(kind, {})[target] = numbers
                found = {"code": code_of(CODE_ON_DEVICE), "torch": TRITONS, "triton": tables}
                written = FILE.with_suffix(".written")  # so a run that is stopped leaves a whole table
                written.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                written.replace(FILE)
        if process.returncode:
            raise SystemExit(process.returncode)


if __name__ == "__main__":
    main()
