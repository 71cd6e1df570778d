"""Records of an earlier version show the kinds that they showed; what queries may see is read off the mask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import MultiHeadAttention, observe
from multihead.masks import Causal, Full, Mask, Window
from multihead.masks.base import UnknownMask
from multihead.probes.catalogue import NEAR_MASS, SEPARATOR_MASS
from multihead.record.layer import layer_profiles
from multihead.record.profiles import visibility_of
from multihead.scores import RelativeBias, offsets
from tests.dense_record import random_weights, record_of

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


def sample_of(seen: Tensor, *, heads: int = 2, query_start: int = 0, keep: str = "cpu") -> Any:
    dense = random_weights(heads, *seen.shape, seen=seen)
    return record_of(dense, seen=seen, query_start=query_start, keep=keep).layers[0].sample()


def band(queries: int, keys: int, before: int, after: int, start: int = 0) -> Tensor:
    offset = torch.arange(keys)[None] - (torch.arange(queries)[:, None] + start)
    return (offset >= -before) & (offset <= after)


@pytest.mark.parametrize(
    ("seen", "start", "expected"),
    [
        (torch.ones(6, 6, dtype=torch.bool), 0, ("full", 0, 0)),
        (torch.ones(6, 6, dtype=torch.bool).tril(), 0, ("causal", 0, 0)),
        (band(3, 9, 99, 0, start=6), 6, ("causal", 0, 0)),
        (band(9, 9, 2, 0), 0, ("causal window", 2, 0)),
        (band(9, 9, 2, 3), 0, ("window", 2, 3)),
        (torch.ones(1, 7, dtype=torch.bool), 6, ("full", 0, 0)),
        (torch.eye(6, dtype=torch.bool).roll(3, 1), 0, ("other", 0, 0)),
        (torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]]).bool(), 0, ("other", 0, 0)),
        (torch.zeros(3, 3, dtype=torch.bool), 0, ("other", 0, 0)),
    ],
    ids=["full", "causal", "causal with a cache", "causal window", "window", "decoding", "shifted", "hole", "nothing"],
)
def test_the_pattern_of_a_mask_is_named(seen: Tensor, start: int, expected: tuple[str, int, int]) -> None:
    visibility = visibility_of(sample_of(seen, query_start=start))
    assert (visibility.pattern, visibility.before, visibility.after) == expected


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [(Full(), "full"), (Causal(), "causal"), (Window(3), "causal"), (Window(3, after=1), "full")],
)
def test_a_text_of_one_token_has_the_pattern_of_its_mask(mask: Mask, pattern: str) -> None:
    layer = MultiHeadAttention(8, 2)
    with torch.no_grad(), observe(layer) as seen:
        layer(torch.zeros(1, 1, 8), mask=mask)
    assert visibility_of(seen.layers[0].sample()).pattern == pattern


def test_the_largest_entropy_of_a_causal_head_is_the_mean_of_ln_of_the_keys_seen() -> None:
    visibility = visibility_of(sample_of(torch.ones(5, 5, dtype=torch.bool).tril()))
    expected = sum(math.log(n) for n in range(1, 6)) / 5
    assert visibility.largest_entropy.tolist() == pytest.approx([expected, expected], abs=1e-12)
    assert visibility.mean_keys.tolist() == [3.0, 3.0]
    assert visibility.hides_keys
    assert visibility.blind_queries == 0


def test_a_query_that_sees_no_key_is_counted_and_left_out_of_the_mean() -> None:
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[2] = False
    visibility = visibility_of(sample_of(seen))
    assert visibility.blind_queries == 1
    assert visibility.largest_entropy.tolist() == pytest.approx([math.log(4)] * 2)


def test_blocks_give_what_one_look_at_everything_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sample_of(band(50, 50, 7, 0))
    whole = visibility_of(sample)
    monkeypatch.setattr("multihead.record.blocks.MAX_TILE_CELLS", 300)
    parts = visibility_of(sample)
    assert (whole.pattern, whole.before) == (parts.pattern, parts.before) == ("causal window", 7)
    torch.testing.assert_close(whole.largest_entropy, parts.largest_entropy)
