"""Attention over ranks, the processes of torch.distributed: one sequence, or the heads of a layer, split over them."""

from multihead.parallel.heads import parallelize
from multihead.parallel.sequence import Shard, context_parallel, shard, unshard

__all__ = ["Shard", "context_parallel", "parallelize", "shard", "unshard"]
