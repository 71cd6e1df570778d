"""The processes of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.parallel.processes import Processes, processes


@pytest.fixture(scope="package")
def four() -> Iterator[Processes]:
    """Four gloo processes, started once for all files."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this build of PyTorch has no gloo")
    with processes() as started:
        yield started
