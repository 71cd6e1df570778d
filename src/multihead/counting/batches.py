"""Batches of token ids: put texts of similar length together, and find the text and position of each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Some texts that run through the model together.

    Attributes:
        ids: (texts, length) int64, padded on the right with 0.
        lengths: (texts,) int64, tokens of each text.
        texts: (texts,) int64, index of each text in its shard, ascending.

    >>> batch = TextBatch.pad_texts([np.array([7, 8]), np.array([5])], [4, 9])
    >>> batch.ids.tolist(), batch.mask.tolist(), batch.text_of_token.tolist(), batch.position_in_text.tolist()
    ([[7, 8], [5, 0]], [[True, True], [True, False]], [4, 4, 9], [0, 1, 0])
    """

    ids: Tensor
    lengths: Tensor
    text_indices: Tensor

    @staticmethod
    def pad_texts(ids: Sequence[NDArray[np.int64]], texts: Sequence[int]) -> TextBatch:
        """Pad the token ids of some texts, each of at least one token."""
        lengths = torch.tensor([len(each) for each in ids])
        padded = torch.zeros(len(ids), int(lengths.max()), dtype=torch.int64)
        padded[torch.arange(padded.shape[1]) < lengths[:, None]] = torch.from_numpy(np.concatenate(ids))
        return TextBatch(padded, lengths, torch.tensor(texts))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding not counted."""
        return len(self.row_of_token)

    @cached_property
    def mask(self) -> Tensor:
        """(texts, length) bool, False for padding."""
        return torch.arange(self.ids.shape[1]) < self.lengths[:, None]

    @cached_property
    def row_of_token(self) -> Tensor:
        """(tokens,) int64: the index in the batch of the text that each token belongs to."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @cached_property
    def text_of_token(self) -> Tensor:
        """(tokens,) int64: the index in the shard of the text that each token belongs to."""
        return self.text_indices[self.row_of_token]

    @cached_property
    def text_starts(self) -> Tensor:
        """(texts,) int64: index of the first token of each text."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def text_start_of_token(self) -> Tensor:
        """(tokens,) int64: index of the first token of the same text."""
        return self.text_starts[self.row_of_token]

    @cached_property
    def text_stop_of_token(self) -> Tensor:
        """(tokens,) int64: index after the last token of the same text."""
        return self.lengths.cumsum(0)[self.row_of_token]

    @cached_property
    def position_in_text(self) -> Tensor:
        """(tokens,) int64: the position of each token in its text."""
        return torch.arange(len(self.row_of_token)) - self.text_start_of_token

    def drop_padding(self, values: Tensor) -> Tensor:
        """Remove the padding from the values of a statistic per token, and concatenate the texts.

        Args:
            values: (1, heads, tokens) if the model packs its texts into one row, else (texts, heads, length).

        Returns:
            (heads, tokens).
        """
        if values.shape[0] == 1 and values.shape[2] == self.num_tokens:
            return values[0]
        return values.transpose(0, 1)[:, self.mask.to(values.device)]


@dataclass(eq=False)
class CurrentBatch:
    """The batch that a model runs on now; it is replaced before each forward pass."""

    batch: TextBatch = field(init=False)


def batches_by_length(
    ids: Sequence[NDArray[np.int64]], texts: Sequence[int], *, tokens: int, packed: bool
) -> Iterator[TextBatch]:
    """Group texts by length into batches of at most `tokens` tokens; a text with more tokens is a batch by itself.

    Args:
        ids: the token ids of each text, at least one.
        texts: the index of each text in its shard.
        tokens: largest number of tokens of a batch; padding counts if batches run padded.
        packed: whether the model leaves padding out.
    """
    lengths = np.array([len(each) for each in ids], np.int64)
    group: list[int] = []
    total = 0
    for index in np.argsort(lengths, kind="stable").tolist():
        length = int(lengths[index])
        after = total + length if packed else (len(group) + 1) * length
        if group and after > tokens:
            yield _batch_in_shard_order(ids, texts, group)
            group, total = [], 0
        group.append(index)
        total += length
    if group:
        yield _batch_in_shard_order(ids, texts, group)


def _batch_in_shard_order(ids: Sequence[NDArray[np.int64]], texts: Sequence[int], group: list[int]) -> TextBatch:
    """Return a batch with its texts in the order of the shard, because equal values rank by that order."""
    group = sorted(group)
    return TextBatch.pad_texts([ids[index] for index in group], [texts[index] for index in group])
