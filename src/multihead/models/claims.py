"""Check the sizes in a model's configuration before a model is built from it."""

from __future__ import annotations

import os
import re
import struct
from typing import Any, BinaryIO

from multihead.errors import ModelError

MAX_LAYERS = 4096
"""Maximum number of layers in a configuration; the deepest published models have 1,000. Without a limit, a broken file
could make transformers build layers for hours, at a millisecond or more per layer."""

MAX_LABELS = 10_000_000
"""Maximum number of classes (`num_labels`) in a configuration; transformers creates a string for each class."""

# Matches entries such as num_hidden_layers, n_layer, encoder_layers, depths, and inner_group_num of ALBERT.
_LAYER_COUNT_PATTERN = re.compile(
    r"^(?!max_).*(?<![a-z])(?:n_?)?(?:layers?|depths?|blocks|stages|hidden_groups|group_num)$"
)
# number of a GGUF value type -> bytes per value
_GGUF_BYTES_OF_TYPE = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING_TYPE, _GGUF_ARRAY_TYPE = 8, 9
_GGUF_INTEGER_FORMATS = {4: "I", 5: "i", 10: "Q", 11: "q"}


def check_configured_sizes(model: str, config: Any) -> None:
    """Reject a configuration with more layers or classes than any model has.

    Args:
        model: name of the model for the error message.
        config: the configuration, parsed from JSON.

    Raises:
        ModelError: a number is above MAX_LAYERS or MAX_LABELS.
    """
    left = [("", config)]
    for name, value in left:  # the body appends the values of nested configurations to this list
        most = MAX_LABELS if name == "num_labels" else MAX_LAYERS
        if isinstance(value, dict):
            left += [(str(key), each) for key, each in value.items()]
        elif isinstance(value, list):
            left += [(name, each) for each in value]
        elif isinstance(value, int) and value > most and (name == "num_labels" or _LAYER_COUNT_PATTERN.search(name)):
            raise ModelError(
                f"{model} cannot be read: {name} is {value:,} in its configuration.",
                f"Give a model whose {name} is at most {most:,}.",
            )


def read_gguf_layer_counts(file: BinaryIO) -> dict[str, int]:
    """Read {"num_layers": n} from the header of a GGUF file; {} if the header has no number of layers."""

    def read_number(form: str) -> int:
        return int(struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0])

    def skip_values(kind: int, count: int) -> None:
        if kind == _GGUF_STRING_TYPE:
            for _ in range(count):  # a wrong count raises an error at the end of the file
                file.seek(read_number("Q"), os.SEEK_CUR)
        elif kind == _GGUF_ARRAY_TYPE:
            for _ in range(count):
                skip_values(read_number("I"), read_number("Q"))
        else:
            file.seek(_GGUF_BYTES_OF_TYPE[kind] * count, os.SEEK_CUR)

    file.seek(16)  # skip the format, its version and the number of tensors
    for _ in range(read_number("Q")):
        name = file.read(read_number("Q"))
        kind = read_number("I")
        if name.endswith(b".block_count") and kind in _GGUF_INTEGER_FORMATS:
            return {"num_layers": read_number(_GGUF_INTEGER_FORMATS[kind])}
        skip_values(kind, 1)
    return {}
