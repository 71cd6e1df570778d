"""Run a model on batches of texts, and sum the statistics of its heads layer by layer.

Packed rows are measured without splitting them into texts. The hooks that leave padding out pass the lengths of the
texts in a row to the listeners, so the kernel measures a whole row at once. Statistics do not cross texts: equal tokens
of different texts get different numbers, and special tokens are looked up per text. `observe` still runs packed models
padded, because it keeps texts apart.

Chance levels are measured by the same code on the same batch with q k = 0, in one head
(`StatisticsMeasurer.spread_evenly`), once per mask in a pass of the model. Measuring chance levels takes 2 ms
per batch of 2,048 tokens. Measuring them text by text, as records do, takes 5 ms per text unless another text has the
same length. The kernel of the call measures chance levels in float32 unless the model is in float64; float64 would need
tiles of the whole row, which take 50 ms.

The cached kernel plans of a batch are dropped after the batch, because its text lengths do not recur and the cache
would grow during the run.

The k strongest examples of a batch are found by k searches for the first maximum, in the order of texts and positions.
These searches resolve ties without a stable sort, which takes ten times as long. After each search the text of the
maximum is left out. All tokens of a text are in one batch, so the text's largest value in the batch is its largest of
all, and examples of one text are never merged. A head whose values in the batch cannot replace its weakest example is
skipped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from multihead.counting.batches import CurrentBatch, TextBatch
from multihead.errors import ModelError, ProbeError
from multihead.kernels.call import listen
from multihead.kernels.choose import drop_plans_at_end
from multihead.models.huggingface import install
from multihead.models.packed import leave_out_padding
from multihead.models.pretrained import track_inputs
from multihead.models.token_ids import check_token_ids
from multihead.observation.completeness import check_complete
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.layer_names import module_names
from multihead.observation.measuring import StatisticsMeasurer
from multihead.observation.record import Record
from multihead.observation.recorder import Recorder
from multihead.probes.catalogue import DEFAULT, ENTROPY, LARGEST_KEY, PROBES, needs_pictures, reject_unknown_set
from multihead.probes.probe import Probe
from multihead.probes.statistics import ProbeOrName, resolve_probes
from multihead.record.running_summary import RunningSummary
from multihead.record.text_rows import MeasuredRows

TOKENS_BEFORE, TOKENS_AFTER = 24, 8
"""Numbers of tokens before and after the query of an example that are stored with the example."""


def census_probes(wanted: ProbeOrName | Sequence[ProbeOrName] | None) -> tuple[Probe, ...]:
    """Return the probes of a census, by default those of `multihead.probes.DEFAULT` that have a mean.

    Raises:
        ProbeError: a statistic is unknown, or has no number per query that can be summed.
    """
    found = resolve_probes([name for name in DEFAULT if PROBES[name].has_mean] if wanted is None else wanted)
    for probe in found:
        if not probe.has_mean:
            raise ProbeError(
                f"{probe.name} has no number per query that can be added up.",
                f'Give probes such as "{ENTROPY.name}".',
            )
        reject_unknown_set(probe)
        if needs_pictures(probe):
            raise ProbeError(f"{probe.name} needs pictures, and a census reads texts.", "Leave it out.")
    return found


class StrongestExamples(NamedTuple):
    """The k texts with the largest values of each statistic and head; of texts with equal values the earlier is kept.

    Attributes:
        largest_value: (rows, k) float64, descending: largest value of the statistic in a text; -inf if there are fewer
            than k texts.
        text_index: (rows, k) int64, index in the shard of the text that has the value.
        query_position: (rows, k) int64, position in the text of the query that has the value.
        largest_key: (rows, k) int64, position of the key with the largest weight of the query; -1 where unknown.
        values_around: (rows, k, window) float32, value of the statistic at each token around the query; NaN outside the
            text and where a token's query does not count.
    """

    largest_value: Tensor
    text_index: Tensor
    query_position: Tensor
    largest_key: Tensor
    values_around: Tensor

    @staticmethod
    def empty(rows: int, k: int) -> StrongestExamples:
        """Return a table of `rows` rows without examples."""
        window = TOKENS_BEFORE + 1 + TOKENS_AFTER
        text, position, largest_key = torch.full((3, rows, k), -1, dtype=torch.int64)
        return StrongestExamples(
            torch.full((rows, k), -torch.inf, dtype=torch.float64),
            text,
            position,
            largest_key,
            torch.full((rows, k, window), torch.nan),
        )

    def add(self, values: Tensor, batch: TextBatch, largest_keys: Tensor) -> None:
        """Keep the largest values of a batch of complete texts.

        Args:
            values: (statistics, heads, tokens), -inf where a query does not count.
            batch: the batch of texts to which the tokens belong.
            largest_keys: (heads, tokens) int64, position in the text of the key with the largest weight.
        """
        k, heads = self.largest_value.shape[1], values.shape[1]
        flat = values.flatten(0, 1)
        best = flat.amax(-1).double()
        weakest, last_text = self.largest_value[:, -1], self.text_index[:, -1]
        # An equal value replaces the weakest example if the value may be from an earlier text.
        better = (best > weakest) | ((best == weakest) & (batch.text_indices[0] < last_text) & (best > -torch.inf))
        rows = better.nonzero().flatten()
        if not len(rows):
            return
        left = flat[rows]  # a copy, in which values are set to -inf
        found = []
        for _ in range(min(k, len(batch.lengths))):
            found.append(left.max(-1))  # `max` returns the first of equal values
            text = batch.text_of_token[found[-1].indices]
            left.masked_fill_(batch.text_of_token == text[:, None], -torch.inf)
        value = torch.stack([each.values for each in found], 1)  # (some rows, k)
        index = torch.stack([each.indices for each in found], 1)
        place = index[..., None] + torch.arange(-TOKENS_BEFORE, TOKENS_AFTER + 1)  # (some rows, k, window)
        inside = (place >= batch.text_start_of_token[index][..., None]) & (
            place < batch.text_stop_of_token[index][..., None]
        )
        place = place.clamp(0, batch.num_tokens - 1)
        around = flat[rows[:, None, None], place].float()
        new = StrongestExamples(
            value.double(),
            batch.text_of_token[index],
            batch.position_in_text[index],
            largest_keys[(rows % heads)[:, None], index],
            around.masked_fill(~inside | (around == -torch.inf), torch.nan),
        )
        self._merge_rows(rows, new)

    def _merge_rows(self, rows: Tensor, new: StrongestExamples) -> None:
        """Merge new examples, (len(rows), k), into the rows with the indices `rows`."""
        k = self.largest_value.shape[1]
        both = StrongestExamples(*(torch.cat([mine[rows], theirs], 1) for mine, theirs in zip(self, new, strict=True)))
        keys = both.query_position, both.text_index, -both.largest_value
        order = np.lexsort([key.numpy() for key in keys], axis=-1)
        chosen = torch.from_numpy(order[:, :k].copy())
        for column, values in zip(self, both, strict=True):
            column[rows] = values.take_along_dim(chosen if values.dim() == 2 else chosen[..., None], 1)


@dataclass(eq=False)
class LayerSums(RunningSummary):
    """The running summary of one layer with the strongest examples, over the texts of a shard.

    Attributes:
        name: the layer's qualified name.
        examples: number of strongest examples that are kept per row.
        current_batch: the batch of texts on which the model runs now.
    """

    name: str = field(kw_only=True)
    examples: int = field(kw_only=True)
    current_batch: CurrentBatch = field(kw_only=True)
    _strongest: StrongestExamples = field(init=False)
    takes_batches: ClassVar[bool] = True

    @property
    def strongest(self) -> StrongestExamples:
        """The strongest examples of each row."""
        self._add_pending()
        return self._strongest

    def context_of_rows(self) -> TextBatch:
        """Return the batch of the rows that are added now."""
        return self.current_batch.batch

    def _keep_examples(self, values: Tensor, counted: Tensor, measured: MeasuredRows, context: object) -> None:
        """Keep the strongest examples of a batch of whole texts, whose largest keys were measured too.

        Raises:
            ModelError: the rows are not the tokens of the batch.
        """
        batch = context
        assert isinstance(batch, TextBatch)
        if values.shape[2] != batch.num_tokens:
            raise ModelError(
                f"{self.name} reads {values.shape[2]} tokens, and the texts of the batch have {batch.num_tokens}.",
                "Give a model whose layers read each token of a text once, or choose other layers.",
            )
        if not hasattr(self, "_strongest"):
            self._strongest = StrongestExamples.empty(len(self._bins), self.examples)
        values = values.masked_fill(~counted, -torch.inf)
        self._strongest.add(values, batch, measured.values[LARGEST_KEY.name])


@dataclass(eq=False)
class CensusTally:
    """The sums of the statistics of a model's layers over batches of texts.

    Attributes:
        model: the model whose layers are measured.
        current: the batch that the model runs on now.
    """

    model: nn.Module
    current: CurrentBatch
    _recorder: Recorder

    @staticmethod
    @contextmanager
    def measure_model(
        model: nn.Module,
        probes: Sequence[Probe],
        special_ids: Sequence[int],
        examples: int,
        layer_filter: LayerFilter | None = None,
    ) -> Iterator[CensusTally]:
        """Measure every forward pass of a model in this context; arguments as in `census_probes` and `observe`."""
        current = CurrentBatch()

        def new_layer_sums(name: str, num_heads: int) -> LayerSums:
            return LayerSums(num_heads, name=name, examples=examples, current_batch=current)

        measuring = StatisticsMeasurer(model, module_names(model), (*probes, LARGEST_KEY), tuple(special_ids))
        with track_inputs(model) as inputs:
            recorder = Recorder(
                Record(), inputs, layer_filter, "summary", measuring, new_running_summary=new_layer_sums
            )
            with listen(recorder):
                yield CensusTally(model, current, recorder)

    def add_batch(self, batch: TextBatch) -> None:
        """Run the model on a batch, and add the statistics of its attention calls."""
        self.current.batch = batch
        run_batch(self.model, batch)

    @property
    def layers(self) -> dict[int, LayerSums]:
        """Number of a layer -> the layer's sums; layers are numbered in the order of their first calls."""
        found = ((layer.number, layer.running_summary) for layer in self._recorder.record.layers)
        return {number: sums for number, sums in found if isinstance(sums, LayerSums)}

    def texts_of_examples(self) -> set[int]:
        """Return the indices of the texts that have one of the strongest examples so far."""
        best = [sums.strongest for sums in self.layers.values()]
        return {text for each in best for text in each.text_index[each.largest_value > -torch.inf].tolist()}

    def check_complete(self) -> None:
        """Raise ModelError if no batch so far called attention that can be measured, see `completeness.py`."""
        check_complete(self.model, self._recorder.layer_names, self._recorder.layer_filter)


@contextmanager
def replace_attention(model: nn.Module) -> Iterator[bool]:
    """Run the attention of a model on this library's kernels, without padding where its family supports that.

    Returns:
        whether the model leaves padding out.

    Raises:
        ModelError: the model computes attention outside of transformers' AttentionInterface.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(leave_out_padding(model))
            leaves_out = True
        except ModelError:
            stack.enter_context(install(model))
            leaves_out = False
        yield leaves_out


def run_batch(model: nn.Module, batch: TextBatch) -> None:
    """Run a model on a batch without gradients and without a key/value cache; the output is dropped."""
    device = next(model.parameters()).device
    names = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    check_token_ids(model, batch.ids, type(model).__name__)
    with torch.no_grad(), drop_plans_at_end():
        model(input_ids=batch.ids.to(device), attention_mask=batch.mask.long().to(device), **options)
