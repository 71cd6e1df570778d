"""Find modules of a running Hugging Face model that compute attention without calling this library.

Some bypasses can only be detected at run time: a layer may compute its own attention at one layer index only, or read
the mask and ignore transformers' AttentionInterface. So forward hooks watch each `nn.Module` that looks up its function
in this interface or reads the mask that `transformers_mask` returned. Each watched module must call this library's
attention at least once during its forward pass.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from multihead.errors import ModelError
from multihead.models.coverage import first_base_using_interface, multiplies_matrices, package_of
from multihead.models.lazy_mask import mask_reads
from multihead.models.pretrained import innermost_model, is_submodule_of
from multihead.models.rejection import selects_our_attention
from multihead.tensors.undo import Undo

ReportBypass = Callable[[str], object]


class AttentionCallCounts(threading.local):
    """Number of calls of this library's attention in this thread.

    Attributes:
        count: number of calls so far.
        counts_at_start: id of a module -> `count` and the number of mask reads, both when the module's newest forward
            pass began.
    """

    def __init__(self) -> None:
        self.count = 0
        self.counts_at_start: dict[int, tuple[int, int]] = {}


call_counts = AttentionCallCounts()


def report_bypassing_modules(undo: Undo, model: nn.Module, models: Mapping[str, Any], report: ReportBypass) -> None:
    """Add hooks that report modules that compute attention or read the mask, but never call this library's attention.

    Args:
        undo: stores how to remove the hooks.
        model: a module that contains models of transformers.
        models: the models of transformers in `model`, by qualified name; those that use another attention are not
            checked.
        report: called with a sentence that names the module.
    """
    modules = dict(model.named_modules())
    attending = [name for name, module in modules.items() if first_base_using_interface(type(module).__mro__)]
    for name, module in modules.items():
        around = innermost_model(name, models)
        attends = name in attending
        kind: Any = type(module)
        if package_of(kind) == "multihead":  # a forward pass of this library's own layers counts as a call
            undo.hook_after_forward(module, _count_call)
        # Submodules of an attention layer, such as the indexer of sparse attention, may read the mask only.
        reads = _may_attend_with_mask(kind) and not any(is_submodule_of(name, each) for each in attending)
        if around is not None and (attends or reads):
            config = getattr(module, "config", models[around].config)
            undo.hook_before_forward(module, _begin_forward)
            undo.hook_after_forward(module, partial(_report_if_bypassed, name, config, report, attends=attends))


def raise_bypass_error(sentence: str) -> None:
    """Raise the error for a module that ran without calling the attention of this library.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        sentence,
        "Let it call the function that transformers' AttentionInterface returns, or run the model with "
        "attn_implementation='eager'.",
    )


def _count_call(*_: object) -> None:
    if not torch.compiler.is_compiling():
        call_counts.count += 1


def _begin_forward(module: nn.Module, _: object) -> None:
    if not torch.compiler.is_compiling():
        call_counts.counts_at_start[id(module)] = call_counts.count, mask_reads.count


def _report_if_bypassed(
    name: str, config: Any, report: ReportBypass, module: nn.Module, *_: object, attends: bool
) -> None:
    if torch.compiler.is_compiling():
        return
    before = call_counts.counts_at_start.pop(id(module), None)
    if before is None or before[0] != call_counts.count or not (attends or before[1] != mask_reads.count):
        return
    if selects_our_attention(config) and not _is_compiled(module):
        read = "" if attends else "read the attention mask, and "
        report(f"{name} ({type(module).__name__}) {read}ran without a call of this library's attention.")


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module, a submodule of it, or its caller is compiled, so that its calls cannot be counted."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if get_eval_frame_callback() not in (None, False):
        return True
    return any(
        hasattr(each, "_orig_mod")
        or vars(each).get("_compiled_call_impl")
        or hasattr(each.forward, "_torchdynamo_orig_callable")
        for each in module.modules()
    )


@cache
def _may_attend_with_mask(kind: Any) -> bool:
    """Whether the forward of a class multiplies matrices and takes a mask, and so may compute attention."""
    if package_of(kind) in ("multihead", "torch"):
        return False
    parameters = inspect.signature(kind.forward).parameters.values()
    return multiplies_matrices(kind) and any(
        "mask" in each.name or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters
    )
