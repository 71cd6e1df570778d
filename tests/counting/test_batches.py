"""Batches hold texts of similar length, and know where each token is."""

from __future__ import annotations

import numpy as np
import torch

from multihead.counting.batches import TextBatch, batches_by_length

IDS = {10 + at: np.array(each, np.int64) for at, each in enumerate(([5, 6, 5], [7], [5, 6], [8, 9, 8, 8]))}


def test_texts_of_similar_length_run_together_in_the_order_of_the_shard() -> None:
    found = list(batches_by_length(IDS, tokens=6, packed=True))
    assert [batch.text_indices.tolist() for batch in found] == [[10, 11, 12], [13]]
    assert found[0].ids[found[0].mask].tolist() == [5, 6, 5, 7, 5, 6]


def test_padding_counts_where_batches_run_padded() -> None:
    found = list(batches_by_length(IDS, tokens=6, packed=False))
    assert [batch.text_indices.tolist() for batch in found] == [[11, 12], [10], [13]]


def test_a_text_longer_than_a_batch_runs_alone() -> None:
    assert [batch.num_tokens for batch in batches_by_length(IDS, tokens=1, packed=True)] == [1, 2, 3, 4]


class TestPlacesOfTokens:
    batch = TextBatch.pad_texts(IDS, list(IDS))

    def test_packed_rows_and_padded_batches_are_flattened_to_the_same_tokens(self) -> None:
        padded = torch.where(self.batch.mask, self.batch.ids, -1)[:, None]  # (texts, 1 head, length)
        row = self.batch.ids[self.batch.mask]
        assert torch.equal(self.batch.drop_padding(padded)[0], row)
        assert torch.equal(self.batch.drop_padding(row[None, None])[0], row)
