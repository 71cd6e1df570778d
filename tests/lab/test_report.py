"""The lab's chapters: their sentences are made of the numbers, and change with them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from multihead_lab.matching import Match, Spread, match_vectors
from multihead_lab.report import build_chapters, copies_chapter, experiment_chapter
from multihead_lab.tasks import HeadLook
from multihead_lab.text import Chapter, language
from multihead_lab.training import Experiment, Moment, Training
from tests.lab.few import few_answers


def chapters(answers=None, lang: str = "en") -> dict[str, Chapter]:
    return {chapter.name: chapter for chapter in build_chapters(answers or few_answers(), language(lang))}


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_part_has_its_chapters_with_tables_as_wide_as_their_heads(lang: str) -> None:
    built = chapters(lang=lang)
    names = ["count", "shapes", "outputs", "reads", "one", "two", "induction", "copies", "vectors", "lengths"]
    assert list(built) == names
    for chapter in built.values():
        assert chapter.answer
        assert "{" not in " ".join((chapter.title, chapter.answer, *chapter.text, *chapter.looks))
        for table in (*chapter.tables, *chapter.looks_tables):
            assert table.rows
            assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.parametrize(("name", "bars"), [("outputs", 2), ("copies", 2), ("vectors", 24)])
def test_the_bars_of_a_chapter_are_the_numbers_of_its_table(name: str, bars: int) -> None:
    chapter = chapters()[name]
    assert chapter.chart is not None
    shares = [round(float(each)) for each in re.findall(r">(\d+) % ", chapter.chart[0])]
    cells = [cell for row in chapter.tables[0].rows for cell in row[1:] if "%" in cell]
    assert len(shares) == chapter.chart[0].count('<rect class="bar') == bars
    assert len(cells) == bars
    assert shares == pytest.approx([float(re.split("[ \u00a0]", cell)[0]) for cell in cells], abs=0.6)


def test_a_part_that_was_not_run_is_not_told() -> None:
    bare = replace(few_answers(), parameters=None, experiments=(), copies=None)
    assert list(chapters(bare)) == ["vectors", "lengths"]
    assert list(chapters(replace(few_answers(), experiments=(), copies=None, vectors=None))) == [
        "count", "shapes", "outputs", "reads",
    ]  # fmt: skip


def test_the_count_of_parameters_is_told_as_it_was_counted() -> None:
    count = chapters()["count"]
    total = 4 * 16 * 16 + 4 * 16
    assert (
        plain(count.answer)
        == f"No. With 1 or 2 heads the layer has the same 4 tensors and the same {total:,} parameters."
    )
    assert count.tables[0].rows[0] == ("in_proj_weight", "(48, 16)", "(48, 16)")


def test_other_counts_would_be_told_otherwise() -> None:
    found = few_answers().parameters
    one, two = found.counts
    fewer = replace(two, packed=two.packed[:1], torch=two.packed)
    built = chapters(replace(few_answers(), parameters=replace(found, counts=(one, fewer))))
    assert plain(built["count"].answer) == (
        "Yes. The layers have different numbers of parameters: 1 head 1,088 and 2 heads 768."
    )
    assert built["count"].text[1].endswith("have other names or shapes.")
    read = replace(two, features_read=(3, 16))
    built = chapters(replace(few_answers(), parameters=replace(found, counts=(one, read))))
    assert built["reads"].answer == "Not every head reads all 16 features: between 3 and 16."


def test_equal_outputs_would_be_told_otherwise() -> None:
    found = few_answers().parameters
    pairs = tuple(replace(pair, output_difference=0.0) for pair in found.pairs)
    built = chapters(replace(few_answers(), parameters=replace(found, pairs=pairs)))
    assert built["outputs"].answer.startswith("Yes. The output is the same for every number of heads")


def match(content, long: float, short: float, own: float, noise: float = 1.0) -> Match:
    return Match(content, noise, Spread(long, 0.01), Spread(short, 0.01), Spread(own, 0.01))


@pytest.mark.parametrize(
    ("matches", "expected"),
    [
        (
            (match("even", 0.9, 0.5, 0.5), match("part", 0.1, 0.2, 0.6)),
            (
                "It depends on the content. One row of 64 wins: all columns alike. "
                "8 rows of 8 win: partner agrees in one short row."
            ),
        ),
        ((match("even", 0.9, 0.5, 0.5),), "No. One row of 64 wins: all columns alike."),
        ((match("two", 0.1, 0.2, 0.3),), "Yes. 8 rows of 8 win: two partners, half a row each."),
        ((match("even", 0.5, 0.5, 0.5),), "Level: all columns alike."),
        (
            (match("even", 0.5, 0.5, 0.5), match("even", 0.9, 0.5, 0.5, noise=2.0)),
            "No. One row of 64 wins: all columns alike (noise 2). Level: all columns alike (noise 1).",
        ),
    ],
)
def test_the_verdict_on_long_and_short_rows_follows_from_the_shares(matches, expected: str) -> None:
    answers = replace(few_answers(), vectors=replace(few_answers().vectors, matches=matches))
    assert chapters(answers)["vectors"].answer == expected


def test_one_seed_gives_no_verdict_on_rows() -> None:
    found = match_vectors(trials=20, seeds=1, lengths=(8, 64), noises=(0.5,))
    for lang, words in (("en", "One seed has no spread"), ("zh", "只有一个种子")):
        made = {each.name: each for each in build_chapters(replace(few_answers(), vectors=found), language(lang))}
        assert made["vectors"].answer.startswith(words)
        assert made["lengths"].answer.startswith(words)
        assert "±" not in "".join(cell for row in made["lengths"].tables[0].rows for cell in row)


def test_length_is_called_better_only_where_it_was() -> None:
    found = few_answers().vectors
    assert chapters()["lengths"].answer.startswith("Longer is better")
    turned = replace(found, lengths=tuple(reversed(found.lengths)))
    assert chapters(replace(few_answers(), vectors=turned))["lengths"].answer.startswith("Longer is not better here")


@pytest.mark.parametrize(
    ("keys", "slope", "beginning"),
    [
        (1.5, 0.05, "The harm comes from leaving out the division by √columns."),
        (40.0, 0.09, "Dividing scores by √columns makes no such difference here"),
        (2.0, 0.12, "Dividing scores by √columns makes no such difference here"),
    ],
)
def test_leaving_out_the_division_is_called_harmful_only_where_it_was(
    keys: float, slope: float, beginning: str
) -> None:
    found = few_answers().vectors
    last = replace(
        found.lengths[-1],
        scaled_keys=Spread(40.0, 0.1),
        plain_keys=Spread(keys, 0.1),
        scaled_slope=Spread(0.09, 0.001),
        plain_slope=Spread(slope, 0.001),
    )
    built = chapters(replace(few_answers(), vectors=replace(found, lengths=(*found.lengths[:-1], last))))
    assert built["lengths"].text[0].startswith(beginning)


def lookup(layer: int, head: int, first: float, second: float) -> HeadLook:
    measures = {"first lookup": first, "second lookup": second, "the others": 1 - first - second, "entropy": 0.5}
    return HeadLook(layer, head, measures, ((first, second),))


def training(num_heads: int, seed: int, right: float, looks: tuple[HeadLook, ...]) -> Training:
    moments = (Moment(0, 2.0, 0.1, looks), Moment(10, 0.5, right, looks))
    return Training(num_heads, seed, 1234, 1.4, 1.4, moments)


def experiment(task: str, shares: dict[int, tuple[float, ...]], looks=None) -> Experiment:
    looks = looks or {heads: tuple(lookup(0, head, 0.9, 0.0) for head in range(heads)) for heads in shares}
    trainings = [
        training(heads, seed, right, looks[heads])
        for heads, each in shares.items()
        for seed, right in enumerate(each)
    ]  # fmt: skip
    return Experiment(task, "drawn", 10, 64, 0.01, 0.125, tuple(trainings))


def chapter_of(one: Experiment):
    return experiment_chapter(one, few_answers(), language("en"))


@pytest.mark.parametrize(
    ("task", "shares", "answer"),
    [
        (
            "two",
            {1: (0.1, 0.1), 2: (1.0, 1.0), 4: (0.9, 1.0)},
            (
                "No, one head alone falls behind. Best: 2 heads, 100.0 ± 0.0 % correct. Behind by more than the "
                "spread: 1 head (10.0 ± 0.0 %). Level with it: 4 heads (95.0 ± 7.1 %)."
            ),
        ),
        (
            "one",
            {1: (1.0, 1.0), 8: (0.5, 0.5)},
            (
                "Not beyond the spread. Best: 1 head, 100.0 ± 0.0 % correct. Behind by more than the spread: "
                "8 heads (50.0 ± 0.0 %)."
            ),
        ),
        (
            "one",
            {1: (0.9, 0.9), 8: (0.9, 1.0)},
            (
                "Not beyond the spread. No number of heads is ahead by more than the spread: 8 heads came first with "
                "95.0 ± 7.1 % correct, 1 head last with 90.0 ± 0.0 %."
            ),
        ),
        (
            "one",
            {1: (0.999, 0.999), 2: (1.0, 1.0)},
            (
                "Not beyond the spread. No number of heads is ahead by more than the spread: 2 heads came first with "
                "100.0 ± 0.0 % correct, 1 head last with 99.9 ± 0.0 %."
            ),
        ),
        (
            "two",
            {1: (1.0, 1.0), 2: (1.0, 1.0)},
            "Yes, within the spread. A tie: 1 head (100.0 ± 0.0 %) and 2 heads (100.0 ± 0.0 %).",
        ),
        (
            "two",
            {1: (0.5,), 2: (1.0,)},
            (
                "One seed has no spread, so no number of heads is called better. "
                "Correct: 1 head (50.0 %) and 2 heads (100.0 %)."
            ),
        ),
        ("one", {2: (0.9, 0.9)}, "2 heads: 90.0 ± 0.0 % correct."),
    ],
)
def test_the_verdict_follows_from_the_numbers(task: str, shares, answer: str) -> None:
    assert plain(chapter_of(experiment(task, shares)).answer) == answer


def test_the_table_of_results_has_the_worst_and_the_best_seed() -> None:
    rows = chapter_of(experiment("two", {1: (0.1, 0.2), 2: (0.95, 1.0)})).tables[0].rows
    assert [plain(" | ".join(row)) for row in rows] == [
        "1 head | 15.0 ± 7.1 % | 10.0 % | 20.0 % | 0 of 2 | –",
        "2 heads | 97.5 ± 3.5 % | 95.0 % | 100.0 % | 2 of 2 | 10 ± 0",
    ]


def test_seeds_in_which_two_heads_share_two_names_are_counted() -> None:
    shared = (lookup(0, 0, 0.9, 0.0), lookup(0, 1, 0.1, 0.8))
    alone = (lookup(0, 0, 0.9, 0.0),)
    chapter = chapter_of(experiment("two", {1: (0.1, 0.1), 2: (1.0, 1.0)}, {1: alone, 2: shared}))
    assert plain(chapter.looks[0]).endswith("and another on the second: 2 heads 2 of 2.")
    assert (
        plain(" | ".join(chapter.looks_tables[0].rows[1]))
        == "2 heads | 1.0 ± 0.0 | 1.0 ± 0.0 | 0.0 ± 0.0 | 0.50 ± 0.00"
    )


def test_able_models_without_an_induction_head_are_counted() -> None:
    def looks(induction: float) -> tuple[HeadLook, ...]:
        return tuple(
            HeadLook(layer, 0, {"previous": 0.7, "induction": induction * layer, "entropy": 1.0}, ((1.0,),))
            for layer in (0, 1)
        )

    with_it = experiment("induction", {1: (0.95, 0.95)}, {1: looks(0.8)})
    assert chapter_of(with_it).looks == ()
    without = chapter_of(experiment("induction", {1: (0.95, 0.5)}, {1: looks(0.3)}))
    assert without.looks[0].startswith("Of the 1 models with at least 90 % correct answers, 1 have no head in layer 1")
    assert plain(" | ".join(without.looks_tables[0].rows[0])) == "1 head | 70.0 ± 0.0 % | 30.0 ± 0.0 % | 0.0 ± 0.0"


def test_the_curves_hold_every_number_of_heads() -> None:
    chapter = chapter_of(experiment("two", {1: (0.1, 0.2), 2: (0.95, 1.0)}))
    assert chapter.chart is not None
    assert chapter.chart[0].count("<polyline") == chapter.chart[0].count("<polygon") == 2


def test_the_chapter_on_copies_follows_from_their_distance() -> None:
    found = few_answers()
    chapter = copies_chapter(found.copies, found.experiments, language("en"))
    assert chapter.answer.startswith("They start from different random weights. Started as exact copies, 2 heads stay")
    assert [row[0] for row in chapter.tables[0].rows] == ["drawn", "copied"]
    parted = replace(found.copies, trainings=tuple(replace(each, apart_after=0.5) for each in found.copies.trainings))
    other = copies_chapter(parted, (), language("en"))
    assert other.answer.startswith("Started as copies, 2 heads end 0.5 apart")
    assert [row[0] for row in other.tables[0].rows] == ["copied"]
