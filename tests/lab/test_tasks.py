"""The tasks: their answers are correct, and the measures of heads follow from their weights."""

from __future__ import annotations

import pytest
import torch

from multihead.errors import ArgumentError
from multihead_lab.tasks import TASKS, InductionTask, LookupTask, find_task


def draw(task, samples: int = 50, seed: int = 0):
    return task.draw_batch(samples, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lookups", [1, 2])
def test_the_answer_of_a_lookup_is_the_value_of_the_name(lookups: int) -> None:
    batch = draw(LookupTask("x", lookups_per_question=lookups))
    names, values, questions = batch.inputs
    for row in range(len(names)):
        assert len(set(names[row].tolist())) == names.shape[1]
        facts = dict(zip(names[row].tolist(), values[row].tolist(), strict=True))
        assert batch.answers[row].tolist() == [facts[name] for name in questions[row].tolist()]
        assert names[row, batch.targets[row]].tolist() == questions[row].tolist()


def test_the_answer_of_an_induction_is_at_its_target_after_the_same_token() -> None:
    batch = draw(InductionTask())
    (row,) = batch.inputs
    questions = batch.targets >= 0
    assert torch.equal(questions, batch.answers >= 0)
    for sample, place in questions.nonzero().tolist():
        target = int(batch.targets[sample, place])
        assert 1 <= target <= place
        assert row[sample, target - 1] == row[sample, place]
        assert row[sample, target] == row[sample, place + 1] == batch.answers[sample, place]


@pytest.mark.parametrize("name", TASKS)
def test_every_number_of_heads_starts_with_the_same_numbers(name: str) -> None:
    states = []
    for num_heads in (1, 2, 4, 8):
        torch.manual_seed(0)
        states.append(TASKS[name].build_model(num_heads).state_dict())
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[key], states[0][key]) for key in state)


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_measures_of_a_head_are_its_weights_on_the_facts_in_question(name: str) -> None:
    task = TASKS[name]
    torch.manual_seed(0)
    model, batch = task.build_model(2), draw(task, 6)
    names, values, questions = batch.inputs
    facts = model.name_vectors(names) + model.value_vectors(values)
    question = sum(table(questions[:, place]) for place, table in enumerate(model.question_vectors))
    layer = model.attention
    q = layer.q_proj(question).view(6, 2, 1, 16)
    k = layer.k_proj(facts).view(6, 12, 2, 16).transpose(1, 2)
    weights = (q @ k.transpose(2, 3) / 4).softmax(-1)[:, :, 0].detach().double()  # (batch, heads, facts)
    looks = task.measure_heads(model, batch)
    for look in looks:
        mine = weights[:, look.head]
        for place, measure in enumerate(("first lookup", "second lookup")[: task.lookups_per_question]):
            expected = float(mine.gather(1, batch.targets[:, place : place + 1]).mean())
            assert look.measures[measure] == pytest.approx(expected, abs=1e-5)
        assert look.measures["entropy"] == pytest.approx(float(torch.special.entr(mine).sum(1).mean()), abs=1e-5)
        assert sum(look.measures[key] for key in look.measures if key != "entropy") == pytest.approx(1, abs=1e-5)
        asked_first = [row[0] for row in look.weights]
        assert asked_first == pytest.approx(mine.gather(1, batch.targets[:, :1])[:, 0].tolist(), abs=6e-4)
        assert [sum(row) for row in look.weights] == pytest.approx([1] * 6, abs=0.01)


def test_the_measures_of_an_induction_model_s_heads_follow_from_their_maps() -> None:
    task = InductionTask()
    torch.manual_seed(0)
    model, batch = task.build_model(2), draw(task, 1)
    looks = task.measure_heads(model, batch)
    assert [(look.layer, look.head) for look in looks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    questions = (batch.targets[0] >= 0).nonzero()[:, 0].tolist()
    for look in looks:
        rows = look.weights
        assert all(weight == 0 for query, row in enumerate(rows) for weight in row[query + 1 :])
        expected = sum(rows[query][int(batch.targets[0, query])] for query in questions) / len(questions)
        assert look.measures["induction"] == pytest.approx(expected, abs=6e-4)
        before = [rows[query][query - 1] for query in range(1, len(rows))]
        assert look.measures["previous"] * len(rows) == pytest.approx(sum(before), rel=0.06)


@pytest.mark.parametrize("name", TASKS)
def test_correct_answers_count_and_random_guessing_reaches_the_stated_chance(name: str) -> None:
    task = TASKS[name]
    batch = draw(task, 2000)
    classes = 8 if name != "induction" else 16
    shape = (*batch.answers.shape, classes)
    perfect = torch.zeros(shape).scatter_(-1, batch.answers.clamp(min=0)[..., None], 1.0)
    assert task.share_correct(perfect, batch) == 1
    blind = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    assert task.share_correct(blind, batch) == pytest.approx(task.chance_accuracy, abs=0.02)


def test_a_task_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ArgumentError) as refused:
        find_task("three")
    assert str(refused.value) == "There is no task 'three'. Give one of one, two, induction."
