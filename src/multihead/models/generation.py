"""Follow `generate` of transformers: which tokens each forward pass reads, and which passes read each returned text.

A text of `generate` is what it returns: one per returned sequence, each token once, up to the token where the stopping
criteria ended it. The passes do not show that: rows of a batch are continued with fillers after their end, drafts are
rejected, beams are reordered and dropped, and without a cache each pass reads all tokens again. So what is measured in
a pass is held per row, under the tokens of its prompt's text up to this pass, and the returned sequences are looked up
in it. All tokens of the rows are what `generate` gives to `prepare_inputs_for_generation` before each pass. A pass
without that call, such as the second one of classifier-free guidance, is no part of the texts, and neither are the
passes of a `generate` inside, such as those of an assistant.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multihead.errors import ModelError
from multihead.tensors.undo import Undo

UNKNOWN_ID = -1
"""The id of tokens that are read as embeddings, or were read into a cache before `generate`."""


@dataclass(eq=False)
class ReadRow:
    """The tokens of one row that a pass reads, and what a listener holds of them.

    Attributes:
        first: column of its first token among all tokens of the row.
        tokens: (tokens,) int64, the ids that the pass reads.
        whole: number of its first tokens that belong to a text together or not at all; drafts after them may be
            rejected one by one.
        padding: number of columns of padding before the text.
        held: name of a layer -> what is held of the layer's call.
    """

    first: int
    tokens: Tensor
    whole: int
    padding: int
    held: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class GeneratedPass:
    """A forward pass of `generate`.

    Attributes:
        ids: (rows, columns) int64 on the CPU, all tokens of each row up to this pass.
        first: column of the first token that the pass reads.
        begins_texts: whether it reads the texts from where the first pass begins, as each pass without a cache does.
        rows: row -> what it reads; of equal rows of one prompt only the first.
    """

    ids: Tensor
    first: int
    begins_texts: bool
    rows: dict[int, ReadRow] = field(default_factory=dict)

    def reads(self, batch: int, queries: int) -> bool:
        """Whether an attention call of these sizes has the tokens of the pass as its queries."""
        return (batch, queries) == (len(self.ids), self.ids.shape[1] - self.first)


@dataclass(frozen=True, eq=False)
class GeneratedText:
    """A text that `generate` returns.

    Attributes:
        ids: (tokens,) int64 on the CPU, without padding, up to the last token that was read; `UNKNOWN_ID` for unknown
            ones.
        rows: the rows that read its tokens in their order, and of each how many of its tokens belong to the text.
    """

    ids: Tensor
    rows: list[tuple[ReadRow, int]]


@dataclass(eq=False)
class Generation:
    """One call of `generate`.

    Attributes:
        model: the model that generates.
        prompts: number of prompts.
        prompt_columns: number of columns of the prompts, as far as they are ids.
        holds_rows: whether a listener holds what it measures until the texts are known.
        nested: number of calls of `generate` inside this one that are running.
    """

    model: nn.Module
    prompts: int
    prompt_columns: int
    holds_rows: bool = False
    nested: int = 0
    _prepared: Tensor | None = None  # the tokens of all rows, given for the next pass
    _newest: Tensor | None = None  # (rows, columns), all tokens of the rows of the newest pass
    _missing: int = 0  # number of columns before the tokens that `generate` knows
    _first: int = 0  # column of the first token of the first pass
    # (prompt, first column, digest of the tokens before it) -> the rows that read from there
    _rows: dict[tuple[int, int, bytes], list[ReadRow]] = field(default_factory=dict)
    _ended: set[tuple[int, int, bytes]] = field(default_factory=set)  # prompt, length and digest of ended texts

    def prompt_of_row(self, row: int, rows: int) -> int:
        """Return the prompt of a row of a batch of `rows`: the beams or samples of a prompt follow each other."""
        return row // self.rows_per_prompt(rows)

    def rows_per_prompt(self, rows: int) -> int:
        """Return how many consecutive rows of a batch of `rows` continue one prompt."""
        return 1 if rows % self.prompts else max(rows // self.prompts, 1)

    def prepare_pass(self, ids: object) -> None:
        """Take the tokens of all rows for the next pass; called before each pass, unless it is no part of the texts."""
        if isinstance(ids, Tensor) and ids.dim() == 2 and not self.nested:
            self._prepared = ids

    def begin_pass(self, num_tokens: int, num_cached: int, is_token: Tensor | None) -> GeneratedPass | None:
        """Begin a pass of the model; None if it is no part of the texts.

        Args:
            num_tokens: number of tokens per row that the pass reads.
            num_cached: number of tokens per row that it finds in a cache.
            is_token: (rows, columns) bool, False for padding; None if unknown.
        """
        given, self._prepared = self._prepared, None
        if given is None or self.nested:
            return None
        ids, columns, is_first = self._on_cpu(given), num_cached + num_tokens, self._newest is None
        if self._newest is None:
            self._missing, self._first = max(columns - ids.shape[1], 0), num_cached
        elif ids.shape[1] == num_tokens < columns - self._missing:  # a part of the prompts, given alone
            ids = torch.cat([self._newest[:, self._missing : num_cached], ids], 1)
        self._newest = ids = self._with_missing(ids)[:, :columns]
        found = GeneratedPass(ids, num_cached, num_cached == self._first)
        self._add_rows(found, is_token, has_drafts=is_first or num_cached > 0)
        return found

    def _add_rows(self, added: GeneratedPass, is_token: Tensor | None, *, has_drafts: bool) -> None:
        """Add the rows of a pass, except those that equal another row of their prompt.

        With `has_drafts`, tokens after the prompts may be drafts; without a cache no pass but the first one has them.
        """
        rows, columns = added.ids.shape
        padding, num_tokens = [0] * rows, columns - added.first
        if is_token is not None and is_token.shape[0] == rows and is_token.shape[1]:
            padding = (is_token.long().cumsum(1) == 0).sum(1).tolist()
        whole = num_tokens
        if has_drafts:
            whole = min(max(self._missing + self.prompt_columns - added.first, 0), num_tokens)
        for row, ids in enumerate(added.ids):
            prompt, tokens = self.prompt_of_row(row, rows), ids[added.first :].clone()
            alike = self._rows.setdefault((prompt, added.first, _digest(ids[: added.first])), [])
            if any(torch.equal(each.tokens, tokens) for each in alike):
                continue
            # Without a cache a pass reads again what earlier ones read, which is kept only where the text ended there.
            alike[:] = [
                each
                for each in alike
                if _num_equal(each.tokens, tokens) < len(each.tokens)
                or self._has_ended(prompt, ids[: added.first + len(each.tokens)])
            ]
            alike.append(made := ReadRow(added.first, tokens, whole, padding[row]))
            added.rows[row] = made

    def end_texts(self, ids: Tensor, ended: Tensor) -> None:
        """Take the answer of the stopping criteria: ids (rows, columns), ended (rows,) bool."""
        if self.nested or not self.holds_rows or ids.dim() != 2:
            return
        known = self._with_missing(self._on_cpu(ids))
        for row in ended.nonzero().flatten().tolist():
            self._ended.add((self.prompt_of_row(row, len(known)), known.shape[1], _digest(known[row])))

    def _has_ended(self, prompt: int, ids: Tensor) -> bool:
        return (prompt, len(ids), _digest(ids)) in self._ended

    def texts(self, returned: object) -> list[GeneratedText]:
        """Return the texts that `generate` returned.

        Raises:
            ModelError: tokens of a text were read in no pass that could be followed.
        """
        sequences = returned if isinstance(returned, Tensor) else getattr(returned, "sequences", None)
        if not isinstance(sequences, Tensor) or sequences.dim() != 2:
            raise self._lost_error()
        known = self._with_missing(self._on_cpu(sequences))
        return [self._find_text(self.prompt_of_row(row, len(known)), ids) for row, ids in enumerate(known)]

    def _find_text(self, prompt: int, ids: Tensor) -> GeneratedText:
        """Find the rows that read the tokens of a returned sequence, (columns,) int64."""
        lengths = sorted({length for of, length, _ in self._ended if of == prompt and length <= len(ids)})
        stop = next((length for length in lengths if self._has_ended(prompt, ids[:length])), len(ids))
        found, column = list[tuple[ReadRow, int]](), self._first
        while column < stop:
            row, count = self._longest_row(prompt, column, ids[:stop])
            if row is None or count < row.whole:
                break
            found.append((row, count))
            column += count
        if column < stop - 1 or not found:  # no pass reads the last token, unless the batch continues
            raise self._lost_error()
        return GeneratedText(ids[found[-1][0].padding : column], found)

    def _longest_row(self, prompt: int, column: int, ids: Tensor) -> tuple[ReadRow | None, int]:
        """Return the row that reads most tokens of `ids` from a column on, and how many; (None, 0) if there is none."""
        alike = self._rows.get((prompt, column, _digest(ids[:column])), [])
        counts = [_num_equal(each.tokens, ids[column:]) for each in alike]
        if not any(counts):
            return None, 0
        best = max(range(len(alike)), key=lambda index: (counts[index], -len(alike[index].tokens)))
        return alike[best], counts[best]

    def _with_missing(self, ids: Tensor) -> Tensor:
        """Prepend the columns that `generate` does not know: (rows, columns) -> (rows, more columns)."""
        return torch.nn.functional.pad(ids, (self._missing, 0), value=UNKNOWN_ID)

    @staticmethod
    def _on_cpu(ids: Tensor) -> Tensor:
        return ids.detach().to("cpu", torch.int64)

    def _lost_error(self) -> ModelError:
        return ModelError(
            f"generate of {type(self.model).__name__} returned tokens that no forward pass which could be followed has "
            "read.",
            "Call generate before, and observe one pass over what it returns: model(sequences).",
        )


class GenerationFollower(Protocol):
    """An object that is notified when a model generates, and when the rows of a cache are replaced."""

    def follows(self, model: nn.Module) -> bool:
        """Whether it wants to know about a model."""
        ...

    def begin_generation(self, generation: Generation) -> bool:
        """Take the start of `generate`; False if it runs inside another one."""
        ...

    def leave_generation(self, generation: Generation) -> None:
        """Take the end of `generate`, whether it returned or raised an error; each generation is left once."""
        ...

    def take_texts(self, generation: Generation, returned: object) -> None:
        """Take what `generate` returned."""
        ...

    def forget_cache(self, cache: object) -> None:
        """Take that the rows of a cache no longer continue the same texts."""
        ...


_followers: ContextVar[tuple[GenerationFollower, ...]] = ContextVar("followers", default=())
_running: ContextVar[tuple[Generation, ...]] = ContextVar("running", default=())


@contextmanager
def follow_generation(follower: GenerationFollower) -> Iterator[None]:
    """Tell an object when a model of transformers generates, in this context and thread."""
    from transformers import GenerationMixin, StoppingCriteriaList
    from transformers.cache_utils import Cache, EncoderDecoderCache

    with Undo() as undo:
        undo.set_attribute(GenerationMixin, "generate", _followed_generate())
        undo.set_attribute(StoppingCriteriaList, "__call__", _followed_criteria())
        for kind in (Cache, EncoderDecoderCache):
            for change in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
                undo.set_attribute(kind, change, _followed_change(kind, change))
        undo.add_step(lambda: _followers.set(tuple(each for each in _followers.get() if each is not follower)))
        _followers.set((*_followers.get(), follower))
        yield


@cache
def _followed_generate() -> Callable[..., Any]:
    """Return a `generate` that notifies the followers; one function, because several contexts set and restore it."""
    from transformers import GenerationMixin

    generate = GenerationMixin.generate

    @wraps(generate)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        followers = [each for each in _followers.get() if each.follows(self)]
        if not followers:
            return generate(self, *args, **kwargs)
        prompts, columns = _size_of_prompts(self, args, kwargs)
        begun: list[tuple[GenerationFollower, Generation]] = []
        try:
            with Undo() as undo:
                for each in followers:
                    generation = Generation(self, prompts, columns)
                    undo.add_step(partial(each.leave_generation, generation))
                    if each.begin_generation(generation):
                        begun.append((each, generation))
                undo.set_variable(_running, (*_running.get(), *(one for _, one in begun)))
                _tell_prepared_tokens(undo, self)
                returned = generate(self, *args, **kwargs)
        except BaseException:
            if any(one.holds_rows for _, one in begun):
                warnings.warn(
                    f"generate of {type(self).__name__} ended with an error, so its texts are not in the record.",
                    stacklevel=2,
                )
            raise
        for each, one in begun:
            each.take_texts(one, returned)
        return returned

    return followed


@cache
def _followed_criteria() -> Callable[..., Any]:
    """Return a call of stopping criteria that notifies the generations that run."""
    from transformers import StoppingCriteriaList

    decide = StoppingCriteriaList.__call__

    @wraps(decide)
    def followed(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ended = decide(self, input_ids, *args, **kwargs)
        for generation in _running.get():
            generation.end_texts(input_ids, ended)
        return ended

    return followed


@cache
def _followed_change(kind: type, name: str) -> Callable[..., Any]:
    """Return a method that changes the rows of a cache, and notifies the followers."""
    change = getattr(kind, name)

    @wraps(change)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        for each in _followers.get():
            each.forget_cache(self)
        return change(self, *args, **kwargs)

    return followed


def _tell_prepared_tokens(undo: Undo, model: Any) -> None:
    """Tell the generations of a model the tokens that it prepares for each pass, until undone."""
    name = "prepare_inputs_for_generation"
    prepare, own = getattr(model, name), vars(model).get(name)

    @wraps(prepare)
    def followed(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        for generation in _running.get():
            if generation.model is model:
                generation.prepare_pass(input_ids)
        return prepare(input_ids, *args, **kwargs)

    undo.add_step(lambda: vars(model).pop(name, None) if own is None else vars(model).update({name: own}))
    vars(model)[name] = followed


def _size_of_prompts(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the number of prompts that `generate` receives, and of their columns that are ids of generated text."""
    decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    names = "inputs", "input_ids", "inputs_embeds", getattr(model, "main_input_name", "")
    given = [*args[:1], *(kwargs.get(name) for name in names), *(kwargs.get("encoder_outputs") or ())[:1]]
    inputs = next((each for each in given if isinstance(each, Tensor)), None)
    ids = kwargs.get("decoder_input_ids") if decoder else inputs
    columns = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 else 1
    return 1 if inputs is None else max(len(inputs), 1), columns


def _digest(ids: Tensor) -> bytes:
    return blake2b(ids.numpy().tobytes(), digest_size=16).digest()


def _num_equal(one: Tensor, other: Tensor) -> int:
    """Return how many first elements of two vectors are equal."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
