"""Build the chapters on training: which number of heads is best, and what each head attends to."""

from __future__ import annotations

from collections.abc import Sequence

from multihead.lab.charts import Bar, Curve, bars, chart
from multihead.lab.matching import Spread
from multihead.lab.run import Answers
from multihead.lab.tasks import Induction, Lookup, task_named
from multihead.lab.text import Chapter, Phrases, Table, percent
from multihead.lab.training import REACHED, TESTED, Experiment, Training

__all__ = ["copies_chapter", "experiment_chapter"]

HALF = 0.5  # share of a head's weight above which it attends to one thing more than to all others together


def experiment_chapter(experiment: Experiment, answers: Answers, phrases: Phrases) -> Chapter:
    """Build the chapter of one task: the verdict, the numbers, the course of training, and the heads."""
    translate, name = phrases.translate, experiment.task
    task = task_named(name)
    facts = task.facts if isinstance(task, Lookup) else 0
    sizes = phrases.listed((f"{size:,}" for size in sorted({each.parameters for each in experiment.trainings})), "or")
    settings = translate(
        "settings",
        parameters=sizes,
        steps=experiment.steps,
        batch=experiment.batch_size,
        rate=f"{experiment.learning_rate:g}",
        seeds=phrases.seeds(answers.seeds),
        chance=percent(experiment.chance),
    )
    describe_heads = _induction_heads if isinstance(task, Induction) else _lookup_heads
    looks, tables = describe_heads(experiment, phrases)
    return Chapter(
        name=name,
        title=translate(f"{name}.title"),
        answer=_verdict(experiment, phrases),
        text=(translate(f"{name}.task", facts=facts), settings),
        tables=(_results(experiment, phrases),),
        chart=(_course(experiment, phrases), translate("course.caption")),
        task=name,
        looks=looks,
        looks_tables=tables,
    )


def copies_chapter(copies: Experiment, experiments: Sequence[Experiment], phrases: Phrases) -> Chapter:
    """Build the chapter that compares two heads that start as copies with two that do not."""
    translate = phrases.translate
    drawn = [each for one in experiments if one.task == copies.task for each in one.of(2)]
    groups = [("drawn", drawn), ("copied", list(copies.trainings))]
    rows, right = [], {}
    for name, trainings in groups:
        if not trainings:
            continue
        right[name] = Spread.of([each.right for each in trainings])
        before, after = (
            Spread.of([getattr(each, side) for each in trainings]) for side in ("apart_before", "apart_after")
        )
        rows.append(
            (
                translate(f"start.{name}"),
                phrases.number(before, 2),
                phrases.number(after, 2),
                phrases.spread(right[name]),
            )
        )
    drawn_bars = [
        (translate(f"start.{name}"), [Bar(translate("bar.right"), "c1", share.mean, share.deviation or 0.0)])
        for name, share in right.items()
    ]
    apart = max(each.apart_after for each in copies.trainings)
    shares = {name: phrases.spread(share) for name, share in right.items()}
    key = "copies.answer" if apart == 0 else "copies.answer other"
    columns = (translate("start.column"), translate("apart before"), translate("apart after"), translate("right"))
    return Chapter(
        "copies",
        translate("copies.title"),
        translate(key, apart=f"{apart:.2g}", copied=shares["copied"], drawn=shares.get("drawn", "–")),
        (translate("copies.text"), *([translate("copies.equal")] if apart == 0 else [])),
        (Table(translate("copies.caption"), columns, tuple(rows)),),
        (bars(drawn_bars, label=translate("copies.label")), translate("copies.label")),
    )


def _verdict(experiment: Experiment, phrases: Phrases) -> str:
    """Name the best number of heads, and those that are worse by more than the spread."""
    translate, verdict = phrases.translate, experiment.verdict()
    found = {summary.num_heads: summary.right for summary in experiment.summaries()}
    best, share = phrases.heads(verdict.best), phrases.spread(found[verdict.best])
    if len(found) == 1:
        return translate("verdict.alone", best=best, share=share)
    if any(each.deviation is None for each in found.values()):
        shares = [
            translate("with share", heads=phrases.heads(each), share=phrases.spread(found[each])) for each in found
        ]
        return translate("verdict.one seed", list=phrases.listed(shares))

    def listed(heads: Sequence[int]) -> str:
        return phrases.listed(
            translate("with share", heads=phrases.heads(each), share=phrases.spread(found[each])) for each in heads
        )

    single = _of_one_head(experiment, phrases)
    if not verdict.worse:
        worst = min(found, key=lambda each: found[each].mean)
        low = phrases.spread(found[worst])
        if percent(found[worst].mean) == percent(found[verdict.best].mean):
            return phrases.joined([single, translate("verdict.tie", list=listed(tuple(found)))])
        level = translate("verdict.level all", best=best, share=share, worst=phrases.heads(worst), low=low)
        return phrases.joined([single, level])
    sentences = [single, translate("verdict.apart", best=best, share=share, worse=listed(verdict.worse))]
    if verdict.level:
        sentences.append(translate("verdict.level some", level=listed(verdict.level)))
    return phrases.joined(sentences)


