"""The gradient of a bias, as the native kernel writes it: cell by cell, or gathered along diagonals."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from multihead.call import AttentionRequest
from multihead.errors import ArgumentError
from multihead.kernels.native.call import Fields, Rows, put_broadcast, room
from multihead.kernels.native.library import AT
from multihead.scores.bias import values_of
from multihead.scores.relative import RelativeBias

# The gradient of a RelativeBias is written down for so many bytes of queries x keys at a time, and summed.
LINES_BYTES = 32 << 20


@dataclass(eq=False)
class BiasGradient:
    """The gradient of one call's bias while the backward pass runs.

    Fields:
        request: the call.
        found: of the shape of the tensor that the bias is written in.
        height: most queries that may be handed to the kernel at once, or None for all.
        lines: of a RelativeBias: (batch or 1, heads or 1, rows, rows + keys), what the kernel writes for some queries.
    """

    request: AttentionRequest
    found: Tensor
    height: int | None = None
    lines: Tensor | None = None

    @staticmethod
    def of(request: AttentionRequest) -> BiasGradient:
        """Make room for it."""
        bias = request.bias
        if bias is None:
            raise ArgumentError("There is no bias.", "Ask for the gradient of a bias where there is one.")
        found = room(*values_of(bias).shape).zero_()
        if not isinstance(bias, RelativeBias):
            return BiasGradient(request, found)
        a_row = 4 * found.shape[0] * found.shape[1] * max(request.shape.key_length, 1)
        return BiasGradient(request, found, max(64, LINES_BYTES // a_row))

    def put_into(self, fields: Fields, rows: Rows) -> None:
        """Say where the gradient of some rows goes."""
        if self.height is None:
            put_broadcast(fields, "dbias", rows.of(self.found) if self.found.shape[2] > 1 else self.found)
            return
        # Row i begins i numbers before its line's turn, so that a diagonal of the map is a column of the lines.
        count = rows.bounds.start.shape[1]
        if not count:
            return
        width = count + self.request.shape.key_length
        self.lines = room(*self.found.shape[:2], count, width).zero_()
        put_broadcast(fields, "dbias", self.lines)
        fields[AT["dbias"]] += self.lines.element_size() * (count - 1)
        fields[AT["dbias_row"]], fields[AT["dbias_key"]] = width - 1, 1

    def take(self, rows: Rows) -> None:
        """Take over what was written of some rows."""
        if self.lines is None:
            return
        count, keys = self.lines.shape[2], self.request.shape.key_length
        first = self.request.shape.query_length - (rows.rows.start or 0) - count
        diagonals = slice(first, first + count + keys - 1)
        self.found[:, :, diagonals] += self.lines.sum(2)[:, :, : count + keys - 1]
        self.lines = None
