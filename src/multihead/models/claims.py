"""Check the sizes in a model's configuration before a model is built from it."""

from __future__ import annotations

import re
from typing import Any

from multihead.errors import ModelError

MAX_LAYERS = 4096
"""Maximum number of layers in a configuration; the deepest published models have 1,000. Without a limit, a broken file
could make transformers build layers for hours, at a millisecond or more per layer."""

MAX_LABELS = 10_000_000
"""Maximum number of classes (`num_labels`) in a configuration; transformers creates a string for each class."""

# Matches entries such as num_hidden_layers, n_layer, encoder_layers, depths, inner_group_num of ALBERT, and the
# block_count of a GGUF file.
_LAYER_COUNT_PATTERN = re.compile(
    r"^(?!max_).*(?<![a-z])(?:n_?)?(?:layers?|depths?|blocks|stages|hidden_groups|group_num|block_count)$"
)

# Matches num_attention_heads, n_head, num_hidden_layers, hidden_size, d_model, the names of GGUF files for them, ...
# and no number of one layer, which may count from the end (vision_feature_layer).
_SIZE_PATTERN = re.compile(
    r"(?:(?:encoder|decoder|num|n)_)+(?:(?:attention_|key_value_|kv_)?heads?|(?:hidden_)?layers?)|"
    r"attention\.head_count(_kv)?|embedding_length|block_count|"
    r"hidden_size|d_model|n_embd|head_dim|d_kv|intermediate_size|vocab_size"
)

# Of the sizes, those of which no model has 0; in a GGUF file a model without attention has 0 heads.
_POSITIVE_PATTERN = re.compile(
    r"(?:(?:encoder|decoder|num|n)_)+(?:attention_|key_value_|kv_)?heads?|hidden_size|d_model|n_embd|vocab_size"
)


def check_configured_sizes(model: str, config: Any) -> None:
    """Reject more layers or classes than any model has, and sizes that are no count.

    Args:
        model: name of the model for the error message.
        config: the configuration, parsed from JSON.

    Raises:
        ModelError: a number is above MAX_LAYERS or MAX_LABELS, or a width or number of layers or heads is
            negative, 0 where no model has 0, or no integer.
    """
    left = [("", config)]
    for name, value in left:  # the body appends the values of nested configurations to this list
        most = MAX_LABELS if name == "num_labels" else MAX_LAYERS
        if isinstance(value, dict):
            left += [(str(key), each) for key, each in value.items()]
        elif isinstance(value, list):
            left += [(name, each) for each in value]
        elif _SIZE_PATTERN.fullmatch(name) and (
            isinstance(value, (str, float))
            or (isinstance(value, int) and value < (_POSITIVE_PATTERN.fullmatch(name) is not None))
        ):
            raise ModelError(
                f"{model} cannot be read: {name} is {value!r} in its configuration.",
                f"Give a model whose {name} is a positive integer.",
            )
        elif isinstance(value, int) and value > most and (name == "num_labels" or _LAYER_COUNT_PATTERN.search(name)):
            raise ModelError(
                f"{model} cannot be read: {name} is {value:,} in its configuration.",
                f"Give a model whose {name} is at most {most:,}.",
            )
