"""Masks as values: which keys each query may see."""

from multihead.masks.picture import picture
from multihead.masks.values import Causal, Documents, Drop, Full, Keep, Lengths, Mask, Prefix, Window

__all__ = ["Causal", "Documents", "Drop", "Full", "Keep", "Lengths", "Mask", "Prefix", "Window", "picture"]
