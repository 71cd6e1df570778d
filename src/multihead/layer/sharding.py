"""Tensor parallelism: the heads of a layer that this process computes, and slices of per-head tensors for them.

With `parallelize_module` and PyTorch's `ColwiseParallel` for q_proj, k_proj and v_proj and `RowwiseParallel` for
out_proj, a process computes the heads whose columns its q_proj returns; the DTensor weight determines which. Per-head
parameters (sinks, gates, learned keys, norms, position biases) stay whole on every process. Each process slices them to
its heads, and the backward pass sums the gradients of the slices over the processes, so that every process holds the
whole gradient. k_proj and v_proj may stay whole, as is needed with fewer key/value heads than processes. Per-head
arguments of a call (bias, gates, mask) are passed for all heads. Options that need all heads at once (`merge="mean"`,
`QKNorm(over="all")`) are rejected. `parallel.parallelize` applies these plans to all layers of a model, and checks them
first. `observe` records the heads of its own process, numbered from 0, and their numbers in the layer
(`LayerRecord.split`), so that `Record.reduce` joins them. A projection to q, k and v together is split only where its
columns are those of one head after the other (GPT-NeoX): for other column orders the columns would have to be
reordered, and a checkpoint saved with one number of ranks would be wrong with another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, ModelError, ShapeError
from multihead.layer.heads import head_counts
from multihead.layer.qk_norm import QKNorms
from multihead.masks import Mask
from multihead.scores import RelativeBias
from multihead.scores.bias import Bias, values_of, with_values

ADVICE_ON_SPLITTING = (
    "parallelize_module with ColwiseParallel() for q_proj, k_proj and v_proj and RowwiseParallel() for out_proj"
)


class ShardableLayer(Protocol):
    """Protocol of a layer: the attributes of `MultiHeadAttention` whose sizes depend on the heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    merge: Any
    qk_norm: QKNorms | None
    position_bias: nn.Module | None
    sinks: nn.Parameter | None
    head_gates: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    @property
    def out_proj(self) -> nn.Module | None:
        """The output projection."""
        ...

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule by name (a method of nn.Module)."""
        ...


class LayerOfLocalHeads(NamedTuple):
    """Attributes of a layer, sliced to the heads that this process computes.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        qk_norm: normalises queries and keys, or None.
        position_bias: computes the bias of the scores, or None.
        sinks: (heads,), or None.
        head_gates: (heads,), or None.
        bias_k: (kv_heads, head_dim), or None.
        bias_v: (kv_heads, value_head_dim), or None.
    """

    num_heads: int
    num_kv_heads: int
    qk_norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    position_bias: Callable[..., Bias] | None
    sinks: Tensor | None
    head_gates: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None


class CallOfHeads(NamedTuple):
    """What depends on the heads in a call: for all heads, or for those that this process computes.

    Attributes:
        layer: the layer, or its attributes sliced to these heads.
        k: (batch, keys, kv_heads * head_dim), or as a cache holds it.
        v: (batch, keys, kv_heads * value_head_dim), or as a cache holds it.
        mask: which keys each query may see.
        bias: added to the scores, or None.
        head_gates: (heads,), or broadcasting to (batch, heads, queries), or None.
    """

    layer: ShardableLayer | LayerOfLocalHeads
    k: Tensor
    v: Tensor
    mask: Mask
    bias: Bias | None
    head_gates: Tensor | None

    def slice_to_local_heads(self, layer: ShardableLayer, q: Tensor, *, keys_are_new: bool) -> CallOfHeads:
        """Slice a call of all heads of a layer to those of this process, whose q is (batch, queries, width).

        Keys and values that are not new are from a cache, which has only the keys of this process.
        """
        k, v = self.k, self.v
        local = local_heads(layer, q, k, v) if keys_are_new else local_heads(layer, q)
        if local is None:
            return self
        if keys_are_new:
            k = local.slice_keys(k, layer.num_kv_heads, layer.head_dim)
            v = local.slice_keys(v, layer.num_kv_heads, layer.value_head_dim)
        return CallOfHeads(
            local.slice_parameters(layer),
            k,
            v,
            local.slice_mask(self.mask),
            None if self.bias is None else local.slice_bias(self.bias, "bias"),
            None if self.head_gates is None else local.slice_gates(self.head_gates),
        )


class ShardGroup(NamedTuple):
    """The group of processes over which a projection is split.

    Attributes:
        mesh: a torch.distributed DeviceMesh.
        mesh_dim: the dimension of the mesh over which the heads are split.
    """

    mesh: Any
    mesh_dim: int

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return int(self.mesh.size(self.mesh_dim))

    @property
    def rank(self) -> int:
        """The index of this process in the group."""
        return int(self.mesh.get_local_rank(self.mesh_dim))

    def sum_gradient(self, tensor: Tensor) -> Tensor:
        """Return the tensor, equal on all processes, such that its gradient is summed over the processes.

        Each process uses the tensor for its own heads only, so the gradient on one process is incomplete (function f of
        arXiv:1909.08053, section 3).
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate

        everywhere = [Replicate()] * self.mesh.ndim
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != self.mesh:
                raise ArgumentError(
                    f"A parameter of the layer is distributed over {tensor.device_mesh}, and q_proj over {self.mesh}.",
                    "Distribute both over the same mesh, or leave all but the projections whole.",
                )
            whole = tensor.redistribute(placements=everywhere)
        elif not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        else:
            whole = DTensor.from_local(tensor, self.mesh, everywhere, run_check=False)
        partial = [Partial() if dim == self.mesh_dim else Replicate() for dim in range(self.mesh.ndim)]
        return whole.to_local(grad_placements=partial)


