"""Watch the attention of a model while it runs, and put the model back as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from multihead import listening
from multihead.errors import ArgumentError, ModelError, ProbeError, refuse_unless_integer
from multihead.hooks import huggingface
from multihead.hooks.inputs import noticed
from multihead.observation.choice import Choice
from multihead.observation.hearing import Ear, Keep
from multihead.observation.record import Record
from multihead.probes.statistics import MAP_SIZE, PROBES, refuse_unless_known


@contextmanager
def observe(
    model: nn.Module,
    *,
    layers: Sequence[int | str] | int | str | None = None,
    keep: Keep = "cpu",
    probes: Sequence[str] | None = None,
    special_ids: Sequence[int] = (),
    map_size: int = MAP_SIZE,
) -> Iterator[Record]:
    """Watch every head of a model while it runs.

    Layers of this library are heard as they are; a Hugging Face model calls this library's attention while the
    context lasts, and its outputs stay within the rounding of its dtype. Afterwards, and after an exception too,
    the model is as it was. Padding is left out: of a padded batch each text is one sample of its own length.
    The calls of a decoding, one token each, are joined to one sample; several batches add up.

    Args:
        model: a module that holds attention layers of this library, or a Hugging Face model, or both.
        layers: which layers to keep, by index in the order they first run, or by name: a glob such as
            "encoder.*", or a part such as "layer.3"; None keeps all.
        keep: where q and k are kept for later tiles of the map: in the memory of the "cpu", on the "device" of
            the model, or nowhere ("statistics").
        probes: which statistics, see `multihead.probes.statistics`; all if None.
        special_ids: the token ids that `special_mass` counts, such as those of [CLS] and [SEP].
        map_size: most rows and columns of the pooled map.

    Returns: a record that fills while the model runs.

    Raises:
        ModelError: no module, a family that cannot be watched; and at the end: nothing was heard, or a layer
            that was asked for is none.
        ArgumentError, ProbeError: an option that does not exist.

    >>> import multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> with mh.observe(layer) as seen:
    ...     y = layer(torch.randn(1, 5, 8))
    >>> seen.layers[0].weights(head=1, queries=slice(0, 2)).shape
    torch.Size([2, 5])
    """
    _refuse_unless_sensible(model, keep, probes, special_ids, map_size)
    root = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    record = Record(title=type(root).__name__)
    with ExitStack() as stack:
        stack.enter_context(huggingface.installed(root))
        if "torch._dynamo" in sys.modules:  # a compiled graph tells nobody what it computes
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        inputs = stack.enter_context(noticed(root))
        ear = Ear(
            record=record,
            names={id(module): name or type(module).__name__ for name, module in root.named_modules()},
            inputs=inputs,
            choice=Choice.of(layers),
            keep=keep,
            probes=_names(probes, special_ids),
            special_ids=tuple(special_ids),
            map_size=map_size,
        )
        stack.enter_context(listening.listen(ear))
        yield record
    ear.refuse_unless_heard(root)


def _names(probes: Sequence[str] | None, special_ids: Sequence[int]) -> tuple[str, ...]:
    chosen = tuple(PROBES) if probes is None else tuple(dict.fromkeys(probes))
    return chosen if special_ids else tuple(name for name in chosen if name != "special_mass")


def _refuse_unless_sensible(
    model: object, keep: object, probes: Sequence[str] | None, special_ids: Sequence[int], map_size: object
) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"The model is a {type(model).__name__}, and no module.", "Give a torch.nn.Module.")
    if keep not in ("cpu", "device", "statistics"):
        raise ArgumentError(f"keep is {keep!r}.", 'Give "cpu", "device" or "statistics".')
    refuse_unless_integer("map_size", map_size)
    if probes is not None:
        refuse_unless_known(tuple(probes), torch.empty(0))
        if "special_mass" in probes and not special_ids:
            raise ProbeError(
                "special_mass was asked for, and nothing says which tokens are special.", "Give special_ids."
            )
