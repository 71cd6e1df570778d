"""Entry point: what `observe` records of `generate` is what it records of one pass over each text that came out."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead.record.sample import SampleRecord
from tests import oracle
from tests.fuzz.draw import Draw, Mismatch, check_error
from tests.fuzz.models import sharp_model

FAMILIES = ("llama", "gemma2", "gpt2")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam samples": {"num_beams": 3, "do_sample": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "guidance": {"guidance_scale": 1.5},
}
CACHES: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 4},
}
ALLOWED = 1e-8


def generated(draw: Draw) -> None:
    """Families x ways of decoding x padding x caches x what is kept, in float64."""
    way = draw.pick("way", *WAYS)
    family = "llama" if way == "early exit" else draw.pick("family", *FAMILIES)  # not each can leave early
    alone = way in ("lookup", "early exit")
    name = "default" if alone else draw.pick("cache", *CACHES)
    rows, length = 1 if alone else 1 + draw.has("two texts", 0.7), 4 + draw.pick("length", 0, 3, 6)
    ids = torch.randint(3, 100, (rows, length), generator=draw.generator("ids"))
    mask = torch.ones_like(ids)
    if rows > 1 and draw.has("padding", 0.5):
        mask[-1, : length // 2], ids[-1, : length // 2] = 0, 0
    keep = draw.pick("keep", "cpu", "statistics", "summary")
    draw.notes |= {"family": family, "way": way, "cache": name, "keep": keep, "rows": rows}
    model = sharp_model(draw, family).double()
    # A summary does not tell how many tokens of a text it has read, so there no text ends before the others.
    ends = None
    if keep != "summary" and draw.has("ends", 0.6):
        ends = torch.randint(3, 100, (4,), generator=draw.generator("ends")).tolist()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": ends}
    with warnings.catch_warnings(), torch.no_grad(), mh.observe(model, keep=keep) as seen:
        warnings.simplefilter("ignore")
        returned = model.generate(ids, attention_mask=mask, **(options | WAYS[way] | CACHES[name]))
    texts = [_real_tokens(row, length, ends) for row in returned.tolist()]
    if keep == "summary":
        _compare_summary(model, texts, seen)
    else:
        _compare_texts(model, texts, seen)


def _real_tokens(row: list[int], prompt: int, ends: list[int] | None) -> list[int]:
    """Return a returned sequence without padding, up to its end."""
    stop = next((place + 1 for place in range(prompt, len(row)) if ends and row[place] in ends), len(row))
    return row[next(place for place, token in enumerate(row) if token) : stop]


def _compare_texts(model: Any, texts: list[list[int]], seen: mh.Record) -> None:
    for layer in seen.layers:
        if layer.num_samples != len(texts):
            raise Mismatch(f"{layer.num_samples} texts are recorded, and {len(texts)} came out")
    for index, text in enumerate(texts):
        read = seen.layers[0].samples[index].num_queries
        if read not in (len(text), len(text) - 1):
            raise Mismatch(f"{read} queries are recorded of a text of {len(text)} tokens")
        with torch.no_grad(), mh.observe(model) as alone:
            model(torch.tensor([text[:read]]))
        for layer, expected in zip(seen.layers, alone.layers, strict=True):
            _compare_sample(layer.samples[index], expected.samples[0])


def _compare_sample(found: SampleRecord, alone: SampleRecord) -> None:
    if found.text.ids is None or alone.text.ids is None or found.text.ids.tolist() != alone.text.ids.tolist():
        raise Mismatch(f"the ids of a text are {found.text.ids}")
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        name: (found.statistics[name], value)
        for name, value in alone.statistics.items()
        if name in found.statistics and name not in ("largest_key", "pooled_map")
    }
    if found.keeps_weights:
        pairs["weights"] = found.weights(), alone.weights()
    for name, (value, right) in pairs.items():
        if value.shape != right.shape:
            raise Mismatch(f"recorded {name} has another shape: {tuple(value.shape)} instead of {tuple(right.shape)}")
        check_error(f"recorded {name}", oracle.difference(value, right), ALLOWED)


def _compare_summary(model: Any, texts: list[list[int]], seen: mh.Record) -> None:
    summary, lengths = seen.layers[0].running_summary, [len(text) - 1 for text in texts]
    if len(texts) == 1 and summary is not None:  # the last token was read if it is a draft that was accepted
        lengths = [min(max(int(summary.sums.num_queries.max()), *lengths), len(texts[0]))]
    with torch.no_grad(), mh.observe(model, keep="summary") as alone:
        for text, length in zip(texts, lengths, strict=True):
            model(torch.tensor([text[:length]]))
    for found, expected in zip(seen.layers, alone.layers, strict=True):
        if found.num_samples != len(texts):
            raise Mismatch(f"a summary has {found.num_samples} texts, and {len(texts)} came out")
        for name, value in expected.means().items():
            check_error(f"the mean of {name} in a summary", oracle.difference(found.means()[name], value), ALLOWED)
