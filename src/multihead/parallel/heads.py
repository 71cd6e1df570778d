"""Split the heads of attention layers of this library and of transformers over ranks (tensor parallelism)."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention
from multihead.layer.sharding import RankHeads, ShardGroup, check_heads_divide, check_splittable
from multihead.parallel.exchange import Ranks

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def parallelize(module: ModuleT, mesh: Any) -> ModuleT:
    """Split the heads of every attention layer in a module over ranks, in place.

    Supported are `MultiHeadAttention`, the layers of Hugging Face models with q_proj, k_proj, v_proj and o_proj, such
    as Llama, Qwen 3, Gemma 3 and GPT-OSS, and the layers of GPT-NeoX.

    q_proj, k_proj and v_proj are split by columns and out_proj by rows, as PyTorch's own plans do
    (arXiv:1909.08053). With fewer key/value heads than ranks, k_proj and v_proj are replicated, and each rank uses
    the heads it needs. All other parameters, the inputs and the outputs are replicated. After the backward pass every
    rank has the complete gradient of each replicated parameter. (In layers of transformers, sinks are split, and norms
    of single heads are DTensors, whose gradients are summed when they are used.)

    Args:
        module: a layer, or a model that contains some.
        mesh: a DeviceMesh of one dimension.

    Returns:
        the module itself; the split parameters are DTensors, which torch.distributed.checkpoint saves and loads on any
        number of ranks.

    Raises:
        ArgumentError: the module has no such layer, a layer of transformers has other parameters, or the heads of a
            layer cannot be divided by the number of ranks. Nothing is changed then.

    >>> import torch.distributed as dist, tempfile
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> layer = parallelize(MultiHeadAttention(8, 2), dist.init_device_mesh("cpu", (1,)))
    >>> type(layer.q_proj.weight).__name__
    'DTensor'
    >>> dist.destroy_process_group()
    """
    from torch.distributed.tensor.parallel import parallelize_module

    ranks = Ranks.of_mesh(mesh)
    if not hasattr(mesh, "get_group"):
        raise ArgumentError("The ranks are a process group.", 'Give a DeviceMesh, for example mesh["tp"].')
    plans = {}
    for name, each in module.named_modules():
        if isinstance(each, MultiHeadAttention):
            plans[name] = _plan_of_projections(name, each, ranks.size)
        elif hasattr(each, "config") and (plan := _plan_of_transformers_layer(name, each, ranks.size)) is not None:
            plans[name] = plan
    if not plans:
        raise ArgumentError(
            f"{type(module).__name__} contains no MultiHeadAttention, and no attention layer of transformers with "
            "q_proj, k_proj, v_proj and o_proj.",
            "Split the layers of other libraries with torch.distributed.tensor.parallel.parallelize_module.",
        )
    for name, plan in plans.items():
        layer = module.get_submodule(name)
        if not isinstance(layer, MultiHeadAttention):
            _store_rank_heads(layer, mesh, ranks)
        parallelize_module(layer, mesh, plan)
    return module


def _plan_of_projections(name: str, layer: MultiHeadAttention, ranks: int) -> dict[str, Any]:
    """Return the plan of a layer for `parallelize_module`; an ArgumentError if the layer cannot be split."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    check_heads_divide(name or type(layer).__name__, layer.num_heads, layer.num_kv_heads, ranks)
    if ranks > 1:
        check_splittable(layer, ranks)
    columns = _SEPARATE_QKV if layer.num_kv_heads % ranks == 0 else _SEPARATE_QKV[:1]
    plan: dict[str, Any] = {each: ColwiseParallel() for each in columns}
    return plan if layer.out_proj is None else plan | {"out_proj": RowwiseParallel()}


_SEPARATE_QKV = ("q_proj", "k_proj", "v_proj")
_OUTPUT_PROJECTIONS = ("o_proj", "dense")
# Names of projections that compute queries, keys and values together.
_FUSED_QKV = ("query_key_value", "qkv_proj", "c_attn", "Wqkv", "qkv")
_HEAD_NORMS = ("q_norm", "k_norm")
# Model types whose fused q/k/v projection is ordered by head, so that the heads of a rank are consecutive columns. In
# other model types the columns of all queries come first, and a rank would get queries without keys.
_FUSED_QKV_ORDERED_BY_HEAD = {"gpt_neox": "query_key_value"}
_SPLIT_SEQUENCE_ADVICE = "Split the sequence instead, with context_parallel."


