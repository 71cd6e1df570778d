"""Attention over ranks, the processes of torch.distributed: one sequence split over them."""

from multihead.parallel.sequence import Shard, context_parallel, shard, unshard

__all__ = ["Shard", "context_parallel", "shard", "unshard"]
