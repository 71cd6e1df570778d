"""Multi-head attention for PyTorch that is fast on any mask and can be seen through, head by head."""

from multihead import compat, masks
from multihead.functional import attention, attention_with_logsumexp, explain, statistics, weights
from multihead.heads import merge_heads, split_heads
from multihead.layer import MultiHeadAttention
from multihead.observation.observe import observe

__all__ = [
    "MultiHeadAttention",
    "attention",
    "attention_with_logsumexp",
    "compat",
    "explain",
    "masks",
    "merge_heads",
    "observe",
    "split_heads",
    "statistics",
    "weights",
]
__version__ = "0.1.0"
