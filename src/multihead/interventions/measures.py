"""What a model's output is worth, as one number per text: a loss, a difference of logits, a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from multihead.errors import ArgumentError
from multihead.errors.given import check_ids, is_integer, reject_given
from multihead.interventions.predictions import token_losses
from multihead.models.pretrained import pretrained_models

_NO_LABEL = -100  # the label of tokens whose loss does not count


@dataclass(frozen=True)
class Measure:
    """A number per text of a model's output, with its unit and direction, for `mh.importance` and `mh.patch`.

    Attributes:
        function: f(output, batch) -> (texts,); `output` is what the model returned for `batch`.
        name: a Python identifier, for the names of columns, such as `effect_{name}_zero`.
        unit: "nats", "logits" or another; "" for none.
        more_is_better: whether a larger number is better; None where neither is.

    Raises:
        ArgumentError: `function` is no function, or `name` no identifier.

    >>> import torch, multihead as mh
    >>> mean = mh.Measure(lambda output, batch: output.mean((1, 2)), "mean", more_is_better=True)
    >>> mean(torch.ones(2, 3, 4), None)
    tensor([1., 1.])
    """

    function: Callable[[Any, Any], Tensor]
    name: str = "measure"
    unit: str = ""
    more_is_better: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            reject_given("measure", self.function, "a function of (output, batch)", "Return one number per text.")
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ArgumentError(f"A measure is called {self.name!r}.", 'Give a Python identifier, such as "score".')

    def __call__(self, output: Any, batch: Any) -> Tensor:
        """Return the number of each text, (texts,)."""
        return self.function(output, batch)

    def of_texts(self, output: Any, batch: Any, texts: Collection[int]) -> Tensor:
        """Return the number of each text, (texts,) float64 on the CPU; `texts` are the numbers of texts that fit.

        Raises:
            ArgumentError: the function returned something else, or numbers that are not finite.
        """
        found = self.function(output, batch)
        wanted = f"Return one floating-point number per text: a tensor of shape ({max(texts)},)."
        if not isinstance(found, Tensor):
            raise ArgumentError(f"The measure {self.name} returned {type(found).__name__}.", wanted)
        if found.dim() != 1 or len(found) not in texts or not found.is_floating_point():
            raise ArgumentError(
                f"The measure {self.name} returned a {found.dtype} tensor of shape {tuple(found.shape)} for "
                f"{max(texts)} text{'s' * (max(texts) != 1)}.",
                wanted,
            )
        if not bool(found.detach().isfinite().all()):
            first = int((~found.detach().isfinite()).nonzero()[0, 0])
            raise ArgumentError(
                f"The measure {self.name} is {float(found[first])} for text {first} of a batch.",
                "Give texts and a measure with finite numbers.",
            )
        return found.cpu().double()


@dataclass(frozen=True)
class SeveralMeasures:
    """Several numbers per text of a model's output, which are measured in the same runs.

    Attributes:
        function: f(output, batch) -> (texts, numbers).
        name: what they are, for errors.
    """

    function: Callable[[Any, Any], Tensor]
    name: str

    def of_texts(self, output: Any, batch: Any, texts: Collection[int]) -> Tensor:
        """Return the numbers of each text, (texts, numbers) float64 on the CPU."""
        return self.function(output, batch).cpu().double()


def measure_of(model: nn.Module, given: Measure | Callable[[Any, Any], Tensor] | None) -> Measure:
    """Return what the caller gave as `measure`; None is the mean loss of the next token.

    Raises:
        ArgumentError: it is no function, or the model predicts no next token.
    """
    if isinstance(given, Measure):
        return given
    if given is not None:
        name = getattr(given, "__name__", "")
        return Measure(given, name if name.isidentifier() else "measure")
    networks: list[Any] = list(pretrained_models(model).values())
    if networks and not any(each.can_generate() for each in networks if hasattr(each, "can_generate")):
        raise ArgumentError(
            f"{type(networks[0]).__name__} predicts no next token.",
            "Give a measure: mh.class_logit(index), or a function of (output, batch) that returns one number per text.",
        )
    of_labels = any(getattr(each.config, "is_encoder_decoder", False) for each in networks)
    return Measure(lambda output, batch: _mean_losses(output, batch, of_labels), "loss", "nats", more_is_better=False)


def logit_difference(
    token: int | Sequence[int] | Tensor, other: int | Sequence[int] | Tensor, *, position: int | None = None
) -> Measure:
    """Return the measure: the logit of a token minus that of another one, as the next token of each text.

    Args:
        token: token id, or one per text of each batch.
        other: the same, of the other token.
        position: the token after which the model predicts, counted from the first token of each text without padding;
            None is the last one.

    Returns:
        a measure in logits, of which more is better.

    Raises:
        ArgumentError: these are no token ids; where it is used: one is no token of the model, or a text is shorter.

    >>> import torch, multihead as mh
    >>> logits = torch.tensor([[[0.0, 1.0, 5.0], [0.0, 3.0, 1.0]]])  # a text of two tokens
    >>> mh.logit_difference(1, 2)(logits, torch.tensor([[0, 1]]))
    tensor([2.])
    """
    ids = [_checked_tokens(name, given) for name, given in (("token", token), ("other", other))]

    def difference(output: Any, batch: Any) -> Tensor:
        rows = _logits_after(output, batch, position)
        found = [rows.gather(1, _tokens_of_texts(each, rows)[:, None])[:, 0] for each in ids]
        return found[0] - found[1]

    return Measure(difference, "logit_difference", "logits", more_is_better=True)


def class_logit(index: int) -> Measure:
    """Return the measure: the logit of a class, of a model that classifies texts or images: logits (texts, classes).

    Raises:
        ArgumentError: `index` is no integer; where it is used: the model has no such class.

    >>> import torch, multihead as mh
    >>> mh.class_logit(1)(torch.tensor([[0.0, 2.0]]), None)
    tensor([2.])
    """
    if not is_integer(index):
        raise ArgumentError(f"index is {index!r}.", "Give the index of a class.")

    def logit(output: Any, _: Any) -> Tensor:
        logits = _logits_of(output, dims=2)
        if not 0 <= index < logits.shape[1]:
            raise ArgumentError(f"There is no class {index}.", f"Give one from 0 to {logits.shape[1] - 1}.")
        return logits[:, index]

    return Measure(logit, "class_logit", "logits", more_is_better=True)


def _checked_tokens(name: str, given: Any) -> Tensor:
    """Return token ids, () or (texts,) int64."""
    return torch.tensor(given if is_integer(given) else check_ids(name, given))


def _tokens_of_texts(ids: Tensor, logits: Tensor) -> Tensor:
    """Return a token id per row of the logits, (texts, vocabulary) -> (texts,)."""
    texts, words = logits.shape
    if ids.dim() and len(ids) != texts:
        raise ArgumentError(f"There are {len(ids)} token ids for {texts} texts.", "Give one id, or one per text.")
    if not bool(((ids >= 0) & (ids < words)).all()):
        wrong = int(ids.flatten()[((ids < 0) | (ids >= words)).flatten()][0])
        raise ArgumentError(f"{wrong} is no token of the model.", f"Give ids from 0 to {words - 1:,}.")
    return ids.to(logits.device).expand(texts)


def _logits_of(output: Any, *, dims: int) -> Tensor:
    """Return the logits in a model's output."""
    found = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.dim() != dims:
        shape = "(texts, classes)" if dims == 2 else "(texts, tokens, vocabulary)"
        raise ArgumentError(f"The output of the model has no logits {shape}.", "Give a function as measure.")
    return found


