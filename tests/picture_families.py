"""Tiny models of the families that read pictures, with their real image processors and random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn

Pictures = list[Any]
Inputs = dict[str, Any]

WIDE, TALL = (156, 100), (84, 140)
"""Width and height of two pictures, which are no multiples of a patch."""
PICTURE_TOKEN = 50
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES = {"hidden_size": 32, "intermediate_size": 32, **_LAYERS}
_PATCHED = {**_SIZES, "image_size": 56, "patch_size": 14}
_TEXT = {"vocab_size": 60, **_SIZES, "num_key_value_heads": 2}
_QWEN_TOKENS = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
_CLIP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
_SQUARE = {"size": {"height": 56, "width": 56}}


@dataclass(frozen=True)
class Family:
    """A model that reads pictures.

    Attributes:
        model: the model.
        processor: makes its pixel input.
        inputs: what the processor returned -> the arguments of the model's call.
        sizes: width and height of its pictures.
        nest: nests the pictures as the processor takes them.
        options: options of the processor's call.
    """

    model: nn.Module
    processor: Any
    inputs: Callable[[Inputs], Inputs] = lambda made: {"pixel_values": made["pixel_values"]}
    sizes: tuple[tuple[int, int], ...] = (WIDE,)
    nest: Callable[[Pictures], Any] = lambda pictures: pictures

    def process(self, images: Pictures) -> Inputs:
        """Return the arguments of the model's call on pictures."""
        return self.inputs(self.processor(images=self.nest(images), return_tensors="pt"))


def random_pictures(sizes: tuple[tuple[int, int], ...], seed: int = 0) -> Pictures:
    """Return pictures of random colours."""
    random = np.random.default_rng(seed)
    return [Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes]


def prompts(counts: list[list[int]]) -> Inputs:
    """Return the token ids of prompts, left-padded; each has as many picture tokens per picture as `counts` says."""
    rows = [[1, 2] + [each for count in row for each in [52, *[PICTURE_TOKEN] * count, 53]] + [5, 6] for row in counts]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def _of_pixels(model: type[nn.Module], config: Any, processor: Any, **more: Any) -> Family:
    return Family(model(config).eval(), processor, **more)


def _clip(**more: Any) -> Any:
    return hf.CLIPImageProcessorPil(**{**_CLIP, **more})


def _vit_of_another_size() -> Family:
    def inputs(made: Inputs) -> Inputs:
        return {"pixel_values": made["pixel_values"], "interpolate_pos_encoding": True}

    processor = hf.ViTImageProcessorPil(size={"height": 70, "width": 84})
    return _of_pixels(hf.ViTModel, hf.ViTConfig(**_PATCHED), processor, inputs=inputs)


def _deit() -> Family:
    return _of_pixels(hf.DeiTModel, hf.DeiTConfig(**_PATCHED), hf.DeiTImageProcessorPil(**_CLIP))


_DINO = {"hidden_size": 32, **_LAYERS, "image_size": 56, "patch_size": 14}


def _bit(size: int = 64) -> Any:
    return hf.BitImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": 56, "width": 56})


def _dinov2() -> Family:
    return _of_pixels(hf.Dinov2Model, hf.Dinov2Config(**_DINO), _bit())


def _dinov2_batch() -> Family:
    return _of_pixels(hf.Dinov2Model, hf.Dinov2Config(**_DINO), _bit(), sizes=(WIDE, TALL))


def _dinov2_registers() -> Family:
    config = hf.Dinov2WithRegistersConfig(**_DINO, num_register_tokens=4)
    return _of_pixels(hf.Dinov2WithRegistersModel, config, _bit())


def _dinov3() -> Family:
    config = hf.DINOv3ViTConfig(**_PATCHED, num_register_tokens=4)
    return _of_pixels(hf.DINOv3ViTModel, config, hf.ViTImageProcessorPil(size={"height": 42, "width": 84}))


def _clip_vision() -> Family:
    return _of_pixels(hf.CLIPVisionModel, hf.CLIPVisionConfig(**_PATCHED), _clip())


def _siglip() -> Family:
    processor = hf.SiglipImageProcessorPil(**_SQUARE)
    return _of_pixels(hf.SiglipVisionModel, hf.SiglipVisionConfig(**_PATCHED), processor)


def _beit() -> Family:
    return _of_pixels(
        hf.BeitModel, hf.BeitConfig(**_PATCHED), hf.BeitImageProcessorPil(**_SQUARE, do_center_crop=False)
    )


