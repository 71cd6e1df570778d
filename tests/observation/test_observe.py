"""Watching changes nothing, hears what is asked for, and says in words why there is nothing to see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks, probes
from multihead.errors import ArgumentError, ModelError, ProbeError
from multihead.kernels.call import listeners
from multihead.observation.recorder import Recorder
from multihead.probes import DEFAULT, PROBES
from multihead.probes.catalogue import PICTURE_PROBES
from tests.families import batch_of, family


class Tower(nn.Module):
    """Two layers of self-attention and one of cross-attention."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mh.MultiHeadAttention(dim, heads, num_kv_heads=2) for _ in range(2))
        self.reader = mh.MultiHeadAttention(dim, heads, key_dim=8)

    def forward(self, x: Tensor, memory: Tensor, **lengths: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=masks.Causal(), **lengths)
        return self.reader(x, memory, **lengths)


@pytest.fixture
def tower() -> Tower:
    return Tower().eval()


def inputs(batch: int = 2, length: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, 16), torch.randn(batch, 9, 8)


@pytest.mark.parametrize("lengths", [{}, {"lengths": (6, 4)}])
def test_watching_our_own_layers_changes_no_bit(tower: Tower, lengths: dict[str, Any]) -> None:
    given = inputs()
    expected = tower(*given, **lengths)
    with mh.observe(tower):
        assert torch.equal(tower(*given, **lengths), expected)
    with mh.observe(tower, keep="statistics"):
        assert torch.equal(tower(*given, **lengths), expected)


def test_layers_are_named_by_their_place_in_the_model(tower: Tower) -> None:
    with mh.observe(tower) as seen:
        tower(*inputs())
    assert [layer.name for layer in seen.layers] == ["layers.0", "layers.1", "reader"]
    assert [(layer.num_heads, layer.num_samples) for layer in seen.layers] == [(4, 2)] * 3
    reader = seen["reader"].sample()
    assert (reader.num_queries, reader.num_keys, reader.query_start) == (6, 9, 0)


