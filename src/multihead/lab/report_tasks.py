"""Tell what training brought: which number of heads won, and what each head came to look at."""

from __future__ import annotations

from collections.abc import Sequence

from multihead.lab.charts import Curve, chart
from multihead.lab.matching import Spread
from multihead.lab.run import Answers
from multihead.lab.tasks import Induction, Lookup, task_named
from multihead.lab.text import Chapter, Phrases, Table, percent
from multihead.lab.training import REACHED, TESTED, Experiment, Training

__all__ = ["told_copies", "told_experiment"]

HALF = 0.5  # of a head's weight: then it looks at one thing more than at all others together


def told_experiment(experiment: Experiment, answers: Answers, phrases: Phrases) -> Chapter:
    """Tell one task: the verdict, the numbers, the course of training, and the heads."""
    say, name = phrases.say, experiment.task
    task = task_named(name)
    facts = task.facts if isinstance(task, Lookup) else 0
    sizes = phrases.listed((f"{size:,}" for size in sorted({each.parameters for each in experiment.trainings})), "or")
    settings = say(
        "settings",
        parameters=sizes,
        steps=experiment.steps,
        batch=experiment.batch_size,
        rate=f"{experiment.learning_rate:g}",
        seeds=answers.seeds,
        chance=percent(experiment.chance),
    )
    told = _told_induction if isinstance(task, Induction) else _told_lookup
    looks, tables = told(experiment, phrases)
    return Chapter(
        name=name,
        title=say(f"{name}.title"),
        answer=_verdict(experiment, phrases),
        text=(say(f"{name}.task", facts=facts), settings),
        tables=(_results(experiment, phrases),),
        chart=(_course(experiment, phrases), say("course.caption")),
        task=name,
        looks=looks,
        looks_tables=tables,
    )


def told_copies(copies: Experiment, experiments: Sequence[Experiment], phrases: Phrases) -> Chapter:
    """Compare two heads that start as copies with two that do not."""
    say = phrases.say
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
            (say(f"start.{name}"), phrases.number(before, 2), phrases.number(after, 2), phrases.spread(right[name]))
        )
    apart = max(each.apart_after for each in copies.trainings)
    shares = {name: phrases.spread(share) for name, share in right.items()}
    key = "copies.answer" if apart == 0 else "copies.answer other"
    columns = (say("start.column"), say("apart before"), say("apart after"), say("right"))
    return Chapter(
        "copies",
        say("copies.title"),
        say(key, apart=f"{apart:.2g}", copied=shares["copied"], drawn=shares.get("drawn", "–")),
        (say("copies.text"), *([say("copies.equal")] if apart == 0 else [])),
        (Table(say("copies.caption"), columns, tuple(rows)),),
    )


def _verdict(experiment: Experiment, phrases: Phrases) -> str:
    """Name the best number of heads, and those that differ from it by more than the spread."""
    say, verdict = phrases.say, experiment.verdict()
    found = {summary.num_heads: summary.right for summary in experiment.summaries()}
    best, share = phrases.heads(verdict.best), phrases.spread(found[verdict.best])
    if len(found) == 1:
        return say("verdict.alone", best=best, share=share)

    def listed(heads: Sequence[int]) -> str:
        return phrases.listed(
            say("with share", heads=phrases.heads(each), share=phrases.spread(found[each])) for each in heads
        )

    single = _of_one_head(experiment, phrases)
    if not verdict.behind:
        worst = min(found, key=lambda each: found[each].mean)
        low = phrases.spread(found[worst])
        level = say("verdict.level all", best=best, share=share, worst=phrases.heads(worst), low=low)
        return phrases.joined([single, level])
    sentences = [single, say("verdict.apart", best=best, share=share, behind=listed(verdict.behind))]
    if verdict.level:
        sentences.append(say("verdict.level some", level=listed(verdict.level)))
    return phrases.joined(sentences)


def _of_one_head(experiment: Experiment, phrases: Phrases) -> str:
    """Answer the title: does one head do as well as the best?"""
    if 1 not in experiment.heads:
        return ""
    behind = 1 in experiment.verdict().behind
    return phrases.say(f"{experiment.task}.{'behind' if behind else 'level'}")


def _results(experiment: Experiment, phrases: Phrases) -> Table:
    say = phrases.say
    rows = tuple(
        (
            phrases.heads(summary.num_heads),
            phrases.spread(summary.right),
            percent(min(summary.each)),
            percent(max(summary.each)),
            say("seeds of", n=summary.learned, of=len(summary.each)),
            say("never") if summary.learned_at is None else phrases.number(summary.learned_at, 0),
        )
        for summary in experiment.summaries()
    )
    columns = tuple(say(key) for key in ("heads column", "right", "worst seed", "best seed", "learned", "learned at"))
    return Table(say("result.caption", tested=TESTED), columns, rows)


def _course(experiment: Experiment, phrases: Phrases) -> str:
    """Draw the share of right answers over the steps, a curve a number of heads."""
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
        label=phrases.say("course.label"),
        x_label=phrases.say("steps axis"),
        x_ticks=ticks,
        level=(experiment.chance, phrases.say("guess")),
    )


def _told_lookup(experiment: Experiment, phrases: Phrases) -> tuple[tuple[str, ...], tuple[Table, ...]]:
    """Count the heads that attend to each name asked for, and the seeds in which two heads share two names."""
    say, two = phrases.say, experiment.task == "two"
    asked = ("first asked", "second asked") if two else ("first asked",)
    rows, items = [], []
    for num_heads in experiment.heads:
        trainings = experiment.of(num_heads)
        counts = [[_heads_on(training, name) for training in trainings] for name in asked]
        neither = [num_heads - sum(each) for each in zip(*counts, strict=True)]
        entropy = [_mean(training, "entropy") for training in trainings]
        cells = [phrases.number(Spread.of([float(value) for value in column])) for column in (*counts, neither)]
        rows.append((phrases.heads(num_heads), *cells, phrases.number(Spread.of(entropy), 2)))
        shared = sum(all(each) for each in zip(*counts, strict=True))
        if two and num_heads > 1:
            items.append(say("looks.two item", heads=phrases.heads(num_heads), yes=shared, of=len(trainings)))
    named = ("on first", "on second", "on neither") if two else ("on asked", "not on it")
    columns = (say("heads column"), *(say(key) for key in named), say("entropy"))
    sentences = (say("looks.two", list=phrases.listed(items)),) if items else ()
    return sentences, (Table(say("looks.caption lookup"), columns, tuple(rows)),)


def _told_induction(experiment: Experiment, phrases: Phrases) -> tuple[tuple[str, ...], tuple[Table, ...]]:
    """Name the strongest head of each layer at what that layer is there for."""
    say, rows = phrases.say, []
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
    columns = (say("heads column"), say("strongest previous"), say("strongest induction"), say("many induction"))
    able = [training for training in experiment.trainings if training.right >= REACHED]
    without = sum(not _has_induction_head(training) for training in able)
    sentences = (say("looks.induction count", of=len(able), without=without),) if without else ()
    return sentences, (Table(say("looks.caption induction"), columns, tuple(rows)),)


def _has_induction_head(training: Training) -> bool:
    return any(look.measures["induction"] > HALF for look in training.moments[-1].looks if look.layer == 1)


def _heads_on(training: Training, name: str) -> int:
    return sum(look.measures[name] > HALF for look in training.moments[-1].looks)


def _mean(training: Training, name: str) -> float:
    looks = training.moments[-1].looks
    return sum(look.measures[name] for look in looks) / len(looks)