def _swin() -> Family:
    config = hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    return _of_pixels(hf.SwinModel, config, hf.ViTImageProcessorPil(size={"height": 32, "width": 32}))


def _pixtral_sizes(made: Inputs) -> Inputs:
    return {"pixel_values": made["pixel_values"], "image_sizes": made["image_sizes"]}


def _pixtral() -> Family:
    processor = hf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})
    config = hf.PixtralVisionConfig(**{**_PATCHED, "image_size": 112})
    return _of_pixels(hf.PixtralVisionModel, config, processor, inputs=_pixtral_sizes, sizes=(WIDE, TALL))


def _qwen_inputs(*, batch: bool) -> Callable[[Inputs], Inputs]:
    def inputs(made: Inputs) -> Inputs:
        counts = (made["image_grid_thw"].prod(1) // 4).tolist()
        texts = prompts([[each] for each in counts] if batch else [counts])
        types = (texts["input_ids"] == PICTURE_TOKEN).int()
        pixels = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        return {**texts, **pixels, "mm_token_type_ids": types}

    return inputs


def _qwen_text(section: list[int], **more: Any) -> Inputs:
    rope = {"rope_type": "default", "mrope_section": section, "rope_theta": 1e4}
    return {**_TEXT, "rope_parameters": rope, **more}


def _qwen_processor(patch: int) -> Any:
    return hf.Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    )


_QWEN_TOWER = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}


def _qwen2_vl(*, batch: bool = False) -> Family:
    tower = {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "in_channels": 3}
    config = hf.Qwen2VLConfig(text_config=_qwen_text([1, 1, 2]), vision_config=tower, **_QWEN_TOKENS)
    model = hf.Qwen2VLForConditionalGeneration(config).eval()
    return Family(model, _qwen_processor(14), _qwen_inputs(batch=batch), (WIDE, TALL))


def _qwen2_5_vl() -> Family:
    tower = {
        **_QWEN_TOWER, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "window_size": 56,
        "fullatt_block_indexes": [1], "in_channels": 3,
    }  # fmt: skip
    config = hf.Qwen2_5_VLConfig(text_config=_qwen_text([1, 1, 2]), vision_config=tower, **_QWEN_TOKENS)
    model = hf.Qwen2_5_VLForConditionalGeneration(config).eval()
    return Family(model, _qwen_processor(14), _qwen_inputs(batch=False))


def _qwen3_vl() -> Family:
    tower = {
        **_QWEN_TOWER, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "patch_size": 16,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 64, "in_channels": 3,
    }  # fmt: skip
    config = hf.Qwen3VLConfig(text_config=_qwen_text([2, 1, 1], head_dim=8), vision_config=tower, **_QWEN_TOKENS)
    return Family(hf.Qwen3VLForConditionalGeneration(config).eval(), _qwen_processor(16), _qwen_inputs(batch=False))


def _of_counts(count: Callable[[Inputs], list[list[int]]], *also: str) -> Callable[[Inputs], Inputs]:
    def inputs(made: Inputs) -> Inputs:
        texts = prompts(count(made))
        types = (texts["input_ids"] == PICTURE_TOKEN).long() if "token_type_ids" in also else None
        more = {name: made[name] for name in ("pixel_values", *also) if name in made}
        return {**texts, **more, **({} if types is None else {"token_type_ids": types})}

    return inputs


_CLIP_TOWER = {"model_type": "clip_vision_model", **_PATCHED, "num_hidden_layers": 3}
_SIGLIP_TOWER = {"model_type": "siglip_vision_model", **_PATCHED, "vision_use_head": False}
_LLAMA, _GEMMA = {"model_type": "llama", **_TEXT}, {"model_type": "gemma", **_TEXT, "head_dim": 8}


def _llava() -> Family:
    config = hf.LlavaConfig(
        text_config=_LLAMA, vision_config=_CLIP_TOWER, image_token_index=PICTURE_TOKEN, vision_feature_layer=-2
    )
    model = hf.LlavaForConditionalGeneration(config).eval()
    return Family(model, _clip(), _of_counts(lambda made: [[16] * len(made["pixel_values"])]), (WIDE, TALL))


