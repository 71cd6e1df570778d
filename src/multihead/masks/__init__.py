"""Masks as immutable values: which keys each query may see."""

from multihead.masks.base import Mask
from multihead.masks.check import check, picture
from multihead.masks.distance import Causal, Full, Window
from multihead.masks.documents import Documents
from multihead.masks.lengths import Lengths, Prefix
from multihead.masks.tensor import Drop, Keep

__all__ = ["Causal", "Documents", "Drop", "Full", "Keep", "Lengths", "Mask", "Prefix", "Window", "check", "picture"]
