"""The multi-head attention layer."""

from multihead.layer.attention import MultiHeadAttention

__all__ = ["MultiHeadAttention"]
