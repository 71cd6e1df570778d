"""Fields of configurations and inputs of models that the general rules do not get right, one entry per class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    Blip2QFormerConfig,
    DINOv3ViTConfig,
    EdgeTamVideoInferenceSession,
    EdgeTamVisionConfig,
    Gemma4TextConfig,
    ResNetConfig,
    Sam2VideoInferenceSession,
    Sam3TrackerVideoInferenceSession,
    Sam3VideoInferenceSession,
    SwinConfig,
    TimmWrapperConfig,
)
from transformers.cache_utils import DFlashCache, DynamicCache
from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

# Backbones that need no other package.
_RESNET = {"start": {"backbone_config": ResNetConfig(out_features=["stage4"])}}
_RESNET_4 = {"start": {"backbone_config": ResNetConfig(out_features=["stage1", "stage2", "stage3", "stage4"])}}
_RESNET_3 = {"start": {"backbone_config": ResNetConfig(out_features=["stage2", "stage3", "stage4"])}}
_REPVIT = EdgeTamVisionConfig(
    backbone_config=TimmWrapperConfig(
        architecture="repvit_m1", model_args={"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}
    )
)
_INTRACLASS: dict[str, Any] = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{
        f"{name}_{size}": [kernel, [1, 1], padding]
        for name, sizes in {
            "vertical_long_to_small_conv": ([[7, 1], [3, 0]], [[5, 1], [2, 0]], [[3, 1], [1, 0]]),
            "horizontal_small_to_long_conv": ([[1, 7], [0, 3]], [[1, 5], [0, 2]], [[1, 3], [0, 1]]),
            "symmetric_conv_long": ([[7, 7], [3, 3]], [[5, 5], [2, 2]], [[3, 3], [1, 1]]),
        }.items()
        for size, (kernel, padding) in zip(("longratio", "midratio", "shortratio"), sizes, strict=True)
    },
}
_SHORT_HOPS = {"num_filters": 4, "downsampling_ratios": [2, 2, 2, 2, 2, 2], "depths": [1, 1, 1, 1, 1, 1, 1]}
_MEMORY = {
    "image_size": 64,
    "memory_attention_rope_feat_sizes": [4, 4],
    "memory_attention_hidden_size": 128,
    "memory_encoder_hidden_size": 128,
    "memory_encoder_output_channels": 64,
    "mask_downsampler_embed_dim": 128,
    "memory_fuser_embed_dim": 128,
    "memory_fuser_intermediate_dim": 64,
}
_WITHOUT_INPUTS_PER_LAYER = Gemma4TextConfig(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
_WINDOW_QFORMER = {
    "qformer_config": Blip2QFormerConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, encoder_hidden_size=32
    )
}
_SWIN = {"start": {"backbone_config": SwinConfig(out_features=["stage2", "stage3", "stage4"])}}
_HGNET = {
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 16, 16],
    "hidden_sizes": [16, 16, 16, 16],
    "stage_numb_of_layers": [1, 1, 1, 1],
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_MROPE_OF_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}}
_EIGHT_HEADS = {"d_model": 64, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}

# Fields by configuration class. "start" holds arguments of the configuration that is then shrunk.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "AlignVisionConfig": {
        "in_channels": [32, 8, 8, 8, 8, 8, 8],
        "out_channels": [8, 8, 8, 8, 8, 8, 8],
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "num_block_repeats": [1, 1, 1, 1, 1, 1, 1],
        "hidden_dim": 8,
    },
    "AlignConfig": {"projection_dim": 8},
    "BambaConfig": _MAMBA | {"attn_layer_indices": [1]},
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "BitConfig": {"num_groups": 4},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2, "local_attention_window_len": 4},
    "BridgeTowerVisionConfig": {"hidden_size": 64},
    "BridgeTowerTextConfig": {"hidden_size": 64},
    "BridgeTowerConfig": {"hidden_size": 64},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        }
    },
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5, "<racm3:break>": 6, "<eoss>": 7}},
    "Emu3Config": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "Granite4VisionModel": _WINDOW_QFORMER,
    "Granite4VisionForConditionalGeneration": _WINDOW_QFORMER,
    "Granite4VisionConfig": {"start": {"deepstack_layer_map": [(-1, 0)], "downsample_rate": "1/2"}},
    "Kimi_K25VisionConfig": {"pos_emb_height": 8, "pos_emb_width": 8},
    "Kosmos2Config": {"latent_query_num": 4},
    "Blip2Config": {"image_token_index": 99, "num_query_tokens": 8},
    "Blip2ForImageTextRetrieval": {"start": {"qformer_config": {"use_qformer_text_input": True}}},
    "Blip2TextModelWithProjection": {"start": {"qformer_config": {"use_qformer_text_input": True}}},
    "CHMv2ForDepthEstimation": {
        "backbone_config": DINOv3ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_hidden_layers=4,
            out_indices=[1, 2, 3, 4],
            reshape_hidden_states=True,
            return_class_token=True,
        )
    },
    "CHMv2Config": {
        "patch_size": 8,
        "post_process_channels": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
        "head_hidden_size": 8,
        "number_output_channels": 8,
    },
    "ConditionalDetrConfig": _RESNET | _EIGHT_HEADS,
    "ConditionalDetrForSegmentation": _RESNET_4,
    "CvtConfig": {
        "embed_dim": [8, 16, 16],
        "num_heads": [1, 2, 2],
        "depth": [1, 1, 1],
        "patch_sizes": [7, 3, 3],
    },
    "Deimv2Config": {"encoder_in_channels": [16, 16, 16], "decoder_in_channels": [32, 32, 32]},
    "PPDocLayoutV2Config": {"encoder_in_channels": [16, 16, 16], "decoder_in_channels": [32, 32, 32]},
    "PPDocLayoutV3Config": {
        "x4_feat_dim": 16,
        "encoder_in_channels": [16, 16, 16],
        "decoder_in_channels": [32, 32, 32],
    },
    "PPDocLayoutV4Config": {"encoder_in_channels": [16, 16, 16], "decoder_in_channels": [32, 32, 32]},
    "DFineConfig": {"encoder_in_channels": [16, 16, 16], "decoder_in_channels": [32, 32, 32]},
    "DabDetrConfig": _RESNET,
    "DeepseekV2Config": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
    "DeepseekOcr2TextConfig": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "DeformableDetrConfig": _RESNET_3,
    "DepthProConfig": {
        "patch_size": 32,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_feature_dims": [16, 16, 16],
        "merge_padding_value": 1,
        "fusion_hidden_size": 16,
    },
    "DepthAnythingConfig": {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8},
    "DetrConfig": _RESNET | _EIGHT_HEADS,
    "DetrForSegmentation": _RESNET_4,
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "Dots3NoteTextConfig": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
        "head_dim": 16,
        "index_topk": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "EdgeTamConfig": {"start": {"vision_config": _REPVIT}},
    "EdgeTamVisionConfig": {
        "fpn_hidden_size": 128,
        "backbone_channel_list": [384, 192, 96, 48],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "EsmFold2AtomEncoderConfig": {"num_spatial_rope_pairs_per_axis": 1, "num_uid_rope_pairs": 1},
    "EsmFold2Config": {
        "single_inputs_size": 99,
        "num_loops": 1,
        "max_atomic_number": 16,
        "num_res_types": 33,
        "atom_feature_dim": 277,
    },
    "EsmForProteinFolding": {"start": {"is_folding_model": True}},
    "EfficientLoFTRConfig": {"hidden_size": 256, "num_attention_heads": 8},
    "Ernie4_5_VLMoeTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    },
    "Exaone4_5_VisionConfig": {"window_size": 32},
    "FalconH1Config": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    # transformers 5.23 needs a layer that is not shared, and this model shares all: it cannot be built.
    "Gemma4AssistantConfig": {"start": {"text_config": _WITHOUT_INPUTS_PER_LAYER}},
    "Glm4vMoeTextConfig": _MROPE_OF_HALF,
    "Glm4vTextConfig": _MROPE,
    "Glm5NextTextConfig": {"index_topk": 4, "index_kpool": 2},
    "GlmImageTextConfig": _MROPE_OF_HALF,
    "GlmOcrTextConfig": _MROPE_OF_HALF,
    "GraniteMoeHybridConfig": _MAMBA | {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "HGNetV2Config": _HGNET,
    "HieraConfig": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 4},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2},
    "HrmTextConfig": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "HunYuanVLTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "LongcatFlashConfig": {"qk_rope_head_dim": 8, "head_dim": 8, "qk_head_dim": 16, "zero_expert_num": 2},
    "LwDetrConfig": {"projector_scale_factors": [1.0]},
    "InstructBlipConfig": {"image_token_index": 99, "num_query_tokens": 8},
    "InstructBlipVideoConfig": {"video_token_index": 99, "num_query_tokens": 8},
    "LwDetrViTConfig": {"num_windows": 4, "window_block_indices": [0], "out_indices": [1, 2], "num_hidden_layers": 2},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8},
    "MarkupLMConfig": {"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024},
    "MimiDecoderConfig": {"num_filters": 8, "upsample_groups": 32},
    "MimiConfig": {"num_filters": 8, "upsample_groups": 32},
    "PocketTTSAudioTokenizerConfig": {"upsample_groups": 32},
    "PocketTTSAudioTokenizerDecoderConfig": {"upsample_groups": 32},
    "MobileBertConfig": {"hidden_size": 64, "embedding_size": 32, "intra_bottleneck_size": 32},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MllamaTextConfig": {"cross_attention_layers": [1]},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "MoonshineConfig": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "NemotronAsrStreamingEncoderConfig": {"sliding_window": 5, "default_num_lookahead_tokens": 1},
    "NeoMMEConfig": {"head_dim": 16},
    "OmDetTurboConfig": _SWIN,
    "PaddleOCRTextConfig": _MROPE,
    "PPOCRV5ServerDetConfig": {"start": {"intraclass_block_config": _INTRACLASS, "kernel_list": [3, 2, 2]}},
    "PPOCRV6MediumDetConfig": {"start": {"intraclass_block_config": _INTRACLASS, "kernel_list": [3, 2, 2]}},
    "PerceptionLMConfig": {
        "start": {
            "vision_config": TimmWrapperConfig(
                architecture="vit_pe_core_large_patch14_336", model_args={"embed_dim": 1024, "img_size": [448, 448]}
            )
        }
    },
    "PerceiverConfig": {"qk_channels": 32, "v_channels": 32},
    "Pix2StructTextModel": {"initializer_range": 0.02},
    "Qwen2VLTextConfig": _MROPE,
    "Qwen2_5OmniTalkerConfig": _MROPE,
    "Qwen2_5OmniTextConfig": _MROPE,
    "Qwen2_5OmniVisionEncoderConfig": {"window_size": 32},
    "Qwen2_5_VLTextConfig": _MROPE,
    "Qwen2_5_VLVisionConfig": {"window_size": 32},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "ple_embed_dim": 32,
    },
    "RagConfig": {"n_docs": 2},
    "RTDetrConfig": {"encoder_in_channels": [16, 32, 64], "decoder_in_channels": [32, 32, 32]},
    "RTDetrV2Config": {"encoder_in_channels": [16, 32, 64], "decoder_in_channels": [32, 32, 32]},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "is_decoder": True},
    "Sam3LiteTextTextConfig": {"num_hidden_layers": 3},  # the first and the last have no attention
    "Sam3VisionConfig": {"fpn_hidden_size": 128, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "Sam2VideoConfig": _MEMORY,
    "EdgeTamVideoConfig": _MEMORY
    | {
        "perceiver_resampler_hidden_size": 64,
        "perceiver_resampler_attention_head_dim": 64,
        "perceiver_resampler_num_latents": 4,
        "perceiver_resampler_num_latents_2d": 4,
        "memory_attention_rope_k_sizes": [2, 2],
        "start": {"vision_config": _REPVIT},
    },
    "Sam3VideoConfig": {
        "low_res_mask_size": 16,
        "score_threshold_detection": 0.0,
        "new_det_thresh": 0.25,
        "det_nms_thresh": 0.0,
        "fill_hole_area": 0,
        "assoc_iou_thresh": 1.1,
        "max_num_objects": 20,
    },
    "Sam3TrackerVideoConfig": _MEMORY | {"image_size": 32},
    "Sapiens2Config": {"num_key_value_heads_per_layer": [4, 2], "num_hidden_layers": 2},
    "Sapiens2HeadConfig": {"upsample_out_channels": [8], "conv_out_channels": [8], "use_pixel_shuffle": False},
    "Step3p7TextConfig": {"sliding_window": 4, "num_sliding_attention_heads": 4},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "TimmBackboneConfig": {"start": {"backbone": "resnet18"}},
    "UVDocBridge": {"stage_configs": [[[32, 1]], [[32, 2]]]},
    "TableTransformerConfig": _RESNET | {"d_model": 64},
    "TvpConfig": _RESNET | {"visual_prompt_size": 4, "max_img_size": 32},
    "ViltConfig": {"max_image_length": 16, "max_img_size": 32},
    "VibeVoiceAcousticTokenizerConfig": _SHORT_HOPS,
    "VibeVoiceAcousticTokenizerEncoderConfig": _SHORT_HOPS,
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 64},
    "ViltForImagesAndTextClassification": {"num_images": 2},
    "PatchTSMixerConfig": {"self_attn": True},
    "PPLCNetV4Config": {"stem_channels": [3, 48, 96]},
    "Qwen2_5OmniDiTConfig": {
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "num_hidden_layers": 3,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 2],
        "block_size": 4,
        "mel_dim": 16,
    },
    "Qwen2_5OmniBigVGANConfig": {"upsample_initial_channel": 64, "mel_dim": 16},
    "Qwen3OmniMoeAudioEncoderConfig": {"n_window": 50, "n_window_infer": 100},
    "Qwen3ASREncoderConfig": {"n_window": 50, "n_window_infer": 100},
    "Qwen3OmniMoeTalkerForConditionalGeneration": {"spatial_merge_size": 2},
    "XCLIPVisionConfig": {"num_frames": 3},
    "BridgeTowerForContrastiveLearning": {"contrastive_hidden_size": 32, "logit_scale_init_value": 2.6},
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8]},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "Dots1Config": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "Llama4VisionConfig": {"intermediate_size": 128},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 32},
    "Sam2HieraDetConfig": {
        "hidden_size": 8,
        "num_attention_heads": 1,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [8, 16, 32, 64],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [8, 8, 8, 8],
        "window_positional_embedding_background_size": [4, 4],
        "global_attention_blocks": [3],
    },
    "Sam2VisionConfig": {
        "fpn_hidden_size": 128,
        "backbone_channel_list": [64, 32, 16, 8],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "SuperPointConfig": {"keypoint_decoder_dim": 65},
    "SwinConfig": {"image_size": 64, "window_size": 2, "depths": [2, 1, 1, 1]},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "T5ForSequenceClassification": {"decoder_start_token_id": 0},
    "Xcodec2Config": {"quantization_dim": 64},
    "NeuCodecConfig": {"quantization_dim": 64},
    "Phi4MultimodalAudioConfig": {
        "nemo_conv_channels": 32,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
    },
    "XcodecConfig": {"codebook_dim": 544},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_hidden_layers": 4,
    },
}

# The memory of videos has 64 channels, and half of the model's at most.
CONFIGURATIONS |= {
    f"{family}{part}Config": {"hidden_size": 128}
    for family in ("EdgeTam", "EdgeTamVideo", "Sam2", "Sam2Video", "Sam3Tracker", "Sam3TrackerVideo")
    for part in ("PromptEncoder", "MaskDecoder")
} | {
    f"{family}{part}Config": {"hidden_size": 128}
    for family in ("Sam3", "Sam3LiteText")
    for part in ("GeometryEncoder", "DETREncoder", "DETRDecoder", "MaskDecoder")
}

# Text decoders with cross-attention, which their default configurations lack.
_WITH_CROSS_ATTENTION = (
    "BertGenerationDecoder",
    "BertLMHeadModel",
    "CamembertForCausalLM",
    "Data2VecTextForCausalLM",
    "ElectraForCausalLM",
    "ErnieForCausalLM",
    "RoCBertForCausalLM",
    "RobertaForCausalLM",
    "RobertaPreLayerNormForCausalLM",
    "XLMRobertaForCausalLM",
    "XLMRobertaXLForCausalLM",
    "XmodForCausalLM",
)
CONFIGURATIONS |= {name: {"is_decoder": True, "add_cross_attention": True} for name in _WITH_CROSS_ATTENTION}


def _tokens(make: Any, length: int, depth: int) -> torch.Tensor:
    columns: list[torch.Tensor] = [make.tokens(length) % 30 for _ in range(depth)]
    return torch.stack(columns, -1)


def _latents(make: Any) -> dict[str, Any]:
    """Latents of a sound, from which a decoder makes it: (batch, hidden_size, frames)."""
    return {"latents": make.random(3, make.config.hidden_size, 6)}


def _camera(make: Any) -> dict[str, Any]:
    """A picture of a camera, 16 tokens, and a text after it."""
    picture = make.config.vlm_config.image_token_id
    return {
        "input_ids": nn.functional.pad(make.input_ids(), (16, 0), value=picture),
        "attention_mask": nn.functional.pad(make.right_mask(), (16, 0), value=1),
        "pixel_values": make.random(3, 1, 3, 32, 32),
        "pixel_attention_mask": torch.ones(3, 1, dtype=torch.bool),
    }


def _speech(make: Any) -> dict[str, Any]:
    """Sound as a wave, quiet so that its quantised sum with the spectrogram depends on both, and 10 frames of that."""
    bins = make.config.semantic_model_config.feature_projection_input_dim
    return {"input_values": 0.01 * make.random(3, 1, 3200), "input_features": make.random(3, 10, bins)}


def _embedded(make: Any) -> dict[str, Any]:
    made: dict[str, Any] = make.made(["inputs_embeds", "attention_mask"])
    return made


def _heard(make: Any) -> dict[str, Any]:
    """A text, with 8 frames of sound per token."""
    bins = make.config.audio_config.num_mel_bins
    return {**make.made(["input_ids", "attention_mask"]), "input_features": make.random(3, bins, 96)}


def _points(size: int) -> dict[str, Any]:
    """Two points on each of three images, as prompts of a segmentation."""
    points = torch.tensor([[0.2, 0.3], [0.7, 0.6]]) * size
    return {"input_points": points.expand(3, 1, 2, 2), "input_labels": torch.ones(3, 1, 2, dtype=torch.int64)}


def _canvas(make: Any) -> dict[str, Any]:
    """Tokens that a diffusion model refines, after a prefix of 12 tokens."""
    return {
        "decoder_input_ids": make.decoder_input_ids(),
        "decoder_attention_mask": nn.functional.pad(make.attention_mask(), (0, 9), value=1),
    }


def _prefix(make: Any) -> DynamicCache:
    """The keys and values of 12 tokens, for the layers of a model that reads them."""
    config = make.config.get_text_config()
    cache = DynamicCache(config=config)
    for index, layer in enumerate(make.model.layers):
        heads = layer.self_attn.k_proj.out_features // layer.self_attn.head_dim
        cache.update(*(make.random(3, heads, 12, layer.self_attn.head_dim) for _ in range(2)), index)
    return cache


def _second_frame(make: Any, kind: Any, size: int) -> dict[str, Any]:
    """A video of which the first frame, with a point on an object, is in the model's memory."""
    session = kind(video=make.random(2, 3, size, size), video_height=size, video_width=size, dtype=torch.float32)
    index = session.obj_id_to_idx(1)
    point = {"point_coords": torch.full((1, 1, 1, 2), size / 3), "point_labels": torch.ones(1, 1, 1, dtype=torch.int32)}
    session.add_point_inputs(index, 0, point)
    session.obj_with_new_inputs = [1]
    make.model(session, frame_idx=0)
    return {"inference_session": session, "frame_idx": 1}


