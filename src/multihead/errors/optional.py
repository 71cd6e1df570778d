"""Check that optional packages are installed, with an error that names the extra that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from multihead.errors import MissingPackageError


def require(*packages: str, purpose: str, extra: str | None) -> None:
    """Raise a MissingPackageError if one of the packages is not installed.

    `purpose` is what needs the packages; the error message starts with it. `extra` is the extra of multihead that
    installs the packages; if None, the message names the packages to install.

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
