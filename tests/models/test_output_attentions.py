"""`output_attentions=True` returns the weights of eager attention, computed when they are read."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import multihead as mh
from multihead.errors import ArgumentError
from multihead.models import output_attentions
from multihead.models.output_attentions import LazyWeights
from tests.families import CALLS, FAMILIES, LENGTH, VOCABULARY, batch_of, family, of_one_layer
from tests.watched import eager, eager_weights

mh.use()


def used(name: str) -> Any:
    model = family(name)
    model.set_attn_implementation("multihead")
    return model


def weights(name: str = "llama") -> LazyWeights:
    """Return the weights of the first layer, which nobody has read."""
    with torch.no_grad():
        found = used(name)(**batch_of(name), output_attentions=True).attentions[0]
    assert isinstance(found, LazyWeights)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_they_equal_those_of_eager_attention(name: str) -> None:
    batch = batch_of(name)
    expected = eager_weights(name, eager(family(name), batch))
    with torch.no_grad():
        found = eager_weights(name, used(name)(**batch, output_attentions=True))
    assert len(found) == CALLS.get(name, 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_they_equal_those_of_eager_attention_at_tokens_of_a_padded_batch(name: str) -> None:
    batch = batch_of(name, padding="right")
    expected = eager_weights(name, eager(family(name), batch))
    with torch.no_grad():
        found = eager_weights(name, used(name)(**batch, output_attentions=True))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, :, :6], theirs[:, :, :6], atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation_returns_those_of_each_step(name: str, options: dict[str, Any]) -> None:
    """A static cache with a sliding window overwrites keys after they were used."""

    def generate(model: Any) -> Any:
        return model.generate(
            **batch_of(name),
            max_new_tokens=9,
            min_new_tokens=9,
            do_sample=False,
            output_attentions=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **options,
        )

    model = family(name)
    model.set_attn_implementation("eager")
    expected, found = generate(model), generate(used(name))
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_they_are_computed_when_they_are_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    plain = output_attentions.tile
    monkeypatch.setattr(output_attentions, "tile", lambda *args: computed.append(1) or plain(*args))
    found = weights()
    assert (found.shape, found.dtype, found.device.type, found.ndim) == ((2, 4, 12, 12), torch.float32, "cpu", 4)
    assert (len(found), found.size(1), found.dim(), found.numel()) == (2, 4, 4, 2 * 4 * 144)
    assert repr(found) == "LazyWeights((2, 4, 12, 12), computed when read)"
    assert not computed
    first = found.sum()
    assert found[0, 1, 2, :3].shape == (3,)
    assert float(first) == pytest.approx(2 * 4 * 12)
    assert computed == [1]
    assert repr(found) == "LazyWeights((2, 4, 12, 12), computed)"


@pytest.mark.parametrize(
    "read",
    [
        lambda each: each.cpu().numpy(),
        np.asarray,
        lambda each: torch.stack([each, each])[0],
        lambda each: torch.cat((each, each))[:2],
        copy.deepcopy,
        lambda each: pickle.loads(pickle.dumps(each)),
        lambda each: each.detach().clone(),
        lambda each: torch.stack(list(each)),
        lambda each: torch.tensor(each.tolist()),
        lambda each: torch.nn.functional.dropout(each, 0.5, training=False),
        lambda each: each.to(torch.float64).float(),
    ],
)
def test_any_operation_reads_them(read: Callable[[Tensor], Any]) -> None:
    expected = eager(family("llama"), batch_of("llama")).attentions[0]
    found = torch.as_tensor(read(weights()))
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_they_can_be_saved() -> None:
    file, found = io.BytesIO(), weights()
    torch.save(found, file)
    file.seek(0)
    assert torch.equal(torch.load(file), found.read_all())


def test_gradients_through_them_are_those_of_eager_attention() -> None:
    found = {}
    for choice in ("eager", "multihead"):
        model = family("gpt_oss")
        model.set_attn_implementation(choice)
        output = model(**batch_of("gpt_oss"), output_attentions=True)
        (output.logits.square().mean() + output.attentions[1][:, :, -1].square().sum()).backward()
        found[choice] = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert "model.layers.1.self_attn.sinks" in found["multihead"]
    torch.testing.assert_close(found["multihead"], found["eager"], atol=1e-4, rtol=1e-4)


def test_a_layer_that_is_called_by_itself_returns_them() -> None:
    x = torch.randn(2, LENGTH, 32)
    found = {}
    for choice in ("eager", "multihead"):
        model = family("bert")
        model.set_attn_implementation(choice)
        found[choice] = model.encoder.layer[0].attention.self(x)
    torch.testing.assert_close(found["multihead"], found["eager"], atol=1e-5, rtol=0)


def test_a_model_that_collects_them_itself_returns_them() -> None:
    """The vision model of Pix2Struct reads them from its layers, and transformers collects none."""
    sizes = {"hidden_size": 32, "d_ff": 32, "d_kv": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.Pix2StructVisionModel(hf.Pix2StructVisionConfig(**sizes, patch_embed_hidden_size=12, seq_len=20)).eval()
    patches = torch.rand(2, 10, 14)
    patches[..., :2] = torch.arange(1, 11)[:, None]
    expected = eager(model, {"flattened_patches": patches}).attentions
    with mh.use(model), torch.no_grad():
        found = model(flattened_patches=patches, output_attentions=True).attentions
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_compiled_model_returns_them() -> None:
    torch._dynamo.reset()
    model, batch = of_one_layer(used("llama")), batch_of("llama")
    expected = eager(of_one_layer(family("llama")), batch).attentions
    with torch.no_grad():
        model(**batch, output_attentions=True)  # transformers adds its hooks here, outside of the graph
        found = torch.compile(model, backend="eager", fullgraph=True)(**batch, output_attentions=True)
    torch.testing.assert_close(found.attentions, expected, atol=1e-5, rtol=0)


class TestLargeMaps:
    """Above a limit parts can be read, and the whole map cannot."""

    @pytest.fixture(autouse=True)
    def _small_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(output_attentions, "MAX_WEIGHTS", 1000)

    def test_reading_all_raises_an_error_that_names_tiles_and_statistics(self) -> None:
        with pytest.raises(ArgumentError) as caught:
            weights().mean()
        assert str(caught.value) == (
            "The attention weights (2, 4, 12, 12) are read, and 1,152 of them would be computed at once. "
            "Read at most 1,000, such as the tile weights[0, 0, :256, :256]; or record the model with "
            "mh.observe(model): it measures statistics of every head, and record.layers[0] has tiles, "
            ".weights(head, queries=..., keys=...), and means of blocks, .map(head)."
        )

    @pytest.mark.parametrize(
        "index",
        [
            (0, 3, slice(2, 5), slice(4)),
            (1, slice(1, 3), -1),
            (..., 0),
            (slice(None), 0),
            (slice(1, None), ..., slice(-3, None)),
            (0, 0, 5, 5),
        ],
        ids=str,
    )
    def test_a_tile_is_that_of_the_whole_map(self, index: Any) -> None:
        found = weights()
        with pytest.MonkeyPatch.context() as large:
            large.setattr(output_attentions, "MAX_WEIGHTS", 1 << 28)
            expected = weights().read_all()[index]
        assert found[index].shape == expected.shape
        torch.testing.assert_close(found[index], expected, atol=1e-6, rtol=0)

    @pytest.mark.parametrize(
        "index", [0, (slice(None), slice(None, None, 2)), torch.tensor([0, 1]), (..., None)], ids=str
    )
    def test_an_index_that_is_no_tile_or_too_large_raises(self, index: Any) -> None:
        found = weights()
        with pytest.MonkeyPatch.context() as small:
            small.setattr(output_attentions, "MAX_WEIGHTS", 500)
            with pytest.raises(ArgumentError, match="would be computed at once"):
                found[index]

    def test_a_place_outside_of_the_map_raises_as_for_any_tensor(self) -> None:
        with pytest.raises(IndexError):
            weights()[0, 4]


class TestConfigurations:
    """The option may be set where transformers accepts it for eager attention only."""

    def test_it_is_set_saved_and_loaded(self, tmp_path: Path) -> None:
        model = used("bert")
        model.config.output_attentions = True
        model.save_pretrained(tmp_path)
        loaded = hf.AutoModel.from_pretrained(tmp_path, output_attentions=True, attn_implementation="multihead")
        with torch.no_grad():
            found = loaded(**batch_of("bert")).attentions
        torch.testing.assert_close(found, eager(model, batch_of("bert")).attentions, atol=1e-5, rtol=0)

    def test_other_implementations_reject_it_as_before(self) -> None:
        config = hf.BertConfig(vocab_size=VOCABULARY, attn_implementation="sdpa")
        with pytest.raises(ValueError, match="not supported when using the `attn_implementation` set to sdpa"):
            config.output_attentions = True


def maps_drawn(view: str, attentions: dict[str, Any], tokens: dict[str, list[str]]) -> list[Tensor]:
    """Return the maps in the page that a view of BertViz writes, each (layers, heads, queries, keys)."""
    bertviz = pytest.importorskip("bertviz", reason="the package bertviz is not installed")
    page = getattr(bertviz, view)(**attentions, **tokens, html_action="return").data
    drawn = json.JSONDecoder().raw_decode(page[page.index('{"attention"') :])[0]["attention"]
    return [torch.tensor(each["attn"]) for each in drawn]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("view", ["head_view", "model_view"])
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_bertviz_draws_what_it_draws_of_eager_attention(name: str, view: str) -> None:
    batch = {key: each[:1] for key, each in batch_of(name).items()}
    source, target = [str(each) for each in range(LENGTH)], [str(each) for each in range(9)]
    tokens = {"encoder_tokens": source, "decoder_tokens": target} if name == "t5" else {"tokens": source}

    def drawn(output: Any) -> list[Tensor]:
        kinds = ("encoder", "decoder", "cross") if name == "t5" else ("",)
        keys = {f"{kind}_attention".lstrip("_"): f"{kind}_attentions".lstrip("_") for kind in kinds}
        return maps_drawn(view, {argument: output[key] for argument, key in keys.items()}, tokens)

    with torch.no_grad():
        found = drawn(used(name)(**batch, output_attentions=True))
    expected = drawn(eager(family(name), batch))
    assert len(found) == (3 if name == "t5" else 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
