"""The gradient of a bias: written cell by cell by the native kernel, or summed along diagonals for a RelativeBias."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from multihead.call import AttentionRequest
from multihead.errors import ArgumentError
from multihead.kernels.native.call import Fields, Rows, empty_float32, set_broadcast
from multihead.kernels.native.library import AT
from multihead.scores.bias import values_of
from multihead.scores.relative import RelativeBias

# The gradient of a RelativeBias is computed in blocks of queries x keys of this size, and summed.
LINES_BYTES = 32 << 20


@dataclass(eq=False)
class BiasGradient:
    """The gradient of the bias of one call during the backward pass.

    Attributes:
        request: the call.
        values: the gradient, in the shape of the tensor that holds the bias.
        height: the largest number of queries of a block, or None for all.
        lines: for a RelativeBias, (batch or 1, heads or 1, rows, rows + keys): the gradient of the current block.
    """

    request: AttentionRequest
    values: Tensor
    height: int | None = None
    lines: Tensor | None = None

    @staticmethod
    def of(request: AttentionRequest) -> BiasGradient:
        """Allocate the gradient, filled with 0."""
        bias = request.bias
        if bias is None:
            raise ArgumentError("The call has no bias.", "Compute the gradient of a bias only for a call with one.")
        values = empty_float32(*values_of(bias).shape).zero_()
        if not isinstance(bias, RelativeBias):
            return BiasGradient(request, values)
        row_bytes = 4 * values.shape[0] * values.shape[1] * max(request.shape.key_length, 1)
        return BiasGradient(request, values, max(64, LINES_BYTES // row_bytes))

    def set_fields(self, fields: Fields, rows: Rows) -> None:
        """Set the address and the strides of the gradient of some rows."""
        if self.height is None:
            set_broadcast(fields, "dbias", rows.of(self.values) if self.values.shape[2] > 1 else self.values)
            return
        # Row i begins i numbers earlier in its line, so that a diagonal of the map is a column of the lines.
        count = rows.bounds.start.shape[1]
        if not count:
            return
        width = count + self.request.shape.key_length
        self.lines = empty_float32(*self.values.shape[:2], count, width).zero_()
        set_broadcast(fields, "dbias", self.lines)
        fields[AT["dbias"]] += self.lines.element_size() * (count - 1)
        fields[AT["dbias_strides.row"]], fields[AT["dbias_strides.key"]] = width - 1, 1

    def add(self, rows: Rows) -> None:
        """Add the gradient of the rows that were just computed."""
        if self.lines is None:
            return
        count, keys = self.lines.shape[2], self.request.shape.key_length
        first = self.request.shape.query_length - (rows.rows.start or 0) - count
        diagonals = slice(first, first + count + keys - 1)
        self.values[:, :, diagonals] += self.lines.sum(2)[:, :, : count + keys - 1]
        self.lines = None
