"""Tests of the search for models of transformers in a module."""

from torch import nn

from multihead.hooks.pretrained import is_within, pretrained_models


def test_models_are_found_at_any_depth_by_their_qualified_names() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertModel(BertConfig(vocab_size=10, **sizes))
    around = nn.ModuleDict({"text": nn.Sequential(model), "head": nn.Linear(8, 2)})
    assert pretrained_models(model) == {"": model}
    assert pretrained_models(around) == {"text.0": model}
    assert pretrained_models(nn.Linear(2, 2)) == {}


def test_a_module_is_within_itself_and_those_around_it_and_not_within_one_with_a_longer_name() -> None:
    assert is_within("encoder.layers.1", "encoder.layers.1")
    assert is_within("encoder.layers.1.mlp", "encoder.layers.1")
    assert not is_within("encoder.layers.10", "encoder.layers.1")
    assert is_within("anything", "")
