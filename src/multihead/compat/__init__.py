"""The layers people already have, made ours by changing one import: same signature, same state_dict."""

from multihead.compat import torch_nn

__all__ = ["torch_nn"]
