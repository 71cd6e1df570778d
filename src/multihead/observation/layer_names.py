"""Name and number the layers of a model as their calls arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from multihead.kernels.call import AttentionRequest
from multihead.models.pretrained import InputTracker


def module_names(root: nn.Module) -> dict[int, str]:
    """Return id(module) -> qualified name for all modules of a model; the model itself is named after its class."""
    return {id(module): name or type(module).__name__ for name, module in root.named_modules()}


class _Memory(NamedTuple):
    """Where a tensor of (batch, heads, rows, head_dim) is in its storage, which this does not keep."""

    storage: StorageWeakRef  # equals no other storage, even if that has the same address later
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def _memory_of(tensor: Tensor) -> _Memory | None:
    """Return where a tensor is in a storage that holds more than it; None if it holds no more."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return None
    return _Memory(StorageWeakRef(storage), tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _are_adjacent(rows: _Memory | None, later: _Memory | None) -> bool:
    """Whether `later` directly follows `rows` in the same storage."""
    if rows is None or later is None or rows.storage != later.storage or rows.strides != later.strides:
        return False
    is_next = later.offset == rows.offset + rows.shape[2] * rows.strides[2]
    return is_next and rows.shape[:2] == later.shape[:2] and 0 not in later.shape


@dataclass(eq=False)
class LayerNamer:
    """Names the layer of each call, and numbers the layers in the order in which they first run.

    A further call of a module in one forward pass is a layer of its own, "name#2", unless it computes a further window
    of the same samples.

    Attributes:
        names: id(module) -> name, for all modules of the model.
        inputs: the inputs of the model, which count its forward passes.
        numbers: name of a layer -> its number.
        is_further_window: whether the newest call computes a further window of the samples of the call before it.
    """

    names: dict[int, str]
    inputs: InputTracker
    numbers: dict[str, int] = field(default_factory=dict)
    is_further_window: bool = False
    _forward_pass: int = -1
    _calls_in_pass: dict[str, int] = field(default_factory=dict)  # calls of each module in this forward pass
    _newest_call: tuple[nn.Module, tuple[_Memory | None, ...]] | None = None  # layer, q and k of the newest call

    def begins_pass(self) -> bool:
        """Whether a forward pass has begun since the last call; if so, count its calls from the start."""
        if self.inputs.num_passes == self._forward_pass and self.inputs.is_running:
            return False
        self._forward_pass, self._newest_call = self.inputs.num_passes, None
        self._calls_in_pass.clear()
        return True

    def name_call(self, request: AttentionRequest, module: nn.Module) -> str:
        """Return the name of the layer that makes a call, after `begins_pass`."""
        self.is_further_window = self._is_further_window(request, module)
        name = self.names[id(module)]
        self._calls_in_pass[name] = self._calls_in_pass.get(name, 0) + (not self.is_further_window)
        return self._numbered(name, self._calls_in_pass[name])

    def name_recomputed_call(self, module: nn.Module) -> str:
        """Return the name of the layer that a backward pass recomputes: that of its last call in a forward pass."""
        name = self.names[id(module)]
        return self._numbered(name, self._calls_in_pass.get(name, 1))

    def _numbered(self, name: str, count: int) -> str:
        name = name if count == 1 else f"{name}#{count}"
        self.numbers.setdefault(name, len(self.numbers))
        return name

    def _is_further_window(self, request: AttentionRequest, module: nn.Module) -> bool:
        """Whether q and k of a call directly follow q and k of the layer's previous call in memory.

        A layer makes such calls if it attends within one image or window of a sample at a time.
        """
        newest, memory = self._newest_call, (_memory_of(request.q), _memory_of(request.k))
        self._newest_call = module, memory
        return newest is not None and newest[0] is module and all(map(_are_adjacent, newest[1], memory))
