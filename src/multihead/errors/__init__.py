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
└── SlowPathError    a kernel or fallback that is slow, where `strict` forbids it

SlowPathWarning      a kernel or fallback that is slow, and that the caller did not choose
"""

from __future__ import annotations

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
        finding: a sentence that states what was given and what was expected.
        mend: a sentence that states how to fix the error; empty if the finding states it.

    >>> print(ArgumentError("dropout is 1.5.", "Give a number from 0 to 1."))
    dropout is 1.5. Give a number from 0 to 1.
    """

    def __init__(self, finding: str, mend: str) -> None:
        super().__init__(f"{finding} {mend}".rstrip())
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
    """A file, a text or a path given by the user that cannot be used."""


class MissingPackageError(MultiheadError, ImportError):
    """An optional package is not installed."""


class RankError(MultiheadError, RuntimeError):
    """Ranks (processes of torch.distributed) made different calls, or one rank stopped."""


class SlowPathError(MultiheadError, RuntimeError):
    """A slow kernel or fallback would be used, and `strict` forbids it."""


class SlowPathWarning(UserWarning):
    """A slow kernel or fallback is used, and the caller did not choose it."""
