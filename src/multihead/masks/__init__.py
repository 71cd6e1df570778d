"""Masks as values: which keys each query may see."""

from multihead.masks.base import Mask
from multihead.masks.causal import Causal
from multihead.masks.check import check
from multihead.masks.documents import Documents
from multihead.masks.full import Full
from multihead.masks.lengths import Lengths
from multihead.masks.picture import picture
from multihead.masks.prefix import Prefix
from multihead.masks.tensor import Drop, Keep
from multihead.masks.window import Window

__all__ = ["Causal", "Documents", "Drop", "Full", "Keep", "Lengths", "Mask", "Prefix", "Window", "check", "picture"]
