"""A model is as before after every way to change it, wherever Ctrl-C interrupts and in whatever order uses end."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from torch import nn
from transformers.utils import logging as hf_logging

import multihead as mh
from multihead.compat.torch_nn import replace
from multihead.compat.torch_nn.replace import Replaced
from multihead.errors import ModelError
from multihead.interventions.ablate import Intervention
from multihead.kernels import call, head_changes, sequence_split, slow_paths
from multihead.kernels.native import library
from multihead.models import pretrained
from multihead.models.loading import silence_transformers
from multihead.models.packed import _padded_contexts
from multihead.models.source import hub_access
from multihead.models.use import Used
from multihead.tensors import tracing
from multihead.tensors.threads import set_torch_threads
from multihead.tensors.undo import Undo
from tests.families import batch_of, family

SRC = Path(mh.__file__).parent
CHANGING = {
    str(SRC / f"{each}.py")
    for each in (
        "compat/torch_nn/replace",
        "interventions/ablate",
        "interventions/followed",
        "kernels/call",
        "kernels/head_changes",
        "kernels/native/library",
        "kernels/sequence_split",
        "kernels/slow_paths",
        "models/bypass",
        "models/config_in_use",
        "models/guarded_cache",
        "models/huggingface",
        "models/loading",
        "models/packed",
        "models/pretrained",
        "models/source",
        "models/use",
        "observation/observe",
        "observation/watch",
        "tensors/threads",
        "tensors/tracing",
        "tensors/undo",
    )
}

# Before the first line of these methods nothing can know that a block begins or ends.
FIRST_LINES = {
    (code.co_filename, next(line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno))
    for kind in (Used, Replaced, mh.Watch, Intervention)
    for code in (kind.__enter__.__code__, kind.__exit__.__code__)
}
# A lock is acquired and released in C, where no signal is handled.
LOCKS = {
    (name, number)
    for name in CHANGING
    for number, line in enumerate(Path(name).read_text(encoding="utf-8").splitlines(), 1)
    if re.fullmatch(r"with \w*_lock:", line.strip())
}
UNINTERRUPTED = LOCKS | FIRST_LINES


def state(model: nn.Module) -> dict[str, Any]:
    """Return everything that a use may change."""
    places = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    hooks = {
        (name, place): len(getattr(module, place))
        for name, module in model.named_modules()
        for place in (*places, "_forward_hooks_always_called")
    }
    config = getattr(model, "config", None)
    return {
        "hooks": hooks,
        "choice": (id(config), getattr(config, "_attn_implementation", None)),
        "classes": [type(each) for each in model.modules()],
        "listeners": call.listeners(),
        "changes": head_changes.active_changes,
        "uncompiled": list(tracing._users_of_uncompiled),
        "padded": _padded_contexts.get(),
        "trackers": pretrained._active_trackers.get(),
        "strict": slow_paths._strict.get(),
        "split": sequence_split.active_split,
        "instruction set": library._forced_instruction_set.get(),
        "threads": torch.get_num_threads(),
        "offline": huggingface_hub.constants.HF_HUB_OFFLINE,
        "verbosity": hf_logging.get_verbosity(),
    }


Line = tuple[str, int]


def lines_of(run: Callable[[], object], stop: int = -1) -> list[Line]:
    """Run something and return the lines that change a model, as they run; press Ctrl-C before one of them.

    Args:
        run: what runs.
        stop: the index of the line, or -1.
    """
    found: list[Line] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in CHANGING or frame.f_code is Undo.__del__.__code__:
            return None
        if event == "line" and (line := (frame.f_code.co_filename, frame.f_lineno)) not in UNINTERRUPTED:
            found.append(line)
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
    """Return the indices at which each line runs for the first and the last time."""
    indices: dict[Line, list[int]] = {}
    for index, line in enumerate(lines):
        indices.setdefault(line, []).append(index)
    return sorted({each for found in indices.values() for each in (found[0], found[-1])})


def used(model: Any) -> AbstractContextManager[object]:
    return mh.use(model)


def packed(model: Any) -> AbstractContextManager[object]:
    return mh.use(model, packed=True)


def observed(model: Any) -> AbstractContextManager[object]:
    return mh.observe(model, keep="statistics", probes="entropy")


def ablated(model: Any) -> AbstractContextManager[object]:
    return mh.ablate(model, "L0 H0")


def watched(model: Any) -> AbstractContextManager[object]:
    return mh.Watch(model, every=1, probes="entropy")


def replaced(model: Any) -> AbstractContextManager[object]:
    return replace(model, inplace=True)


@contextmanager
def everything_else(_: Any) -> Iterator[None]:
    with (
        mh.strict(),
        library.using_instruction_set(library.chosen_instruction_set().name),
        set_torch_threads(1),
        silence_transformers(),
        hub_access(online=False),
        sequence_split.use_split(None),
        tracing.hide_from_jit_trace(),
    ):
        yield


def layer(_: str) -> nn.Module:
    return mh.MultiHeadAttention(8, 2)


def encoder(_: str) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("make", "name", "context"),
    [
        (family, "llama", used),
        (family, "bert", packed),
        (family, "llama", observed),
        (layer, "", observed),
        (layer, "", ablated),
        (layer, "", watched),
        (layer, "", everything_else),
        (encoder, "", replaced),
    ],
)
def test_ctrl_c_at_any_line_leaves_the_model_as_before(make: Any, name: str, context: Any) -> None:
    model = make(name)

    def run() -> None:
        with suppress(ModelError), context(model):  # `observe` raises, because no layer runs
            pass

    run()  # what happens once per process has happened
    gc.freeze()  # what other tests left is in no collection below
    before = state(model)
    stops = chosen(lines_of(run))
    assert len(stops) > 10
    for stop in stops:
        reached = lines_of(run, stop)[-1]
        if state(model) != before:
            gc.collect()  # the frames that were left
        assert state(model) == before, f"interrupted at {reached}"


def test_ctrl_c_during_deletion_of_a_handle_is_not_lost() -> None:
    undo = Undo()
    undone: list[str] = []

    def interrupt_once() -> None:
        undone.append("interrupted")
        if len(undone) == 1:
            raise KeyboardInterrupt

    undo.add_step(lambda: undone.append("undone"))
    undo.add_step(interrupt_once)
    handles = [undo]
    del undo
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it is raised soon after the deletion
            handles.clear()
            end = time.monotonic() + 60  # on a busy machine the thread that raises it starts late
            while time.monotonic() < end:
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert undone == ["interrupted", "interrupted", "undone"]


HANDLES_AT_EXIT = """
import torch, multihead as mh
from transformers import BertConfig, BertModel
from multihead.compat.torch_nn import replace

sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
models = [BertModel(BertConfig(**sizes)) for _ in range(6)]
kept = mh.use(models[0]), mh.use(models[1], packed=True), replace(torch.nn.TransformerEncoderLayer(8, 2))
entered = [mh.use(models[2]), mh.observe(models[3]), mh.ablate(models[4], "L0 H0"), mh.Watch(models[5], every=1)]
entered += [mh.observe(mh.MultiHeadAttention(8, 2)), mh.strict(), replace(torch.nn.TransformerEncoderLayer(8, 2))]
for each in entered:
    each.__enter__()
for model in models:
    model(torch.tensor([[1, 2, 3]]))
"""


def test_handles_that_a_script_keeps_print_nothing_when_python_exits() -> None:
    done = subprocess.run([sys.executable, "-c", HANDLES_AT_EXIT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


class TestOverlap:
    """Uses of one model that overlap, in any order: each receives its calls, and the last one restores the model."""

    def test_of_two_records_each_has_the_calls_made_while_it_was_open(self) -> None:
        model, batch = family("llama"), batch_of("llama")
        before = state(model)
        first, second = mh.observe(model), mh.observe(model)
        early = first.__enter__()
        late = second.__enter__()
        model(**batch)
        first.__exit__(None, None, None)
        model(**batch)
        model(**batch)
        second.__exit__(None, None, None)
        assert [[layer.num_samples for layer in record.layers] for record in (early, late)] == [[2, 2], [6, 6]]
        assert state(model) == before

    @pytest.mark.parametrize("contexts", [(used, observed), (observed, used), (packed, used), (used, packed)])
    @pytest.mark.parametrize("first_ends_first", [True, False])
    def test_of_two_kinds_of_use_the_last_one_restores_the_model(self, contexts: Any, first_ends_first: bool) -> None:
        model, batch = family("llama"), batch_of("llama", padding="right")
        before = state(model)
        both = [context(model) for context in contexts]
        for context in both:
            context.__enter__()
        for number, context in enumerate(both if first_ends_first else both[::-1]):
            assert model.config._attn_implementation == "multihead", number
            model(**batch)
            context.__exit__(None, None, None)
        assert state(model) == before

    def test_of_two_uses_with_one_hook_each_removes_its_own(self) -> None:
        module = nn.Identity()
        ran: list[int] = []
        hook = lambda *_: ran.append(1)
        with Undo() as outer:
            outer.hook_before_forward(module, hook)
            outer.hook_after_forward(module, hook)
            with Undo() as inner:
                inner.hook_before_forward(module, hook)
                inner.hook_after_forward(module, hook)
            module(torch.zeros(1))
            assert len(ran) == 2
        module(torch.zeros(1))
        assert len(ran) == 2

    def test_of_a_permanent_use_within_another_one_nothing_is_left(self) -> None:
        model = family("llama")
        before = state(model)
        with mh.use(model):
            mh.use(model).undo()
            assert model.config._attn_implementation == "multihead"
        assert state(model) == before
        mh.use(model)
        model.set_attn_implementation("eager")
        with suppress(ModelError), mh.observe(model):
            pass
        assert model.config._attn_implementation == "eager"

    def test_of_tasks_that_take_turns_each_record_has_its_own_calls(self) -> None:
        model, batch = family("llama"), batch_of("llama")
        before = state(model)

        async def task(number: int) -> list[int]:
            await asyncio.sleep(0.001 * number)
            with mh.observe(model) as record:
                for _ in range(2):
                    model(**batch)
                    await asyncio.sleep(0.002)
            return [layer.num_samples for layer in record.layers]

        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(*(task(number) for number in range(3)))

        assert asyncio.run(all_of_them()) == [[4, 4]] * 3
        assert state(model) == before

    def test_of_threads_each_record_has_its_own_calls_and_tokens(self) -> None:
        model, batch = family("llama"), batch_of("llama", padding="right")
        before = state(model)

        def read_by(number: int) -> tuple[list[list[int]], list[list[int]]]:
            ids = (batch["input_ids"] + number) % 90 + 3
            with torch.no_grad(), mh.observe(model) as record:
                model(input_ids=ids, attention_mask=batch["attention_mask"])
            assert [layer.num_samples for layer in record.layers] == [2, 2]
            given = [row[mask.bool()].tolist() for row, mask in zip(ids, batch["attention_mask"], strict=True)]
            return [text.ids.tolist() for text in record.texts if text.ids is not None], given

        with ThreadPoolExecutor(4) as pool:
            for found, given in pool.map(read_by, range(24)):
                assert found == given
        assert state(model) == before
