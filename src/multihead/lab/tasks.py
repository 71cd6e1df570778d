"""The tasks of the lab: their questions, the small model that learns them, and what its heads attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention
from multihead.masks import Causal
from multihead.observation.observe import observe

__all__ = ["TASKS", "Batch", "HeadLook", "Induction", "Lookup", "Task"]

ROWS = 12  # sequences of a lookup's picture


@dataclass(frozen=True, eq=False)
class Batch:
    """Questions and answers.

    Attributes:
        inputs: what the model is called with.
        answers: the right classes; -1 where nothing is asked.
        targets: where each answer stands among the keys, in the shape of `answers`; -1 where nothing is asked.
    """

    inputs: tuple[Tensor, ...]
    answers: Tensor
    targets: Tensor


@dataclass(frozen=True)
class HeadLook:
    """What one head looks at.

    Attributes:
        layer, head: which head.
        measures: share of its weight by what it lies on, 0 to 1, and its entropy (nats).
        picture: rows of weights, 0 to 1.
    """

    layer: int
    head: int
    measures: dict[str, float]
    picture: tuple[tuple[float, ...], ...]


class Task(Protocol):
    """What the lab needs of a task."""

    @property
    def name(self) -> str:
        """What it is called: "one", "two" or "induction"."""
        ...

    @property
    def embed_dim(self) -> int:
        """How many columns its layers have; the heads must divide them."""
        ...

    @property
    def steps(self) -> int:
        """How many steps it is trained for."""
        ...

    @property
    def batch_size(self) -> int:
        """Questions a step."""
        ...

    @property
    def learning_rate(self) -> float:
        """How large a step is."""
        ...

    @property
    def chance(self) -> float:
        """Share of right answers of a blind guess."""
        ...

    def build(self, num_heads: int) -> nn.Module:
        """Make a model; its parameters are as many, and drawn alike, for every number of heads."""
        ...

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        """Draw questions."""
        ...

    def right(self, logits: Tensor, batch: Batch) -> float:
        """Share of the questions that are answered right."""
        ...

    def look(self, model: nn.Module, batch: Batch) -> tuple[HeadLook, ...]:
        """Watch every head on a batch."""
        ...


@dataclass(frozen=True)
class Lookup:
    """A list of facts, each a name and its value, and a question with one or two names: what are their values?

    One attention layer goes from the question to the facts, and a linear map reads the values off its output. A
    fact is the sum of its name's vector and its value's, so what two facts add up to no longer tells which value
    belongs to which name: with two names asked, two places must be looked at and kept apart.
    """

    name: str
    asked: int
    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 1e-2
    embed_dim: int = 32
    names: int = 32
    values: int = 8
    facts: int = 12

    @property
    def chance(self) -> float:
        """Share of correct answers of random guessing: every value of a question must be correct."""
        return float((1 / self.values) ** self.asked)

    def build(self, num_heads: int) -> nn.Module:
        """Make a model with this number of heads."""
        return _LookupModel(self, num_heads)

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        """Draw facts with different names, and questions about some of them."""
        names = torch.rand(samples, self.names, generator=generator).argsort(1)[:, : self.facts]
        values = torch.randint(self.values, (samples, self.facts), generator=generator)
        targets = torch.rand(samples, self.facts, generator=generator).argsort(1)[:, : self.asked]
        return Batch((names, values, names.gather(1, targets)), values.gather(1, targets), targets)

    def right(self, logits: Tensor, batch: Batch) -> float:
        """Share of the questions whose values are all right."""
        return float((logits.argmax(-1) == batch.answers).all(1).double().mean())

    def look(self, model: nn.Module, batch: Batch) -> tuple[HeadLook, ...]:
        """Sort the facts asked for first, and measure the share of each head's weight on them."""
        maps, means = _watched(model, batch)
        (weights,), (entropy,) = maps, means["entropy"]
        weights = weights[:, :, 0]  # (batch, heads, facts): the question is the only query
        others = torch.ones(batch.targets.shape[0], self.facts, dtype=torch.bool).scatter(1, batch.targets, value=False)
        places = torch.cat([batch.targets, others.nonzero()[:, 1].view(len(others), -1)], 1)
        ordered = weights.gather(2, places[:, None].expand_as(weights))  # the asked ones first
        shares = ordered.mean(0)  # (heads, facts)
        names = ("first asked", "second asked")[: self.asked]
        return tuple(
            HeadLook(
                layer=0,
                head=head,
                measures={name: float(shares[head, place]) for place, name in enumerate(names)}
                | {"the others": float(shares[head, self.asked :].sum()), "entropy": float(entropy[head])},
                picture=_rounded(ordered[:ROWS, head]),
            )
            for head in range(weights.shape[1])
        )


