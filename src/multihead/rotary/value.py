"""`Rotary`: the parameters of a rotary embedding as an immutable value, and the rotation.

Pair c of d rotated features is rotated by position * frequency_c, frequency_c = base ** (-2 c / d), so that a score
depends on positions only through their difference. Angles are computed in float64, so large positions are as exact as
small ones; the rotation is computed in float32, or in float64 for float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import SymInt, Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.errors.arguments import check_integer
from multihead.rotary.factors import (
    RotationFactors,
    RotationTables,
    compute_rotation_factors,
    rotate_columns,
)
from multihead.rotary.scalings import Linear, Llama3, Yarn, check_above, frequencies_of
from multihead.tensors.precision import widest_float
from multihead.tensors.shapes import describe_type
from multihead.tensors.tracing import is_intercepted, is_traced

# dtype of a tensor -> dtype in which its rotation is computed
_ROTATION_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
_ROTATION_DTYPES[torch.float64] = torch.float64

# Equal rotaries, such as those of a model's layers, share tables, which are freed with the last of these rotaries.
_TABLES_OF_EQUAL_ROTARIES: WeakValueDictionary[Any, RotationTables] = WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embedding (RoPE): rotates queries and keys by their positions.

    Args:
        base: base of the frequencies; a larger base gives longer wavelengths, up to almost 2 pi base tokens.
        dim: number of features of each head that are rotated, the first ones; all if None.
        interleaved: whether pair c consists of features 2 c and 2 c + 1 (GPT-J, Cohere), or of c and c + d / 2 (Llama,
            GPT-NeoX).
        scaling: scaling of the frequencies for longer contexts: `Linear`, `Llama3`, `Yarn` or None. NTK-aware scaling
            by a factor is another base, base * factor ** (d / (d - 2)). Its dynamic form is not supported: it changes
            the base as the text grows, which would invalidate the keys rotated before.

    Raises:
        ArgumentError: base is not above 1, dim is odd, or scaling is of another type.

    Source: arXiv:2104.09864.

    >>> x = torch.randn(2, 8, 10, 64)  # (batch, heads, length, head_dim)
    >>> rotary = Rotary(base=10_000.0)
    >>> x_turned = rotary.rotate(x, 0)
    >>> torch.allclose(x_turned.norm(dim=-1), x.norm(dim=-1))
    True
    >>> torch.equal(x_turned[:, :, 3:], rotary.rotate(x[:, :, 3:], 3))
    True
    """

    base: float = 10_000.0
    dim: int | None = None
    interleaved: bool = False
    scaling: Linear | Llama3 | Yarn | None = None

    def __post_init__(self) -> None:
        check_above("base", self.base, 1)
        if self.dim is not None:
            check_integer("dim", self.dim, least=2)
            if self.dim % 2:
                raise ArgumentError(f"dim is {self.dim}, and columns are rotated in pairs.", "Give an even number.")
        if self.scaling is not None and not isinstance(self.scaling, (Linear, Llama3, Yarn)):
            raise ArgumentError(
                f"scaling is a {type(self.scaling).__name__}.", "Give Linear(...), Llama3(...), Yarn(...) or None."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return only the parameters for copies and pickles, without tables, which a copy computes on demand."""
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}

    def check_head_dim(self, head_dim: int) -> None:
        """Reject a head_dim whose features cannot be rotated in pairs.

        Raises:
            ArgumentError: head_dim is odd, or smaller than dim.
        """
        self._check_head_dim(f"head_dim is {head_dim}", head_dim, ArgumentError)

    def _check_head_dim(self, finding: str, head_dim: int, error: type[ArgumentError | ShapeError]) -> None:
        """Raise an error, which starts with `finding`, if the features of a head cannot be rotated in pairs."""
        if self.dim is None and head_dim % 2:
            part = f", or rotate some of the columns: Rotary(dim={head_dim - 1})" if head_dim > 1 else ""
            raise error(f"{finding}, and Rotary rotates columns in pairs.", f"Give an even head_dim{part}.")
        if self.dim is not None and self.dim > head_dim:
            raise error(
                f"{finding}, and Rotary rotates {self.dim} columns of each head.",
                f"Give Rotary a dim of at most {head_dim}.",
            )

    def frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Return the frequency of each pair of a head's features, radians per token.

        >>> Rotary().frequencies(4)
        (1.0, 0.01)
        """
        dim = self.dim or head_dim
        return frequencies_of(self.base, dim) if self.scaling is None else self.scaling.frequencies(self.base, dim)

    def rotate(self, x: Tensor, positions: int | Tensor) -> Tensor:
        """Rotate queries or keys by the positions of their tokens.

        Args:
            x: (batch, heads, length, head_dim), floating point.
            positions: position of the first of consecutive tokens, an int; or the position of each token, integers
                (batch or 1, length). A negative position rotates backward.

        Returns:
            the rotated tensor, with the shape, dtype and memory layout of x (a view of (batch, length, heads *
            head_dim) if x is).

        Raises:
            ShapeError: x does not have four dimensions or an even number of features of at least `dim`, or positions do
                not fit x.
            DtypeError: a dtype or device does not fit.
        """
        return self._rotate_columns(x, self._cosines_and_sines(x, positions))

    def rotate_both(self, q: Tensor, k: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of the same tokens, computing their angles once.

        Args:
            q: (batch, heads, length, head_dim).
            k: (batch, kv_heads, length, head_dim).
            positions: see `rotate`.

        >>> q, k = torch.randn(2, 8, 10, 64), torch.randn(2, 2, 10, 64)
        >>> _, k_turned = Rotary().rotate_both(q, k, 0)
        >>> torch.equal(k_turned, Rotary().rotate(k, 0))
        True
        """
        factors = self._cosines_and_sines(q, positions)
        together = q.shape[2:] == k.shape[2:] and q.dtype == k.dtype and q.device == k.device
        return self._rotate_columns(q, factors), self._rotate_columns(
            k, factors if together else self._cosines_and_sines(k, positions)
        )

    def _rotate_columns(self, x: Tensor, factors: RotationFactors | Tensor) -> Tensor:
        """Rotate the first `dim` features of x, (batch, heads, length, head_dim), in the layout of projections."""
        # With a single token, (batch, heads, 1, dim) needs no transposition. In a graph the number of tokens may be
        # symbolic.
        one_token = not is_traced() and x.shape[2] == 1
        columns = x if one_token else x.transpose(1, 2)
        if x.dtype is not (dtype := _ROTATION_DTYPES[x.dtype]):
            columns = columns.to(dtype)
        if self.dim is None or self.dim == x.shape[3]:
            rotated = rotate_columns(columns, factors, interleaved=self.interleaved)
        else:
            rotated = rotate_columns(columns[..., : self.dim], factors, interleaved=self.interleaved)
            rotated = torch.cat([rotated, columns[..., self.dim :]], -1)
        if x.dtype is not dtype:
            rotated = rotated.to(x.dtype)
        return rotated if one_token else rotated.transpose(1, 2)

    def _cosines_and_sines(self, x: Tensor, positions: int | Tensor) -> RotationFactors | Tensor:
        """Return cosines and sines from cached tables, or compute them in traces and transforms."""
        self._check_tensor_and_positions(x, positions)
        dtype, device, dim = _ROTATION_DTYPES[x.dtype], x.device, self.dim or x.shape[3]
        if type(x) is Tensor and not is_intercepted():
            tables = self._tables.get((dim, dtype, device)) or self._tables_for(dim, dtype, device)
            if isinstance(positions, int):
                return tables.factors_between(positions, positions + x.shape[2])
            # On other devices, reading the largest position would synchronise with the host.
            if (
                isinstance(positions, Tensor)
                and device.type == "cpu"
                and (factors := tables.factors_at(positions)) is not None
            ):
                return factors
            frequencies = tables.frequencies
        else:
            frequencies = torch.tensor(self.frequencies(dim), dtype=widest_float(device), device=device)
        if not isinstance(positions, Tensor):
            positions = torch.arange(x.shape[2], device=device) + positions
        angles = positions[..., None] * frequencies  # (batch or none, length, pairs)
        return compute_rotation_factors(angles, self._gain, dtype, interleaved=self.interleaved)

    @cached_property
    def _tables(self) -> dict[Any, RotationTables]:
        """(width, dtype, device) -> tables of this rotary, looked up without hashing the rotary."""
        return {}

    @property
    def _gain(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.gain

    def _tables_for(self, dim: int, dtype: torch.dtype, device: torch.device) -> RotationTables:
        key = (self.base, self.interleaved, self.scaling, dim, dtype, device)
        new = RotationTables(self.frequencies(dim), self._gain, dtype, device, interleaved=self.interleaved)
        tables = self._tables[dim, dtype, device] = _TABLES_OF_EQUAL_ROTARIES.setdefault(key, new)
        return tables

    def _check_tensor_and_positions(self, x: Tensor, positions: object) -> None:
        if x.dim() != 4:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, and must have four dimensions.",
                "Give (batch, heads, length, head_dim).",
            )
        if x.dtype not in _ROTATION_DTYPES:
            raise DtypeError(f"x has dtype {x.dtype}.", "Give float32, float64, bfloat16 or float16.")
        batch, _, length, head_dim = x.shape
        self._check_head_dim(f"x has a head_dim of {head_dim}", head_dim, ShapeError)
        if isinstance(positions, (int, SymInt)):
            return
        if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
            raise DtypeError(
                f"positions is {describe_type(positions)}.",
                "Give the position of the first token as an integer, or an integer tensor with that of each token.",
            )
        if positions.device != x.device:
            raise DtypeError(
                f"positions is on {positions.device} and x is on {x.device}.", "Move it: positions.to(x.device)."
            )
        if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != length:
            raise ShapeError(
                f"positions has shape {tuple(positions.shape)}, and there are {batch} samples of {length} tokens.",
                f"Give ({batch}, {length}), or (1, {length}) where all samples share the positions.",
            )
