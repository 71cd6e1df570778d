"""`output_attentions=True` on the fused path: attention weights that are computed when they are read.

The fused kernels store no attention weights. So the model returns a tensor subclass that stores q, k and the mask of
its layer, and computes the weights when its values are read. Programs that expect the tensor of eager attention run
unchanged.

The subclass implements `__torch_function__`, which runs before autograd, so the weights are differentiable with respect
to q and k. If the weights take less memory than the keys, as in a decoding step, they are computed at once. The keys
are copied, because static caches with a window overwrite them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from multihead.errors import ArgumentError
from multihead.kernels.call import NOTHING_AROUND, AttentionRequest
from multihead.kernels.dense_tile import scores, visible_cells, without_autocast
from multihead.kernels.reference import softmax
from multihead.models.rejection import selects_our_attention
from multihead.probes.tile import tile
from multihead.tensors.tracing import is_in_backward_pass, is_traced

MAX_WEIGHTS = 1 << 28
"""Maximum number of weights that are computed at once: 1 GiB in float32."""
# Tensor attributes and methods that do not need the values of the weights.
_METADATA_ATTRIBUTES = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_meta", "is_mps", "is_sparse", "is_quantized")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__hash__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
    ]
)


class _OutputCollector:
    """Stores the variable in which transformers collects outputs, so that transformers is not imported in each call.

    Attributes:
        collector: transformers' context variable with the outputs that a forward pass collects; None before
            transformers is imported.
    """

    collector: ClassVar[Any] = None


def allow_output_attentions() -> None:
    """Make transformers accept `output_attentions=True` with this library's attention; called once per process."""
    from transformers import PreTrainedConfig
    from transformers.utils.output_capturing import _active_collector

    kind: Any = PreTrainedConfig
    option, check = kind.output_attentions, kind.validate_output_attentions

    def set_output_attentions(config: Any, value: Any) -> None:
        if selects_our_attention(config):
            config._output_attentions = value  # noqa: SLF001 - what transformers' own setter does for "eager"
        else:
            option.fset(config, value)

    @wraps(check)
    def validate_unless_ours(config: Any) -> None:
        if not selects_our_attention(config):
            check(config)

    kind.output_attentions = property(option.fget, set_output_attentions, doc=option.__doc__)
    kind.validate_output_attentions = validate_unless_ours
    kinds = [kind]
    for each in kinds:  # the body appends subclasses to this list
        kinds += each.__subclasses__()
        # each subclass of a configuration has a separate list of validators
        listed = vars(each).get("__class_validators__", [])
        listed[:] = [validate_unless_ours if validator is check else validator for validator in listed]
    _OutputCollector.collector = _active_collector


def are_weights_wanted(options: dict[str, Any]) -> bool:
    """Whether the attention call that is running should return weights.

    Most models collect weights by hooks, if the caller requested them. The output of a layer outside of such a model
    may be read directly, so its weights are always returned.

    Args:
        options: the arguments that transformers passes to its attention function.
    """
    if options.get("output_attentions"):
        return True
    collector = _OutputCollector.collector
    if collector is None or (torch.compiler.is_compiling() and not collector.compiling):
        return False  # a compiled graph cannot read a variable that is set outside
    collected = collector.get()
    if collected is None:
        # A recomputation by activation checkpointing does not need the weights.
        return not is_traced() and not is_in_backward_pass()
    return any("attentions" in name for name in collected)


def weights_of(request: AttentionRequest, logsumexp: Tensor) -> Tensor:
    """Return the weights of a call: (batch, heads, queries, keys), in the dtype of q, before dropout.

    The result is a `LazyWeights`, except in a compiled graph, or if the weights need no gradient and no more memory
    than the keys.

    Args:
        request: the call.
        logsumexp: (batch, heads, queries), nats.
    """
    if is_traced() or (request.shape.num_cells <= request.k.numel() and not _is_differentiable(request)):
        return _compute_weights(request, logsumexp)
    # The keys are copied because a static cache overwrites them later; the listeners must not live as long as weights.
    stored = replace(request, k=request.k.clone(), surroundings=NOTHING_AROUND)
    return LazyWeights(stored, logsumexp.detach())


