"""The chapters on training: the verdict, the curves and the heads follow from the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multihead.lab.report_tasks import copies_chapter, experiment_chapter
from multihead.lab.tasks import HeadLook
from multihead.lab.text import language
from multihead.lab.training import Experiment, Moment, Training
from tests.lab.few import few_answers


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


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


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
