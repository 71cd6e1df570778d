"""Name and number the layers of a model as their calls arrive."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from multihead.kernels.call import AttentionRequest
from multihead.models.pretrained import InputTracker


def module_names(root: nn.Module) -> dict[int, str]:
    """Return id(module) -> qualified name for all modules of a model; the model itself is named after its class."""
    return {id(module): name or type(module).__name__ for name, module in root.named_modules()}


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
    _newest_call: tuple[nn.Module, Tensor, Tensor] | None = None  # layer, q and k of the newest call

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
        newest, (q, k) = self._newest_call, (request.q.detach(), request.k.detach())
        self._newest_call = module, q, k  # kept alive, so that no other tensor can reuse their memory
        return newest is not None and newest[0] is module and all(map(_are_adjacent_in_memory, newest[1:], (q, k)))


def _are_adjacent_in_memory(rows: Tensor, later: Tensor) -> bool:
    """Whether `later` directly follows `rows` in the same storage; both are (batch, heads, rows, head_dim)."""
    if rows.shape[:2] != later.shape[:2] or rows.stride() != later.stride() or not later.numel():
        return False
    if rows.untyped_storage().data_ptr() != later.untyped_storage().data_ptr():
        return False
    return later.storage_offset() == rows.storage_offset() + rows.shape[2] * rows.stride(2)
