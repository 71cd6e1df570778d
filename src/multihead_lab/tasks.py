"""The tasks of the lab: their questions, the small models that learn them, and what their heads attend to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

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
    """Random questions of a task, and their answers.

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
        measures: shares of the weight of the head on different targets, 0 to 1, and its entropy (nats).
        weights: rows of weights of the head, 0 to 1, for its picture.
    """

    layer: int
    head: int
    measures: dict[str, float]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Task(ABC):
    """Questions that a small model learns to answer.

    Attributes:
        name: the name: "one", "two" or "induction".
        steps: steps of training.
        batch_size: questions per step.
        learning_rate: the learning rate of Adam.
        embed_dim: width of the layers of the model; the number of heads must divide it.
    """

    name: str
    steps: int
    batch_size: int
    learning_rate: float = 1e-2
    embed_dim: int = 32

    @property
    @abstractmethod
    def chance_accuracy(self) -> float:
        """Share of questions that random guessing answers correctly."""

    @abstractmethod
    def build_model(self, num_heads: int) -> nn.Module:
        """Build a model; the parameters have the same number and the same distribution for every number of heads."""

    @abstractmethod
    def draw_batch(self, samples: int, generator: torch.Generator) -> TaskBatch:
        """Draw random questions."""

    @abstractmethod
    def share_correct(self, logits: Tensor, batch: TaskBatch) -> float:
        """Return the share of questions that are answered correctly."""

    @abstractmethod
    def measure_heads(self, model: nn.Module, batch: TaskBatch) -> tuple[HeadMeasurement, ...]:
        """Measure what every head attends to on a batch."""


@dataclass(frozen=True)
class LookupTask(Task):
    """A list of facts, each a name and its value, and a question with one or two names: what are their values?

    One attention layer goes from the question to the facts, and a linear map reads the values from its output. A fact
    is the sum of its name's vector and its value's vector, so the sum of two facts does not show which value belongs to
    which name: a question with two names needs two separate lookups.

    Attributes:
        name, steps, batch_size, learning_rate, embed_dim: see `Task`.
        lookups_per_question: names per question, 1 or 2.
        num_names: number of different names.
        num_values: number of different values.
        facts_per_row: facts per list, from which a question asks one or two.
    """

    steps: int = 300
    batch_size: int = 64
    lookups_per_question: int = 1
    num_names: int = 32
    num_values: int = 8
    facts_per_row: int = 12

    @property
    def chance_accuracy(self) -> float:
        """Share of questions that random guessing answers correctly, with every value correct."""
        return float((1 / self.num_values) ** self.lookups_per_question)

    def build_model(self, num_heads: int) -> nn.Module:
        """Build a model of one attention layer with `num_heads` heads."""
        return _LookupModel(self, num_heads)

    def draw_batch(self, samples: int, generator: torch.Generator) -> TaskBatch:
        """Draw facts with different names, and a question about one or two of them."""
        names = torch.rand(samples, self.num_names, generator=generator).argsort(1)[:, : self.facts_per_row]
        values = torch.randint(self.num_values, (samples, self.facts_per_row), generator=generator)
        order = torch.rand(samples, self.facts_per_row, generator=generator).argsort(1)
        targets = order[:, : self.lookups_per_question]
        return TaskBatch((names, values, names.gather(1, targets)), values.gather(1, targets), targets)

    def share_correct(self, logits: Tensor, batch: TaskBatch) -> float:
        """Return the share of questions whose values are all correct."""
        return float((logits.argmax(-1) == batch.answers).all(1).double().mean())

    def measure_heads(self, model: nn.Module, batch: TaskBatch) -> tuple[HeadMeasurement, ...]:
        """Measure the share of each head's weight on the facts that the question asks for, which come first."""
        (weights,), (means,) = _observe_model(model, batch)
        weights = weights[:, :, 0]  # (batch, heads, facts): the question is the only query
        in_question = torch.zeros(len(weights), self.facts_per_row, dtype=torch.bool).scatter(
            1, batch.targets, value=True
        )
        others = (~in_question).nonzero()[:, 1].view(len(weights), -1)
        places = torch.cat([batch.targets, others], 1)
        ordered = weights.gather(2, places[:, None].expand_as(weights))  # facts asked for come first
        shares = ordered.mean(0)  # (heads, facts)
        names = ("first lookup", "second lookup")[: self.lookups_per_question]
        measures = {name: shares[:, place] for place, name in enumerate(names)}
        measures |= {"the others": shares[:, len(names) :].sum(1), "entropy": means["entropy"]}
        return _measurements_of_layer(0, measures, ordered[:MAX_PICTURE_ROWS].transpose(0, 1))


