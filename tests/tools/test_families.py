"""The tool that compares every model class: which classes, how models are made tiny, and what it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from click.testing import CliRunner
from torch import nn
from transformers.utils.import_utils import BACKENDS_MAPPING

from multihead.masks import Causal, Window
from multihead.models.lazy_mask import LazyMask
from multihead.models.mask_functions import MaskExtent
from tools.families import packages
from tools.families.__main__ import add, main, stored
from tools.families.breaking import MUTATIONS, parts_of_call, without
from tools.families.catalogue import families, is_part, model_classes
from tools.families.comparison import SHARP, Result, compare, doubled_precision, noise, plain_attention
from tools.families.page import page
from tools.families.tiny import LARGEST, tiny_configuration, tiny_model


def window_mask() -> LazyMask:
    mask = Causal() & Window(2)
    return LazyMask(mask, MaskExtent(1, 4, 4, 0, 0, torch.device("cpu")))


def test_every_folder_with_models_is_a_family_and_parts_are_known() -> None:
    assert {"bert", "llama", "mpt", "t5", "whisper", "data2vec"} <= families().keys()
    assert len(families()["data2vec"]) == 3
    names = [each.__name__ for each in model_classes("t5")]
    assert {"T5Model", "T5Stack"} <= {*names}
    assert not [name for name in names if name.endswith("PreTrainedModel")]
    assert [each.__name__ for each in model_classes("t5") if is_part(each)] == ["T5Stack"]


def test_a_tiny_configuration_keeps_one_layer_of_each_kind_and_the_groups_of_heads() -> None:
    gemma = tiny_configuration(hf.Gemma2Config)
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert (gemma.num_attention_heads, gemma.num_key_value_heads, gemma.attn_logit_softcapping) == (4, 2, 6.0)
    assert tiny_configuration(hf.OPTConfig).num_attention_heads == 4
    clip = tiny_configuration(hf.CLIPConfig)
    assert clip.text_config.hidden_size == clip.vision_config.hidden_size == 32


def test_a_tiny_model_is_small_and_the_same_each_time() -> None:
    first, second = (tiny_model(hf.BertModel, tiny_configuration(hf.BertConfig)) for _ in range(2))
    assert sum(each.numel() for each in first.parameters()) < LARGEST
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_each_part_of_a_call_is_found_and_dropped() -> None:
    query, bias = torch.zeros(1, 2, 4, 16), torch.ones(1, 2, 4, 4)
    options: dict[str, Any] = {"scaling": 1.0, "softcap": 3.0, "s_aux": torch.ones(2), "position_bias": bias}
    assert parts_of_call(query, window_mask(), options) == {*MUTATIONS}
    assert parts_of_call(query, None, {"scaling": 0.25}) == set()
    names = {"scale": "scaling", "softcap": "softcap", "sinks": "s_aux", "bias": "position_bias"}
    for part, name in names.items():
        assert without(part, None, options)[1].keys() == options.keys() - {name}
    assert without("window", window_mask(), options)[0].mask == Causal() & Causal()
    assert without("mask", window_mask(), options) == (None, options | {"is_causal": False})
    added = torch.tensor([[0.5, torch.finfo(torch.float32).min]])
    assert without("bias", added, {})[0].tolist() == [[True, False]]


def test_a_bias_that_is_the_same_for_all_visible_keys_is_no_part_of_a_call() -> None:
    query, hidden = torch.zeros(1, 1, 2, 16), torch.finfo(torch.float32).min
    assert parts_of_call(query, torch.tensor([[[[1.0, 1.0, hidden], [2.0, hidden, 2.0]]]]), {}) == {"mask"}
    assert parts_of_call(query, torch.tensor([[[[1.0, 1.0, hidden], [2.0, hidden, 3.0]]]]), {}) == {"mask", "bias"}


def test_plain_attention_is_that_of_torch_for_grouped_heads_masks_and_a_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 7, 8, generator=generator, dtype=torch.float64)
    bias = torch.randn(2, 4, 5, 7, generator=generator, dtype=torch.float64)
    seen = torch.rand(2, 1, 5, 7, generator=generator) < 0.6
    seen[1, :, 2] = False
    wide = {"enable_gqa": True, "scale": 0.7}
    output, weights = plain_attention(nn.Identity(), query, key, value, seen, scaling=0.7)
    expected = F.scaled_dot_product_attention(query, key, value, seen, **wide)
    torch.testing.assert_close(output.transpose(1, 2), expected, atol=1e-12, rtol=0)
    assert not weights[1, :, 2].any()
    for mask, options in ((bias, {}), (None, {"position_bias": bias})):
        output, _ = plain_attention(nn.Identity(), query, key, value, mask, scaling=0.7, **options)
        expected = F.scaled_dot_product_attention(query, key, value, bias, **wide)
        torch.testing.assert_close(output.transpose(1, 2), expected, atol=1e-12, rtol=0)


def test_a_model_whose_eager_attention_is_wrong_is_compared_with_the_plain_one() -> None:
    kind = next(each for each in model_classes("nemotron_asr_streaming") if each.__name__.endswith("StreamingEncoder"))
    result = compare("nemotron_asr_streaming", kind)
    assert (result.outcome, result.reason, result.weights) == ("equal", "", 2)
    assert result.entropy < SHARP


def test_a_cache_among_the_inputs_is_copied_in_double_precision() -> None:
    cache = hf.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    doubled = doubled_precision({"past_key_values": cache, "count": 2})
    assert doubled["count"] == 2
    assert doubled["past_key_values"].layers[0].keys.dtype == torch.float64
    assert cache.layers[0].keys.dtype == torch.float32


def test_the_noise_of_a_model_is_the_same_in_both_precisions() -> None:
    torch.manual_seed(0)
    single = noise(2, 3, dtype=torch.float32)
    torch.manual_seed(0)
    double = noise(2, 3, dtype=torch.float64)
    assert double.dtype == torch.float64
    assert torch.equal(single.double(), double)


def test_operators_of_torchvision_are_declared_where_torch_has_no_cuda(monkeypatch: Any) -> None:
    monkeypatch.setattr(packages, "_KEPT", [])  # they end with this test
    monkeypatch.setattr(packages, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", None)
    packages.declare_operators()
    packages.declare_operators()  # again, where they exist
    assert str(torch.ops.torchvision.qnms.default._schema).startswith("torchvision::qnms(Tensor dets, Tensor scores")


def test_a_family_with_layers_of_a_package_that_is_missing_is_rejected_by_their_code(monkeypatch: Any) -> None:
    monkeypatch.setitem(BACKENDS_MAPPING, "natten", BACKENDS_MAPPING["natten"])  # restored after this test
    packages.skip_checks()
    kind = next(each for each in model_classes("dinat") if each.__name__ == "DinatModel")
    result = compare("dinat", kind)
    assert result.outcome == "rejected"
    assert "NeighborhoodAttention computes its weights itself" in result.reason


@pytest.mark.parametrize("watched", [True, False])
def test_attention_that_bypasses_the_interface_is_rejected_or_a_difference_in_the_number_of_calls(
    watched: bool, monkeypatch: Any
) -> None:
    """A layer that looks its attention up, and then does not use it, cannot be found by its code."""
    kind = next(each for each in model_classes("bert") if each.__name__ == "BertModel")
    attention = nn.Module.get_submodule(kind(tiny_configuration(hf.BertConfig)), "encoder.layer.0.attention.self")
    original = type(attention).forward

    def forward(self: Any, hidden: Any, *args: Any, **options: Any) -> Any:
        if self.config._attn_implementation == "eager":
            return original(self, hidden, *args, **options)
        return hidden, None

    monkeypatch.setattr("tools.families.comparison.require_attention_interface", lambda model: None)
    monkeypatch.setattr("multihead.models.huggingface.require_attention_interface", lambda model: None)
    if not watched:
        monkeypatch.setattr("multihead.models.huggingface.report_bypassing_modules", lambda *_: None)
    monkeypatch.setattr("tools.families.comparison.uses_attention_interface", lambda each: each is type(attention))
    monkeypatch.setattr(type(attention), "forward", forward)
    result = compare("bert", kind)
    if watched:
        assert result.outcome == "rejected"
        assert "encoder.layer.0.attention.self (BertSelfAttention) ran without a call" in result.reason
    else:
        assert (result.outcome, result.reason) == ("different", "0 calls of ours, 2 of eager attention.")


def results() -> list[dict[str, Any]]:
    found = [
        Result(
            "bert",
            "BertModel",
            calls=2,
            layers=(2, 2),
            weights=2,
            entropy=0.25,
            features=["mask"],
            kinds=["BertSelfAttention"],
        ),
        Result("gpt2", "GPT2Model", calls=2, layers=(2, 2), weights=1, entropy=0.75, cached=True),
        Result("mpt", "MptModel", "rejected", "blocks.0.attn: MptAttention computes its weights itself."),
        Result("timm", "TimmModel", "not built", "ImportError: a | b"),
        Result("mamba", "MambaModel", "no attention"),
        Result("t5", "T5Stack", part=True),
    ]
    broken = [Result("bert", "BertModel", "different").record() | {"mutation": "mask"}]
    broken += [Result("gpt2", "GPT2Model", "equal").record() | {"mutation": "mask"}]
    return [each.record() | {"mutation": ""} for each in found] + broken


def test_the_page_counts_results_and_names_what_was_missed() -> None:
    layers = {("bert", "BertSelfAttention"), ("t5", "T5Attention")}
    text = page(results(), "5.0", "en", layers)
    for line in (
        "| equal | 2 | 2 |",
        "| rejected with a clear error | 1 | 1 |",
        "| cannot be built here | 1 | 1 |",
        "| mask | 2 | 1; not found in gpt2 |",
        "| `timm` | `TimmModel` | `ImportError: a \\| b` |",
        "| `mpt` | 1 | blocks.0.attn: MptAttention computes its weights itself. |",
        "| `gpt2` | 1 | 1 |  |",
    ):
        assert line in text.splitlines()
    assert "T5Stack" not in text
    assert "Of 2 classes of attention layers that use transformers' interface, 1 ran" in text
    assert "were not given: `T5Attention`." in text
    assert "transformers 5.0" in text
    chinese = page(results(), "5.0", "zh", layers)
    assert [len(line.split("|")) for line in chinese.splitlines()] == [
        len(line.split("|")) for line in text.splitlines()
    ]


def test_results_are_stored_per_version_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for each in results():
        add(path, each)
    old = results()[0] | {"transformers": "4.0", "name": "Old"}
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(old) + "\n", encoding="utf-8")
    found = stored(path)
    assert ("bert", "Old", "") not in found
    assert found["bert", "BertModel", "mask"]["outcome"] == "different"
    assert math.isnan(found["mpt", "MptModel", ""]["entropy"])


@pytest.mark.usefixtures("_imported_before")
def test_a_family_is_compared_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run = CliRunner().invoke(main, ["mpt", "--results", str(path)])
    assert run.exit_code == 0
    assert run.output.splitlines()[-1] == "5 rejected"
    assert stored(path)["mpt", "MptModel", ""]["reason"].startswith(
        "blocks.0.attn (and 1 more): MptAttention computes its weights itself"
    )
