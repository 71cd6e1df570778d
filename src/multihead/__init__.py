"""Multi-head attention for PyTorch that is fast on any mask, and whose every head can be inspected.

Nothing is imported until it is used, so that `import multihead` takes a few milliseconds (PEP 562); `__init__.pyi` has
the same names for type checkers and editors. The exception: the torch operators of the library are registered as soon
as torch is imported, so that saved programs that call them can be loaded.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULES = {  # public name -> the module that defines it
    "Census": "multihead.counting.result",
    "HeadMeans": "multihead.interventions.means",
    "Importance": "multihead.interventions.importance",
    "KeyValueCache": "multihead.layer.cache",
    "Measure": "multihead.interventions.measures",
    "MultiHeadAttention": "multihead.layer",
    "OffTogether": "multihead.interventions.together",
    "Patching": "multihead.interventions.patch",
    "QKNorm": "multihead.layer.qk_norm",
    "Record": "multihead.observation.record",
    "Rotary": "multihead.rotary",
    "Watch": "multihead.observation.watch",
    "ablate": "multihead.interventions.ablate",
    "attention": "multihead.functional",
    "attention_weights": "multihead.functional",
    "attention_with_logsumexp": "multihead.functional",
    "census": "multihead.counting.run",
    "class_logit": "multihead.interventions.measures",
    "explain": "multihead.functional",
    "head_means": "multihead.interventions.means",
    "importance": "multihead.interventions.importance",
    "logit_difference": "multihead.interventions.measures",
    "look": "multihead.viewer.looking",
    "merge_heads": "multihead.layer.heads",
    "observe": "multihead.observation.observe",
    "off_together": "multihead.interventions.together",
    "pack": "multihead.layer.packing",
    "patch": "multihead.interventions.patch",
    "places": "multihead.observation.places",
    "qk_clip_factors": "multihead.observation.watch",
    "scale_heads": "multihead.interventions.ablate",
    "split_heads": "multihead.layer.heads",
    "statistics": "multihead.functional",
    "strict": "multihead.kernels.slow_paths",
    "unpack": "multihead.layer.packing",
    "use": "multihead.models.use",
}
# Public packages, imported when they are first used.
_PACKAGES = ("compat", "errors", "export", "kernels", "kinds", "masks", "models", "parallel", "probes", "scores")

__all__ = [
    "Census",
    "HeadMeans",
    "Importance",
    "KeyValueCache",
    "Measure",
    "MultiHeadAttention",
    "OffTogether",
    "Patching",
    "QKNorm",
    "Record",
    "Rotary",
    "Watch",
    "ablate",
    "attention",
    "attention_weights",
    "attention_with_logsumexp",
    "census",
    "class_logit",
    "compat",
    "errors",
    "explain",
    "export",
    "head_means",
    "importance",
    "kernels",
    "kinds",
    "logit_difference",
    "look",
    "masks",
    "merge_heads",
    "observe",
    "off_together",
    "pack",
    "parallel",
    "patch",
    "places",
    "probes",
    "qk_clip_factors",
    "scale_heads",
    "scores",
    "split_heads",
    "statistics",
    "strict",
    "unpack",
    "use",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"multihead.{name}")
    if name in _MODULES:
        found = getattr(import_module(_MODULES[name]), name)
        globals()[name] = found  # the next access does not call __getattr__
        return found
    advice = "" if name.startswith("_") else import_module("multihead.errors.moved").advice_for_name(name)
    raise AttributeError(f"module 'multihead' has no attribute {name!r}{advice}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _RegisterOperatorsWithTorch(MetaPathFinder):
    """Import hook that registers this library's torch operators right after torch itself is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        if spec is not None and spec.loader is not None:
            import_torch = spec.loader.exec_module

            def import_and_register(module: ModuleType) -> None:
                import_torch(module)
                _register_operators()

            spec.loader.exec_module = import_and_register  # type: ignore[method-assign]
        return spec


class _FinderOfMovedModules(MetaPathFinder):
    """Raises an error that gives the new name of a module when it is imported by its old name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.startswith("multihead."):
            import_module("multihead.errors.moved").check_not_moved(fullname)


sys.meta_path.append(_FinderOfMovedModules())


def _register_operators() -> None:
    import_module("multihead.kernels.native.operator")


if "torch" in sys.modules:
    _register_operators()
else:
    sys.meta_path.insert(0, _RegisterOperatorsWithTorch())
