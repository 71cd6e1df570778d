"""What tests of several kernels use."""

from __future__ import annotations

import pytest

from multihead import functional


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a call needs a plan."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the call was planned")

    monkeypatch.setattr(functional, "attend", fail)
