"""The tasks of the lab: their questions, the small models that learn them, and what their heads attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention
from multihead.masks import Causal
from multihead.observation.observe import observe

__all__ = ["TASKS", "HeadMeasurement", "InductionTask", "LookupTask", "Task", "TaskBatch"]

MAX_PICTURE_ROWS = 12  # questions in the picture of a lookup


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """Questions and answers.

    Attributes:
        inputs: the arguments of the model.
        answers: the correct classes; -1 at positions without a question.
        targets: the index of each answer among the keys, in the shape of `answers`; -1 at positions without a question.
    """

    inputs: tuple[Tensor, ...]
    answers: Tensor
    targets: Tensor


@dataclass(frozen=True)
class HeadMeasurement:
    """What one head attends to.

    Attributes:
        layer, head: indices of the head.
        measures: shares of its weight on different targets, 0 to 1, and its entropy (nats).
        weights: rows of weights, 0 to 1.
    """

    layer: int
    head: int
    measures: dict[str, float]
    weights: tuple[tuple[float, ...], ...]


class Task(Protocol):
    """The interface of a task."""

    @property
    def name(self) -> str:
        """The name: "one", "two" or "induction"."""
        ...

    @property
    def embed_dim(self) -> int:
        """Width of its layers; the number of heads must divide it."""
        ...

    @property
    def steps(self) -> int:
        """Steps of training."""
        ...

    @property
    def batch_size(self) -> int:
        """Questions per step."""
        ...

    @property
    def learning_rate(self) -> float:
        """The learning rate of Adam."""
        ...

    @property
    def chance_accuracy(self) -> float:
        """Share of correct answers of random guessing."""
        ...

    def build_model(self, num_heads: int) -> nn.Module:
        """Build a model; the parameters have the same number and the same distribution for every number of heads."""
        ...

    def draw_batch(self, samples: int, generator: torch.Generator) -> TaskBatch:
        """Draw random questions."""
        ...

    def share_correct(self, logits: Tensor, batch: TaskBatch) -> float:
        """Return the share of questions that are answered correctly."""
        ...

    def measure_heads(self, model: nn.Module, batch: TaskBatch) -> tuple[HeadMeasurement, ...]:
        """Measure what every head attends to on a batch."""
        ...


@dataclass(frozen=True)
class LookupTask:
    """A list of facts, each a name and its value, and a question with one or two names: what are their values?

    One attention layer goes from the question to the facts, and a linear map reads the values from its output. A fact
    is the sum of its name's vector and its value's vector, so the sum of two facts does not show which value belongs to
    which name: a question with two names needs two separate lookups.

    Attributes:
        name: the name of the task.
        lookups_per_question: names per question, 1 or 2.
        steps, batch_size, learning_rate, embed_dim: see `Task`.
        num_names: number of different names.
        num_values: number of different values.
        facts_per_row: facts per list.
    """

    name: str
    lookups_per_question: int
    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 1e-2
    embed_dim: int = 32
    num_names: int = 32
    num_values: int = 8
    facts_per_row: int = 12

    @property
    def chance_accuracy(self) -> float:
        """Share of correct answers of random guessing: every value of a question must be correct."""
        return float((1 / self.num_values) ** self.lookups_per_question)

    def build_model(self, num_heads: int) -> nn.Module:
        """Build a model with this number of heads."""
        return _LookupModel(self, num_heads)

    def draw_batch(self, samples: int, generator: torch.Generator) -> TaskBatch:
        """Draw facts with different names, and a question about one or two of them."""
        names = torch.rand(samples, self.num_names, generator=generator).argsort(1)[:, : self.facts_per_row]
        values = torch.randint(self.num_values, (samples, self.facts_per_row), generator=generator)
        targets = torch.rand(samples, self.facts_per_row, generator=generator).argsort(1)[
            :, : self.lookups_per_question
        ]
        return TaskBatch((names, values, names.gather(1, targets)), values.gather(1, targets), targets)

    def share_correct(self, logits: Tensor, batch: TaskBatch) -> float:
        """Return the share of questions whose values are all correct."""
        return float((logits.argmax(-1) == batch.answers).all(1).double().mean())

    def measure_heads(self, model: nn.Module, batch: TaskBatch) -> tuple[HeadMeasurement, ...]:
        """Measure the share of each head's weight on the facts in question, which come first in the picture."""
        maps, means = _observe_model(model, batch)
        (weights,), (entropy,) = maps, means["entropy"]
        weights = weights[:, :, 0]  # (batch, heads, facts): the question is the only query
        others = torch.ones(batch.targets.shape[0], self.facts_per_row, dtype=torch.bool).scatter(
            1, batch.targets, value=False
        )
        places = torch.cat([batch.targets, others.nonzero()[:, 1].view(len(others), -1)], 1)
        ordered = weights.gather(2, places[:, None].expand_as(weights))  # the facts in question first
        shares = ordered.mean(0)  # (heads, facts)
        names = ("first lookup", "second lookup")[: self.lookups_per_question]
        return tuple(
            HeadMeasurement(
                layer=0,
                head=head,
                measures={name: float(shares[head, place]) for place, name in enumerate(names)}
                | {
                    "the others": float(shares[head, self.lookups_per_question :].sum()),
                    "entropy": float(entropy[head]),
                },
                weights=_round_rows(ordered[:MAX_PICTURE_ROWS, head]),
            )
            for head in range(weights.shape[1])
        )