@dataclass(frozen=True)
class LocalHeads:
    """The heads of a layer that this process computes; its methods slice tensors to these heads.

    Attributes:
        num_heads: number of query heads of the whole layer.
        query_heads: the query heads that this process computes.
        kv_heads: the key/value heads that this process computes.
        group: the processes over which the heads are split; None if the projections have fewer heads for an unknown
            reason, so that it is unknown which heads they compute.
    """

    num_heads: int
    query_heads: range
    kv_heads: range
    group: ShardGroup | None

    def slice_keys(self, x: Tensor, num_kv_heads: int, dim: int) -> Tensor:
        """Slice projected keys or values to the heads of this process: (batch, keys, kv_heads * dim)."""
        if self.group is None or x.shape[2] < num_kv_heads * dim:
            return x
        # The projection is not split: each process slices the key/value heads of its query heads.
        return self.group.sum_gradient(x)[..., self.kv_heads.start * dim : self.kv_heads.stop * dim]

    def slice_parameters(self, layer: ShardableLayer) -> LayerOfLocalHeads:
        """Slice the per-head parameters of the layer to the heads of this process."""
        return LayerOfLocalHeads(
            len(self.query_heads),
            len(self.kv_heads),
            None if layer.qk_norm is None else partial(self.normalise, layer.qk_norm),
            None if layer.position_bias is None else partial(self._local_position_bias, layer.position_bias),
            None if layer.sinks is None else self.slice_query_heads(layer.sinks, name="sinks"),
            None if layer.head_gates is None else self.slice_gates(layer.head_gates),
            None if layer.bias_k is None else self._slice_kv_heads(layer.bias_k),
            None if layer.bias_v is None else self._slice_kv_heads(layer.bias_v),
        )

    def slice_query_heads(self, per_head: Tensor, *, axis: int = 0, name: str) -> Tensor:
        """Slice a tensor of all query heads to the heads of this process; its gradient is summed over the processes.

        `axis` is the head axis, of size num_heads, or 1 for a value that all heads share. `name` is the tensor's name
        in the error message.
        """
        if self.group is None:
            return per_head
        heads = per_head.shape[axis]
        if heads not in (1, self.num_heads):
            raise ShapeError(
                f"{name} is for {heads} heads, and the layer has {self.num_heads}, of which this process computes "
                f"{_list_heads(self.query_heads)}.",
                f"Give it for all {self.num_heads} heads: each process slices its own heads.",
            )
        per_head = self.group.sum_gradient(per_head)
        return per_head.narrow(axis, self.query_heads.start, len(self.query_heads)) if heads > 1 else per_head

    def _slice_kv_heads(self, per_head: Tensor) -> Tensor:
        """Slice a tensor of all key/value heads, (kv_heads, dim), to the key/value heads of this process."""
        return (
            per_head
            if self.group is None
            else self.group.sum_gradient(per_head)[self.kv_heads.start : self.kv_heads.stop]
        )

    def slice_bias(self, bias: Bias, name: str) -> Bias:
        """Slice a bias, if it has a head axis, to the heads of this process; `name` is its name in error messages."""
        return (
            with_values(bias, self.slice_query_heads(values_of(bias), axis=1, name=name))
            if _has_head_axis(bias)
            else bias
        )

    def slice_gates(self, gates: Tensor) -> Tensor:
        """Slice gates, (heads,) or broadcasting to (batch, heads, queries), to the heads of this process."""
        return self.slice_query_heads(gates, axis=0 if gates.dim() == 1 else 1, name="head_gates")

    def slice_mask(self, mask: Mask) -> Mask:
        """Slice a mask that differs between heads to the heads of this process."""
        return mask.select_heads(partial(self.slice_query_heads, axis=1, name="mask"))

    def _local_position_bias(self, position_bias: nn.Module, queries: int, keys: int, **options: Any) -> Bias:
        """Compute the position bias of all heads, and slice it to the heads of this process."""
        return self.slice_bias(position_bias(queries, keys, **options), "position_bias")

    def normalise(self, norms: QKNorms, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise q and k (batch, heads of this process, length, head_dim) with the weights of these heads."""
        local = copy.copy(norms)
        local.num_heads, local.num_kv_heads = q.shape[1], k.shape[1]
        if self.group is not None:
            shared = {name: self.group.sum_gradient(weight) for name, weight in norms.named_parameters(recurse=False)}
            if "scale" in shared:
                shared["scale"] = shared["scale"][self.query_heads.start : self.query_heads.stop]
            local._parameters = {**norms._parameters, **shared}  # type: ignore[dict-item]  # noqa: SLF001
        normed: tuple[Tensor, Tensor] = local(q, k)
        return normed


class RankHeads(NamedTuple):
    """The heads of a layer that one process computes.

    Attributes:
        query_heads: the query heads, [first, stop).
        num_heads: number of query heads of the layer.
        kv_heads: the key/value heads, [first, stop).
        num_kv_heads: number of key/value heads of the layer.
    """

    query_heads: tuple[int, int]
    num_heads: int
    kv_heads: tuple[int, int]
    num_kv_heads: int

    @staticmethod
    def of_rank(rank: int, ranks: int, heads: int, kv_heads: int) -> RankHeads:
        """Return the query heads of a rank, and the key/value heads that these query heads use."""
        own, per_group = heads // ranks, heads // kv_heads
        first, stop = rank * own, (rank + 1) * own
        return RankHeads((first, stop), heads, (first // per_group, -(-stop // per_group)), kv_heads)


def rank_heads(layer: nn.Module, head_dim: int) -> RankHeads | None:
    """Return the heads of this process; None if the projections of the layer are not split over processes.

    For a layer of transformers, `parallelize` stores them as `layer.rank_heads`; for other layers they are computed
    from the sizes of q_proj and k_proj.
    """
    known: RankHeads | None = layer.__dict__.get("rank_heads")
    if known is not None:
        return known
    q_proj, k_proj = (getattr(layer, name, None) for name in ("q_proj", "k_proj"))
    if not isinstance(q_proj, nn.Module) or not isinstance(k_proj, nn.Module):
        return None
    group = _shard_group_of("q_proj", q_proj)
    if group is None:
        return None
    heads, kv_heads = (int(each.weight.shape[0]) // head_dim for each in (q_proj, k_proj))  # type: ignore[index]
    return RankHeads.of_rank(group.rank, group.size, heads, kv_heads)


def slice_to_rank(
    layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Slice k, v and sinks to the heads of this rank, for a layer of transformers that `parallelize` has split.

    q is (batch, heads of this rank, queries, head_dim). k and v are (batch, kv_heads, keys, dim): the key/value heads
    of this rank, or all of them if there are fewer key/value heads than ranks. The sinks are a DTensor (heads of this
    rank,), or None.

    Raises:
        ModelError: the layer does not compute the heads of this rank. A layer that splits its features by a fixed
            number of heads would otherwise mix tokens without an error.
    """
    held: RankHeads = layer.__dict__["rank_heads"]
    group: ShardGroup = layer.__dict__["shard_group"]
    (first, stop), (first_key, stop_key) = held.query_heads, held.kv_heads
    if q.shape[1] != stop - first or k.shape[1] not in (stop_key - first_key, held.num_kv_heads):
        raise ModelError(
            f"{type(layer).__name__} returns {q.shape[1]} heads and {k.shape[1]} key/value heads, and this rank has "
            f"{stop - first} of {held.num_heads}: the layer does not take their number from its projections.",
            "Split the sequence instead, with context_parallel.",
        )
    if k.shape[1] > stop_key - first_key:  # k_proj is not split: the gradient of k is summed over the ranks
        k, v = (group.sum_gradient(each)[:, first_key:stop_key] for each in (k, v))
    return k, v, None if sinks is None else sinks.to_local()  # type: ignore[attr-defined]


def check_heads_divide(name: str, heads: int, kv_heads: int, ranks: int) -> None:
    """Check that `ranks` divides the number of heads of a layer, and divides kv_heads or is a multiple of kv_heads."""
    fitting = [n for n in head_counts(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if ranks not in fitting:
        raise ArgumentError(
            f"{name} has {heads} heads and {kv_heads} key/value heads, which cannot be divided over {ranks} ranks.",
            f"Use one of these numbers of ranks: {', '.join(str(n) for n in fitting)}.",
        )


def local_heads(
    layer: ShardableLayer, q: Tensor, k: Tensor | None = None, v: Tensor | None = None
) -> LocalHeads | None:
    """Return the heads that the projections compute in this process; None if they compute all heads.

    q, k and v are the outputs of the projections, (batch, length, width); k and v are None if they come from a cache.

    Raises:
        ArgumentError, ShapeError: a width is not a multiple of the head dim, the heads of q, k and v do not match, or
            an option of the layer does not support splitting.
    """
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    for name, x in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
        if x is not None and hasattr(x, "device_mesh"):
            raise ArgumentError(
                f"{name} returns a DTensor, and attention computes the heads of one process.",
                "Leave use_local_output=True in its parallel style.",
            )
    queries, group = _heads_of_projection(layer, "q_proj", q, heads, layer.head_dim)
    of_keys = [] if k is None else [_heads_of_projection(layer, "k_proj", k, kv_heads, layer.head_dim)]
    of_keys += [] if v is None else [_heads_of_projection(layer, "v_proj", v, kv_heads, layer.value_head_dim)]
    if queries == range(heads) and all(held == range(kv_heads) for held, _ in of_keys):
        return None
    per_group = heads // kv_heads
    keys = range(queries.start // per_group, -(-queries.stop // per_group))
    if group is None:
        _reject_per_head_parameters(layer)
    for name, (held, theirs) in zip(("k_proj", "v_proj"), of_keys, strict=False):
        whole = group is not None and held == range(kv_heads)
        if not whole and (held != keys or theirs != group):
            _reject_mismatched_heads(name, queries, held)
    if len(queries) != len(keys) * per_group and len(keys) > 1:
        counts = ", ".join(str(count) for count in head_counts(kv_heads))
        raise ArgumentError(
            f"q_proj returns {_list_heads(queries)} here, which share key/value heads {keys.start} to {keys.stop - 1} "
            f"unevenly: {per_group} query heads belong to each.",
            f"Split q_proj over a number of processes that divides num_kv_heads: {counts}.",
        )
    if group is not None:
        check_splittable(layer, group.size)
        _check_output_projection(layer, group)
    return LocalHeads(heads, queries, keys, group)


def _heads_of_projection(
    layer: ShardableLayer, name: str, x: Tensor, heads: int, dim: int
) -> tuple[range, ShardGroup | None]:
    """Return which heads the projection `name` computed in this process, and its group (None if not split)."""
    width = x.shape[2]
    if width == heads * dim:
        return range(heads), None
    group = _shard_group_of(name, layer.get_submodule(name))
    counts = ", ".join(str(count) for count in head_counts(heads))
    if group is not None:
        if heads % group.size or width * group.size != heads * dim:
            raise ArgumentError(
                f"{name} is split over {group.size} processes and returns {width} columns here, and it has {heads} "
                f"{'heads' if heads > 1 else 'head'} of {dim} columns.",
                f"Split it over a number of processes that divides its heads: {counts}"
                + (", or leave k_proj and v_proj whole." if name != "q_proj" else "."),
            )
        own = heads // group.size
        return range(group.rank * own, (group.rank + 1) * own), group
    if width % dim or not 0 < width < heads * dim:
        raise ShapeError(
            f"{name} returns {width} columns, and the layer has {heads} heads of {dim}.",
            f"Give a multiple of {dim}, at most {heads * dim}; for another head_dim, construct another layer.",
        )
    return range(width // dim), None


def _shard_group_of(name: str, projection: nn.Module) -> ShardGroup | None:
    """Return the processes over which the rows of a projection's weight are split; None if it is not split."""
    weight = getattr(projection, "weight", None)
    mesh, placements = getattr(weight, "device_mesh", None), getattr(weight, "placements", ())
    dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if mesh is None or not dims:
        return None
    if len(dims) > 1 or not placements[dims[0]].is_shard(0):
        raise ArgumentError(
            f"{name}.weight is placed as {tuple(placements)}, from which this process's heads cannot be determined.",
            f"Split the layer with {ADVICE_ON_SPLITTING}.",
        )
    return ShardGroup(mesh, dims[0])


def _reject_mismatched_heads(name: str, queries: range, keys: range) -> NoReturn:
    raise ArgumentError(
        f"q_proj returns {_list_heads(queries)} here and {name} {_list_heads(keys)}, which do not match.",
        f"Split the layer with {ADVICE_ON_SPLITTING}; k_proj and v_proj may both stay whole.",
    )


def _list_heads(heads: range) -> str:
    return f"heads {heads.start} to {heads.stop - 1}" if len(heads) > 1 else f"head {heads.start}"


def _reject_per_head_parameters(layer: ShardableLayer) -> None:
    """Reject a layer with per-head parameters if it is unknown which heads its projections compute."""
    norms = layer.qk_norm
    ways = {
        "sinks": layer.sinks is not None,
        "head_gates": layer.head_gates is not None,
        "add_bias_kv": layer.bias_k is not None,
        "position_bias": layer.position_bias is not None,
        "qk_norm": norms is not None and (norms.scale is not None or norms.qk_norm.over == "all"),
        'merge="mean"': layer.merge == "mean",
    }
    for name, used in ways.items():
        if used:
            raise ArgumentError(
                f"The projections return fewer heads than the layer's {layer.num_heads}, and {name} needs to know "
                "which heads they are.",
                f"Split the layer over processes with {ADVICE_ON_SPLITTING}, or construct a layer with fewer heads.",
            )


def check_splittable(layer: ShardableLayer, processes: int) -> None:
    """Reject a layer with an option that needs all heads at once, which cannot be split over processes."""
    found = None
    if layer.merge == "mean":
        found = 'merge="mean" averages all heads'
    elif layer.qk_norm is not None and layer.qk_norm.qk_norm.over == "all":
        found = 'QKNorm(over="all") normalises all heads together'
    if found is not None:
        raise ArgumentError(
            f"{found}, and the heads are split over {processes} processes.", "Leave the projections whole."
        )


def _check_output_projection(layer: ShardableLayer, group: ShardGroup) -> None:
    """Reject a layer whose out_proj is not split over the same processes."""
    weight = getattr(layer.out_proj, "weight", None)
    merged = layer.num_heads * layer.value_head_dim
    if isinstance(weight, Tensor) and not hasattr(weight, "device_mesh") and weight.shape[-1] == merged:
        raise ArgumentError(
            f"out_proj takes the columns of all {layer.num_heads} heads, and q_proj is split over {group.size} "
            "processes.",
            "Split it too: RowwiseParallel() for out_proj.",
        )


def _has_head_axis(bias: object) -> bool:
    """Whether a bias has a head axis; False for an invalid bias, which `request_of` rejects later."""
    return isinstance(bias, RelativeBias) or (isinstance(bias, Tensor) and bias.dim() == 4)
