"""Make the inputs of a tiny model from the signature of its forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tools.families.overrides import INPUTS
from tools.families.tiny import IMAGE, VOCABULARY, WIDTH

BATCH, LENGTH, DECODER_LENGTH = 3, 12, 9
LEFT, RIGHT = 3, 4  # padded tokens at the start of the second sample, and at the end of the third


class NoInputError(Exception):
    """A model needs an argument that is not known here."""


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Yield possible arguments of a forward pass, the likeliest first: three samples, padded on both sides.

    Raises:
        NoInputError: forward has a parameter without default that is not known.
    """
    name = type(model).__name__
    maker = _Maker(model)
    special = INPUTS.get(name) or next(
        (make for key, make in INPUTS.items() if key[-1] == "*" and name.startswith(key[:-1])), None
    )
    if special is not None:
        yield special(maker)
        return
    parameters = inspect.signature(model.forward).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {
        key for key, each in parameters.items() if each.default is inspect.Parameter.empty and each.kind not in kinds
    }
    usual = {"attention_mask", "decoder_input_ids", "decoder_attention_mask", "input_ids", "bbox"}
    wanted = required | {getattr(model, "main_input_name", "input_ids")} | usual
    if "decoder_input_ids" not in parameters:
        wanted -= {"decoder_attention_mask"}
    keys = [key for key in parameters if key in wanted]
    if "input_ids" in keys and "inputs_embeds" not in required:
        keys = [key for key in keys if key != "inputs_embeds"]
    optional = [
        key
        for key in (
            "pixel_values",
            "input_features",
            "input_values",
            "encoder_hidden_states",
            "grid_thw",
            "image_grid_thw",
            "inputs_embeds",
        )
        if key in parameters and key not in keys
    ]
    yield maker.made(keys)
    if name.endswith("ForMultipleChoice"):
        yield {key: torch.stack([value, value.flip(0)], 1) for key, value in maker.made(keys).items()}
    for key in optional:
        yield maker.made([*keys, key])
    if "decoder_input_ids" in keys:
        encoder = [key for key in keys if not key.startswith("decoder_")]
        yield maker.made(encoder)
        if "input_ids" in encoder:
            yield maker.with_end(maker.made(encoder))
        yield maker.made([key for key in keys if key.startswith("decoder_")])
    for variant in ("channels first", "long", "one channel", "no mask"):
        maker.variant = variant
        yield maker.made(keys)


