"""Find textbook heads (induction, duplicate, previous and first token) of a model on repeated random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, InputError
from multihead.kinds import KINDS, Kind
from multihead.observation.observe import observe
from multihead.observation.record import Record
from multihead.probes.probe import Probe
from multihead.record.chance import chance_of_probes, compare_with_chance
from multihead.record.repeated import RepeatedTokens
from multihead.record.sample import SampleRecord

__all__ = ["add_repeated", "measure_repeated", "repeated_tokens"]

DEFAULT_LENGTH, DEFAULT_TIMES, DEFAULT_DRAWS = 64, 3, 8
"""Defaults: number of random tokens, number of times that they occur, and number of texts."""

NO_START_TOKEN = "none"
"""Value of an option for texts without a start token."""


def measure_repeated(
    model: nn.Module,
    words: Sequence[int],
    *,
    start: int | None = None,
    start_token: str = "",
    length: int = DEFAULT_LENGTH,
    times: int = DEFAULT_TIMES,
    draws: int = DEFAULT_DRAWS,
    seed: int = 0,
    kinds: Sequence[Kind] = KINDS,
) -> dict[str, RepeatedTokens]:
    """Run a model on texts of repeated random tokens, and measure the share of attention of each textbook kind.

    Random tokens have no meaning, so induction heads (attention to the token after the previous occurrence) and
    duplicate heads (to the previous occurrence) can use only the repetition. Shares are means over queries: for
    induction and duplicate over the tokens that occurred before, for the other statistics over all tokens. The start
    token matters: with another one, or without one, the shares of some models differ by tens of percentage points.

    Args:
        model: a model that takes `input_ids`.
        words: token ids to draw from, see `word_token_ids`.
        start: token id at the start of each text, see `start_token_id`; None: no start token.
        start_token: the start token as the vocabulary writes it, which tables and findings name.
        length: number of random tokens.
        times: number of times that the random tokens occur in a text.
        draws: number of texts; a standard error needs four.
        seed: seed of the random tokens.
        kinds: kinds of heads; the kinds with `texts="repeats"` are measured.

    Returns:
        name of a layer -> the shares of its heads. `add_repeated` adds them to a record.

    Raises:
        InputError: there are fewer `words` than `length`.

    Source: prefix matching on repeated random tokens, arXiv:2209.11895; duplicate token heads, arXiv:2211.00593.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=99, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> measured = measure_repeated(model, range(99), length=16)
    >>> measured["h.0.attn"].shares["repeated_induction"].shape  # (texts, heads)
    torch.Size([8, 2])
    """
    ids = repeated_tokens(words, start=start, length=length, times=times, draws=draws, seed=seed)
    measured = {kind.name: kind.probe for kind in kinds if kind.texts == "repeats" and isinstance(kind.probe, Probe)}
    with torch.no_grad(), observe(model, keep="statistics", probes=tuple(measured.values())) as seen:
        model(input_ids=ids.to(next(model.parameters()).device))
    return {
        layer.name: _collect_repeated(
            layer.samples, measured, length, times, start=start is not None, start_token=start_token
        )
        for layer in seen.layers
    }


def _collect_repeated(
    samples: Sequence[SampleRecord],
    probes: Mapping[str, Probe],
    length: int,
    times: int,
    *,
    start: bool,
    start_token: str,
) -> RepeatedTokens:
    """Collect the shares of a layer's heads in all texts, and the chance levels, which are equal in all texts."""
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
    return RepeatedTokens(length, times, start, shares, even, start_token)


def add_repeated(record: Record, measured: Mapping[str, RepeatedTokens]) -> None:
    """Add the results of `measure_repeated` to the layers of a record of the same model.

    The record then has them as columns of tables and pages, in `find`, as kinds of heads, and in saved files.

    Args:
        record: the record.
        measured: the result of `measure_repeated`; layers that the record does not have are ignored.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=99, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> with torch.no_grad(), observe(model) as seen:
    ...     y = model(torch.arange(20)[None])
    >>> add_repeated(seen, measure_repeated(model, range(99), length=16))
    >>> "repeated_induction" in seen.table().rows[0]
    True
    """
    for layer in record.layers:
        layer.repeated = measured.get(layer.name)


def repeated_tokens(
    words: Sequence[int],
    *,
    start: int | None = None,
    length: int = DEFAULT_LENGTH,
    times: int = DEFAULT_TIMES,
    draws: int = DEFAULT_DRAWS,
    seed: int = 0,
) -> Tensor:
    """Draw texts of distinct random tokens that are repeated.

    Returns:
        (draws, tokens), int64: in each row the start token, if any, and `length` random tokens `times` times.

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


def start_token_id(tokenizer: Any, chosen: str | None = None) -> int | None:
    """Return the id of the start token of repeated random tokens, or None for no start token.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chosen: a token of the vocabulary, or "none"; None takes the tokenizer's bos, cls or eos token, whichever exists
            first.

    Raises:
        ArgumentError: the vocabulary does not have the token.
    """
    if chosen is None:
        marks = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "cls", "eos"))
        return next((mark for mark in marks if mark is not None), None)
    if chosen == NO_START_TOKEN:
        return None
    known = tokenizer.get_vocab()
    if chosen not in known:
        special = ", ".join(dict.fromkeys(map(str, tokenizer.all_special_tokens)))
        raise ArgumentError(
            f"The start token is {chosen!r}, which is not a token of the vocabulary.",
            f'Give one of its tokens ({special or "it has no special ones"}), or "{NO_START_TOKEN}".',
        )
    return int(known[chosen])
