"""Turn the results of the lab into chapters: questions, answers and tables made of the measured numbers."""

from __future__ import annotations

from collections.abc import Sequence

from multihead_lab.charts import Bar, Curve, draw_bar_chart, draw_line_chart
from multihead_lab.matching import MatchRates, MeanOverSeeds, VectorMatching
from multihead_lab.parameters import ParameterComparison, ParameterShape
from multihead_lab.run import LabResults
from multihead_lab.tasks import InductionTask, LookupTask, find_task
from multihead_lab.text import Chapter, Phrases, Table, format_percent, format_rounding_error, format_shape
from multihead_lab.training import LEARNED_ACCURACY, TEST_QUESTIONS, Experiment, TrainedModel

__all__ = ["build_chapters", "copies_chapter", "experiment_chapter"]


def build_chapters(answers: LabResults, phrases: Phrases) -> tuple[Chapter, ...]:
    """Build the chapters in the order in which their questions arise."""
    chapters: list[Chapter] = []
    if answers.parameters is not None:
        found = answers.parameters
        chapters += [_parameter_count_chapter(found, phrases), _shapes_chapter(found, phrases)]
        chapters += [_outputs_chapter(found, phrases)] if found.comparisons else []
        chapters.append(_features_read_chapter(found, phrases))
    chapters += [experiment_chapter(experiment, answers, phrases) for experiment in answers.experiments]
    if answers.experiment_with_copied_heads is not None:
        chapters.append(copies_chapter(answers.experiment_with_copied_heads, answers.experiments, phrases))
    if answers.vector_matching is not None:
        chapters += [
            _matches_chapter(answers.vector_matching, phrases),
            _lengths_chapter(answers.vector_matching, phrases),
        ]
    return tuple(chapters)


def _parameter_count_chapter(found: ParameterComparison, phrases: Phrases) -> Chapter:
    """Build the chapter "Do more heads mean more parameters?"."""
    translate, counts = phrases.translate, found.layers
    first = counts[0]
    if all(count.packed_parameters == first.packed_parameters for count in counts):
        heads = phrases.join_items((str(count.num_heads) for count in counts), "or")
        answer = translate(
            "count.same", heads=heads, tensors=len(first.packed_parameters), total=f"{first.num_parameters:,}"
        )
    else:
        totals = phrases.join_items(
            f"{phrases.format_head_count(count.num_heads)} {count.num_parameters:,}" for count in counts
        )
        answer = translate("count.differ", totals=totals)
    alike = all(set(count.torch_parameters) == set(count.packed_parameters) for count in counts)
    names = [parameter.name for parameter in first.packed_parameters]
    rows = [(name, *(_shape_of(count.packed_parameters, name) for count in counts)) for name in names]
    rows.append((translate("all together"), *(f"{count.num_parameters:,}" for count in counts)))
    columns = (translate("parameter"), *(phrases.format_head_count(count.num_heads) for count in counts))
    text = (
        translate("count.text", embed_dim=found.embed_dim),
        translate("count.torch same" if alike else "count.torch differ"),
    )
    return Chapter(
        "count", translate("count.title"), answer, text, (Table(translate("count.caption"), columns, tuple(rows)),)
    )


def _shape_of(parameters: tuple[ParameterShape, ...], name: str) -> str:
    return next((format_shape(each.shape) for each in parameters if each.name == name), "")


def _shapes_chapter(found: ParameterComparison, phrases: Phrases) -> Chapter:
    """Build the chapter on the shapes from input to output."""
    translate = phrases.translate
    heads = phrases.format_head_count(found.num_heads_of_tensors)
    sizes = {each.name: each.shape for each in found.intermediate_tensors}
    rows = tuple(
        (each.name, each.code or translate("the input"), format_shape(each.shape), " ".join(each.axes))
        for each in found.intermediate_tensors
    )
    columns = (translate("tensor"), translate("made by"), translate("shape"), translate("axes"))
    return Chapter(
        "shapes",
        translate("shapes.title"),
        translate("shapes.answer", heads=heads, scores=format_shape(sizes["scores"]), length=found.length),
        (translate("shapes.text", head_dim=sizes["q_heads"][-1], embed_dim=found.embed_dim),),
        (Table(translate("shapes.caption", heads=heads), columns, rows),),
    )


