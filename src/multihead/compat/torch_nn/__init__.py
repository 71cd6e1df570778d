"""Drop-ins for nn.MultiheadAttention, their installation in whole models, and conversions both ways."""

from torch.nn import TransformerDecoder

from multihead.compat.torch_nn.attention import MultiheadAttention
from multihead.compat.torch_nn.conversion import from_torch, to_torch
from multihead.compat.torch_nn.replace import (
    Replaced,
    Transformer,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    replace,
)

# TransformerDecoder is PyTorch's own; it is exported so that one changed import line covers all five classes.
__all__ = [
    "MultiheadAttention",
    "Replaced",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "from_torch",
    "replace",
    "to_torch",
]
