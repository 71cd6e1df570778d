"""Batches of token ids: put texts of similar length together, and find the text and position of each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Some texts that run through the model together.

    Attributes:
        ids: (texts, length) int64, padded on the right with 0.
        lengths: (texts,) int64, tokens of each text.
        text_indices: (texts,) int64, index of each text in its shard, ascending.

    >>> batch = TextBatch.pad_texts({4: np.array([7, 8]), 9: np.array([5])}, [9, 4])
    >>> batch.ids.tolist(), batch.mask.tolist(), batch.text_of_token.tolist(), batch.position_in_text.tolist()
    ([[7, 8], [5, 0]], [[True, True], [True, False]], [4, 4, 9], [0, 1, 0])
    """

    ids: Tensor
    lengths: Tensor
    text_indices: Tensor

    @staticmethod
    def pad_texts(ids: Mapping[int, NDArray[np.int64]], texts: Sequence[int]) -> TextBatch:
        """Pad the token ids of some texts, each of at least one token.

        Args:
            ids: index of a text in its shard -> its token ids.
            texts: the indices of the texts; the batch has them in ascending order, because equal values rank by that.
        """
        texts = sorted(texts)
        sequences = [torch.from_numpy(ids[text]) for text in texts]
        lengths = torch.tensor([len(each) for each in sequences])
        return TextBatch(pad_sequence(sequences, batch_first=True), lengths, torch.tensor(texts))

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


def batches_by_length(ids: Mapping[int, NDArray[np.int64]], *, tokens: int, packed: bool) -> Iterator[TextBatch]:
    """Group texts by length into batches of at most `tokens` tokens; a text with more tokens is a batch by itself.

    Args:
        ids: index of a text in its shard -> its token ids, at least one, in the order of the shard.
        tokens: largest number of tokens of a batch; padding counts if batches run padded.
        packed: whether the model leaves padding out.
    """
    group: list[int] = []
    num_tokens = 0
    for text in sorted(ids, key=lambda text: len(ids[text])):
        length = len(ids[text])
        if group and (num_tokens + length if packed else (len(group) + 1) * length) > tokens:
            yield TextBatch.pad_texts(ids, group)
            group, num_tokens = [], 0
        group.append(text)
        num_tokens += length
    if group:
        yield TextBatch.pad_texts(ids, group)
