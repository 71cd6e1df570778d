"""The layers people already have, made ours by changing one import: same signature, same state_dict."""

from multihead.compat import annotated, d2l, huggingface, keras, per_head, torch_nn

__all__ = ["annotated", "d2l", "huggingface", "keras", "per_head", "torch_nn"]
