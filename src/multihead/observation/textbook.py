"""Find the textbook heads of a model on repeated random tokens, where nothing but the repetition can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import InputError
from multihead.kinds import KINDS, Kind
from multihead.observation.observe import observe
from multihead.observation.record import Record
from multihead.probes.probe import Probe
from multihead.record.analysis.chance import chance_of_probes, compare_with_chance
from multihead.record.repeated import RepeatedTokens
from multihead.record.sample import SampleRecord

LENGTH, TIMES, DRAWS = 64, 3, 8
"""Number of random tokens, how often they repeat, and number of texts."""


def measure_repeated(
    model: nn.Module,
    words: Sequence[int],
    *,
    start: int | None = None,
    length: int = LENGTH,
    times: int = TIMES,
    draws: int = DRAWS,
    kinds: Sequence[Kind] = KINDS,
) -> dict[str, RepeatedTokens]:
    """Run a model on texts of a start token and repeated random tokens, and measure where each head looks.

    A head that looks up what followed a token the last time (induction), or the token itself (duplicate), cannot use
    meaning here, because the tokens have none. Shares are means over queries: for induction and duplicate over the
    tokens that occurred before, for the other statistics over all.

    Args:
        model: takes `input_ids`.
        words: the token ids to draw from, see `word_token_ids`.
        start: the token in front of them, see `start_token_id`; None puts none.
        length: how many random tokens.
        times: how often they come.
        draws: how many such texts are read; a standard error needs four.
        kinds: kinds of heads; those whose `texts` are "repeats" are measured.

    Returns:
        the name of each layer -> its heads on these texts. `add_repeated` adds them to a record.

    Raises:
        InputError: there are fewer words than random tokens.

    Source: prefix matching on repeated random tokens, arXiv:2209.11895; duplicate token heads, arXiv:2211.00593.
    """
    ids = repeated_tokens(words, start=start, length=length, times=times, draws=draws)
    device = next(model.parameters()).device
    measured = {kind.name: kind.probe for kind in kinds if kind.texts == "repeats" and isinstance(kind.probe, Probe)}
    with torch.no_grad(), observe(model, keep="statistics", probes=tuple(measured.values())) as seen:
        model(input_ids=ids.to(device))
    return {
        layer.name: _collect_repeated(layer.samples, measured, length, times, start=start is not None)
        for layer in seen.layers
    }


def _collect_repeated(
    samples: Sequence[SampleRecord], probes: Mapping[str, Probe], length: int, times: int, *, start: bool
) -> RepeatedTokens:
    """Collect the shares of a layer's heads, and their chance, which is the same in all texts."""
    shares = {
        name: torch.stack([one.means[probe.name] for one in samples])
        for name, probe in probes.items()
        if all(probe.name in one.per_query for one in samples)
    }
    one = samples[0]
    levels, measured = chance_of_probes(one, probes.values()), one.measured()
    even = {
        name: compare_with_chance([measured[of.name].values], [levels[of.name]], [measured[of.name].counted]).chance
        for name, of in probes.items()
        if name in shares and of.name in levels
    }
    return RepeatedTokens(length, times, start, shares, even)


def add_repeated(record: Record, measured: Mapping[str, RepeatedTokens]) -> None:
    """Add what `measure_repeated` measured to the layers of a record of the same model.

    The statistics are columns of its tables and pages from then on, conditions of `find`, and kinds of its heads, and
    they are saved with it.

    Args:
        record: the record.
        measured: the result of `measure_repeated`; layers that the record does not have are ignored.
    """
    for layer in record.layers:
        layer.repeated = measured.get(layer.name)


def repeated_tokens(
    words: Sequence[int],
    *,
    start: int | None = None,
    length: int = LENGTH,
    times: int = TIMES,
    draws: int = DRAWS,
    seed: int = 0,
) -> Tensor:
    """Draw random tokens, no two of a text alike, and repeat them.

    Returns:
        (draws, tokens), int64: in each the start token, if any, and `times` runs of its `length` tokens.

    >>> repeated_tokens(range(100), start=1, length=3, times=2, draws=4).shape
    torch.Size([4, 7])
    """
    if len(words) < length:
        raise InputError(
            f"The model knows {len(words)} words, and {length} random ones are drawn.",
            "Give a model with a larger vocabulary, or draw fewer.",
        )
    known, seeded = torch.tensor(words), torch.Generator().manual_seed(seed)
    runs = torch.stack([known[torch.randperm(len(words), generator=seeded)[:length]] for _ in range(draws)])
    text = runs.repeat(1, times)
    return text if start is None else torch.nn.functional.pad(text, (1, 0), value=start)


def word_token_ids(tokenizer: Any) -> list[int]:
    """List the token ids of a vocabulary without special and added tokens."""
    marks = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return [id_ for id_ in range(len(tokenizer)) if id_ not in marks]


def start_token_id(tokenizer: Any) -> int | None:
    """Return the token id that starts, separates or ends texts; None without one."""
    marks = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "cls", "eos"))
    return next((mark for mark in marks if mark is not None), None)
