"""Check that optional packages are installed, with an error that names the extra that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from multihead.errors import MissingPackageError


def require(*packages: str, purpose: str, extra: str | None) -> None:
    """Check that packages are installed, before they are imported where they are used.

    The purpose, which needs them, is the subject of the error message. The extra of multihead installs them; where it
    is None, pip installs them by name.

    >>> require("torch", purpose="Attention", extra=None)
    """
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        target = " ".join(missing) if extra is None else f'"multihead[{extra}]"'
        named = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise MissingPackageError(
            f"{purpose} needs {named}, which {'is' if len(missing) == 1 else 'are'} not installed.",
            f"Run pip install {target}.",
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # an import hook that blocks it
        return False