def test_a_layer_alone_is_named_by_its_class() -> None:
    layer = mh.MultiHeadAttention(16, 4)
    with mh.observe(layer) as seen:
        layer(torch.randn(1, 3, 16))
    assert [one.name for one in seen.layers] == ["MultiHeadAttention"]


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("own_mask", [masks.Full(), masks.Causal(), masks.Causal() & masks.Window(3)])
def test_a_padded_batch_gives_each_sample_as_if_it_ran_alone(
    own_mask: masks.Mask, options: dict[str, bool], *, packed: bool
) -> None:
    layer = mh.MultiHeadAttention(16, 4, num_kv_heads=2, **options)
    x, lengths = torch.randn(3, 7, 16), (7, 3, 5)
    with mh.observe(layer) as seen:
        if packed:
            tokens, packing = mh.pack(x, lengths)
            layer(tokens, mask=own_mask, packing=packing)
        else:
            layer(x, mask=own_mask, lengths=lengths)
    assert seen.layers[0].num_samples == 3
    for index, length in enumerate(lengths):
        with mh.observe(layer) as alone:
            layer(x[index : index + 1, :length], mask=own_mask)
        found, expected = seen.layers[0].sample(index), alone.layers[0].sample()
        assert (found.num_queries, found.num_keys) == (length, length + bool(options.get("add_bias_kv")))
        torch.testing.assert_close(found.weights(), expected.weights(), atol=1e-6, rtol=0)
        assert torch.equal(found.visible(), expected.visible())
        torch.testing.assert_close(found.statistics, expected.statistics, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("own_mask", [masks.Causal(), masks.Causal() | masks.Prefix(2)])
def test_a_text_without_tokens_has_no_queries_and_no_keys(own_mask: masks.Mask) -> None:
    layer = mh.MultiHeadAttention(16, 4)
    with mh.observe(layer) as seen:
        layer(torch.randn(2, 5, 16), mask=own_mask, lengths=(0, 5))
    assert [(one.num_queries, one.num_keys) for one in seen.layers[0].samples] == [(0, 0), (5, 5)]


@pytest.mark.parametrize("keep", ["cpu", "statistics", "summary"])
@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (0, 0, 8)])
def test_an_empty_batch_has_tables_without_numbers_or_with_zeros(
    keep: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    with mh.observe(layer, keep=keep) as seen:
        layer(torch.randn(shape), mask=masks.Causal())
    assert [row.get("entropy", 0.0) for row in seen.table().rows] == [0.0, 0.0]
    if keep == "summary" or shape[0]:
        seen.save(tmp_path / "run.safetensors")
        assert len(mh.Record.load(tmp_path / "run.safetensors").table().rows) == 2
        return
    for read in (seen.findings, seen.kinds, lambda: seen.save(tmp_path / "run.safetensors")):
        with pytest.raises(ProbeError) as caught:
            read()
        assert str(caught.value) == (
            "MultiHeadAttention has read no text: its batches were empty. Run the model on a text."
        )


def test_weights_of_an_empty_memory_have_no_keys() -> None:
    layer = mh.MultiHeadAttention(16, 4)
    with mh.observe(layer) as seen:
        layer(torch.randn(2, 5, 16), torch.randn(2, 0, 16))
    assert seen.layers[0].sample().weights().shape == (4, 5, 0)


def test_a_padded_memory_gives_each_sample_as_if_it_ran_alone() -> None:
    layer = mh.MultiHeadAttention(16, 4, key_dim=8)
    (x, memory), lengths, memory_lengths = inputs(), (6, 2), (4, 9)
    with mh.observe(layer) as seen:
        layer(x, memory, lengths=lengths, memory_lengths=memory_lengths)
    for index in range(2):
        with mh.observe(layer) as alone:
            layer(x[index : index + 1, : lengths[index]], memory[index : index + 1, : memory_lengths[index]])
        found, expected = seen.layers[0].sample(index), alone.layers[0].sample()
        assert (found.num_queries, found.num_keys) == (lengths[index], memory_lengths[index])
        torch.testing.assert_close(found.weights(), expected.weights(), atol=1e-6, rtol=0)


def test_several_batches_add_up_and_means_are_over_all_of_them() -> None:
    layer = mh.MultiHeadAttention(16, 4)
    texts = [torch.randn(2, 5, 16), torch.randn(1, 8, 16)]
    with mh.observe(layer) as seen:
        for x in texts:
            layer(x)
    record = seen.layers[0]
    assert [record.sample(index).num_queries for index in range(3)] == [5, 5, 8]
    rows = torch.cat([record.sample(index).statistics["entropy"] for index in range(3)], 1)
    torch.testing.assert_close(record.means()["entropy"], rows.double().mean(1))


def test_a_layer_that_runs_again_in_one_pass_is_numbered_and_in_the_next_pass_is_not() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = mh.MultiHeadAttention(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.shared(x))

    model = Twice()
    with mh.observe(model) as seen:
        model(torch.randn(1, 3, 16))
        model(torch.randn(1, 4, 16))
    assert [(layer.name, layer.num_samples) for layer in seen.layers] == [("shared", 2), ("shared#2", 2)]
    assert [(layer.number, layer.module, layer.call) for layer in seen.layers] == [(0, "shared", 0), (1, "shared", 1)]


def test_calls_are_gone_through_in_the_order_they_ran(tower: Tower) -> None:
    with mh.observe(tower) as seen:
        tower(*inputs(batch=1, length=4))
        tower(*inputs(batch=1, length=5))
    calls = [(call.name, call.num_queries, call.weights().shape[1], "entropy" in call.statistics) for call in seen]
    names = ["layers.0", "layers.1", "reader"]
    assert calls == [(name, length, length, True) for length in (4, 5) for name in names]


class TestKeeping:
    def test_statistics_alone_keep_no_q_and_k(self, tower: Tower) -> None:
        with mh.observe(tower, keep="statistics") as seen:
            tower(*inputs())
        sample = seen["layers.1"].sample()
        assert sample.k is None
        assert sample.q is None
        assert torch.equal(sample.visible(), torch.ones(6, 6, dtype=torch.bool).tril())
        with pytest.raises(ProbeError) as caught:
            sample.weights(0)
        assert str(caught.value) == (
            'layers.1 was observed with keep="statistics", so its weights cannot be computed. '
            'Observe with keep="cpu" or keep="device".'
        )

    def test_what_is_kept_does_not_change_with_the_models_memory(self) -> None:
        layer = mh.MultiHeadAttention(16, 4)
        x = torch.randn(1, 5, 16)
        with mh.observe(layer, keep="device") as seen:
            layer(x)
        before = seen.layers[0].weights().clone()
        with torch.no_grad():
            x.zero_()
            layer.k_proj.weight.zero_()
        assert torch.equal(seen.layers[0].weights(), before)

    def test_nothing_kept_holds_a_gradient(self) -> None:
        layer = mh.MultiHeadAttention(16, 4)
        with mh.observe(layer) as seen:
            layer(torch.randn(1, 5, 16, requires_grad=True)).sum().backward()
        sample = seen.layers[0].sample()
        kept = [sample.q.all_rows(), sample.weights(), *sample.statistics.values()]
        assert not any(tensor.requires_grad for tensor in kept if tensor is not None)
        assert layer.q_proj.weight.grad is not None


class TestChoosing:
    def test_layers_are_chosen_by_index_and_by_name(self, tower: Tower) -> None:
        with mh.observe(tower, layers=[1, "reader"]) as seen:
            tower(*inputs())
        assert [layer.name for layer in seen.layers] == ["layers.1", "reader"]

    def test_a_layer_that_is_none_is_named_at_the_end(self, tower: Tower) -> None:
        with pytest.raises(ModelError) as caught, mh.observe(tower, layers=["layers.0", "reader.q_proj", 7]):
            tower(*inputs())
        assert str(caught.value) == (
            "No layer that ran matches 'reader.q_proj' or 7. Choose among 0: layers.0, 1: layers.1, 2: reader."
        )

    @pytest.mark.parametrize("name", ["head", "layers.2", "block*"])
    def test_a_name_that_no_module_has_is_rejected_before_the_model_runs(self, tower: Tower, name: str) -> None:
        with pytest.raises(ModelError) as caught, mh.observe(tower, layers=["layers.0", name]):
            pytest.fail("the model could run")
        assert str(caught.value) == (
            f"layers holds {name!r}, which matches no module of the model. Give the name of an attention layer, "
            'a part of it or a glob such as "encoder.*", or None for all.'
        )

    def test_one_statistic_may_be_named_without_a_list(self, tower: Tower) -> None:
        with mh.observe(tower, probes="entropy") as seen:
            tower(*inputs())
        assert list(seen.layers[0].sample().statistics) == ["entropy"]

    def test_statistics_are_chosen_by_name(self, tower: Tower) -> None:
        with mh.observe(tower, probes=["entropy", "received"]) as seen:
            tower(*inputs())
        assert list(seen.layers[0].sample().statistics) == ["entropy", "received"]

    def test_those_that_cost_next_to_nothing_are_had_if_none_is_named(self, tower: Tower) -> None:
        with mh.observe(tower) as seen:
            tower(*inputs())
        assert set(seen.layers[0].sample().statistics) == set(DEFAULT) - {"special_mass", "separator_mass", "sink_mass"}

    def test_what_a_call_has_not_what_it_takes_is_left_out_there(self, tower: Tower) -> None:
        with mh.observe(tower, probes=tuple(PROBES), special_ids=[1]) as seen:
            tower(*inputs())
        of_tokens = {"special_mass", "separator_mass", "duplicate_mass", "induction_mass"}
        of_pictures = {each.name for each in PICTURE_PROBES}
        assert set(seen.layers[0].sample().statistics) == set(PROBES) - of_tokens - of_pictures - {"sink_mass"}

    def test_a_probe_that_is_made_is_measured_under_its_name(self, tower: Tower) -> None:
        with mh.observe(tower, probes=[probes.offset_mass(-2), "entropy"]) as seen:
            tower(*inputs())
        sample = seen.layers[0].sample()
        assert list(sample.statistics) == ["offset_minus_2_mass", "entropy"]
        before = sample.weights().diagonal(-2, 1, 2)
        torch.testing.assert_close(sample.statistics["offset_minus_2_mass"][:, 2:], before)

    def test_the_size_and_the_pooling_of_the_map_are_the_callers(self, tower: Tower) -> None:
        with mh.observe(tower, map_size=3, map_pool="max", probes=["pooled_map"]) as seen:
            tower(*inputs())
        sample = seen["reader"].sample()
        weights = sample.weights()
        largest = weights.unflatten(1, (3, -1)).unflatten(3, (3, -1)).amax((2, 4))
        torch.testing.assert_close(sample.statistics["pooled_map"], largest)


class TestSpecialTokens:
    def test_the_mass_on_special_tokens_counts_each_samples_own(self) -> None:
        model, batch = family("bert"), batch_of("bert", padding="left")
        batch["input_ids"][0, [0, 5]] = batch["input_ids"][1, [6, 11]] = 1
        with torch.no_grad(), mh.observe(model, special_ids=[1]) as seen:
            model(**batch)
        for layer in seen.layers:
            for index, places in enumerate(([0, 5], [1, 6])):  # five tokens of padding stand before the second text
                sample = layer.sample(index)
                marked = torch.zeros(sample.num_keys)
                marked[places] = 1
                torch.testing.assert_close(sample.statistics["special_mass"], sample.weights() @ marked)

    def test_a_packed_batch_of_ones_own_layers_is_told_apart(self) -> None:
        class Reader(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.attend = nn.Embedding(10, 16), mh.MultiHeadAttention(16, 4)

            def forward(self, input_ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
                return self.attend(self.embed(input_ids), lengths=lengths)

        model, ids = Reader(), torch.tensor([[3, 1, 4, 1], [1, 5, 0, 0]])
        with mh.observe(model, special_ids=[1]) as seen:
            model(ids, (4, 2))
        for index, marked in enumerate((torch.tensor([0.0, 1, 0, 1]), torch.tensor([1.0, 0]))):
            sample = seen.layers[0].sample(index)
            torch.testing.assert_close(sample.statistics["special_mass"], sample.weights() @ marked)

    def test_where_the_ids_are_not_known_it_is_left_out(self, tower: Tower) -> None:
        with mh.observe(tower, special_ids=[1]) as seen:
            tower(*inputs())
        assert "special_mass" not in seen.layers[0].sample().statistics

    def test_a_decoders_cross_attention_counts_the_encoders_special_tokens(self) -> None:
        model, batch = family("t5"), batch_of("t5")
        batch["input_ids"][:, 3] = 1
        with torch.no_grad(), mh.observe(model, special_ids=[1], layers="EncDec") as seen:
            model(**batch)
        sample = seen.layers[0].sample(1)
        torch.testing.assert_close(sample.statistics["special_mass"], sample.weights()[..., 3])

    def test_a_model_of_ones_own_with_a_decoder_needs_no_method_for_its_encoder(self) -> None:
        class Translator(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cross = mh.MultiHeadAttention(embed_dim=16, num_heads=2)

            def forward(self, encoded: Tensor, decoder_input_ids: Tensor) -> Tensor:
                return self.cross(torch.zeros(*decoder_input_ids.shape, 16), encoded)

        model = Translator()
        with mh.observe(model, special_ids=[1]) as seen:
            model(torch.randn(1, 5, 16), torch.tensor([[1, 2, 3]]))
        sample = seen.layers[0].sample()
        assert (sample.num_queries, sample.num_keys) == (3, 5)
        assert "special_mass" not in sample.statistics


def test_padding_between_tokens_counts_nowhere() -> None:
    model, batch = family("bert"), batch_of("bert")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, [0, 4, 5, 11]] = 0
    with torch.no_grad(), mh.observe(model, probes=["received", "largest_weight"]) as seen:
        model(**batch)
    sample, real = seen.layers[0].sample(1), batch["attention_mask"][1, 1:11].bool()
    assert (sample.num_queries, sample.num_keys) == (10, 10)
    weights = sample.weights()
    torch.testing.assert_close(weights.sum(-1), real.float().expand(4, -1))
    torch.testing.assert_close(sample.statistics["received"], weights.sum(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        sample.means["largest_weight"], weights[:, real].amax(-1).mean(-1).double(), atol=1e-6, rtol=0
    )
    assert torch.equal(sample.visible(), real[:, None] & real)


def test_under_autocast_statistics_stay_exact() -> None:
    layer = mh.MultiHeadAttention(16, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), mh.observe(layer, probes=["received"]) as seen:
        layer(torch.randn(1, 40, 16))
    sample = seen.layers[0].sample()
    torch.testing.assert_close(sample.statistics["received"], sample.weights().sum(1), atol=1e-5, rtol=1e-5)


def test_a_forward_pass_made_anew_in_the_backward_pass_is_not_heard_twice() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = mh.MultiHeadAttention(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Checkpointed()
    with mh.observe(model) as seen:
        model(torch.randn(1, 5, 16)).sum().backward()
    assert seen.layers[0].num_samples == 1


def test_a_compiled_model_is_watched_uncompiled() -> None:
    model = torch.compile(mh.MultiHeadAttention(16, 4), backend="eager")
    x = torch.randn(1, 5, 16)
    with mh.observe(model) as seen:
        model(x)
    assert seen.layers[0].weights().shape == (4, 5, 5)


def test_inference_mode_is_watched(tower: Tower) -> None:
    with torch.inference_mode(), mh.observe(tower) as seen:
        tower(*inputs())
    assert seen.layers[0].weights().shape == (4, 6, 6)


class TestRefusals:
    def refusal(self, kind: type[Exception], model: Any = None, **options: Any) -> str:
        with pytest.raises(kind) as caught, mh.observe(Tower() if model is None else model, **options):
            pytest.fail("it was not refused")
        return str(caught.value)

    def test_what_is_no_module(self) -> None:
        sentence = "The model is a string, not a module. Load it: multihead.models.load(name).model."
        assert self.refusal(ModelError, model="bert") == sentence

    def test_a_place_to_keep_that_does_not_exist(self) -> None:
        assert self.refusal(ArgumentError, keep="disk") == (
            'keep is \'disk\'. Give "cpu", "device", "statistics" or "summary".'
        )

    def test_a_map_without_blocks(self) -> None:
        assert self.refusal(ArgumentError, map_size=0) == "map_size is 0. Give an integer of at least 1."

    def test_a_statistic_that_does_not_exist(self) -> None:
        assert self.refusal(ProbeError, probes=["entropie"]) == (
            f"There is no statistic 'entropie'. Give some of {', '.join(PROBES)}, or a Probe of your own."
        )

    def test_a_set_of_tokens_of_which_nothing_says_which_they_are(self) -> None:
        assert self.refusal(ProbeError, probes=[probes.tokens_mass("punctuation")]) == (
            "punctuation_mass needs a set of tokens. Give their ids: probes.tokens_mass('punctuation', ids)."
        )
        part = ("tokens_mass", "digits")
        assert self.refusal(ProbeError, probes=[probes.Probe("other", lambda parts: 1 - parts[part], {part})]) == (
            "other needs a set of tokens. Give their ids: probes.tokens_mass('digits', ids)."
        )

    def test_a_pooling_that_does_not_exist(self) -> None:
        assert self.refusal(ArgumentError, map_pool="sum") == 'map_pool is \'sum\'. Give "mean" or "max".'

    def test_a_model_that_did_not_run(self) -> None:
        with pytest.raises(ModelError) as caught, mh.observe(Tower()):
            pass
        assert str(caught.value) == (
            "No attention call of Tower was captured: it did not run inside the context, or its layers compute their "
            "attention themselves. Run the model inside the context. Layers of multihead are recorded, and Hugging "
            "Face models that use AttentionInterface."
        )

    def test_a_transformer_of_torch_names_the_replacement_that_makes_it_recorded(self) -> None:
        layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 16)
        with pytest.raises(ModelError) as caught, mh.observe(model):
            model(x)
        assert str(caught.value) == (
            "No attention call of TransformerEncoder was captured: it did not run inside the context, or its layers "
            "compute their attention themselves, as nn.MultiheadAttention does. Call "
            "multihead.compat.torch_nn.replace(model, inplace=True), which makes each nn.MultiheadAttention a layer "
            "that is recorded, and run the model inside the context."
        )
        mh.compat.torch_nn.replace(model, inplace=True)
        with mh.observe(model) as seen:
            model(x)
        assert [each.name for each in seen.layers] == ["layers.0.self_attn", "layers.1.self_attn"]

    def test_an_error_inside_the_context_is_not_hidden_by_one_at_its_end(self) -> None:
        with pytest.raises(KeyError), mh.observe(Tower()):
            raise KeyError


@pytest.fixture(autouse=True)
def _nobody_listens_afterwards() -> Iterator[None]:
    yield
    assert not any(isinstance(each, Recorder) for each in listeners())
