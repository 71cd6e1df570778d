"""Print the lowest allowed version of every dependency as constraints for pip: `make lowest`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Dependencies of those lowest versions that need older versions than the pins. Everything else stays pinned, so that
# pip need not search.
FREE = frozenset(
    {"huggingface-hub", "ml-dtypes", "pandas", "setuptools", "tokenizers", "typer", "markdown-it-py", "protobuf"}
)
_RANGE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[a-z,]+\])?>=(?P<version>[0-9.]+)")  # with extras or without


def main() -> None:
    """Print one line per package: the lowest version of each range, and the pins of all other packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: Iterable[list[str]] = project["optional-dependencies"].values()
    ends = lowest([*project["dependencies"], *(each for extra in extras for each in extra)])
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    print(*ends, *others(pinned, ends), sep="\n")


def lowest(requirements: Iterable[str]) -> list[str]:
    """Return the lowest version of each range, the highest of them if a package has several; skip our own extras.

    Raises:
        ValueError: a requirement has another form than name>=version.

    >>> lowest(["torch>=2.9", "multihead[hf]", "torch>=2.11", "ray[data]>=2.50"])
    ['torch==2.11', 'ray==2.50']
    """
    found: dict[str, str] = {}
    for requirement in requirements:
        if requirement.startswith("multihead["):
            continue
        matched = _RANGE.fullmatch(requirement)
        if matched is None:
            raise ValueError(f"{requirement!r} is not of the form name>=version. Write it in that form.")
        name, version = matched["name"], matched["version"]
        found[name] = max(version, found.get(name, "0"), key=_release)
    return [f"{name}=={version}" for name, version in found.items()]


def others(pinned: Iterable[str], ends: Iterable[str]) -> list[str]:
    """Return the pins of the packages that are neither in `ends` nor in FREE.

    >>> others(["# pins", "torch==2.13.0", "pytest==9.2.0", "setuptools==84.2.1"], ["torch==2.11"])
    ['pytest==9.2.0']
    """
    taken = FREE | {_name(line) for line in ends}
    return [line for line in pinned if "==" in line and _name(line) not in taken]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _name(line: str) -> str:
    return line.split("==", maxsplit=1)[0].lower().replace("_", "-")


if __name__ == "__main__":
    main()
