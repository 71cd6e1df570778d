"""Turn the results of the lab into chapters: questions, answers and tables made of the measured numbers."""

from __future__ import annotations

from collections.abc import Sequence

from multihead_lab.charts import Bar, Curve, bars, chart
from multihead_lab.matching import Match, Spread, Vectors
from multihead_lab.parameters import Parameter, Parameters
from multihead_lab.run import Answers
from multihead_lab.tasks import Induction, Lookup, task_named
from multihead_lab.text import Chapter, Phrases, Table, format_percent, format_rounding_error, format_shape
from multihead_lab.training import REACHED, TESTED, Experiment, Training

__all__ = ["build_chapters", "copies_chapter", "experiment_chapter"]


def build_chapters(answers: Answers, phrases: Phrases) -> tuple[Chapter, ...]:
    """Build the chapters in the order in which their questions arise."""
    chapters: list[Chapter] = []
    if answers.parameters is not None:
        found = answers.parameters
        chapters += [_count_chapter(found, phrases), _shapes_chapter(found, phrases)]
        chapters += [_outputs_chapter(found, phrases)] if found.pairs else []
        chapters.append(_reads_chapter(found, phrases))
    chapters += [experiment_chapter(experiment, answers, phrases) for experiment in answers.experiments]
    if answers.copies is not None:
        chapters.append(copies_chapter(answers.copies, answers.experiments, phrases))
    if answers.vectors is not None:
        chapters += [_matches_chapter(answers.vectors, phrases), _lengths_chapter(answers.vectors, phrases)]
    return tuple(chapters)


def _count_chapter(found: Parameters, phrases: Phrases) -> Chapter:
    """Build the chapter "Do more heads mean more parameters?"."""
    translate, counts = phrases.translate, found.counts
    first = counts[0]
    if all(count.packed == first.packed for count in counts):
        heads = phrases.listed((str(count.num_heads) for count in counts), "or")
        answer = translate("count.same", heads=heads, tensors=len(first.packed), total=f"{first.total:,}")
    else:
        totals = phrases.listed(f"{phrases.heads(count.num_heads)} {count.total:,}" for count in counts)
        answer = translate("count.differ", totals=totals)
    alike = all(set(count.torch) == set(count.packed) for count in counts)
    names = [parameter.name for parameter in first.packed]
    rows = [(name, *(_shape_of(count.packed, name) for count in counts)) for name in names]
    rows.append((translate("all together"), *(f"{count.total:,}" for count in counts)))
    columns = (translate("parameter"), *(phrases.heads(count.num_heads) for count in counts))
    text = (
        translate("count.text", embed_dim=found.embed_dim),
        translate("count.torch same" if alike else "count.torch differ"),
    )
    return Chapter(
        "count", translate("count.title"), answer, text, (Table(translate("count.caption"), columns, tuple(rows)),)
    )


def _shape_of(parameters: tuple[Parameter, ...], name: str) -> str:
    return next((format_shape(each.shape) for each in parameters if each.name == name), "")


def _shapes_chapter(found: Parameters, phrases: Phrases) -> Chapter:
    """Build the chapter on the shapes from input to output."""
    translate = phrases.translate
    heads = phrases.heads(found.shapes_of)
    sizes = {each.name: each.shape for each in found.shapes}
    rows = tuple(
        (each.name, each.code or translate("the input"), format_shape(each.shape), " ".join(each.axes))
        for each in found.shapes
    )
    columns = (translate("tensor"), translate("made by"), translate("shape"), translate("axes"))
    return Chapter(
        "shapes",
        translate("shapes.title"),
        translate("shapes.answer", heads=heads, scores=format_shape(sizes["scores"]), length=found.length),
        (translate("shapes.text", head_dim=sizes["q_heads"][-1], embed_dim=found.embed_dim),),
        (Table(translate("shapes.caption", heads=heads), columns, rows),),
    )