def _llava_next() -> Family:
    points = [[56, 112], [112, 56], [112, 112]]
    config = hf.LlavaNextConfig(
        text_config=_LLAMA, vision_config=_CLIP_TOWER, image_token_index=PICTURE_TOKEN, vision_feature_layer=-2,
        image_grid_pinpoints=points,
    )  # fmt: skip
    processor = hf.LlavaNextImageProcessorPil(**_CLIP, image_grid_pinpoints=points)
    return _counted(hf.LlavaNextForConditionalGeneration(config), processor, "image_sizes", sizes=(WIDE, TALL))


def _paligemma() -> Family:
    config = hf.PaliGemmaConfig(
        text_config=_GEMMA, vision_config=_SIGLIP_TOWER, image_token_index=PICTURE_TOKEN, projection_dim=32,
        hidden_size=32,
    )  # fmt: skip
    model = hf.PaliGemmaForConditionalGeneration(config).eval()
    return Family(model, hf.SiglipImageProcessorPil(**_SQUARE), _of_counts(lambda _: [[16]], "token_type_ids"))


def _gemma3() -> Family:
    config = hf.Gemma3Config(
        text_config={**_TEXT, "head_dim": 8, "sliding_window": 64}, vision_config=_SIGLIP_TOWER, mm_tokens_per_image=4,
        image_token_index=PICTURE_TOKEN, boi_token_index=51, eoi_token_index=54,
    )  # fmt: skip
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # else pictures do not reach it
    return Family(model, hf.Gemma3ImageProcessorPil(**_SQUARE), _of_counts(lambda _: [[4]], "token_type_ids"))


def _idefics3(*, batch: bool = False) -> Family:
    config = hf.Idefics3Config(
        text_config=_LLAMA, vision_config=_PATCHED, image_token_id=PICTURE_TOKEN, scale_factor=2, pad_token_id=0
    )
    model = hf.Idefics3ForConditionalGeneration(config).eval()
    processor = hf.Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})

    def counts(made: Inputs) -> list[list[int]]:
        tiles: Tensor = (made["pixel_values"].flatten(2) != 0).any(-1).sum(1)
        return [[4 * each] for each in tiles.tolist()]

    inputs = _of_counts(counts, "pixel_attention_mask")
    if batch:
        return Family(model, processor, inputs, (WIDE, (60, 140)), lambda pictures: [[each] for each in pictures])
    return Family(model, processor, inputs, (WIDE, TALL), lambda pictures: [pictures])


def _internvl() -> Family:
    tower = {**_SIZES, "image_size": [56, 56], "patch_size": [14, 14]}
    config = hf.InternVLConfig(
        text_config={"model_type": "qwen2", **_TEXT}, vision_config=tower, image_token_id=PICTURE_TOKEN,
        downsample_ratio=0.5,
    )  # fmt: skip
    model = hf.InternVLForConditionalGeneration(config).eval()
    processor = hf.GotOcr2ImageProcessorPil(**_SQUARE, crop_to_patches=True, max_patches=4)
    return Family(model, processor, _of_counts(lambda made: [[4 * len(made["pixel_values"])]]))


def _siglip2() -> Family:
    config = hf.Siglip2VisionConfig(**_SIZES, num_patches=16, patch_size=14, vision_use_head=False)
    processor = hf.Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16)
    return _of_pixels(hf.Siglip2VisionModel, config, processor, inputs=dict)


def _counted(model: Any, processor: Any, *also: str, **more: Any) -> Family:
    """Return a family whose prompts have as many picture tokens as the model makes of each picture."""

    @torch.no_grad()
    def counts(made: Inputs) -> list[list[int]]:
        found = model.model.get_image_features(**{name: made[name] for name in ("pixel_values", *also)})
        features = getattr(found, "pooler_output", found)
        return [[each.reshape(-1, 32).shape[0] for each in features]]

    return Family(model.eval(), processor, _of_counts(counts, *also), **more)


_TOKEN = {"image_token_index": PICTURE_TOKEN, "image_token_id": PICTURE_TOKEN}
_COHERE = {"model_type": "cohere2", **_TEXT, "head_dim": 8, "sliding_window": 64}


def _mistral3() -> Family:
    config = hf.Mistral3Config(
        text_config={"model_type": "mistral", **_TEXT}, spatial_merge_size=2, vision_feature_layer=-1, **_TOKEN,
        vision_config={"model_type": "pixtral", **_PATCHED, "image_size": 112},
    )  # fmt: skip
    processor = hf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})
    return _counted(hf.Mistral3ForConditionalGeneration(config), processor, "image_sizes", sizes=(WIDE, TALL))