def _protein(make: Any) -> dict[str, Any]:
    """Proteins of 8, 8 and 6 residues, with three atoms each."""
    token, kept = torch.arange(8).expand(3, 8), torch.arange(8) < torch.tensor([[8], [8], [6]])
    of_atom, zeros = token.repeat_interleave(3, 1), torch.zeros(3, 8, dtype=torch.int64)
    lm = make.config.esmc_config
    atoms = EsmFold2AtomInputs(
        ref_pos=make.random(3, 24, 3),
        ref_charge=torch.zeros(3, 24),
        atom_attention_mask=kept.repeat_interleave(3, 1),
        ref_element=make.tokens(24) % make.config.max_atomic_number,
        ref_atom_name_chars=torch.stack([make.tokens(24) % make.config.char_vocab_size] * make.config.max_chars, -1),
        ref_space_uid=of_atom,
        atom_to_token=of_atom,
    )
    return {
        **dict.fromkeys(("token_index", "residue_index"), token),
        **dict.fromkeys(("asym_id", "sym_id", "entity_id", "mol_type"), zeros),
        "res_type": make.tokens(8) % 20,
        "token_bonds": torch.zeros(3, 8, 8, 1),
        "attention_mask": kept.long(),
        "atom_inputs": atoms,
        "lm_hidden_states": make.random(3, 8, lm.num_hidden_layers + 1, lm.hidden_size),
    }


