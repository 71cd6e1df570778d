"""The windows of an image are one text: its patches are counted through all windows, in the order of the layer."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from tests.interventions.changed_eager import changed_eager, replaced, scaled
from tests.interventions.tiny_models import batch, double

WINDOWS, PATCHES = 16, 4  # of an image in the first stage


def test_positions_count_through_the_windows_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("swin", monkeypatch), batch("swin")
    where = torch.zeros(2, WINDOWS, PATCHES, dtype=torch.bool)
    where[1, 3, 2] = True  # the second image
    with torch.no_grad(), changed_eager(model, {1: scaled({1: 0}, where.flatten(0, 1))}):
        expected = model(**inputs)[0]
    with torch.no_grad(), mh.ablate(model, "L1 H1", positions=3 * PATCHES + 2, samples=[1]):
        found = model(**inputs)[0]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_only_the_first_patch_of_an_image_has_the_mean_of_first_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("swin", monkeypatch), batch("swin")
    with torch.no_grad(), changed_eager(model, {}) as plain:
        model(**inputs)
    patches = plain.outputs[1][:, :, 0].view(2, WINDOWS * PATCHES, -1)  # those of head 0
    vectors = patches[:, 1:].mean((0, 1)).expand(patches.shape).clone()
    vectors[:, 0] = patches[:, 0].mean(0)
    with torch.no_grad(), changed_eager(model, {1: replaced(0, vectors.view(2 * WINDOWS, PATCHES, -1))}):
        expected = model(**inputs)[0]
    with torch.no_grad(), mh.ablate(model, "L1 H0", by="mean", reference=inputs):
        found = model(**inputs)[0]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