class LazyWeights(Tensor):
    """Attention weights, (batch, heads, queries, keys), that are computed when they are first read, and then stored.

    Tensors with more than `MAX_WEIGHTS` weights can only be read in tiles: `weights[0, 3, :256, :256]`.
    """

    _request: AttentionRequest | None  # None once the weights are computed
    _logsumexp: Tensor
    _differentiable: bool
    _computed_weights: Tensor

    def __new__(cls, request: AttentionRequest, logsumexp: Tensor) -> LazyWeights:
        """Create a tensor with the size of a call's weights, without storage."""
        shape = request.shape
        size = (shape.batch, shape.num_heads, shape.query_length, shape.key_length)
        made: LazyWeights = torch.Tensor._make_wrapper_subclass(cls, size, dtype=shape.dtype, device=shape.device)  # noqa: SLF001 - torch's documented way
        made._request, made._logsumexp, made._differentiable = request, logsumexp, _is_differentiable(request)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyWeights({tuple(self.shape)}, {'computed' if self._request is None else 'computed when read'})"

    def read_all(self) -> Tensor:
        """Return the weights as a plain tensor.

        Raises:
            ArgumentError: there are more than `MAX_WEIGHTS` weights.
        """
        if self._request is not None:
            self._check_size(self.numel())
            with torch.set_grad_enabled(self._differentiable):
                self._computed_weights, self._request = _compute_weights(self._request, self._logsumexp), None
        return self._computed_weights

    def read_index(self, index: Any) -> Tensor:
        """Compute only the weights at an index, for tensors with more than `MAX_WEIGHTS` weights."""
        entries = _expand_index(index, self.ndim)
        if entries is None or self._request is None:
            return self.read_all()[index]
        places = [_slice_of_index_entry(entry, size) for entry, size in zip(entries, self.shape, strict=True)]
        sizes = [len(range(size)[place]) for size, place in zip(self.shape, places, strict=True)]
        self._check_size(self.shape[0] * prod(sizes[1:]))  # a tile is computed for all samples
        samples, heads, queries, keys = places
        cells = tile(self._request, self._logsumexp, heads=heads, queries=queries, keys=keys)
        without_axes = tuple(slice(None) if isinstance(entry, slice) else 0 for entry in entries)
        return cells[samples][without_axes].to(self.dtype)

    def _check_size(self, count: int) -> None:
        if count > MAX_WEIGHTS:
            raise ArgumentError(
                f"The attention weights {tuple(self.shape)} are read, and {count:,} of them would be computed at once.",
                f"Read at most {MAX_WEIGHTS:,}, such as the tile weights[0, 0, :256, :256]; or record the model with "
                "mh.observe(model): it measures statistics of every head, and record.layers[0] has tiles, "
                ".weights(head, queries=..., keys=...), and means of blocks, .map(head).",
            )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the weights and run a function on them; shape and dtype are returned without computing them."""
        if function in _METADATA_ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
                return function(*args, **(kwargs or {}))
        if function is Tensor.__getitem__ and isinstance(args[0], LazyWeights) and args[0].numel() > MAX_WEIGHTS:
            return args[0].read_index(args[1])
        args, kwargs = pytree.tree_map_only(LazyWeights, LazyWeights.read_all, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the weights, and run on them an operation that was called from PyTorch's C++ code."""
        args, kwargs = pytree.tree_map_only(LazyWeights, lambda each: each.read_all().detach(), (args, kwargs or {}))
        return function(*args, **kwargs)


def _compute_weights(request: AttentionRequest, logsumexp: Tensor) -> Tensor:
    """Compute all weights of a call, differentiable where the call is."""
    if not _is_differentiable(request) and not is_traced():
        return tile(request, logsumexp).to(request.shape.dtype)
    with without_autocast(request.shape.device):
        cells = scores(request, hidden=~visible_cells(request))
        return softmax(cells, request.sinks)[0].to(request.shape.dtype)


def _is_differentiable(request: AttentionRequest) -> bool:
    """Whether the weights of a call need a gradient."""
    tensors = (request.q, request.k, request.bias_values, request.sinks)
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _expand_index(index: Any, axes: int) -> list[Any] | None:
    """Expand an index of ints, slices of step 1 and an ellipsis to one entry per axis; None for any other index."""
    given = list(index) if isinstance(index, tuple) else [index]
    plain = [each for each in given if type(each) is int or (isinstance(each, slice) and each.step in (None, 1))]
    if len(plain) > axes or len(given) - len(plain) > 1 or (len(given) > len(plain) and Ellipsis not in given):
        return None
    place = given.index(Ellipsis) if len(given) > len(plain) else len(given)
    return [*plain[:place], *[slice(None)] * (axes - len(plain)), *plain[place:]]


def _slice_of_index_entry(entry: Any, size: int) -> slice:
    """Return the slice that an int or a slice selects from an axis of length `size`."""
    place = range(size)[entry]  # raises an IndexError for an int outside of the axis
    return entry if isinstance(entry, slice) else slice(place, place + 1)
