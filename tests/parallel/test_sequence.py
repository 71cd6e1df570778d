"""A sequence split over 2 and 4 gloo processes computes what one process computes, in outputs and gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError
from multihead.kernels import sequence_split
from multihead.kernels.native.library import reason_of_absence
from multihead.masks.positions import TilePositions
from multihead.parallel import context_parallel
from tests.parallel import cases
from tests.parallel.processes import Processes

whole_call = lru_cache(maxsize=None)(cases.whole_call)
KINDS = [(strategy, layout) for strategy in ("gather", "ulysses", "ring") for layout in ("contiguous", "balanced")]


def ranks_of(strategy: str) -> int:
    """Return on how many ranks a strategy is tried: in a ring of four, a rank also passes on what it was sent."""
    return 4 if strategy == "ring" else 2


def agree(found: list[Any], todo: list[tuple[Any, ...]], *, tolerance: float = 1e-9) -> None:
    for case, *of_ranks in zip(todo, *found, strict=True):
        each, expected = cases.joined(of_ranks, case[1]), whole_call(*case[2:])
        assert each.keys() == expected.keys(), case
        torch.testing.assert_close(
            each, expected, rtol=tolerance, atol=tolerance, msg=lambda text, case=case: f"{case}: {text}"
        )


@pytest.mark.parametrize(("strategy", "layout"), KINDS)
class TestOutputsAndGradientsAreThoseOfOneProcess:
    def test_under_every_mask(self, four: Processes, strategy: str, layout: str) -> None:
        todo = [(strategy, layout, mask, "none", torch.float64) for mask in cases.MASKS]
        agree(four.results(cases.split_calls, 2, todo, ranks=2), todo)

    def test_with_every_term_of_the_scores(self, four: Processes, strategy: str, layout: str) -> None:
        """Every mask with all terms, and each term with a mask that is causal and has empty rows.

        On four ranks, except where all keys are gathered, which a rank has whatever number has sent them. A term does
        not depend on the order of the tokens, and two ranks try each mask in both, so here each order has one of the
        two.
        """
        pairs = {("lengths", "none"), ("causal", "none")}
        pairs |= {("lengths", terms) for terms in cases.TERMS if layout == "contiguous"}
        pairs |= {(mask, "all") for mask in cases.MASKS if layout == "balanced"}
        todo = [(strategy, layout, *pair, torch.float64) for pair in sorted(pairs)]
        ranks = 2 if strategy == "gather" else 4
        agree(four.results(cases.split_calls, ranks, todo, ranks=ranks), todo)


# In float32 the native kernel computes what a rank has, whichever order the tokens have.
@pytest.mark.parametrize(
    ("strategy", "layout", "dtype"),
    [*((*kind, torch.float64) for kind in KINDS), *((*kind, torch.float32) for kind in KINDS[1::2])],
)
@pytest.mark.parametrize("hidden", [True, False], ids=["hidden", "seen by queries that the loss leaves out"])
def test_nan_in_keys_reaches_no_other_query_and_no_gradient(
    four: Processes, strategy: str, layout: str, hidden: bool, dtype: torch.dtype
) -> None:
    expected = cases.with_nan(lambda x: x, hidden=hidden, dtype=dtype)
    assert expected["output"].isnan().any() == (not hidden)
    assert all(each.isfinite().all() for name, each in expected.items() if hidden or name.startswith("gradient"))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    ranks = ranks_of(strategy)
    of_ranks = four.results(cases.split_with_nan, ranks, strategy, layout, hidden, dtype, ranks=ranks)
    found = cases.joined(of_ranks, layout)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("strategy", "layout"), KINDS)
def test_the_native_kernel_agrees_in_float32(four: Processes, strategy: str, layout: str) -> None:
    pairs = [("causal", "bias"), ("window", "bias of keys"), ("prefix", "relative bias"), ("a tensor", "all")]
    todo = [(strategy, layout, *pair, torch.float32) for pair in pairs]
    ranks = ranks_of(strategy)
    agree(four.results(cases.split_calls, ranks, todo, ranks=ranks), todo, tolerance=1e-4)


@pytest.mark.skipif(reason_of_absence() is not None, reason="only the native kernel repeats a dropout")
@pytest.mark.parametrize(("strategy", "layout"), KINDS)
def test_the_dropped_weights_are_those_of_one_process(four: Processes, strategy: str, layout: str) -> None:
    """Rank 0 draws the seed, and each weight is dropped by its sample, head, query and key in the whole call."""
    for mask, ranks, check in (("causal", 2, "every call"), ("lengths", 4, "first call")):
        expected = cases.dropped(lambda x: x, mask)
        shown = cases.MASKS[mask]().tile(TilePositions.from_sizes(cases.LENGTH, cases.LENGTH))
        assert (((expected["first"] == 0) & shown).any(), ((expected["first"] != 0) & shown).any()) == (True, True)
        for found in four.results(cases.split_dropped, ranks, strategy, layout, mask, check, ranks=ranks):
            for name in ("first", "second"):
                assert torch.equal(found[name] == 0, expected[name] == 0)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", cases.LAYERS)
def test_a_layer_has_the_positions_of_the_whole_sequence(four: Processes, layer: str) -> None:
    """Rotary embedding, position biases, norms, sinks and gates, padding, with the gradients of all parameters."""
    expected = cases.whole_layer(layer)
    # The positions of a layout are the same for every strategy: each layer has each strategy and each layout.
    for strategy, layout in KINDS if layer == "rotary" else KINDS[::2] + KINDS[1::4]:
        ranks = 4 if layer == "rotary" else 2
        for found in four.results(cases.split_layer, strategy, layout, layer, ranks=ranks):
            assert found.keys() == expected.keys()
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_activation_checkpointing_recomputes_split_calls(four: Processes) -> None:
    expected = cases.whole_layer("rotary")
    for strategy, layout in KINDS[1::2]:
        for found in four.results(cases.split_layer, strategy, layout, "rotary", True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_auto_takes_the_strategy_that_sends_less(four: Processes) -> None:
    expected = {"window": "ring", "documents": "ring", "full": "ulysses", "heads that do not divide": "ring"}
    for found in four.results(cases.chosen_strategies):
        assert found == expected


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
def test_tensors_are_split_and_joined_again_with_the_labels_of_the_next_tokens(four: Processes, layout: str) -> None:
    ids = torch.arange(24).view(2, 12)
    for found in four.results(cases.shared_out, ids, layout, ranks=2):
        torch.testing.assert_close(found["joined"], ids)
        torch.testing.assert_close(found["labels"][:, :-1], ids[:, 1:])
        assert found["labels"][:, -1].tolist() == [-100, -100]
        assert found["positions"].tolist() == [list(range(12))]


def test_shard_balances_a_causal_mask_only(four: Processes) -> None:
    expected = {"full": "contiguous", "causal": "balanced", "window": "contiguous", "of 6 tokens": "contiguous"}
    assert four.results(cases.chosen_layouts, ranks=2) == [expected] * 2


@pytest.mark.parametrize("name", cases.REFUSED)
def test_what_cannot_be_split_is_rejected_on_every_rank(four: Processes, name: str) -> None:
    """No rank has sent anything by then: the processes go on."""
    kind, message = cases.REFUSED[name][1:]
    for found in four.run(cases.refused, name, ranks=2):
        assert type(found) is kind
        assert str(found) == message


def test_an_error_in_the_context_leaves_it(four: Processes) -> None:
    assert four.results(cases.left_by_an_error, ranks=2) == [True, True]


def test_without_processes_the_error_names_what_starts_them() -> None:
    with pytest.raises(ArgumentError) as error, context_parallel(None):
        pass
    assert str(error.value) == (
        "torch.distributed is not initialised, so there are no ranks. Start the script with torchrun, and call "
        'torch.distributed.init_process_group("gloo") first.'
    )


def test_a_call_without_a_context_is_unchanged() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    expected: Tensor = mh.attention(q, k, v, mask=masks.Causal())
    assert sequence_split.active_split is None
    torch.testing.assert_close(mh.attention(q, k, v, mask=masks.Causal(), kernel="reference"), expected)