def _outputs_chapter(found: Parameters, phrases: Phrases) -> Chapter:
    """Build the chapter "Do the same weights give the same output?"."""
    translate = phrases.translate
    far = max(found.pairs, key=lambda pair: pair.output_difference)
    key = "outputs.same" if far.output_difference < 1e-9 else "outputs.differ"
    output = (
        format_rounding_error(far.output_difference)
        if key == "outputs.same"
        else format_percent(far.output_difference, 0)
    )
    answer = translate(
        key,
        first=phrases.heads(far.first),
        second=phrases.heads(far.second),
        output=output,
        gradient=format_percent(far.gradient_difference, 0),
    )
    rows = tuple(
        (
            translate("two counts", first=pair.first, second=pair.second),
            format_percent(pair.output_difference),
            format_percent(pair.gradient_difference),
            format_rounding_error(pair.score_difference),
        )
        for pair in found.pairs
    )
    columns = (
        translate("heads column"),
        translate("output differs"),
        translate("gradient differs"),
        translate("scores differ"),
    )
    text = translate("outputs.text", scores=format_rounding_error(max(pair.score_difference for pair in found.pairs)))
    groups = [
        (
            translate("two counts", first=pair.first, second=pair.second),
            [
                Bar(translate("bar.output"), "c1", pair.output_difference),
                Bar(translate("bar.gradient"), "c0", pair.gradient_difference),
            ],
        )
        for pair in found.pairs
    ]
    return Chapter(
        "outputs",
        translate("outputs.title"),
        answer,
        (text,),
        (Table(translate("outputs.caption"), columns, rows),),
        (bars(groups, label=translate("outputs.label")), translate("outputs.label")),
    )


def _reads_chapter(found: Parameters, phrases: Phrases) -> Chapter:
    """Build the chapter "Does each head see only a part of the input?"."""
    translate = phrases.translate
    read = [number for count in found.counts for number in count.features_read]
    key = "reads.all" if min(read) == found.embed_dim else "reads.some"
    answer = translate(key, features=found.embed_dim, least=min(read), most=max(read))
    rows = tuple(
        (
            phrases.heads(count.num_heads),
            str(count.head_dim),
            _range_of_values(count.features_read),
            _range_of_values(count.cut_features_read),
            f"{count.cut_total:,}",
            format_rounding_error(count.independent_difference),
        )
        for count in found.counts
    )
    columns = (
        translate("heads column"),
        translate("columns of a head"),
        translate("features read"),
        translate("if cut"),
        translate("numbers if cut"),
        translate("independent"),
    )
    largest = max(count.independent_difference for count in found.counts)
    text = translate("reads.text"), translate("reads.independent", difference=format_rounding_error(largest))
    return Chapter("reads", translate("reads.title"), answer, text, (Table(translate("reads.caption"), columns, rows),))


def _range_of_values(values: tuple[int, ...]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)}–{max(values)}"


def _matches_chapter(found: Vectors, phrases: Phrases) -> Chapter:
    """Build the chapter "Does one long row match worse than several short ones?"."""
    translate = phrases.translate
    width = found.columns // found.parts
    sizes = {"columns": found.columns, "parts": found.parts, "width": width}
    rows = tuple(
        (
            translate(f"content.{match.content}"),
            f"{match.noise:g}",
            phrases.spread(match.long),
            phrases.spread(match.short),
            phrases.spread(match.own) if match.content in ("part", "two") else "",
        )
        for match in found.matches
    )
    columns = (
        translate("content column"),
        translate("noise"),
        translate("long", **sizes),
        translate("short", **sizes),
        translate("own"),
    )
    groups = [
        (
            translate("content and noise", content=translate(f"content.{match.content}"), noise=f"{match.noise:g}"),
            [
                Bar(translate("bar.long"), "c1", match.long.mean, match.long.deviation or 0.0),
                Bar(translate("bar.short"), "c0", match.short.mean, match.short.deviation or 0.0),
                *(
                    [Bar(translate("bar.own"), "c3", match.own.mean, match.own.deviation or 0.0)]
                    if match.content in ("part", "two")
                    else []
                ),
            ],
        )
        for match in found.matches
    ]
    noises = phrases.listed(dict.fromkeys(f"{match.noise:g}" for match in found.matches))
    settings = {
        "candidates": found.candidates,
        "trials": found.trials,
        "seeds": phrases.seeds(found.seeds),
        "noises": noises,
    }
    return Chapter(
        "vectors",
        translate("vectors.title"),
        _verdict_on_rows(found, sizes, phrases),
        (translate("vectors.text", **sizes, **settings),),
        (Table(translate("vectors.caption"), columns, rows),),
        (bars(groups, label=translate("vectors.label")), translate("vectors.label")),
    )


