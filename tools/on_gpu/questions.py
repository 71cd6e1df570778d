"""What PyTorch's attention operators do on this card, with torch alone: the assumptions of kernels that call them.

Each answer says what was found, and `holds` whether it is what tests/simulated_gpu/operators.py assumes. In the names,
a ragged call is `aten._flash_attention_forward` on tensors (tokens, heads, head_dim), whose sequences are given by
their cumulated lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.on_gpu.worker import Cases

HEADS, HEAD_DIM = 4, 64
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS, PADDED = (200, 77, 3), 200  # of three sequences, in memory for PADDED tokens each
ROUNDS = 50  # calls per measurement of time
_ragged = torch.ops.aten._flash_attention_forward  # noqa: SLF001 - torch has no public name with all arguments
_ragged_backward = torch.ops.aten._flash_attention_backward  # noqa: SLF001


def cases(seconds: float) -> Cases:
    """Return the questions, in the order in which they are asked: those that may end the context come last."""
    found: dict[str, Callable[[], dict[str, object]]] = {
        "Q1": nan_behind_sequences,
        "Q2": gradients_of_gaps,
        "Q3": rows_without_keys,
        "Q4": causal_with_unequal_lengths,
        "Q6": order_of_choice,
        **{f"Q6 {name}": partial(times_of_backend, backend) for name, backend in BACKENDS.items()},
        "Q7": host_times,
        "Q8": captured_graph,
    }
    return found | {f"Q5 {name}": partial(strides, name) for name in LAYOUTS}


# ---- Q1 to Q4: what is computed


def nan_behind_sequences() -> dict[str, object]:
    """Whether NaN and inf after the end of each sequence reach no output, for both ways to leave them out."""
    found: dict[str, bool] = {}
    for dtype in TOLERANCE:
        for causal in (False, True):
            for number in (torch.nan, torch.inf):
                for way in ("gaps", "seqused_k"):
                    q, k, v = _padded(dtype, number=number)
                    output = _call_padded(q, k, v, way=way, causal=causal)[0]
                    name = f"{way}, {number}, {_name(dtype)}{', causal' if causal else ''}"
                    found[name] = _is_right(output, q, k, v, causal=causal)
    wrong = [name for name, right in found.items() if not right]
    answer = f"wrong with {', '.join(wrong)}" if wrong else "they reach no output, with gaps and with seqused_k"
    return {"answer": answer, "holds": not wrong, "found": found}


def gradients_of_gaps() -> dict[str, object]:
    """The gradients of k and v in gaps, which are sequences without queries, in memory that held NaN before."""
    found: dict[str, object] = {}
    for dtype in TOLERANCE:
        q, k, v = _padded(dtype, number=torch.nan)
        edges_q, edges_k = _edges_with_gaps()
        output, logsumexp, rng, unused, *_ = _ragged(
            q, k, v, edges_q, edges_k, PADDED, PADDED, 0.0, is_causal=False, return_debug_mask=False
        )
        grad = torch.randn_like(output)
        _fill_free_memory_with_nan(4 * k.numel())
        backward = (output, logsumexp, edges_q, edges_k, PADDED, PADDED, 0.0, False, rng, unused)
        dq, dk, dv = _ragged_backward(grad, q, k, v, *backward)
        gap = _gap_rows(q.device)
        exact = _exact_gradients(q, k, v, grad)
        found[_name(dtype)] = {
            "dk and dv are 0 in gaps": bool((dk[gap] == 0).all() and (dv[gap] == 0).all()),
            "dk and dv are finite in gaps": bool(dk[gap].isfinite().all() and dv[gap].isfinite().all()),
            "all others are right": all(
                _close(each[~gap if n else slice(None)].cpu(), right[~gap.cpu() if n else slice(None)], dtype)
                for n, (each, right) in enumerate(zip((dq, dk, dv), exact, strict=True))
            ),
        }
    return _summary(found)


def rows_without_keys() -> dict[str, object]:
    """Output and logsumexp of a sequence without keys, of a query that is NaN, and of queries that see a NaN key."""
    found: dict[str, object] = {}
    for dtype in TOLERANCE:
        q, k, v = (torch.randn(24, HEADS, HEAD_DIM, device="cuda").to(dtype) for _ in range(3))
        q[17, 0], k[9, 1] = torch.nan, torch.nan  # a query of the third sequence, a key of the second
        edges_q = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device="cuda")
        edges_k = torch.tensor([0, 0, 16, 24], dtype=torch.int32, device="cuda")  # the first sequence has no key
        output, logsumexp, *_ = _ragged(q, k, v, edges_q, edges_k, 8, 16, 0.0, is_causal=False, return_debug_mask=False)
        logsumexp = logsumexp if logsumexp.shape[0] == HEADS else logsumexp.mT
        found[_name(dtype)] = {
            "without keys: output": _values(output[:8]),
            "without keys: logsumexp": _values(logsumexp[:, :8]),
            "NaN query: output": _values(output[17, 0]),
            "NaN query: logsumexp": _values(logsumexp[0, 17]),
            "NaN key: output": _values(output[8:16, 1]),
            "NaN key: logsumexp": _values(logsumexp[1, 8:16]),
            "others are finite": bool(output[8:, 2:].isfinite().all()),
        }
    first: Any = found["bfloat16"]
    answer = "; ".join(
        f"{kind}: output {first[f'{kind}: output']}, logsumexp {first[f'{kind}: logsumexp']}"
        for kind in ("without keys", "NaN query", "NaN key")
    )
    answer += "" if first["others are finite"] else "; other rows are NaN too"
    holds = all(
        isinstance(each, dict)
        and (each["without keys: output"], each["NaN query: output"], each["NaN key: output"]) == ("0", "nan", "nan")
        and each["others are finite"]
        for each in found.values()
    )
    return {"answer": answer, "holds": holds, "found": found}


def causal_with_unequal_lengths() -> dict[str, object]:
    """Whether the last query of a causal ragged call sees the last key, with fewer and with more keys than queries."""
    found: dict[str, str] = {}
    for queries, keys in ((3, 9), (64, 200), (9, 3)):
        q, k, v = (torch.randn(length, HEADS, HEAD_DIM, device="cuda").half() for length in (queries, keys, keys))
        edges = [torch.tensor([0, length], dtype=torch.int32, device="cuda") for length in (queries, keys)]
        output = _ragged(q, k, v, *edges, queries, keys, 0.0, is_causal=True, return_debug_mask=False)[0].cpu()
        aligned = {
            name: _dense(q, k, v, first_key_after=offset) for name, offset in (("end", keys - queries), ("start", 0))
        }
        fits = [name for name, exact in aligned.items() if _close(output, exact, torch.float16)]
        found[f"{queries} queries, {keys} keys"] = " and ".join(fits) or "neither"
    return {
        "answer": "aligned at the " + ", ".join(f"{name} ({each})" for each, name in found.items()),
        "holds": all("end" in each for each in found.values()),
        "found": found,
    }


# ---- Q5: strides


def _of_projection() -> tuple[Tensor, Tensor, Tensor]:
    """Views of one projection: (tokens, 3, heads, head_dim)."""
    return tuple(torch.randn(64, 3, HEADS, HEAD_DIM, device="cuda").half().unbind(1))  # type: ignore[return-value]


def _heads_first() -> tuple[Tensor, Tensor, Tensor]:
    """Views of (heads, tokens, head_dim) tensors, as of a key/value cache of one sample."""
    return _three(lambda: torch.randn(HEADS, 64, HEAD_DIM, device="cuda").half().transpose(0, 1))


def _expanded_heads() -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values whose heads have stride 0."""
    q = torch.randn(64, HEADS, HEAD_DIM, device="cuda").half()
    k, v = (torch.randn(64, 1, HEAD_DIM, device="cuda").half().expand(64, HEADS, HEAD_DIM) for _ in range(2))
    return q, k, v


