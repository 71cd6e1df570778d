"""A record of an earlier version, which lacks two statistics, shows the kinds of heads that it showed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.masks import Causal
from multihead.masks.base import UnknownMask
from multihead.probes.catalogue import NEAR_MASS, SEPARATOR_MASS
from multihead.record.layer import layer_profiles
from multihead.scores import RelativeBias, offsets

SEPARATOR = 9
EARLIER = [name for name in mh.probes.DEFAULT if name not in (NEAR_MASS.name, SEPARATOR_MASS.name)]


class Reader(nn.Module):
    """Heads whose weights fall with the distance from a place."""

    def __init__(self, slope: float, centre: float) -> None:
        super().__init__()
        self.slope, self.centre = slope, centre
        self.embed = nn.Embedding(10, 16)
        self.layer = mh.MultiHeadAttention(16, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        bias = RelativeBias(-self.slope * (offsets(40, 40)[None] - self.centre).abs())
        output: Tensor = self.layer(0.2 * self.embed(input_ids), mask=Causal(), bias=bias)
        return output


BETWEEN: Any = {"slope": 1.0, "centre": -0.5}  # around the token itself and the one before


def seen(probes: Any = None, first: int = 1, slope: float = 0.5, centre: float = 0.0, **options: Any) -> mh.Record:
    torch.manual_seed(3)
    model, ids = Reader(slope, centre).eval(), torch.randint(1, 9, (1, 40))
    ids[0, 0], ids[0, 20], ids[0, 39] = first, SEPARATOR, SEPARATOR
    with torch.no_grad(), mh.observe(model, probes=probes, special_ids=(SEPARATOR,), **options) as record:
        model(input_ids=ids)
    return record


@pytest.mark.parametrize("first", [1, SEPARATOR])
def test_with_q_and_k_both_are_computed(first: int) -> None:
    (earlier,), (today,) = (layer_profiles(seen(probes, first).layers) for probes in (EARLIER, None))
    assert earlier.kinds == today.kinds
    assert {"local"} == {name for names in today.kinds for name in names}
    for name in (NEAR_MASS.name, SEPARATOR_MASS.name):
        torch.testing.assert_close(earlier.means[name], today.means[name], rtol=0, atol=1e-6)
        for field in ("mean", "chance", "standard_error", "num_observations"):
            one, other = (getattr(each.evidence[name], field) for each in (earlier, today))
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_with_statistics_alone_a_bound_decides_which_heads_are_local_and_no_table_shows_it() -> None:
    record, (today,) = seen(EARLIER, **BETWEEN, keep="statistics"), layer_profiles(seen(**BETWEEN).layers)
    (read,) = layer_profiles(record.layers)
    assert read.kinds == today.kinds == (("local",), ("local",))
    values = seen(**BETWEEN).layers[0].samples[0].statistics
    near = values["self_mass"].double() + values["previous_mass"].double() + values["next_mass"].double()
    bound = near.maximum(1 - values["mean_distance"].double() / 4).mean(-1)
    torch.testing.assert_close(read.evidence[NEAR_MASS.name].mean, bound)
    assert bool((bound <= today.means[NEAR_MASS.name] + 1e-6).all())
    assert NEAR_MASS.name not in {*read.means, *read.chance, *record.table().rows[0]}
    assert SEPARATOR_MASS.name in read.means


def test_statistics_that_were_chosen_stay_the_ones_chosen() -> None:
    (read,) = layer_profiles(seen(("entropy", "special_mass")).layers)
    assert list(read.means) == ["entropy", "special_mass"]


def test_under_a_mask_of_an_unknown_class_nothing_is_computed() -> None:
    record = seen(EARLIER)
    for segment in record.layers[0].samples[0].segments:
        object.__setattr__(segment.request, "mask", UnknownMask("Lost", {}))
    assert NEAR_MASS.name not in layer_profiles(record.layers)[0].means
