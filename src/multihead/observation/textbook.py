"""Find the textbook heads of a model on repeated random tokens, where nothing but the repetition can be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import InputError
from multihead.observation.observe import observe

LENGTH, TIMES, DRAWS = 64, 3, 4
"""Number of random tokens, how often they repeat, and number of texts."""

KINDS = {
    "induction": "induction_mass",
    "duplicate": "duplicate_mass",
    "previous": "previous_mass",
    "first": "first_mass",
}
"""Kind -> the statistic that measures it."""

_OF_REPEATS = ("induction", "duplicate")  # means over the tokens that were there before


@dataclass(frozen=True)
class TextbookHead:
    """One head and how much of a kind it is.

    Attributes:
        layer: the layer's number.
        head: the head's index in its layer.
        share: the mean share of its attention on the keys of the kind, 0 to 1.
    """

    layer: int
    head: int
    share: float


def textbook_heads(
    model: nn.Module,
    words: Sequence[int],
    *,
    start: int | None = None,
    length: int = LENGTH,
    times: int = TIMES,
    draws: int = DRAWS,
) -> dict[str, list[TextbookHead]]:
    """Run a model on a start token and repeated random tokens, and rank its heads per kind.

    A head that looks up what followed a token the last time (induction), or the token itself (duplicate), cannot use
    meaning here, because the tokens have none. Shares are means over queries: for induction and duplicate over the
    tokens that occurred before, for the other kinds over all.

    Args:
        model: takes `input_ids`.
        words: the token ids to draw from, see `words_of`.
        start: the token in front of them, see `start_of`; None puts none.
        length: how many random tokens.
        times: how often they come.
        draws: how many such texts are read.

    Returns:
        for each of `KINDS` all heads, the largest share first.

    Raises:
        InputError: there are fewer words than random tokens.

    Source: prefix matching on repeated random tokens, arXiv:2209.11895; duplicate token heads, arXiv:2211.00593.
    """
    ids = repeated_tokens(words, start=start, length=length, times=times, draws=draws)
    device = next(model.parameters()).device
    with torch.no_grad(), observe(model, keep="statistics", probes=tuple(KINDS.values())) as seen:
        model(input_ids=ids.to(device))
    fresh = ids.shape[1] - length * (times - 1)  # tokens that were not there before
    found: dict[str, list[TextbookHead]] = {}
    for kind, name in KINDS.items():
        heads = []
        for layer in seen.layers:
            if kind in _OF_REPEATS:
                shares = torch.stack([one.per_query[name][:, fresh:].double().mean(1) for one in layer.samples]).mean(0)
            else:
                shares = layer.means()[name]
            heads += [TextbookHead(layer.number, head, float(share)) for head, share in enumerate(shares)]
        found[kind] = sorted(heads, key=lambda each: -each.share)
    return found


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

    >>> repeated_tokens(range(100), start=1, length=3, times=2).shape
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


def words_of(tokenizer: Any) -> list[int]:
    """List the token ids that are words and parts of words, and no marks."""
    marks = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return [id_ for id_ in range(len(tokenizer)) if id_ not in marks]


def start_of(tokenizer: Any) -> int | None:
    """Return the token that starts or separates texts, or None without one."""
    marks = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "cls", "eos"))
    return next((mark for mark in marks if mark is not None), None)
