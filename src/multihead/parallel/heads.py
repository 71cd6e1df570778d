"""Split the heads of layers over ranks (tensor parallelism)."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention
from multihead.layer.sharding import check_divides, check_splittable
from multihead.parallel import hugging_face
from multihead.parallel.exchange import Ranks

M = TypeVar("M", bound=nn.Module)


def parallelize(module: M, mesh: Any) -> M:
    """Split the heads of every attention layer in a module over ranks, in place.

    These are the `MultiHeadAttention` in it, and the layers of Hugging Face models with q_proj, k_proj, v_proj and
    o_proj, such as those of Llama, Qwen 3, Gemma 3 and GPT-OSS, and those of GPT-NeoX.

    q_proj, k_proj and v_proj are split by columns and out_proj by rows, as PyTorch's own plans do
    (arXiv:1909.08053). With fewer key/value heads than ranks, k_proj and v_proj stay whole, and each rank uses its
    heads. All other parameters stay whole, and so do the inputs, the outputs and the arguments of a call. After the
    backward pass every rank has the whole gradient of what is whole. (In layers of transformers, sinks are split, and
    norms of single heads are DTensors, whose gradients are summed where they are used.)

    Args:
        module: a layer, or a model that contains some.
        mesh: a DeviceMesh of one dimension.

    Returns:
        the module itself; the split parameters are DTensors, which torch.distributed.checkpoint saves and loads on any
        number of ranks.

    Raises:
        ArgumentError: the module has no such layer, a layer of transformers has other parameters, or the heads of one
            cannot be divided; nothing is changed then.

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
    plans = {}
    for name, each in module.named_modules():
        if isinstance(each, MultiHeadAttention):
            plans[name] = _plan(name, each, ranks.size)
        elif (found := hugging_face.layer_of(name, each)) is not None:
            plans[name] = found.plan(ranks.size)
    if not plans:
        raise ArgumentError(
            f"{type(module).__name__} contains no MultiHeadAttention, and no attention layer of transformers with "
            "q_proj, k_proj, v_proj and o_proj.",
            "Split the layers of other libraries with torch.distributed.tensor.parallel.parallelize_module.",
        )
    for name, plan in plans.items():
        layer = module.get_submodule(name)
        if not isinstance(layer, MultiHeadAttention):
            hugging_face.prepare(layer, mesh, ranks)
        parallelize_module(layer, mesh, plan)
    return module


def _plan(name: str, layer: MultiHeadAttention, ranks: int) -> dict[str, Any]:
    """Return how the projections of a layer are split, or raise an error."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    check_divides(name or type(layer).__name__, layer.num_heads, layer.num_kv_heads, ranks)
    if ranks > 1:
        check_splittable(layer, ranks)
    plan: dict[str, Any] = {"q_proj": ColwiseParallel()}
    if layer.num_kv_heads % ranks == 0:
        plan |= {"k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
    return plan if layer.out_proj is None else plan | {"out_proj": RowwiseParallel()}