@dataclass(frozen=True)
class InductionTask(Task):
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
    vocabulary_size: int = 16
    length: int = 24

    @property
    def chance_accuracy(self) -> float:
        """Share of questions that random guessing answers correctly."""
        return 1 / self.vocabulary_size

    def build_model(self, num_heads: int) -> nn.Module:
        """Build a model of two attention layers with `num_heads` heads each."""
        return _InductionModel(self, num_heads)

    def draw_batch(self, samples: int, generator: torch.Generator) -> TaskBatch:
        """Draw rows of a third to half of the length, repeated; the questions start with the first repeat."""
        period = torch.randint(self.length // 3, self.length // 2 + 1, (samples, 1), generator=generator)
        tokens = torch.rand(samples, self.vocabulary_size, generator=generator).argsort(1)
        place = torch.arange(self.length)
        row = tokens.gather(1, place % period)
        questions = (place >= period) & (place < self.length - 1)
        following = torch.cat([row[:, 1:], row[:, :1]], 1)
        # The position after the latest earlier occurrence of the token of the question.
        targets = torch.where(questions, place + 1 - period, -1)
        return TaskBatch((row,), torch.where(questions, following, -1), targets)

    def share_correct(self, logits: Tensor, batch: TaskBatch) -> float:
        """Return the share of questions whose token is predicted correctly."""
        questions = batch.answers >= 0
        return float((logits.argmax(-1) == batch.answers)[questions].double().mean())

    def measure_heads(self, model: nn.Module, batch: TaskBatch) -> tuple[HeadMeasurement, ...]:
        """Measure the share of each head's weight on the previous token, and on the token that followed before."""
        questions = batch.targets >= 0
        measurements: list[HeadMeasurement] = []
        for layer, (weights, means) in enumerate(zip(*_observe_model(model, batch), strict=True)):
            places = batch.targets.clamp(min=0)[:, None, :, None].expand(-1, weights.shape[1], -1, -1)
            on_target = weights.gather(3, places)[..., 0]  # (batch, heads, queries)
            measures = {
                "previous": means["previous_mass"],
                "induction": (on_target * questions[:, None]).sum((0, 2)) / questions.sum(),
                "self": means["self_mass"],
                "first": means["first_mass"],
                "entropy": means["entropy"],
            }
            measurements += _measurements_of_layer(layer, measures, weights[0])
        return tuple(measurements)


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


def _observe_model(model: nn.Module, batch: TaskBatch) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Run a model; returns each layer's weights, (batch, heads, queries, keys), and the means of its statistics."""
    with torch.no_grad(), observe(model, probes=("entropy", "previous_mass", "self_mass", "first_mass")) as seen:
        model(*batch.inputs)
    weights = [torch.stack([sample.weights() for sample in layer.samples]) for layer in seen.layers]
    return weights, [layer.means() for layer in seen.layers]


def _measurements_of_layer(layer: int, measures: dict[str, Tensor], weights: Tensor) -> tuple[HeadMeasurement, ...]:
    """Return one measurement per head: measures are (heads,), weights (heads, rows, columns)."""
    return tuple(
        HeadMeasurement(
            layer,
            head,
            {name: float(measure[head]) for name, measure in measures.items()},
            tuple(tuple(round(float(weight), 3) for weight in row) for row in weights[head]),
        )
        for head in range(len(weights))
    )


TASKS: dict[str, Task] = {
    "one": LookupTask("one"),
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
