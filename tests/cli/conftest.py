"""The commands run without lines of progress here: how long a step takes depends on the machine."""

from __future__ import annotations

import pytest

from multihead.cli import progress


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BEFORE_FIRST_LINE", 1e6)