def _llava_onevision() -> Family:
    points = [[56, 112], [112, 56], [112, 112]]
    config = hf.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_TEXT}, vision_config=_SIGLIP_TOWER, image_grid_pinpoints=points, **_TOKEN
    )
    processor = hf.LlavaOnevisionImageProcessorPil(**_SQUARE, image_grid_pinpoints=points)
    return _counted(hf.LlavaOnevisionForConditionalGeneration(config), processor, "image_sizes")


def _vip_llava() -> Family:
    tower = {**_CLIP_TOWER, "num_hidden_layers": 4}
    config = hf.VipLlavaConfig(text_config=_LLAMA, vision_config=tower, vision_feature_layers=[-2, -3], **_TOKEN)
    return _counted(hf.VipLlavaForConditionalGeneration(config), _clip())


def _aya_vision() -> Family:
    config = hf.AyaVisionConfig(text_config=_COHERE, vision_config=_SIGLIP_TOWER, downsample_factor=2, **_TOKEN)
    return _counted(hf.AyaVisionForConditionalGeneration(config), hf.SiglipImageProcessorPil(**_SQUARE))


def _cohere2_vision() -> Family:
    config = hf.Cohere2VisionConfig(text_config=_COHERE, vision_config=_SIGLIP_TOWER, downsample_factor=2, **_TOKEN)
    return _counted(hf.Cohere2VisionForConditionalGeneration(config), hf.SiglipImageProcessorPil(**_SQUARE))


def _idefics2() -> Family:
    sizes = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
    config = hf.Idefics2Config(
        text_config={"model_type": "mistral", **_TEXT}, vision_config=_PATCHED, pad_token_id=0, **_TOKEN,
        perceiver_config={**sizes, "num_key_value_heads": 1, "hidden_size": 32},
    )  # fmt: skip
    processor = hf.Idefics2ImageProcessorPil(size={"longest_edge": 56, "shortest_edge": 28}, do_image_splitting=False)
    inputs = _of_counts(lambda _: [[4]], "pixel_attention_mask")
    model = hf.Idefics2ForConditionalGeneration(config).eval()
    return Family(model, processor, inputs, nest=lambda pictures: [pictures])


def _blip2() -> Family:
    text = {"vocab_size": 60, "hidden_size": 32, "ffn_dim": 32, **_LAYERS, "word_embed_proj_dim": 32}
    config = hf.Blip2Config(
        vision_config=_PATCHED, qformer_config={"vocab_size": 60, **_SIZES, "encoder_hidden_size": 32},
        text_config={"model_type": "opt", **text}, num_query_tokens=4, **_TOKEN,
    )  # fmt: skip
    processor = hf.BlipImageProcessorPil(**_SQUARE)
    return Family(hf.Blip2ForConditionalGeneration(config).eval(), processor, _of_counts(lambda _: [[4]]))


def _kosmos2() -> Family:
    text = {"vocab_size": 60, "embed_dim": 32, "layers": 2, "ffn_dim": 32, "attention_heads": 4}
    config = hf.Kosmos2Config(text_config=text, vision_config=_PATCHED, latent_query_num=4)
    ids = torch.tensor([[1, 2, 7, 7, 7, 7, 5]])
    words = {"input_ids": ids, "image_embeds_position_mask": (ids == 7).long()}
    model = hf.Kosmos2ForConditionalGeneration(config).eval()
    return Family(model, _clip(), lambda made: {"pixel_values": made["pixel_values"], **words})


def _glm4v() -> Family:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    tower = {**_QWEN_TOWER, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "image_size": 56}
    config = hf.Glm4vConfig(
        text_config={**_TEXT, "rope_parameters": rope, "pad_token_id": 0}, vision_config=tower, image_token_id=50,
        image_start_token_id=52, image_end_token_id=53, video_start_token_id=54, video_end_token_id=55,
    )  # fmt: skip
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    processor = hf.Glm4vImageProcessorPil(patch_size=14, merge_size=2, size=size)
    return Family(hf.Glm4vForConditionalGeneration(config).eval(), processor, _qwen_inputs(batch=False))


