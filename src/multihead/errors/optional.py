"""Check that optional packages are installed, with an error that names the extra that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from multihead.errors import MissingPackageError


def require(*packages: str, purpose: str, extra: str | None) -> None:
    """Check that packages are installed, before they are imported where they are used.

    `purpose` says what needs the packages, and begins the error message. `extra` is the extra of multihead that
    installs them; if it is None, the message says to install the packages by name.

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
    except ImportError:  # an import hook blocks the package
        return False