def _verdict_on_rows(found: Vectors, sizes: dict[str, int], phrases: Phrases) -> str:
    """Name the contents for which one long row, or several short ones, find more partners."""
    translate = phrases.translate
    if any(match.long.deviation is None for match in found.matches):
        return translate("vectors.one seed")
    ways: dict[str, list[Match]] = {"vectors.long": [], "vectors.short": [], "vectors.level": []}
    for match in found.matches:
        # The short rows count by the better of two scores: their mean, or the rows that carry the content.
        short = max(match.short, match.own, key=lambda share: share.mean)
        if not match.long.apart(short):
            ways["vectors.level"].append(match)
        else:
            ways["vectors.long" if match.long.mean > short.mean else "vectors.short"].append(match)
    sentences = [
        translate(key, **sizes, contents=_list_contents(matches, found, phrases))
        for key, matches in ways.items()
        if matches
    ]
    if ways["vectors.long"] and ways["vectors.short"]:
        sentences.insert(0, translate("vectors.depends"))
    elif ways["vectors.long"] or ways["vectors.short"]:
        sentences.insert(0, translate("vectors.never" if ways["vectors.long"] else "vectors.always"))
    return phrases.joined(sentences)


def _list_contents(matches: list[Match], found: Vectors, phrases: Phrases) -> str:
    """List kinds of content, with the noise only if the result depends on it."""
    named = []
    for content in dict.fromkeys(match.content for match in matches):
        noises = [f"{match.noise:g}" for match in matches if match.content == content]
        name = phrases.translate(f"content.{content}")
        everywhere = len(noises) == sum(match.content == content for match in found.matches)
        alone = phrases.translate("at noise", content=name, noise=phrases.listed(noises))
        named.append(name if everywhere else alone)
    return phrases.words["join.parts"].join(named)