def _llama4() -> Family:
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 32, "num_experts_per_tok": 1}
    tower = {**_PATCHED, "intermediate_size": 128, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 32}
    config = hf.Llama4Config(
        text_config={**_TEXT, **experts, "head_dim": 8, "pad_token_id": 0}, **_TOKEN,
        vision_config={**tower, "projector_output_dim": 32, "vision_output_dim": 32},
    )  # fmt: skip
    model = hf.Llama4ForConditionalGeneration(config).eval()
    return Family(model, hf.SiglipImageProcessorPil(**_SQUARE), _of_counts(lambda _: [[4]]))


def _mllama() -> Family:
    """A language model that attends to the tiles of a picture."""
    text = {**_TEXT, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1}
    config = hf.MllamaConfig(
        text_config={**text, "pad_token_id": 0}, **_TOKEN,
        vision_config={
            **tower, "attention_heads": 4, "image_size": 56, "patch_size": 14, "max_num_tiles": 4,
            "intermediate_layers_indices": [0, 1], "vision_output_dim": 96,
        },
    )  # fmt: skip

    def inputs(made: Inputs) -> Inputs:
        reads = torch.zeros(1, 4, 1, 4, dtype=torch.int64)
        reads[:, 1:, :, : int(made["num_tiles"][0][0])] = 1
        given = {name: made[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
        return {**given, "input_ids": torch.tensor([[1, 50, 5, 6]]), "cross_attention_mask": reads}

    processor = hf.MllamaImageProcessorPil(**_SQUARE, max_image_tiles=4)
    model = hf.MllamaForConditionalGeneration(config).eval()
    return Family(model, processor, inputs, nest=lambda pictures: [pictures])


def _lighton_ocr() -> Family:
    config = hf.LightOnOcrConfig(
        text_config={"model_type": "qwen3", **_TEXT, "head_dim": 8}, image_token_id=PICTURE_TOKEN, spatial_merge_size=2,
        vision_config={"model_type": "pixtral", **_PATCHED, "image_size": 112},
    )  # fmt: skip
    processor = hf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})
    return _counted(hf.LightOnOcrForConditionalGeneration(config), processor, "image_sizes")


def _deepseek_vl() -> Family:
    config = hf.DeepseekVLConfig(text_config=_LLAMA, vision_config=_SIGLIP_TOWER, image_token_id=PICTURE_TOKEN)
    model, processor = hf.DeepseekVLForConditionalGeneration(config).eval(), hf.SiglipImageProcessorPil(**_SQUARE)
    return Family(model, processor, _of_counts(lambda _: [[16]]))


def _ovis2() -> Family:
    tower = {**_PATCHED, "vocab_size": 40, "hidden_stride": 2, "num_visual_indicator_tokens": 5}
    config = hf.Ovis2Config(
        text_config={"model_type": "qwen2", **_TEXT}, vision_config=tower, image_token_id=PICTURE_TOKEN,
        visual_indicator_token_ids=[51, 52, 53, 54, 55], hidden_size=32, vocab_size=60,
    )  # fmt: skip
    processor = hf.Ovis2ImageProcessorPil(**_SQUARE, crop_to_patches=False)
    return Family(hf.Ovis2ForConditionalGeneration(config).eval(), processor, _of_counts(lambda _: [[4]]))


