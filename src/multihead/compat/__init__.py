"""Drop-in replacements for the layers of other libraries (same signature, same state_dict), and conversions."""

from multihead.compat import annotated, d2l, huggingface, keras, per_head, torch_nn

__all__ = ["annotated", "d2l", "huggingface", "keras", "per_head", "torch_nn"]
