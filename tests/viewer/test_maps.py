"""What is coded can be decoded, within the rounding that was measured."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import pytest
import torch

from multihead.errors import ProbeError
from multihead.viewer import maps
from tests.dense_record import random_weights, record_of
from tests.viewer.page import decoded


def sample_of(**given: Any) -> Any:
    seen = torch.ones(37, 37, dtype=torch.bool).tril()
    seen[5] = False
    return record_of(random_weights(2, 37, 37, seen=seen), seen=seen, **given).layers[0].sample()


@pytest.mark.parametrize(("bits", "bound"), [(8, 4e-3), (12, 2.5e-4), (16, 1.6e-5)])
def test_a_coded_weight_is_within_the_rounding_that_was_measured(bits: int, bound: float) -> None:
    weights = torch.rand(2000, dtype=torch.float64) ** 4
    rounding = maps.LargestRoundingError()
    back = decoded(maps.encode_weights(weights, bits=bits, rounding=rounding), bits)
    assert (back - weights).abs().max() == rounding.largest
    assert rounding.largest <= bound


def test_nothing_and_everything_are_coded_exactly() -> None:
    rounding = maps.LargestRoundingError()
    for bits in (12, 16):
        assert decoded(maps.encode_weights(torch.tensor([0.0, 1.0]), bits=bits, rounding=rounding), bits).tolist() == [
            0,
            1,
        ]
    assert rounding.largest == 0


def test_a_hidden_cell_is_not_a_zero() -> None:
    infinite = maps.LargestRoundingError()
    maps.encode_weights(torch.tensor([float("inf"), 0.0]), bits=16, rounding=infinite)
    assert infinite.largest == 0
    code = maps.encode_weights(torch.tensor([float("nan"), 0.0]), bits=16, rounding=maps.LargestRoundingError())
    assert code.tolist() == [maps.MASKED_CODE, 1]


@pytest.mark.parametrize(("bits", "bound"), [(8, 4e-3), (16, 2e-5)])
def test_the_largest_weights_are_kept_in_the_order_of_their_keys(bits: int, bound: float) -> None:
    sample = sample_of()
    both = maps.encode_largest_weights(sample, number=4, bits=bits, rounding=maps.LargestRoundingError())
    for head, text in enumerate(both):
        unused = maps.LargestRoundingError()
        assert maps.encode_largest_weights(sample, number=4, bits=bits, rounding=unused, head=head) == [text]
        raw = zlib.decompress(base64.b64decode(text), -15)
        planes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).int().view(-1, 37, 4)
        codes = planes[0] if bits == 8 else planes[0] << 8 | planes[1]
        keys, shares = (planes[-2] << 8 | planes[-1]).cumsum(-1), decoded(codes, bits)
        assert (keys.diff(dim=-1) >= 0).all()
        kept = ~shares.isnan()
        assert kept.sum(-1).tolist() == sample.seen.sum(-1).clamp(max=4).tolist()
        true = sample.weights(head).double()
        assert (true.gather(-1, keys.clamp(max=36).long()) - shares)[kept].abs().max() < bound
        torch.testing.assert_close(
            shares.nan_to_num(nan=0).sum(-1), true.topk(4).values.sum(-1), atol=4 * bound, rtol=0, check_dtype=False
        )


def test_the_largest_of_all_is_that_of_one_a_query_and_reads_no_map() -> None:
    sample = sample_of()
    alone = maps.encode_largest_weights(sample, number=1, rounding=maps.LargestRoundingError())
    sample.tiles.clear()
    assert maps.encode_recorded_largest_weights(sample, rounding=maps.LargestRoundingError()) == alone
    assert sample.tiles == []


def test_without_the_largest_weights_there_are_none_to_code() -> None:
    sample = sample_of()
    del sample.statistics["largest_key"]
    with pytest.raises(ProbeError) as caught:
        maps.encode_recorded_largest_weights(sample, rounding=maps.LargestRoundingError())
    assert str(caught.value) == (
        'The record has no largest weights. Observe with the probes "largest_weight" and "largest_key".'
    )


def test_runs_that_do_not_fill_the_last_bin_do_not_thin_it() -> None:
    assert maps.average_bins(torch.arange(7.0)[None], 3).tolist() == [[1.0, 4.0, 6.0]]
    assert maps.average_bins(torch.arange(3.0)[None], 10).tolist() == [[0.0, 1.0, 2.0]]


def test_margins_are_coded_from_zero_to_their_top() -> None:
    def codes(values: torch.Tensor, top: float) -> list[int]:
        raw = zlib.decompress(base64.b64decode(maps.pack_margins(values, top)), -15)
        high, low = torch.frombuffer(bytearray(raw), dtype=torch.uint8).int().view(2, -1)
        return (high << 8 | low).tolist()

    assert codes(torch.tensor([[0.0, 2.0, 4.0, float("nan")]]), 4.0) == [0, 32768, 65535, 0]
    assert codes(torch.zeros(1, 2), 0.0) == [0, 0]