def _logits_after(output: Any, batch: Any, position: int | None) -> Tensor:
    """Return the logits of each text after one of its tokens, the last for None: (texts, vocabulary)."""
    logits = _logits_of(output, dims=3)
    names = batch if isinstance(batch, Mapping) else {}
    masks = [names.get("decoder_attention_mask" if "decoder_input_ids" in names else "attention_mask")]
    if "decoder_input_ids" not in names and "labels" in names:
        masks.append(names["labels"] != _NO_LABEL)
    fitting = (each for each in masks if isinstance(each, Tensor) and each.shape == logits.shape[:2])
    real = next(fitting, torch.ones(logits.shape[:2])).to(logits.device).bool()
    place = real.long().cumsum(1) - 1  # of each token in its text
    wanted = place.amax(1) if position is None else torch.full_like(place[:, 0], position)
    if not bool((wanted >= 0).all() & (wanted <= place.amax(1)).all()):
        raise ArgumentError(
            f"position is {position}, and a text has {int(place.amax(1).min()) + 1} tokens.",
            "Give a token that every text has, counted from 0 without padding.",
        )
    column = ((place == wanted[:, None]) & real).int().argmax(1)
    return logits[torch.arange(len(logits), device=logits.device), column]


def _mean_losses(output: Any, batch: Any, of_labels: bool) -> Tensor:  # noqa: FBT001
    """Return the mean loss of the tokens of each text that are predicted, nats: (texts,).

    Args:
        output: what the model returned.
        batch: what it was called with: ids, or a dict with them. Padding and tokens with the label -100 do not count.
        of_labels: whether the model predicts the labels where it is given no other tokens of its decoder (T5).
    """
    logits = _logits_of(output, dims=3)
    names = batch if isinstance(batch, Mapping) else {"input_ids": batch[0] if isinstance(batch, tuple) else batch}
    prefix = "decoder_" if "decoder_input_ids" in names else ""
    ids, mask, labels = (names.get(each) for each in (f"{prefix}input_ids", f"{prefix}attention_mask", "labels"))
    if of_labels and not prefix and labels is not None:  # each position predicts its own label
        ids, mask, logits = functional.pad(labels, (1, 0)), None, functional.pad(logits, (0, 0, 0, 1))
        labels = ids
    if not isinstance(ids, Tensor) or ids.shape != logits.shape[:2] or ids.is_floating_point() or ids.shape[1] < 2:
        raise ArgumentError(
            "The mean loss of the next token needs ids of at least two tokens, and a logit per token and word.",
            "Give a function as measure, or a batch with input_ids.",
        )
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    texts = torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape)
    positions = names.get(f"{prefix}position_ids")
    if mask is None and isinstance(positions, Tensor) and positions.shape == ids.shape:  # several texts in a row
        starts = positions == 0
        starts[:, 0] = True
        texts = starts.flatten().cumsum(0).sub(1).view(ids.shape)
    counted = counted[:, 1:] & counted[:, :-1] & (texts[:, 1:] == texts[:, :-1])
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        counted = counted & (labels[:, 1:] != _NO_LABEL)
    targets = ids.clamp(min=0).to(logits.device)
    if torch.is_grad_enabled():
        flat = logits[:, :-1].flatten(0, 1)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        losses = functional.cross_entropy(flat, targets[:, 1:].flatten(), reduction="none").view(counted.shape)
    else:
        losses = token_losses(logits, targets)
    counted, of_text = counted.to(losses.device), texts[:, 1:].flatten().to(losses.device)
    sums = losses.new_zeros(int(texts.max()) + 1).index_add(0, of_text, losses.masked_fill(~counted, 0).flatten())
    return sums / torch.zeros_like(sums).index_add(0, of_text, counted.flatten().to(losses))
