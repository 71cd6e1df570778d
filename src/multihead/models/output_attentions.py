"""`output_attentions=True` on the fused path: attention weights that are computed when they are read.

The fused kernels hold no weights. So the model returns a tensor that knows q, k and the mask of its layer, and computes
the weights when a program reads them. Programs that expect a tensor with the weights of eager attention run unchanged.

`output_attentions` returns a tensor subclass that stores q, k and the mask. It implements `__torch_function__`, above
autograd, so that reading computes differentiable weights from q and k. Where the weights are smaller than the keys, in
a step of decoding, they are computed at once. The keys are copied, because static caches with a window overwrite them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from multihead.errors import ArgumentError
from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import scores, seen, without_autocast
from multihead.kernels.reference import softmax
from multihead.models.rejection import CHOICE
from multihead.probes.tile import tile
from multihead.scores.bias import values_of
from multihead.tensors.tracing import is_in_backward_pass, is_traced

LARGEST = 1 << 28
"""How many weights are computed at once: 1 GiB in float32."""
# Attributes and methods that need the size and the dtype of the weights only.
_OF_THE_SIZE = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_meta", "is_mps", "is_sparse", "is_quantized")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__hash__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
    ]
)


class _OutputCollector:
    """Holds the variable in which transformers collects outputs, so that a call need not import it.

    Attributes:
        collector: transformers' context variable of the outputs that a forward pass collects; None at first.
    """

    collector: ClassVar[Any] = None


def allow_output_attentions(implementation: str) -> None:
    """Make transformers accept `output_attentions` in configurations with an implementation; once per process."""
    from transformers import PreTrainedConfig
    from transformers.utils.output_capturing import _active_collector

    kind: Any = PreTrainedConfig
    option, check = kind.output_attentions, kind.validate_output_attentions

    def set_output_attentions(config: Any, value: Any) -> None:
        if getattr(config, CHOICE, None) == implementation:
            config._output_attentions = value  # noqa: SLF001 - what transformers' own setter does for "eager"
        else:
            option.fset(config, value)

    @wraps(check)
    def validate_unless_ours(config: Any) -> None:
        if getattr(config, CHOICE, None) != implementation:
            check(config)

    kind.output_attentions = property(option.fget, set_output_attentions, doc=option.__doc__)
    kind.validate_output_attentions = validate_unless_ours
    waiting = [kind]
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        listed = vars(each).get("__class_validators__", [])  # each class has a list of its own
        listed[:] = [validate_unless_ours if validator is check else validator for validator in listed]
    _OutputCollector.collector = _active_collector


def are_weights_wanted(options: dict[str, Any]) -> bool:
    """Whether the layer whose attention call is running should return its weights.

    Most models collect them by hooks, if they were requested. Others, and programs that call a layer by itself, read
    them from the output of the layer: then they are always returned.

    Args:
        options: the arguments that transformers passes to its attention function.
    """
    if options.get("output_attentions"):
        return True
    collector = _OutputCollector.collector
    if collector is None or (torch.compiler.is_compiling() and not collector.compiling):
        return False  # a compiled graph can read the variable only if it has set it
    collected = collector.get()
    if collected is None:
        # Checkpointing computes the output again, and nothing else.
        return not is_traced() and not is_in_backward_pass()
    return any("attentions" in name for name in collected)


def weights_of(request: AttentionRequest, logsumexp: Tensor) -> Tensor:
    """Return the weights of a call: (batch, heads, queries, keys), in the dtype of q, before dropout.

    They are computed at once in a graph, and where they take less memory than the keys (a step of decoding).

    Args:
        request: the call.
        logsumexp: (batch, heads, queries), nats.
    """
    if is_traced() or (request.shape.cells <= request.k.numel() and not _is_differentiable(request)):
        return _compute_weights(request, logsumexp)
    # A static cache writes to its keys later.
    return LazyWeights(replace(request, k=request.k.clone()), logsumexp.detach())


class LazyWeights(Tensor):
    """Attention weights, (batch, heads, queries, keys), that are computed when they are read, and then kept.

    Of a map with more than `LARGEST` weights, only parts can be read: `weights[0, 3, :256, :256]` computes that tile.
    """

    _request: AttentionRequest | None  # None once the weights are computed
    _logsumexp: Tensor
    _differentiable: bool
    _found: Tensor

    @staticmethod
    def __new__(cls: type[LazyWeights], request: AttentionRequest, logsumexp: Tensor) -> LazyWeights:
        """Create a tensor of the size of the weights that stores no weights."""
        shape = request.shape
        size = (shape.batch, shape.num_heads, shape.query_length, shape.key_length)
        made: LazyWeights = torch.Tensor._make_wrapper_subclass(cls, size, dtype=shape.dtype, device=shape.device)  # noqa: SLF001 - torch's documented way
        made._request, made._logsumexp, made._differentiable = request, logsumexp, _is_differentiable(request)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyWeights({tuple(self.shape)}, {'computed' if self._request is None else 'computed when read'})"

    def read(self) -> Tensor:
        """Return the weights as a plain tensor.

        Raises:
            ArgumentError: there are more than `LARGEST`.
        """
        if self._request is not None:
            self._check_size(self.numel())
            with torch.set_grad_enabled(self._differentiable):
                self._found, self._request = _compute_weights(self._request, self._logsumexp), None
        return self._found

    def part(self, index: Any) -> Tensor:
        """Return the weights at an index, of a map that is too large to be computed as a whole."""
        entries = _entry_per_axis(index, self.ndim)
        if entries is None or self._request is None:
            return self.read()[index]
        samples, heads, queries, keys = map(_range_of_entry, entries, self.shape)
        self._check_size(self.shape[0] * len(heads) * len(queries) * len(keys))  # a tile has all samples
        cells = tile(
            self._request, self._logsumexp, heads=list(heads), queries=_as_slice(queries), keys=_as_slice(keys)
        )
        without_axes = tuple(slice(None) if isinstance(entry, slice) else 0 for entry in entries)
        return cells[_as_slice(samples)][without_axes].to(self.dtype)

    def _check_size(self, count: int) -> None:
        if count > LARGEST:
            raise ArgumentError(
                f"The attention weights {tuple(self.shape)} are read, and {count:,} of them would be computed at once.",
                f"Read at most {LARGEST:,}, such as the tile weights[0, 0, :256, :256]; or record the model with "
                "mh.observe(model): it measures statistics of every head, and record.layers[0] has tiles, "
                ".weights(head, queries=..., keys=...), and means of blocks, .map(head).",
            )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the weights, unless it needs only their size."""
        if function in _OF_THE_SIZE:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
                return function(*args, **(kwargs or {}))
        if function is Tensor.__getitem__ and isinstance(args[0], LazyWeights) and args[0].numel() > LARGEST:
            return args[0].part(args[1])
        args, kwargs = pytree.tree_map_only(LazyWeights, LazyWeights.read, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of PyTorch's C++ code on the weights."""
        args, kwargs = pytree.tree_map_only(LazyWeights, lambda each: each.read().detach(), (args, kwargs or {}))
        return function(*args, **kwargs)


def _compute_weights(request: AttentionRequest, logsumexp: Tensor) -> Tensor:
    """Compute all weights of a call, differentiable where the call is."""
    if not _is_differentiable(request) and not is_traced():
        return tile(request, logsumexp).to(request.shape.dtype)
    with without_autocast(request.shape.device):
        cells = scores(request, hidden=~seen(request))
        return softmax(cells, request.sinks)[0].to(request.shape.dtype)


def _is_differentiable(request: AttentionRequest) -> bool:
    """Whether autograd records the weights of a call."""
    bias = None if request.bias is None else values_of(request.bias)
    tensors = (request.q, request.k, bias, request.sinks)
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _entry_per_axis(index: Any, axes: int) -> list[Any] | None:
    """Return one int or slice per axis for an index of ints, slices of step 1 and an ellipsis; None for any other."""
    given = list(index) if isinstance(index, tuple) else [index]
    plain = [each for each in given if type(each) is int or (isinstance(each, slice) and each.step in (None, 1))]
    if len(plain) > axes or len(given) - len(plain) > 1 or (len(given) > len(plain) and Ellipsis not in given):
        return None
    place = given.index(Ellipsis) if len(given) > len(plain) else len(given)
    return [*plain[:place], *[slice(None)] * (axes - len(plain)), *plain[place:]]


def _range_of_entry(entry: Any, size: int) -> range:
    """Return the indices on an axis of `size` that an int or a slice selects."""
    places = range(size)
    return places[entry] if isinstance(entry, slice) else range(places[entry], places[entry] + 1)


def _as_slice(places: range) -> slice:
    return slice(places.start, places.stop)