def _grouped_heads() -> tuple[Tensor, Tensor, Tensor]:
    """Half as many heads of keys and values."""
    return torch.randn(64, HEADS, HEAD_DIM, device="cuda").half(), *_three(
        lambda: torch.randn(64, HEADS // 2, HEAD_DIM, device="cuda").half()
    )[:2]


def _padded_dim() -> tuple[Tensor, Tensor, Tensor]:
    """A head_dim that is no multiple of 8."""
    return _three(lambda: torch.randn(64, HEADS, 20, device="cuda").half())


def _last_stride() -> tuple[Tensor, Tensor, Tensor]:
    """Columns with a stride of 2."""
    return _three(lambda: torch.randn(64, HEADS, 2 * HEAD_DIM, device="cuda").half()[..., ::2])


def _odd_token_stride() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that begin at addresses which are no multiples of 16 bytes."""
    return _three(lambda: torch.randn(64, HEADS * HEAD_DIM + 1, device="cuda").half()[:, 1:].unflatten(1, (HEADS, -1)))


def _three(make: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return make(), make(), make()


LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
    "views of one projection": _of_projection,
    "heads first": _heads_first,
    "grouped heads": _grouped_heads,
    "head_dim 20": _padded_dim,
    "heads of stride 0": _expanded_heads,
    "last stride 2": _last_stride,
    "addresses of 2 bytes": _odd_token_stride,
}


REJECTED = ("head_dim 20", "last stride 2")  # layouts that FlashAttention's source rejects


def strides(name: str) -> dict[str, object]:
    """Whether a ragged call takes a layout and computes the right output."""
    q, k, v = LAYOUTS[name]()
    edges = torch.tensor([0, 40, 64], dtype=torch.int32, device="cuda")
    try:
        output = _ragged(q, k, v, edges, edges, 40, 40, 0.0, is_causal=False, return_debug_mask=False)[0]
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "CUDA error" in str(error):
            raise  # the context is lost, and the worker ends
        return {"group": "Q5", "answer": f"{name}: rejected", "holds": name in REJECTED, "error": str(error)[:300]}
    exact = torch.cat([_dense(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 40), (40, 64))])
    right = _close(output.cpu(), exact, torch.float16)
    return {
        "group": "Q5",
        "answer": f"{name}: {'right' if right else 'WRONG'}",
        "holds": right and name not in REJECTED,
    }


# ---- Q6 to Q8: which kernel, and how long it takes

SHAPES = ((32, 512, 64), (32, 512, 128), (8, 2048, 128), (2, 8192, 128), (4, 1000, 128))  # batch, length, head_dim
BACKENDS = {"FLASH": SDPBackend.FLASH_ATTENTION, "CUDNN": SDPBackend.CUDNN_ATTENTION}


def order_of_choice() -> dict[str, object]:
    """What `_fused_sdp_choice` returns: 1 flash, 2 memory-efficient, 3 cuDNN, 0 math."""
    found: dict[str, int] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 128, 256):
            for queries, keys, kv_heads, causal in (
                *((512, 512, 16, False), (512, 512, 16, True), (8192, 8192, 16, True)),
                *((512, 512, 4, True), (1, 4096, 4, False)),
            ):
                q = torch.empty(1, 16, queries, dim, device="cuda", dtype=dtype)
                k = torch.empty(1, kv_heads, keys, dim, device="cuda", dtype=dtype)
                name = f"{_name(dtype)} D {dim} {queries} x {keys} {16}/{kv_heads}{' causal' if causal else ''}"
                found[name] = torch._fused_sdp_choice(q, k, k, None, 0.0, causal, enable_gqa=kv_heads < 16)  # noqa: SLF001
    priority: list[object] = list(getattr(torch._C, "_get_sdp_priority_order", list)())  # noqa: SLF001
    counted = {number: sum(each == number for each in found.values()) for number in sorted(set(found.values()))}
    chosen = ", ".join(f"{number} for {count} kinds" for number, count in counted.items())
    half = [number for name, number in found.items() if not name.startswith("float32")]
    return {
        "group": "Q6",
        "answer": f"priority {priority}, chosen {chosen}",
        "holds": set(half) == {1},
        "found": found,
    }


def times_of_backend(backend: SDPBackend) -> dict[str, object]:
    """Device time, host time and time of the first call of each new shape, of one forced kernel of SDPA."""
    found: dict[str, object] = {}
    firsts, slower = [], []
    for batch, length, dim in SHAPES:
        q, k, v = (torch.randn(batch, 16, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        with sdpa_kernel(backend):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            first = (time.perf_counter() - began) * 1e3
            device, host = device_ms(call, min(ROUNDS, 10)), host_us(call, min(ROUNDS, 10))
        firsts.append(first)
        slower.append(device)
        found[f"{batch} x {length}, D {dim}"] = {"first_ms": first, "device_ms": device, "host_us": host}
    answer = f"{backend.name}: device {slower[0]:.2f} to {max(slower):.2f} ms, first call at most {max(firsts):.0f} ms"
    return {"group": "Q6", "answer": answer, "found": found}


def host_times() -> dict[str, object]:
    """Host time of SDPA and of the ragged operator: calls in a row, without waiting for the GPU."""
    q, k, v = (torch.randn(1, 16, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rows = [each.transpose(1, 2).flatten(0, 1) for each in (q, k, v)]
    edges = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
    calls: dict[str, Callable[[], object]] = {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        "the flash operator": lambda: flash(q, k, v),
        "the ragged operator": lambda: _ragged(
            *rows, edges, edges, 64, 64, 0.0, is_causal=False, return_debug_mask=False
        ),
    }
    found = {name: host_us(call, ROUNDS) for name, call in calls.items()}
    return {"answer": ", ".join(f"{name} {value:.1f} us" for name, value in found.items()), "found": found}


def captured_graph() -> dict[str, object]:
    """Whether a graph can capture the flash operator and the ragged operator, and computes new inputs when it runs."""
    found: dict[str, str] = {}
    q, k, v = _padded(torch.float16)
    edges = _edges_with_gaps()
    shape = (len(LENGTHS), PADDED, HEADS, HEAD_DIM)
    heads_first = [each.view(shape).transpose(1, 2) for each in (q, k, v)]
    calls: dict[str, Callable[[], Tensor]] = {
        "flash": lambda: F.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2]),
        "ragged": lambda: _ragged(q, k, v, *edges, PADDED, PADDED, 0.0, is_causal=False, return_debug_mask=False)[0],
    }
    for name, call in calls.items():
        with torch.no_grad():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = call()
            q.copy_(torch.randn_like(q))
            graph.replay()
            torch.cuda.synchronize()
            found[name] = "right" if torch.equal(output, call()) else "WRONG"
    answer = ", ".join(f"{name} {state}" for name, state in found.items())
    return {"answer": answer, "holds": set(found.values()) == {"right"}, "found": found}


# ---- measuring


def host_us(call: Callable[[], object], rounds: int) -> float:
    """Return the microseconds of the host per call: calls in a row without waiting, the least of 3 measurements."""
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(rounds):
            call()
        found.append((time.perf_counter() - began) / rounds * 1e6)
        torch.cuda.synchronize()
    return min(found)


def device_ms(call: Callable[[], object], rounds: int) -> float:
    """Return the milliseconds of the device per call, by events around calls in a row."""
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / rounds


# ---- ragged calls over padded memory


def _padded(dtype: torch.dtype, *, number: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v (sequences * PADDED, heads, head_dim); k and v hold `number` after the end of each sequence."""
    torch.manual_seed(0)
    size = (len(LENGTHS) * PADDED, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(size, device="cuda").to(dtype) for _ in range(3))
    if number is not None:
        gap = _gap_rows(q.device)[:, None, None]
        k, v = k.masked_fill(gap, number), v.masked_fill(gap, number)
    return q, k, v


def _gap_rows(device: torch.device) -> Tensor:
    """Return which rows are after the end of their sequence: (sequences * PADDED,) bool."""
    lengths = torch.tensor(LENGTHS, device=device)
    return (torch.arange(PADDED, device=device) >= lengths[:, None]).flatten()


def _edges_with_gaps() -> tuple[Tensor, Tensor]:
    """Return cumulated lengths of queries and keys in which every second sequence is a gap: keys without queries."""
    edges_q, edges_k = [0], [0]
    for sample, length in enumerate(LENGTHS):
        edges_q += [(sample + 1) * PADDED] * 2
        edges_k += [sample * PADDED + length, (sample + 1) * PADDED]
    return tuple(torch.tensor(each, dtype=torch.int32, device="cuda") for each in (edges_q, edges_k))  # type: ignore[return-value]


def _call_padded(q: Tensor, k: Tensor, v: Tensor, *, way: str, causal: bool) -> tuple[Tensor, ...]:
    """Call the ragged operator on padded sequences: with gaps that are sequences, or with the number of used keys."""
    options: dict[str, Any] = {"is_causal": causal, "return_debug_mask": False}
    if way == "gaps":
        return tuple(_ragged(q, k, v, *_edges_with_gaps(), PADDED, PADDED, 0.0, **options))
    edges = torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device="cuda") * PADDED
    used = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    return tuple(_ragged(q, k, v, edges, edges, PADDED, PADDED, 0.0, seqused_k=used, **options))