def _video_llama3() -> Family:
    config = hf.VideoLlama3Config(
        text_config={"model_type": "qwen2", **_TEXT}, vision_config={**_SIZES, "patch_size": 14}, image_token_id=50
    )
    processor = hf.VideoLlama3ImageProcessorPil(patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=112 * 112)
    inputs = _of_counts(lambda made: [[int(made["image_grid_thw"].prod()) // 4]], "image_grid_thw", "image_merge_sizes")
    return Family(hf.VideoLlama3ForConditionalGeneration(config).eval(), processor, inputs)


def _gemma4() -> Family:
    text = {**_TEXT, "head_dim": 8, "global_head_dim": 8, "sliding_window": 64, "pad_token_id": 0}
    tower = {**_SIZES, "head_dim": 8, "num_key_value_heads": 4, "patch_size": 14, "pooling_kernel_size": 2}
    config = hf.Gemma4Config(
        text_config={**text, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60}, audio_config=None,
        vision_config={**tower, "position_embedding_size": 64}, image_token_id=PICTURE_TOKEN,
    )  # fmt: skip
    processor = hf.Gemma4ImageProcessorPil(patch_size=14, pooling_kernel_size=2, max_soft_tokens=70)
    inputs = _of_counts(lambda made: [[made["num_soft_tokens_per_image"][0]]], "image_position_ids")
    return Family(hf.Gemma4ForConditionalGeneration(config).eval(), processor, inputs)


def _paddle_ocr_vl() -> Family:
    text = _qwen_text([1, 1, 2], head_dim=8)
    config = hf.PaddleOCRVLConfig(text_config=text, vision_config={**_PATCHED, "spatial_merge_size": 2}, **_QWEN_TOKENS)
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    processor = hf.PaddleOCRVLImageProcessorPil(patch_size=14, merge_size=2, size=size)
    return Family(hf.PaddleOCRVLForConditionalGeneration(config).eval(), processor, _qwen_inputs(batch=False))


_LIKE_VIT = {  # name -> the model's class and what differs from the ViT
    "AIMv2": ("Aimv2Vision", {"use_head": False}),
    "AltCLIP": ("AltCLIPVision", {}),
    "BLIP-2, image encoder": ("Blip2Vision", {}),
    "Chinese CLIP": ("ChineseCLIPVision", {}),
    "CLIPSeg": ("CLIPSegVision", {}),
    "DPT": ("DPT", {"backbone_out_indices": [0, 1], "neck_hidden_sizes": [8, 8]}),
    "GIT": ("GitVision", {}),
    "I-JEPA": ("IJepa", {}),
    "InstructBLIP": ("InstructBlipVision", {}),
    "MetaCLIP 2": ("MetaClip2Vision", {}),
    "MLCD": ("MLCDVision", {}),
    "OWL-ViT": ("OwlViTVision", {}),
    "OWLv2": ("Owlv2Vision", {}),
    "Pixio": ("Pixio", {}),
    "TIPSv2": ("Tipsv2Vision", {}),
    "ViT": ("ViT", {}),
    "ViT-MAE": ("ViTMAE", {"mask_ratio": 0.5}),
    "ViT-MSN": ("ViTMSN", {}),
    "YOLOS": ("Yolos", {"image_size": [56, 56], "num_detection_tokens": 5}),
}


def _like_vit(name: str, options: Inputs) -> Family:
    config = getattr(hf, f"{name}Config")(**{**_PATCHED, **options})
    return _of_pixels(getattr(hf, f"{name}Model"), config, hf.ViTImageProcessorPil(**_SQUARE))


ENCODERS: dict[str, Callable[[], Family]] = {
    "ViT, another size": _vit_of_another_size,
    "DeiT": _deit,
    "DINOv2": _dinov2,
    "DINOv2, two pictures cropped": _dinov2_batch,
    "DINOv2 with registers": _dinov2_registers,
    "DINOv3": _dinov3,
    "CLIP": _clip_vision,
    "SigLIP": _siglip,
    "BEiT": _beit,
    "Swin": _swin,
    "Pixtral, two sizes": _pixtral,
    "SigLIP 2": _siglip2,
    **{name: partial(_like_vit, *like) for name, like in _LIKE_VIT.items()},
}
LANGUAGE_MODELS: dict[str, Callable[[], Family]] = {
    "Qwen2-VL, two pictures": _qwen2_vl,
    "Qwen2-VL, a batch of two sizes": lambda: _qwen2_vl(batch=True),
    "Qwen2.5-VL": _qwen2_5_vl,
    "Qwen3-VL": _qwen3_vl,
    "LLaVA, two pictures": _llava,
    "LLaVA-NeXT, two pictures": _llava_next,
    "PaliGemma": _paligemma,
    "Gemma 3": _gemma3,
    "Idefics 3, two pictures": _idefics3,
    "Idefics 3, a batch of other tile counts": lambda: _idefics3(batch=True),
    "InternVL": _internvl,
    "Mistral 3, two pictures": _mistral3,
    "LLaVA-OneVision": _llava_onevision,
    "VipLLaVA": _vip_llava,
    "Aya Vision": _aya_vision,
    "Cohere 2 Vision": _cohere2_vision,
    "Idefics 2": _idefics2,
    "BLIP-2": _blip2,
    "Kosmos-2": _kosmos2,
    "GLM-4V": _glm4v,
    "Llama 4": _llama4,
    "Llama 3.2 Vision": _mllama,
    "DeepSeek-VL": _deepseek_vl,
    "Gemma 4": _gemma4,
    "LightOnOCR": _lighton_ocr,
    "Ovis 2": _ovis2,
    "PaddleOCR-VL": _paddle_ocr_vl,
    "VideoLLaMA 3": _video_llama3,
}