def _three_sounds(make: Any) -> dict[str, Any]:
    """Frames of three sounds, one after the other."""
    return {
        "input_features": make.random(make.config.num_mel_bins, 350),
        "feature_lens": torch.tensor([200, 100, 50]),
    }


def _video_and_text(make: Any) -> dict[str, Any]:
    """Four pictures, 8 tokens each, and a text after them."""
    return {
        "pixel_values": make.pixel_values_videos(),
        "qformer_input_ids": make.input_ids(),
        "qformer_attention_mask": make.right_mask(),
        "input_ids": nn.functional.pad(make.input_ids(), (32, 0), value=99),
        "attention_mask": nn.functional.pad(make.right_mask(), (32, 0), value=1),
    }


def _prompted_frame(make: Any) -> dict[str, Any]:
    """A video with a text prompt, of which the first frame is in the model's memory."""
    session = Sam3VideoInferenceSession(
        video=make.random(2, 3, 32, 32), video_height=32, video_width=32, dtype=torch.float32
    )
    prompt = session.add_prompt("a cat")
    session.prompt_input_ids[prompt] = make.tokens(12)[:1]
    session.prompt_attention_masks[prompt] = torch.ones(1, 12, dtype=torch.int64)
    make.model(session, frame_idx=0)
    return {"inference_session": session, "frame_idx": 1}


