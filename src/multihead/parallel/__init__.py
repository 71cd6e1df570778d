"""Attention that is split over the processes (ranks) of torch.distributed, by tokens of a sequence or by heads."""

from multihead.parallel.heads import parallelize
from multihead.parallel.sequence import Shard, context_parallel, shard, unshard

__all__ = ["Shard", "context_parallel", "parallelize", "shard", "unshard"]
