"""Calls that go on from each other are joined, and no others."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks, probes
from multihead.compat import torch_nn
from multihead.errors import ModelError
from multihead.functional import attend, request_of
from multihead.kernels.call import CallOrigin
from multihead.observation.record import Record
from multihead.record import batch as batch_module
from tests.families import batch_of, family
from tests.kernel_names import needs_native


class Cache:
    """Knows how many tokens it has, as a cache of transformers does."""

    length = 0

    def get_seq_length(self) -> int:
        return self.length


class Attention(nn.Module):
    """Passes on the keys and the place it is given."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        query_start: int | Tensor = 0,
        mask: masks.Mask | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        meant = masks.Causal() if mask is None else mask
        request = request_of(q, k, k, meant, query_start=query_start)
        return attend(replace(request, origin=CallOrigin(self))).output


class CrossAttention(Attention):
    """Told by its name to read another sequence."""


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = Attention(), CrossAttention()

    def forward(
        self, q: Tensor, k: Tensor, memory: Tensor, query_start: int = 0, past_key_values: Cache | None = None
    ) -> None:
        self.own(q, k, query_start)
        self.other(q, memory, 0, masks.Full())


def watch(model: nn.Module, *calls: tuple[Tensor | int | masks.Mask, ...], caches: str = "") -> Record:
    """Call the model; `caches` names the cache of each call, or no call has one."""
    held: defaultdict[str, Cache] = defaultdict(Cache)
    with mh.observe(model) as seen:
        for call, name in zip_longest(calls, caches):
            if name is None:
                model(*call)
                continue
            start = next((each for each in call if isinstance(each, int)), 0)
            held[name].length = start
            model(*call, past_key_values=held[name])
    return seen


def sizes(record: Record, name: str = "Attention") -> list[tuple[int, int, int]]:
    layer = record[name]
    samples = [layer.sample(index) for index in range(layer.num_samples)]
    return [(each.query_start, each.num_queries, each.num_keys) for each in samples]


def text(length: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, length, 4), torch.randn(batch, 2, length, 4)


def test_a_token_with_the_same_cache_goes_on() -> None:
    q, k = text(6)
    record = watch(Attention(), (q[:, :, :5], k[:, :, :5]), (q[:, :, 5:], k, 5), caches="aa")
    assert sizes(record) == [(0, 6, 6)]


def test_several_tokens_at_once_go_on_too() -> None:
    q, k = text(9)
    record = watch(
        Attention(), (q[:, :, :4], k[:, :, :4]), (q[:, :, 4:7], k[:, :, :7], 4), (q[:, :, 7:], k, 7), caches="aaa"
    )
    assert sizes(record) == [(0, 9, 9)]


def test_a_batch_goes_on_sample_by_sample() -> None:
    q, k = text(4, batch=3)
    record = watch(Attention(), (q[:, :, :3], k[:, :, :3]), (q[:, :, 3:], k, 3), caches="aa")
    assert sizes(record) == [(0, 4, 4)] * 3


def test_a_cache_of_fixed_length_goes_on() -> None:
    q, k = text(8)
    later = k.clone()
    later[:, :, 3:] = 0
    record = watch(Attention(), (q[:, :, :3], later), (q[:, :, 3:4], k, 3), caches="aa")
    assert sizes(record) == [(0, 4, 4)]
    assert torch.equal(record["Attention"].sample().weights()[:, 3], direct(q, k)[:, 3, :4])


def direct(q: Tensor, k: Tensor) -> Tensor:
    return mh.attention_weights(q, k, mask=masks.Causal())[0]


def test_the_same_text_read_again_is_another_sample() -> None:
    q, k = text(5)
    assert sizes(watch(Attention(), (q, k), (q, k), caches="aa")) == [(0, 5, 5), (0, 5, 5)]


def test_a_text_of_one_token_more_read_without_a_cache_is_another_sample() -> None:
    q, k = text(6)
    assert sizes(watch(Attention(), (q[:, :, :5], k[:, :, :5]), (q, k))) == [(0, 5, 5), (0, 6, 6)]


def test_a_token_after_keys_that_were_read_before_is_another_sample_at_its_position() -> None:
    q, k = text(6)
    record = watch(Attention(), (q[:, :, :5], k[:, :, :5]), (q[:, :, 5:], k, 5), caches="ab")
    assert sizes(record) == [(0, 5, 5), (5, 1, 6)]


