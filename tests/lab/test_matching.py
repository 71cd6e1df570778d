"""Long rows against short ones: what must come out of it by arithmetic, and what is refused."""

from __future__ import annotations

import pytest
import torch

from multihead.errors import ArgumentError
from multihead_lab.matching import KEY_CONTENTS, MeanOverSeeds, match_vectors


def test_without_noise_a_long_row_of_even_content_always_finds_its_partner() -> None:
    found = match_vectors(trials=50, seeds=2, noises=(0.0,), lengths=(64,))
    even = found.matches[0]
    assert even.content == "even"
    assert even.by_long_row == MeanOverSeeds.from_values([1.0, 1.0], questions=50)


def test_under_heavy_noise_everything_is_a_guess() -> None:
    found = match_vectors(candidates=10, trials=500, seeds=2, noises=(1e6,), lengths=(8,))
    for match in found.matches:
        guess = 1 / 45 if match.content == "two" else 1 / 10
        assert abs(match.by_long_row.mean - guess) < 0.06


def test_where_all_rows_carry_the_partner_the_knowing_ones_are_all() -> None:
    for match in match_vectors(trials=50, seeds=2, noises=(1.0,), lengths=(8,)).matches:
        if match.content in ("even", "uneven", "groups"):
            assert match.by_short_rows_with_content == match.by_all_short_rows


def test_every_content_is_measured_at_every_noise() -> None:
    found = match_vectors(trials=10, seeds=1, noises=(0.5, 1.0), lengths=(8, 16))
    assert [(match.content, match.query_noise) for match in found.matches] == [
        (content, noise) for content in KEY_CONTENTS for noise in (0.5, 1.0)
    ]
    assert [row.columns for row in found.lengths] == [8, 16]


def test_scaled_scores_keep_softmax_as_flat_at_every_length() -> None:
    """Without a partner, q . k / sqrt(columns) has the same variance at every length, and q . k grows."""
    short, long = match_vectors(trials=300, seeds=2, noises=(1.0,), lengths=(16, 256)).lengths
    assert abs(short.scaled_effective_keys.mean - long.scaled_effective_keys.mean) < 2
    assert long.unscaled_effective_keys.mean < short.unscaled_effective_keys.mean / 2
    assert long.unscaled_softmax_slope.mean < short.unscaled_softmax_slope.mean


def test_the_same_seed_gives_the_same_numbers_and_another_gives_others() -> None:
    small = {"trials": 30, "seeds": 2, "noises": (1.0,), "lengths": (8,)}
    assert match_vectors(**small) == match_vectors(**small)
    assert match_vectors(**small).matches != match_vectors(**small, seed=7).matches


def test_a_spread_is_the_mean_and_the_standard_deviation_of_its_values() -> None:
    values = [0.1, 0.4, 0.7]
    expected = torch.tensor(values, dtype=torch.float64)
    assert MeanOverSeeds.from_values(values) == MeanOverSeeds(float(expected.mean()), float(expected.std()))
    assert MeanOverSeeds.from_values([0.5]) == MeanOverSeeds(0.5, None)


def test_means_are_apart_only_beyond_both_deviations_together() -> None:
    assert MeanOverSeeds(0.5, 0.1).differs_from(MeanOverSeeds(0.8, 0.1))
    assert not MeanOverSeeds(0.5, 0.2).differs_from(MeanOverSeeds(0.8, 0.2))
    assert not MeanOverSeeds(0.5, 0.0).differs_from(MeanOverSeeds(0.5, 0.0))


def test_a_single_seed_is_never_apart_and_a_share_has_at_least_its_binomial_error() -> None:
    assert not MeanOverSeeds(0.1, None).differs_from(MeanOverSeeds(0.9, 0.0))
    assert not MeanOverSeeds(0.9, 0.0).differs_from(MeanOverSeeds(0.1, None))
    half, close, far = (MeanOverSeeds.from_values([share, share], questions=500) for share in (0.5, 0.53, 0.55))
    assert half.binomial_error == pytest.approx((0.25 / 500) ** 0.5)
    assert half.deviation == 0
    assert not half.differs_from(close)  # 0.03 is less than 2 * 0.0224
    assert half.differs_from(far)
    assert not MeanOverSeeds.from_values([1.0, 1.0], questions=500).differs_from(
        MeanOverSeeds.from_values([0.998, 0.998], questions=500)
    )


def test_parts_that_do_not_fit_and_empty_measurements_are_refused() -> None:
    with pytest.raises(ArgumentError) as parts:
        match_vectors(parts=7)
    assert str(parts.value) == (
        "parts is 7, and columns is 64. Give an even number of parts that divides the columns, such as 8 for 64."
    )
    with pytest.raises(ArgumentError) as empty:
        match_vectors(trials=0)
    assert str(empty.value) == (
        "There are 64 candidates, 0 trials and 5 seeds. Give at least 2 candidates, 1 trial and 1 seed."
    )


def test_what_only_some_rows_carry_is_found_by_these_and_not_by_all() -> None:
    found = {match.content: match for match in match_vectors(trials=200, seeds=2, noises=(0.0,), lengths=(8,)).matches}
    assert found["part"].by_long_row.mean < 0.3 < 0.5 < found["part"].by_short_rows_with_content.mean
    assert found["even"].by_long_row.mean == 1


def test_two_partners_are_each_found_by_their_own_half() -> None:
    two = match_vectors(trials=200, seeds=2, noises=(0.0,), lengths=(8,)).matches[-1]
    assert two.content == "two"
    assert two.by_short_rows_with_content.mean > 0.9