def _lengths_chapter(found: Vectors, phrases: Phrases) -> Chapter:
    """Build the chapter on the effect of the length of a row."""
    translate = phrases.translate
    first, last = found.lengths[0], found.lengths[-1]
    better = last.found.mean > first.found.mean and last.found.apart(first.found)
    one_seed = first.found.deviation is None
    answer = translate(
        "lengths.one seed" if one_seed else "lengths.better" if better else "lengths.worse",
        first=first.columns,
        last=last.columns,
        low=phrases.spread(first.found),
        high=phrases.spread(last.found),
    )
    harmful = (last.plain_keys, last.scaled_keys), (last.plain_slope, last.scaled_slope)
    text = translate(
        "lengths.text one seed"
        if one_seed
        else "lengths.text"
        if all(plain.mean < scaled.mean and plain.apart(scaled) for plain, scaled in harmful)
        else "lengths.text level",
        last=last.columns,
        candidates=found.candidates,
        plain=f"{last.plain_keys.mean:.1f}",
        scaled=f"{last.scaled_keys.mean:.1f}",
        plain_slope=f"{last.plain_slope.mean:.3f}",
        scaled_slope=f"{last.scaled_slope.mean:.3f}",
    )
    rows = tuple(
        (
            str(row.columns),
            phrases.spread(row.found),
            phrases.number(row.scaled_keys),
            phrases.number(row.plain_keys),
            phrases.number(row.scaled_slope, 3),
            phrases.number(row.plain_slope, 3),
        )
        for row in found.lengths
    )
    columns = tuple(
        translate(key) for key in ("columns", "found", "keys scaled", "keys plain", "slope scaled", "slope plain")
    )
    curve = Curve(
        translate("found name"),
        "c0",
        [row.columns for row in found.lengths],
        [row.found.mean for row in found.lengths],
        [max(row.found.mean - (row.found.deviation or 0.0), 0) for row in found.lengths],
        [min(row.found.mean + (row.found.deviation or 0.0), 1) for row in found.lengths],
    )
    ticks = [row.columns for row in found.lengths]
    drawn = chart(
        [curve], label=translate("lengths.label"), x_label=translate("columns axis"), x_ticks=ticks, logarithmic=True
    )
    table = Table(translate("lengths.caption", noise=f"{found.length_noise:g}"), columns, rows)
    return Chapter(
        "lengths", translate("lengths.title"), answer, (text,), (table,), (drawn, translate("lengths.label"))
    )


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
        chance=format_percent(experiment.chance),
    )
    describe_heads = _induction_heads if isinstance(task, Induction) else _lookup_heads
    looks, tables = describe_heads(experiment, phrases)
    return Chapter(
        name=name,
        title=translate(f"{name}.title"),
        answer=_name_best_head_count(experiment, phrases),
        text=(translate(f"{name}.task", facts=facts), settings),
        tables=(_table_of_results(experiment, phrases),),
        chart=(_chart_of_training(experiment, phrases), translate("course.caption")),
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


def _name_best_head_count(experiment: Experiment, phrases: Phrases) -> str:
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

    single = _is_one_head_enough(experiment, phrases)
    if not verdict.worse:
        worst = min(found, key=lambda each: found[each].mean)
        low = phrases.spread(found[worst])
        if format_percent(found[worst].mean) == format_percent(found[verdict.best].mean):
            return phrases.joined([single, translate("verdict.tie", list=listed(tuple(found)))])
        level = translate("verdict.level all", best=best, share=share, worst=phrases.heads(worst), low=low)
        return phrases.joined([single, level])
    sentences = [single, translate("verdict.apart", best=best, share=share, worse=listed(verdict.worse))]
    if verdict.level:
        sentences.append(translate("verdict.level some", level=listed(verdict.level)))
    return phrases.joined(sentences)


def _is_one_head_enough(experiment: Experiment, phrases: Phrases) -> str:
    """Answer the title: does one head do as well as the best?"""
    if 1 not in experiment.heads:
        return ""
    worse = 1 in experiment.verdict().worse
    return phrases.translate(f"{experiment.task}.{'worse' if worse else 'level'}")


def _table_of_results(experiment: Experiment, phrases: Phrases) -> Table:
    translate = phrases.translate
    rows = tuple(
        (
            phrases.heads(summary.num_heads),
            phrases.spread(summary.right),
            format_percent(min(summary.each)),
            format_percent(max(summary.each)),
            translate("seeds of", n=summary.learned, of=len(summary.each)),
            translate("never") if summary.learned_at is None else phrases.number(summary.learned_at, 0),
        )
        for summary in experiment.summaries()
    )
    columns = tuple(
        translate(key) for key in ("heads column", "right", "worst seed", "best seed", "learned", "learned at")
    )
    return Table(translate("result.caption", tested=TESTED), columns, rows)


def _chart_of_training(experiment: Experiment, phrases: Phrases) -> str:
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
        entropy = [_mean_over_heads(training, "entropy") for training in trainings]
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


def _mean_over_heads(training: Training, name: str) -> float:
    looks = training.moments[-1].looks
    return sum(look.measures[name] for look in looks) / len(looks)
