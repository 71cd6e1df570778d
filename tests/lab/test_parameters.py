"""What the number of heads changes in a layer, and what it leaves as it is."""

from __future__ import annotations

import pytest
import torch

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention
from multihead_lab.parameters import ParameterShape, compare_parameters


@pytest.fixture(scope="module")
def found():
    return compare_parameters()


def test_every_number_of_heads_has_the_packed_shapes_of_512_columns(found) -> None:
    for count in found.layers:
        assert [parameter.shape for parameter in count.packed_parameters] == [(1536, 512), (1536,), (512, 512), (512,)]
        assert count.num_parameters == 3 * 512 * 512 + 3 * 512 + 512 * 512 + 512
    assert [count.num_heads for count in found.layers] == [1, 2, 4, 8]
    assert [count.head_dim for count in found.layers] == [512, 256, 128, 64]


def test_torch_s_own_layer_has_the_same_parameters(found) -> None:
    for count in found.layers:
        assert set(count.torch_parameters) == set(count.packed_parameters)
        assert (
            sum(each.numel() for each in MultiHeadAttention(512, count.num_heads).parameters()) == count.num_parameters
        )


def test_with_2_heads_the_scores_are_two_maps_of_12_by_12(found) -> None:
    shapes = {each.name: each.shape for each in found.intermediate_tensors}
    assert shapes == {
        "x": (1, 12, 512),
        "q": (1, 12, 512),
        "k": (1, 12, 512),
        "v": (1, 12, 512),
        "q_heads": (1, 2, 12, 256),
        "k_heads": (1, 2, 12, 256),
        "v_heads": (1, 2, 12, 256),
        "scores": (1, 2, 12, 12),
        "weights": (1, 2, 12, 12),
        "z_heads": (1, 2, 12, 256),
        "merged": (1, 12, 512),
        "output": (1, 12, 512),
    }
    assert all(len(each.axes) == len(each.shape) for each in found.intermediate_tensors)


def test_every_head_reads_all_features_and_a_cut_input_would_leave_it_its_own(found) -> None:
    for count in found.layers:
        assert count.features_read_by_head == (512,) * count.num_heads
        assert count.features_read_by_head_of_split_input == (count.head_dim,) * count.num_heads
        assert count.parameters_with_split_input == count.num_parameters - 3 * 512 * (512 - count.head_dim)


def test_independent_heads_made_of_rows_of_the_packed_projection_are_the_layer(found) -> None:
    assert all(count.difference_from_single_head_layers < 1e-12 for count in found.layers)


def test_other_heads_give_other_outputs_and_gradients_though_the_scores_add_up_to_the_same(found) -> None:
    assert len(found.comparisons) == 6
    for pair in found.comparisons:
        assert pair.output_difference > 0.1
        assert pair.gradient_difference > 0.1
        assert pair.score_difference < 1e-12


def test_the_same_seed_gives_the_same_numbers_and_another_gives_others() -> None:
    small = {"embed_dim": 8, "length": 3, "heads": (1, 2)}
    assert compare_parameters(**small) == compare_parameters(**small)
    assert compare_parameters(**small).comparisons != compare_parameters(**small, seed=1).comparisons


def test_asking_leaves_torch_s_own_random_numbers_alone() -> None:
    state = torch.random.get_rng_state()
    compare_parameters(embed_dim=8, length=3, heads=(1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_parameter_counts_its_numbers() -> None:
    assert ParameterShape("w", (3, 4)).num_values == 12


def test_no_heads_and_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ArgumentError) as none:
        compare_parameters(heads=())
    assert str(none.value) == "heads is empty. Give at least one number of heads, such as (1, 2)."
    with pytest.raises(ArgumentError) as odd:
        compare_parameters(embed_dim=8, heads=(3,))
    assert str(odd.value) == (
        "embed_dim is 8, and 3 heads do not divide it. Give 1, 2, 4 or 8 heads, or a width that is a multiple of 3."
    )
