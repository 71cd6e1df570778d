"""Batches hold texts of similar length, and know where each token is."""

from __future__ import annotations

import numpy as np
import torch

from multihead.counting.batches import Batch, batches

IDS = [np.array(each, np.int64) for each in ([5, 6, 5], [7], [5, 6], [8, 9, 8, 8])]


def test_texts_of_similar_length_run_together_in_the_order_of_the_shard() -> None:
    found = list(batches(IDS, [10, 11, 12, 13], tokens=6, packed=True))
    assert [batch.texts.tolist() for batch in found] == [[10, 11, 12], [13]]
    assert found[0].flat_ids.tolist() == [5, 6, 5, 7, 5, 6]


def test_padding_counts_where_batches_run_padded() -> None:
    found = list(batches(IDS, [0, 1, 2, 3], tokens=6, packed=False))
    assert [batch.texts.tolist() for batch in found] == [[1, 2], [0], [3]]


def test_a_text_longer_than_a_batch_runs_alone() -> None:
    assert [batch.num_tokens for batch in batches(IDS, [0, 1, 2, 3], tokens=1, packed=True)] == [1, 2, 3, 4]


class TestPlacesOfTokens:
    batch = Batch.of(IDS, [0, 1, 2, 3])

    def test_equal_tokens_of_two_texts_are_different(self) -> None:
        ids = self.batch.distinct_ids
        assert ids[0] == ids[2]
        assert len({int(ids[place]) for place in (0, 3, 4, 6)}) == 4

    def test_a_token_has_occurred_if_its_text_has_it_before(self) -> None:
        assert self.batch.occurred.nonzero().flatten().tolist() == [2, 8, 9]

    def test_some_tokens_of_each_text_are_found_by_rank(self) -> None:
        found = self.batch.places_of(self.batch.flat_ids == 8)
        assert found[:, [0, 6]].tolist() == [[-1, 6], [-1, 8], [-1, 9]]

    def test_packed_rows_and_padded_batches_are_flattened_to_the_same_tokens(self) -> None:
        padded = torch.where(self.batch.mask, self.batch.ids, -1)[:, None]  # (texts, 1 head, length)
        assert torch.equal(self.batch.flat(padded)[0], self.batch.flat_ids)
        assert torch.equal(self.batch.flat(self.batch.flat_ids[None, None])[0], self.batch.flat_ids)
