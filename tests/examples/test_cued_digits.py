"""The example of cued digits: what its collages show, and what it measures of heads; training it takes minutes."""

from __future__ import annotations

import pytest
import torch

from examples import cued_digits


def test_a_collage_shows_the_cued_digit_where_the_cue_points_to() -> None:
    digits = torch.arange(10.0).add(1)[:, None, None].expand(10, 8, 8) / 10
    found = cued_digits.draw_collages(digits, torch.arange(10), 50, torch.Generator().manual_seed(0))
    for picture, label, cued in zip(found.pictures[:, 0], found.labels.tolist(), found.cued.tolist(), strict=True):
        assert picture[:4].reshape(4, 4, 4).amax((0, 2)).nonzero().flatten().tolist() == [cued]
        row, column = divmod(cued, 2)
        assert (picture[4 + 8 * row : 12 + 8 * row, 8 * column : 8 * column + 8] == (label + 1) / 10).all()


def test_a_head_that_reads_all_alike_has_the_shares_of_an_even_spread() -> None:
    torch.manual_seed(0)
    model, random = cued_digits.build_model().eval(), torch.Generator().manual_seed(0)
    for layer in model.vit.layers:
        torch.nn.init.zeros_(layer.attention.q_proj.weight)
    test = cued_digits.draw_collages(torch.rand(20, 8, 8), torch.arange(20) % 10, 12, random)
    costs = cued_digits.measure_heads(model, test, test.pictures)
    assert [(cost.layer, cost.head) for cost in costs] == [(layer, head) for layer in (0, 1) for head in range(4)]
    for cost in costs:
        assert cost.cue == pytest.approx(4 / 21)
        assert cost.quadrant == pytest.approx(4 / 21)


def test_the_cue_head_is_the_first_layer_head_that_reads_the_cue_row_most() -> None:
    first = [cued_digits.Cost(0, head, cue, 0, 0.1, 0.1) for head, cue in enumerate((0.1, 0.6, 0.2, 0.3))]
    later = [cued_digits.Cost(1, 0, 0.9, 0, 0.4, 0.4)]
    assert cued_digits.find_cue_head(first + later) == first[1]


def test_without_the_file_of_digits_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit) as caught:
        cued_digits.read_digits()
    assert str(caught.value) == (
        "The digits are in scikit-learn, which is not installed: pip install --no-deps scikit-learn."
    )
