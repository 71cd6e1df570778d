"""Tell what the lab found out: questions, answers and tables made of the measured numbers."""

from __future__ import annotations

from multihead.lab.charts import Curve, chart
from multihead.lab.matching import Match, Vectors
from multihead.lab.parameters import Parameter, Parameters
from multihead.lab.report_tasks import told_copies, told_experiment
from multihead.lab.run import Answers
from multihead.lab.text import Chapter, Phrases, Table, percent, shape, small

__all__ = ["tell"]


def tell(answers: Answers, phrases: Phrases) -> tuple[Chapter, ...]:
    """Turn numbers into chapters, in the order in which the questions arise."""
    chapters: list[Chapter] = []
    if answers.parameters is not None:
        found = answers.parameters
        chapters += [_count(found, phrases), _shapes(found, phrases)]
        chapters += [_outputs(found, phrases)] if found.pairs else []
        chapters.append(_reads(found, phrases))
    chapters += [told_experiment(experiment, answers, phrases) for experiment in answers.experiments]
    if answers.copies is not None:
        chapters.append(told_copies(answers.copies, answers.experiments, phrases))
    if answers.vectors is not None:
        chapters += [_matches(answers.vectors, phrases), _lengths(answers.vectors, phrases)]
    return tuple(chapters)


def _count(found: Parameters, phrases: Phrases) -> Chapter:
    """Do more heads mean more parameters?"""
    say, counts = phrases.say, found.counts
    first = counts[0]
    if all(count.packed == first.packed for count in counts):
        heads = phrases.listed((str(count.num_heads) for count in counts), "or")
        answer = say("count.same", heads=heads, tensors=len(first.packed), total=f"{first.total:,}")
    else:
        totals = phrases.listed(f"{phrases.heads(count.num_heads)} {count.total:,}" for count in counts)
        answer = say("count.differ", totals=totals)
    alike = all(set(count.torch) == set(count.packed) for count in counts)
    names = [parameter.name for parameter in first.packed]
    rows = [(name, *(_shape_of(count.packed, name) for count in counts)) for name in names]
    rows.append((say("all together"), *(f"{count.total:,}" for count in counts)))
    columns = (say("parameter"), *(phrases.heads(count.num_heads) for count in counts))
    text = say("count.text", embed_dim=found.embed_dim), say("count.torch same" if alike else "count.torch differ")
    return Chapter("count", say("count.title"), answer, text, (Table(say("count.caption"), columns, tuple(rows)),))


def _shape_of(parameters: tuple[Parameter, ...], name: str) -> str:
    return next((shape(each.shape) for each in parameters if each.name == name), "")


def _shapes(found: Parameters, phrases: Phrases) -> Chapter:
    """Which shapes lie on the way?"""
    say = phrases.say
    heads = phrases.heads(found.shapes_of)
    sizes = {each.name: each.shape for each in found.shapes}
    rows = tuple(
        (each.name, each.code or say("the input"), shape(each.shape), " ".join(each.axes)) for each in found.shapes
    )
    columns = (say("tensor"), say("made by"), say("shape"), say("axes"))
    return Chapter(
        "shapes",
        say("shapes.title"),
        say("shapes.answer", heads=heads, scores=shape(sizes["scores"]), length=found.length),
        (say("shapes.text", head_dim=sizes["q_heads"][-1], embed_dim=found.embed_dim),),
        (Table(say("shapes.caption", heads=heads), columns, rows),),
    )


def _outputs(found: Parameters, phrases: Phrases) -> Chapter:
    """Do the same weights give the same output?"""
    say = phrases.say
    far = max(found.pairs, key=lambda pair: pair.output_difference)
    key = "outputs.same" if far.output_difference < 1e-9 else "outputs.differ"
    output = small(far.output_difference) if key == "outputs.same" else percent(far.output_difference, 0)
    answer = say(
        key,
        first=phrases.heads(far.first),
        second=phrases.heads(far.second),
        output=output,
        gradient=percent(far.gradient_difference, 0),
    )
    rows = tuple(
        (
            say("two counts", first=pair.first, second=pair.second),
            percent(pair.output_difference),
            percent(pair.gradient_difference),
            small(pair.score_difference),
        )
        for pair in found.pairs
    )
    columns = (say("heads column"), say("output differs"), say("gradient differs"), say("scores differ"))
    text = say("outputs.text", scores=small(max(pair.score_difference for pair in found.pairs)))
    return Chapter("outputs", say("outputs.title"), answer, (text,), (Table(say("outputs.caption"), columns, rows),))


