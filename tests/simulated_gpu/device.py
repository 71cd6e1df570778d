"""A simulated GPU: tensors whose device is cuda and whose values are held on the CPU; what a GPU would do is counted.

In `with simulated_gpu() as gpu:` the library takes its own way for CUDA. An operator is a launch, except for views and
allocations; reading a value is a host read, moving a tensor to the device a copy. An operator that gets tensors of the
CPU too raises an error, as a GPU does. Attention operators and compiled flex_attention, which a build of PyTorch for
the CPU lacks, are those of `operators.py`. It needs no Triton and no
compiler. Gradients through autograd do not work here, because its engine has no queue for the device; second calls are
compared, because the first one makes plans.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import multihead
from multihead.kernels import choose, flex, fused_on_cuda, ragged
from multihead.kernels.plan import bounds
from multihead.kernels.triton import launch
from multihead.observation import host_copies
from multihead.tensors import tracing
from tests.simulated_gpu import operators, statistics_kernels

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps", 0)
WIDE_DTYPES = (torch.float64, torch.complex128)
# Operators that launch nothing: views, and memory that is allocated and not written.
NO_LAUNCH = {
    *("view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "alias"),
    *("detach", "t", "as_strided", "unbind", "split", "split_with_sizes", "unflatten", "diagonal", "_reshape_alias"),
    *("lift_fresh", "unfold", "movedim", "_conj", "resolve_neg", "is_same_size", "chunk", "empty", "empty_like"),
    *("new_empty", "empty_strided", "new_empty_strided", "_fused_sdp_choice"),
}
# Operators whose result, or its size, the host must know.
READS = {
    *("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_consecutive", "_unique2", "unique_dim"),
    *("repeat_interleave", "bincount", "is_nonzero", "item"),
}
_FILE_OF_LIBRARY = multihead.__file__.removesuffix("__init__.py")


class Counts:
    """What calls did: launches, host reads and copies to the device, by operator."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    @property
    def totals(self) -> dict[str, int]:
        kinds = {"launches": self.launches, "reads": self.reads, "copies": self.copies}
        return {name: counted.total() for name, counted in kinds.items()}


class OnGpu(Tensor):
    """A tensor on the simulated GPU; `values` is the tensor on the CPU that holds its numbers."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(values: Tensor) -> OnGpu:
        if isinstance(values, OnGpu):
            return values
        device = _gpu().device
        if device == MPS and values.dtype in WIDE_DTYPES:
            raise TypeError(f"Cannot convert a MPS Tensor to {values.dtype}, which the MPS framework doesn't support.")
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        found = Tensor._make_wrapper_subclass(OnGpu, values.size(), **layout, device=device)
        found.values = values
        return found

    def tolist(self) -> Any:
        _gpu().read("tolist")
        return self.values.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _gpu().run(func, args, kwargs or {})


def to_gpu(value: Any) -> Any:
    """Return a tensor on the simulated GPU with the values of a tensor on the CPU; of lists and tuples, each."""
    if isinstance(value, (list, tuple)):
        return builtins.type(value)(map(to_gpu, value))
    return OnGpu.of(value) if isinstance(value, Tensor) else value


def to_cpu(value: Any) -> Any:
    """Return the values of a tensor on the simulated GPU; of lists and tuples, each."""
    if isinstance(value, (list, tuple)):
        return builtins.type(value)(map(to_cpu, value))
    return value.values if builtins.type(value) is OnGpu else value


class Gpu:
    """The simulated GPU: runs operators, and counts them."""

    def __init__(self, device: torch.device = CUDA) -> None:
        self.device = device
        self.counts = Counts()
        self.waiting_is_an_error = False
        self.captured: list[tuple[Callable[[], Any], Any]] | None = None

    def read(self, name: str) -> None:
        self.counts.reads[name] += 1
        if self.waiting_is_an_error:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = [*_leaves(args), *_leaves(kwargs.values())]
        device = kwargs.get("device")
        # The device "cuda" without a number gets the type that `_device_guard` names.
        to_device = device is not None and torch.device(device).type in (self.device.type, "meta")
        if not to_device and not any(builtins.type(leaf) is OnGpu for leaf in leaves):
            return func(*args, **kwargs)
        name = _name_of(func)
        _check_devices(name, args, leaves)
        to_host = name == "_to_copy" and device is not None and not to_device
        given, options = to_cpu(args), {each: to_cpu(value) for each, value in kwargs.items()}
        if to_device:
            options["device"] = CPU
        self._count(name, args, leaves, to_host=to_host)
        run = func
        if name in operators.OPERATORS:
            names = [each.name for each in func._schema.arguments]
            options |= dict(zip(names, given, strict=False))
            given, run = (), operators.OPERATORS[name]
        found = run(*given, **options)
        if self.captured is not None:
            self.captured.append((partial(run, *given, **options), found))
        if to_host or name == "_local_scalar_dense" or not isinstance(found, (Tensor, tuple, list)):
            return found
        if name.endswith("_") and builtins.type(args[0]) is OnGpu:
            return args[0]
        return to_gpu(found)

    def _count(self, name: str, args: tuple[Any, ...], leaves: list[Any], *, to_host: bool) -> None:
        if name == "copy_" and builtins.type(args[0]) is not OnGpu and args[2:] == (True,):
            return  # a copy to pinned memory, which nobody waits for
        if to_host or name in READS or (name == "copy_" and builtins.type(args[0]) is not OnGpu):
            self.read("to the CPU" if to_host else name)
        elif name not in NO_LAUNCH:
            self.counts.launches[name] += 1
            if name in ("index", "index_put_") and _selects_by_mask(name, args):
                self.read(f"{name} by a mask")
        if any(_is_on_cpu(leaf) and leaf.dim() for leaf in leaves):
            self.counts.copies[name] += 1


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and builtins.type(value) is not OnGpu


def _check_devices(name: str, args: tuple[Any, ...], leaves: list[Any]) -> None:
    """Raise the error of a GPU for tensors of the CPU next to its own; one without dimensions is a number."""
    if name in ("copy_", "_to_copy"):
        return
    if name in ("index", "index_put_") and not _is_on_cpu(args[0]):  # indices may be on the CPU
        leaves = list(args[2:])
    written = name.endswith("_") and _is_on_cpu(args[0])
    if written or any(_is_on_cpu(leaf) and leaf.dim() for leaf in leaves):
        device = _gpu().device
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {name} of {device} and cpu!")


def _selects_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operator must know how many elements of a mask are True; writing one value needs no number."""
    by_mask = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1])
    return by_mask and (name == "index" or args[2].numel() > 1)


