"""Run the cases of a part in this process, one after the other, and write a line before and after each of them.

tools/cuda.py starts this file, `python -m tools.on_gpu.worker MODULE`, so that a case that ends the CUDA context, the
process or the patience costs that case alone: the next process goes on after it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

LOST_CONTEXT = 9  # exit status if the CUDA context is lost, in which no later case could run
Cases = Mapping[str, Callable[[], Mapping[str, object]]]
"""Name -> function that returns what it found, or raises an error."""


class NotHere(Exception):  # noqa: N818 - not an error
    """A case that cannot run on this machine; the message says what is missing."""


def main() -> None:
    """Parse the arguments, which tools/cuda.py writes, and run the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module", help="module of the part")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines, one or two per case")
    parser.add_argument("--seconds", type=float, required=True, help="after this time no further case begins")
    parser.add_argument("--share", default="0/1", help="i/n: every n-th case, from the i-th")
    parser.add_argument("--skip", type=int, default=0, help="number of cases of this share that were already run")
    given = parser.parse_args()
    began = time.monotonic()
    with given.out.open("a", encoding="utf-8") as out:
        cases = importlib.import_module(given.module).cases(given.seconds)
        index, count = map(int, given.share.split("/"))
        mine = list(cases)[index::count]
        _write(out, {"cases": mine})
        for name in mine[given.skip :]:
            if time.monotonic() - began > given.seconds:
                return
            _write(out, {"case": name, "state": "begun"})
            row = run_case(name, cases[name])
            _write(out, row)
            if row["state"] == "failed" and _context_is_lost():
                os._exit(LOST_CONTEXT)


def run_case(name: str, case: Callable[[], Mapping[str, object]]) -> dict[str, object]:
    """Run a case; return its state ("passed", "failed", "not here"), its seconds, and what it found or its error."""
    began = time.perf_counter()
    found: dict[str, object] = {"state": "passed"}
    try:
        found |= case()
        _wait_for_gpu()
    except NotHere as missing:
        found = {"state": "not here", "error": str(missing)}
    except Exception as error:  # noqa: BLE001 - the error of a case is its result
        found = {
            "state": "failed",
            "error": f"{type(error).__name__}: {error}"[:600],
            "trace": traceback.format_exc(limit=-4),
        }
    return {"case": name, "seconds": round(time.perf_counter() - began, 3), **found}


def _wait_for_gpu() -> None:
    """Wait for the GPU, so that an error of an asynchronous kernel belongs to the case that launched it."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _context_is_lost() -> bool:
    try:
        _wait_for_gpu()
    except Exception:  # noqa: BLE001 - any error here means that the context does not work
        return True
    return False


def _write(out: TextIO, row: Mapping[str, object]) -> None:
    out.write(json.dumps(row, default=str) + "\n")
    out.flush()


if __name__ == "__main__":
    # The module that the cases import, whose classes are not those of `__main__`.
    importlib.import_module("tools.on_gpu.worker").main()