@dataclass(frozen=True)
class Induction:
    """A row of different tokens that repeats: what came after this token last time?

    Two causal attention layers with residuals, and no more. To go on with [A] [B] ... [A] the second layer must find
    the [B] that followed the earlier [A], and it can only if the first has told each token what stood before it
    (arXiv:2209.11895). The row's length differs, so that counting places does not help.
    """

    name: str = "induction"
    steps: int = 400
    batch_size: int = 32
    learning_rate: float = 1e-2
    embed_dim: int = 32
    vocabulary: int = 16
    length: int = 24

    @property
    def chance(self) -> float:
        """Share of right answers of a blind guess."""
        return 1 / self.vocabulary

    def build(self, num_heads: int) -> nn.Module:
        """Make a model with this number of heads."""
        return _InductionModel(self, num_heads)

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        """Draw rows of a third to half of the length, repeated; asked is what follows from the repeat on."""
        period = torch.randint(self.length // 3, self.length // 2 + 1, (samples, 1), generator=generator)
        tokens = torch.rand(samples, self.vocabulary, generator=generator).argsort(1)
        place = torch.arange(self.length)
        row = tokens.gather(1, place % period)
        asked = (place >= period) & (place < self.length - 1)
        following = torch.cat([row[:, 1:], row[:, :1]], 1)
        # The token after the latest earlier one of its kind.
        targets = torch.where(asked, place + 1 - period, -1)
        return Batch((row,), torch.where(asked, following, -1), targets)

    def right(self, logits: Tensor, batch: Batch) -> float:
        """Share of the tokens asked for that are right."""
        asked = batch.answers >= 0
        return float((logits.argmax(-1) == batch.answers)[asked].double().mean())

    def look(self, model: nn.Module, batch: Batch) -> tuple[HeadLook, ...]:
        """Say how much of each head's weight lies on the token before, and on what followed last time."""
        maps, means = _watched(model, batch)
        asked = batch.targets >= 0
        looks = []
        for layer, weights in enumerate(maps):  # (batch, heads, queries, keys)
            places = batch.targets.clamp(min=0)[:, None, :, None].expand(-1, weights.shape[1], -1, -1)
            on_target = weights.gather(3, places)[..., 0]  # (batch, heads, queries)
            induction = (on_target * asked[:, None]).sum((0, 2)) / asked.sum()
            looks += [
                HeadLook(
                    layer=layer,
                    head=head,
                    measures={
                        "previous": float(means["previous_mass"][layer][head]),
                        "induction": float(induction[head]),
                        "self": float(means["self_mass"][layer][head]),
                        "first": float(means["first_mass"][layer][head]),
                        "entropy": float(means["entropy"][layer][head]),
                    },
                    picture=_rounded(weights[0, head]),
                )
                for head in range(weights.shape[1])
            ]
        return tuple(looks)


class _LookupModel(nn.Module):
    def __init__(self, task: Lookup, num_heads: int) -> None:
        super().__init__()
        self.asked, self.values = task.asked, task.values
        self.name_vectors = nn.Embedding(task.names, task.embed_dim)
        self.value_vectors = nn.Embedding(task.values, task.embed_dim)
        self.question_vectors = nn.ModuleList(nn.Embedding(task.names, task.embed_dim) for _ in range(task.asked))
        self.attention = MultiHeadAttention(task.embed_dim, num_heads)
        self.read = nn.Linear(task.embed_dim, task.asked * task.values)

    def forward(self, names: Tensor, values: Tensor, questions: Tensor) -> Tensor:
        facts = self.name_vectors(names) + self.value_vectors(values)  # (batch, facts, embed_dim)
        question = torch.stack([table(questions[:, place]) for place, table in enumerate(self.question_vectors)])
        found = self.attention(question.sum(0)[:, None], facts)  # (batch, 1, embed_dim)
        read: Tensor = self.read(found[:, 0])
        return read.view(-1, self.asked, self.values)  # (batch, asked, values)


class _InductionModel(nn.Module):
    def __init__(self, task: Induction, num_heads: int) -> None:
        super().__init__()
        width = task.embed_dim
        self.token_vectors = nn.Embedding(task.vocabulary, width)
        self.place_vectors = nn.Embedding(task.length, width)
        for table in (self.token_vectors, self.place_vectors):
            nn.init.normal_(table.weight, std=0.5)
        self.attentions = nn.ModuleList(MultiHeadAttention(width, num_heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.read = nn.Linear(width, task.vocabulary)

    def forward(self, row: Tensor) -> Tensor:
        x = self.token_vectors(row) + self.place_vectors.weight  # (batch, length, embed_dim)
        for norm, attention in zip(self.norms, self.attentions, strict=False):
            x = x + attention(norm(x), mask=Causal())
        read: Tensor = self.read(self.norms[-1](x))
        return read  # (batch, length, vocabulary)


def _watched(model: nn.Module, batch: Batch) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Run a model and give each layer's weights, (batch, heads, queries, keys), and its heads' statistics."""
    with torch.no_grad(), observe(model, probes=("entropy", "previous_mass", "self_mass", "first_mass")) as seen:
        model(*batch.inputs)
    maps = [torch.stack([sample.weights() for sample in layer.samples]) for layer in seen.layers]
    means = [layer.means() for layer in seen.layers]
    return maps, {name: [each[name] for each in means] for name in means[0]}


def _rounded(rows: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(weight), 3) for weight in row) for row in rows)


TASKS: dict[str, Task] = {
    "one": Lookup("one", asked=1),
    "two": Lookup("two", asked=2),
    "induction": Induction(),
}
"""The tasks by name: one lookup (where a second head has nothing to do), two lookups, and induction."""


def task_named(name: str) -> Task:
    """Find a task by its name.

    Raises:
        ArgumentError: there is none.

    >>> task_named("two").chance
    0.015625
    """
    if name not in TASKS:
        raise ArgumentError(f"There is no task {name!r}.", f"Give one of {', '.join(TASKS)}.")
    return TASKS[name]
