"""The ids of a text are known for its keys, one a key, whatever calls, batches, padding and caches they came in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead.layer.cache import KeyValueCache
from multihead.observation.record import Record
from tests.families import LENGTH, batch_of, family
from tests.models.test_families import DECODERS, decoded
from tests.observation.recorded import Reader, ids, read


def texts(record: Record) -> list[list[list[int] | None]]:
    """The ids of every sample of every layer."""
    found = [[one.text.ids for one in layer.samples] for layer in record.layers]
    return [[None if each is None else each.tolist() for each in layer] for layer in found]


def test_every_text_of_a_batch_has_its_own() -> None:
    given = ids(3, 6)
    assert texts(read(given)) == [given.tolist()] * 2


def test_batches_add_up() -> None:
    assert texts(read(ids(1, 4), ids(2, 5))) == [[*ids(1, 4).tolist(), *ids(2, 5).tolist()]] * 2


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_is_left_out(name: str, padding: Any) -> None:
    batch = batch_of(name, padding=padding)
    with torch.no_grad(), mh.observe(model := family(name)) as seen:
        model(**batch)
    expected = [
        row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts(seen) == [expected] * len(seen.layers)


@pytest.mark.parametrize("name", [each for each in DECODERS if each != "gpt_oss"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_decoding_reads_what_it_wrote(name: str, padding: Any) -> None:
    batch = batch_of(name, padding=padding)
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    with mh.observe(model := family(name)) as seen:
        written = decoded(model, batch)[:, :-1]
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, written.shape[1] - LENGTH), value=1).bool()
    assert texts(seen) == [[row[shown].tolist() for row, shown in zip(written, mask, strict=True)]] * len(seen.layers)


def test_ones_own_cache_goes_on_from_text_to_text() -> None:
    given, caches = ids(2, 9), [KeyValueCache(), KeyValueCache()]

    class Stepping(Reader):
        def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
            x = self.embed(input_ids)
            for layer, one in zip(self.layers, caches, strict=True):
                x = layer(x, mask=mh.masks.Causal(), cache=one)
            return x  # type: ignore[no-any-return]

    with torch.no_grad(), mh.observe(model := Stepping().eval()) as seen:
        for first, stop in itertools.pairwise((0, 4, 5, 6, 9)):
            model(given[:, first:stop])
    assert texts(seen) == [given.tolist()] * 2


def test_a_decoder_knows_both_texts() -> None:
    model, batch = family("t5"), batch_of("t5", padding="right")
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch)
    real = batch["attention_mask"][1].bool()
    for layer in seen.layers:
        one = layer.sample(1)
        assert one.cross_attention == ("EncDec" in layer.name)
        if one.cross_attention:
            assert one.text.ids.tolist() == batch["input_ids"][1][real].tolist()  # type: ignore[union-attr]
            assert one.query_text.ids.tolist() == batch["decoder_input_ids"][1][: one.num_queries].tolist()  # type: ignore[union-attr]
    assert [text.length for text in seen.texts] == [int(mask.sum()) for mask in batch["attention_mask"]]


def test_where_embeddings_are_given_no_ids_are_known() -> None:
    model, batch = family("bert"), batch_of("bert")
    embedded = model.get_input_embeddings()(batch["input_ids"])
    with torch.no_grad(), mh.observe(model) as seen:
        model(inputs_embeds=embedded)
    assert texts(seen) == [[None, None]] * 2
    assert [text.length for text in seen.texts] == [0, 0]


def test_a_text_that_was_begun_unwatched_is_unknown() -> None:
    model, batch = family("llama"), batch_of("llama")
    with torch.no_grad():
        cache = model(input_ids=batch["input_ids"][:, :8], use_cache=True).past_key_values
        with mh.observe(model) as seen:
            model(input_ids=batch["input_ids"][:, 8:], past_key_values=cache)
    assert texts(seen)[0] == [None, None]


def test_what_the_caller_writes_over_later_is_kept_as_it_was() -> None:
    given = ids(1, 5)
    expected = given.clone()
    with torch.no_grad(), mh.observe(model := Reader()) as seen:
        model(given)
        given.zero_()
    assert texts(seen) == [expected.tolist()] * 2
