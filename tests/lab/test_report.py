"""The lab's chapters: their sentences are made of the numbers, and change with them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from multihead_lab.matching import MatchRates, MeanOverSeeds, match_vectors
from multihead_lab.report import build_chapters, copies_chapter, experiment_chapter
from multihead_lab.tasks import TASKS, HeadMeasurement
from multihead_lab.text import Chapter, load_phrases
from multihead_lab.training import CurvePoint, Experiment, TrainedModel
from tests.lab.few import few_answers


def chapters(answers=None, lang: str = "en") -> dict[str, Chapter]:
    return {chapter.name: chapter for chapter in build_chapters(answers or few_answers(), load_phrases(lang))}


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_part_has_its_chapters_with_tables_as_wide_as_their_heads(lang: str) -> None:
    built = chapters(lang=lang)
    names = ["count", "shapes", "outputs", "reads", "one", "two", "induction", "copies", "vectors", "lengths"]
    assert list(built) == names
    for chapter in built.values():
        assert chapter.short_answer
        assert "{" not in " ".join((chapter.title, chapter.short_answer, *chapter.paragraphs, *chapter.head_paragraphs))
        for table in filter(None, (chapter.table, chapter.head_table)):
            assert table.rows
            assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.parametrize(("name", "bars"), [("outputs", 2), ("copies", 2), ("vectors", 24)])
def test_the_bars_of_a_chapter_are_the_numbers_of_its_table(name: str, bars: int) -> None:
    chapter = chapters()[name]
    assert chapter.chart is not None
    shares = [round(float(each)) for each in re.findall(r">(\d+) % ", chapter.chart[0])]
    cells = [cell for row in chapter.table.rows for cell in row[1:] if "%" in cell]
    assert len(shares) == chapter.chart[0].count('<rect class="bar') == bars
    assert len(cells) == bars
    assert shares == pytest.approx([float(re.split("[ \u00a0]", cell)[0]) for cell in cells], abs=0.6)


def test_a_part_that_was_not_run_is_not_told() -> None:
    bare = replace(few_answers(), parameters=None, experiments=(), experiment_with_copied_heads=None)
    assert list(chapters(bare)) == ["vectors", "lengths"]
    counted = replace(few_answers(), experiments=(), experiment_with_copied_heads=None, vector_matching=None)
    assert list(chapters(counted)) == ["count", "shapes", "outputs", "reads"]


def test_the_count_of_parameters_is_told_as_it_was_counted() -> None:
    count = chapters()["count"]
    total = 4 * 16 * 16 + 4 * 16
    assert (
        plain(count.short_answer)
        == f"No. With 1 or 2 heads the layer has the same 4 tensors and the same {total:,} parameters."
    )
    assert count.table.rows[0] == ("in_proj_weight", "(48, 16)", "(48, 16)")


def test_other_counts_would_be_told_otherwise() -> None:
    found = few_answers().parameters
    one, two = found.layers
    first, *others = two.packed_parameters
    empty = (replace(each, shape=(0,)) for each in others)
    fewer = replace(two, packed_parameters=(first, *empty), torch_parameters=two.packed_parameters[1:])
    built = chapters(replace(few_answers(), parameters=replace(found, layers=(one, fewer))))
    assert plain(built["count"].short_answer) == (
        "Yes. The layers have different numbers of parameters: 1 head 1,088 and 2 heads 768."
    )
    assert built["count"].paragraphs[1].endswith("have other names or shapes.")
    read = replace(two, features_read_by_head=(3, 16))
    built = chapters(replace(few_answers(), parameters=replace(found, layers=(one, read))))
    assert built["reads"].short_answer == "Not every head reads all 16 features: between 3 and 16."


def test_equal_outputs_would_be_told_otherwise() -> None:
    found = few_answers().parameters
    pairs = tuple(replace(pair, output_difference=0.0) for pair in found.comparisons)
    built = chapters(replace(few_answers(), parameters=replace(found, comparisons=pairs)))
    assert built["outputs"].short_answer.startswith("Yes. The output is the same for every number of heads")


def match(content, long: float, short: float, own: float, noise: float = 1.0) -> MatchRates:
    return MatchRates(content, noise, MeanOverSeeds(long, 0.01), MeanOverSeeds(short, 0.01), MeanOverSeeds(own, 0.01))


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
    answers = replace(few_answers(), vector_matching=replace(few_answers().vector_matching, matches=matches))
    assert chapters(answers)["vectors"].short_answer == expected


def test_one_seed_gives_no_verdict_on_rows() -> None:
    found = match_vectors(trials=20, seeds=1, lengths=(8, 64), noises=(0.5,))
    for lang, words in (("en", "One seed has no spread"), ("zh", "只有一个种子")):
        made = {
            each.name: each
            for each in build_chapters(replace(few_answers(), vector_matching=found), load_phrases(lang))
        }
        assert made["vectors"].short_answer.startswith(words)
        assert made["lengths"].short_answer.startswith(words)
        assert "±" not in "".join(cell for row in made["lengths"].table.rows for cell in row)


def test_length_is_called_better_only_where_it_was() -> None:
    found = few_answers().vector_matching
    assert chapters()["lengths"].short_answer.startswith("Longer is better")
    turned = replace(found, lengths=tuple(reversed(found.lengths)))
    assert chapters(replace(few_answers(), vector_matching=turned))["lengths"].short_answer.startswith(
        "Longer is not better here"
    )


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
    found = few_answers().vector_matching
    last = replace(
        found.lengths[-1],
        scaled_effective_keys=MeanOverSeeds(40.0, 0.1),
        unscaled_effective_keys=MeanOverSeeds(keys, 0.1),
        scaled_softmax_slope=MeanOverSeeds(0.09, 0.001),
        unscaled_softmax_slope=MeanOverSeeds(slope, 0.001),
    )
    built = chapters(replace(few_answers(), vector_matching=replace(found, lengths=(*found.lengths[:-1], last))))
    assert built["lengths"].paragraphs[0].startswith(beginning)


def lookup(layer: int, head: int, first: float, second: float) -> HeadMeasurement:
    measures = {"first lookup": first, "second lookup": second, "the others": 1 - first - second, "entropy": 0.5}
    return HeadMeasurement(layer, head, measures, ((first, second),))


def training(num_heads: int, seed: int, right: float, looks: tuple[HeadMeasurement, ...]) -> TrainedModel:
    moments = (CurvePoint(0, 2.0, 0.1, looks), CurvePoint(10, 0.5, right, looks))
    return TrainedModel(num_heads, seed, 1234, 1.4, 1.4, moments)


def experiment(task: str, shares: dict[int, tuple[float, ...]], looks=None) -> Experiment:
    looks = looks or {heads: tuple(lookup(0, head, 0.9, 0.0) for head in range(heads)) for heads in shares}
    trainings = [
        training(heads, seed, right, looks[heads])
        for heads, each in shares.items()
        for seed, right in enumerate(each)
    ]  # fmt: skip
    return Experiment(TASKS[task], "drawn", 10, tuple(trainings))


def chapter_of(one: Experiment):
    return experiment_chapter(one, few_answers(), load_phrases("en"))


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
    assert plain(chapter_of(experiment(task, shares)).short_answer) == answer


def test_the_table_of_results_has_the_worst_and_the_best_seed() -> None:
    rows = chapter_of(experiment("two", {1: (0.1, 0.2), 2: (0.95, 1.0)})).table.rows
    assert [plain(" | ".join(row)) for row in rows] == [
        "1 head | 15.0 ± 7.1 % | 10.0 % | 20.0 % | 0 of 2 | –",
        "2 heads | 97.5 ± 3.5 % | 95.0 % | 100.0 % | 2 of 2 | 10 ± 0",
    ]


def test_seeds_in_which_two_heads_share_two_names_are_counted() -> None:
    shared = (lookup(0, 0, 0.9, 0.0), lookup(0, 1, 0.1, 0.8))
    alone = (lookup(0, 0, 0.9, 0.0),)
    chapter = chapter_of(experiment("two", {1: (0.1, 0.1), 2: (1.0, 1.0)}, {1: alone, 2: shared}))
    assert plain(chapter.head_paragraphs[0]).endswith("and another on the second: 2 heads 2 of 2.")
    assert plain(" | ".join(chapter.head_table.rows[1])) == "2 heads | 1.0 ± 0.0 | 1.0 ± 0.0 | 0.0 ± 0.0 | 0.50 ± 0.00"


def test_able_models_without_an_induction_head_are_counted() -> None:
    def looks(induction: float) -> tuple[HeadMeasurement, ...]:
        return tuple(
            HeadMeasurement(layer, 0, {"previous": 0.7, "induction": induction * layer, "entropy": 1.0}, ((1.0,),))
            for layer in (0, 1)
        )

    with_it = experiment("induction", {1: (0.95, 0.95)}, {1: looks(0.8)})
    assert chapter_of(with_it).head_paragraphs == ()
    without = chapter_of(experiment("induction", {1: (0.95, 0.5)}, {1: looks(0.3)}))
    assert without.head_paragraphs[0].startswith(
        "Of the 1 models with at least 90 % correct answers, 1 have no head in layer 1"
    )
    assert plain(" | ".join(without.head_table.rows[0])) == "1 head | 70.0 ± 0.0 % | 30.0 ± 0.0 % | 0.0 ± 0.0"


def test_the_curves_hold_every_number_of_heads() -> None:
    chapter = chapter_of(experiment("two", {1: (0.1, 0.2), 2: (0.95, 1.0)}))
    assert chapter.chart is not None
    assert chapter.chart[0].count("<polyline") == chapter.chart[0].count("<polygon") == 2


def test_the_chapter_on_copies_follows_from_their_distance() -> None:
    found = few_answers()
    chapter = copies_chapter(found.experiment_with_copied_heads, found.experiments, load_phrases("en"))
    assert chapter.short_answer.startswith(
        "They start from different random weights. Started as exact copies, 2 heads stay"
    )
    assert [row[0] for row in chapter.table.rows] == ["drawn", "copied"]
    parted = replace(
        found.experiment_with_copied_heads,
        models=tuple(replace(each, head_distance_after=0.5) for each in found.experiment_with_copied_heads.models),
    )
    other = copies_chapter(parted, (), load_phrases("en"))
    assert other.short_answer.startswith("Started as copies, 2 heads end 0.5 apart")
    assert [row[0] for row in other.table.rows] == ["copied"]