@dataclass(frozen=True)
class InductionTask:
    """A row of different tokens that repeats: which token followed this token before?

    The model is two causal attention layers with residuals. To continue [A] [B] ... [A] the second layer must find the
    [B] that followed the earlier [A], which works only if the first layer has copied the previous token to each
    position (arXiv:2209.11895). The length of the row varies, so that counting positions does not help.

    Attributes:
        name, steps, batch_size, learning_rate, embed_dim: see `Task`.
        vocabulary_size: number of different tokens.
        length: tokens of a sequence.
    """

    name: str = "induction"
    steps: int = 400
    batch_size: int = 32
    learning_rate: float = 1e-2
    embed_dim: int = 32
    vocabulary_size: int = 16
    length: int = 24

    @property
    def chance_accuracy(self) -> float:
        """Share of correct answers of random guessing."""
        return 1 / self.vocabulary_size

    def build_model(self, num_heads: int) -> nn.Module:
        """Build a model with this number of heads."""
        return _InductionModel(self, num_heads)

    def draw_batch(self, samples: int, generator: torch.Generator) -> TaskBatch:
        """Draw rows of a third to half of the length, repeated; the questions start with the first repeat."""
        period = torch.randint(self.length // 3, self.length // 2 + 1, (samples, 1), generator=generator)
        tokens = torch.rand(samples, self.vocabulary_size, generator=generator).argsort(1)
        place = torch.arange(self.length)
        row = tokens.gather(1, place % period)
        questions = (place >= period) & (place < self.length - 1)
        following = torch.cat([row[:, 1:], row[:, :1]], 1)
        # The position after the latest earlier occurrence of the same token.
        targets = torch.where(questions, place + 1 - period, -1)
        return TaskBatch((row,), torch.where(questions, following, -1), targets)

    def share_correct(self, logits: Tensor, batch: TaskBatch) -> float:
        """Return the share of questions whose token is predicted correctly."""
        questions = batch.answers >= 0
        return float((logits.argmax(-1) == batch.answers)[questions].double().mean())

    def measure_heads(self, model: nn.Module, batch: TaskBatch) -> tuple[HeadMeasurement, ...]:
        """Measure the share of each head's weight on the previous token, and on the token that followed before."""
        maps, means = _observe_model(model, batch)
        questions = batch.targets >= 0
        looks = []
        for layer, weights in enumerate(maps):  # (batch, heads, queries, keys)
            places = batch.targets.clamp(min=0)[:, None, :, None].expand(-1, weights.shape[1], -1, -1)
            on_target = weights.gather(3, places)[..., 0]  # (batch, heads, queries)
            induction = (on_target * questions[:, None]).sum((0, 2)) / questions.sum()
            looks += [
                HeadMeasurement(
                    layer=layer,
                    head=head,
                    measures={
                        "previous": float(means["previous_mass"][layer][head]),
                        "induction": float(induction[head]),
                        "self": float(means["self_mass"][layer][head]),
                        "first": float(means["first_mass"][layer][head]),
                        "entropy": float(means["entropy"][layer][head]),
                    },
                    weights=_round_rows(weights[0, head]),
                )
                for head in range(weights.shape[1])
            ]
        return tuple(looks)


class _LookupModel(nn.Module):
    def __init__(self, task: LookupTask, num_heads: int) -> None:
        super().__init__()
        self.lookups, self.values = task.lookups_per_question, task.num_values
        self.name_vectors = nn.Embedding(task.num_names, task.embed_dim)
        self.value_vectors = nn.Embedding(task.num_values, task.embed_dim)
        self.question_vectors = nn.ModuleList(
            nn.Embedding(task.num_names, task.embed_dim) for _ in range(task.lookups_per_question)
        )
        self.attention = MultiHeadAttention(task.embed_dim, num_heads)
        self.read = nn.Linear(task.embed_dim, task.lookups_per_question * task.num_values)

    def forward(self, names: Tensor, values: Tensor, questions: Tensor) -> Tensor:
        facts = self.name_vectors(names) + self.value_vectors(values)  # (batch, facts, embed_dim)
        question = torch.stack([table(questions[:, place]) for place, table in enumerate(self.question_vectors)])
        found = self.attention(question.sum(0)[:, None], facts)  # (batch, 1, embed_dim)
        read: Tensor = self.read(found[:, 0])
        return read.view(-1, self.lookups, self.values)  # (batch, lookups, values)


class _InductionModel(nn.Module):
    def __init__(self, task: InductionTask, num_heads: int) -> None:
        super().__init__()
        width = task.embed_dim
        self.token_vectors = nn.Embedding(task.vocabulary_size, width)
        self.place_vectors = nn.Embedding(task.length, width)
        for table in (self.token_vectors, self.place_vectors):
            nn.init.normal_(table.weight, std=0.5)
        self.attentions = nn.ModuleList(MultiHeadAttention(width, num_heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.read = nn.Linear(width, task.vocabulary_size)

    def forward(self, row: Tensor) -> Tensor:
        x = self.token_vectors(row) + self.place_vectors.weight  # (batch, length, embed_dim)
        for norm, attention in zip(self.norms, self.attentions, strict=False):
            x = x + attention(norm(x), mask=Causal())
        read: Tensor = self.read(self.norms[-1](x))
        return read  # (batch, length, vocabulary)


def _observe_model(model: nn.Module, batch: TaskBatch) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Run a model; returns each layer's weights, (batch, heads, queries, keys), and the means of its statistics."""
    with torch.no_grad(), observe(model, probes=("entropy", "previous_mass", "self_mass", "first_mass")) as seen:
        model(*batch.inputs)
    maps = [torch.stack([sample.weights() for sample in layer.samples]) for layer in seen.layers]
    means = [layer.means() for layer in seen.layers]
    return maps, {name: [each[name] for each in means] for name in means[0]}


def _round_rows(rows: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(weight), 3) for weight in row) for row in rows)


TASKS: dict[str, Task] = {
    "one": LookupTask("one", lookups_per_question=1),
    "two": LookupTask("two", lookups_per_question=2),
    "induction": InductionTask(),
}
"""The tasks by name: one lookup (for which one head suffices), two lookups, and induction."""


def find_task(name: str) -> Task:
    """Find a task by its name, or raise an ArgumentError.

    >>> find_task("two").chance_accuracy
    0.015625
    """
    if name not in TASKS:
        raise ArgumentError(f"There is no task {name!r}.", f"Give one of {', '.join(TASKS)}.")
    return TASKS[name]