def _noise_after_context(make: Any) -> dict[str, Any]:
    """A block of tokens to denoise, and the states of the 12 tokens before it, which become keys and values only."""
    config, cache = make.config, DFlashCache(config=make.config)
    cache.set_previous_accepted_tokens(12)
    return {
        "noise_embeds": make.random(3, 4, config.hidden_size),
        "context_hidden_states": make.random(3, 12, config.hidden_size * len(config.target_layer_ids)),
        "attention_mask": nn.functional.pad(make.attention_mask(), (0, 4), value=1),
        "past_key_values": cache,
    }


def _codebooks(make: Any) -> dict[str, Any]:
    """Tokens of several codebooks: (batch * codebooks, length)."""
    count = make.get("num_codebooks", default=4)
    return {
        "input_ids": _tokens(make, 12, count).transpose(1, 2).flatten(0, 1),
        "attention_mask": make.right_mask(),
    }


def _codebooks_last(make: Any) -> dict[str, Any]:
    """Tokens of several codebooks: (batch, length, codebooks)."""
    count = make.get("num_codebooks", default=32)
    return {"input_ids": _tokens(make, 12, count), "attention_mask": make.attention_mask()}


def _text_and_image(make: Any) -> dict[str, Any]:
    return {**make.made(["input_ids", "attention_mask"]), "pixel_values": make.pixel_values()}


