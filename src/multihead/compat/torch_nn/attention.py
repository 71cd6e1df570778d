"""Drop-in for nn.MultiheadAttention: same arguments and state_dict, faster with masks, no NaN for hidden keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from multihead.compat.torch_nn.masks import (
    convert_masks,
    nested_like,
    padding_of_nested,
    unpadded_queries,
)
from multihead.compat.weights import attend_with_weights
from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.errors.arguments import check_fraction, reject_scripting
from multihead.functional import attend, request_of
from multihead.kernels import head_changes
from multihead.kernels.call import AttentionRequest, CallOrigin, find_surroundings
from multihead.kernels.per_head import attend_per_head, is_computed_per_head
from multihead.layer.heads import head_dim_of, merge_heads, split_heads
from multihead.masks import Documents
from multihead.masks.positions import CallSize
from multihead.tensors.tracing import can_read_values

_HOOK_KEY = -1  # torch numbers hooks from 0, so it never uses this key


class MultiheadAttention(nn.MultiheadAttention):
    """Drop-in for nn.MultiheadAttention that is faster with any mask, and that `observe` can record.

    The arguments, the parameters and their initial values for a seed, the state_dict, the outputs, weights and
    gradients are the original's. The differences from the original:

    - a query that sees no key has weights of 0, and the output projection's bias as its output;
    - NaN in a token that `key_padding_mask` hides has no effect on outputs or gradients;
    - `need_weights` does not change a bit of the output without dropout;
    - `is_causal` with a causal mask does not change the output; the original then hides added keys too.

    It is a subclass of nn.MultiheadAttention. In eval without gradients `nn.TransformerEncoderLayer` reads the
    original's weights and bypasses its forward; a forward pre-hook that does nothing keeps the encoder layer off this
    fused path, so that it calls the forward of this class. Forward hooks on `out_proj` run, unlike in the original.

    Args:
        embed_dim: number of features of the queries and of the output.
        num_heads: number of heads, a divisor of embed_dim.
        dropout: fraction of the attention weights dropped in training, 0 to 1.
        bias: whether the projections add a bias.
        add_bias_kv: whether a learned key and value are added that every query sees.
        add_zero_attn: whether a key and value of 0 are added that every query sees.
        kdim: number of features of the key inputs; embed_dim if None.
        vdim: number of features of the value inputs; embed_dim if None.
        batch_first: whether batched inputs are (batch, length, features), and not (length, batch, features).
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ArgumentError: num_heads does not divide embed_dim (the message lists the divisors), or dropout is not from 0 to
            1.

    >>> layer = MultiheadAttention(512, 8, batch_first=True)
    >>> x = torch.randn(2, 10, 512)
    >>> output, weights = layer(x, x, x)
    >>> output.shape, weights.shape
    (torch.Size([2, 10, 512]), torch.Size([2, 10, 10]))
    """

    __prepare_scriptable__ = reject_scripting

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,  # noqa: FBT001, FBT002  (the original's positions)
        add_bias_kv: bool = False,  # noqa: FBT001, FBT002
        add_zero_attn: bool = False,  # noqa: FBT001, FBT002
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,  # noqa: FBT001, FBT002
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_dim_of(embed_dim, num_heads)
        check_fraction("dropout", dropout)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        set_fused_path(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle a layer; a layer pickled by an older version has `_qkv_same_embed_dim` False, which is corrected."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        set_fused_path(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002
        is_causal: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention from query to key and value.

        The shapes below are for `batch_first=True`. With `batch_first=False`, batched inputs and outputs are (length,
        batch, features), and masks and weights keep their shapes. Unbatched inputs, masks and outputs lack the batch
        dimension.

        Args:
            query: (batch, queries, embed_dim), or a nested tensor of samples (queries, embed_dim).
            key: (batch, keys, kdim), or nested like the query.
            value: (batch, keys, vdim), or nested like the query.
            key_padding_mask: (batch, keys), bool, True = hidden; or floats added to the scores.
            need_weights: whether the weights are returned.
            attn_mask: (queries, keys) or (batch * heads, queries, keys), bool, True = hidden; or floats added to
                the scores, which may require a gradient.
            average_attn_weights: whether the returned weights are averaged over the heads.
            is_causal: whether attn_mask is the causal mask. This is checked if reading the mask needs no device
                synchronisation. Without attn_mask, True applies the causal mask, where the original raises an error.

        Returns:
            the output (batch, queries, embed_dim); and the weights (batch, queries, keys), or with
            `average_attn_weights=False` (batch, heads, queries, keys), or None. In training the weights are after
            dropout, as in the original. The last columns of the weights are the added keys: `add_bias_kv`, then
            `add_zero_attn`. For nested inputs the output is nested, and the weights are padded with 0.

        Raises:
            ShapeError, DtypeError, MaskError, ArgumentError: an argument does not fit the layer or another argument;
                raised before anything is computed.
        """
        # Methods are those of this class, even if another thread restores the original class of this object meanwhile.
        if query.is_nested or key.is_nested or value.is_nested:
            MultiheadAttention._check_nested_inputs(self, query, key, value, attn_mask, key_padding_mask)
            if (
                query is key
                and key is value
                and not (need_weights or is_causal or MultiheadAttention._count_added_keys(self))
            ):
                return MultiheadAttention._attend_nested(self, query), None
            return MultiheadAttention._attend_nested_padded(
                self, query, key, value, need_weights=need_weights, average=average_attn_weights, is_causal=is_causal
            )
        MultiheadAttention._check_input_shapes(self, query, key, value)
        within = query is key  # self-attention
        batched, length_axis = query.dim() == 3, 1 if self.batch_first or query.dim() == 2 else 0
        if not batched:
            query, key, value = _convert_inputs(lambda x: x[None], query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif length_axis == 0:
            # Contiguous copies, because the matrix products that follow are slow on tokens with large strides.
            query, key, value = _convert_inputs(lambda x: x.transpose(0, 1).contiguous(), query, key, value)
        query, key, value = _zero_nonfinite_padding(query, key, value, key_padding_mask)
        q, k, v = MultiheadAttention._project(self, query, key, value)  # (batch, length, embed_dim) each
        added = MultiheadAttention._count_added_keys(self)
        size = CallSize(q.shape[0], self.num_heads, q.shape[1], k.shape[1])
        mask, bias = convert_masks(attn_mask, key_padding_mask, size, added_keys=added, is_causal=is_causal)
        k, v = MultiheadAttention._prepend_added_keys(self, k, v)
        origin, around = CallOrigin(self, is_cross_attention=False if within else None), find_surroundings()
        if within and (around.listeners or head_changes.active_changes):
            origin = replace(origin, unpadded_queries=unpadded_queries(key_padding_mask))
        q, k, v = (split_heads(x, self.num_heads) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        request = request_of(q, k, v, mask, bias, None, None, None, dropout, added, around, origin=origin)
        merged, weights = _attend(request, need_weights=need_weights, average=average_attn_weights)
        merged = merged if batched else merged[0]
        output = self.out_proj(merged.transpose(0, 1) if length_axis == 0 else merged)
        if weights is not None:
            # Added keys come first here, so that visible keys are intervals; nn.MultiheadAttention returns them last.
            weights = weights.roll(-added, -1) if added else weights
            weights = weights if batched else weights[0]
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project query, key and value, in one matrix product if they are the same tensor: (..., embed_dim) each."""
        width, packed = self.embed_dim, self.in_proj_weight
        dtype = self.out_proj.weight.dtype
        # nn.MultiheadAttention accepts a bias of another dtype than its weights.
        bias = None if self.in_proj_bias is None else self.in_proj_bias.to(dtype)
        if packed is None:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            return tuple(linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if query is key and key is value:
            return linear(query, packed, bias).chunk(3, -1)
        parts = [width, 2 * width] if key is value else [width, width, width]
        biases = (None,) * len(parts) if bias is None else bias.split(parts)
        inputs = (query, key) if key is value else (query, key, value)
        projected = [linear(x, w, b) for x, w, b in zip(inputs, packed.split(parts), biases, strict=True)]
        return (projected[0], *projected[1].chunk(2, -1)) if key is value else tuple(projected)

    def _count_added_keys(self) -> int:
        """The number of keys that `add_bias_kv` and `add_zero_attn` add."""
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _prepend_added_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Prepend the keys of `add_bias_kv` and `add_zero_attn` to k, and their values to v, if the layer has them."""
        if self.add_zero_attn:
            k, v = (torch.cat([torch.zeros_like(x[:, :1]), x], 1) for x in (k, v))
        if self.bias_k is not None and self.bias_v is not None:
            rows = ((self.bias_k, k), (self.bias_v, v))
            k, v = (torch.cat([row.to(x.dtype).expand(x.shape[0], 1, -1), x], 1) for row, x in rows)
        return k, v

    def _attend_nested(self, query: Tensor) -> Tensor:
        """Compute self-attention of a nested tensor: its samples become the documents of one sequence."""
        samples = query.unbind()
        lengths = [sample.shape[0] for sample in samples]
        tokens = torch.cat(samples)[None]  # (1, tokens, embed_dim)
        q, k, v = (split_heads(x, self.num_heads) for x in MultiheadAttention._project(self, tokens, tokens, tokens))
        dropout = self.dropout if self.training else 0.0
        origin = CallOrigin(self, is_cross_attention=False)
        merged, _ = _attend(request_of(q, k, v, Documents(lengths), dropout=dropout, origin=origin), need_weights=False)
        return nested_like(query, list(self.out_proj(merged)[0].split(lengths)))

    def _attend_nested_padded(
        self, query: Tensor, key: Tensor, value: Tensor, *, need_weights: bool, average: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention of nested tensors by padding them; the weights of padding are 0, as in the original."""
        rows, columns = padding_of_nested(query), padding_of_nested(key)  # (batch, length) each

        def pad(nested: Tensor) -> Tensor:
            return pad_sequence(list(nested.unbind()), batch_first=self.batch_first)

        q, k, v = _convert_inputs(pad, query, key, value)
        output, weights = MultiheadAttention.forward(self, q, k, v, columns, need_weights, None, average, is_causal)
        output = output if self.batch_first else output.transpose(0, 1)
        samples = [sample[~hidden] for sample, hidden in zip(output, rows, strict=True)]
        if weights is not None:
            hidden_rows = rows[:, :, None] if average else rows[:, None, :, None]
            weights = weights.masked_fill(hidden_rows, 0)
        return nested_like(query, samples), weights

    def _check_nested_inputs(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> None:
        """Reject inputs if only some are nested, or if their numbers of samples or sizes do not fit."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise ArgumentError(
                "query is a nested tensor, whose lengths torch.jit.trace would record as constants.",
                "Set enable_nested_tensor=False in nn.TransformerEncoder (or encoder.use_nested_tensor = False).",
            )
        inputs = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if mask is not None:
                raise ArgumentError(
                    f"query is a nested tensor, and {name} describes padded tensors.",
                    f"Remove {name}, or give query.to_padded_tensor(0.0) and a key_padding_mask.",
                )
        lengths = []
        for name, tensor, width in inputs:
            if not tensor.is_nested:
                raise ShapeError(
                    f"{name} is not a nested tensor, and another input is.",
                    "Give query, key and value as nested tensors, or none of them.",
                )
            samples = tensor.unbind()
            if not samples or any(sample.dim() != 2 or sample.shape[1] != width for sample in samples):
                shapes = ", ".join(str(tuple(sample.shape)) for sample in samples) or "no samples"
                raise ShapeError(
                    f"{name} is a nested tensor of {shapes}.", f"Give samples of shape (length, features = {width})."
                )
            lengths.append([sample.shape[0] for sample in samples])
        if len(lengths[0]) != len(lengths[1]):
            raise ShapeError(
                f"query has {len(lengths[0])} samples and key has {len(lengths[1])}.", "Give both the same batch size."
            )
        if lengths[1] != lengths[2]:
            raise ShapeError(
                f"key has samples of lengths {lengths[1]} and value of lengths {lengths[2]}.",
                "Give one value per key.",
            )

    def _check_input_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Reject inputs that do not fit the layer or each other."""
        layout = "(batch, length, features)" if self.batch_first else "(length, batch, features)"
        dtype = self.out_proj.weight.dtype
        inputs = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, tensor, width in inputs:
            if tensor.dim() not in (2, 3) or tensor.shape[-1] != width:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}.",
                    f"Give {layout}, or (length, features) unbatched, with {width} features.",
                )
            if tensor.dim() != query.dim():
                raise ShapeError(
                    f"query has {query.dim()} dimensions and {name} has {tensor.dim()}.",
                    "Give all three a batch dimension, or none of them.",
                )
            if tensor.dtype != dtype and not torch.is_autocast_enabled(tensor.device.type):
                raise DtypeError(
                    f"{name} has dtype {tensor.dtype}, and the layer has {dtype}.",
                    f"Convert one of them, for example {name}.to({dtype}).",
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                f"key has shape {tuple(key.shape)} and value has {tuple(value.shape)}.", "Give one value per key."
            )
        batch_axis = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch_axis] != key.shape[batch_axis]:
            raise ShapeError(
                f"query has {query.shape[batch_axis]} samples and key has {key.shape[batch_axis]}: "
                f"with batch_first={self.batch_first} inputs are {layout}.",
                f"Give both the same batch size, or construct the layer with batch_first={not self.batch_first}.",
            )


def _attend(request: AttentionRequest, *, need_weights: bool, average: bool = False) -> tuple[Tensor, Tensor | None]:
    """Attend and merge the heads: (batch, queries, heads * head_dim), and the weights if needed."""
    if is_computed_per_head(request, need_weights=need_weights):
        output, weights = attend_per_head(request, need_weights=need_weights, average=average)
        return merge_heads(output), weights
    if need_weights:
        output, weights = attend_with_weights(request, average=average)
        return merge_heads(output), weights
    return merge_heads(attend(request).output), None


def _zero_nonfinite_padding(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace NaN and inf in hidden tokens by 0: in the projection, 0 * NaN would reach a parameter's gradient."""
    if key_padding_mask is None or key_padding_mask.shape != key.shape[:-1] or key_padding_mask.requires_grad:
        return query, key, value  # `convert_masks` rejects a mask of another shape
    if can_read_values(key.device) and bool(torch.isfinite(key.detach().sum() + value.detach().sum())):
        return query, key, value
    hidden = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask == -torch.inf
    clean = _zero_nonfinite_where(hidden, key)
    of_value = clean if value is key else _zero_nonfinite_where(hidden, value)
    return clean if query is key else query, clean, of_value


def _zero_nonfinite_where(hidden: Tensor, x: Tensor) -> Tensor:
    """Replace NaN and inf in hidden tokens by 0; finite hidden tokens are kept, because they may be queries too."""
    return x.masked_fill((hidden & ~x.isfinite().all(-1))[..., None], 0)


def set_fused_path(module: nn.MultiheadAttention) -> None:
    """Make nn.TransformerEncoderLayer call the module instead of its fused operator if the module is our drop-in.

    In eval without gradients the encoder layer passes the weights of `self_attn` to one fused operator, unless one of
    its submodules has a forward hook. The hook added here does nothing; copies and adapters of the module keep it.
    """
    # register_forward_pre_hook never uses the key -1, so that no later hook replaces this one, even after
    # unpickling in another process.
    if isinstance(module, MultiheadAttention):
        module._forward_pre_hooks[_HOOK_KEY] = _do_nothing  # noqa: SLF001
    else:
        module._forward_pre_hooks.pop(_HOOK_KEY, None)  # noqa: SLF001


def _do_nothing(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing: a forward pre-hook that keeps the inputs."""


def _convert_inputs(
    convert: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert query, key and value; inputs that are the same tensor stay the same tensor."""
    q = convert(query)
    k = q if key is query else convert(key)
    v = q if value is query else k if value is key else convert(value)
    return q, k, v
