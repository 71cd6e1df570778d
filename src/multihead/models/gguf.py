"""Read what the header of a GGUF file says about attention and positions, and set it in the configuration.

transformers builds the configuration of a GGUF file from the entries that it knows, and drops the others without a
word: the scaling of rotary positions, sliding windows, head sizes. This module sets these too, and rejects a file with
an entry or a tensor of attention that neither of them reads. The meaning of the entries is that of llama.cpp.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from multihead.errors import ModelError

_MAX_KEPT_VALUES = 4096  # longer arrays are vocabularies
_STRING, _ARRAY = 8, 9
# number of a value type -> its format in `struct`
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32_TENSOR = 0
# entries besides those of "attention." and "rope." that change attention
_OTHER_ENTRIES = frozenset({"attn_logit_softcapping", "use_alibi", "max_alibi_bias"})
_ATTENTION_TENSORS = re.compile(r"attn|rope")
# tensors that hold what the configuration says: the frequencies of an old format, and the factors read here
_REDUNDANT_TENSORS = re.compile(r".*attn_rot_embd|rope_(freqs|factors_(long|short))\.weight")
_EPSILONS = ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon", "rms_norm_eps")


@dataclass(frozen=True, eq=False)
class GGUFHeader:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        entries: name of an entry -> its value; None for arrays that are longer than any of attention.
        tensors: name of a tensor -> its shape as in PyTorch, the number of its type, and its place in the file, bytes.
    """

    path: Path
    entries: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]

    @property
    def architecture(self) -> str:
        """The name of the architecture, which is the prefix of the entries of the model."""
        return str(self.entries.get("general.architecture", ""))

    @property
    def of_model(self) -> dict[str, Any]:
        """The entries of the model, without their prefix."""
        prefix = f"{self.architecture}."
        return {name.removeprefix(prefix): value for name, value in self.entries.items() if name.startswith(prefix)}

    def rows(self, tensor: str) -> int | None:
        """Return the first size of a tensor; None if the file does not have it."""
        return self.tensors[tensor][0][0] if tensor in self.tensors else None

    def floats(self, tensor: str) -> list[float] | None:
        """Return the numbers of a float32 tensor; None if the file does not have it."""
        if tensor not in self.tensors:
            return None
        shape, kind, place = self.tensors[tensor]
        if kind != _FLOAT32_TENSOR:
            raise ModelError(
                f"{self.path.name} cannot be read: its tensor {tensor} is not in float32.", "Convert the model again."
            )
        with self.path.open("rb") as file:
            file.seek(place)
            return list(struct.unpack(f"<{math.prod(shape)}f", file.read(4 * math.prod(shape))))


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the entries and the list of tensors of a GGUF file, without its vocabulary and its tensors.

    Raises:
        struct.error, ValueError, KeyError: the file is not a GGUF file, or it is cut off.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it is not a GGUF file")
        _, num_tensors, num_entries = struct.unpack("<IQQ", file.read(20))
        entries: dict[str, Any] = {}
        for _ in range(num_entries):
            name = _read_string(file)
            entries[name] = _read_value(file, _read(file, "I"))
        tensors = {}
        for _ in range(num_tensors):
            name = _read_string(file)
            shape = tuple(_read(file, "Q") for _ in range(_read(file, "I")))[::-1]
            tensors[name] = (shape, _read(file, "I"), _read(file, "Q"))
        alignment = int(entries.get("general.alignment", 32))
        start = -(-file.tell() // alignment) * alignment
    placed = {name: (shape, kind, start + place) for name, (shape, kind, place) in tensors.items()}
    return GGUFHeader(path, entries, placed)


def _read(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]


def _read_string(file: BinaryIO) -> str:
    return file.read(_read(file, "Q")).decode("utf-8", "replace")


def _read_value(file: BinaryIO, kind: int) -> Any:
    """Read a value of an entry; a long array, or one of arrays, is skipped."""
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _read(file, _FORMATS[kind])
    kind, count = _read(file, "I"), _read(file, "Q")
    if kind in (_STRING, _ARRAY):
        for _ in range(count):  # a wrong count raises an error at the end of the file
            _read_value(file, kind)
        return None
    values = file.read(count * struct.calcsize(f"<{_FORMATS[kind]}"))
    return list(struct.unpack(f"<{count}{_FORMATS[kind]}", values)) if count <= _MAX_KEPT_VALUES else None


def configure_attention(config: Any, header: GGUFHeader) -> None:
    """Set in a configuration what the header says about attention and positions.

    Args:
        config: the configuration that transformers read from the file; it is changed.
        header: the header of the file.

    Raises:
        ModelError: an entry changes the attention, and no model of transformers can be configured so.
    """
    _Configuration(config, header).read_all()


class _Configuration:
    """A configuration that is filled from a header, and the names of the entries that were read."""

    def __init__(self, config: Any, header: GGUFHeader) -> None:
        from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

        self.config, self.header, self.entries = config, header, header.of_model
        self.family = str(config.model_type).removesuffix("_text")
        known: Mapping[str, str | None] = GGUF_CONFIG_MAPPING.get(self.family, {})
        # A field that the family does not have is kept as an attribute that no layer reads.
        default = type(config)()
        self.read = {
            name
            for name, field in known.items()
            if field is not None and (hasattr(default, field) or not hasattr(config, field))
        }
        heads = self.entries.get("attention.head_count")
        self.num_heads = heads if isinstance(heads, int) and heads > 0 else None
        self.rotary: dict[str, Any] | None = getattr(config, "rope_parameters", None)
        if self.rotary is not None and "full_attention" in self.rotary:
            # Layers with a window keep their own base, and no scaling applies to them.
            self.rotary = self.rotary["full_attention"]

    def read_all(self) -> None:
        self._read_head_sizes()
        self._read_rotary()
        self._read_scaling()
        self._read_window()
        self._read_scores()
        for name, value in self.entries.items():
            changes = name.startswith(("attention.", "rope.")) or name in _OTHER_ENTRIES
            if changes and name not in self.read and value not in (None, 0, "", []):
                self.reject(name)

    def take(self, name: str, default: Any = None) -> Any:
        """Return an entry, and remember that it was read."""
        self.read.add(name)
        return self.entries.get(name, default)

    def reject(self, name: str) -> None:
        raise ModelError(
            f"{self.header.path.name} cannot be read: its entry {self.header.architecture}.{name} is "
            f"{self.entries.get(name)!r}, which this model of transformers does not have.",
            "Give the model as a folder that model.save_pretrained wrote.",
        )

    def _read_head_sizes(self) -> None:
        """Set the numbers of features and of key/value heads, from the entries or else from the shapes of tensors."""
        config, heads = self.config, self.num_heads
        rows, key_rows = (self.header.rows(f"blk.0.attn_{one}.weight") for one in "qk")
        key_size, value_size = self.take("attention.key_length"), self.take("attention.value_length")
        if heads is None:
            return
        self.head_dim = key_size or (rows // heads if rows else config.hidden_size // heads)
        if value_size not in (None, self.head_dim):
            self.reject("attention.value_length")
        if "head_dim" in {*vars(config), *config.attribute_map}:  # else it is computed
            config.head_dim = self.head_dim
        elif self.head_dim * heads != config.hidden_size:
            self.reject("attention.key_length")
        if "attention.head_count_kv" not in self.entries and hasattr(config, "num_key_value_heads"):
            config.num_key_value_heads = key_rows // self.head_dim if key_rows else heads
        if self.entries.get("attention.head_count_kv") == (1 if getattr(config, "multi_query", False) else heads):
            self.read.add("attention.head_count_kv")
        biases = [f"blk.0.attn_{one}.bias" in self.header.tensors for one in ("q", "k", "v", "output")]
        if all(biases) and hasattr(config, "attention_bias"):
            config.attention_bias = True

    def _read_rotary(self) -> None:
        """Set the base of the rotary frequencies, and the share of features that is rotated."""
        rotated, base = self.take("rope.dimension_count"), self.take("rope.freq_base")
        window_base, full = self.take("rope.freq_base_swa"), self.rotary
        learned = self.header.rows("position_embd.weight")
        if learned is not None and hasattr(self.config, "n_positions"):
            self.config.n_positions = learned
        if full is None:
            return
        if base is not None:
            full["rope_theta"] = float(base)
        if window_base is not None:
            layers = self.config.rope_parameters.get("sliding_attention")
            if layers is None:
                self.reject("rope.freq_base_swa")
            layers["rope_theta"] = float(window_base)
        head_dim = getattr(self, "head_dim", None)
        if rotated is None or head_dim is None:
            return
        if "partial_rotary_factor" in full:
            full["partial_rotary_factor"] = rotated / head_dim
            if hasattr(self.config, "partial_rotary_factor"):
                self.config.partial_rotary_factor = rotated / head_dim
        elif rotated != head_dim:
            self.reject("rope.dimension_count")

    def _read_scaling(self) -> None:
        """Set the scaling of the rotary frequencies."""
        kind, factor = self.take("rope.scaling.type"), float(self.take("rope.scaling.factor") or 0)
        old_factor = float(self.take("rope.scale_linear") or 0)  # of files of before "rope.scaling"
        factor = 1.0 if kind == "none" else factor or old_factor or 1.0
        original = self.take("rope.scaling.original_context_length") or self.entries.get("context_length")
        magnitude = float(self.take("rope.scaling.attn_factor") or self.take("rope.scaling.yarn_attn_factor") or 1)
        self.take("rope.scaling.finetuned")
        betas = {name: self.take(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        if self.take("rope.scaling.yarn_ext_factor", 1) != 1:
            self.reject("rope.scaling.yarn_ext_factor")
        long, short = (self.header.floats(f"rope_factors_{name}.weight") for name in ("long", "short"))
        each = self._frequency_divisors(kind, magnitude)
        scaling: dict[str, Any] = {}
        if long is not None or short is not None:
            scaling = {"rope_type": "longrope", "long_factor": long or short, "short_factor": short or long}
            scaling |= {"attention_factor": magnitude, "original_max_position_embeddings": original}
        elif kind not in (None, "none", "linear", "yarn", "longrope"):
            self.reject("rope.scaling.type")
        elif kind == "yarn":
            magnitude *= 0.1 * math.log(factor) + 1 if factor > 1 else 1
            scaling = {"rope_type": "yarn", "factor": factor, "attention_factor": magnitude}
            scaling |= {name: float(value) for name, value in betas.items() if value is not None}
            scaling["original_max_position_embeddings"] = original
        elif each is not None:
            # A divisor per frequency, as Llama 3.1 has, is what longrope computes; here one for all lengths.
            divisors = [factor * one for one in each]
            scaling = {"rope_type": "longrope", "long_factor": divisors, "short_factor": divisors}
            scaling |= {"attention_factor": magnitude, "factor": 1.0, "original_max_position_embeddings": original}
        elif factor != 1:
            scaling = {"rope_type": "linear", "factor": factor}
        if not scaling:
            return
        if self.rotary is None:
            self.reject("rope.scaling.type")
        assert self.rotary is not None
        self.rotary.update(scaling)
        if hasattr(self.config, "original_max_position_embeddings") and original:
            self.config.original_max_position_embeddings = int(original)

    def _frequency_divisors(self, kind: str | None, magnitude: float) -> list[float] | None:
        """Return the divisor of each rotary frequency besides the scaling; None if all are 1."""
        found = self.header.floats("rope_freqs.weight")
        if found is not None and set(found) != {1.0}:
            if kind == "yarn":
                self.reject("rope.scaling.type")
            return found
        if magnitude == 1:
            return None
        # Cosines and sines are multiplied by it, whatever the scaling, which only longrope can express.
        rotated = self.entries.get("rope.dimension_count") or getattr(self, "head_dim", None) or 0
        return [1.0] * (int(rotated) // 2)

    def _read_window(self) -> None:
        """Set the sliding window, and which layers have it."""
        config, window = self.config, self.take("attention.sliding_window")
        pattern, layer_types = self.take("attention.sliding_window_pattern"), getattr(config, "layer_types", None)
        alternates = layer_types is not None and "full_attention" in layer_types and "sliding_attention" in layer_types
        if window is None and hasattr(config, "sliding_window") and not alternates:
            config.sliding_window = None  # a default of the family
        elif window is not None and window != getattr(config, "sliding_window", 0):
            shortens = 0 < window < self.entries.get("context_length", window + 1)
            can = hasattr(config, "sliding_window") and (layer_types is None or alternates)
            if shortens and not can:
                self.reject("attention.sliding_window")
            if can:
                config.sliding_window = window or None
        if pattern is not None and layer_types is None:
            self.reject("attention.sliding_window_pattern")
        if isinstance(pattern, int) and pattern > 0:
            pattern = [bool((layer + 1) % pattern) for layer in range(len(layer_types or ()))]
        if pattern:
            config.layer_types = ["sliding_attention" if slides else "full_attention" for slides in pattern]

    def _read_scores(self) -> None:
        """Set the scale and the limit of scores, the epsilon of the norms, and the activation of T5."""
        config, scale, cap = self.config, self.take("attention.scale"), self.take("attn_logit_softcapping")
        head_dim = getattr(self, "head_dim", None)
        if hasattr(config, "query_pre_attn_scalar") and head_dim is not None:
            # Not an entry of the file: llama.cpp takes the head size, but for the models with 46 and 62 layers.
            divided = config.num_hidden_layers in (46, 62) and self.num_heads is not None
            config.query_pre_attn_scalar = config.hidden_size // self.num_heads if divided else head_dim
        if scale and hasattr(config, "query_pre_attn_scalar"):
            config.query_pre_attn_scalar = scale**-2
        elif scale and not (head_dim and math.isclose(scale, head_dim**-0.5, rel_tol=1e-5)):
            self.reject("attention.scale")
        if hasattr(config, "attn_logit_softcapping"):
            config.attn_logit_softcapping = cap if cap is not None else config.attn_logit_softcapping
        elif cap:
            self.reject("attn_logit_softcapping")
        if (final := self.entries.get("final_logit_softcapping")) and hasattr(config, "final_logit_softcapping"):
            config.final_logit_softcapping = final
        names = [f"attention.layer_norm{kind}_epsilon" for kind in ("", "_rms")]
        known = any(name in self.read for name in names if name in self.entries)
        values = [float(value) for name in names if (value := self.take(name)) is not None]
        field = next((each for each in _EPSILONS if hasattr(config, each)), None)
        if values and field is not None and not known:
            setattr(config, field, values[0])
        if getattr(config, "is_gated_act", False):
            config.dense_act_fn = "gelu_new"  # not an entry either: of T5, which transformers takes to have another
        if self.take("attention.causal", default=True) is False and "encoder" not in self.header.architecture:
            self.reject("attention.causal")


def reject_unread_tensors(network: Any, header: GGUFHeader) -> None:
    """Reject a file with a tensor of attention that no parameter of the model has received.

    Raises:
        ModelError: there is such a tensor; the error names the first one.
    """
    from transformers import modeling_gguf_pytorch_utils as reader

    processor = reader.TENSOR_PROCESSORS.get(header.architecture, reader.TensorProcessor)(config={})
    known = reader.get_gguf_hf_weights_map(network, processor)
    unread = [name for name in _attention_tensors(header) if name not in known]
    if unread:
        raise ModelError(
            f"{header.path.name} cannot be read: {type(network).__name__} has no parameter for its tensor {unread[0]}"
            f"{f' and {len(unread) - 1} more' if unread[1:] else ''}.",
            "Give the model as a folder that model.save_pretrained wrote.",
        )


def _attention_tensors(header: GGUFHeader) -> Iterator[str]:
    for name in header.tensors:
        if _ATTENTION_TENSORS.search(name) and not _REDUNDANT_TENSORS.match(name):
            yield name
