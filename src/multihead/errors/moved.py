"""Modules that moved: importing one by its old name raises an error with the new name."""

from __future__ import annotations

_NEW_MODULE_NAMES = {  # old name within the package -> new name
    "analysis": "multihead.record.analysis",
    "batch_dims": "multihead.kernels.batch_dims",
    "cache": "multihead.layer.cache",
    "call": "multihead.kernels.call",
    "claims": "multihead.models.claims",
    "doctor": "multihead.cli.diagnosis",
    "escaping": "multihead.locale.escaping",
    "explanation": "multihead.kernels.explanation",
    "heads": "multihead.layer.heads",
    "hooks": "multihead.models",
    "lab": "multihead_lab",
    "looking": "multihead.viewer.looking",
    "optional": "multihead.errors.optional",
    "packing": "multihead.layer.packing",
    "parts": "multihead.kernels.parts",
    "plan": "multihead.kernels.plan",
    "qk_norm": "multihead.layer.qk_norm",
    "quantised": "multihead.kernels.quantised",
    "scores.relative": "multihead.scores.bias",
    "sequence_split": "multihead.kernels.sequence_split",
    "shapes": "multihead.tensors.shapes",
    "spelling": "multihead.errors.arguments",
    "tracing": "multihead.tensors.tracing",
    "widget": "multihead.viewer.widget",
}


def check_not_moved(name: str) -> None:
    """Raise ModuleNotFoundError, with the new name, if a module of the package has moved."""
    rest = name.partition(".")[2]
    if (moved_to := _NEW_MODULE_NAMES.get(rest)) is not None:  # a package is imported before the modules in it
        raise ModuleNotFoundError(f"There is no module {name}: it has moved. Import {moved_to}.", name=name)


# words for which there is no attribute of `multihead` -> where it is
_ELSEWHERE = {
    **dict.fromkeys(("RoPE", "Rope", "RotaryEmbedding"), "multihead.Rotary"),
    **dict.fromkeys(("KVCache", "Cache", "DynamicCache"), "multihead.KeyValueCache"),
    **dict.fromkeys(("MHA", "Attention"), "multihead.MultiHeadAttention"),
    "MultiheadAttention": "multihead.MultiHeadAttention, or PyTorch's as multihead.compat.torch_nn.MultiheadAttention",
    **dict.fromkeys(("replace", "from_torch", "to_torch"), "multihead.compat.torch_nn.{name}"),
    **dict.fromkeys(
        ("Full", "Causal", "Window", "Lengths", "Documents", "Prefix", "Keep", "Drop", "Mask"), "multihead.masks.{name}"
    ),
    **dict.fromkeys(("ALiBi", "T5Bias", "RelativeBias", "LearnedBias"), "multihead.scores.{name}"),
    **dict.fromkeys(("Probe", "PROBES", "offset_mass", "tokens_mass"), "multihead.probes.{name}"),
    "Kind": "multihead.kinds.Kind",
    **dict.fromkeys(("load", "load_model"), "multihead.models.load"),
    "load_record": "multihead.Record.load",
    "view": "Record.view() in a notebook, or the command multihead view",
    "report": "Record.report(path)",
    "compare": "before.changed(after) of two records, or the command multihead compare",
    **dict.fromkeys(("shard", "unshard", "context_parallel", "parallelize"), "multihead.parallel.{name}"),
}


def advice_for_name(name: str) -> str:
    """Return the end of the message about an attribute that `multihead` does not have: where it is, if that is known.

    >>> advice_for_name("Causal"), advice_for_name("anything")
    (': use multihead.masks.Causal', '')
    """
    found = _ELSEWHERE.get(name)
    return "" if found is None else f": use {found.format(name=name)}"