def _outputs_chapter(found: ParameterComparison, phrases: Phrases) -> Chapter:
    """Build the chapter "Do the same weights give the same output?"."""
    translate = phrases.translate
    far = max(found.comparisons, key=lambda pair: pair.output_difference)
    key = "outputs.same" if far.output_difference < 1e-9 else "outputs.differ"
    output = (
        format_rounding_error(far.output_difference)
        if key == "outputs.same"
        else format_percent(far.output_difference, 0)
    )
    answer = translate(
        key,
        first=phrases.format_head_count(far.first_num_heads),
        second=phrases.format_head_count(far.second_num_heads),
        output=output,
        gradient=format_percent(far.gradient_difference, 0),
    )
    rows = tuple(
        (
            translate("two counts", first=pair.first_num_heads, second=pair.second_num_heads),
            format_percent(pair.output_difference),
            format_percent(pair.gradient_difference),
            format_rounding_error(pair.score_difference),
        )
        for pair in found.comparisons
    )
    columns = (
        translate("heads column"),
        translate("output differs"),
        translate("gradient differs"),
        translate("scores differ"),
    )
    text = translate(
        "outputs.text", scores=format_rounding_error(max(pair.score_difference for pair in found.comparisons))
    )
    groups = [
        (
            translate("two counts", first=pair.first_num_heads, second=pair.second_num_heads),
            [
                Bar(translate("bar.output"), "c1", pair.output_difference),
                Bar(translate("bar.gradient"), "c0", pair.gradient_difference),
            ],
        )
        for pair in found.comparisons
    ]
    return Chapter(
        "outputs",
        translate("outputs.title"),
        answer,
        (text,),
        (Table(translate("outputs.caption"), columns, rows),),
        (draw_bar_chart(groups, label=translate("outputs.label")), translate("outputs.label")),
    )


def _features_read_chapter(found: ParameterComparison, phrases: Phrases) -> Chapter:
    """Build the chapter "Does each head see only a part of the input?"."""
    translate = phrases.translate
    read = [number for count in found.layers for number in count.features_read_by_head]
    key = "reads.all" if min(read) == found.embed_dim else "reads.some"
    answer = translate(key, features=found.embed_dim, least=min(read), most=max(read))
    rows = tuple(
        (
            phrases.format_head_count(count.num_heads),
            str(count.head_dim),
            _range_of_values(count.features_read_by_head),
            _range_of_values(count.features_read_by_head_of_split_input),
            f"{count.parameters_with_split_input:,}",
            format_rounding_error(count.difference_from_single_head_layers),
        )
        for count in found.layers
    )
    columns = (
        translate("heads column"),
        translate("columns of a head"),
        translate("features read"),
        translate("if cut"),
        translate("numbers if cut"),
        translate("independent"),
    )
    largest = max(count.difference_from_single_head_layers for count in found.layers)
    text = translate("reads.text"), translate("reads.independent", difference=format_rounding_error(largest))
    return Chapter("reads", translate("reads.title"), answer, text, (Table(translate("reads.caption"), columns, rows),))


def _range_of_values(values: tuple[int, ...]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)}–{max(values)}"


def _matches_chapter(found: VectorMatching, phrases: Phrases) -> Chapter:
    """Build the chapter "Does one long row match worse than several short ones?"."""
    translate = phrases.translate
    width = found.columns // found.short_rows
    sizes = {"columns": found.columns, "parts": found.short_rows, "width": width}
    rows = tuple(
        (
            translate(f"content.{match.content}"),
            f"{match.query_noise:g}",
            phrases.format_percent_with_deviation(match.by_long_row),
            phrases.format_percent_with_deviation(match.by_all_short_rows),
            phrases.format_percent_with_deviation(match.by_short_rows_with_content)
            if match.content in ("part", "two")
            else "",
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
            translate(
                "content and noise", content=translate(f"content.{match.content}"), noise=f"{match.query_noise:g}"
            ),
            [
                Bar(translate("bar.long"), "c1", match.by_long_row.mean, match.by_long_row.deviation or 0.0),
                Bar(
                    translate("bar.short"), "c0", match.by_all_short_rows.mean, match.by_all_short_rows.deviation or 0.0
                ),
                *(
                    [
                        Bar(
                            translate("bar.own"),
                            "c3",
                            match.by_short_rows_with_content.mean,
                            match.by_short_rows_with_content.deviation or 0.0,
                        )
                    ]
                    if match.content in ("part", "two")
                    else []
                ),
            ],
        )
        for match in found.matches
    ]
    noises = phrases.join_items(dict.fromkeys(f"{match.query_noise:g}" for match in found.matches))
    settings = {
        "candidates": found.candidates,
        "trials": found.trials,
        "seeds": phrases.format_seed_count(found.seeds),
        "noises": noises,
    }
    return Chapter(
        "vectors",
        translate("vectors.title"),
        _compare_long_and_short_rows(found, sizes, phrases),
        (translate("vectors.text", **sizes, **settings),),
        (Table(translate("vectors.caption"), columns, rows),),
        (draw_bar_chart(groups, label=translate("vectors.label")), translate("vectors.label")),
    )


