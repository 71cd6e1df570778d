"""Give one layer of a Llama attention that bypasses transformers' AttentionInterface, in part or as a whole.

Each is what somebody may write, and right with eager attention. With ours the model must compute the same, or be
rejected: nothing may be lost without a word.
"""

# ruff: noqa: D102, SLF001 - each forward is written as those of transformers are
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

LAYER = 1  # the layer that is changed


def detour(model: nn.Module, name: str) -> None:
    """Change the attention of one layer of a Llama.

    Args:
        model: contains layers of Llama.
        name: one of DETOURS.
    """
    found = [module for module in model.modules() if type(module) is LlamaAttention]
    layer: Any = found[LAYER]
    change = DETOURS[name]
    if isinstance(change, type):
        layer.__class__ = change
    else:
        layer.forward = change(layer)


def _heads(layer: Any, hidden_states: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a layer: (batch, heads or kv_heads, tokens, head_dim) each."""
    shape = (*hidden_states.shape[:-1], -1, layer.head_dim)
    q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in (layer.q_proj, layer.k_proj, layer.v_proj))
    return *modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings), v


def _scores(layer: Any, hidden_states: Tensor, position_embeddings: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scores of a layer, (batch, heads, tokens, tokens), and its values per head."""
    q, k, v = _heads(layer, hidden_states, position_embeddings)
    groups = layer.num_key_value_groups
    scores = q @ k.repeat_interleave(groups, 1).mT * layer.scaling
    return scores if mask is None else scores + mask, v.repeat_interleave(groups, 1)


def _merged(layer: Any, output: Tensor) -> Tensor:
    """Return the output of a layer from that of its heads, (batch, tokens, heads, head_dim)."""
    projected: Tensor = layer.o_proj(output.flatten(2))
    return projected


class Outside(LlamaAttention):  # type: ignore[misc]  # the class is Any to mypy
    """It computes the softmax itself, under a name without attention."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
        scores, v = _scores(self, hidden_states, position_embeddings, attention_mask)
        return _merged(self, (scores.softmax(-1) @ v).transpose(1, 2)), None


class OutsideAttention(Outside):
    """The same under a name with attention."""


class BranchAttention(LlamaAttention):  # type: ignore[misc]  # the class is Any to mypy
    """It calls the eager function in one layer."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if self.layer_idx == LAYER:
            attend = eager_attention_forward
        heads = _heads(self, hidden_states, position_embeddings)
        return _merged(self, attend(self, *heads, attention_mask, scaling=self.scaling)[0]), None


class AlwaysEagerAttention(LlamaAttention):  # type: ignore[misc]  # the class is Any to mypy
    """It calls the eager function as an attribute of its module."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        heads = _heads(self, hidden_states, position_embeddings)
        output = modeling_llama.eager_attention_forward(self, *heads, attention_mask, scaling=self.scaling)[0]
        return _merged(self, output), None


class MixerAttention(LlamaAttention):  # type: ignore[misc]  # the class is Any to mypy
    """It divides exponentials by their sum instead of calling a softmax."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
        scores, v = _scores(self, hidden_states, position_embeddings, attention_mask)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return _merged(self, (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2)), None


class BiasAttention(LlamaAttention):  # type: ignore[misc]  # the class is Any to mypy
    """It adds a bias to the mask before it calls the function of the interface."""

    def forward(self, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        tokens = torch.arange(attention_mask.shape[-1])
        bias = -0.5 * (tokens[:, None] - tokens).abs()[-attention_mask.shape[-2] :]
        return super().forward(*args, attention_mask=attention_mask + bias, **options)


class ScaledAttention(LlamaAttention):  # type: ignore[misc]  # the class is Any to mypy
    """It gives its eager function a tensor that no other attention function takes."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _scaled)
        heads = _heads(self, hidden_states, position_embeddings)
        scale = torch.arange(1.0, 1.0 + heads[0].shape[1])
        output = attend(self, *heads, attention_mask, scaling=self.scaling, head_scale=scale)[0]
        return _merged(self, output), None


class SlopedAttention(LlamaAttention):  # type: ignore[misc]  # the class is Any to mypy
    """Its eager function adds a bias by itself."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _sloped)
        heads = _heads(self, hidden_states, position_embeddings)
        return _merged(self, attend(self, *heads, attention_mask, scaling=self.scaling)[0]), None


def _scaled(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, head_scale: Any = None, **options: Any
) -> Any:
    output, weights = eager_attention_forward(module, query, key, value, attention_mask, **options)
    return output if head_scale is None else output * head_scale[:, None], weights


def _sloped(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    tokens = torch.arange(key.shape[2])
    bias = -0.5 * (tokens[:, None] - tokens).abs()
    mask = bias if attention_mask is None else attention_mask + bias
    return eager_attention_forward(module, query, key, value, mask, **options)


def _replaced(layer: Any) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
        scores, v = _scores(layer, hidden_states, position_embeddings, attention_mask)
        return _merged(layer, (scores.softmax(-1) @ v).transpose(1, 2)), None

    return forward


# A class of the layer, or a function that returns a forward for it.
DETOURS: dict[str, Any] = {
    "softmax of its own": Outside,
    "softmax of its own, named attention": OutsideAttention,
    "eager function in one layer": BranchAttention,
    "eager function of the module": AlwaysEagerAttention,
    "exponentials and their sum": MixerAttention,
    "bias added to the mask": BiasAttention,
    "replaced forward": _replaced,
    "tensor for the eager function": ScaledAttention,
    "bias of the eager function": SlopedAttention,
}
