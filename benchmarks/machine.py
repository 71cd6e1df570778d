"""Name what numbers depend on: the CPU and its features, threads, torch and commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

_TOLD = ("avx", "avx2", "fma", "f16c", "avx_vnni", "amx_bf16", "amx_tile", "asimd", "sve", "bf16")


def machine() -> str:
    """Name CPU, threads, torch and commit in a line."""
    return (
        f"{cpu()} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, commit {commit()}, medians of paired ratios from interleaved runs"
    )


def cpu() -> str:
    """Name the CPU."""
    return _field("model name") or platform.machine()


def features() -> str:
    """List the vector instruction sets that the CPU says it has."""
    said = (_field("flags") or _field("Features") or "").split()
    return " ".join(word for word in said if word in _TOLD or word.startswith("avx512"))


def commit() -> str:
    """Name the commit that is measured."""
    described = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def _field(name: str) -> str | None:
    """Return the first value of a field of /proc/cpuinfo, or None."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), None)
