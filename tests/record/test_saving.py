"""What is saved is had again, bit by bit, in one file that stands whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, DtypeError, InputError, MaskError, MissingPackageError, ProbeError
from multihead.masks.base import And, Or
from multihead.masks.leading_keys import LeadingKeys
from multihead.observation.record import Record
from multihead.record import saving
from multihead.record.texts import Text
from multihead.scores.bias import RelativeBias
from tests.families import batch_of, family
from tests.models.test_families import decoded
from tests.observation.recorded import Tokenizer, asked, ids, read, same

SOME = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.7
MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Window(3, after=1),
    "lengths": masks.Lengths((6,)),
    "lengths of queries": masks.Lengths(torch.arange(9)[None]),
    "documents": masks.Causal() & masks.Documents((4, 5)),
    "prefix": masks.Causal() | masks.Prefix(3),
    "keep": masks.Causal() & masks.Keep(SOME, "queries keys"),
    "drop": masks.Drop(SOME.expand(4, -1, -1), "heads queries keys"),
    "behind": LeadingKeys(2, masks.Window(3)),
    "keys that are padding": masks.Keep(SOME[:1], "batch keys"),
}
TERMS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.randn(4)},
    "bias": {"bias": torch.randn(1, 4, 9, 9)},
    "bias that hides": {"bias": torch.randn(1, 1, 9, 9).masked_fill(~SOME, -torch.inf)},
    "relative": {"bias": RelativeBias(torch.randn(1, 4, 17))},
    "scale": {"scale": 0.3},
    "nothing to see": {"mask": masks.Lengths((0,))},
    "cross": {"keys": 5, "query_start": 0},
    "decoding": {"queries": 2, "query_start": "end", "mask": masks.Causal()},
}


def through(record: Record, tmp_path: Path, **options: Any) -> Record:
    record.save(tmp_path / "run.safetensors", **options)
    return Record.load(tmp_path / "run.safetensors")


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_comes_back(name: str, tmp_path: Path) -> None:
    expected = asked(mask=MASKS[name])
    found = through(expected, tmp_path)
    same(found, expected)
    assert repr(found.layers[0].sample().segments[0].request.mask) == repr(
        expected.layers[0].sample().segments[0].request.mask
    )


@pytest.mark.parametrize("name", TERMS)
def test_every_term_of_the_scores_comes_back(name: str, tmp_path: Path) -> None:
    expected = asked(**TERMS[name])
    same(through(expected, tmp_path), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_q_and_k_keep_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = asked(dtype=dtype, mask=masks.Causal())
    found = through(expected, tmp_path)
    same(found, expected)
    assert found.layers[0].sample().q.all_rows().dtype == found.layers[0].sample().dtype == dtype  # type: ignore[union-attr]


def test_texts_title_id_and_the_order_of_the_calls_come_back(tmp_path: Path) -> None:
    expected = read(ids(2, 6), ids(1, 4, seed=1))
    expected.name_tokens(Tokenizer())
    found = through(expected, tmp_path)
    assert (found.title, found.id) == ("Reader", expected.id)
    assert len(found.texts) == 3
    for one, other in zip(found.texts, expected.texts, strict=True):
        assert torch.equal(one.ids, other.ids)  # type: ignore[arg-type]
        assert (one.tokens, one.special) == (other.tokens, other.special)
    calls = [(call.name, call.num_queries, call.weights().sum()) for call in expected]
    assert [(call.name, call.num_queries, call.weights().sum()) for call in found] == calls
    assert found.table().rows == expected.table().rows


def test_what_is_known_of_the_text_between_tokens_comes_back(tmp_path: Path) -> None:
    expected = read(ids(1, 3))
    expected.set_text(Text(None, ["a", "gu", "ll"], None, [None, " ", ""]))
    assert through(expected, tmp_path).texts[0].gaps == [None, " ", ""]
    expected.set_text(Text(None, ["a", "gu", "ll"], None))
    assert through(expected, tmp_path).texts[0].gaps is None


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_decoding_is_saved_as_one_text_and_few_tensors(name: str, tmp_path: Path) -> None:
    model = family(name)
    with mh.observe(model, probes=("entropy", "received", "pooled_map", "largest_key")) as expected:
        decoded(model, batch_of(name))
    found = through(expected, tmp_path)
    same(found, expected)
    assert [call.num_queries for call in found] == [call.num_queries for call in expected]
    with safe_open(tmp_path / "run.safetensors", framework="pt") as opened:
        assert len(opened.keys()) <= 10 * len(found.layers) * found.layers[0].num_samples


def test_two_texts_of_an_encoder_and_a_decoder_are_both_kept(tmp_path: Path) -> None:
    model, batch = family("t5"), batch_of("t5")
    with torch.no_grad(), mh.observe(model) as expected:
        model(**batch)
    found = through(expected, tmp_path)
    same(found, expected)
    crossing = next(layer.sample() for layer in found.layers if layer.sample().cross_attention)
    assert torch.equal(crossing.text.ids, batch["input_ids"][0])  # type: ignore[arg-type]
    assert torch.equal(crossing.query_text.ids, batch["decoder_input_ids"][0])  # type: ignore[arg-type]


class TestStatisticsAlone:
    def test_a_file_of_them_opens_and_has_no_weights(self, tmp_path: Path) -> None:
        expected = read(ids(1, 6))
        found = through(expected, tmp_path, keep="statistics")
        same(found, expected, weights=False)
        assert not found.keeps_weights
        with pytest.raises(ProbeError) as caught:
            found.layers[0].weights(0)
        assert str(caught.value) == (
            'layers.0 was observed with keep="statistics", so its weights cannot be computed. '
            'Observe with keep="cpu" or keep="device".'
        )

    def test_what_was_watched_without_q_and_k_is_saved_without(self, tmp_path: Path) -> None:
        expected = asked(watch={"keep": "statistics"}, bias=TERMS["bias that hides"]["bias"])
        same(through(expected, tmp_path), expected, weights=False)

    def test_a_bias_that_hides_nothing_is_left_out(self, tmp_path: Path) -> None:
        asked(bias=torch.randn(1, 4, 9, 9)).save(tmp_path / "run.safetensors", keep="statistics")
        with safe_open(tmp_path / "run.safetensors", framework="pt") as opened:
            assert not [name for name in opened.keys() if "bias" in name]  # noqa: SIM118

    def test_another_choice_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError) as caught:
            asked().save(tmp_path / "run.safetensors", keep="nothing")  # type: ignore[arg-type]
        assert str(caught.value) == 'keep is \'nothing\'. Give "all" or "statistics".'


def test_a_mask_that_layers_share_is_written_once(tmp_path: Path) -> None:
    shared = masks.Keep(SOME[None, None])
    with mh.observe(model := torch.nn.ModuleList(mh.MultiHeadAttention(8, 2) for _ in range(3))) as seen:
        for layer in model:
            layer(torch.randn(1, 9, 8), mask=shared)
    same(through(seen, tmp_path), seen)
    with safe_open(tmp_path / "run.safetensors", framework="pt") as opened:
        assert len([name for name in opened.keys() if "mask" in name]) == 1  # noqa: SIM118


def test_a_record_may_be_saved_over_the_file_it_was_loaded_from(tmp_path: Path) -> None:
    expected = read(ids(1, 6))
    once = through(expected, tmp_path)
    same(through(once, tmp_path), expected)
    same(once, expected)  # what was mapped is still there


def test_a_failed_save_leaves_the_old_file_and_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run.safetensors"
    asked().save(target)
    before = target.read_bytes()
    monkeypatch.setattr(saving, "_little_endian_bytes", lambda tensor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read(ids(1, 6)).save(target)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]
    assert stat.S_IMODE(target.stat().st_mode) & 0o400


@pytest.mark.parametrize("verb", ["save", "load"])
def test_without_safetensors_a_sentence_says_so(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = asked()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingPackageError) as caught:
        getattr(record, verb)(tmp_path / "run.safetensors")
    assert str(caught.value) == (
        f"{'Saving' if verb == 'save' else 'Opening'} a record needs safetensors, which is not installed. "
        'Run pip install "multihead[view]".'
    )


class Newer(masks.Window):
    """Defined a second time below, so that its name in a file would mean another mask."""


Replaced = Newer


class Newer(masks.Window):  # type: ignore[no-redef]
    """The class that a file finds by this name."""


def with_mask(mask: masks.Mask) -> Record:
    record = asked(mask=masks.Causal())
    one = record.layers[0].sample()
    one.segments[0] = replace(one.segments[0], request=replace(one.segments[0].request, mask=mask))
    return record


class TestMasksThatNoFileHolds:
    def refusal(self, record: Record, tmp_path: Path, **options: Any) -> str:
        with pytest.raises(MaskError) as caught:
            record.save(tmp_path / "run.safetensors", **options)
        assert list(tmp_path.iterdir()) == []
        return str(caught.value)

    @pytest.mark.parametrize("keep", ["all", "statistics"])
    @pytest.mark.parametrize(
        "within", [lambda mask: mask, lambda mask: mask & masks.Causal(), lambda m: LeadingKeys(1, m)]
    )
    def test_one_whose_name_belongs_to_another_class(
        self, keep: str, within: Callable[[masks.Mask], masks.Mask], tmp_path: Path
    ) -> None:
        mask = within(Replaced(3))
        assert self.refusal(with_mask(mask), tmp_path, keep=keep) == (
            "A record whose mask is Window(3) cannot be saved: another class is named Newer. "
            "Give one of the classes another name."
        )

    @pytest.mark.parametrize("depth", [1, 40])
    def test_more_than_would_be_read_again(self, depth: int, tmp_path: Path) -> None:
        mask: masks.Mask = Or(tuple(masks.Prefix(index) for index in range(2 if depth > 1 else 1000)))
        for _ in range(depth - 1):
            mask = And((mask, masks.Causal())) if isinstance(mask, Or) else Or((mask, masks.Causal()))
        assert self.refusal(with_mask(mask), tmp_path) == (
            "A record whose mask combines more than 1,000 masks, or nests more than 32, cannot be saved. "
            "Pass the visible cells as one masks.Keep(t)."
        )

    def test_numbers_that_would_not_be_read_again(self, tmp_path: Path) -> None:
        assert self.refusal(with_mask(masks.Window(1 << 64)), tmp_path) == (
            f"A record whose mask is Window({1 << 64}) cannot be saved: {1 << 64} is not a number of tokens. "
            "Pass the visible cells as one masks.Keep(t)."
        )

    def test_a_window_without_end_and_many_masks_come_back(self, tmp_path: Path) -> None:
        for mask in (
            masks.Window(sys.maxsize),
            Or(tuple(masks.Prefix(index % 9) for index in range(999))),
            masks.Lengths((9,)) & masks.Documents(((4, 5),)) & masks.Prefix((3,)),
        ):
            found = through(with_mask(mask), tmp_path).layers[0].sample().segments[0].request.mask
            assert found == mask


def test_a_dtype_that_no_file_holds_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(saving.SAFETENSORS_NAMES, torch.bool)
    with pytest.raises(DtypeError) as caught:
        asked(mask=MASKS["keep"]).save(tmp_path / "run.safetensors")
    assert str(caught.value) == (
        "0.0.0.0.mask.1 is a torch.bool tensor, which a record cannot hold. Convert it to float32 or int64."
    )
    assert list(tmp_path.iterdir()) == []


def test_half_of_a_surrogate_pair_in_a_token_comes_back(tmp_path: Path) -> None:
    record = asked()
    record.set_text(Text(tokens=["\ud83d", "头", "🎉", '"\\', *"abcde"]))
    assert through(record, tmp_path).texts[0].tokens == ["\ud83d", "头", "🎉", '"\\', *"abcde"]


def test_a_record_is_written_as_safetensors_writes_it(tmp_path: Path) -> None:
    record = asked(dtype=torch.bfloat16, mask=masks.Keep(SOME, "queries keys"), bias=torch.randn(1, 1, 9, 9))
    record.save(file := tmp_path / "run.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(tensors, other := tmp_path / "other.safetensors", metadata)
    head, expected = ((each.read_bytes(), int.from_bytes(each.read_bytes()[:8], "little")) for each in (file, other))
    assert json.loads(head[0][8 : 8 + head[1]]) == json.loads(expected[0][8 : 8 + expected[1]])
    assert head[0][8 + head[1] :] == expected[0][8 + expected[1] :]


def test_without_room_the_old_record_stays(tmp_path: Path) -> None:
    asked().save(file := tmp_path / "run.safetensors")
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(InputError) as caught:
            asked().save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"{str(file)!r} cannot be written: File too large. Free some space, or write elsewhere."
    )
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (before, [file])


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    (expected := asked()).save(pipe)
    reader.join()
    (file := tmp_path / "run.safetensors").write_bytes(found[0])
    same(Record.load(file), expected)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    target = str(tmp_path / "none" / "run.safetensors")
    with pytest.raises(InputError) as caught:
        asked().save(target)
    assert str(caught.value) == (
        f"{target!r} cannot be written: there is no folder {str(tmp_path / 'none')!r}. Create it first."
    )


def test_more_samples_than_a_header_can_list_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MAX_HEADER_BYTES", 100)
    with pytest.raises(InputError) as caught:
        read(ids(3, 6)).save(tmp_path / "run.safetensors")
    assert str(caught.value) == (
        "The record holds 3 samples in each of 2 layers, more than one file can list. Save fewer samples per file."
    )


@pytest.mark.parametrize("keep", ["cpu", "summary"])
def test_the_numbers_of_the_layers_are_saved(tmp_path: Path, keep: str) -> None:
    record = read(ids(1, 6), layers=[1], keep=keep)
    record.save(tmp_path / "run.safetensors")
    loaded = Record.load(tmp_path / "run.safetensors")
    assert [(each.number, each.name) for each in loaded.layers] == [(1, record.layers[0].name)]
    assert loaded.table().rows == record.table().rows
