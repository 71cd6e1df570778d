"""What logits predict: the loss of each token, the likeliest next tokens, and how far two predictions differ.

A language model has a logit for each position and token of its vocabulary: 8,192 tokens and a vocabulary of 49,152 take
1.6 GB in float32. The logits are converted to float64 in blocks of positions, so no float64 tensor of this size exists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multihead.tensors.precision import widen

__all__ = ["kl_divergence", "likeliest_tokens", "token_losses"]

_MAX_LOGITS_PER_BLOCK = 1 << 22  # logits that are converted at once: 32 MiB in float64
_MAX_LOGITS_PER_CPU_BLOCK = 1 << 19  # 4 MiB stay in a cache; 32 MiB took 1.8 times as long, in new pages each time


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of each token of a text but the first: -ln of its probability after the tokens before it.

    Args:
        logits: (..., tokens, vocabulary), those of a language model.
        ids: (..., tokens), int64.

    Returns:
        (..., tokens - 1), float64 (float32 on MPS), nats; infinite for a token that the model excludes.

    >>> token_losses(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])).exp()
    tensor([[4., 4.]], dtype=torch.float64)
    """

    def losses(block: Tensor, targets: Tensor) -> Tensor:
        return -widen(block).log_softmax(-1).gather(-1, targets)[..., 0]

    return _apply_in_blocks(losses, logits[..., :-1, :], ids[..., 1:, None].to(logits.device))


def kl_divergence(before: Tensor, after: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of predictions after a change from those before it, per position.

    Args:
        before: (..., vocabulary), logits before the change.
        after: (..., vocabulary), logits after it.

    Returns:
        (...), float64, nats: sum of p ln(p / q) over the vocabulary, with p before and q after the change; 0 for equal
        predictions, infinite if q excludes a token that p does not.

    >>> kl_divergence(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 3.0]))
    tensor(0., dtype=torch.float64)
    """

    def divergences(p: Tensor, q: Tensor) -> Tensor:
        ln_p, ln_q = widen(p).log_softmax(-1), widen(q).log_softmax(-1)
        # A token with p = 0 has a term of 0, and not 0 times infinity.
        return (ln_p.exp() * (ln_p - ln_q)).masked_fill(ln_p == -torch.inf, 0).sum(-1)

    return _apply_in_blocks(divergences, before, after)


def likeliest_tokens(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the tokens with the largest probabilities, the largest first.

    Args:
        logits: (..., vocabulary).
        number: how many; all, if the vocabulary has fewer.

    Returns:
        ids (..., number), int64, and probabilities (..., number), float64.

    >>> ids, probabilities = likeliest_tokens(torch.tensor([0.0, 1.0, 2.0]), 2)
    >>> ids, probabilities.sum() < 1
    (tensor([2, 1]), tensor(True))
    """
    found, ids = logits.topk(min(number, logits.shape[-1]))
    return ids, (widen(found) - _apply_in_blocks(lambda block: widen(block).logsumexp(-1), logits)[..., None]).exp()


def _apply_in_blocks(function: Callable[..., Tensor], logits: Tensor, *others: Tensor) -> Tensor:
    """Apply a function of (n, vocabulary) and (n, last dimension) of others, -> (n,), to blocks of positions."""
    rows = [each.reshape(-1, each.shape[-1]) for each in (logits, *others)]
    most = _MAX_LOGITS_PER_CPU_BLOCK if logits.device.type == "cpu" else _MAX_LOGITS_PER_BLOCK
    size = max(most // logits.shape[-1], 1)
    blocks = zip(*(each.split(size) for each in rows), strict=True)
    return torch.cat([function(*block) for block in blocks]).view(logits.shape[:-1])