@cache
def _name_of(func: Any) -> str:
    return str(func._schema.name).split("::")[-1]


def _leaves(values: Any) -> Iterator[Any]:
    """Yield values, and those in lists and tuples among them: arguments of an operator are no deeper."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


_active: list[Gpu] = []


def _gpu() -> Gpu:
    assert _active, "A tensor of the simulated GPU is used outside of `with simulated_gpu()`."
    return _active[-1]


class _Mode(TorchDispatchMode):
    """Runs every operator on the simulated GPU, so that tensors made there are counted too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _gpu().run(func, args, kwargs or {})


# ---- what stands in for PyTorch's device


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        _gpu().read("event")

    def elapsed_time(self, end: _Event) -> float:
        return max((end.at - self.at) * 1e3, 1e-6)


class _Stream:
    def wait_stream(self, _: Any) -> None:
        pass


class _Graph:
    """A graph: the operators of its capture, which run again on the same memory."""

    def __init__(self) -> None:
        self.operators: list[tuple[Callable[[], Any], Any]] = []

    def replay(self) -> None:
        for again, found in self.operators:
            for old, new in zip(_leaves([found]), _leaves([again()]), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def _capture(graph: _Graph) -> Iterator[None]:
    gpu = _gpu()
    gpu.captured = graph.operators
    try:
        yield
    finally:
        gpu.captured = None


@contextmanager
def _no_change(*_: Any) -> Iterator[None]:
    yield


PROPERTIES = SimpleNamespace(name="a simulated GPU", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)


def _patches(gpu: Gpu) -> Iterator[Any]:
    """Yield what makes PyTorch and the library believe in the GPU; each is undone at the end."""

    def set_sync_debug_mode(mode: str | int) -> None:
        gpu.waiting_is_an_error = mode in ("error", 2)

    of_cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "get_device_capability": lambda _=None: tuple(operators.CAPABILITY),
        "get_device_properties": lambda _=None: PROPERTIES,
        "is_current_stream_capturing": lambda: gpu.captured is not None,
        "synchronize": lambda _=None: None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "current_stream": lambda _=None: _Stream(),
        "stream": _no_change,
        "graph": _capture,
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
    }
    for name, value in of_cuda.items():
        if gpu.device == CUDA:
            yield mock.patch.object(torch.cuda, name, value)
    if gpu.device == MPS:
        yield mock.patch.object(torch, "Event", _Event)  # of the loop of `generate`
    yield mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True)
    yield mock.patch.object(torch, "tensor", _made_by(torch.tensor))
    yield mock.patch.object(torch, "as_tensor", _made_by(torch.as_tensor))
    yield mock.patch.object(tracing, "_count_dispatch_modes", return_value=0)
    yield mock.patch.object(flex, "_is_triton_missing", return_value=False)
    yield mock.patch.object(flex, "_run_compiled_flex_attention", _run_flex)
    yield mock.patch.object(fused_on_cuda, "scaled_dot_product_attention", _run_sdpa)
    yield mock.patch.object(launch, "is_triton_missing", return_value=False)
    yield mock.patch.object(launch, "_kernels", return_value=_KERNELS_OF_TRITON)
    yield mock.patch.object(launch, "_failures", [])
    yield mock.patch.object(host_copies, "pinned_bytes", lambda size: torch.empty(size, dtype=torch.uint8))
    yield mock.patch.object(host_copies, "_address", lambda tensor: to_cpu(tensor).untyped_storage().data_ptr())
    plans = bounds.PlanCache(bounds.CACHE_BYTES)
    yield mock.patch.object(choose, "PLAN_CACHE", bounds.PlanCache(bounds.CACHE_BYTES))
    for module in (choose, bounds):
        yield mock.patch.object(module, "BOUNDS_CACHE", plans)
    for module, name in ((bounds, "_BOUNDS_OF_TENSORS"), (flex, "_DENSE_BLOCK_MASKS")):
        yield mock.patch.object(module, name, bounds.PlanCache(bounds.CACHE_BYTES, bounds.MOST_MASKS_WITH_TENSORS))
    for name in ("_TABLES", "_TABLES_OF_EQUAL_MASKS"):
        yield mock.patch.object(ragged, name, {})
    # Where the library asks for a plain tensor, a tensor of the simulated GPU is one.
    for module in _modules_that_ask_for_plain_tensors():
        yield mock.patch.object(module, "type", _type, create=True)


