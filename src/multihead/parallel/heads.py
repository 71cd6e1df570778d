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
    """Split the heads of every attention layer in a module over ranks, in place.

    These are the `MultiHeadAttention` in it, and the layers of Hugging Face models whose projections are q_proj,
    k_proj, v_proj and o_proj, such as those of Llama, Mistral and Qwen 2.

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
        elif _is_of_hugging_face(each):
            plans[name] = _plan_of_hugging_face(name, each, ranks.size)
    if not plans:
        raise ArgumentError(
            f"{type(module).__name__} contains no MultiHeadAttention, and no attention layer of transformers with "
            "q_proj, k_proj, v_proj and o_proj.",
            "Split the layers of other libraries with torch.distributed.tensor.parallel.parallelize_module.",
        )
    for name, plan in plans.items():
        parallelize_module(module.get_submodule(name), mesh, plan)
    return module


def _is_of_hugging_face(module: nn.Module) -> bool:
    """Whether a module is an attention layer of transformers whose projections have these names."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return hasattr(module, "config") and all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _plan_of_hugging_face(name: str, layer: nn.Module, ranks: int) -> dict[str, Any]:
    """Return how the projections of a layer of transformers are split, or raise an error."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    head_dim: Any = getattr(layer, "head_dim", None)
    projections = {each: layer.get_submodule(each) for each in ("q_proj", "k_proj", "v_proj", "o_proj")}
    others = [each for each, _ in layer.named_parameters() if each.partition(".")[0] not in projections]
    if others or not isinstance(head_dim, int):
        raise ArgumentError(
            f"{name} has {others[0] if others else 'no head_dim'}, and only the projections of a layer of transformers "
            "can be split.",
            "Split the sequence instead, with context_parallel.",
        )
    heads, kv_heads = (int(projections[each].out_features) // head_dim for each in ("q_proj", "k_proj"))  # type: ignore[arg-type]
    if heads % ranks or kv_heads % ranks:
        fitting = [n for n in head_counts(heads) if kv_heads % n == 0]
        raise _undivided(name, heads, kv_heads, ranks, fitting)
    of_heads = {each: ColwiseParallel() for each in ("q_proj", "k_proj", "v_proj")}
    return {**of_heads, "o_proj": RowwiseParallel()}


def _undivided(name: str, heads: int, kv_heads: int, ranks: int, fitting: list[int]) -> ArgumentError:
    return ArgumentError(
        f"{name} has {heads} heads and {kv_heads} key/value heads, which cannot be divided over {ranks} ranks.",
        f"Take a number of ranks of {', '.join(str(n) for n in fitting)}.",
    )


def _plan(name: str, layer: MultiHeadAttention, ranks: int) -> dict[str, Any]:
    """Return how the projections of a layer are split, or raise an error."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        fitting = [n for n in head_counts(heads) if kv_heads % n == 0 or n % kv_heads == 0]
        raise _undivided(name or type(layer).__name__, heads, kv_heads, ranks, fitting)
    if ranks > 1:
        check_splittable(layer, ranks)
    plan: dict[str, Any] = {"q_proj": ColwiseParallel()}
    if kv_heads % ranks == 0:
        plan |= {"k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
    return plan if layer.out_proj is None else plan | {"out_proj": RowwiseParallel()}
