"""Compare attention on a GPU with PyTorch's fused attention: python -m benchmarks.cuda."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import multihead as mh
from benchmarks.machine import commit
from benchmarks.measure import paired
from benchmarks.pages import PAGES, RESULTS, replace_table, table, today, write_page
from multihead import masks
from multihead.masks.positions import TilePositions

HEADS, PAIRS = 16, 15
TOLERANCE = 2e-2  # of bfloat16 outputs of about 1
DOCUMENTS = (1024,) * 8


@dataclass(frozen=True)
class Case:
    """A call and its rival.

    Attributes:
        name: of the mask.
        mask: of our call.
        rival: how PyTorch's attention is called: "full", "causal", or with a "dense" mask of booleans.
        batch, queries, keys, dim: sizes.
        kv_heads: of 16 heads.
        trains: whether a step has a backward pass.
    """

    name: str
    mask: masks.Mask
    rival: str
    batch: int
    queries: int
    keys: int
    dim: int = 128
    kv_heads: int = HEADS
    trains: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table that say what the case is."""
        size = (
            f"{self.batch} x {self.queries} x {self.keys}"
            if self.queries != self.keys
            else f"{self.batch} x {self.keys}"
        )
        heads = f"{HEADS}/{self.kv_heads}, D {self.dim}"
        against = "SDPA, dense mask" if self.rival == "dense" else "SDPA"
        return self.name + (", training" if self.trains else ""), size, heads, against


def spread(batch: int, length: int) -> masks.Lengths:
    """Lengths from 10 to 90 % of a length."""
    return masks.Lengths([round(length * (0.1 + 0.8 * n / (batch - 1))) for n in range(batch)])


