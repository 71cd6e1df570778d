"""The mean output of every head over a set of texts, which `mh.ablate(by="mean")` puts in place of a head's output.

Attention sinks make the first token of a text special: heads write another vector there than anywhere else. So a mean
over texts has two vectors per head, one of the first tokens and one of all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, InputError, ModelError
from multihead.errors.given import check_batch, check_module, check_path, reject_given
from multihead.errors.optional import require
from multihead.files import write_atomically
from multihead.interventions.followed import FollowedCall, follow_calls
from multihead.kernels import sequence_split
from multihead.models.token_ids import check_token_ids

MeanOver = Literal["text", "position"]
_FILE_FORMAT = "head means 1"


@dataclass(frozen=True, eq=False)
class HeadMeans:
    """The mean output of each head, before the output projection.

    Attributes:
        vectors: name of a layer -> (rows, heads, value_dim) float64, one mean per row: of the first tokens of the texts
            and of all other tokens (`over="text"`), or of each position (`over="position"`).
        counts: name of a layer -> (rows,) int64, number of tokens in each mean.
        over: "text" or "position", which tokens one row of the means includes.

    >>> means = HeadMeans({"layer": torch.zeros(2, 4, 8)}, {"layer": torch.tensor([3, 27])})
    >>> means
    <HeadMeans of 1 layers over 30 tokens, by text>
    """

    vectors: dict[str, Tensor]
    counts: dict[str, Tensor]
    over: MeanOver = "text"

    def __repr__(self) -> str:
        tokens = max((int(count.sum()) for count in self.counts.values()), default=0)
        return f"<HeadMeans of {len(self.vectors)} layers over {tokens:,} tokens, by {self.over}>"

    def rows_of(self, name: str, position: Tensor) -> Tensor:
        """Return the row of the means for each position, (batch, queries) int64; padding has the row 0.

        Raises:
            ArgumentError: the layer has no means, or a position is beyond those of the reference.
        """
        if name not in self.vectors:
            raise ArgumentError(
                f"The reference has no means of {name}.", "Compute them with mh.head_means on this model."
            )
        index = position.clamp(min=0)
        if self.over == "text":
            index = index.clamp(max=1)
        rows = len(self.vectors[name])
        furthest = int(index.max()) if index.numel() else 0
        if furthest >= rows:
            raise ArgumentError(
                f"The text has a token at position {furthest:,}, and the texts of the reference have {rows:,} tokens.",
                'Give longer texts as reference, or use mean_over="text".',
            )
        missing = (self.counts[name].to(index.device)[index] == 0) & (position >= 0)
        if bool(missing.any()):
            raise ArgumentError(
                "The texts of the reference have a single token, so there is no mean of later tokens.",
                "Give longer texts as reference.",
            )
        return index

    def save(self, file: str | Path) -> None:
        """Write the means to one safetensors file, completely or not at all.

        Raises:
            InputError: the file cannot be written.
            MissingPackageError: safetensors is not installed.
        """
        check_path("file", file)
        require("safetensors", purpose="Saving means of heads", extra="view")
        from safetensors.torch import save

        tensors = {f"vectors.{name}": value.contiguous() for name, value in self.vectors.items()}
        tensors |= {f"counts.{name}": value.contiguous() for name, value in self.counts.items()}
        header = {"multihead": json.dumps({"format": _FILE_FORMAT, "over": self.over})}
        write_atomically(str(file), save(tensors, header))

    @staticmethod
    def load(file: str | Path) -> HeadMeans:
        """Read means that `save` wrote.

        Raises:
            InputError: the file cannot be read, or has no means of heads.
            MissingPackageError: safetensors is not installed.
        """
        check_path("file", file)
        require("safetensors", purpose="Loading means of heads", extra="view")
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), "pt") as opened:
                header = json.loads((opened.metadata() or {}).get("multihead", "{}"))
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError, ValueError) as error:
            raise InputError(
                f"{str(file)!r} cannot be read: {error}.", "Give a file that HeadMeans.save wrote."
            ) from None
        vectors = {name[8:]: each for name, each in tensors.items() if name.startswith("vectors.")}
        counts = {name[7:]: each for name, each in tensors.items() if name.startswith("counts.")}
        fits = header.get("format") == _FILE_FORMAT and header.get("over") in ("text", "position")
        fits = fits and vectors.keys() == counts.keys()
        if not fits or any(each.dim() != 3 or len(each) != len(counts[name]) for name, each in vectors.items()):
            raise InputError(f"{str(file)!r} has no means of heads.", "Give a file that HeadMeans.save wrote.")
        return HeadMeans(vectors, counts, header["over"])


def head_means(model: nn.Module, batches: Iterable[Any], *, over: MeanOver = "text") -> HeadMeans:
    """Compute the mean output of every head of a model over texts, before the output projection.

    Padding is left out. No gradients are computed, and the model keeps its mode: in training mode it applies dropout.

    Args:
        model: a module with attention layers of this library, or a Hugging Face model.
        batches: what to call the model with: dicts of arguments (as tokenizers return them), tuples, or tensors.
        over: "text": one mean of the first tokens of the texts, and one of all other tokens; "position": one mean per
            position in a text.

    Returns:
        the means, for `mh.ablate(..., by="mean", reference=means)`.

    Raises:
        ArgumentError: `over` does not exist, or there are no batches.
        ModelError: no attention layer of the model ran, or the tokens or heads are split over ranks.

    >>> import torch, multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> means = mh.head_means(layer, [torch.randn(4, 10, 8)])
    >>> means
    <HeadMeans of 1 layers over 40 tokens, by text>
    """
    if over not in ("text", "position"):
        raise ArgumentError(f"over is {over!r}.", 'Give "text" or "position".')
    if sequence_split.active_split is not None:
        raise ModelError(
            "The means of heads cannot be computed in context_parallel, where a rank has part of the tokens.",
            "Run the model on one process.",
        )
    check_module(model)
    sums = HeadMeans({}, {}, over)
    with torch.no_grad(), follow_calls(model, partial(_add_output, sums)):
        for batch in checked_batches(model, batches):
            run_batch(model, batch)
    if not sums.vectors:
        raise ModelError(
            f"No attention layer of {type(model).__name__} ran.", "Give the model whose heads you want to switch off."
        )
    means = {name: total / sums.counts[name].clamp(min=1)[:, None, None] for name, total in sums.vectors.items()}
    return HeadMeans(means, sums.counts, over)


def checked_batches(model: nn.Module, batches: Any) -> Iterator[Any]:
    """Yield the batches that the caller gave, one or several, each checked before the model is called with it.

    Raises:
        ArgumentError: there are none, or one is not what a model is called with.
    """
    if isinstance(batches, (Tensor, Mapping)):  # each row of a tensor and each key of a dict would be a batch
        batches = [batches]
    if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
        check_batch("batches", batches)
        reject_given("batches", batches, "an iterable of batches", "Give a list of the model's inputs.")
    batch = None
    for batch in batches:
        check_batch("A batch", batch)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            check_token_ids(model, ids, type(model).__name__)
        yield batch
    if batch is None:
        raise ArgumentError("There are no batches.", "Give an iterable of the model's inputs.")


def count_batches(batches: object) -> int | None:
    """Return how many batches `checked_batches` yields; None if that is unknown before they are read."""
    return len(batches) if isinstance(batches, Sequence) else 1 if isinstance(batches, (Tensor, Mapping)) else None


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call a model with a dict of arguments, a tuple of them, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _add_output(sums: HeadMeans, call: FollowedCall, output: Tensor) -> tuple[Tensor, None]:
    """Add the output of a call, (batch, heads, queries, value_dim), to the sums in `sums.vectors`; return it unchanged.

    The sums are (rows, heads, value_dim) float64, one per row as in `HeadMeans`, which has means in their place.
    """
    call.require_all_heads("their means cannot be computed")
    position, name = call.tokens.position, call.layer_name
    real = position >= 0
    vectors = output.detach().transpose(1, 2)[real].cpu().double()  # (tokens, heads, value_dim)
    rows, least = position[real].cpu(), 0
    if sums.over == "text":
        rows, least = rows.clamp(max=1), 2
    total = sums.vectors.get(name, vectors.new_zeros(0, *vectors.shape[1:]))
    counts = rows.bincount(minlength=max(least, len(total)))
    counts[: len(total)] += sums.counts.get(name, 0)
    total = torch.cat([total, total.new_zeros(len(counts) - len(total), *total.shape[1:])])
    sums.vectors[name], sums.counts[name] = total.index_add(0, rows, vectors), counts
    return output, None