# ---- the definition, in float64 on the CPU


def _dense(q: Tensor, k: Tensor, v: Tensor, *, first_key_after: int | None = None) -> Tensor:
    """Compute attention of (tokens, heads, head_dim); query i sees the keys up to i + first_key_after, or all."""
    q, k, v = (each.detach().cpu().double().transpose(0, 1) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[0] // each.shape[0], 0) for each in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if first_key_after is not None:
        hidden = torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None] + first_key_after
        scores = scores.masked_fill(hidden, -torch.inf)
    output: Tensor = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1)
    return output


def _is_right(output: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> bool:
    """Whether the output of padded sequences is that of each sequence alone, causal ones aligned at the end."""
    right = []
    for sample, length in enumerate(LENGTHS):
        rows = slice(sample * PADDED, (sample + 1) * PADDED)
        keys = slice(sample * PADDED, sample * PADDED + length)
        exact = _dense(q[rows], k[keys], v[keys], first_key_after=length - PADDED if causal else None)
        right.append(_close(output[rows].cpu(), exact, q.dtype))
    return all(right)


def _exact_gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v of padded sequences in float64; those of gaps are 0."""
    leaves = [each.detach().cpu().double().nan_to_num(0.0).requires_grad_() for each in (q, k, v)]
    total = torch.zeros((), dtype=torch.float64)
    for sample, length in enumerate(LENGTHS):
        rows = slice(sample * PADDED, (sample + 1) * PADDED)
        keys = slice(sample * PADDED, sample * PADDED + length)
        mine, theirs, values = (each.transpose(0, 1) for each in (leaves[0][rows], leaves[1][keys], leaves[2][keys]))
        weights = (mine @ theirs.mT * HEAD_DIM**-0.5).softmax(-1)
        total = total + ((weights @ values).transpose(0, 1) * grad[rows].cpu().double()).sum()
    return torch.autograd.grad(total, leaves)


def _close(value: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are finite and within the tolerance of the dtype."""
    error = (value.double() - exact).abs().max()
    return bool(error <= TOLERANCE[dtype] * max(1.0, float(exact.abs().max())))  # False for NaN


def _fill_free_memory_with_nan(numbers: int) -> None:
    """Fill memory that the caching allocator will hand out next with NaN."""
    blocks = [torch.full((numbers,), torch.nan, device="cuda", dtype=torch.float16) for _ in range(8)]
    blocks += [torch.full((numbers // 4,), torch.nan, device="cuda", dtype=torch.float16) for _ in range(16)]
    torch.cuda.synchronize()
    del blocks


def _values(tensor: Tensor) -> str:
    """Return the value that all elements share, such as "0", "nan" or "-inf", or "several"."""
    values = set(map(str, (tensor.flatten().cpu().double() + 0.0).unique().tolist()))
    if bool(tensor.isnan().all()):
        return "nan"
    return f"{float(next(iter(values))):g}" if len(values) == 1 else "several"


def _summary(found: dict[str, object]) -> dict[str, object]:
    """Return the answer of checks per dtype: which do not hold."""
    wrong = [
        f"{dtype}: not {name}"
        for dtype, checks in found.items()
        if isinstance(checks, dict)
        for name, right in checks.items()
        if not right
    ]
    return {"answer": "; ".join(wrong) or "they are 0, and all others are right", "holds": not wrong, "found": found}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