CASES = [
    *(Case("full", masks.Full(), "full", 16384 // n, n, n, dim) for n in (512, 2048, 8192) for dim in (64, 128)),
    *(Case("causal", masks.Causal(), "causal", 16384 // n, n, n, dim) for n in (512, 2048, 8192) for dim in (64, 128)),
    Case("causal, 4 kv heads", masks.Causal(), "causal", 4, 4096, 4096, kv_heads=4),
    Case("window of 256, causal", masks.Causal() & masks.Window(256), "dense", 2, 8192, 8192),
    Case("8 documents, causal", masks.Causal() & masks.Documents(DOCUMENTS), "dense", 2, 8192, 8192),
    Case("padded, 10 to 90 %", spread(8, 2048), "dense", 8, 2048, 2048),
    Case("one query", masks.Full(), "full", 16, 1, 8192, kv_heads=4),
    Case("a small call", masks.Causal(), "causal", 1, 64, 64, 64),
    Case("full", masks.Full(), "full", 4, 4096, 4096, trains=True),
    Case("causal", masks.Causal(), "causal", 4, 4096, 4096, trains=True),
    Case("window of 256, causal", masks.Causal() & masks.Window(256), "dense", 2, 8192, 8192, trains=True),
    Case("8 documents, causal", masks.Causal() & masks.Documents(DOCUMENTS), "dense", 2, 8192, 8192, trains=True),
]


@click.command()
@click.option("--only", default="", help="Run the cases whose name contains this text.")
@click.option(
    "--save/--no-save", default=True, help="Write the table of a whole run to benchmarks/results/ and docs/measured.md."
)
def main(only: str, save: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Time attention in bfloat16 on a GPU against scaled_dot_product_attention (SDPA), alternately, after a check."""
    if not torch.cuda.is_available():
        raise click.ClickException("There is no CUDA device here.")
    torch.manual_seed(0)
    chosen = [case for case in CASES if only in case.name]
    rows: list[tuple[str, ...]] = []
    for case in chosen:
        rows.append((*case.cells(), *measured(case)))
        click.echo("  ".join(rows[-1]), err=True)
    if chosen == CASES:
        rows.append(("default statistics, causal", "4 x 4096", "16/16, D 128", "our forward pass", *observed()))
    device = torch.cuda.get_device_properties(0)
    lines = [
        f"# Attention on a GPU, bf16, {today()}",
        "",
        f"{device.name}, torch {torch.__version__}, commit {commit()}.",
    ]
    lines += ["Medians of paired ratios from interleaved runs.", "", *table(HEAD, rows)]
    click.echo("\n".join(lines))
    if save and chosen == CASES:
        write_page(RESULTS, "cuda", lines)
        of_docs = [(", ".join(row[:3]), row[3], row[4]) for row in rows]
        of_docs.append(("measured on", f"{device.name}, torch {torch.__version__}", ""))
        for path in PAGES:
            path.write_text(replace_table(path.read_text(encoding="utf-8"), MARK, of_docs), encoding="utf-8")


MARK = "\n<!-- made by make cuda -->"  # after its table in docs/measured.md
HEAD = ("mask", "batch x length", "heads", "against", "times faster (quartiles)", "largest error")


def measured(case: Case) -> tuple[str, str]:
    """Return how many times faster a case is than its rival, and its largest error."""
    sizes = ((HEADS, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys))
    q, k, v = (
        torch.randn(case.batch, *size, case.dim, device="cuda", dtype=torch.bfloat16, requires_grad=case.trains)
        for size in sizes
    )
    seen = case.mask.tile(positions(case)) if case.rival == "dense" else None
    grouped = case.kv_heads < HEADS

    def ours() -> Tensor:
        return mh.attention(q, k, v, mask=case.mask)

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=case.rival == "causal", enable_gqa=grouped
        )

    error = checked(case, ours(), theirs(), (q, k, v))
    return str(paired(finished(ours, case), finished(theirs, case), pairs=PAIRS)), f"{error:.1e}"


def positions(case: Case) -> TilePositions:
    """Return the positions of all queries and keys on the GPU."""
    return TilePositions.from_sizes(case.queries, case.keys, query_start=0, device=torch.device("cuda"))


def finished(run: Callable[[], Tensor], case: Case) -> Callable[[], None]:
    """Let a function wait until the GPU has computed its result, and its gradients in training."""

    def step() -> None:
        output = run()
        if case.trains:
            output.sum().backward()
        torch.cuda.synchronize()

    return step


def checked(case: Case, ours: Tensor, theirs: Tensor, given: tuple[Tensor, ...]) -> float:
    """Compare both outputs of the last sample and head with float64."""
    q, k, v = (each[-1, -1].detach().double() for each in given)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    seen = case.mask.tile(positions(case)).expand(case.batch, -1, -1, -1)[-1, -1]
    weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1).nan_to_num_(0.0)
    rows = seen.any(-1)
    exact = (weights @ v)[rows]
    errors = [float((each[-1, -1].detach()[rows].double() - exact).abs().max()) for each in (ours, theirs)]
    if not max(errors) <= TOLERANCE:
        raise click.ClickException(f"{case.name}: ours is {errors[0]:.1e} off, PyTorch's attention {errors[1]:.1e}.")
    return errors[0]


def observed() -> tuple[str, str]:
    """Return how many times longer the default statistics of a call take than its output, with the error of entropy."""
    q, k, v = (torch.randn(4, HEADS, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    plain = Case("causal", masks.Causal(), "causal", 4, 4096, 4096)
    ratio = paired(
        finished(lambda: mh.attention(q, k, v, mask=masks.Causal()), plain),
        finished(lambda: mh.statistics(q, k, mask=masks.Causal())["entropy"], plain),
        pairs=3,
    )
    weights = (
        (q[-1, -1].double() @ k[-1, -1].double().mT * 128**-0.5)
        .masked_fill_(torch.ones(4096, 4096, dtype=torch.bool, device="cuda").triu_(1), -torch.inf)
        .softmax(-1)
    )
    exact = -torch.xlogy(weights, weights).sum(-1)
    error = float((mh.statistics(q[-1:, -1:], k[-1:, -1:], mask=masks.Causal())["entropy"][0, 0] - exact).abs().max())
    return f"takes {ratio.median:.0f} times as long", f"{error:.1e}"


if __name__ == "__main__":
    main()
