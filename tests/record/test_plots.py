"""Plots of maps, statistics and grids: what they show, and on which scale."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import multihead as mh
from multihead.errors import ArgumentError, ModelError, ProbeError
from multihead.probes.catalogue import statistic_of_heads
from multihead.record.head_numbers import HeadColumn
from multihead.record.texts import Text

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    matplotlib.pyplot.close("all")


def recorded(tokens: int = 6, **options: Any) -> mh.Record:
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    with torch.no_grad(), mh.observe(layer, **options) as seen:
        layer(torch.randn(1, tokens, 8), mask=mh.masks.Causal())
    return seen


def test_a_map_shows_every_weight_with_tokens_as_labels_on_a_scale_to_100_percent() -> None:
    seen = recorded()
    seen.set_text(Text(tokens=["[CLS]", "the", " cat", " ", "sat", "a\x1b[31mb"]))
    ax = seen.plot(0, 1)
    weights = seen.layers[0].weights(1).numpy()
    drawn = ax.images[0].get_array()
    np.testing.assert_allclose(drawn.filled(0), weights, atol=1e-6)
    assert np.array_equal(drawn.mask, np.triu(np.ones((6, 6), bool), 1))  # hidden cells are no weights of 0
    assert ax.images[0].get_clim() == (0, 1)
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["[CLS]", "the", "cat", "␣", "sat", "a\\x1b[31mb"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    assert ax.get_title() == "layer 0, head 1: MultiHeadAttention"


def test_a_part_of_a_map_is_placed_at_its_positions() -> None:
    ax = recorded().plot(0, 0, queries=slice(2, 6), keys=slice(1, 3))
    assert ax.images[0].get_array().shape == (4, 2)
    assert ax.images[0].get_extent() == [1, 3, 6, 2]


def test_a_long_map_is_drawn_in_means_and_the_scale_ends_at_the_largest() -> None:
    seen = recorded(1100)
    ax = seen.plot(0, 0)
    drawn = ax.images[0].get_array()
    assert drawn.shape == (367, 367)  # blocks of 3 x 3
    end = ax.images[0].get_clim()[1]
    assert drawn.max() <= end <= 2.5 * drawn.max()
    assert ax.images[0].colorbar.ax.get_ylabel() == "attention weight, mean of 3 x 3"


def test_a_statistic_has_a_cell_per_layer_and_head() -> None:
    seen = recorded()
    ax = seen.plot("entropy")
    np.testing.assert_allclose(ax.images[0].get_array(), seen.layers[0].means()["entropy"][None])
    assert ax.images[0].colorbar.ax.get_ylabel() == "entropy (nats)"


def test_effects_have_a_signed_scale_and_are_hatched_within_two_standard_errors() -> None:
    seen = recorded()
    layer = seen.layers[0]
    shown = statistic_of_heads("effect", "loss", "nats", "zero", more_is_better=False)
    effects = torch.tensor([[-0.4, 0.1], [-0.5, -0.1], [-0.45, 0.05]], dtype=torch.float64)  # (texts, heads)
    seen.add(SimpleNamespace(columns=lambda: [HeadColumn(shown, {layer.name: effects})]))
    ax = seen.plot(shown.name)
    (image,) = ax.images
    np.testing.assert_allclose(image.get_array(), effects.mean(0)[None])
    below, zero, quarter, above = (image.norm(share * 0.45) for share in (-1, 0, 0.25, 1))
    assert (below, zero, quarter, above) == pytest.approx((0, 0.5, 0.75, 1))
    assert [(patch.get_x(), patch.get_hatch()) for patch in ax.patches] == [(0.5, "////")]


def test_a_grid_has_a_map_per_head_on_one_scale() -> None:
    figure = recorded(200).plot_grid()
    maps = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title() for ax in maps] == ["H0", "H1"]
    assert {ax.images[0].get_array().shape for ax in maps} == {(67, 67)}
    assert len({ax.images[0].get_clim() for ax in maps}) == 1


def test_a_plot_is_drawn_on_axes_that_are_passed() -> None:
    _, axes = matplotlib.pyplot.subplots(1, 2)
    seen = recorded()
    assert seen.plot(0, 0, ax=axes[0]) is axes[0]
    assert seen.plot("entropy", ax=axes[1]) is axes[1]


def test_what_does_not_exist_is_rejected() -> None:
    seen = recorded(probes="entropy")
    with pytest.raises(ProbeError) as caught:
        seen.plot("received")
    assert str(caught.value) == (
        "There is no statistic 'received' in the record. Give one of entropy; or a layer and a head, such as "
        "plot(0, 3)."
    )
    with pytest.raises(ProbeError, match="There is no statistic 0 in the record"):
        seen.plot(0)
    with pytest.raises(ModelError, match="There is no layer 7"):
        seen.plot(7, 0)
    with pytest.raises(ArgumentError):
        seen.plot(0, 2)
    with pytest.raises(ArgumentError, match="Nothing was recorded"):
        mh.Record().plot_grid()
    with pytest.raises(ProbeError):
        recorded(keep="statistics").plot(0, 0)


@pytest.mark.parametrize(("backend", "is_open"), [("module://matplotlib_inline.backend_inline", False), ("agg", True)])
def test_a_grid_is_shown_once_in_a_notebook_and_stays_open_for_a_script(backend: str, is_open: bool) -> None:
    if "inline" in backend:
        pytest.importorskip("matplotlib_inline")
    plt, seen = pytest.importorskip("matplotlib.pyplot"), recorded()
    plt.switch_backend(backend)
    try:
        figure = seen.plot_grid()  # a notebook shows the result of a cell, and each figure that is open at its end
        assert (figure.number in plt.get_fignums()) == is_open
        assert plt.fignum_exists(seen.plot(0, 1).figure.number)  # axes are no picture, so their figure stays open
    finally:
        plt.switch_backend("agg")
