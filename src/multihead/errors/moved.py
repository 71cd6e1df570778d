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
