"""The modules that moved: importing one by its former name raises an error with its present name."""

from __future__ import annotations

_NOW = {  # former module name -> present one, both without "multihead."
    "analysis": "record.analysis",
    "batch_dims": "kernels.batch_dims",
    "cache": "layer.cache",
    "call": "kernels.call",
    "claims": "models.claims",
    "doctor": "cli.diagnosis",
    "escaping": "locale.escaping",
    "explanation": "kernels.explanation",
    "heads": "layer.heads",
    "hooks": "models",
    "looking": "viewer.looking",
    "optional": "errors.optional",
    "packing": "layer.packing",
    "parts": "kernels.parts",
    "plan": "kernels.plan",
    "qk_norm": "layer.qk_norm",
    "quantised": "kernels.quantised",
    "scores.relative": "scores.bias",
    "sequence_split": "kernels.sequence_split",
    "shapes": "tensors.shapes",
    "spelling": "errors.arguments",
    "tracing": "tensors.tracing",
    "widget": "viewer.widget",
}


def check_not_moved(name: str) -> None:
    """Raise ModuleNotFoundError, with the present name, if a module of the package has moved."""
    package, _, rest = name.partition(".")
    if rest in _NOW:  # the keys include packages, which Python imports before their modules
        now = f"{package}.{_NOW[rest]}"
        raise ModuleNotFoundError(f"There is no module {name}: it has moved. Import {now}.", name=name)
