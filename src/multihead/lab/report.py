"""Turn the results of the lab into chapters: questions, answers and tables made of the measured numbers."""

from __future__ import annotations

from multihead.lab.charts import Bar, Curve, bars, chart
from multihead.lab.matching import Match, Vectors
from multihead.lab.parameters import Parameter, Parameters
from multihead.lab.report_tasks import copies_chapter, experiment_chapter
from multihead.lab.run import Answers
from multihead.lab.text import Chapter, Phrases, Table, percent, shape, small

__all__ = ["build_chapters"]


def build_chapters(answers: Answers, phrases: Phrases) -> tuple[Chapter, ...]:
    """Build the chapters in the order in which their questions arise."""
    chapters: list[Chapter] = []
    if answers.parameters is not None:
        found = answers.parameters
        chapters += [_count(found, phrases), _shapes(found, phrases)]
        chapters += [_outputs(found, phrases)] if found.pairs else []
        chapters.append(_reads(found, phrases))
    chapters += [experiment_chapter(experiment, answers, phrases) for experiment in answers.experiments]
    if answers.copies is not None:
        chapters.append(copies_chapter(answers.copies, answers.experiments, phrases))
    if answers.vectors is not None:
        chapters += [_matches(answers.vectors, phrases), _lengths(answers.vectors, phrases)]
    return tuple(chapters)


def _count(found: Parameters, phrases: Phrases) -> Chapter:
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
    return next((shape(each.shape) for each in parameters if each.name == name), "")


def _shapes(found: Parameters, phrases: Phrases) -> Chapter:
    """Build the chapter on the shapes from input to output."""
    translate = phrases.translate
    heads = phrases.heads(found.shapes_of)
    sizes = {each.name: each.shape for each in found.shapes}
    rows = tuple(
        (each.name, each.code or translate("the input"), shape(each.shape), " ".join(each.axes))
        for each in found.shapes
    )
    columns = (translate("tensor"), translate("made by"), translate("shape"), translate("axes"))
    return Chapter(
        "shapes",
        translate("shapes.title"),
        translate("shapes.answer", heads=heads, scores=shape(sizes["scores"]), length=found.length),
        (translate("shapes.text", head_dim=sizes["q_heads"][-1], embed_dim=found.embed_dim),),
        (Table(translate("shapes.caption", heads=heads), columns, rows),),
    )


def _outputs(found: Parameters, phrases: Phrases) -> Chapter:
    """Build the chapter "Do the same weights give the same output?"."""
    translate = phrases.translate
    far = max(found.pairs, key=lambda pair: pair.output_difference)
    key = "outputs.same" if far.output_difference < 1e-9 else "outputs.differ"
    output = small(far.output_difference) if key == "outputs.same" else percent(far.output_difference, 0)
    answer = translate(
        key,
        first=phrases.heads(far.first),
        second=phrases.heads(far.second),
        output=output,
        gradient=percent(far.gradient_difference, 0),
    )
    rows = tuple(
        (
            translate("two counts", first=pair.first, second=pair.second),
            percent(pair.output_difference),
            percent(pair.gradient_difference),
            small(pair.score_difference),
        )
        for pair in found.pairs
    )
    columns = (
        translate("heads column"),
        translate("output differs"),
        translate("gradient differs"),
        translate("scores differ"),
    )
    text = translate("outputs.text", scores=small(max(pair.score_difference for pair in found.pairs)))
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


def _reads(found: Parameters, phrases: Phrases) -> Chapter:
    """Build the chapter "Does each head see only a part of the input?"."""
    translate = phrases.translate
    read = [number for count in found.counts for number in count.features_read]
    key = "reads.all" if min(read) == found.embed_dim else "reads.some"
    answer = translate(key, features=found.embed_dim, least=min(read), most=max(read))
    rows = tuple(
        (
            phrases.heads(count.num_heads),
            str(count.head_dim),
            _range(count.features_read),
            _range(count.cut_features_read),
            f"{count.cut_total:,}",
            small(count.independent_difference),
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
    text = translate("reads.text"), translate("reads.independent", difference=small(largest))
    return Chapter("reads", translate("reads.title"), answer, text, (Table(translate("reads.caption"), columns, rows),))


def _range(values: tuple[int, ...]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)}–{max(values)}"


def _matches(found: Vectors, phrases: Phrases) -> Chapter:
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
        translate(key, **sizes, contents=_contents(matches, found, phrases)) for key, matches in ways.items() if matches
    ]
    if ways["vectors.long"] and ways["vectors.short"]:
        sentences.insert(0, translate("vectors.depends"))
    elif ways["vectors.long"] or ways["vectors.short"]:
        sentences.insert(0, translate("vectors.never" if ways["vectors.long"] else "vectors.always"))
    return phrases.joined(sentences)


def _contents(matches: list[Match], found: Vectors, phrases: Phrases) -> str:
    """List kinds of content, with the noise only if the result depends on it."""
    named = []
    for content in dict.fromkeys(match.content for match in matches):
        noises = [f"{match.noise:g}" for match in matches if match.content == content]
        name = phrases.translate(f"content.{content}")
        everywhere = len(noises) == sum(match.content == content for match in found.matches)
        alone = phrases.translate("at noise", content=name, noise=phrases.listed(noises))
        named.append(name if everywhere else alone)
    return phrases.words["join.parts"].join(named)


def _lengths(found: Vectors, phrases: Phrases) -> Chapter:
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