class _Maker:
    """Makes inputs by their names.

    Attributes:
        model: the model.
        config: its configuration.
        variant: which layout inputs have that models lay out differently.
        generator: source of random numbers.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.variant = model, model.config, ""
        self.generator = torch.Generator().manual_seed(1)

    def made(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values of some parameters.

        Raises:
            NoInputError: one is not known.
        """
        self.generator.manual_seed(1)
        keys = list(keys)
        if self.variant == "no mask" or not {"input_ids", "inputs_embeds"} & {*keys}:
            keys = [key for key in keys if key != "attention_mask"]
        for key in keys:
            if not hasattr(self, key):
                raise NoInputError(f"forward needs {key!r}.")
        return {key: getattr(self, key)() for key in keys}

    def with_end(self, made: dict[str, Any]) -> dict[str, Any]:
        """Put one end token into each sample, where there is no padding."""
        made["input_ids"][:, LENGTH - RIGHT - 1] = self.get("eos_token_id", default=2)
        return made

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of some fields, of the configuration or of one in it."""
        for config in configurations(self.config):
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def tokens(self, length: int) -> Tensor:
        return torch.randint(20, min(VOCABULARY, 100), (BATCH, length), generator=self.generator)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def input_ids(self) -> Tensor:
        size = self.get("vocab_size", default=VOCABULARY)
        ids: Tensor = self.tokens(LENGTH) % min(size, 100)
        padding = self.get("pad_token_id", default=0)  # some heads look for it, to read the last token before it
        return ids.where(
            self.attention_mask().bool(), padding if isinstance(padding, int) and 0 <= padding < size else 0
        )

    def attention_mask(self) -> Tensor:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        mask[1, :LEFT] = 0
        mask[2, -RIGHT:] = 0
        return mask

    def inputs_embeds(self) -> Tensor:
        return self.random(BATCH, LENGTH, self.get("hidden_size", "d_model", "n_embd", default=WIDTH))

    def hidden_states(self) -> Tensor:
        if "grid_thw" in inspect.signature(self.model.forward).parameters:
            return self.patches()
        return self.inputs_embeds()

    def decoder_input_ids(self) -> Tensor:
        ids: Tensor = self.tokens(DECODER_LENGTH) % min(self.get("vocab_size", default=VOCABULARY), 100)
        return ids

    def decoder_attention_mask(self) -> Tensor:
        mask = torch.ones(BATCH, DECODER_LENGTH, dtype=torch.int64)
        mask[2, -2:] = 0
        return mask

    def encoder_hidden_states(self) -> Tensor:
        return self.random(
            BATCH,
            LENGTH + 2,
            self.get("encoder_hidden_size", "cross_attention_hidden_size", "hidden_size", "d_model", default=WIDTH),
        )

    def encoder_attention_mask(self) -> Tensor:
        mask = torch.ones(BATCH, LENGTH + 2, dtype=torch.int64)
        mask[2, -RIGHT:] = 0
        return mask

    def bbox(self) -> Tensor:
        low = torch.randint(0, 50, (BATCH, LENGTH, 2), generator=self.generator)
        return torch.cat([low, low + torch.randint(1, 40, (BATCH, LENGTH, 2), generator=self.generator)], -1)

    def patches(self) -> Tensor:
        """Return the patches of three images, 4 x 4 each: (48, channels * frames * height * width)."""
        first = next(
            each
            for name, module in self.model.named_modules()
            if re.search("patch_embed|embed_patches|patch_emb|embeddings", name)
            for each in module.parameters(recurse=False)
            if each.dim() >= 2 and not isinstance(module, torch.nn.Embedding)
        )
        return self.random(48, first[0].numel())

    def pixel_values(self) -> Tensor:
        parameters = inspect.signature(self.model.forward).parameters
        if "grid_thw" in parameters or ("image_grid_thw" in parameters and "input_ids" not in parameters):
            return self.patches()
        size = self.get("image_size", "img_size", "input_size", default=IMAGE)
        height, width = (
            (size, size)
            if isinstance(size, int)
            else (tuple(size.values()) if isinstance(size, dict) else tuple(size))[:2]
        )
        return self.random(BATCH, self.get("num_channels", "in_channels", "in_chans", default=3), height, width)

    def pixel_values_videos(self) -> Tensor:
        image = self.pixel_values()
        return self.random(BATCH, self.get("num_frames", "frames_per_clip", default=4), *image.shape[1:])

    def right_mask(self) -> Tensor:
        """Return a mask with padding on the right only, for models whose outputs do not show which rows are padding."""
        mask = self.attention_mask()
        mask[1] = 1
        return mask

    def query_embeds(self) -> Tensor:
        return self.random(BATCH, 8, self.get("hidden_size", default=WIDTH))

    def input_features_mask(self) -> Tensor:
        mask = torch.ones(BATCH, self.input_features().shape[1 if self.variant != "channels first" else 2])
        mask[2, -8:] = 0
        return mask.long()

    def input_values(self) -> Tensor:
        if self.variant == "one channel":
            return self.random(BATCH, 1, 6400)
        if self.variant == "channels first":
            return self.random(BATCH, self.get("max_length", default=40), self.get("num_mel_bins", default=16))
        return self.random(BATCH, 16000 if self.variant == "long" else 1600)

    def input_features(self) -> Tensor:
        names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "input_dim")
        bins = self.get(*names, default=16)
        length = 2 * self.get("max_source_positions", default=20)
        return self.random(BATCH, bins, length) if self.variant == "channels first" else self.random(BATCH, 40, bins)

    def grid_thw(self) -> Tensor:
        return torch.tensor([[1, 4, 4]] * BATCH)

    image_grid_thw = grid_thw


def configurations(config: Any) -> list[Any]:
    """Return a configuration and all configurations in it, the outer ones first."""
    found = [config]
    for each in found:
        found += [
            value
            for value in vars(each).values()
            if hasattr(value, "to_dict") and hasattr(value, "model_type") and value not in found
        ]
    return found
