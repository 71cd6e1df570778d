"""A model is as before after every way to change it, wherever Ctrl-C interrupts and in whatever order uses end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import multihead as mh
from multihead import call, tracing
from multihead.hooks import undo
from multihead.hooks.undo import Undo
from multihead.hooks.use import Used
from tests.families import batch_of, family

SRC = Path(mh.__file__).parent
CHANGING = {
    str(SRC / each)
    for each in ("call.py", "tracing.py", "hooks/undo.py", "hooks/use.py", "hooks/huggingface.py", "hooks/bypass.py")
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


def interrupted(run: Callable[[], object], number: int) -> bool:
    """Run something and press Ctrl-C at one line of the code that changes a model; return whether there is that line."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in CHANGING or frame.f_code in UNINTERRUPTED:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            run()
    finally:
        sys.settrace(before)
    return left <= 0


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
        with context(model):
            pass

    run()  # what happens once per process has happened
    before = state(model)
    number = 1
    while interrupted(run, number):
        assert state(model) == before, f"interrupted at line event {number}"
        number += 1
    assert number > 30
