"""Sequence parallelism: split a sequence over ranks, compute its attention, and join it again.

Attention over a split sequence stays outside of compiled graphs (`tracing.outside_of_graphs`). A registered operator
would make `fullgraph=True` possible, but the compiler could fuse nothing in it, and the operator would have to plan the
ring again in every call, because a graph has the intervals of a mask as tensors. The graph breaks once per layer, at a
function that is disabled by name, so that the ring itself is not compiled piece by piece; `explain` reports the graph
break.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from multihead.errors import ArgumentError, ShapeError
from multihead.functional import attend
from multihead.kernels import sequence_split
from multihead.kernels.call import (
    AttentionCall,
    AttentionRequest,
    AttentionResult,
    DropoutOffset,
    DropoutSlice,
    concatenate_queries,
    publish,
)
from multihead.kernels.explanation import readable_bytes
from multihead.kernels.native import kernel as native
from multihead.kernels.plan.bounds import key_bounds
from multihead.kernels.sequence_split import RankWork, use_split
from multihead.masks import Full, Mask
from multihead.masks.base import check_is_mask
from multihead.masks.positions import CallSize
from multihead.parallel.exchange import (
    Ranks,
    compare_calls,
    gather_sequence,
    reshard_heads_to_tokens,
    reshard_tokens_to_heads,
)
from multihead.parallel.layout import Layout, LayoutName, TokenRange, check_layout_name
from multihead.parallel.measuring import MergedStatistics, measure_over_keys
from multihead.parallel.plan import (
    MapBlockMask,
    MapPiece,
    RingPlan,
    Strategy,
    bytes_of_keys,
    compute_traffic,
    copies_for_ulysses,
    count_keys_sent,
    plan_ring,
    visible_rectangle,
    work_per_rank,
)
from multihead.parallel.ring import Ring, attend_to_piece, dropout_of_piece, request_of_piece
from multihead.scores.bias import index_bias, values_of
from multihead.tensors.shapes import AttentionShape
from multihead.tensors.tracing import is_in_backward_pass, outside_of_graphs

CheckFrequency = Literal["every call", "first call"]

_FULL = Full()
_OUTSIDE_OF_GRAPHS_REASON = "ranks exchange tensors in attention over a split sequence, so leave out fullgraph=True"


@dataclass(frozen=True, eq=False)
class Shard:
    """The tokens of one rank of a split sequence.

    Attributes:
        tensors: name -> tensor (batch, tokens of this rank, ...); `labels` are shifted, so that each is the next token.
        position_ids: (1, tokens) int64, position of each token in the whole sequence.
        layout: the layout of the tokens, an argument of `context_parallel` and `unshard`.

    Indexing with a name returns a tensor.

    >>> Shard({"input_ids": torch.tensor([[5, 6]])}, torch.tensor([[0, 1]]), "contiguous")["input_ids"]
    tensor([[5, 6]])
    """

    tensors: dict[str, Tensor]
    position_ids: Tensor
    layout: LayoutName

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ArgumentError(f"The shard has no {name!r}.", f"Read one of {', '.join(self.tensors)}.")
        return self.tensors[name]


def shard(
    mesh: Any,
    *,
    mask: Mask = _FULL,
    layout: Literal["auto"] | LayoutName = "auto",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    **tensors: Tensor,
) -> Shard:
    """Slice tensors of a whole sequence to the tokens of this rank. All ranks pass equal tensors, which is checked.

    Args:
        mesh: the ranks that split a sequence: a process group, or a DeviceMesh of one dimension.
        mask: mask of the whole sequence, used to choose the layout.
        layout: "contiguous", "balanced" (twice as many chunks, from both ends, so that all ranks have the same work
            under a causal mask), or "auto": balanced if that saves a tenth of the work of the busiest rank.
        labels: (batch, tokens), not shifted. They are shifted before the split, because the token after a rank's last
            token is on another rank: label i of the result is token i + 1.
        ignore_index: the label of the last token, which has no next token.
        tensors: (batch, tokens, ...) each, such as `input_ids`.

    Raises:
        ShapeError: the tensors have different lengths, or the length is not a multiple of the number of chunks.
        RankError: a tensor differs between ranks in any bit, or a rank stopped.

    >>> import torch.distributed as dist, tempfile
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> part = shard(dist.group.WORLD, input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]]))
    >>> part["input_ids"], part["labels"], part.position_ids
    (tensor([[5, 6, 7]]), tensor([[   6,    7, -100]]), tensor([[0, 1, 2]]))
    >>> dist.destroy_process_group()
    """
    ranks = Ranks.of_mesh(mesh)
    check_is_mask(mask)
    if labels is not None:
        last = labels.new_full((labels.shape[0], 1), ignore_index)
        tensors = {**tensors, "labels": torch.cat([labels[:, 1:], last], 1)}
    lengths = {name: tensor.shape[1] for name, tensor in tensors.items()}
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "there is no tensor"
        raise ShapeError(f"The tensors of a sequence have one length, and {listed}.", "Give (batch, tokens, ...) each.")
    length = next(iter(lengths.values()))
    kind = _layout_with_less_work(mask, length, ranks.size) if layout == "auto" else check_layout_name(layout)
    chosen = Layout(kind, ranks.size)
    chosen.check_length(length)
    compare_calls(ranks, {"The call": "shard", "The tensors": ", ".join(tensors), "The layout": kind, **tensors})
    device = next(iter(tensors.values())).device
    parts = {name: chosen.select_tokens_of_rank(tensor, ranks.rank, 1) for name, tensor in tensors.items()}
    return Shard(parts, chosen.positions(ranks.rank, length, device)[None], kind)


def _layout_with_less_work(mask: Mask, length: int, ranks: int) -> LayoutName:
    """Choose "balanced" if that saves a tenth of the work of the busiest rank, else "contiguous"."""
    balanced, contiguous = Layout("balanced", ranks), Layout("contiguous", ranks)
    if length % balanced.chunk_count:
        return "contiguous"
    bounds = key_bounds(mask, queries=length, keys=length)
    busiest = {layout.kind: max(work_per_rank(bounds, layout)) for layout in (balanced, contiguous)}
    return "balanced" if busiest["balanced"] < 0.9 * busiest["contiguous"] else "contiguous"


def unshard(mesh: Any, tensor: Tensor, *, layout: LayoutName, dim: int = 1) -> Tensor:
    """Return the whole sequence on every rank, from the tokens of each rank.

    Args:
        mesh: the ranks, as for `shard`.
        tensor: (batch, tokens of this rank, ...), of the same shape on all ranks.
        layout: the layout that `shard` returned.
        dim: the dimension of the tokens.

    Returns:
        (batch, tokens, ...), differentiable: each rank receives the sum of all ranks' gradients for its tokens.

    Raises:
        RankError: the tensors differ in shape or dtype, or a rank stopped.

    >>> import torch.distributed as dist, tempfile
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> unshard(dist.group.WORLD, torch.tensor([[5, 6, 7]]), layout="contiguous")
    tensor([[5, 6, 7]])
    >>> dist.destroy_process_group()
    """
    ranks, dim = Ranks.of_mesh(mesh), dim % tensor.dim()
    whole = Layout(check_layout_name(layout), ranks.size)
    call = {
        "The call": "unshard",
        "The shape": str(tuple(tensor.shape)),
        "The dtype": str(tensor.dtype),
        "The layout": layout,
        "dim": dim,
        "Whether a gradient is needed": tensor.requires_grad and torch.is_grad_enabled(),
    }
    compare_calls(ranks, call)
    return gather_sequence(tensor, ranks, whole, dim)


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    strategy: Literal["auto"] | Strategy = "auto",
    layout: LayoutName = "contiguous",
    mask: Mask = _FULL,
    check: CheckFrequency = "every call",
) -> Iterator[None]:
    """Compute attention over sequences whose tokens are split over ranks.

    In this context every call of this library's layers, of `mh.attention`, and of Hugging Face models that use this
    library's attention takes queries, keys and values of this rank's tokens, and masks and biases of the whole
    sequence. The gradient of a parameter covers only this rank's tokens: sum it over the ranks.

    Args:
        mesh: the ranks that split a sequence: a process group, or a DeviceMesh of one dimension.
        strategy: "ring" sends each rank the keys that its queries see, step by step; memory per rank is
            O(length / ranks) (arXiv:2310.01889). "ulysses" exchanges all heads of a rank's tokens for all tokens of
            its heads; the number of heads must be a multiple of the number of ranks (arXiv:2309.14509). "gather" sends
            all keys to every rank. "auto" chooses "ring" or "ulysses", whichever sends fewer bytes.
        layout: the layout of the tokens that `shard` returned.
        mask: combined with the mask of every call, for models that make their masks themselves.
        check: whether the ranks compare "every call", with its mask, bias and sinks bit for bit, or only the "first
            call". Without the check, a call that differs between ranks returns wrong numbers, waits for the group's
            timeout, or kills the process.

    Raises:
        ArgumentError: there are no ranks, or a name is unknown.
        RankError: in a call, if the ranks make different calls, or a rank stopped.

    >>> import torch.distributed as dist, tempfile
    >>> import multihead as mh
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> q = k = v = torch.randn(1, 2, 4, 8)
    >>> with context_parallel(dist.group.WORLD, strategy="ring"):
    ...     mh.attention(q, k, v, mask=mh.masks.Causal()).shape
    torch.Size([1, 2, 4, 8])
    >>> dist.destroy_process_group()
    """
    if strategy != "auto" and strategy not in get_args(Strategy):
        raise ArgumentError(f"strategy is {strategy!r}.", 'Give "ring", "ulysses", "gather" or "auto".')
    if check not in get_args(CheckFrequency):
        raise ArgumentError(f"check is {check!r}.", 'Give "every call" or "first call".')
    check_is_mask(mask)
    ranks = Ranks.of_mesh(mesh)
    if sequence_split.active_split is not None:
        raise ArgumentError("This is inside another context_parallel.", "Leave the outer one first.")
    with use_split(_SplitOverRanks(ranks, Layout(check_layout_name(layout), ranks.size), strategy, mask, check)):
        yield


@dataclass(eq=False)
class _SplitOverRanks:
    """Implementation of the protocol `sequence_split.SequenceSplit` for torch.distributed.

    `mask` is combined with the mask of every call. `has_compared` is whether the ranks have already compared a call.
    """

    ranks: Ranks
    layout: Layout
    strategy: Literal["auto"] | Strategy
    mask: Mask
    check_frequency: CheckFrequency
    has_compared: bool = field(default=False, init=False)

    def positions_of_rank(self, tokens: int, device: torch.device) -> Tensor:
        return self.layout.positions(self.ranks.rank, tokens * self.ranks.size, device)[None]

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        return self.ranks.rank, self.ranks.size

    def chunks_of_rank(self, length: int) -> tuple[TokenRange, ...]:
        return self.layout.chunks(self.ranks.rank, length)

    def gather_tokens(self, tensor: Tensor, dim: int) -> Tensor:
        return gather_sequence(tensor, self.ranks, self.layout, dim)

    def whole_shape(self, shape: AttentionShape) -> AttentionShape:
        if shape.query_length != shape.key_length:
            raise ArgumentError(
                f"The call has {shape.query_length} queries and {shape.key_length} keys, and context_parallel splits "
                "sequences only in self-attention.",
                "Compute cross-attention and decoding with a cache outside of this context.",
            )
        length = shape.query_length * self.ranks.size
        return shape._replace(query_length=length, key_length=length)

    @outside_of_graphs(_OUTSIDE_OF_GRAPHS_REASON)
    def attend(self, request: AttentionRequest, *, kernel: str | None) -> AttentionResult:
        receivers = () if is_in_backward_pass() else request.surroundings.listeners
        observed = bool(receivers)
        request, ring_plan, (strategy, _) = self._plan_call(request, kernel)
        if observed:
            request = request.as_listeners_receive_it()
        seed = self._compare_with_ranks(request, ring_plan, strategy, observed=observed)
        if request.dropout:
            request, kernel = replace(request, dropout_slice=DropoutSlice(seed, DropoutOffset())), "native"
        if strategy == "ring":
            found = Ring(self.ranks, ring_plan, request, kernel).attend()
        elif strategy == "ulysses":
            found = self._attend_by_heads(request, ring_plan, kernel)
        else:
            found = self._attend_by_gathering(request, ring_plan, kernel)
        if observed:
            publish(AttentionCall(request, found), receivers)
        return found

    def estimate_rank_work(self, request: AttentionRequest, *, kernel: str | None) -> RankWork:
        request, ring_plan, (strategy, reason) = self._plan_call(request, kernel)
        shape, ranks, rank = request.shape, self.ranks.size, self.ranks.rank
        sent = compute_traffic(strategy, shape, ring_plan, ranks)
        length = ring_plan.length
        if strategy == "ulysses":
            copies = copies_for_ulysses(shape, ranks) or 1
            q, k, v = (
                x.new_empty(()).expand(x.shape[0], x.shape[1] * count // ranks, length, x.shape[3])
                for x, count in ((request.q, 1), (request.k, copies), (request.v, copies))
            )
            parts = [self._request_of_heads(request, q, k, v)]
        else:
            k, v = (x.new_empty(()).expand(*x.shape[:2], length, x.shape[3]) for x in (request.k, request.v))
            ring_pieces = [piece for step in ring_plan.steps for piece in step.pieces]
            pieces = ring_pieces if strategy == "ring" else self._pieces_of_chunks(request.mask, ring_plan)
            parts = [request_of_piece(request, piece, length, request.q, k, v) for piece in pieces]
        shown = work_per_rank(ring_plan.bounds, self.layout)
        own = sum(shown) / ranks if strategy == "ulysses" else shown[rank]
        per_cell = shape.batch * shape.num_heads / len(ring_plan.bounds.start)
        calls = f"{len(parts)} call{'' if len(parts) == 1 else 's'}"
        lines = (
            ("ranks", f"{strategy}: rank {rank} of {ranks} computes its part in {calls}; {self.layout.kind} layout"),
            ("sends", f"{readable_bytes(sent.forward_bytes)} forward, {readable_bytes(sent.backward_bytes)} backward"),
            ("because", reason),
            ("compile", "outside of the graphs of torch.compile, so fullgraph=True raises an error"),
        )
        return RankWork(parts, shape.num_cells * ranks, round(own * per_cell), sent.stored_bytes, lines)

    def _plan_call(
        self, request: AttentionRequest, kernel: str | None
    ) -> tuple[AttentionRequest, RingPlan, tuple[Strategy, str]]:
        """Check a call, plan it and choose the strategy, without communication.

        Returns:
            the request combined with the mask of this context, its ring plan, and the strategy with its reason.
        """
        if not isinstance(request.query_start, int) or request.query_start:
            raise ArgumentError(
                f"query_start is {request.query_start!r}, and context_parallel knows the position of each token.",
                "Leave it out.",
            )
        whole = self.whole_shape(request.shape)
        if not self.mask.hides_nothing:
            self.mask.check_fits(CallSize(whole.batch, whole.num_heads, whole.query_length, whole.key_length))
            request = replace(request, mask=request.mask & self.mask)
        self.layout.check_length(whole.query_length)
        ring_plan = plan_ring(request.mask, whole.query_length, self.layout, self.ranks.rank)
        reason = native.refusal(request, ring_plan.bounds) if request.dropout else None
        if reason is not None or (request.dropout and kernel not in (None, "native")):
            raise ArgumentError(
                f"dropout is {request.dropout!r}, and only the native kernel drops the same weights on any number of "
                f"ranks; {reason or f'kernel is {kernel!r}'}.",
                "Give dropout=0.0, or call model.eval().",
            )
        return request, ring_plan, self._choose_strategy(request.shape, ring_plan)

    def _choose_strategy(self, shape: AttentionShape, ring_plan: RingPlan) -> tuple[Strategy, str]:
        """Choose the strategy of a call from sizes that are equal on all ranks; return it and the reason."""
        ranks, copies = self.ranks.size, copies_for_ulysses(shape, self.ranks.size)
        if self.strategy == "ulysses" and copies is None:
            raise ArgumentError(
                f'strategy is "ulysses", and {shape.num_heads} heads with {shape.num_kv_heads} key/value heads cannot '
                f"be divided over {ranks} ranks.",
                'Take a number of ranks that divides the heads, or strategy="ring".',
            )
        if self.strategy != "auto":
            return self.strategy, f'strategy="{self.strategy}" was given'
        if copies is None:
            return "ring", f"{shape.num_heads} heads cannot be divided over {ranks} ranks, as Ulysses needs it"
        by_ring = count_keys_sent(ring_plan.bounds, self.layout) * bytes_of_keys(shape, 1)
        by_heads = compute_traffic("ulysses", shape, ring_plan, ranks).forward_bytes * ranks
        sums = f"in a ring all ranks send {readable_bytes(by_ring)}, with Ulysses {readable_bytes(by_heads)}"
        return "ring" if by_ring <= by_heads else "ulysses", sums

    def _compare_with_ranks(
        self, request: AttentionRequest, ring_plan: RingPlan, strategy: Strategy, *, observed: bool
    ) -> int:
        """Check that all ranks make the same call, before anything else is sent.

        Returns:
            the dropout seed of the call, equal on all ranks.
        """
        # Every rank draws a seed, so that their random number generators stay in step; the seed of rank 0 is used.
        seed = int(torch.randint(1 << 62, (), device="cpu")) if request.dropout else 0
        if self.has_compared and self.check_frequency == "first call":
            return compare_calls(self.ranks, {"The call": "attention"}, seed) if request.dropout else seed
        shape = request.shape
        tensors = {"q": request.q, "k": request.k, "v": request.v, "bias": request.bias, "sinks": request.sinks}
        learned = [name for name, x in tensors.items() if x is not None and values_of(x).requires_grad]
        call = {
            "The call": "attention",
            "The batch": shape.batch,
            "The number of heads": shape.num_heads,
            "The number of key/value heads": shape.num_kv_heads,
            "The number of tokens": shape.query_length,
            "head_dim": shape.head_dim,
            "value_dim": shape.value_dim,
            "The dtype": str(shape.dtype),
            "The strategy": strategy,
            "The layout": self.layout.kind,
            "The mask, as a checksum,": ring_plan.checksum,
            "scale": request.scale,
            "softcap": request.softcap,
            "The bias": request.bias,
            "The tensor of the sinks": request.sinks,
            "dropout": request.dropout,
            "What needs a gradient": ", ".join(learned) if torch.is_grad_enabled() else "",
            "Whether the call is observed": observed,
            "What is measured": sorted(map(repr, request.requested_statistics)),
        }
        seed = compare_calls(self.ranks, call, seed)
        self.has_compared = True
        return seed

    def _attend_by_gathering(
        self, request: AttentionRequest, ring_plan: RingPlan, kernel: str | None
    ) -> AttentionResult:
        """Gather all keys and values on every rank, and compute the attention of this rank's queries."""
        k, v = (self.gather_tokens(x, 2) for x in (request.k, request.v))
        merged = MergedStatistics(request.requested_statistics, request.q[..., 0])
        first_keys = ring_plan.first_keys(request) if request.requested_statistics else 0
        found = []
        for piece in self._pieces_of_chunks(request.mask, ring_plan):
            part = request_of_piece(request, piece, ring_plan.length, request.q, k, v)
            found.append(attend_to_piece(part, piece, kernel, merged, first_keys))
        joined = concatenate_queries(found)
        return replace(joined, statistics=merged.results(joined.logsumexp.detach()))

    def _pieces_of_chunks(self, mask: Mask, ring_plan: RingPlan) -> list[MapPiece]:
        """Return the rectangle of each chunk of this rank's queries with all keys that a query of the chunk sees."""
        bounds, pieces = ring_plan.bounds, []
        for index, rows in enumerate(self.chunks_of_rank(ring_plan.length)):
            seen = visible_rectangle(bounds, rows, (0, ring_plan.length))
            keys = (0, 1) if seen is None else seen[1]  # if no key is visible, use one hidden key
            size = rows[1] - rows[0]  # equal for all chunks
            query_slice = slice(index * size, (index + 1) * size)
            pieces.append(MapPiece(rows, keys, query_slice, slice(*keys), MapBlockMask(mask, bounds, rows, keys)))
        return pieces

    def _attend_by_heads(self, request: AttentionRequest, ring_plan: RingPlan, kernel: str | None) -> AttentionResult:
        """Exchange tokens for heads (Ulysses), and compute the attention of this rank's heads on the whole sequence."""
        copies = copies_for_ulysses(request.shape, self.ranks.size) or 1
        q, k, v = request.q, request.k, request.v
        if copies != 1:  # each of the ranks that use a key/value head gets a copy
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        q, k, v = (reshard_tokens_to_heads(x, self.ranks, self.layout) for x in (q, k, v))
        part = self._request_of_heads(request, q, k, v)
        with use_split(None):
            found = attend(part, kernel=kernel, published=False)
        output = reshard_heads_to_tokens(found.output, self.ranks, self.layout)
        logsumexp = reshard_heads_to_tokens(found.logsumexp[..., None], self.ranks, self.layout)[..., 0]
        if not request.requested_statistics:
            return AttentionResult(output, logsumexp)
        parts = measure_over_keys(part, found, 0, ring_plan.first_keys(request))
        stacked = torch.stack([value.double() for value in parts.values()], -1)  # exact for indices of keys
        exchanged = reshard_heads_to_tokens(stacked, self.ranks, self.layout).unbind(-1)
        named = zip(parts.items(), exchanged, strict=True)
        return AttentionResult(output, logsumexp, {part: value.to(own.dtype) for (part, own), value in named})

    def _request_of_heads(self, request: AttentionRequest, *qkv: Tensor) -> AttentionRequest:
        """Return a request for this rank's heads, given q, k and v of these heads for the whole sequence."""
        total = request.shape.num_heads
        count = total // self.ranks.size
        own = slice(self.ranks.rank * count, (self.ranks.rank + 1) * count)
        return request.with_tensors(
            *qkv,
            mask=request.mask.select_heads(lambda x: x[:, own] if x.shape[1] > 1 else x),
            bias=index_bias(request.bias, {1: own}),
            sinks=None if request.sinks is None else request.sinks[own],
            dropout_slice=dropout_of_piece(request, head_start=own.start, total_heads=total),
        )