def test_two_caches_that_are_continued_in_turn_are_two_samples() -> None:
    (q, k), (other_q, other_k) = text(6), text(6)
    begun = (q[:, :, :5], k[:, :, :5]), (other_q[:, :, :4], other_k[:, :, :4])
    record = watch(Attention(), *begun, (q[:, :, 5:], k, 5), (other_q[:, :, 4:], other_k, 4), caches="abab")
    assert sizes(record) == [(0, 6, 6), (0, 6, 6)]
    torch.testing.assert_close(record["Attention"].sample(1).weights(), direct(other_q, other_k))


def test_a_cache_that_was_cropped_begins_a_sample_at_its_position() -> None:
    q, k = text(6)
    record = watch(Attention(), (q[:, :, :5], k[:, :, :5]), (q[:, :, 3:], k, 3), caches="aa")
    assert sizes(record) == [(0, 5, 5), (3, 3, 6)]
    torch.testing.assert_close(record["Attention"].sample(1).weights(), direct(q, k)[:, 3:])


def test_a_token_of_another_batch_is_another_sample() -> None:
    (q, k), (more_q, more_k) = text(5), text(6, batch=2)
    record = watch(Attention(), (q, k), (more_q[:, :, 5:], more_k, 5), caches="aa")
    assert sizes(record) == [(0, 5, 5), (5, 1, 6), (5, 1, 6)]


def test_places_of_each_sample_are_each_samples_own() -> None:
    q, k = text(3, batch=2)
    record = watch(Attention(), (q, torch.cat([k, k], 2), torch.tensor([0, 2])))
    assert [start for start, _, _ in sizes(record)] == [0, 2]


def test_cross_attention_goes_on_where_its_decoder_does() -> None:
    (q, k), (_, memory) = text(6), text(7)
    record = watch(Decoder(), (q[:, :, :4], k[:, :, :4], memory), (q[:, :, 4:], k, memory, 4), caches="aa")
    assert sizes(record, "own") == [(0, 6, 6)]
    assert sizes(record, "other") == [(0, 6, 7)]


def test_cross_attention_of_a_text_read_again_is_another_sample() -> None:
    (q, k), (_, memory) = text(4), text(7)
    record = watch(Decoder(), (q, k, memory), (q, k, memory), caches="aa")
    assert sizes(record, "other") == [(0, 4, 7), (0, 4, 7)]


def test_a_window_that_left_the_first_key_behind_puts_no_mass_on_it() -> None:
    q, k = text(6)
    window = masks.Causal() & masks.Window(2)
    record = watch(Attention(), (q[:, :, :5], k[:, :, :5], 0, window), (q[:, :, 5:], k, 5, window), caches="aa")
    assert torch.equal(record["Attention"].sample().statistics["first_mass"][:, 2:], torch.zeros(2, 4))


def test_an_attention_that_belongs_to_no_layer_of_the_model_is_not_heard() -> None:
    q, k = text(3)
    model, stranger = Attention(), Attention()
    with mh.observe(model) as seen:
        model(q, k)
        stranger(q, k)
        mh.attention(q, k, k)
    assert [(layer.name, layer.num_samples) for layer in seen.layers] == [("Attention", 1)]


def test_what_is_kept_stays_as_it_was_when_a_cache_is_written_over() -> None:
    q, k = text(5)
    expected = direct(q, k)
    record = watch(Attention(), (q, k))
    q.zero_()
    k.zero_()
    torch.testing.assert_close(record["Attention"].sample().weights(), expected)