def _text_with_image(make: Any) -> dict[str, Any]:
    """A text that sees one image by cross-attention."""
    image = {"pixel_values": make.pixel_values()[:, None], "image_attention_mask": torch.ones(3, 12, 1)}
    return _text_and_image(make) | image


def _with_image_tokens(make: Any) -> dict[str, Any]:
    made = _text_and_image(make)
    made["input_ids"][:, 2:10] = make.config.image_token_index
    if hasattr(make.config, "qformer_config") and "InstructBlip" in type(make.model).__name__:
        made["qformer_input_ids"] = make.input_ids()
        made["qformer_attention_mask"] = make.right_mask()
    return made


def _padded_on_the_right(make: Any) -> dict[str, Any]:
    return {"input_ids": make.input_ids().clamp(min=20), "attention_mask": make.right_mask()}


def _packed_patches(make: Any) -> dict[str, Any]:
    size = make.config.patch_size
    return {"pixel_values": make.random(1, 3, size, 48 * size), "target_sizes": torch.tensor([[4, 4]] * 3)}


def _decoder(make: Any) -> dict[str, Any]:
    keys = ("input_ids", "attention_mask", "encoder_hidden_states", "encoder_attention_mask")
    made: dict[str, Any] = make.made(keys)
    return made


def _video(make: Any) -> dict[str, Any]:
    return {"pixel_values": make.pixel_values_videos()}


def _series(make: Any) -> dict[str, Any]:
    """A time series, with time features and an observed mask."""
    config = make.config
    lags = max(getattr(config, "lags_sequence", None) or [0])
    past, future = (config.context_length or config.prediction_length) + lags, config.prediction_length
    features = config.num_time_features
    return {
        "past_values": make.random(3, past),
        "past_time_features": make.random(3, past, features),
        "past_observed_mask": torch.ones(3, past),
        "future_values": make.random(3, future),
        "future_time_features": make.random(3, future, features),
    }


def _question(make: Any) -> dict[str, Any]:
    made: dict[str, Any] = make.made(["input_ids", "attention_mask"])
    made["input_ids"][:, 5] = make.config.question_token_id
    return made


# Arguments of model classes besides the configuration.
ARGUMENTS: dict[str, dict[str, Any]] = {"Qwen3OmniMoeCode2WavDecoderBlock": {"layer_idx": 0}}

