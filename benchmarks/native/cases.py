"""The native kernel's cases: what runs, what it is compared with, and the target of the ratio on AVX2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from benchmarks.measure import Duel
from benchmarks.native import accuracy, contenders
from benchmarks.watching import cases as watching

DENSE, LOOP = "SDPA, dense bool mask", "SDPA, a loop of calls"
KERNEL, ENTRY = "native.attend", "mh.attention"


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        line: the line of the summary that includes the row.
        name: what is computed.
        rival: what it is compared with.
        make: sets it up.
        least: how many times faster ours must be on AVX2; None if the ratio is a cost.
        most: the largest cost on AVX2.
        wide: how many times faster ours must be on AVX-512 with bf16; None without a target.
        timed: the function that is called: `mh.attention`, or the kernel with a request and a plan made before.
    """

    line: str
    name: str
    rival: str
    make: Callable[[], Duel]
    least: float | None = None
    most: float | None = None
    wide: float | None = None
    timed: str = ENTRY

    @property
    def is_cost(self) -> bool:
        """Whether a smaller ratio is better."""
        return self.most is not None


@dataclass(frozen=True)
class Accuracy:
    """An error with a limit.

    Attributes:
        name: what is compared with float64.
        most: its limit.
        find: computes it.
    """

    name: str
    most: float
    find: Callable[[], float]


def _prefills() -> Iterator[Case]:
    for dtype in contenders.DTYPES:
        for length in (512, 2048, 8192):
            for dim in (64, 128):
                name = f"N {length:,}, D {dim}, {dtype}"
                make = partial(contenders.prefill, length, dim, dtype)
                wide = 2.0 if dtype == "bf16" else None
                yield Case("full", f"full, {name}", "SDPA", partial(make, causal=False), 1.05, wide=wide)
                least = {512: 1.8, 2048: 1.3, 8192: 1.15}[length]
                yield Case(f"causal, N {length:,}", f"causal, {name}", "SDPA", partial(make, causal=True), least)


def _few_queries() -> Iterator[Case]:
    for dim, dtype in product((64, 128), contenders.DTYPES):
        for length in (16, 64, 128):
            make = partial(contenders.few_queries, length, length, dim, dtype)
            least = 1.2 if dim == 64 else 1.0
            line = f"16 to 128 queries on as many keys, D {dim}"
            yield Case(line, f"full, N {length}, D {dim}, {dtype}", "SDPA", make, least)
        for queries, keys in product((16, 64), (2048, 8192)):
            make = partial(contenders.few_queries, queries, keys, dim, dtype)
            name = f"{queries} queries, {keys:,} keys, D {dim}, {dtype}"
            yield Case(f"{queries} queries on more keys", name, "SDPA", make, 1.0 if queries == 16 else 1.2)


def _products() -> Iterator[Case]:
    for dim, least in ((64, 0.85), (128, 0.9)):
        line = "full, share of the rate of a matrix product"
        make = partial(contenders.matrix_product, dim)
        yield Case(line, f"{line}, N 2,048, D {dim}, fp32", "torch.mm of 2,048 x 2,048", make, least)


def _masked() -> Iterator[Case]:
    rows = (
        ("window", "window 256 of 2,048", "dense bool", 7.0),
        ("documents", "8 documents", "dense bool", 5.5),
        ("documents", "8 documents", "loop", 1.15),
        ("documents and causal", "8 documents and causal", "dense bool", 9.0),
        ("documents and causal", "8 documents and causal", "loop", 1.8),
        ("half padded", "half padded, lengths spread, 4 x 2,048", "dense bool", 2.0),
    )
    for kind, name, rival, least in rows:
        shown = DENSE if rival == "dense bool" else LOOP
        for dtype in contenders.DTYPES:
            for dim in (64, 128):
                make = partial(contenders.masked, kind, rival, dim, dtype)
                yield Case(f"{name}, against {rival}", f"{name}, D {dim}, {dtype}", shown, make, least)


def _others() -> Iterator[Case]:
    for dtype in contenders.DTYPES:
        for causal in (False, True):
            kind = "causal" if causal else "full"
            make = partial(contenders.prefill, 2048, 64, dtype, causal=causal, value_dim=136)
            yield Case(
                "value dim 136, query dim 64", f"value dim 136, query dim 64, {kind}, {dtype}", "SDPA", make, 2.6
            )
    for dtype, least in (("fp32", 2.8), ("bf16", 15.0)):
        for keys in (4096, 16384, 32768):
            for dim in (64, 128):
                name = f"one query of 32/8 heads, {keys:,} keys, D {dim}, {dtype}"
                make = partial(contenders.decoding, keys, dim, dtype)
                yield Case(f"one query, {dtype}", name, "SDPA", partial(make, stream=False), least)
                if dtype == "fp32":
                    reading = partial(make, stream=True)
                    yield Case("one query, share of a stream read", name, "reading the same bytes", reading, 0.8)
    for dtype in contenders.DTYPES:
        for kind, least in (("full", 2.4), ("causal", 1.9), ("window", 2.4)):
            make = partial(contenders.flex, kind, dtype)
            yield Case(
                f"flex_attention, {kind}", f"{kind}, N 2,048, D 64, {dtype}", "compiled flex_attention", make, least
            )