def _compare_long_and_short_rows(found: VectorMatching, sizes: dict[str, int], phrases: Phrases) -> str:
    """Name the contents for which one long row, or several short ones, find more partners."""
    translate = phrases.translate
    if any(match.by_long_row.deviation is None for match in found.matches):
        return translate("vectors.one seed")
    ways: dict[str, list[MatchRates]] = {"vectors.long": [], "vectors.short": [], "vectors.level": []}
    for match in found.matches:
        # The short rows count by the better of two scores: their mean, or the rows that carry the content.
        short = max(match.by_all_short_rows, match.by_short_rows_with_content, key=lambda share: share.mean)
        if not match.by_long_row.differs_from(short):
            ways["vectors.level"].append(match)
        else:
            ways["vectors.long" if match.by_long_row.mean > short.mean else "vectors.short"].append(match)
    sentences = [
        translate(key, **sizes, contents=_join_content_names(matches, found, phrases))
        for key, matches in ways.items()
        if matches
    ]
    if ways["vectors.long"] and ways["vectors.short"]:
        sentences.insert(0, translate("vectors.depends"))
    elif ways["vectors.long"] or ways["vectors.short"]:
        sentences.insert(0, translate("vectors.never" if ways["vectors.long"] else "vectors.always"))
    return phrases.join_sentences(sentences)


def _join_content_names(matches: list[MatchRates], found: VectorMatching, phrases: Phrases) -> str:
    """List kinds of content, with the noise only if the result depends on it."""
    named = []
    for content in dict.fromkeys(match.content for match in matches):
        noises = [f"{match.query_noise:g}" for match in matches if match.content == content]
        name = phrases.translate(f"content.{content}")
        everywhere = len(noises) == sum(match.content == content for match in found.matches)
        alone = phrases.translate("at noise", content=name, noise=phrases.join_items(noises))
        named.append(name if everywhere else alone)
    return phrases.texts_by_key["join.parts"].join(named)


