"""The contract of a kernel on a GPU: its outputs, logsumexps and gradients compared with dense attention in float64.

`multihead doctor --gpu` runs it on the card of the user, and tools/cuda.py on a card of the developers; a kernel that
passed has a row in kernels/proven.json. The expected values are computed on the CPU from the definition of attention,
with no kernel of this library.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from multihead import masks
from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels.choose import KERNELS
from multihead.kernels.parts import (
    DISTANCE_SPREAD,
    ENTROPY,
    LARGEST_KEY,
    LARGEST_WEIGHT,
    LOGSUMEXP,
    MEAN_DISTANCE,
    NEAR_MASS,
    NEAR_REACH,
    OFFSET_MASS,
    POOLED_MAP,
    RECEIVED,
    PartName,
)
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.proven import GpuPath
from multihead.kernels.triton import launch
from multihead.kernels.triton import statistics as on_gpu_statistics
from multihead.masks.base import Mask
from multihead.masks.positions import TilePositions
from multihead.scores.bias import RelativeBias

# Largest error per dtype of outputs and gradients of about 1: several roundings of the dtype.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
STATISTICS_TOLERANCE = 1e-4
BATCH, HEADS = 2, 4
CELL_OF_MAP = (50, 60)  # queries and keys
STATISTICS = launch.GPU_PATH.name
_MEASURED: tuple[PartName, ...] = (
    ENTROPY.name,
    MEAN_DISTANCE.name,
    DISTANCE_SPREAD.name,
    LARGEST_WEIGHT.name,
    NEAR_MASS.name,
    *(OFFSET_MASS(each).name for each in (0, -1, 1)),
)


class ContractError(AssertionError):
    """A kernel whose results differ from those of the definition."""


@dataclass(frozen=True, eq=False)
class Call:
    """A kind of attention call of the contract, of 2 samples and 4 heads.

    Attributes:
        name: what is special in it, such as "window".
        mask: which keys each query may see.
        dtype: dtype of q, k and v.
        head_dim: columns of q, k and v per head.
        kv_heads: number of key/value heads.
        queries: number of queries; they are the last ones of the keys.
        keys: number of keys.
        softcap: see `functional.attention`.
        term: the further term of the scores: "bias", "relative bias", "sinks" or None.
        hidden_nan: whether keys and values that no query may see are NaN.
        trains: whether gradients of q, k and v are compared, from gradients of output and logsumexp.
    """

    name: str
    mask: Mask
    dtype: torch.dtype
    head_dim: int = 64
    kv_heads: int = 2
    queries: int = 300
    keys: int = 300
    softcap: float | None = None
    term: str | None = None
    hidden_nan: bool = False
    trains: bool = field(default=True, kw_only=True)

    def __str__(self) -> str:
        """Return the name and the dtype, such as "window, bfloat16"."""
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}"


def _calls() -> Iterator[Call]:
    """Yield the calls of the contract: every kind of mask in each dtype, and each term of the scores once."""
    lengths = masks.Lengths((300, 130)) & masks.Causal()
    kinds: dict[str, Mask] = {
        "full": masks.Full(),
        "causal": masks.Causal(),
        "window": masks.Window(100, after=3),
        "documents": masks.Documents((90, 130, 80)) & masks.Causal(),
        "lengths": lengths,
        "no interval": masks.Window(64) | masks.Prefix(8),
    }
    # In float32 PyTorch's fused kernels take grouped heads only after k and v were repeated.
    for dtype, head_dim, kv_heads in ((torch.float32, 32, 4), (torch.bfloat16, 128, 2), (torch.float16, 20, 2)):
        for name, mask in kinds.items():
            yield Call(name, mask, dtype, head_dim, kv_heads)
    single = torch.float32
    yield Call("grouped heads", masks.Causal(), single)
    yield Call("causal, more keys than queries", masks.Causal(), torch.bfloat16, queries=100)
    yield Call("one query", masks.Causal(), torch.bfloat16, queries=1, trains=False)
    yield Call("one query", masks.Causal(), single, queries=1, trains=False)
    yield Call("softcap", masks.Causal(), single, softcap=2.0)
    for term in ("bias", "relative bias", "sinks"):
        yield Call(term, masks.Causal(), single, term=term, trains=False)
    yield Call("queries without keys", masks.Lengths((300, 0)), torch.bfloat16)
    yield Call("NaN in padding", lengths, torch.bfloat16, hidden_nan=True)


CALLS = tuple(_calls())


def kernels_on(device: torch.device) -> tuple[str, ...]:
    """Return the names of the kernels that compute some call of the contract on a device.

    The reference kernel is left out: it is the definition in single precision, and the last resort on every device.
    The kernels that measure statistics on a GPU are one of the names.
    """
    names = [name for name in KERNELS if name != "reference"] + [STATISTICS]
    return tuple(name for name in names if any(accepts(name, call, device) for call in CALLS))


def path_of(kernel: str) -> GpuPath | None:
    """Return the code that decides what a kernel does on a GPU, or None if it does not run there."""
    return launch.GPU_PATH if kernel == STATISTICS else KERNELS[kernel].GPU_PATH


def accepts(kernel: str, call: Call, device: torch.device) -> bool:
    """Whether a kernel computes a call on a device; if it refuses, another kernel computes the call."""
    (q, k, v), options = arguments(call, device)
    request = request_of(q, k, v, **options)
    if kernel == STATISTICS:
        on_gpu = device.type == "cuda" and launch.reason_of_device(device) is None
        return on_gpu and on_gpu_statistics.reason_against_call(request) is None
    return KERNELS[kernel].refusal(request, bounds_of(request)) is None


def check(kernel: str, call: Call, device: torch.device) -> float:
    """Compare a kernel with the definition, and return its largest error divided by the tolerance, 0 to 1.

    Raises:
        ContractError: a result is off by more than the tolerance of the dtype, or NaN where it must not be.
        RuntimeError: the second call of its kind makes the host wait for a value of the GPU.
    """
    if kernel == STATISTICS:
        return _check_statistics(call, device)
    given, options = arguments(call, device)
    attention_with_logsumexp(*given, kernel=kernel, **options)  # compiles, plans and caches
    with _waiting_is_an_error(device):
        output, logsumexp = attention_with_logsumexp(*given, kernel=kernel, **options)
    exact_inputs, exact_output, exact_logsumexp = _attend_densely(call)
    results = {"output": (output, exact_output), "logsumexp": (logsumexp, exact_logsumexp)}
    if call.trains:
        weights = [_draw(call, name, tuple(exact.shape)) for name, (_, exact) in results.items()]
        grads = torch.autograd.grad(
            (output, logsumexp),
            given,
            [each.to(device, value.dtype) for each, value in zip(weights, (output, logsumexp), strict=True)],
        )
        # A row without keys has the constant -inf as its logsumexp.
        finite = exact_logsumexp.isfinite()
        exact = torch.autograd.grad(
            (exact_output, exact_logsumexp.masked_fill(~finite, 0.0)),
            exact_inputs,
            [weights[0].to(exact_output.dtype), weights[1].double()],
        )
        results |= {
            f"gradient of {name}": pair for name, pair in zip("qkv", zip(grads, exact, strict=True), strict=True)
        }
    return _compare(call, results, TOLERANCES[call.dtype])


def _compare(call: Call, results: Mapping[Any, tuple[Tensor, Tensor]], tolerance: float) -> float:
    """Return the largest error of results, name -> (value, right value), divided by the tolerance."""
    worst = 0.0
    for name, (value, right) in results.items():
        error = _largest_error(value.detach().cpu().double(), right.detach())
        if not error <= tolerance:
            raise ContractError(f"{call}: the {name} is {error:.1e} off, and the tolerance is {tolerance:.0e}.")
        worst = max(worst, error / tolerance)
    return worst


def measure_statistics(call: Call, device: torch.device) -> dict[PartName, Tensor]:
    """Measure the parts of a call on a GPU, with its logsumexp computed in the same launch.

    Raises:
        ContractError: a kernel does not compile or launch.
    """
    (q, k, v), options = arguments(replace(call, trains=False), device)
    request = request_of(q, k, v, **options)
    bounds = bounds_of(request)
    measured = on_gpu_statistics.measure_in_one_pass(request, bounds, (*_MEASURED, LARGEST_KEY.name, LOGSUMEXP.name))
    if measured is not None:
        sums = on_gpu_statistics.sum_weights_per_key(request, bounds, measured.logsumexp, cell=CELL_OF_MAP)
        if sums is not None and sums[1] is not None:
            found = measured.parts((*_MEASURED, LARGEST_KEY.name, LOGSUMEXP.name))
            return {**found, RECEIVED.name: sums[0], POOLED_MAP.name: sums[1]}
    raise ContractError(f"{call}: a kernel does not compile or launch.")


def _check_statistics(call: Call, device: torch.device) -> float:
    """Compare statistics with those of dense weights in float64; return the largest error, 0 to 1 of the tolerance."""
    measure_statistics(call, device)  # compiles, plans and caches
    with _waiting_is_an_error(device):
        found = measure_statistics(call, device)
    _, weights, logsumexp = _weigh_densely(replace(call, trains=False))
    visible = _visible(call)
    position = torch.arange(call.queries)[:, None] + call.keys - call.queries
    offset = torch.arange(call.keys) - position  # (queries, keys)
    distance = offset.abs().double()
    mass = weights.sum(-1, keepdim=True)
    share = weights / mass.masked_fill(mass == 0, 1.0)
    mean = (share * distance).sum(-1)
    exact: dict[PartName, Tensor] = {
        ENTROPY.name: -torch.xlogy(weights, weights).sum(-1),
        MEAN_DISTANCE.name: mean,
        DISTANCE_SPREAD.name: (share * (distance - mean[..., None]).square()).sum(-1).sqrt(),
        LARGEST_WEIGHT.name: weights.amax(-1),
        NEAR_MASS.name: (weights * (distance <= NEAR_REACH)).sum(-1),
        LOGSUMEXP.name: logsumexp,
        RECEIVED.name: weights.sum(-2),
        POOLED_MAP.name: _sum_cells(weights) / _sum_cells(visible.double()),
    }
    exact |= {OFFSET_MASS(each).name: (weights * (offset == each)).sum(-1) for each in (0, -1, 1)}
    key = found[LARGEST_KEY.name].cpu()
    at_key = weights.gather(-1, key.clamp(min=0)[..., None])[..., 0].masked_fill(key < 0, 0.0)
    results = {name: (found[name], right) for name, right in exact.items()}
    return _compare(call, {**results, LARGEST_KEY.name: (at_key, weights.amax(-1))}, STATISTICS_TOLERANCE)


def _sum_cells(values: Tensor) -> Tensor:
    """Sum (batch, heads, queries, keys) over the cells of a map."""
    rows = [part.sum(-2) for part in values.split(CELL_OF_MAP[0], -2)]
    return torch.stack([part.sum(-1) for part in torch.stack(rows, -2).split(CELL_OF_MAP[1], -1)], -1)


@dataclass(frozen=True)
class Checked:
    """One call of the contract on one kernel.

    Attributes:
        kernel: name of the kernel.
        call: the call, such as "window, bfloat16".
        error: what is wrong, with the name of the call, or None if the kernel passed.
    """

    kernel: str
    call: str
    error: str | None = None


def run(device: torch.device) -> Iterator[Checked]:
    """Check every kernel with every call that it accepts, and yield each result; stop if the GPU no longer answers."""
    for kernel in kernels_on(device):
        for call in CALLS:
            if accepts(kernel, call, device):
                try:
                    check(kernel, call, device)
                except ContractError as error:
                    yield Checked(kernel, str(call), str(error))
                except Exception as error:  # noqa: BLE001 - any error is a kernel that did not pass
                    yield Checked(kernel, str(call), f"{call}: {type(error).__name__}: {error}")
                    if _is_lost(device):
                        return
                else:
                    yield Checked(kernel, str(call))


def _is_lost(device: torch.device) -> bool:
    """Whether the process can no longer use a GPU, as after an illegal memory access."""
    try:
        torch.zeros(1, device=device).cpu()
    except RuntimeError:
        return True
    return False


@contextmanager
def _waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """Let PyTorch raise an error where the host would wait for a value of a GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _largest_error(value: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest finite number if that exceeds 1; inf for NaN or -inf."""
    same = (value == right) | (value.isnan() & right.isnan())
    if not bool((same | (value.isfinite() & right.isfinite())).all()):
        return float("inf")
    largest = float(right.masked_fill(~right.isfinite(), 0).abs().max())
    return float((value - right).masked_fill(same, 0).abs().max()) / max(1.0, largest)


def _draw(call: Call, name: str, size: tuple[int, ...]) -> Tensor:
    """Draw standard normal numbers, the same for equal calls and names."""
    seed = zlib.crc32(f"{call} {name}".encode())
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _qkv(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim) on the CPU."""
    of_keys = (BATCH, call.kv_heads, call.keys, call.head_dim)
    q = _draw(call, "q", (BATCH, HEADS, call.queries, call.head_dim))
    k, v = _draw(call, "k", of_keys), _draw(call, "v", of_keys)
    return q.to(call.dtype), k.to(call.dtype), v.to(call.dtype)


def arguments(call: Call, device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return (q, k, v) and the other arguments of a call on a device."""
    q, k, v = _qkv(call)
    if call.hidden_nan:
        unseen = ~_visible(call).any(1).any(1)  # (batch, keys)
        k, v = (each.masked_fill(unseen[:, None, :, None], torch.nan) for each in (k, v))
    options: dict[str, Any] = {"mask": call.mask, "softcap": call.softcap, "query_start": call.keys - call.queries}
    if call.term == "bias":
        options["bias"] = _draw(call, "bias", (1, HEADS, call.queries, call.keys)).to(device)
    elif call.term == "relative bias":
        options["bias"] = RelativeBias(_draw(call, "bias", _size_of_relative_bias(call)).to(device))
    elif call.term == "sinks":
        options["sinks"] = _draw(call, "sinks", (HEADS,)).to(device)
    return tuple(each.to(device).requires_grad_(call.trains) for each in (q, k, v)), options


def _size_of_relative_bias(call: Call) -> tuple[int, int, int]:
    return 1, HEADS, call.queries + call.keys - 1  # one value per difference of key and query index


def _visible(call: Call) -> Tensor:
    """Return which keys each query may see, by the definition of the mask: (batch, heads, queries, keys) bool."""
    tile = TilePositions.from_sizes(call.queries, call.keys, query_start=call.keys - call.queries)
    return call.mask.tile(tile).expand(BATCH, HEADS, -1, -1)


def _attend_densely(call: Call) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Compute a call on the CPU in float64: the leaves (q, k, v), the output p v and the logsumexp."""
    leaves, weights, logsumexp = _weigh_densely(call)
    v = leaves[2].repeat_interleave(HEADS // call.kv_heads, 1)
    return leaves, weights @ v, logsumexp


def _weigh_densely(call: Call) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Compute the weights of a call on the CPU in float64: the leaves (q, k, v), the weights and the logsumexp.

    p = softmax(softcap(q k^T / sqrt(head_dim)) + bias) over visible keys and the sink; (batch, heads, queries, keys).
    """
    leaves = tuple(each.double().requires_grad_(call.trains) for each in _qkv(call))
    q, k = leaves[0], leaves[1].repeat_interleave(HEADS // call.kv_heads, 1)
    scores = q @ k.mT * call.head_dim**-0.5  # (batch, heads, queries, keys)
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if call.term == "bias":
        scores = scores + _draw(call, "bias", (1, HEADS, call.queries, call.keys)).double()
    elif call.term == "relative bias":
        difference = torch.arange(call.keys) - torch.arange(call.queries)[:, None] + call.queries - 1
        scores = scores + _draw(call, "bias", _size_of_relative_bias(call)).double()[:, :, difference]
    visible = _visible(call)
    empty = ~visible.any(-1)  # (batch, heads, queries)
    # A row without keys gets a score of 0 here, because the derivative of a logsumexp of -inf is NaN.
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(empty[..., None], 0.0)
    if call.term == "sinks":
        sink = _draw(call, "sinks", (HEADS,)).double().view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
        logsumexp = torch.cat((scores, sink), -1).logsumexp(-1)
    else:
        logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp().masked_fill(empty[..., None], 0.0)
    return leaves, weights, logsumexp.masked_fill(empty, -torch.inf)
