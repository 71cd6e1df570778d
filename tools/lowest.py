"""Print the lowest version of everything that the package asks for, as constraints for pip: `make lowest`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_RANGE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9.]+)")


def main() -> None:
    """Print a line a package: those that are needed, and those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: Iterable[list[str]] = project["optional-dependencies"].values()
    for line in lowest([*project["dependencies"], *(each for extra in extras for each in extra)]):
        print(line)


def lowest(requirements: Iterable[str]) -> list[str]:
    """Turn ranges into their lower ends; the package's own extras are no range.

    Raises:
        ValueError: a range has no lower end, or more than that.

    >>> lowest(["torch>=2.11", "multihead[hf]"])
    ['torch==2.11']
    """
    found = []
    for requirement in requirements:
        if requirement.startswith("multihead["):
            continue
        matched = _RANGE.fullmatch(requirement)
        if matched is None:
            raise ValueError(f"{requirement!r} is no range of the form name>=version. Write it so.")
        found.append(f"{matched['name']}=={matched['version']}")
    return found


if __name__ == "__main__":
    main()