# Makers of inputs by model class; a name that ends in * stands for all classes that begin with it.
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = (
    dict.fromkeys(_WITH_CROSS_ATTENTION, _decoder)
    | {
        "AlignModel": _text_and_image,
        "AudioFlamingo3Encoder": lambda make: {
            "input_features": make.random(3, 16, 2 * make.config.max_source_positions),
            "input_features_mask": (
                torch.arange(2 * make.config.max_source_positions) < torch.tensor([[999], [200], [90]])
            ).long(),
        },
        "Blip2ForImageTextRetrieval": lambda make: {
            "input_ids": nn.functional.pad(make.input_ids(), (8, 0), value=99),
            "attention_mask": nn.functional.pad(make.right_mask(), (8, 0), value=1),
            "pixel_values": make.pixel_values(),
        },
        "DepthPro*": lambda make: {"pixel_values": make.random(3, 3, 128, 128)},
        # Its patches mix tokens with the padding before them, for which eager attention is an average of hidden values.
        "BltForCausalLM": _padded_on_the_right,
        "BltModel": _padded_on_the_right,
        "BltGlobalTransformer": lambda make: {
            "inputs_embeds": make.inputs_embeds(),
            "attention_mask": torch.full((1, 1, 12, 12), torch.finfo(torch.float32).min).triu(1),
        },
        "CsmBackboneModel": _codebooks_last,
        "CsmForConditionalGeneration": _codebooks_last,
        "CsmDepthDecoderForCausalLM": _padded_on_the_right,  # its logits leave out the first token
        "Dots3NoteAudioModel": lambda make: {
            "input_features": make.random(3, make.config.feature_size, 64),
            "chunk_sample_lengths": torch.tensor([64, 64, 40]) * make.config.hop_length,
        },
        "EsmFold2Model": _protein,
        "EdgeTamModel": lambda make: {"pixel_values": make.random(3, 3, 64, 64)} | _points(64),
        **dict.fromkeys(
            (
                "ConditionalDetrForObjectDetection",
                "ConditionalDetrForSegmentation",
                "ConditionalDetrModel",
                "DetrForObjectDetection",
                "DetrForSegmentation",
                "DetrModel",
            ),
            # Their backbone shrinks images to a 32nd: 12 keys.
            lambda make: {"pixel_values": make.random(3, 3, 96, 128)},
        ),
        "DeepseekOcr2VisionEncoder": lambda make: {"inputs_embeds": make.inputs_embeds(), "num_patches": 8},
        "DiffusionGemmaDecoderModel": lambda make: _canvas(make) | {"past_key_values": _prefix(make)},
        "DiffusionGemmaModel": lambda make: make.made(["input_ids", "attention_mask"]) | _canvas(make),
        "DiffusionGemmaForBlockDiffusion": lambda make: make.made(["input_ids", "attention_mask"]) | _canvas(make),
        "EdgeTamVideoModel": lambda make: _second_frame(make, EdgeTamVideoInferenceSession, 64),
        "Sam2VideoModel": lambda make: _second_frame(make, Sam2VideoInferenceSession, 64),
        "Sam3TrackerVideoModel": lambda make: _second_frame(make, Sam3TrackerVideoInferenceSession, 32),
        "DecisionTransformerModel": lambda make: {
            "states": make.random(3, 6, make.config.state_dim),
            "actions": make.random(3, 6, make.config.act_dim),
            "rewards": make.random(3, 6, 1),
            "returns_to_go": make.random(3, 6, 1),
            "timesteps": torch.arange(6).expand(3, 6),
            "attention_mask": make.right_mask()[:, -6:],
        },
        "IdeficsForVisionText2Text": _text_with_image,
        "IdeficsModel": _text_with_image,
        "MllamaTextModel": lambda make: (
            make.made(["input_ids", "attention_mask"])
            | {"cross_attention_states": make.random(3, 5, make.config.hidden_size)}
        ),
        "NemotronAsrStreamingEncoder": lambda make: {
            "input_features": make.random(3, 96, make.config.num_mel_bins),
            "attention_mask": (torch.arange(96) < torch.tensor([[96], [80], [60]])).long(),
        },
        "Pix2StructForConditionalGeneration": lambda make: {
            "flattened_patches": make.random(3, 9, 2 + make.config.vision_config.patch_embed_hidden_size).abs(),
            "attention_mask": make.right_mask()[:, -9:],
            "decoder_input_ids": make.decoder_input_ids(),
        },
        "XCLIPModel": lambda make: (
            make.made(["input_ids", "attention_mask"])
            | {"pixel_values": make.random(3, make.config.vision_config.num_frames, 3, 32, 32)}
        ),
        "KyutaiSpeechToTextModel": lambda make: {
            "input_ids": _tokens(make, 12, make.config.num_codebooks + 1),
            "attention_mask": make.attention_mask(),
        },
        "Llama4VisionModel": lambda make: {"pixel_values": make.pixel_values()},
        "MllamaVisionModel": lambda make: {
            "pixel_values": make.random(
                3, 1, make.config.max_num_tiles, 3, make.config.image_size, make.config.image_size
            ),
            "aspect_ratio_ids": torch.tensor([[1], [2], [6]]),
            "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]], [[1, 1, 0, 0]], [[1, 1, 1, 1]]]),
        },
        "MimiDecoderModel": _latents,
        "MiniCPMOcrVisionModel": _packed_patches,
        "MiniCPMV4_6VisionModel": _packed_patches,
        "MiniCPMV4_7VisionModel": _packed_patches,
        "Molmo2Adapter": lambda make: {
            "image_features": make.random(3, 16, 2 * make.config.hidden_size),
            "pooled_patches_idx": torch.tensor([[0, 1, 4, 5], [18, 19, 22, -1], [40, 41, -1, -1]]),
        },
        "Molmo2VisionModel": lambda make: {
            "pixel_values": make.random(3, make.config.num_position_embeddings, 3 * make.config.patch_size**2)
        },
        "MuseGlimmerAssistantModel": _noise_after_context,
        "MusicgenForConditionalGeneration": lambda make: (
            make.made(["input_ids", "attention_mask"]) | {"decoder_input_ids": _codebooks(make)["input_ids"]}
        ),
        "MusicgenMelodyForConditionalGeneration": lambda make: (
            make.made(["input_ids", "attention_mask"]) | {"decoder_input_ids": _codebooks(make)["input_ids"]}
        ),
        "Musicgen*": _codebooks,
        "MusicgenMelody*": _codebooks,
        "NeuCodecModel": _speech,
        "PaddleOCRVision*": lambda make: {
            "pixel_values": make.random(1, 48, 3, make.config.patch_size, make.config.patch_size),
            "grid_thw": make.grid_thw(),
        },
        "PI0Model": lambda make: (
            _camera(make) | {"action_embeds": make.random(3, 5, make.config.dit_config.hidden_size)}
        ),
        "PI0ForConditionalGeneration": lambda make: (
            _camera(make)
            | {
                "state": make.random(3, make.config.max_state_dim),
                "noise": make.random(3, make.config.chunk_size, make.config.max_action_dim),
                "timestep": torch.tensor([0.2, 0.5, 0.8]),
            }
        ),
        "Phi4MultimodalAudioModel": lambda make: {
            "hidden_states": make.random(3, 64, make.config.input_size),
            "mask": None,
        },
        "PPOCRV5MobileRecEncoderWithSVTR": lambda make: {"hidden_states": make.random(3, 384, 1, 20)},
        "PPOCRV5ServerRecEncoderWithSVTR": lambda make: {"hidden_states": make.random(3, 16, 1, 20)},
        "PPOCRV6SmallRecEncoderWithSVTR": lambda make: {"hidden_states": make.random(3, 384, 1, 20)},
        "PPOCRV5MobileRecForTextRecognition": lambda make: {"pixel_values": make.random(3, 3, 96, 160)},
        "PPOCRV5ServerRecForTextRecognition": lambda make: {"pixel_values": make.random(3, 3, 48, 160)},
        "PPOCRV6SmallRecForTextRecognition": lambda make: {"pixel_values": make.random(3, 3, 48, 160)},
        "SeamlessM4TTextToUnit*": lambda make: make.made(
            ["inputs_embeds", "attention_mask", "decoder_input_ids", "decoder_attention_mask"]
        ),
        **dict.fromkeys(
            (
                "PatchTSMixerForPrediction",
                "PatchTSMixerForPretraining",
                "PatchTSMixerForRegression",
                "PatchTSMixerForTimeSeriesClassification",
                "PatchTSMixerModel",
            ),
            lambda make: {"past_values": make.random(3, make.config.context_length, make.config.num_input_channels)},
        ),
        "PatchTST*": lambda make: {
            "past_values": make.random(3, make.config.context_length, make.config.num_input_channels)
        },
        "Pix2StructVisionModel": lambda make: {
            "flattened_patches": make.random(3, 9, 2 + make.config.patch_embed_hidden_size).abs(),
            "attention_mask": make.attention_mask()[:, :9],
        },
        "EfficientLoFTR*": lambda make: {"pixel_values": make.random(3, 2, 3, 64, 64)},
        "Blip2QFormerModel": lambda make: {
            "query_embeds": make.random(3, 8, make.config.hidden_size),
            "encoder_hidden_states": make.random(3, 14, make.config.encoder_hidden_size),
            "encoder_attention_mask": make.encoder_attention_mask(),
        },
        "Blip2Model": _with_image_tokens,
        "Blip2ForConditionalGeneration": _with_image_tokens,
        "FunAsrNanoEncoder": lambda make: {
            "input_features": make.random(3, 20, make.config.input_size),
            "input_features_mask": (torch.arange(20) < torch.tensor([[20], [17], [9]])).long(),
        },
        "Florence2VisionBackbone": lambda make: {"hidden_states": make.random(3, 3, 64, 64)},
        "GraniteSpeech5*": lambda make: {"input_features": make.random(3, 40, 64)},
        "InstructBlipForConditionalGeneration": _with_image_tokens,
        "InstructBlipModel": _with_image_tokens,
        "InstructBlipVideoForConditionalGeneration": _video_and_text,
        "InstructBlipVideoModel": _video_and_text,
        "Idefics2PerceiverResampler": lambda make: {
            "context": make.encoder_hidden_states(),
            "attention_mask": make.encoder_attention_mask(),
        },
        "Inkling2VisionModel": lambda make: {
            "pixel_values": make.random(12, 16, 16, 3),
            "image_grid_thw": torch.tensor([[1, 2, 2]] * 3),
        },
        "JevForDecision": lambda make: {
            "input_ids": make.input_ids()[:1],
            "marks": torch.tensor([[4, 8, 12]]),
            "num_options": torch.tensor([[2, 2, 3]]),
            "question_type_ids": torch.tensor([[0, 1, 2]]),
        },
        "Kimi_K25VisionModel": lambda make: {
            "pixel_values": make.random(48, 3, make.config.patch_size, make.config.patch_size),
            "grid_thw": make.grid_thw(),
        },
        "LightGlueForKeypointMatching": lambda make: {"pixel_values": make.random(3, 2, 3, 64, 64)},
        "Kosmos2ForConditionalGeneration": lambda make: (
            _text_and_image(make) | {"image_embeds_position_mask": (torch.arange(12) // 4 == 1).long().expand(3, 12)}
        ),
        "Kosmos2Model": lambda make: (
            _text_and_image(make) | {"image_embeds_position_mask": (torch.arange(12) // 4 == 1).long().expand(3, 12)}
        ),
        "Gemma4VisionModel": lambda make: {
            "pixel_values": make.random(3, 16, 3 * make.config.patch_size**2).sigmoid(),
            "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(3, 16, 2),
        },
        "PocketTTSAudioTokenizerDecoderModel": _latents,
        "Qwen2_5OmniToken2WavDiTModel": lambda make: {
            "hidden_states": make.random(3, 24, make.config.mel_dim),
            "condition_vector": make.random(3, 24, make.config.mel_dim),
            "speaker_embedding": make.random(3, 24, make.config.enc_emb_dim),
            "quantized_code": make.tokens(12) % 30,
            "time_step": torch.tensor(0.3),
        },
        "Qwen2_5OmniToken2WavModel": lambda make: {
            "code": make.tokens(12) % 30,
            "conditioning": make.random(3, make.config.dit_config.enc_emb_dim),
            "reference_mel": make.random(3, 24, make.config.dit_config.mel_dim),
            "num_steps": 2,
        },
        "Qwen2_5OmniAudioEncoder": _three_sounds,
        "Qwen3OmniMoeAudioEncoder": _three_sounds,
        "UnlimitedOcrVisionEncoder": lambda make: {"patch_embeds": make.random(3, make.config.hidden_size, 4, 4)},
        "Qwen3ASREncoder": lambda make: {
            "input_features": make.random(3, make.config.num_mel_bins, 200),
            "input_features_mask": (torch.arange(200) < torch.tensor([[200], [150], [90]])).long(),
        },
        "Qwen3OmniMoeCode2Wav": lambda make: {
            "codes": torch.stack([make.tokens(12) for _ in range(make.config.num_quantizers)], 1)
        },
        "Qwen3OmniMoeCode2WavTransformerModel": _embedded,
        "Qwen3OmniMoeTalkerCodePredictorModel": _embedded,
        "Qwen3OmniMoeTalkerForConditionalGeneration": _embedded,
        "Qwen3OmniMoeTalkerModel": _embedded,
        "Rag*": lambda make: {
            "input_ids": make.input_ids(),
            "attention_mask": make.attention_mask(),
            "context_input_ids": make.input_ids().repeat(2, 1),
            "context_attention_mask": make.right_mask().repeat(2, 1),
            "doc_scores": make.random(3, 2),
            "decoder_input_ids": make.decoder_input_ids(),
        },
        "Sam2Model": lambda make: {"pixel_values": make.random(3, 3, 64, 64)} | _points(64),
        "Sam3VideoModel": _prompted_frame,
        "Sam3TrackerModel": lambda make: {"pixel_values": make.random(3, 3, 32, 32)} | _points(32),
        "SpeechEncoderDecoderModel": lambda make: {
            "input_values": make.random(3, 1600),
            "decoder_input_ids": make.decoder_input_ids(),
        },
        "Splinter*": _question,
        "T5ForSequenceClassification": lambda make: make.with_end(make.made(["input_ids", "attention_mask"])),
        "TimeSeriesTransformer*": _series,
        "TimesFm2_5ModelForPrediction": lambda make: {"past_values": [make.random(128) for _ in range(3)]},
        "TimesFm2_5Model": lambda make: {"past_values": make.random(3, 128)},
        "TimesFmModelForPrediction": lambda make: {"past_values": [make.random(128) for _ in range(3)]},
        "TimesFm*": lambda make: {
            "past_values": make.random(3, 128),
            "past_values_padding": torch.zeros(3, 128, dtype=torch.int64),
            "freq": torch.zeros(3, 1, dtype=torch.int64),
        },
        "VideoLlama3VisionModel": lambda make: {
            "pixel_values": make.patches(),
            "grid_thw": make.grid_thw(),
            "merge_sizes": torch.tensor([2, 2, 2]),
        },
        "VideoMAEForPreTraining": lambda make: (
            _video(make) | {"bool_masked_pos": torch.arange(128).expand(3, 128) % 4 > 0}
        ),
        "VideoMAE*": _video,
        "ViltForImagesAndTextClassification": lambda make: (
            make.made(["input_ids", "attention_mask"]) | {"pixel_values": make.random(3, 2, 3, 32, 32)}
        ),
        "Vivit*": _video,
        "VoxtralRealtimeForConditionalGeneration": _heard,
        "VoxtralRealtimeModel": _heard,
        "Wav2Vec2ForXVector": lambda make: {"input_values": make.random(3, 16000)},
        "XcodecModel": lambda make: {"input_values": make.random(3, 1, 16000)},
        "Xcodec2Model": _speech,
        "XCLIPVisionModel": lambda make: {"pixel_values": make.pixel_values()},
    }
)

# Classes (by the beginning of their names) without right eager attention in transformers: compared with plain_attention
# in tools/families/comparison.py.
# Nemotron: it reads the mask as Boolean, but for "eager" it is made of numbers, and 0 shows a key.
# Qwen2_5OmniToken2Wav: it looks "eager" up among the functions of other names.
# SeamlessM4Tv2: its Boolean mask of chunks is added to the scores as 0 and 1.
WITHOUT_EAGER = ("Nemotron3_5Asr", "NemotronAsrStreaming", "Qwen2_5OmniToken2Wav", "SeamlessM4Tv2")