def _type(*given: Any) -> Any:
    return Tensor if len(given) == 1 and builtins.type(given[0]) is OnGpu else builtins.type(*given)


@cache
def _modules_that_ask_for_plain_tensors() -> tuple[Any, ...]:
    """Import and return the modules of the library that compare the type of a value with Tensor."""
    compares = re.compile(r"\btype\([^()]*\) (is|is not|is type\(.*) Tensor\b")
    package = Path(multihead.__file__).parent
    names = [
        "multihead." + ".".join(path.relative_to(package).with_suffix("").parts)
        for path in sorted(package.rglob("*.py"))
        if compares.search(path.read_text(encoding="utf-8"))
    ]
    return tuple(importlib.import_module(name) for name in names)


def _made_by(make: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return `torch.tensor` or `torch.as_tensor` that also makes tensors on the simulated GPU, each by a copy."""

    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        if isinstance(data, OnGpu):
            place, dtype = torch.device(device or data.device), options.get("dtype") or data.dtype
            return data if (place.type, dtype) == (data.device.type, data.dtype) else data.to(place, dtype)
        if device is None or torch.device(device).type != _gpu().device.type:
            return make(data, *args, device=device, **options)
        _gpu().counts.copies[make.__name__] += 1
        return OnGpu.of(make(data, *args, **options))

    return made


def _run_flex(q: Any, k: Any, v: Any, *, score_mod: Any, block_mask: Any, scale: str, nonfinite: str, **_: Any) -> Any:
    """Compute what compiled flex_attention computes, from the block mask and the functions that it gets."""
    gpu = _gpu()
    gpu.counts.launches.update(["flex_attention", "logsumexp of flex_attention"])
    if nonfinite != "as given":
        gpu.counts.launches.update(["rows of q that are not finite", "keys that are not finite"])
    if nonfinite == "marked":
        gpu.counts.launches.update(["rows of the output that are not finite"])
    counts, gpu.counts = gpu.counts, Counts()  # what the emulation itself does is not counted
    on_cpu = SimpleNamespace(
        **{name: to_cpu(getattr(block_mask, name)) for name in (
            "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
        )},
        mask_mod=lambda *cells: to_cpu(block_mask.mask_mod(*to_gpu(cells))),
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
    )  # fmt: skip
    modified = None if score_mod is None else lambda *given: to_cpu(score_mod(*to_gpu(given)))
    try:
        with torch.no_grad():
            given = to_cpu((q, k, v))
            if nonfinite == "spread":
                given = operators.with_nan_in_whole_rows(*given)
            elif nonfinite == "marked":
                given, modified = operators.with_marked_scores(*given, modified)
            found = operators.flex(*given, score_mod=modified, block_mask=on_cpu, scale=float(scale))
            if nonfinite == "marked":
                found = operators.with_nan_in_bad_rows(to_cpu(q), *found)
    finally:
        gpu.counts = counts
    return to_gpu(found)


def _run_sdpa(
    q: Any, k: Any, v: Any, mask: None, dropout: float, causal: bool, *, scale: float, enable_gqa: bool
) -> Any:
    """Call the operator that PyTorch's SDPA calls; a build for the CPU takes the math kernel for tensors on CUDA."""
    # aten/src/ATen/native/transformers/attention.cpp, scaled_dot_product_attention: the switch over the choice
    chosen = torch._fused_sdp_choice(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)
    aten, with_logsumexp = torch.ops.aten, False
    if chosen == operators.FLASH:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0]
    if chosen == operators.CUDNN:
        given = (q, k, v, None, with_logsumexp, dropout, causal)
        return aten._scaled_dot_product_cudnn_attention(*given, scale=scale)[0]
    assert chosen == operators.EFFICIENT
    given = (q, k, v, None, with_logsumexp, dropout, causal)
    return aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]


