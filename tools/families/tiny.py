"""Build a tiny model of any class of transformers: its configuration shrunk field by field, its weights random."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tools.families.overrides import ARGUMENTS, CONFIGURATIONS

WIDTH, HEADS, HEAD_DIM, LAYERS, VOCABULARY, POSITIONS = 32, 4, 8, 2, 128, 128
IMAGE, PATCH = 32, 8
LARGEST = 25_000_000  # parameters of a tiny model; more means that a field was missed


class NotTinyError(Exception):
    """A field of the configuration was not shrunk."""


@dataclasses.dataclass
class _Build:
    """Values shared by a configuration and the configurations in it.

    Attributes:
        tokens: new id of each special token whose id is outside the small vocabulary.
    """

    tokens: dict[int, int] = dataclasses.field(default_factory=dict)

    def token(self, old: int) -> int:
        if 0 <= old < 16 or old < 0:
            return old
        return self.tokens.setdefault(old, VOCABULARY - 1 - len(self.tokens))


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def _to(value: int) -> Callable[[int], int]:
    return lambda _: value


# The first pattern that the whole name of an int field matches decides its new value.
_RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"(.*_)?vocab_size(_.*)?|codebook_size|.*num_embeddings|.*_vocab_size|vocabulary_size", _at_most(VOCABULARY)),
    (r"n_group|num_expert_groups?|num_groups?|n_groups", _at_most(2)),
    (r"topk_group|num_limited_groups|group_limited.*", _at_most(1)),
    (r".*(num_key_value|num_kv|n_kv|kv_n|key_value)_?heads?.*|n_head_kv|multi_query_group_num", _at_most(2)),
    (r".*num_image_tokens|.*_seq_length|.*image_seq_len.*", _at_most(16)),
    (
        r"(.*_)?(num_)?(attention|attn|query)_?heads?|(.*_)?n_heads?|(.*_)?num_.*heads?|(.*_)?heads|.*_attention_heads|.*_nhead",
        _at_most(HEADS),
    ),
    (
        r".*rope_head_dim|.*(head|kv)_(dim|size|channels)|d_kv|.*head_dim.*|kv_channels|attention_head_size|d_head|.*dim_head.*|.*head_size",
        _at_most(HEAD_DIM),
    ),
    (r".*lora_rank.*|.*_rank", _at_most(16)),
    (
        r".*(num|n)_(.*_)?(layers?|blocks|hidden_layers)|.*_layers|.*depth|n_layers?|num_.*layers?.*|layers",
        _at_most(LAYERS),
    ),
    (r".*(experts_per_tok|experts_per_token|top_?k|topk_group|experts_topk)|moe_k", _at_most(2)),
    (r".*(num|n)_(.*_)?experts|num_experts.*|.*_experts", _at_most(4)),
    (
        r".*(max|n)_?(.*_)?(position|positions|position_embeddings|ctx|seq_len|seqlen|length|sequence_length).*|.*max_.*len.*|.*_positions",
        _at_most(POSITIONS),
    ),
    (r".*image_size|.*img_size|.*input_size|.*resolution|.*image_(height|width)", _at_most(IMAGE)),
    (r".*patch_size.*", _at_most(PATCH)),
    (r".*window_size|.*sliding_window|attention_window|local_attention|.*window", _at_most(4)),
    (r".*chunk_size|.*block_size", _at_most(4)),
    (r"num_mel_bins|.*mel_bins|n_mels|input_feat_per_channel|.*num_frequencies", _at_most(16)),
    (r".*(intermediate|ffn|mlp|ff|inner|feedforward|feed_forward).*", _at_most(2 * WIDTH)),
    (
        r".*(hidden|embed|embd|model|projection|proj|conv|state|cross|text|vision|channels|output|width|latent|encoder|decoder|key|value|query|emb|feature).*(size|dim|s|d)|d_.*|.*_dim|.*dims?|.*_width|.*hidden.*|width|.*channels|.*features?|.*_size",
        _at_most(WIDTH),
    ),
    (r"num_.*(queries|latents|tokens|slots|labels|points)|.*num_queries", _at_most(8)),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)
_KEPT = re.compile(
    r"id2label|label2id|num_labels|.*kernel.*|.*stride.*|.*padding.*|spatial_merge_size|temporal_patch_size|pooling_.*|"
    r".*kernel_size|num_channels|in_channels|.*in_chans|type_vocab_size|.*seed|.*group.*|.*ratio|.*num_frames|.*period|"
    r".*interval|.*offset|.*_every.*|.*bits|sampling_rate|.*merge_size|.*shortcut.*|n_shared_experts|first_k_dense.*|.*downsample.*"
)
_GROUPS = re.compile(r"n_group|num_expert_groups?|n_groups|topk_group")  # of experts
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "mlp_types", "attention_types")


def tiny_configuration(kind: Any, model: Any = None) -> Any:
    """Return a small configuration of a class, perhaps for one model class, with all parts of the default one."""
    config = _shrunk(full_configuration(kind, model), _Build())
    for name, value in CONFIGURATIONS.get(getattr(model, "__name__", ""), {}).items():
        if name != "start":
            setattr(config, name, value)
    return config


def full_configuration(kind: Any, model: Any = None) -> Any:
    """Return the default configuration of a class, with what a model class needs besides."""
    own = CONFIGURATIONS.get(kind.__name__, {}) | CONFIGURATIONS.get(getattr(model, "__name__", ""), {})
    return kind(**own.get("start", {}))


def _shrunk(config: Any, build: _Build) -> Any:
    kind = type(config)
    own = {key: value for key, value in CONFIGURATIONS.get(kind.__name__, {}).items() if key != "start"}
    default = _default(kind)
    values: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(vars(config))
    for name in names:
        if name.startswith("_") or name in ("dtype", "id2label", "label2id", "transformers_version", "architectures"):
            continue
        value = _value(config, name)
        new = _new_value(name, value, build)
        if new is not _UNCHANGED:
            values[name] = new
        elif default is None or _value(default, name) != value:
            values[name] = value
    values |= _layers(config, names)
    for grouped, heads in (("num_key_value_heads", "num_attention_heads"), ("n_head_kv", "n_head")):
        if values.get(grouped) is not None and _value(config, grouped) == _value(config, heads):
            values[grouped] = values[heads]  # every head has keys of its own
    if "kv_lora_rank" in names and "num_attention_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    stages = getattr(config, "out_indices", None)
    if stages and list(stages) != list(getattr(default, "out_indices", None) or []):
        if "num_hidden_layers" in names:
            values["num_hidden_layers"] = max(values.get("num_hidden_layers", LAYERS), len(stages))
            stages = range(values["num_hidden_layers"] - len(stages) + 1, values["num_hidden_layers"] + 1)
        values["out_indices"] = list(stages)
    values |= own
    return kind(**values)


_UNCHANGED = object()
_MISSING = {
    "pad_token_id": 0,
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCABULARY,
    "prediction_length": 4,
}


def _new_value(name: str, value: Any, build: _Build) -> Any:
    if isinstance(value, PreTrainedConfig):
        return _shrunk(value, build)
    if value is None:
        return _MISSING.get(name, _UNCHANGED)
    if re.search(r"token_ids?$|token_index|_token$|^eos_token$|^mask_index$", name) and not isinstance(value, bool):
        return _new_tokens(value, build)
    if isinstance(value, bool) or name in _PER_LAYER or (_KEPT.fullmatch(name) and not _GROUPS.fullmatch(name)):
        return _UNCHANGED
    if isinstance(value, int):
        return _small(name, value)
    if isinstance(value, float) and "softcap" in name:
        return 6.0  # scores of sharp attention bend at it
    if isinstance(value, dict) and "mrope_section" in value:
        return value | {"mrope_section": [2, 1, 1]}
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return _small_list(name, list(value))
    return _UNCHANGED


def _new_tokens(value: Any, build: _Build) -> Any:
    if isinstance(value, int):
        return build.token(value)
    if isinstance(value, list) and all(isinstance(each, int) for each in value):
        return [build.token(each) for each in value]
    return _UNCHANGED


def _small(name: str, value: int) -> int:
    for pattern, rule in _COMPILED:
        if pattern.fullmatch(name):
            return rule(value)
    return value


def _small_list(name: str, values: list[int]) -> list[int]:
    if re.search("depth|layers|blocks", name) and len(values) <= 6 and max(values) > 1:
        return [1] * len(values)
    if re.search("size|dim|channels|embed|hidden", name) and max(values) > WIDTH and "image" not in name:
        factor = max(max(values) // 64, 1)
        return [max(value // factor // 8 * 8, 8) for value in values]
    if re.search("heads", name):
        return [1 << (min(value, HEADS).bit_length() - 1) for value in values]  # powers of two divide the width
    if re.search("image_size|img_size|input_size|resolution", name):
        return [min(value, IMAGE) for value in values]
    return values


def _layers(config: Any, names: list[str]) -> dict[str, Any]:
    """Return per-layer lists cut to one layer of each kind, and their number."""
    lists = {name: _value(config, name) for name in names}
    count = getattr(config, "num_hidden_layers", 0) or 0
    per_layer = {
        name: value
        for name, value in lists.items()
        if isinstance(value, list) and isinstance(count, int) and len(value) == count and count > LAYERS
    }
    per_layer |= {
        name: value for name in _PER_LAYER if isinstance(value := lists.get(name), list) and len(value) == count
    }
    if not per_layer:
        return {}
    first: dict[tuple[Any, ...], int] = {}
    for index in range(count):
        first.setdefault(tuple(str(each[index]) for each in per_layer.values()), index)
    chosen = sorted(first.values())[:4]
    while len(chosen) < min(LAYERS, count):
        chosen.append(chosen[-1])
    new: dict[str, Any] = {name: [value[index] for index in chosen] for name, value in per_layer.items()}
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if key in names:
            new[key] = len(chosen)
    return new


def _value(config: Any, name: str) -> Any:
    # Reading a field that may vary across layers raises an error.
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def _default(kind: Any) -> Any:
    try:
        return kind()
    except Exception:  # noqa: BLE001 - a configuration that needs arguments has no default
        return None


def tiny_model(kind: Any, config: Any) -> Any:
    """Build a model of a class, with random weights that vary, in evaluation mode.

    Raises:
        NotTinyError: it has too many parameters.
    """
    arguments = ARGUMENTS.get(kind.__name__, {})
    try:
        with torch.device("meta"):
            sketch = kind(config, **arguments)
    except Exception:  # noqa: BLE001 - some models read values while they are built
        sketch = None
    if sketch is not None:
        sizes = {name: each.numel() for name, each in [*sketch.named_parameters(), *sketch.named_buffers()]}
        if sum(sizes.values()) > LARGEST:
            largest = max(sizes, key=lambda name: sizes[name])
            raise NotTinyError(f"{largest} has {sizes[largest]:,} numbers of {sum(sizes.values()):,}.")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config, **arguments).eval()
        randomise(model)
    return model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw weights that let every part of the model matter: default ones are so small that errors are hidden."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            noise = torch.randn(parameter.shape, dtype=torch.float32)
            if "sink" in name or isinstance(module, nn.Embedding):
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                fan = (
                    parameter[0].numel()
                    if parameter.dim() != 3 or "Conv" in type(module).__name__
                    else parameter.shape[-1]
                )
                parameter.copy_(noise / max(fan, 1) ** 0.5)
            else:
                parameter.add_(noise.to(parameter.dtype), alpha=0.2)


_OF_SCORES = re.compile(
    r"(^|[._])(q|k|wq|wk|query|key|qkv|wqkv|query_key_value|c_attn|q_attn|qkv_proj|in_proj|to_q|to_k|to_qkv|q_proj|k_proj|"
    r"q_lin|k_lin|q_[ab]_proj|kv_[ab]_proj.*|query_proj|key_proj|q_norm|k_norm|q_layernorm|k_layernorm|query_norm|key_norm|"
    r"query_layernorm|key_layernorm|kv_proj|kv|linear_q|linear_k|matrix_q|matrix_k|self_attention)([._]linear)?[._](weight|kernel)$"
)


@torch.no_grad()
def sharpen(module: nn.Module, factor: float) -> bool:
    """Multiply the weights from which an attention layer computes its queries and keys; return whether it has any."""
    found: list[Tensor] = [each for name, each in module.named_parameters() if _OF_SCORES.search(name.lower())]
    for each in found:
        each.mul_(factor)
    return bool(found)


def steepen(module: Any, factor: float) -> bool:
    """Multiply the scale of an attention layer, where norms bound its scores; return whether it has one."""
    if not isinstance(getattr(module, "scaling", None), float):
        return False
    module.scaling *= factor
    return True
