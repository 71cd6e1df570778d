"""Read the rows that a benchmark keeps while it runs, so that one that was broken off can go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")


def kept_rows(journal: Path, made: Callable[[dict[str, Any]], R]) -> list[R]:
    """Read the rows that were kept, a line each; a line that was cut off is none.

    Args:
        journal: the file, which need not be there.
        made: makes a row of what a line holds.
    """
    rows = []
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []:
        try:
            rows.append(made(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return rows
