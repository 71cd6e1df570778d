"""Windows and images that a layer attends within are segments of one sample, whichever way a model calls them."""

from __future__ import annotations

import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, SwinConfig, SwinModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import multihead as mh
from multihead.observation.layer_names import _are_adjacent, _memory_of
from multihead.observation.record import Record
from multihead.probes import Probe
from multihead.record.table import CHANCE_SUFFIX


def swin() -> tuple[Any, dict[str, Tensor]]:
    """Two pictures of 16 windows, then of 4, which are rows of a batch."""
    config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    return SwinModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def tower() -> tuple[Any, dict[str, Tensor]]:
    """A sequence with two pictures of 4 and 2 windows, for each of which attention is called."""
    config: Any = Qwen2_5_VLVisionConfig(
        depth=3, hidden_size=32, num_heads=4, intermediate_size=64, patch_size=4, window_size=16, out_hidden_size=32
    )
    config.fullatt_block_indexes = [2]
    model: Any = Qwen2_5_VisionTransformerPretrainedModel(config)
    return model, {"hidden_states": torch.randn(96, 96), "grid_thw": torch.tensor([[1, 8, 8], [1, 4, 8]])}


MODELS = {
    "rows of a batch": (swin, [(2, 16), (2, 16), (2, 4), (2, 4)]),
    "calls": (tower, [(1, 6), (1, 6), (1, 2)]),
}


@pytest.fixture(params=MODELS)
def run(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Tensor], list[list[list[Tensor]]]]:
    """A model, its inputs, and the weights of eager attention, (heads, tokens, tokens) by layer, sample and window."""
    torch.manual_seed(0)
    make, sizes = MODELS[request.param]
    model, inputs = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # sharper attention
    found: list[Tensor] = []
    module: Any = sys.modules[type(model).__module__]
    eager = module.eager_attention_forward

    def kept(*args: Any, **kwargs: Any) -> Any:
        output, weights = eager(*args, **kwargs)
        found.extend(weights.detach().double())
        return output, weights

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(module, "eager_attention_forward", kept)
        model.eval().set_attn_implementation("eager")
        model(**inputs)
    windows = iter(found)
    return model, inputs, [[[next(windows) for _ in range(count)] for _ in range(samples)] for samples, count in sizes]


def means(layer: list[list[Tensor]]) -> dict[str, Tensor]:
    """Means of statistics, of weights by sample and window."""
    windows = [each for sample in layer for each in sample]
    return {
        "first_mass": torch.cat([each[:, :, 0] for each in windows], 1).mean(1),
        "previous_mass": torch.cat([each.diagonal(-1, 1, 2) for each in windows], 1).mean(1),
        "largest_weight": torch.cat([each.amax(-1) for each in windows], 1).mean(1),
        # Tokens are numbered in the whole picture, whose windows follow each other.
        "position": torch.cat([torch.arange(sum(len(each[0]) for each in sample)) for sample in layer])
        .double()
        .mean()
        .expand(len(windows[0])),
    }


POSITION = Probe("position", itemgetter("position"), {"position"})
PROBES: list[Any] = ["first_mass", "previous_mass", "largest_weight", POSITION]


@pytest.mark.parametrize("keep", ["cpu", "statistics", "summary"])
def test_statistics_of_windows_are_those_of_eager_weights(run: Any, keep: Any) -> None:
    model, inputs, expected = run
    with torch.no_grad(), mh.observe(model, keep=keep, probes=PROBES) as seen:
        model(**inputs)
        model(**inputs)
    assert [layer.name for layer in seen.layers] == sorted({layer.name for layer in seen.layers})
    assert not any("#" in layer.name for layer in seen.layers)
    for layer, weights in zip(seen.layers, expected, strict=True):
        assert layer.num_samples == 2 * len(weights)
        found = layer.means()
        for name, value in means(weights).items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_the_map_of_a_sample_has_its_windows_on_the_diagonal_also_from_a_file(run: Any, tmp_path: Path) -> None:
    model, inputs, expected = run
    with torch.no_grad(), mh.observe(model, probes=PROBES) as seen:
        model(**inputs)
    seen.save(tmp_path / "windows.safetensors")
    loaded = Record.load(tmp_path / "windows.safetensors")
    assert len(seen.calls) == len(loaded.calls) == sum(len(each) for layer in expected for each in layer)
    for layer, again, weights in zip(seen.layers, loaded.layers, expected, strict=True):
        for index, windows in enumerate(weights):
            sizes = [len(each[0]) for each in windows]
            whole = torch.stack([torch.block_diag(*heads) for heads in zip(*windows, strict=True)])
            for sample in (layer.sample(index), again.sample(index)):
                torch.testing.assert_close(sample.weights().double(), whole, atol=1e-5, rtol=1e-4)
                assert [each.num_queries for each in sample.segments] == sizes
        for name, value in means(weights).items():
            torch.testing.assert_close(again.means()[name], value, atol=1e-5, rtol=1e-4)


def test_the_chance_of_windows_is_that_of_each_alone(run: Any) -> None:
    model, inputs, expected = run
    with torch.no_grad(), mh.observe(model, probes=PROBES) as seen:
        model(**inputs)
    rows = {(row["layer"], row["head"]): row for row in seen.table().rows}
    for layer, weights in enumerate(expected):
        even = means([[torch.full_like(each, 1 / each.shape[-1]) for each in sample] for sample in weights])
        for head in range(len(weights[0][0])):
            for name in ("first_mass", "previous_mass"):
                assert rows[layer, head][name + CHANCE_SUFFIX] == pytest.approx(float(even[name][head]), abs=1e-9)


def test_only_the_next_rows_of_the_same_tensor_follow() -> None:
    def follow(rows: Tensor, later: Tensor) -> bool:
        return _are_adjacent(_memory_of(rows), _memory_of(later))

    for whole in (torch.zeros(1, 4, 6, 8), torch.zeros(1, 6, 4, 8).transpose(1, 2)):
        assert follow(whole[:, :, :2], whole[:, :, 2:5])
        assert not follow(whole[:, :, :2], whole[:, :, 3:5])
        assert not follow(whole[:, :, 2:4], whole[:, :, :2])
        assert not follow(whole[:, :2], whole[:, 2:])
        assert not follow(whole[:, :, :2], whole.clone()[:, :, 2:4])
        assert not follow(whole, whole)


def test_rows_of_a_tensor_that_was_freed_are_followed_by_none_at_its_address() -> None:
    whole = torch.zeros(1, 4, 6, 8)
    address, rows = whole.data_ptr(), _memory_of(whole[:, :, :2])
    del whole
    again = next((each for each in (torch.zeros(1, 4, 6, 8) for _ in range(9)) if each.data_ptr() == address), None)
    assert again is None or not _are_adjacent(rows, _memory_of(again[:, :, 2:4]))


@pytest.mark.parametrize(("texts", "pictures"), [(1, 3), (4, 2)])
def test_the_rows_of_a_model_with_two_inputs_are_samples_of_either(texts: int, pictures: int) -> None:
    both = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = {"vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    config = CLIPConfig(text_config=both | words, vision_config=both | {"image_size": 16, "patch_size": 8})
    model: Any = CLIPModel(config).eval()
    with torch.no_grad(), mh.observe(model) as seen:
        model(input_ids=torch.randint(3, 50, (texts, 6)), pixel_values=torch.randn(pictures, 3, 16, 16))
    samples = {layer.name.partition(".")[0]: layer.num_samples for layer in seen.layers}
    assert samples == {"text_model": texts, "vision_model": pictures}
