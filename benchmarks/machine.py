"""Describe what the numbers depend on: the CPU and its features, threads, torch and the commit."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

_LISTED = ("avx", "avx2", "fma", "f16c", "avx_vnni", "amx_bf16", "amx_tile", "asimd", "sve", "bf16")


def machine_line(commits: Iterable[str] = ()) -> str:
    """Return a line with the CPU, the threads, torch and the commits; without commits, the commit of this checkout."""
    measured = ", ".join(dict.fromkeys(commits)) or commit()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{cpu()} ({capability}), {torch.get_num_threads()} threads, torch {torch.__version__}, commit {measured}."


def measured_on(commits: Iterable[str] = ()) -> tuple[str, str, str]:
    """Return the last row of a table in a page of the documentation: what its numbers were measured on."""
    return "measured on", machine_line(commits), ""


def cpu() -> str:
    """Return the name of the CPU."""
    return _field("model name") or platform.machine()


def features() -> str:
    """Return the vector instruction sets that the CPU reports."""
    reported = (_field("flags") or _field("Features") or "").split()
    return " ".join(word for word in reported if word in _LISTED or word.startswith("avx512"))


def commit() -> str:
    """Return the commit of this checkout."""
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