def _plan_of_transformers_layer(name: str, module: nn.Module, ranks: int) -> dict[str, Any] | None:
    """Return the plan of a module of transformers for `parallelize_module`; None if it has no attention projections.

    Raises an ArgumentError if the layer cannot be split.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    column_names, row_name = _projections_to_split(name, module)
    if not column_names:
        return None
    head_dim = _head_dim(module)
    norms, others = [], []
    for parameter_name, parameter in module.named_parameters():
        owner = parameter_name.rpartition(".")[0]
        if owner in _HEAD_NORMS and parameter.shape == (head_dim,):
            norms.append(owner)
        elif owner not in (*column_names, row_name) and parameter_name != "sinks":
            others.append(parameter_name)
    if others or not isinstance(head_dim, int):
        raise ArgumentError(
            f"{name} has {others[0] if others else 'no head_dim'}, which parallelize cannot split by heads.",
            _SPLIT_SEQUENCE_ADVICE,
        )
    heads, kv_heads = _count_heads(module)
    check_heads_divide(name, heads, kv_heads, ranks)
    plan: dict[str, Any] = {each: ColwiseParallel() for each in column_names} | {row_name: RowwiseParallel()}
    # A norm of single heads gets (batch, tokens, heads of this rank, head_dim); its gradient is summed over ranks.
    plan |= {each: SequenceParallel(sequence_dim=2, use_local_output=True) for each in norms}
    # With fewer key/value heads than ranks k_proj and v_proj are replicated.
    return {each: style for each, style in plan.items() if kv_heads % ranks == 0 or not each.startswith(("k_", "v_"))}


def _projections_to_split(name: str, module: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return the names of an attention layer's projections that are split by columns, and of the one split by rows.

    There are none, ((), ""), in other modules. A fused q/k/v projection whose columns are not ordered by head raises an
    ArgumentError.
    """

    def is_linear(each: str) -> bool:
        return isinstance(getattr(module, each, None), nn.Linear)

    row_name = next(filter(is_linear, _OUTPUT_PROJECTIONS), "")
    if row_name and all(map(is_linear, _SEPARATE_QKV)):
        return _SEPARATE_QKV, row_name
    fused = next((each for each in _FUSED_QKV if isinstance(getattr(module, each, None), nn.Module)), None)
    if fused is None:
        return (), ""
    if row_name and _FUSED_QKV_ORDERED_BY_HEAD.get(getattr(module.config, "model_type", "")) == fused:
        return (fused,), row_name
    raise ArgumentError(
        f"{name} projects queries, keys and values together, by {fused}, and not head by head: a rank cannot have "
        "the columns of its heads alone.",
        _SPLIT_SEQUENCE_ADVICE,
    )


def _store_rank_heads(module: nn.Module, mesh: Any, ranks: Ranks) -> None:
    """Store in a layer of transformers which heads this rank computes (`rank_heads`), and split its sinks.

    To be called before the projections are split. The attention function reads `rank_heads`.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    heads, kv_heads = _count_heads(module)
    of_rank: Any = RankHeads.of_rank(ranks.rank, ranks.size, heads, kv_heads)
    module.rank_heads, module.shard_group = of_rank, ShardGroup(mesh, 0)  # type: ignore[assignment]
    sinks = module._parameters.get("sinks")  # noqa: SLF001 - most layers have none
    if sinks is not None:
        module.register_parameter("sinks", nn.Parameter(distribute_tensor(sinks.detach(), mesh, [Shard(0)])))


def _head_dim(module: nn.Module) -> Any:
    return getattr(module, "head_dim", getattr(module, "head_size", None))


def _count_heads(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of query heads and key/value heads of a layer that is not yet split."""
    head_dim, projections = _head_dim(module), dict[str, Any](module.named_children())
    if "q_proj" in projections:
        return projections["q_proj"].out_features // head_dim, projections["k_proj"].out_features // head_dim
    heads = projections["query_key_value"].out_features // head_dim // 3
    return heads, heads