def _statistics() -> Iterator[Case]:
    rows = [(kind, length, dim, "fp32") for length in (512, 2048) for dim in (64, 128) for kind in ("full", "causal")]
    rows += [("window", 2048, 64, "fp32"), ("full", 8192, 64, "fp32"), ("full", 2048, 64, "bf16")]
    for kind, length, dim, dtype in rows:
        line, most = ("statistics, N 512", 1.2) if length == 512 else ("statistics, N >= 2,048", 1.15)
        name = f"statistics, {kind}, N {length:,}, D {dim}, {dtype}"
        make = partial(contenders.statistics, kind, length, dim, dtype)
        yield Case(line, name, "the same without", make, most=most, timed=KERNEL)
    for length, most in ((128, 1.3), (512, 1.1), (2048, 0.9)):
        for dtype in contenders.DTYPES:
            for causal in (False, True):
                name = f"mh.statistics, {'causal' if causal else 'full'}, N {length:,}, D 64, {dtype}"
                make = partial(contenders.statistics_alone, length, dtype, causal=causal)
                yield Case(f"mh.statistics, N {length:,}", name, "mh.attention", make, most=most)
    for length in (512, 2048):
        name = f"statistics, ever-rising scores, causal, N {length:,}, D 64, fp32"
        make = partial(contenders.statistics, "causal", length, 64, "fp32", rising=True)
        # Reported without a target: the worst case of an argmax.
        yield Case("statistics, ever-rising scores", name, "the same without", make, most=float("inf"), timed=KERNEL)
    for kind, length, dim in (
        ("full", 512, 64),
        ("full", 2048, 64),
        ("full", 2048, 128),
        ("full", 8192, 64),
        ("causal", 2048, 64),
        ("window", 2048, 64),
        ("documents", 2048, 64),
    ):
        name = f"received and 64 x 64 map, {kind}, N {length:,}, D {dim}, fp32"
        make = partial(contenders.received, kind, length, dim)
        yield Case("received and 64 x 64 map", name, "a forward pass", make, most=0.65, timed=KERNEL)


def _backward() -> Iterator[Case]:
    sizes = ((512, 64), (512, 128), (2048, 64), (2048, 128), (8192, 64))
    for length, dim in sizes:
        name = f"N {length:,}, D {dim}, fp32"
        full = partial(contenders.backward, "full", "SDPA", length, dim, "fp32")
        yield Case(f"backward, full, D {dim}", f"backward, full, {name}", "SDPA", full, 1.25 if dim == 64 else 1.05)
        line, least = ("backward, causal, N 512", 2.0) if length == 512 else ("backward, causal, N >= 2,048", 1.3)
        causal = partial(contenders.backward, "causal", "SDPA", length, dim, "fp32")
        yield Case(line, f"backward, causal, {name}", "SDPA", causal, least)
    for kind, name, rival, least in (
        ("window", "window 256", "dense bool", 7.0),
        ("window", "window 256", "blocks", 2.3),
        ("documents", "8 documents", "dense bool", 5.5),
        ("documents", "8 documents", "loop", 1.05),
        ("documents and causal", "8 documents and causal", "dense bool", 8.5),
        ("documents and causal", "8 documents and causal", "loop", 1.7),
    ):
        shown = {"dense bool": DENSE, "loop": LOOP, "blocks": "SDPA, a call of blocks"}[rival]
        for dim in (64, 128):
            make = partial(contenders.backward, kind, rival, 2048, dim, "fp32")
            whole = f"backward, {name}, N 2,048, D {dim}, fp32"
            yield Case(f"backward, {name}, against {rival}", whole, shown, make, least)
    for length in (512, 2048):
        for dim in (64, 128):
            for kind in ("full", "causal"):
                name = f"backward, {kind}, N {length:,}, D {dim}, bf16"
                make = partial(contenders.backward, kind, "SDPA", length, dim, "bf16")
                yield Case("backward, bf16", name, "SDPA", make, 8.0)
                over = partial(contenders.backward_bf16_over_fp32, kind, length, dim)
                yield Case("backward, bf16, over fp32", name, "ours in fp32", over, most=1.1)


def _whole() -> Iterator[Case]:
    for grad, most in ((False, 2.0), (True, 3.0)):
        name = "with grad" if grad else "without grad"
        make = partial(contenders.overhead, grad=grad)
        yield Case(f"overhead of a call, {name}", f"overhead, tiny call, {name}", "SDPA", make, most=most)
    make = partial(watching.smollm2, 2048)
    name = "SmolLM2-135M-Instruct, 2,048 tokens, watched"
    yield Case("a whole model, watched", name, "unwatched, SDPA", make, most=0.95, timed="the model")


def _accuracies() -> Iterator[Accuracy]:
    for what in ("output", "logsumexp", "entropy"):
        for causal in (False, True):
            for length, dim in ((2048, 128), (8192, 64)):
                name = f"{what}, {'causal' if causal else 'full'}, N {length:,}, D {dim}, fp32: largest difference"
                find = partial(accuracy.largest_difference, what, length, dim, causal=causal)
                yield Accuracy(name, 2e-5, find)
    for causal in (False, True):
        kind = "causal" if causal else "full"
        find = partial(accuracy.misplaced_keys, 8192, 64, causal=causal)
        yield Accuracy(f"largest key, {kind}, N 8,192, D 64, fp32: queries with another one, without ties", 0, find)
        for dim in (64, 128):
            # 1 % of tolerance, because both are the rounding error of nearly the same output.
            find = partial(accuracy.rms_over_sdpa, 2048, dim, causal=causal)
            yield Accuracy(f"output, {kind}, N 2,048, D {dim}, bf16: RMS error over SDPA's", 1.01, find)


CASES: list[Case | Accuracy] = [
    *_prefills(),
    *_few_queries(),
    *_products(),
    *_masked(),
    *_others(),
    *_statistics(),
    *_backward(),
    *_whole(),
    *_accuracies(),
]
