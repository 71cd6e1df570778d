"""Switch every head of SmolLM2 off, and compare with estimates by gradient: python -m benchmarks.important_heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, stdev
from typing import Any

import click
import torch
from torch import Tensor

import multihead as mh
from benchmarks.heads_off import MODEL, Head, draw_heads
from benchmarks.machine import machine_line
from benchmarks.pages import ACCENT, GREY, INK, RESULTS, ROOT, picture, table, today, write_page
from benchmarks.resume import JOURNALS, measure_missing, read_rows
from multihead.interventions.predictions import token_losses
from multihead.models.loading import load
from multihead.observation.textbook import (
    DEFAULT_LENGTH,
    DEFAULT_TIMES,
    repeated_tokens,
    start_token_id,
    word_token_ids,
)

TOKENS = 128
TEXTS, BY_MEAN = 20, 8  # texts of the help whose effects are measured by zero, and of these by the mean
OTHERS, REFERENCE = 8, 8  # further texts: on which heads are switched off together, and which make the means
REPEATS = 4  # texts of random tokens that repeat, and pairs of them
LENGTH, TIMES = DEFAULT_LENGTH, DEFAULT_TIMES
PAIRS_SEED = 1000
SIZES, DRAWS = (1, 2, 4, 8, 16, 32), 10
EARLY = 5  # layers
LISTED, COMPARED = 6, 10  # first heads that a table names, and that are compared
INDUCTION: tuple[Head, ...] = ((18, 6), (17, 4), (17, 3))  # the strongest, see docs/heads-off.md
JOURNAL = JOURNALS / "important-heads.jsonl"
PICTURE = ROOT / "docs" / "pictures" / "important-heads.svg"
BLUE = "#1F6FB2"

RANKS = {"exact": "exact effect", "gradient": "estimate by gradient", "sensitivity": "sensitivity"}

Job = tuple[str, int]

EXPLAINED = (
    "SmolLM2-135M-Instruct (4-bit weights, computed in float32) reads texts of {tokens} tokens of Python's help "
    "(pydoc_data.topics, sorted by name). The effects are measured on the first {texts}, and by the mean on the first "
    "{by_mean}; on the next {others} heads are switched off together; and the mean outputs on the {reference} after "
    "these replace a head by the mean. An interrupted run has fewer texts: each table says how many."
)
CORRELATED = (
    "Spearman's correlation over all heads with the exact effects: of the means over texts, and of each text alone "
    "(mean ± standard deviation, smallest to largest). The sensitivity is compared with the size of the exact effect. "
    "Shared is how many of the first {compared} heads are the same. The last columns are the sum of the sizes of the "
    "estimates divided by that of the exact effects, of the means over texts, in the first {early} layers and in the "
    "others."
)
TOGETHER = (
    "Nats per token that are added without the first heads of each rank, on texts that made no rank (texts: {others}; "
    "those that made the ranks: {texts}). Each of the {draws} random draws has as many heads of the same layers as the "
    "rank by exact effect, none of them among these where the layer has enough others; the mean of the draws and their "
    "standard deviation."
)
REPEATED = (
    "A text is a start token and {times} times the same {length} random tokens; the effect is that on the mean loss of "
    "runs 2 and 3 without the first token of run 2 (texts: {texts}). A pair is two such runs, and the same with other "
    "tokens in run 1, so that nothing repeats; all tokens of one head are patched at once, clean into corrupted. The "
    "loss of run 2 without its first token is {clean:.2f} in clean texts and {corrupted:.2f} in corrupted ones (pairs: "
    "{pairs})."
)


@dataclass(frozen=True)
class Row:
    """What was measured on one text.

    Attributes:
        kind: what was measured, see `Study.jobs`.
        text: number of the text.
        baseline: the loss with all heads, nats per token.
        values: name -> (layers, heads), or the effects of heads that are switched off together, (draws, sizes).
        note: empty: every row is a result.
    """

    kind: str
    text: int
    baseline: float
    values: dict[str, list[list[float]]]
    note: str = ""

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Row:
        """Return a row of a journal."""
        return Row(**written)


@dataclass
class Study:
    """The model, its texts, and what was measured so far.

    Attributes:
        name: name of the model.
        most: most texts of each kind; None for all.
        kept: the rows.
    """

    name: str = MODEL
    most: int | None = None
    kept: dict[Job, Row] = field(default_factory=dict)

    @cached_property
    def loaded(self) -> Any:
        """The model with its tokenizer, in float32."""
        return load(self.name, head="language", dtype="float32")

    @cached_property
    def texts(self) -> list[Tensor]:
        """The texts of the help that are long enough, by name: (1, tokens) each."""
        ids = (self.loaded.tokenizer(topics[name])["input_ids"] for name in sorted(topics))
        return [torch.tensor([each[:TOKENS]]) for each in ids if len(each) >= TOKENS]

    @cached_property
    def means(self) -> Any:
        """The mean output of each head on texts that nothing is measured on."""
        first = TEXTS + OTHERS
        return mh.head_means(self.loaded.model, self.texts[first : first + REFERENCE])

    def repeats(self, seed: int, *, times: int, length: int) -> Tensor:
        """Return a text of a start token, if there is one, and random tokens that repeat: (1, tokens)."""
        words, start = word_token_ids(self.loaded.tokenizer), start_token_id(self.loaded.tokenizer)
        return repeated_tokens(words, start=start, draws=1, length=length, times=times, seed=seed)

    def number(self, texts: int) -> int:
        """Return how many of some texts are measured."""
        return texts if self.most is None else min(texts, self.most)

    @property
    def together(self) -> str:
        """The kind of the rows of heads that are switched off together."""
        return f"off together, ranks of {self.number(TEXTS)} texts"

    @property
    def jobs(self) -> list[Job]:
        """A job per kind of numbers and text."""
        numbers = {
            "gradient by zero": TEXTS,
            "gradient by mean": BY_MEAN,
            "exact by zero": TEXTS,
            "repeats": REPEATS,
            "patches": REPEATS,
            self.together: OTHERS,
            "exact by mean": BY_MEAN,
        }
        return [(kind, text) for kind, number in numbers.items() for text in range(self.number(number))]

    def run(self, journal: Path) -> None:
        """Measure what a journal does not have, and append it."""
        self.read(journal)
        jobs = {job: f"{job[0]}, text {job[1] + 1}" for job in self.jobs}
        measure_missing(jobs, self.measure, kept=self.kept, resume=True, journal=journal)

    def read(self, journal: Path) -> None:
        """Read the rows of a journal."""
        self.kept |= {(row.kind, row.text): row for row in read_rows(journal, Row.from_dict)}

    def measure(self, job: Job) -> Row:
        """Measure one text."""
        kind, text = job
        model = self.loaded.model
        if kind == "patches":
            return self._patched(job)
        if kind == self.together:
            return self._off_together(job)
        if kind == "repeats":
            ids = self.repeats(text, times=TIMES, length=LENGTH)
            found = mh.importance(model, [ids], repeated_loss(TIMES - 1))
        else:
            method, by = kind.split(" by ")
            reference = self.means if by == "mean" else None
            found = mh.importance(model, [self.texts[text]], by=by, method=method, reference=reference)  # type: ignore[arg-type]
        return Row(*job, float(found.baseline[0]), {"effects": found.effects.tolist()})

    def _patched(self, job: Job) -> Row:
        """Patch a text that repeats into one whose first run is of other tokens."""
        corrupted = self.repeats(PAIRS_SEED + job[1], times=1, length=2 * LENGTH)
        clean = corrupted.clone()
        clean[:, -2 * LENGTH : -LENGTH] = clean[:, -LENGTH:]
        found = mh.patch(self.loaded.model, [clean], [corrupted], repeated_loss(1))
        measured = {"changes": found.changes.tolist(), "gap": [found.clean.tolist(), found.corrupted.tolist()]}
        return Row(*job, float(found.clean[0]), measured)

    @torch.no_grad()
    def _off_together(self, job: Job) -> Row:
        """Switch the first heads of each rank off together, and random ones, on a text that made no rank."""
        ids, model, ranks = self.texts[TEXTS + job[1]], self.loaded.model, self.ranks
        mh.use(model)
        before = float(token_losses(model(ids).logits, ids).mean())

        def without(heads: Sequence[Head]) -> float:
            with mh.ablate(model, heads):
                return float(token_losses(model(ids).logits, ids).mean()) - before

        values = {name: [[without(heads[:size]) for size in SIZES]] for name, heads in ranks.items()}
        exact, heads = ranks["exact"], 1 + max(head for _, head in ranks["exact"])
        values["draws"] = [
            [without(draw_heads(exact[:size], exact[:size], heads, seed=seed)) for size in SIZES]
            for seed in range(DRAWS)
        ]
        return Row(*job, before, values)

    def numbers(self, kind: str, name: str = "effects") -> Tensor:
        """Return the numbers of the texts that were measured: (texts, layers, heads) float64."""
        rows = [self.kept[kind, text].values[name] for text in self.measured(kind)]
        return torch.tensor(rows, dtype=torch.float64)

    def measured(self, *kinds: str) -> list[int]:
        """Return the numbers of the texts on which each of some kinds was measured."""
        texts = (text for kind, text in self.jobs if kind == kinds[0])
        return [text for text in texts if all((kind, text) in self.kept for kind in kinds)]

    @property
    def ranks(self) -> dict[str, list[Head]]:
        """Name of a rank -> all heads, the first one first."""
        exact, estimates = self.numbers("exact by zero"), self.numbers("gradient by zero")
        scores = {"exact": exact.mean(0), "gradient": estimates.mean(0), "sensitivity": estimates.abs().mean(0)}
        return {name: ranked(each) for name, each in scores.items()}

    def page(self) -> list[str]:
        """Return the lines of the page with what was measured so far."""
        sizes = {"texts": TEXTS, "by_mean": BY_MEAN, "others": OTHERS, "reference": REFERENCE}
        explained = EXPLAINED.format(tokens=TOKENS, **sizes)
        lines = [f"# Every head off once, by gradient and together, {today()}", "", machine_line(), "", explained]
        together, repeats = self.numbers(self.together, "draws"), self.numbers("repeats")
        rows = [row for by in ("zero", "mean") for row in self._correlations(by)]
        if rows:
            head = (
                "estimate",
                "texts",
                "means over texts",
                "each text",
                "shared",
                f"size, first {EARLY} layers",
                "size, others",
            )
            lines += [
                "",
                "## Estimates by gradient",
                "",
                CORRELATED.format(early=EARLY, compared=COMPARED),
                "",
                *table(head, rows),
            ]
        if len(together):
            explained = TOGETHER.format(others=len(together), texts=self.number(TEXTS), draws=DRAWS)
            head = ("the first heads by", *map(str, SIZES))
            lines += ["", "## Heads off together", "", explained, "", *table(head, self._together_rows())]
        if len(repeats) and len(gaps := self.numbers("patches", "gap")):
            clean, corrupted = gaps.mean(0)[:, 0].tolist()
            values = {"texts": len(repeats), "times": TIMES, "length": LENGTH, "pairs": len(gaps)}
            explained = REPEATED.format(**values, clean=clean, corrupted=corrupted)
            effects, changes = repeats.mean(0), self.numbers("patches", "changes").mean(0)
            lists = [
                named("switched off: nats per token that are added", effects),
                named("patched: share of the gap that is recovered, %", 100 * changes / (clean - corrupted), digits=1),
            ]
            head = ("", f"the first {LISTED} heads", "places of " + ", ".join(map(name_of, INDUCTION)))
            lines += ["", "## Random tokens that repeat", "", explained, "", *table(head, lists)]
        return lines

    def _correlations(self, by: str) -> list[tuple[str, ...]]:
        """Return a row for the signed estimates and one for the sensitivities, of the texts that have both."""
        kinds = f"exact by {by}", f"gradient by {by}"
        if not (texts := self.measured(*kinds)):
            return []
        rows = ([self.kept[kind, text].values["effects"] for text in texts] for kind in kinds)
        exact, estimates = (torch.tensor(each, dtype=torch.float64) for each in rows)
        ratios = [estimates.mean(0)[of].abs().sum() / exact.mean(0)[of].abs().sum() for of in _early_and_others()]
        sizes = [f"{float(ratio):.2f}" for ratio in ratios]
        pairs = {
            "signed": (estimates.mean(0), exact.mean(0), estimates, exact),
            "sensitivity": (estimates.abs().mean(0), exact.mean(0).abs(), estimates.abs(), exact.abs()),
        }
        return [
            (
                f"{name}, by {by}",
                str(len(texts)),
                f"{spearman(mean, mean_exact):.2f}",
                spread([spearman(*each) for each in zip(of_texts, exact_of_texts, strict=True)]),
                str(len({*ranked(mean)[:COMPARED]} & {*ranked(mean_exact)[:COMPARED]})),
                *(sizes if name == "signed" else ("", "")),
            )
            for name, (mean, mean_exact, of_texts, exact_of_texts) in pairs.items()
        ]

    def _together_rows(self) -> list[tuple[str, ...]]:
        rows = [(name, *(f"{each:+.2f}" for each in self.cost(key).tolist())) for key, name in RANKS.items()]
        draws = self.numbers(self.together, "draws").mean(0)
        spreads = zip(draws.mean(0).tolist(), draws.std(0).tolist(), strict=True)
        return [*rows, ("at random", *(f"{mean:+.2f} ± {std:.2f}" for mean, std in spreads))]

    def cost(self, name: str) -> Tensor:
        """Return the loss that is added without the first heads of a rank, mean over texts and draws: (sizes,)."""
        return self.numbers(self.together, name).mean((0, 1))

    def draw_picture(self, target: Path) -> None:
        """Draw the loss that is added against the number of heads that are switched off."""
        draws = self.numbers(self.together, "draws").mean(0)
        with picture(target, 9, 4.2) as ax:
            for (key, name), colour in zip(RANKS.items(), (ACCENT, BLUE, INK), strict=True):
                ax.plot(SIZES, self.cost(key), color=colour, linewidth=1.6, marker="o", label=f"by {name}")
            label = f"at random, of the same layers (mean and range of {DRAWS} draws)"
            ax.plot(SIZES, draws.mean(0), color=GREY, linewidth=1.6, marker="o", label=label)
            ax.fill_between(SIZES, draws.amin(0), draws.amax(0), color=GREY, alpha=0.2, linewidth=0)
            ax.set_xscale("log", base=2)
            ax.set_xticks(SIZES)
            ax.xaxis.set_major_formatter("{x:.0f}")
            ax.set(xlabel="heads switched off together", ylabel="loss that is added (nats per token)")
            ax.spines[["top", "right"]].set_visible(False)
            ax.legend(frameon=False, loc="upper left", fontsize=10)


def repeated_loss(runs: int) -> mh.Measure:
    """Return the measure: the mean loss of the tokens of the last runs without the first, which nothing predicts."""

    def loss(output: Any, batch: Any) -> Tensor:
        return token_losses(output.logits, batch)[:, 1 - runs * LENGTH :].mean(1)

    return mh.Measure(loss, "repeated_loss", "nats", more_is_better=False)


def ranked(scores: Tensor) -> list[Head]:
    """Return the heads, the largest score first, of (layers, heads)."""
    return [divmod(index, scores.shape[1]) for index in scores.flatten().argsort(descending=True).tolist()]


def spearman(first: Tensor, second: Tensor) -> float:
    """Return Spearman's correlation of two tensors without ties.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0]))
    0.5
    """
    places = torch.stack([each.flatten().argsort().argsort() for each in (first, second)]).double()
    return round(float(places.corrcoef()[0, 1]), 6)


def spread(values: Sequence[float]) -> str:
    """Return the mean of some numbers with their standard deviation, smallest and largest."""
    deviation = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{deviation} ({min(values):.2f} to {max(values):.2f})"


def name_of(head: Head) -> str:
    """Return the name of a head in tables."""
    return f"L{head[0]} H{head[1]}"


def named(what: str, scores: Tensor, *, digits: int = 2) -> tuple[str, str, str]:
    """Return the row of a table: the heads with the largest scores, (layers, heads), and places of induction heads."""
    order = ranked(scores)
    first = ", ".join(f"{name_of(head)} {float(scores[head]):+.{digits}f}" for head in order[:LISTED])
    return what, first, ", ".join(str(1 + order.index(head)) if head in order else "none" for head in INDUCTION)


def _early_and_others() -> Iterable[slice]:
    return slice(EARLY), slice(EARLY, None)


@click.command()
@click.option("--texts", type=click.IntRange(1), default=None, help="At most so many texts of each kind.")
@click.option("--stored", is_flag=True, help="Measure nothing, and show what an interrupted run measured.")
@click.option(
    "--save/--no-save", default=True, help="Write the page in benchmarks/results/ and the picture of the docs."
)
def main(*, texts: int | None, stored: bool, save: bool) -> None:
    """Measure which heads of SmolLM2 matter, in every way; about an hour. An interrupted run continues."""
    torch.set_num_threads(1)
    study = Study(most=texts)
    if stored:
        study.read(JOURNAL)
    else:
        study.run(JOURNAL)
    lines = study.page()
    print("\n".join(lines))
    if save:
        write_page(RESULTS, "important-heads", lines)
        if len(study.numbers(study.together, "draws")):
            study.draw_picture(PICTURE)


if __name__ == "__main__":
    main()