class _TritonKernel:
    """A kernel of Triton: `kernel[programs](**arguments)` runs what stands in for it, and is one launch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._launch, *grid)

    def _launch(self, programs: int, num_warps: int, num_stages: int, **given: Any) -> None:
        assert min(num_warps, num_stages) > 0
        assert all(each.device == CUDA for each in given.values() if isinstance(each, Tensor))
        _gpu().counts.launches[self.name] += 1
        run_kernel(self.name, programs, {name: to_cpu(each) for name, each in given.items()})


_KERNELS_OF_TRITON = {name: _TritonKernel(name) for name in statistics_kernels.KERNELS}


def run_kernel(name: str, programs: int, given: dict[str, Any]) -> None:
    """Run what stands in for a kernel of Triton, on tensors of the CPU; `tests/gpu_code/` runs the kernel itself."""
    statistics_kernels.KERNELS[name](programs, given)


def skip_where_not_simulated(*, module: bool = False) -> None:
    """Skip a test, or a module of tests, where no GPU can be simulated."""
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU", allow_module_level=module)
    if sys.platform != "linux":
        pytest.skip("the guards of devices are found in the libc10 of Linux", allow_module_level=module)


@contextmanager
def simulated_gpu(device: torch.device = CUDA) -> Iterator[Gpu]:
    """Simulate a GPU in this context, MPS without float64; not where there is a real one."""
    assert not torch.cuda.is_available(), "There is a GPU here."
    # The compiler keeps a table of PyTorch's functions, which must be made of those that are not replaced here.
    importlib.import_module("torch._dynamo.variables.torch")
    importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    gpu = Gpu(device)
    patches = list(_patches(gpu))
    _drop_caches()
    with mock.patch.object(sys.modules[__name__], "_active", [gpu]), _device_guard(device):
        for patch in patches:
            patch.start()
        try:
            with _Mode():
                yield gpu
        finally:
            for patch in reversed(patches):
                patch.stop()
            _drop_caches()


@contextmanager
def _device_guard(device: torch.device) -> Iterator[None]:
    """Register the guard of the device "meta", which does nothing, for a simulated one.

    Indexing, for one, sets the current device by a guard, and a build for the CPU has none for others. The registry is
    an array of pointers in libc10, by the numbers of c10::DeviceType.
    """
    number, meta = {"cuda": 1, "mps": 13}[device.type], 14
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (meta + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = registry[number]
    registry[number] = registry[meta]
    try:
        yield
    finally:
        registry[number] = before


def _drop_caches() -> None:
    """Empty the caches of the library, which may hold tensors of a device, or what is known of it."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("multihead.kernels", "multihead.rotary", "multihead.probes")):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


# ---- counting


def begin_to_count() -> None:
    """Count from here."""
    _gpu().counts = Counts()


def count(call: Callable[[], object]) -> dict[str, int]:
    """Return launches, host reads and copies of the second call of a function, from where it begins to count."""
    call()
    begin_to_count()
    call()
    return _gpu().counts.totals


def count_frames(call: Callable[[], object], *, before: int = 0) -> int:
    """Return how many functions of the library the third call of a function enters, of which `before` have run."""
    found = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(_FILE_OF_LIBRARY)

    for _ in range(2 - before):
        call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