def _of_one_head(experiment: Experiment, phrases: Phrases) -> str:
    """Answer the title: does one head do as well as the best?"""
    if 1 not in experiment.heads:
        return ""
    worse = 1 in experiment.verdict().worse
    return phrases.translate(f"{experiment.task}.{'worse' if worse else 'level'}")


def _results(experiment: Experiment, phrases: Phrases) -> Table:
    translate = phrases.translate
    rows = tuple(
        (
            phrases.heads(summary.num_heads),
            phrases.spread(summary.right),
            percent(min(summary.each)),
            percent(max(summary.each)),
            translate("seeds of", n=summary.learned, of=len(summary.each)),
            translate("never") if summary.learned_at is None else phrases.number(summary.learned_at, 0),
        )
        for summary in experiment.summaries()
    )
    columns = tuple(
        translate(key) for key in ("heads column", "right", "worst seed", "best seed", "learned", "learned at")
    )
    return Table(translate("result.caption", tested=TESTED), columns, rows)


def _course(experiment: Experiment, phrases: Phrases) -> str:
    """Draw the share of correct answers over the steps, one curve per number of heads."""
    curves = []
    for place, num_heads in enumerate(experiment.heads):
        courses = [[moment.right for moment in each.moments] for each in experiment.of(num_heads)]
        points = list(zip(*courses, strict=True))
        curves.append(
            Curve(
                phrases.heads(num_heads),
                f"c{place % 4}",
                [moment.step for moment in experiment.of(num_heads)[0].moments],
                [sum(point) / len(point) for point in points],
                [min(point) for point in points],
                [max(point) for point in points],
            )
        )
    ticks = sorted({round(experiment.steps * part / 4) for part in range(5)})
    return chart(
        curves,
        label=phrases.translate("course.label"),
        x_label=phrases.translate("steps axis"),
        x_ticks=ticks,
        level=(experiment.chance, phrases.translate("guess")),
    )


def _lookup_heads(experiment: Experiment, phrases: Phrases) -> tuple[tuple[str, ...], tuple[Table, ...]]:
    """Count the heads that attend to each name of the question, and the seeds in which two heads share two names."""
    translate, two = phrases.translate, experiment.task == "two"
    measures = ("first lookup", "second lookup") if two else ("first lookup",)
    rows, items = [], []
    for num_heads in experiment.heads:
        trainings = experiment.of(num_heads)
        counts = [[_heads_on(training, name) for training in trainings] for name in measures]
        neither = [num_heads - sum(each) for each in zip(*counts, strict=True)]
        entropy = [_mean(training, "entropy") for training in trainings]
        cells = [phrases.number(Spread.of([float(value) for value in column])) for column in (*counts, neither)]
        rows.append((phrases.heads(num_heads), *cells, phrases.number(Spread.of(entropy), 2)))
        shared = sum(all(each) for each in zip(*counts, strict=True))
        if two and num_heads > 1:
            items.append(translate("looks.two item", heads=phrases.heads(num_heads), yes=shared, of=len(trainings)))
    named = ("on first", "on second", "on neither") if two else ("on lookup", "not on it")
    columns = (translate("heads column"), *(translate(key) for key in named), translate("entropy"))
    sentences = (translate("looks.two", list=phrases.listed(items)),) if items else ()
    return sentences, (Table(translate("looks.caption lookup"), columns, tuple(rows)),)


def _induction_heads(experiment: Experiment, phrases: Phrases) -> tuple[tuple[str, ...], tuple[Table, ...]]:
    """Measure the strongest previous-token head of layer 0 and the strongest induction head of layer 1."""
    translate, rows = phrases.translate, []
    for num_heads in experiment.heads:
        ends = [training.moments[-1].looks for training in experiment.of(num_heads)]
        previous = [max(look.measures["previous"] for look in looks if look.layer == 0) for looks in ends]
        found = [[look.measures["induction"] for look in looks if look.layer == 1] for looks in ends]
        many = [float(sum(share > HALF for share in shares)) for shares in found]
        rows.append(
            (
                phrases.heads(num_heads),
                phrases.spread(Spread.of(previous)),
                phrases.spread(Spread.of([max(shares) for shares in found])),
                phrases.number(Spread.of(many)),
            )
        )
    columns = (
        translate("heads column"),
        translate("strongest previous"),
        translate("strongest induction"),
        translate("many induction"),
    )
    able = [training for training in experiment.trainings if training.right >= REACHED]
    without = sum(not _has_induction_head(training) for training in able)
    sentences = (translate("looks.induction count", of=len(able), without=without),) if without else ()
    return sentences, (Table(translate("looks.caption induction"), columns, tuple(rows)),)


def _has_induction_head(training: Training) -> bool:
    return any(look.measures["induction"] > HALF for look in training.moments[-1].looks if look.layer == 1)


def _heads_on(training: Training, name: str) -> int:
    return sum(look.measures[name] > HALF for look in training.moments[-1].looks)


def _mean(training: Training, name: str) -> float:
    looks = training.moments[-1].looks
    return sum(look.measures[name] for look in looks) / len(looks)
