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
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from multihead.counting.batches import CurrentBatch, TextBatch
from multihead.counting.sums import LayerSums
from multihead.errors import ModelError, ProbeError
from multihead.kernels.call import listen
from multihead.kernels.choose import drop_plans_at_end
from multihead.models.huggingface import install
from multihead.models.packed import leave_out_padding
from multihead.models.pretrained import track_inputs
from multihead.models.token_ids import check_token_ids
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.layer_names import module_names
from multihead.observation.measuring import StatisticsMeasurer
from multihead.observation.record import Record
from multihead.observation.recorder import Recorder
from multihead.probes.catalogue import DEFAULT, ENTROPY, LARGEST_KEY, PROBES, reject_unknown_set
from multihead.probes.probe import Probe
from multihead.probes.statistics import ProbeOrName, resolve_probes


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
    return found


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
        """Raise ModelError if no batch so far called attention that can be measured, see `Recorder.check_complete`."""
        self._recorder.check_complete(self.model)


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
