"""The contract of a kernel on a GPU: its outputs, logsumexps and gradients compared with dense attention in float64.

`multihead doctor --gpu` runs it on the card of the user, and tools/cuda.py on a card of the developers; a kernel that
passed has a row in kernels/proven.json. The expected values are computed on the CPU from the definition of attention,
with no kernel of this library.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multihead import masks
from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels.choose import KERNELS
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks.base import Mask
from multihead.masks.positions import TilePositions
from multihead.scores.bias import RelativeBias

# Largest error per dtype of outputs and gradients of about 1: several roundings of the dtype.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BATCH, HEADS = 2, 4


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
    """
    return tuple(name for name in KERNELS if name != "reference" and any(accepts(name, call, device) for call in CALLS))


def accepts(kernel: str, call: Call, device: torch.device) -> bool:
    """Whether a kernel computes a call on a device; if it refuses, another kernel computes the call."""
    (q, k, v), options = arguments(call, device)
    request = request_of(q, k, v, **options)
    return KERNELS[kernel].refusal(request, bounds_of(request)) is None


def check(kernel: str, call: Call, device: torch.device) -> float:
    """Compare a kernel with the definition, and return its largest error divided by the tolerance, 0 to 1.

    Raises:
        ContractError: a result is off by more than the tolerance of the dtype, or NaN where it must not be.
        RuntimeError: the second call of its kind makes the host wait for a value of the GPU.
    """
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
    tolerance, worst = TOLERANCES[call.dtype], 0.0
    for name, (value, right) in results.items():
        error = _largest_error(value.detach().cpu().double(), right.detach())
        if not error <= tolerance:
            raise ContractError(f"{call}: the {name} is {error:.1e} off, and the tolerance is {tolerance:.0e}.")
        worst = max(worst, error / tolerance)
    return worst


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
    """Compute a call on the CPU in float64: the leaves (q, k, v), the output and the logsumexp.

    p = softmax(softcap(q k^T / sqrt(head_dim)) + bias) over visible keys and the sink; output = p v.
    """
    leaves = tuple(each.double().requires_grad_(call.trains) for each in _qkv(call))
    q, k, v = leaves[0], *(each.repeat_interleave(HEADS // call.kv_heads, 1) for each in leaves[1:])
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
    output = ((scores - logsumexp[..., None]).exp() @ v).masked_fill(empty[..., None], 0.0)
    return leaves, output, logsumexp.masked_fill(empty, -torch.inf)