class TwoReaders(nn.Module):
    """A layer that reads its own text and one that reads another, with names that suggest the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.crossbar, self.reading = mh.MultiHeadAttention(8, 2), mh.MultiHeadAttention(8, 2)

    def forward(self, input_ids: Tensor, memory: Tensor) -> None:
        x = nn.functional.one_hot(input_ids, 8).float()
        self.crossbar(x, x)
        self.reading(x, memory)


def test_a_layer_knows_whether_it_reads_another_text_whatever_its_name_is() -> None:
    model, ids = TwoReaders(), torch.tensor([[1, 2, 3, 4, 5]])
    with mh.observe(model) as seen:
        model(ids, torch.randn(1, 5, 8))
    own, other = (layer.sample() for layer in seen.layers)
    assert (own.cross_attention, other.cross_attention) == (False, True)
    assert own.text.ids is not None
    assert own.text.ids.tolist() == ids[0].tolist()
    assert other.text.ids is None
    assert other.query_text.ids is not None
    assert other.query_text.ids.tolist() == ids[0].tolist()


def test_the_newest_tokens_of_a_text_with_all_its_keys_do_not_read_another_text() -> None:
    layer, x = mh.MultiHeadAttention(8, 2), torch.randn(1, 6, 8)
    with mh.observe(layer) as seen:
        layer(x[:, :5], mask=masks.Causal())
        layer(x[:, 5:], memory=x, mask=masks.Causal(), query_start=5)
    assert sizes(seen, "MultiHeadAttention") == [(0, 5, 5), (5, 1, 6)]
    assert not seen.layers[0].sample().cross_attention


def test_the_drop_in_for_pytorch_s_layer_reads_its_own_text_where_query_and_key_are_one_tensor() -> None:
    layer, x = torch_nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
    model = nn.ModuleDict({"crossbar": layer})
    with mh.observe(model) as seen:
        layer(x, x, x)
    assert not seen.layers[0].sample().cross_attention


@needs_native
def test_layers_that_share_a_mask_cut_a_batch_into_samples_once() -> None:
    model, batch = family("bert"), batch_of("bert", padding="right")
    with (
        torch.no_grad(),
        patch.object(batch_module, "spans_of_call", side_effect=batch_module.spans_of_call) as cuts,
        mh.observe(model) as seen,
    ):
        model(**batch)
        model(**batch)
    assert (len(seen.layers), seen.layers[0].num_samples) == (2, 4)
    assert cuts.call_count == 2  # once in each forward pass


@needs_native
def test_layers_that_share_a_packed_row_find_its_samples_once_when_they_are_read() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mh.MultiHeadAttention(8, 2), mh.MultiHeadAttention(8, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.second(self.first(x, lengths=lengths), lengths=lengths)  # type: ignore[no-any-return]

    lengths = torch.tensor([5, 3])
    with patch.object(batch_module, "spans_of_call", side_effect=batch_module.spans_of_call) as cuts:
        with mh.observe(model := Two()) as seen:
            model(torch.randn(2, 5, 8), lengths)
        lengths.fill_(1)
        assert cuts.call_count == 0
        assert [sizes(seen, name) for name in ("first", "second")] == [[(0, 5, 5), (0, 3, 3)]] * 2
    assert cuts.call_count == 1


@needs_native
@pytest.mark.parametrize("mask", [masks.Full(), masks.Prefix(40)])
@pytest.mark.parametrize("keep", ["cpu", "statistics"])
def test_a_record_holds_no_memory_of_padding(keep: Any, mask: masks.Mask) -> None:
    layer, lengths = mh.MultiHeadAttention(16, 4, num_kv_heads=2), (3, 40, 17)
    with torch.no_grad(), mh.observe(layer, keep=keep) as record:
        layer(torch.randn(3, 40, 16), mask=mask, lengths=lengths)
    tensors: list[Tensor] = []
    for sample, length in zip(record.layers[0].samples, lengths, strict=True):
        assert sample.logsumexp.all_rows().shape == (1, 4, length)
        tensors += [sample.logsumexp.all_rows(), *sample.statistics.values()]
        if sample.q is not None and sample.k is not None:
            tensors += [sample.q.all_rows(), sample.k.all_rows()]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    assert sum(held.values()) == sum(each.nbytes for each in tensors)


DOCUMENTS = ((3, 4), (5, 2))
ROWS = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(2, 4, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
EVERY = (*probes.PROBES, probes.first_keys_mass(3))


def _texts(first: tuple[int, ...] = (0, 3, 7), second: tuple[int, ...] = (0, 5, 7)) -> list[tuple[int, slice]]:
    """Row and tokens of each text."""
    return [(row, slice(*each)) for row, ends in enumerate((first, second)) for each in pairwise(ends)]


def _in_steps(layer: mh.MultiHeadAttention, mask: masks.Mask, steps: tuple[int, ...]) -> None:
    cache = mh.KeyValueCache()
    for part in ROWS.split(steps, 1):
        layer(part, mask=mask, cache=cache)


# Each with the call of the rows, and the arguments of the call of a text alone.
CALLS_OF_ROWS: dict[str, tuple[Any, Any, Any]] = {
    "causal": (lambda layer, mask: layer(ROWS, mask=mask), _texts(), None),
    "window": (
        lambda layer, mask: layer(ROWS, mask=mask & masks.Window(2)),
        _texts(),
        lambda *_: {"mask": masks.Window(2)},
    ),
    "both ways": (
        lambda layer, _: layer(ROWS, mask=masks.Documents(DOCUMENTS)),
        _texts(),
        lambda *_: {"mask": masks.Full()},
    ),
    "lengths": (lambda layer, mask: layer(ROWS, mask=mask, lengths=(6, 7)), _texts((0, 3, 6)), None),
    "left padding": (
        lambda layer, mask: layer(
            torch.stack([ROWS[0].roll(3, 0), ROWS[1].roll(2, 0)]), mask=mask, lengths=(6, 7), padding_side="left"
        ),
        _texts((0, 3, 6)),
        None,
    ),
    "bias": (
        lambda layer, mask: layer(ROWS, mask=mask, bias=BIAS),
        _texts(),
        lambda row, tokens: {"bias": BIAS[row : row + 1, :, tokens, tokens]},
    ),
    "a cache": (lambda layer, mask: _in_steps(layer, mask, (4, 2, 3)), _texts(), None),
    "a cache, token by token": (lambda layer, mask: _in_steps(layer, mask, (1,) * 9), _texts(), None),
    "a cache that drops keys": (
        lambda layer, mask: _in_steps(layer, mask & masks.Window(3), (4, 2, 3)),
        _texts(),
        lambda *_: {"mask": masks.Window(3)},
    ),
}


# What is kept on the CPU has the statistics, too: without queries and keys one case of each way to call is tried.
@pytest.mark.parametrize(
    ("case", "keep"),
    [
        *((case, keep) for case in CALLS_OF_ROWS for keep in ("cpu", "summary")),
        *((case, "statistics") for case in ("causal", "lengths", "a cache that drops keys")),
    ],
)
def test_each_document_of_a_row_is_recorded_as_it_is_alone(case: str, keep: Any) -> None:
    call, texts, options = CALLS_OF_ROWS[case]
    layer = mh.MultiHeadAttention(16, 4, num_kv_heads=2, sinks=True).double().eval()
    wanted = [
        each
        for each in EVERY
        if keep != "summary" or probes.PROBES.get(str(each), probes.PROBES["entropy"]).axes == "queries"
    ]
    with torch.no_grad(), mh.observe(layer, probes=wanted, keep=keep) as rows:
        call(layer, masks.Causal() & masks.Documents(torch.tensor(DOCUMENTS)))
    with torch.no_grad(), mh.observe(layer, probes=wanted, keep=keep) as alone:
        for row, tokens in texts:
            more = {} if options is None else options(row, tokens)
            layer(ROWS[row : row + 1, tokens], **{"mask": masks.Causal(), **more})
    assert rows.layers[0].num_samples == alone.layers[0].num_samples == 4
    assert rows.layers[0].kinds == alone.layers[0].kinds
    for found, expected in zip(rows.table().rows, alone.table().rows, strict=True):
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)
    for one, other in zip(rows.layers[0].samples, alone.layers[0].samples, strict=True):
        assert one.per_query.keys() == other.per_query.keys()
        for name, value in other.per_query.items():
            torch.testing.assert_close(one.per_query[name], value, atol=1e-9, rtol=0, msg=name)
        if keep == "cpu":
            torch.testing.assert_close(one.weights(), other.weights(), atol=1e-9, rtol=0)


def test_a_cache_that_separates_more_texts_than_before_is_an_error() -> None:
    layer, cache, x = mh.MultiHeadAttention(16, 4), mh.KeyValueCache(), torch.randn(1, 6, 16)
    layer(x[:, :3], mask=masks.Causal() & masks.Documents((3,)), cache=cache)
    with torch.no_grad(), mh.observe(layer):
        cache = mh.KeyValueCache()
        layer(x[:, :3], mask=masks.Causal() & masks.Documents((3,)), cache=cache)
        with pytest.raises(ModelError) as refusal:
            layer(x[:, 3:], mask=masks.Causal() & masks.Documents((3, 3)), cache=cache)
    assert str(refusal.value) == (
        "The mask of this call of MultiHeadAttention separates 2 texts, and that of the call before it 1. Give "
        "masks.Documents the lengths of all texts that the cache will hold, in each of its calls."
    )


def test_documents_of_cross_attention_are_no_texts() -> None:
    layer, mask = mh.MultiHeadAttention(16, 4), masks.Documents((2, 3))
    with torch.no_grad(), mh.observe(layer) as seen:
        layer(torch.randn(1, 5, 16), torch.randn(1, 5, 16), mask=mask)
    assert sizes(seen, "MultiHeadAttention") == [(0, 5, 5)]
    assert not seen.layers[0].samples[0].weights()[:, 0, 2:].any()
