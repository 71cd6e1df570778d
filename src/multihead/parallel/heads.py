"""Split the heads of layers over ranks (tensor parallelism)."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from multihead.errors import ArgumentError
from multihead.heads import head_counts
from multihead.layer import MultiHeadAttention
from multihead.layer.sharding import check_splittable
from multihead.parallel.exchange import Ranks

M = TypeVar("M", bound=nn.Module)


def parallelize(module: M, mesh: Any) -> M:
    """Split the heads of every `MultiHeadAttention` in a module over ranks, in place.

    q_proj, k_proj and v_proj are split by columns and out_proj by rows, as PyTorch's own plans do
    (arXiv:1909.08053). With fewer key/value heads than ranks, k_proj and v_proj stay whole, and each rank uses its
    heads. All other parameters stay whole, and so do the inputs, the outputs and the arguments of a call. After the
    backward pass every rank has the whole gradient of what is whole.

    Args:
        module: a layer, or a model that contains some.
        mesh: a DeviceMesh of one dimension.

    Returns:
        the module itself; the split parameters are DTensors, which torch.distributed.checkpoint saves and loads on any
        number of ranks.

    Raises:
        ArgumentError: the module has no such layer, or the heads of one cannot be divided; nothing is changed then.

    >>> import torch.distributed as dist, tempfile
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> layer = parallelize(MultiHeadAttention(8, 2), dist.init_device_mesh("cpu", (1,)))
    >>> type(layer.q_proj.weight).__name__
    'DTensor'
    >>> dist.destroy_process_group()
    """
    from torch.distributed.tensor.parallel import parallelize_module

    ranks = Ranks.of(mesh)
    if not hasattr(mesh, "get_group"):
        raise ArgumentError("The ranks are a process group.", 'Give a DeviceMesh, for example mesh["tp"].')
    layers = {name: each for name, each in module.named_modules() if isinstance(each, MultiHeadAttention)}
    if not layers:
        raise ArgumentError(
            f"{type(module).__name__} contains no MultiHeadAttention.",
            "Split the layers of other libraries with torch.distributed.tensor.parallel.parallelize_module.",
        )
    plans = {name: _plan(name, layer, ranks.size) for name, layer in layers.items()}
    for name, layer in layers.items():
        parallelize_module(layer, mesh, plans[name])
    return module


def _plan(name: str, layer: MultiHeadAttention, ranks: int) -> dict[str, Any]:
    """Return how the projections of a layer are split, or raise an error."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        fitting = [n for n in head_counts(heads) if kv_heads % n == 0 or n % kv_heads == 0]
        raise ArgumentError(
            f"{name or type(layer).__name__} has {heads} heads and {kv_heads} key/value heads, which cannot be divided "
            f"over {ranks} ranks.",
            f"Take a number of ranks of {', '.join(str(n) for n in fitting)}.",
        )
    if ranks > 1:
        check_splittable(layer, ranks)
    plan: dict[str, Any] = {"q_proj": ColwiseParallel()}
    if kv_heads % ranks == 0:
        plan |= {"k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
    return plan if layer.out_proj is None else plan | {"out_proj": RowwiseParallel()}
