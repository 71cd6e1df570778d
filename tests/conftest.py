"""The ground every test stands on: no network, one seed, no clock in property tests."""

from __future__ import annotations

import os

# Read once, when huggingface_hub is imported: it must be set before anything else is.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

# A first call of torch in a process can take seconds, so a deadline would fail at random.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    """Give each test the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)
