"""Turn the results of the lab into chapters: questions, answers and tables made of the measured numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean

from multihead_lab.charts import Bar, BarGroup, Curve, draw_bar_chart, draw_line_chart
from multihead_lab.matching import MatchRates, MeanOverSeeds, VectorMatching
from multihead_lab.parameters import ParameterComparison
from multihead_lab.run import LabResults
from multihead_lab.tasks import InductionTask, LookupTask
from multihead_lab.text import (
    Chapter,
    Phrases,
    Table,
    format_mean,
    format_mean_percent,
    format_percent,
    format_rounding_error,
    format_shape,
)
from multihead_lab.training import LEARNED_ACCURACY, TEST_QUESTIONS, Experiment, TrainedModel

__all__ = ["build_chapters", "copies_chapter", "experiment_chapter"]

BAR_CLASSES = {"output": "c1", "gradient": "c0", "long": "c1", "short": "c0", "own": "c3", "right": "c1"}
"""Name of a bar -> its CSS class, which gives it its colour."""

LARGE_SHARE = 0.5  # share of a head's weight above which it attends to one thing more than to all others together


def build_chapters(answers: LabResults, phrases: Phrases) -> tuple[Chapter, ...]:
    """Build the chapters in the order in which their questions arise."""
    chapters: list[Chapter] = []
    if (found := answers.parameters) is not None:
        chapters += [_parameter_count_chapter(found, phrases), _shapes_chapter(found, phrases)]
        chapters += [_outputs_chapter(found, phrases)] if found.comparisons else []
        chapters.append(_features_read_chapter(found, phrases))
    chapters += [experiment_chapter(experiment, answers, phrases) for experiment in answers.experiments]
    if answers.experiment_with_copied_heads is not None:
        chapters.append(copies_chapter(answers.experiment_with_copied_heads, answers.experiments, phrases))
    if (matching := answers.vector_matching) is not None:
        chapters += [_matches_chapter(matching, phrases), _lengths_chapter(matching, phrases)]
    return tuple(chapters)


def _make_chapter(
    name: str,
    short_answer: str,
    paragraphs: Iterable[str],
    columns: Iterable[str],
    rows: Iterable[tuple[str, ...]],
    phrases: Phrases,
    *,
    draw: Callable[..., str] | None = None,
    **caption_values: object,
) -> Chapter:
    """Make a chapter whose title, table caption and chart label are the texts `NAME.title`, `.caption` and `.label`.

    `draw(label=...)` returns the chart as SVG; `caption_values` fill the placeholders of the caption.
    """
    table = Table(phrases.translate(f"{name}.caption", **caption_values), tuple(columns), tuple(rows))
    chart = None
    if draw is not None:
        label = phrases.translate(f"{name}.label")
        chart = draw(label=label), label
    return Chapter(name, phrases.translate(f"{name}.title"), short_answer, tuple(paragraphs), table, chart)


def _make_bar(name: str, share: float, deviation: float | None, phrases: Phrases) -> Bar:
    return Bar(phrases.translate(f"bar.{name}"), BAR_CLASSES[name], share, deviation)


def _parameter_count_chapter(found: ParameterComparison, phrases: Phrases) -> Chapter:
    """Build the chapter "Do more heads mean more parameters?"."""
    translate, layers = phrases.translate, found.layers
    packed = layers[0].packed_parameters
    head_counts = [phrases.format_count("head", layer.num_heads) for layer in layers]
    totals = [f"{layer.num_parameters:,}" for layer in layers]
    if all(layer.packed_parameters == packed for layer in layers):
        heads = phrases.join_items((str(layer.num_heads) for layer in layers), "or")
        answer = translate("count.same", heads=heads, tensors=len(packed), total=totals[0])
    else:
        answer = translate(
            "count.differ", totals=phrases.join_items(map(" ".join, zip(head_counts, totals, strict=True)))
        )
    alike = all(set(layer.torch_parameters) == set(layer.packed_parameters) for layer in layers)
    same_name = zip(*(layer.packed_parameters for layer in layers), strict=True)
    rows = [(each[0].name, *(format_shape(parameter.shape) for parameter in each)) for each in same_name]
    rows.append((translate("all together"), *totals))
    paragraphs = (
        translate("count.text", embed_dim=found.embed_dim),
        translate("count.torch same" if alike else "count.torch differ"),
    )
    return _make_chapter("count", answer, paragraphs, (translate("parameter"), *head_counts), rows, phrases)


def _shapes_chapter(found: ParameterComparison, phrases: Phrases) -> Chapter:
    """Build the chapter on the shapes of all tensors from the input to the output of a layer."""
    translate = phrases.translate
    heads = phrases.format_count("head", found.num_heads_of_tensors)
    sizes = {each.name: each.shape for each in found.intermediate_tensors}
    rows = [
        (each.name, each.code or translate("the input"), format_shape(each.shape), " ".join(each.axes))
        for each in found.intermediate_tensors
    ]
    answer = translate("shapes.answer", heads=heads, scores=format_shape(sizes["scores"]), length=found.length)
    paragraph = translate("shapes.text", head_dim=sizes["q_heads"][-1], embed_dim=found.embed_dim)
    columns = map(translate, ("tensor", "made by", "shape", "axes"))
    return _make_chapter("shapes", answer, [paragraph], columns, rows, phrases, heads=heads)


def _outputs_chapter(found: ParameterComparison, phrases: Phrases) -> Chapter:
    """Build the chapter "Do the same weights give the same output?"."""
    translate = phrases.translate
    far = max(found.comparisons, key=lambda pair: pair.output_difference)
    same = far.output_difference < 1e-9
    answer = translate(
        "outputs.same" if same else "outputs.differ",
        first=phrases.format_count("head", far.first_num_heads),
        second=phrases.format_count("head", far.second_num_heads),
        output=format_rounding_error(far.output_difference) if same else format_percent(far.output_difference, 0),
        gradient=format_percent(far.gradient_difference, 0),
    )
    largest = max(pair.score_difference for pair in found.comparisons)
    rows, groups = [], []
    for pair in found.comparisons:
        name = translate("two counts", first=pair.first_num_heads, second=pair.second_num_heads)
        shares = {"output": pair.output_difference, "gradient": pair.gradient_difference}
        rows.append((name, *map(format_percent, shares.values()), format_rounding_error(pair.score_difference)))
        groups.append((name, [_make_bar(each, share, None, phrases) for each, share in shares.items()]))
    return _make_chapter(
        "outputs",
        answer,
        [translate("outputs.text", scores=format_rounding_error(largest))],
        map(translate, ("heads column", "output differs", "gradient differs", "scores differ")),
        rows,
        phrases,
        draw=partial(draw_bar_chart, groups),
    )


def _features_read_chapter(found: ParameterComparison, phrases: Phrases) -> Chapter:
    """Build the chapter "Does each head see only a part of the input?"."""
    translate = phrases.translate
    read = [number for layer in found.layers for number in layer.features_read_by_head]
    key = "reads.all" if min(read) == found.embed_dim else "reads.some"
    rows = [
        (
            phrases.format_count("head", layer.num_heads),
            str(layer.head_dim),
            _format_range(layer.features_read_by_head),
            _format_range(layer.features_read_by_head_of_split_input),
            f"{layer.parameters_with_split_input:,}",
            format_rounding_error(layer.difference_from_single_head_layers),
        )
        for layer in found.layers
    ]
    columns = ("heads column", "columns of a head", "features read", "if cut", "numbers if cut", "independent")
    largest = max(layer.difference_from_single_head_layers for layer in found.layers)
    return _make_chapter(
        "reads",
        translate(key, features=found.embed_dim, least=min(read), most=max(read)),
        [translate("reads.text"), translate("reads.independent", difference=format_rounding_error(largest))],
        map(translate, columns),
        rows,
        phrases,
    )


def _format_range(values: tuple[int, ...]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)}–{max(values)}"


def _matches_chapter(found: VectorMatching, phrases: Phrases) -> Chapter:
    """Build the chapter "Does one long row match worse than several short ones?"."""
    translate = phrases.translate
    sizes = {"columns": found.columns, "parts": found.short_rows, "width": found.columns // found.short_rows}
    rows, groups = [], []
    for match in found.matches:
        content, noise = translate(f"content.{match.content}"), f"{match.query_noise:g}"
        shares = {"long": match.by_long_row, "short": match.by_all_short_rows, "own": match.by_short_rows_with_content}
        if match.content not in ("part", "two"):  # all short rows carry the content
            del shares["own"]
        cells = [format_mean_percent(share) for share in shares.values()]
        rows.append((content, noise, *cells, *[""] * (3 - len(cells))))
        bars = [_make_bar(name, share.mean, share.deviation, phrases) for name, share in shares.items()]
        groups.append((translate("content and noise", content=content, noise=noise), bars))
    paragraph = translate(
        "vectors.text",
        **sizes,
        candidates=found.candidates,
        trials=found.trials,
        seeds=phrases.format_count("seed", found.seeds),
        noises=phrases.join_items(dict.fromkeys(f"{match.query_noise:g}" for match in found.matches)),
    )
    columns = [translate(key, **sizes) for key in ("content column", "noise", "long", "short", "own")]
    answer = _compare_long_and_short_rows(found, sizes, phrases)
    return _make_chapter("vectors", answer, [paragraph], columns, rows, phrases, draw=partial(draw_bar_chart, groups))


def _compare_long_and_short_rows(found: VectorMatching, sizes: dict[str, int], phrases: Phrases) -> str:
    """Name the kinds of content for which one long row finds more partners, and those for which short rows do."""
    translate = phrases.translate
    if any(match.by_long_row.deviation is None for match in found.matches):
        return translate("vectors.one seed")
    matches_by_winner: dict[str, list[MatchRates]] = {"long": [], "short": [], "level": []}
    for match in found.matches:
        # The short rows count by the better of two shares: that of all short rows, or of those that carry the content.
        short = max(match.by_all_short_rows, match.by_short_rows_with_content, key=lambda share: share.mean)
        long = match.by_long_row
        matches_by_winner["long" if long.exceeds(short) else "short" if short.exceeds(long) else "level"].append(match)
    sentences = [
        translate(f"vectors.{winner}", **sizes, contents=_join_content_names(matches, found, phrases))
        for winner, matches in matches_by_winner.items()
        if matches
    ]
    if matches_by_winner["long"] and matches_by_winner["short"]:
        sentences.insert(0, translate("vectors.depends"))
    elif matches_by_winner["long"] or matches_by_winner["short"]:
        sentences.insert(0, translate("vectors.never" if matches_by_winner["long"] else "vectors.always"))
    return phrases.join_sentences(sentences)


def _join_content_names(matches: list[MatchRates], found: VectorMatching, phrases: Phrases) -> str:
    """Join the names of kinds of content, with the noise where the result of a kind depends on the noise."""
    named = []
    for content in dict.fromkeys(match.content for match in matches):
        noises = [f"{match.query_noise:g}" for match in matches if match.content == content]
        name = phrases.translate(f"content.{content}")
        everywhere = len(noises) == sum(match.content == content for match in found.matches)
        alone = phrases.translate("at noise", content=name, noise=phrases.join_items(noises))
        named.append(name if everywhere else alone)
    return phrases.translate("join.parts").join(named)


def _lengths_chapter(found: VectorMatching, phrases: Phrases) -> Chapter:
    """Build the chapter on how the length of a row changes how often its partner is found."""
    translate = phrases.translate
    first, last = found.lengths[0], found.lengths[-1]
    one_seed = first.match_rate.deviation is None
    answer = translate(
        "lengths.one seed"
        if one_seed
        else "lengths.better"
        if last.match_rate.exceeds(first.match_rate)
        else "lengths.worse",
        first=first.columns,
        last=last.columns,
        low=format_mean_percent(first.match_rate),
        high=format_mean_percent(last.match_rate),
    )
    more_keys = last.scaled_effective_keys.exceeds(last.unscaled_effective_keys)
    harmful = more_keys and last.scaled_softmax_slope.exceeds(last.unscaled_softmax_slope)
    paragraph = translate(
        "lengths.text one seed" if one_seed else "lengths.text" if harmful else "lengths.text level",
        last=last.columns,
        candidates=found.candidates,
        plain=f"{last.unscaled_effective_keys.mean:.1f}",
        scaled=f"{last.scaled_effective_keys.mean:.1f}",
        plain_slope=f"{last.unscaled_softmax_slope.mean:.3f}",
        scaled_slope=f"{last.scaled_softmax_slope.mean:.3f}",
    )
    rows = [
        (
            str(row.columns),
            format_mean_percent(row.match_rate),
            format_mean(row.scaled_effective_keys),
            format_mean(row.unscaled_effective_keys),
            format_mean(row.scaled_softmax_slope, 3),
            format_mean(row.unscaled_softmax_slope, 3),
        )
        for row in found.lengths
    ]
    columns = map(translate, ("columns", "found", "keys scaled", "keys plain", "slope scaled", "slope plain"))
    lengths = [row.columns for row in found.lengths]
    rates = [row.match_rate for row in found.lengths]
    curve = Curve(
        translate("found name"),
        "c0",
        lengths,
        [rate.mean for rate in rates],
        [max(rate.mean - (rate.deviation or 0.0), 0) for rate in rates],
        [min(rate.mean + (rate.deviation or 0.0), 1) for rate in rates],
    )
    draw = partial(draw_line_chart, [curve], x_label=translate("columns axis"), x_ticks=lengths, logarithmic=True)
    noise = f"{found.length_noise:g}"
    return _make_chapter("lengths", answer, [paragraph], columns, rows, phrases, draw=draw, noise=noise)


def experiment_chapter(experiment: Experiment, answers: LabResults, phrases: Phrases) -> Chapter:
    """Build the chapter of one task: its best number of heads, its table, its learning curves, and its heads."""
    translate, task, name = phrases.translate, experiment.task, experiment.task.name
    facts = task.facts_per_row if isinstance(task, LookupTask) else 0
    sizes = [f"{size:,}" for size in sorted({model.num_parameters for model in experiment.models})]
    settings = translate(
        "settings",
        parameters=phrases.join_items(sizes, "or"),
        steps=experiment.steps,
        batch=task.batch_size,
        rate=f"{task.learning_rate:g}",
        seeds=phrases.format_count("seed", answers.models_per_head_count),
        chance=format_percent(task.chance_accuracy),
    )
    describe_heads = _describe_induction_heads if isinstance(task, InductionTask) else _describe_lookup_heads
    head_paragraphs, head_table = describe_heads(experiment, phrases)
    return Chapter(
        name=name,
        title=translate(f"{name}.title"),
        short_answer=_name_best_head_count(experiment, phrases),
        paragraphs=(translate(f"{name}.task", facts=facts), settings),
        table=_table_of_results(experiment, phrases),
        chart=(_chart_of_training(experiment, phrases), translate("course.caption")),
        head_paragraphs=head_paragraphs,
        head_table=head_table,
    )


def copies_chapter(copies: Experiment, experiments: Sequence[Experiment], phrases: Phrases) -> Chapter:
    """Build the chapter that compares two heads that start as copies with two that do not."""
    translate = phrases.translate
    drawn = [each for one in experiments if one.task.name == copies.task.name for each in one.models_with_head_count(2)]
    rows: list[tuple[str, ...]] = []
    groups: list[BarGroup] = []
    accuracies = {"drawn": "–"}
    for name, models in (("drawn", drawn), ("copied", copies.models)):
        if not models:
            continue
        accuracy, before, after = (
            MeanOverSeeds.from_values([getattr(model, measure) for model in models])
            for measure in ("final_accuracy", "head_distance_before", "head_distance_after")
        )
        start, accuracies[name] = translate(f"start.{name}"), format_mean_percent(accuracy)
        rows.append((start, format_mean(before, 2), format_mean(after, 2), accuracies[name]))
        groups.append((start, [_make_bar("right", accuracy.mean, accuracy.deviation, phrases)]))
    apart = max(model.head_distance_after for model in copies.models)
    key = "copies.answer" if apart == 0 else "copies.answer other"
    return _make_chapter(
        "copies",
        translate(key, apart=f"{apart:.2g}", **accuracies),
        [translate("copies.text"), *([translate("copies.equal")] if apart == 0 else [])],
        map(translate, ("start.column", "apart before", "apart after", "right")),
        rows,
        phrases,
        draw=partial(draw_bar_chart, groups),
    )


def _name_best_head_count(experiment: Experiment, phrases: Phrases) -> str:
    """Name the best number of heads, and the numbers of heads that are worse by more than the deviation over seeds."""
    translate, verdict = phrases.translate, experiment.compare_head_counts()
    accuracies = {summary.num_heads: summary.accuracy for summary in experiment.summarise_seeds()}
    heads = {num_heads: phrases.format_count("head", num_heads) for num_heads in accuracies}
    shares = {num_heads: format_mean_percent(accuracy) for num_heads, accuracy in accuracies.items()}

    def join_head_counts(head_counts: Iterable[int]) -> str:
        return phrases.join_items(
            translate("with share", heads=heads[each], share=shares[each]) for each in head_counts
        )

    best = {"best": heads[verdict.best_num_heads], "share": shares[verdict.best_num_heads]}
    if len(accuracies) == 1:
        return translate("verdict.alone", **best)
    if any(accuracy.deviation is None for accuracy in accuracies.values()):
        return translate("verdict.one seed", list=join_head_counts(accuracies))
    # The title of the chapter asks whether one head does as well as the best.
    one_head = f"{experiment.task.name}.{'worse' if 1 in verdict.worse_num_heads else 'level'}"
    sentences = [translate(one_head)] if 1 in accuracies else []
    worst = min(accuracies, key=lambda num_heads: accuracies[num_heads].mean)
    if verdict.worse_num_heads:
        sentences.append(translate("verdict.apart", **best, worse=join_head_counts(verdict.worse_num_heads)))
        if verdict.equal_num_heads:
            sentences.append(translate("verdict.level some", level=join_head_counts(verdict.equal_num_heads)))
    elif format_percent(accuracies[worst].mean) == format_percent(accuracies[verdict.best_num_heads].mean):
        sentences.append(translate("verdict.tie", list=join_head_counts(accuracies)))
    else:
        sentences.append(translate("verdict.level all", **best, worst=heads[worst], low=shares[worst]))
    return phrases.join_sentences(sentences)


def _table_of_results(experiment: Experiment, phrases: Phrases) -> Table:
    translate = phrases.translate
    rows = tuple(
        (
            phrases.format_count("head", summary.num_heads),
            format_mean_percent(summary.accuracy),
            format_percent(min(summary.accuracy_by_seed)),
            format_percent(max(summary.accuracy_by_seed)),
            translate("seeds of", n=summary.seeds_that_learned, of=len(summary.accuracy_by_seed)),
            translate("never") if summary.first_learned_step is None else format_mean(summary.first_learned_step, 0),
        )
        for summary in experiment.summarise_seeds()
    )
    columns = map(translate, ("heads column", "right", "worst seed", "best seed", "learned", "learned at"))
    return Table(translate("result.caption", tested=TEST_QUESTIONS), tuple(columns), rows)


def _chart_of_training(experiment: Experiment, phrases: Phrases) -> str:
    """Draw the share of correct answers over the steps, one curve per number of heads."""
    curves = []
    for place, num_heads in enumerate(experiment.head_counts):
        models = experiment.models_with_head_count(num_heads)
        # One tuple per tested step: the accuracy of each seed.
        accuracies = list(zip(*([point.accuracy for point in model.learning_curve] for model in models), strict=True))
        curves.append(
            Curve(
                phrases.format_count("head", num_heads),
                f"c{place % 4}",
                [point.step for point in models[0].learning_curve],
                [sum(each) / len(each) for each in accuracies],
                [min(each) for each in accuracies],
                [max(each) for each in accuracies],
            )
        )
    return draw_line_chart(
        curves,
        label=phrases.translate("course.label"),
        x_label=phrases.translate("steps axis"),
        x_ticks=sorted({round(experiment.steps * part / 4) for part in range(5)}),
        level=(experiment.task.chance_accuracy, phrases.translate("guess")),
    )


def _describe_lookup_heads(experiment: Experiment, phrases: Phrases) -> tuple[tuple[str, ...], Table]:
    """Count the heads that attend to each name of the question, and the seeds in which two heads share two names."""
    translate, two = phrases.translate, experiment.task.name == "two"
    measures = ("first lookup", "second lookup") if two else ("first lookup",)
    rows, items = [], []
    for num_heads in experiment.head_counts:
        models, heads = experiment.models_with_head_count(num_heads), phrases.format_count("head", num_heads)
        counts = [[_count_heads_above_half(model, name) for model in models] for name in measures]
        neither = [num_heads - sum(each) for each in zip(*counts, strict=True)]
        cells = [format_mean(MeanOverSeeds.from_values(column)) for column in (*counts, neither)]
        entropies = [fmean(head.measures["entropy"] for head in model.final_heads) for model in models]
        rows.append((heads, *cells, format_mean(MeanOverSeeds.from_values(entropies), 2)))
        if two and num_heads > 1:
            shared = sum(all(each) for each in zip(*counts, strict=True))
            items.append(translate("looks.two item", heads=heads, yes=shared, of=len(models)))
    named = ("on first", "on second", "on neither") if two else ("on lookup", "not on it")
    columns = map(translate, ("heads column", *named, "entropy"))
    sentences = (translate("looks.two", list=phrases.join_items(items)),) if items else ()
    return sentences, Table(translate("looks.caption lookup"), tuple(columns), tuple(rows))


def _describe_induction_heads(experiment: Experiment, phrases: Phrases) -> tuple[tuple[str, ...], Table]:
    """Measure the strongest previous-token head of layer 0 and the strongest induction head of layer 1."""
    translate, rows = phrases.translate, []
    for num_heads in experiment.head_counts:
        models = experiment.models_with_head_count(num_heads)
        previous = [max(_measures_of_layer(model, 0, "previous")) for model in models]
        induction = [max(_measures_of_layer(model, 1, "induction")) for model in models]
        many = [sum(share > LARGE_SHARE for share in _measures_of_layer(model, 1, "induction")) for model in models]
        rows.append(
            (
                phrases.format_count("head", num_heads),
                format_mean_percent(MeanOverSeeds.from_values(previous)),
                format_mean_percent(MeanOverSeeds.from_values(induction)),
                format_mean(MeanOverSeeds.from_values(many)),
            )
        )
    columns = map(translate, ("heads column", "strongest previous", "strongest induction", "many induction"))
    able = [model for model in experiment.models if model.final_accuracy >= LEARNED_ACCURACY]
    without = sum(max(_measures_of_layer(model, 1, "induction")) <= LARGE_SHARE for model in able)
    sentences = (translate("looks.induction count", of=len(able), without=without),) if without else ()
    return sentences, Table(translate("looks.caption induction"), tuple(columns), tuple(rows))


def _measures_of_layer(model: TrainedModel, layer: int, name: str) -> list[float]:
    return [head.measures[name] for head in model.final_heads if head.layer == layer]


def _count_heads_above_half(model: TrainedModel, name: str) -> int:
    return sum(head.measures[name] > LARGE_SHARE for head in model.final_heads)
