"""The errors of multihead: each states what was given, what was expected and how to fix it.

MultiheadError
├── ShapeError       tensors that do not fit each other
├── DtypeError       a dtype or a device that does not fit
├── MaskError        a mask that does not fit, or an object that is not a mask
├── ArgumentError    a size, a name or an option out of range
├── ProbeError       a statistic that is unknown, or that is not available
├── ModelError       a model that cannot be loaded or observed
├── InputError       a file, a text or a path of the user that cannot be used
├── MissingPackageError  an optional package that is not installed
├── RankError        ranks that do not make the same call, or a rank that stopped
└── SlowPathError    a path that is slow, where `strict` forbids it

SlowPathWarning      a path that is slow and was not chosen by the caller
"""

from __future__ import annotations

from math import isfinite
from typing import NoReturn

__all__ = [
    "ArgumentError",
    "DtypeError",
    "InputError",
    "MaskError",
    "MissingPackageError",
    "ModelError",
    "MultiheadError",
    "ProbeError",
    "RankError",
    "ShapeError",
    "SlowPathError",
    "SlowPathWarning",
]


class MultiheadError(Exception):
    """The base class of all errors that multihead raises on purpose.

    Args:
        finding: what was given and what was expected, a whole sentence.
        mend: how to fix it, a whole sentence.

    >>> print(ArgumentError("dropout is 1.5.", "Give a share from 0 to 1."))
    dropout is 1.5. Give a share from 0 to 1.
    """

    def __init__(self, finding: str, mend: str) -> None:
        super().__init__(f"{finding} {mend}")
        self.finding = finding
        self.mend = mend

    def __reduce__(self) -> tuple[type[MultiheadError], tuple[str, str]]:
        """Pickle the two sentences, so that an error can be sent between processes."""
        return type(self), (self.finding, self.mend)


class ShapeError(MultiheadError, ValueError):
    """Tensors whose shapes do not fit each other."""


class DtypeError(MultiheadError, TypeError):
    """A dtype or a device that does not fit."""


class MaskError(MultiheadError, ValueError):
    """A mask that does not fit the call, or an object that is not a mask."""


class ArgumentError(MultiheadError, ValueError):
    """A size, a name or an option out of its range."""


class ProbeError(MultiheadError, ValueError):
    """A statistic that is unknown, or that is not available from this record or kernel."""


class ModelError(MultiheadError, ValueError):
    """A model that cannot be loaded or observed."""


class InputError(MultiheadError, ValueError):
    """A file, a text or a path of the user that cannot be used."""


class MissingPackageError(MultiheadError, ImportError):
    """An optional package is not installed."""


class RankError(MultiheadError, RuntimeError):
    """Ranks (processes of torch.distributed) that do not make the same call, or one of which stopped."""


class SlowPathError(MultiheadError, RuntimeError):
    """A path that would be slow, in a context that forbids it."""


class SlowPathWarning(UserWarning):
    """A path is slow, and the caller did not choose it."""


def check_share(name: str, value: object) -> None:
    """Reject a value that is not a number from 0 to 1.

    >>> check_share("dropout", 0.1)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ArgumentError(f"{name} is {value!r}.", "Give a share from 0 to 1.")


def check_integer(name: str, value: object, *, least: int = 1) -> None:
    """Reject a value that is not an integer, or that is smaller than `least`.

    >>> check_integer("num_heads", 8)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} is {value!r}.", f"Give an integer of at least {least}.")


def reject_scripting(module: object) -> NoReturn:
    """Reject torch.jit.script, which calls `__prepare_scriptable__` of every module before it compiles one.

    Raises:
        ArgumentError: always.
    """
    kind = type(module)
    raise ArgumentError(
        f"torch.jit.script cannot compile {kind.__module__}.{kind.__qualname__}: its masks and the choice of its "
        "kernel are Python objects, which TorchScript does not support.",
        "Use torch.export.export, torch.compile or torch.jit.trace.",
    )


def check_scale(scale: object) -> None:
    """Reject a value that is neither a finite number nor None.

    >>> check_scale(0.125)
    """
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float)) or not isfinite(scale)):
        raise ArgumentError(f"scale is {scale!r}.", "Give a finite number, or None for 1 / sqrt(head_dim).")


def check_slice(name: str, value: object) -> None:
    """Reject a value that is not a slice of integers with a positive step.

    >>> check_slice("queries", slice(0, 64))
    """
    bounds = (value.start, value.stop, value.step) if isinstance(value, slice) else (value,)
    if isinstance(value, slice) and all(each is None or _is_integer(each) for each in bounds):
        if value.step is None or value.step > 0:
            return
        raise ArgumentError(
            f"{name} is {value!r}, whose step is not positive.", "Give a slice with a step of 1 or more."
        )
    one = f"slice({value}, {value + 1})" if _is_integer(value) and value >= 0 else "slice(3, 4)"  # type: ignore[operator]
    raise ArgumentError(
        f"{name} is {value!r}, and must be a slice of integers.",
        f"Give {name}={one} for one, {name}=slice(0, 64) for several in a row, and index the result for others.",
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
