"""A replay from a block equals the whole model, or is not used; a sweep equals one run per head."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ModelError
from multihead.interventions.predictions import token_losses
from multihead.interventions.replay import Replay
from multihead.interventions.sweep import SweptLayer, sweep_layers
from multihead.models.pretrained import pretrained_models
from tests.interventions.tiny_models import DECODERS, batch, double

ENCODERS = ("bert", "modernbert")


def read(model: Any, inputs: dict[str, Tensor]) -> tuple[Replay, Tensor]:
    """Run a model on this library's attention, and store the outputs of its blocks."""
    if pretrained_models(model):
        mh.use(model)
    replay = Replay(model)
    with torch.no_grad(), replay.store_block_outputs():
        before = outputs(model, inputs)
    return replay, before


def swept(record: mh.Record, texts: int = 2) -> list[SweptLayer]:
    """All heads of all layers of a record."""
    return [SweptLayer(each.number, each.name, each.num_heads, range(each.num_heads), texts) for each in record.layers]


def outputs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of a language model, else the states of an encoder."""
    found = model(**inputs, **({"use_cache": False} if hasattr(model, "lm_head") or "use_cache" in inputs else {}))
    result: Tensor = found.logits if "logits" in found else found.last_hidden_state
    return result


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_a_replay_with_a_head_off_equals_the_whole_model_with_it_off(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding="right" if name in ENCODERS else "none")
    replay, before = read(model, inputs)
    assert replay.check_exactness(lambda: outputs(model, inputs), before)
    with torch.no_grad(), mh.observe(model, probes=()) as seen:
        outputs(model, inputs)
    last = seen.layers[-1]
    with torch.no_grad(), mh.ablate(model, (last.name, 1)):
        whole = outputs(model, inputs)
        with replay.start_at_block(replay.block_of(last.name)):
            part = outputs(model, inputs)
    assert not torch.equal(whole, before)
    torch.testing.assert_close(part, whole, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(outputs(model, inputs), before)  # the blocks run again


class _SharedState(nn.Module):
    """Two blocks of which the second reads what the first one computed beside its output."""

    class Block(nn.Module):
        def __init__(self, shared: dict[str, Tensor]) -> None:
            super().__init__()
            self.attention, self.shared = mh.MultiHeadAttention(embed_dim=8, num_heads=2), shared

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attention(x)
            if "first" in self.shared:
                return y + self.shared.pop("first")
            self.shared["first"] = y.exp()
            return y

    def __init__(self) -> None:
        super().__init__()
        shared: dict[str, Tensor] = {}
        self.layers = nn.ModuleList([self.Block(shared), self.Block(shared)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_model_whose_layers_share_more_than_their_outputs_is_not_replayed() -> None:
    model, x = _SharedState(), torch.randn(1, 5, 8)
    replay = Replay(model)
    with torch.no_grad(), replay.store_block_outputs():
        before = model(x)
    assert not replay.check_exactness(lambda: model(x), before)


def test_a_block_that_runs_several_times_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("albert", monkeypatch), batch("albert")
    replay, before = read(model, inputs)
    assert not replay.check_exactness(lambda: outputs(model, inputs), before)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_a_sweep_equals_a_run_per_head(name: str, replays: bool, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding="right")
    replay, before = read(model, inputs)
    replay.is_exact = replays
    with torch.no_grad(), mh.observe(model, probes=()) as seen:
        outputs(model, inputs)

    def measure(given: Any, copies: int) -> Tensor:
        return outputs(model, given).unflatten(0, (copies, -1)).flatten(1)

    found = list(sweep_layers(replay, inputs, swept(seen), measure, copies=copies))
    assert [each.number for each, _ in found] == [layer.number for layer in seen.layers]
    for layer, (_, results) in zip(seen.layers, found, strict=True):
        assert len(results) == layer.num_heads
        for head in range(layer.num_heads):
            with torch.no_grad(), mh.ablate(model, (layer.number, head)):
                one = outputs(model, inputs)
            assert not torch.equal(one, before)
            torch.testing.assert_close(results[head], one.flatten(), rtol=0, atol=1e-12)


def test_the_losses_of_a_sweep_are_those_of_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("llama", monkeypatch), {"input_ids": torch.arange(9)[None] % 7}
    replay, before = read(model, inputs)
    replay.check_exactness(lambda: outputs(model, inputs), before)
    with torch.no_grad(), mh.observe(model, probes=()) as seen:
        outputs(model, inputs)

    def measure(given: Any, copies: int) -> Tensor:
        return token_losses(outputs(model, given), given["input_ids"]).mean(1, keepdim=True)

    ((_, first), *_) = sweep_layers(replay, inputs, swept(seen, texts=1), measure, copies=4)
    for head in range(seen.layers[0].num_heads):
        with torch.no_grad(), mh.ablate(model, (0, head)):
            logits = outputs(model, inputs)[0, :-1]
        loss = nn.functional.cross_entropy(logits, inputs["input_ids"][0, 1:])
        torch.testing.assert_close(first[head, 0], loss, rtol=0, atol=1e-12)


def test_a_layer_that_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("llama", monkeypatch), batch("llama")
    replay, _ = read(model, inputs)
    with torch.no_grad(), mh.observe(model, probes=()) as seen:
        outputs(model, inputs)
    sentence = (
        "model.layers.0.self_attn was never reached inside the context. The layers that ran are none. Run the given "
        "model and not a copy of it, with inputs that reach these layers and have the positions and samples."
    )
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        list(sweep_layers(replay, inputs, swept(seen), lambda *_: torch.zeros(4, 1), copies=4))