def _lengths_chapter(found: VectorMatching, phrases: Phrases) -> Chapter:
    """Build the chapter on the effect of the length of a row."""
    translate = phrases.translate
    first, last = found.lengths[0], found.lengths[-1]
    better = last.match_rate.mean > first.match_rate.mean and last.match_rate.differs_from(first.match_rate)
    one_seed = first.match_rate.deviation is None
    answer = translate(
        "lengths.one seed" if one_seed else "lengths.better" if better else "lengths.worse",
        first=first.columns,
        last=last.columns,
        low=phrases.format_percent_with_deviation(first.match_rate),
        high=phrases.format_percent_with_deviation(last.match_rate),
    )
    harmful = (
        (last.unscaled_effective_keys, last.scaled_effective_keys),
        (last.unscaled_softmax_slope, last.scaled_softmax_slope),
    )
    text = translate(
        "lengths.text one seed"
        if one_seed
        else "lengths.text"
        if all(plain.mean < scaled.mean and plain.differs_from(scaled) for plain, scaled in harmful)
        else "lengths.text level",
        last=last.columns,
        candidates=found.candidates,
        plain=f"{last.unscaled_effective_keys.mean:.1f}",
        scaled=f"{last.scaled_effective_keys.mean:.1f}",
        plain_slope=f"{last.unscaled_softmax_slope.mean:.3f}",
        scaled_slope=f"{last.scaled_softmax_slope.mean:.3f}",
    )
    rows = tuple(
        (
            str(row.columns),
            phrases.format_percent_with_deviation(row.match_rate),
            phrases.format_number_with_deviation(row.scaled_effective_keys),
            phrases.format_number_with_deviation(row.unscaled_effective_keys),
            phrases.format_number_with_deviation(row.scaled_softmax_slope, 3),
            phrases.format_number_with_deviation(row.unscaled_softmax_slope, 3),
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
        [row.match_rate.mean for row in found.lengths],
        [max(row.match_rate.mean - (row.match_rate.deviation or 0.0), 0) for row in found.lengths],
        [min(row.match_rate.mean + (row.match_rate.deviation or 0.0), 1) for row in found.lengths],
    )
    ticks = [row.columns for row in found.lengths]
    drawn = draw_line_chart(
        [curve], label=translate("lengths.label"), x_label=translate("columns axis"), x_ticks=ticks, logarithmic=True
    )
    table = Table(translate("lengths.caption", noise=f"{found.length_noise:g}"), columns, rows)
    return Chapter(
        "lengths", translate("lengths.title"), answer, (text,), (table,), (drawn, translate("lengths.label"))
    )


LARGE_SHARE = 0.5  # share of a head's weight above which it attends to one thing more than to all others together


def experiment_chapter(experiment: Experiment, answers: LabResults, phrases: Phrases) -> Chapter:
    """Build the chapter of one task: the verdict, the numbers, the course of training, and the heads."""
    translate, name = phrases.translate, experiment.task
    task = find_task(name)
    facts = task.facts_per_row if isinstance(task, LookupTask) else 0
    sizes = phrases.join_items(
        (f"{size:,}" for size in sorted({each.num_parameters for each in experiment.models})), "or"
    )
    settings = translate(
        "settings",
        parameters=sizes,
        steps=experiment.steps,
        batch=experiment.batch_size,
        rate=f"{experiment.learning_rate:g}",
        seeds=phrases.format_seed_count(answers.models_per_head_count),
        chance=format_percent(experiment.chance_accuracy),
    )
    describe_heads = _describe_induction_heads if isinstance(task, InductionTask) else _describe_lookup_heads
    looks, tables = describe_heads(experiment, phrases)
    return Chapter(
        name=name,
        title=translate(f"{name}.title"),
        short_answer=_name_best_head_count(experiment, phrases),
        paragraphs=(translate(f"{name}.task", facts=facts), settings),
        tables=(_table_of_results(experiment, phrases),),
        chart=(_chart_of_training(experiment, phrases), translate("course.caption")),
        pictured_task=name,
        head_paragraphs=looks,
        head_tables=tables,
    )


def copies_chapter(copies: Experiment, experiments: Sequence[Experiment], phrases: Phrases) -> Chapter:
    """Build the chapter that compares two heads that start as copies with two that do not."""
    translate = phrases.translate
    drawn = [each for one in experiments if one.task == copies.task for each in one.models_with_head_count(2)]
    groups = [("drawn", drawn), ("copied", list(copies.models))]
    rows, right = [], {}
    for name, trainings in groups:
        if not trainings:
            continue
        right[name] = MeanOverSeeds.from_values([each.final_accuracy for each in trainings])
        before, after = (
            MeanOverSeeds.from_values([getattr(each, side) for each in trainings])
            for side in ("head_distance_before", "head_distance_after")
        )
        rows.append(
            (
                translate(f"start.{name}"),
                phrases.format_number_with_deviation(before, 2),
                phrases.format_number_with_deviation(after, 2),
                phrases.format_percent_with_deviation(right[name]),
            )
        )
    drawn_bars = [
        (translate(f"start.{name}"), [Bar(translate("bar.right"), "c1", share.mean, share.deviation or 0.0)])
        for name, share in right.items()
    ]
    apart = max(each.head_distance_after for each in copies.models)
    shares = {name: phrases.format_percent_with_deviation(share) for name, share in right.items()}
    key = "copies.answer" if apart == 0 else "copies.answer other"
    columns = (translate("start.column"), translate("apart before"), translate("apart after"), translate("right"))
    return Chapter(
        "copies",
        translate("copies.title"),
        translate(key, apart=f"{apart:.2g}", copied=shares["copied"], drawn=shares.get("drawn", "–")),
        (translate("copies.text"), *([translate("copies.equal")] if apart == 0 else [])),
        (Table(translate("copies.caption"), columns, tuple(rows)),),
        (draw_bar_chart(drawn_bars, label=translate("copies.label")), translate("copies.label")),
    )


def _name_best_head_count(experiment: Experiment, phrases: Phrases) -> str:
    """Name the best number of heads, and those that are worse by more than the spread."""
    translate, verdict = phrases.translate, experiment.compare_head_counts()
    found = {summary.num_heads: summary.accuracy for summary in experiment.summarise_seeds()}
    best, share = (
        phrases.format_head_count(verdict.best_num_heads),
        phrases.format_percent_with_deviation(found[verdict.best_num_heads]),
    )
    if len(found) == 1:
        return translate("verdict.alone", best=best, share=share)
    if any(each.deviation is None for each in found.values()):
        shares = [
            translate(
                "with share",
                heads=phrases.format_head_count(each),
                share=phrases.format_percent_with_deviation(found[each]),
            )
            for each in found
        ]
        return translate("verdict.one seed", list=phrases.join_items(shares))

    def join_head_counts(heads: Sequence[int]) -> str:
        return phrases.join_items(
            translate(
                "with share",
                heads=phrases.format_head_count(each),
                share=phrases.format_percent_with_deviation(found[each]),
            )
            for each in heads
        )

    single = _describe_single_head(experiment, phrases)
    if not verdict.worse_num_heads:
        worst = min(found, key=lambda each: found[each].mean)
        low = phrases.format_percent_with_deviation(found[worst])
        if format_percent(found[worst].mean) == format_percent(found[verdict.best_num_heads].mean):
            return phrases.join_sentences([single, translate("verdict.tie", list=join_head_counts(tuple(found)))])
        level = translate("verdict.level all", best=best, share=share, worst=phrases.format_head_count(worst), low=low)
        return phrases.join_sentences([single, level])
    sentences = [
        single,
        translate("verdict.apart", best=best, share=share, worse=join_head_counts(verdict.worse_num_heads)),
    ]
    if verdict.equal_num_heads:
        sentences.append(translate("verdict.level some", level=join_head_counts(verdict.equal_num_heads)))
    return phrases.join_sentences(sentences)


def _describe_single_head(experiment: Experiment, phrases: Phrases) -> str:
    """Answer the title: does one head do as well as the best?"""
    if 1 not in experiment.head_counts:
        return ""
    worse = 1 in experiment.compare_head_counts().worse_num_heads
    return phrases.translate(f"{experiment.task}.{'worse' if worse else 'level'}")


def _table_of_results(experiment: Experiment, phrases: Phrases) -> Table:
    translate = phrases.translate
    rows = tuple(
        (
            phrases.format_head_count(summary.num_heads),
            phrases.format_percent_with_deviation(summary.accuracy),
            format_percent(min(summary.accuracy_by_seed)),
            format_percent(max(summary.accuracy_by_seed)),
            translate("seeds of", n=summary.seeds_that_learned, of=len(summary.accuracy_by_seed)),
            translate("never")
            if summary.first_learned_step is None
            else phrases.format_number_with_deviation(summary.first_learned_step, 0),
        )
        for summary in experiment.summarise_seeds()
    )
    columns = tuple(
        translate(key) for key in ("heads column", "right", "worst seed", "best seed", "learned", "learned at")
    )
    return Table(translate("result.caption", tested=TEST_QUESTIONS), columns, rows)


def _chart_of_training(experiment: Experiment, phrases: Phrases) -> str:
    """Draw the share of correct answers over the steps, one curve per number of heads."""
    curves = []
    for place, num_heads in enumerate(experiment.head_counts):
        courses = [
            [moment.accuracy for moment in each.learning_curve] for each in experiment.models_with_head_count(num_heads)
        ]
        points = list(zip(*courses, strict=True))
        curves.append(
            Curve(
                phrases.format_head_count(num_heads),
                f"c{place % 4}",
                [moment.step for moment in experiment.models_with_head_count(num_heads)[0].learning_curve],
                [sum(point) / len(point) for point in points],
                [min(point) for point in points],
                [max(point) for point in points],
            )
        )
    ticks = sorted({round(experiment.steps * part / 4) for part in range(5)})
    return draw_line_chart(
        curves,
        label=phrases.translate("course.label"),
        x_label=phrases.translate("steps axis"),
        x_ticks=ticks,
        level=(experiment.chance_accuracy, phrases.translate("guess")),
    )


def _describe_lookup_heads(experiment: Experiment, phrases: Phrases) -> tuple[tuple[str, ...], tuple[Table, ...]]:
    """Count the heads that attend to each name of the question, and the seeds in which two heads share two names."""
    translate, two = phrases.translate, experiment.task == "two"
    measures = ("first lookup", "second lookup") if two else ("first lookup",)
    rows, items = [], []
    for num_heads in experiment.head_counts:
        trainings = experiment.models_with_head_count(num_heads)
        counts = [[_count_heads_above_half(training, name) for training in trainings] for name in measures]
        neither = [num_heads - sum(each) for each in zip(*counts, strict=True)]
        entropy = [_mean_over_heads(training, "entropy") for training in trainings]
        cells = [
            phrases.format_number_with_deviation(MeanOverSeeds.from_values([float(value) for value in column]))
            for column in (*counts, neither)
        ]
        rows.append(
            (
                phrases.format_head_count(num_heads),
                *cells,
                phrases.format_number_with_deviation(MeanOverSeeds.from_values(entropy), 2),
            )
        )
        shared = sum(all(each) for each in zip(*counts, strict=True))
        if two and num_heads > 1:
            items.append(
                translate("looks.two item", heads=phrases.format_head_count(num_heads), yes=shared, of=len(trainings))
            )
    named = ("on first", "on second", "on neither") if two else ("on lookup", "not on it")
    columns = (translate("heads column"), *(translate(key) for key in named), translate("entropy"))
    sentences = (translate("looks.two", list=phrases.join_items(items)),) if items else ()
    return sentences, (Table(translate("looks.caption lookup"), columns, tuple(rows)),)


def _describe_induction_heads(experiment: Experiment, phrases: Phrases) -> tuple[tuple[str, ...], tuple[Table, ...]]:
    """Measure the strongest previous-token head of layer 0 and the strongest induction head of layer 1."""
    translate, rows = phrases.translate, []
    for num_heads in experiment.head_counts:
        ends = [
            training.learning_curve[-1].head_measurements for training in experiment.models_with_head_count(num_heads)
        ]
        previous = [max(look.measures["previous"] for look in looks if look.layer == 0) for looks in ends]
        found = [[look.measures["induction"] for look in looks if look.layer == 1] for looks in ends]
        many = [float(sum(share > LARGE_SHARE for share in shares)) for shares in found]
        rows.append(
            (
                phrases.format_head_count(num_heads),
                phrases.format_percent_with_deviation(MeanOverSeeds.from_values(previous)),
                phrases.format_percent_with_deviation(MeanOverSeeds.from_values([max(shares) for shares in found])),
                phrases.format_number_with_deviation(MeanOverSeeds.from_values(many)),
            )
        )
    columns = (
        translate("heads column"),
        translate("strongest previous"),
        translate("strongest induction"),
        translate("many induction"),
    )
    able = [training for training in experiment.models if training.final_accuracy >= LEARNED_ACCURACY]
    without = sum(not _has_induction_head(training) for training in able)
    sentences = (translate("looks.induction count", of=len(able), without=without),) if without else ()
    return sentences, (Table(translate("looks.caption induction"), columns, tuple(rows)),)


def _has_induction_head(training: TrainedModel) -> bool:
    return any(
        look.measures["induction"] > LARGE_SHARE
        for look in training.learning_curve[-1].head_measurements
        if look.layer == 1
    )


def _count_heads_above_half(training: TrainedModel, name: str) -> int:
    return sum(look.measures[name] > LARGE_SHARE for look in training.learning_curve[-1].head_measurements)


def _mean_over_heads(training: TrainedModel, name: str) -> float:
    looks = training.learning_curve[-1].head_measurements
    return sum(look.measures[name] for look in looks) / len(looks)
