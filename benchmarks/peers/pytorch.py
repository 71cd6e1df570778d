"""Our layer, and the same with PyTorch alone: nn.MultiheadAttention, hand-written SDPA, compiled flex_attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

import multihead as mh
from benchmarks.native.contenders import window_in_blocks
from benchmarks.peers.cases import STEPS, Trial
from benchmarks.peers.contender import CannotError, Contender, contender, load
from multihead import masks
from multihead.layer.cache import KeyValueCache

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def multihead(trial: Trial) -> Contender:
    """Our layer, or our attention alone, with the mask as a value."""
    case = trial.case
    if trial.alone is not None:
        return _multihead_alone(trial)
    layer = mh.MultiHeadAttention(trial.x.shape[2], trial.heads, dtype=trial.x.dtype)
    load((layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj), trial)
    arguments: dict[str, Any] = {}
    if case.kind == "decoding":
        cache = KeyValueCache()
        cache.extend(*trial.held)
        arguments = {"cache": cache, "mask": masks.Causal()}
    elif case.kind == "cross":
        arguments = {"memory": trial.memory}
    elif case.kind == "ragged":
        arguments = {"lengths": trial.lengths}
    elif case.kind == "documents":
        arguments = {"mask": masks.Documents(trial.lengths)}
    elif case.kind == "window":
        arguments = {"mask": masks.Window(*case.parts)}
    elif case.kind == "causal":
        arguments = {"mask": masks.Causal()}
    return contender(lambda x: layer(x, **arguments), layer, trial)


def _multihead_alone(trial: Trial) -> Contender:
    mask = masks.Causal() if trial.case.kind == "causal" else masks.Full()
    k, v = (tensor.unflatten(2, (trial.heads, -1)).transpose(1, 2) for tensor in trial.alone)

    def forward(x: Tensor) -> Tensor:
        q = x.unflatten(2, (trial.heads, -1)).transpose(1, 2)  # (batch, heads, queries, head_dim)
        return mh.attention(q, k, v, mask=mask).transpose(1, 2).flatten(2)

    return Contender(forward)


def torch_layer(trial: Trial) -> Contender:
    """nn.MultiheadAttention without weights."""
    return _torch_layer(trial, need_weights=False)


def torch_layer_with_weights(trial: Trial) -> Contender:
    """nn.MultiheadAttention as it is called by default: it returns the weights, averaged over heads."""
    return _torch_layer(trial, need_weights=True)


def torch_layer_nested(trial: Trial) -> Contender:
    """nn.MultiheadAttention on a nested tensor, as nn.TransformerEncoder calls it on a padded batch."""
    layer = _loaded_torch_layer(trial)
    inside = torch.arange(trial.case.queries) < trial.lengths[:, None]
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")

    def forward(x: Tensor) -> Tensor:
        nested = torch._nested_tensor_from_mask(x, inside, mask_check=False)  # noqa: SLF001 - nn.TransformerEncoder's way
        output = layer(nested, nested, nested, need_weights=False)[0]
        return output.to_padded_tensor(0.0, x.shape)

    return contender(forward, layer, trial)


def _torch_layer(trial: Trial, *, need_weights: bool) -> Contender:
    case = trial.case
    if case.kind == "decoding":
        raise CannotError("it has no cache: each step would project all tokens again")
    layer = _loaded_torch_layer(trial)
    arguments: dict[str, object] = {"need_weights": need_weights}
    if case.kind == "ragged":
        arguments["key_padding_mask"] = ~trial.shown[:, 0, 0]
    elif trial.shown is not None:
        arguments["attn_mask"] = ~trial.shown[0, 0]
        arguments["is_causal"] = case.kind == "causal" and not need_weights
    memory = trial.memory

    def forward(x: Tensor) -> Tensor:
        other = x if memory is None else memory
        return layer(x, other, other, **arguments)[0]

    return contender(forward, layer, trial)


def _loaded_torch_layer(trial: Trial) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(trial.x.shape[2], trial.heads, batch_first=True, dtype=trial.x.dtype)
    q, k, v, out = trial.weights
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([q.weight, k.weight, v.weight]))
        layer.in_proj_bias.copy_(torch.cat([q.bias, k.bias, v.bias]))
        layer.out_proj.weight.copy_(out.weight)
        layer.out_proj.bias.copy_(out.bias)
    return layer


def by_hand(trial: Trial) -> Contender:
    """Four linear functions and SDPA, with is_causal or a dense mask."""
    causal, shown = trial.case.kind == "causal", trial.shown
    mask = None if causal else shown
    return _projected(trial, lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal))


def by_hand_together(trial: Trial) -> Contender:
    """The same with one matrix product for q, k and v."""
    q, k, v, out = trial.weights
    together = tuple(_leaf(torch.cat(parts), trial) for parts in zip(q, k, v, strict=True))
    last = tuple(_leaf(tensor, trial) for tensor in out)
    causal = trial.case.kind == "causal"

    def forward(x: Tensor) -> Tensor:
        split = linear(x, *together).unflatten(2, (3, trial.heads, -1)).permute(2, 0, 3, 1, 4)
        output = scaled_dot_product_attention(*split.unbind(), is_causal=causal)
        return linear(output.transpose(1, 2).flatten(2), *last)

    return Contender(forward, (*together, *last))


def by_hand_in_pieces(trial: Trial) -> Contender:
    """The calls that a user writes to need no mask: one per sample, per document, or per block of the window."""
    case = trial.case
    if case.kind == "window":
        return _projected(trial, lambda q, k, v: window_in_blocks(q, k, v, size=case.parts[0]))

    def each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = zip(*(tensor.split(case.parts, 2) for tensor in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*piece) for piece in pieces], 2)

    packed = _projected(trial, each)
    if case.kind == "documents":
        return packed
    inside = (torch.arange(case.queries) < trial.lengths[:, None]).flatten().nonzero().flatten()

    def forward(x: Tensor) -> Tensor:
        tokens = packed.forward(x.flatten(0, 1)[inside][None])
        return x.new_zeros(x.shape).flatten(0, 1).index_copy_(0, inside, tokens[0]).view_as(x)

    return Contender(forward, packed.parameters)


def flex(trial: Trial) -> Contender:
    """Four linear functions and compiled flex_attention, whose block mask is made before."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, shown = trial.case, trial.shown
    if case.training:
        raise CannotError("compiled flex_attention has no backward pass on the CPU")
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if case.kind == "decoding":
        return _decoding_with_flex(trial)
    if shown is not None:
        lengths, query_key = trial.lengths, (case.queries, case.queries)
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        modifier = {
            "ragged": lambda sample, _head, _query, key: key < lengths[sample],
            "documents": lambda _sample, _head, query, key: document[query] == document[key],
            "window": lambda _sample, _head, query, key: (key <= query) & (query - key < case.parts[0]),
            "causal": lambda _sample, _head, query, key: key <= query,
        }[case.kind]
        block_mask = create_block_mask(modifier, shown.shape[0], None, *query_key, device="cpu")
    return _projected(trial, lambda q, k, v: compiled(q, k, v, block_mask=block_mask))