def _reads(found: Parameters, phrases: Phrases) -> Chapter:
    """Does each head see only a part of the input?"""
    say = phrases.say
    read = [number for count in found.counts for number in count.features_read]
    key = "reads.all" if min(read) == found.embed_dim else "reads.some"
    answer = say(key, features=found.embed_dim, least=min(read), most=max(read))
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
        say("heads column"),
        say("columns of a head"),
        say("features read"),
        say("if cut"),
        say("numbers if cut"),
        say("independent"),
    )
    largest = max(count.independent_difference for count in found.counts)
    text = say("reads.text"), say("reads.independent", difference=small(largest))
    return Chapter("reads", say("reads.title"), answer, text, (Table(say("reads.caption"), columns, rows),))


def _range(values: tuple[int, ...]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)}–{max(values)}"


def _matches(found: Vectors, phrases: Phrases) -> Chapter:
    """Does a long row match worse than several short ones?"""
    say = phrases.say
    width = found.columns // found.parts
    sizes = {"columns": found.columns, "parts": found.parts, "width": width}
    ways: dict[str, list[Match]] = {"vectors.long": [], "vectors.short": [], "vectors.level": []}
    for match in found.matches:
        # The short rows are judged by the better of two: their mean, or the rows that carry the content.
        short = max(match.short, match.own, key=lambda share: share.mean)
        if not match.long.apart(short):
            ways["vectors.level"].append(match)
        else:
            ways["vectors.long" if match.long.mean > short.mean else "vectors.short"].append(match)
    sentences = [
        say(key, **sizes, contents=_contents(matches, found, phrases)) for key, matches in ways.items() if matches
    ]
    if ways["vectors.long"] and ways["vectors.short"]:
        sentences.insert(0, say("vectors.depends"))
    elif ways["vectors.long"] or ways["vectors.short"]:
        sentences.insert(0, say("vectors.never" if ways["vectors.long"] else "vectors.always"))
    rows = tuple(
        (
            say(f"content.{match.content}"),
            f"{match.noise:g}",
            phrases.spread(match.long),
            phrases.spread(match.short),
            phrases.spread(match.own) if match.content in ("part", "two") else "",
        )
        for match in found.matches
    )
    columns = (say("content column"), say("noise"), say("long", **sizes), say("short", **sizes), say("own"))
    noises = phrases.listed(dict.fromkeys(f"{match.noise:g}" for match in found.matches))
    told = {"candidates": found.candidates, "trials": found.trials, "seeds": found.seeds, "noises": noises}
    return Chapter(
        "vectors",
        say("vectors.title"),
        phrases.joined(sentences),
        (say("vectors.text", **sizes, **told),),
        (Table(say("vectors.caption"), columns, rows),),
    )


def _contents(matches: list[Match], found: Vectors, phrases: Phrases) -> str:
    """Name kinds of content, with the noise only where it makes the difference."""
    named = []
    for content in dict.fromkeys(match.content for match in matches):
        noises = [f"{match.noise:g}" for match in matches if match.content == content]
        name = phrases.say(f"content.{content}")
        everywhere = len(noises) == sum(match.content == content for match in found.matches)
        alone = phrases.say("at noise", content=name, noise=phrases.listed(noises))
        named.append(name if everywhere else alone)
    return phrases.words["join.parts"].join(named)


def _lengths(found: Vectors, phrases: Phrases) -> Chapter:
    """And how does the length itself matter?"""
    say = phrases.say
    first, last = found.lengths[0], found.lengths[-1]
    better = last.found.mean > first.found.mean and last.found.apart(first.found)
    answer = say(
        "lengths.better" if better else "lengths.worse",
        first=first.columns,
        last=last.columns,
        low=phrases.spread(first.found),
        high=phrases.spread(last.found),
    )
    harmful = (last.plain_keys, last.scaled_keys), (last.plain_slope, last.scaled_slope)
    text = say(
        "lengths.text"
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
        say(key) for key in ("columns", "found", "keys scaled", "keys plain", "slope scaled", "slope plain")
    )
    curve = Curve(
        say("found name"),
        "c0",
        [row.columns for row in found.lengths],
        [row.found.mean for row in found.lengths],
        [max(row.found.mean - row.found.deviation, 0) for row in found.lengths],
        [min(row.found.mean + row.found.deviation, 1) for row in found.lengths],
    )
    ticks = [row.columns for row in found.lengths]
    drawn = chart([curve], label=say("lengths.label"), x_label=say("columns axis"), x_ticks=ticks, logarithmic=True)
    table = Table(say("lengths.caption", noise=f"{found.length_noise:g}"), columns, rows)
    return Chapter("lengths", say("lengths.title"), answer, (text,), (table,), (drawn, say("lengths.label")))
