"""A model is as before after every way to change it, wherever Ctrl-C interrupts and in whatever order uses end."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

import multihead as mh
from multihead import call, tracing
from multihead.errors import ModelError
from multihead.hooks.use import Used
from multihead.undo import Undo
from tests.families import family

SRC = Path(mh.__file__).parent
CHANGING = {
    str(SRC / each)
    for each in ("call.py", "tracing.py", "undo.py", "hooks/use.py", "hooks/huggingface.py", "hooks/bypass.py")
} | {str(SRC / each) for each in ("hooks/pretrained.py", "hooks/packed.py", "observation/observe.py")}

# Until a block begins, `mh.use(model)` is permanent, as without a block; and Python ignores what `__del__` raises.
UNINTERRUPTED = (Used.__enter__.__code__, Undo.__del__.__code__)


def state(model: nn.Module) -> dict[str, Any]:
    """Return everything that a use may change."""
    places = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    hooks = {
        (name, place): len(getattr(module, place))
        for name, module in model.named_modules()
        for place in (*places, "_forward_hooks_always_called")
    }
    choice = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return {"hooks": hooks, "choice": choice, "listeners": call.listeners(), "uncompiled": list(tracing._uncompiled)}


Line = tuple[str, int]


def lines_of(run: Callable[[], object], stop: int = -1) -> list[Line]:
    """Run something and return the lines that change a model, as they run; press Ctrl-C before one of them.

    Args:
        run: what runs.
        stop: the index of the line, or -1.
    """
    found: list[Line] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in CHANGING or frame.f_code in UNINTERRUPTED:
            return None
        if event == "line":
            found.append((frame.f_code.co_filename, frame.f_lineno))
            if len(found) == stop + 1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            run()
    finally:
        sys.settrace(before)
    return found


def chosen(lines: list[Line]) -> list[int]:
    """Return the indices at which each line runs for the first, the second and the last time."""
    indices: dict[Line, list[int]] = {}
    for index, line in enumerate(lines):
        indices.setdefault(line, []).append(index)
    return sorted({each for found in indices.values() for each in (*found[:2], found[-1])})


def used(model: Any) -> AbstractContextManager[object]:
    return mh.use(model)


def packed(model: Any) -> AbstractContextManager[object]:
    return mh.use(model, packed=True)


def observed(model: Any) -> AbstractContextManager[object]:
    return mh.observe(model, keep="statistics", probes="entropy")


def layer(_: str) -> nn.Module:
    return mh.MultiHeadAttention(8, 2)


@pytest.mark.parametrize(
    ("make", "name", "context"),
    [(family, "llama", used), (family, "bert", packed), (family, "t5", observed), (layer, "", observed)],
)
def test_ctrl_c_at_any_line_leaves_the_model_as_before(make: Any, name: str, context: Any) -> None:
    model = make(name)

    def run() -> None:
        with suppress(ModelError), context(model):  # `observe` raises, because no layer runs
            pass

    run()  # what happens once per process has happened
    before = state(model)
    stops = chosen(lines_of(run))
    assert len(stops) > 50
    for stop in stops:
        reached = lines_of(run, stop)[-1]
        if state(model) != before:
            gc.collect()  # the frames that were left
        assert state(model) == before, f"interrupted at {reached}"