def _decoding_with_flex(trial: Trial) -> Contender:
    """Compiled flex_attention on a buffer for all steps; the mask hides the keys that are not written yet."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    held, count = _buffers(trial), trial.case.keys
    position = torch.tensor(count)
    size = held[0].shape[2]
    block_mask = create_block_mask(lambda _s, _h, _q, key: key <= position, None, None, 1, size, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = int(position)
        held[0][:, :, at : at + 1], held[1][:, :, at : at + 1] = k, v
        output = compiled(q, *held, block_mask=block_mask)
        position.add_(1)
        return output

    return _projected(trial, attend)


def by_hand_decoding(trial: Trial) -> Contender:
    """Four linear functions, a key/value buffer for all steps, and SDPA on the part that is written."""
    held, at = _buffers(trial), [trial.case.keys]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = at[0]
        at[0] = last = first + 1
        held[0][:, :, first:last], held[1][:, :, first:last] = k, v
        return scaled_dot_product_attention(q, held[0][:, :, :last], held[1][:, :, :last])

    return _projected(trial, attend)


def _buffers(trial: Trial) -> tuple[Tensor, Tensor]:
    """Return keys and values with space for all steps, (batch, heads, keys + 1 + STEPS, head_dim) each."""
    k, v = trial.held
    return nn.functional.pad(k, (0, 0, 0, 1 + STEPS)), nn.functional.pad(v, (0, 0, 0, 1 + STEPS))


def _projected(trial: Trial, attend: Attend) -> Contender:
    """Make a contender of an attention between the four projections."""
    leaves = [tuple(_leaf(tensor, trial) for tensor in projection) for projection in trial.weights]
    memory = trial.memory

    def forward(x: Tensor) -> Tensor:
        sources = (x, x, x) if memory is None else (x, memory, memory)
        split = (
            linear(source, *projection).unflatten(2, (trial.heads, -1)).transpose(1, 2)
            for source, projection in zip(sources, leaves[:3], strict=True)
        )  # (batch, heads, length, head_dim) each
        return linear(attend(*split).transpose(1, 2).flatten(2), *leaves[3])

    return Contender(forward, tuple(tensor for projection in leaves for tensor in projection))


def _leaf(tensor: Tensor, trial: Trial) -> Tensor:
    return tensor.clone().requires_grad_(trial.case.training)
