"""A replay from a block equals the whole model, or is not used; a sweep equals one run per head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.interventions import prepared
from multihead.interventions.followed import run_followable
from multihead.interventions.measures import SeveralMeasures
from multihead.interventions.replacements import ScaledOutput
from multihead.interventions.replay import Replay
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


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_the_effects_on_all_outputs_are_those_of_a_run_per_head(
    name: str, replays: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding="right")
    _, before = read(model, inputs)
    whole = SeveralMeasures(lambda output, _: output[0].flatten(1), "outputs")
    monkeypatch.setattr(prepared, "_MAX_BYTES", prepared._MAX_BYTES if copies > 1 else 1)
    with torch.no_grad(), run_followable(model):
        one = prepared.prepare(model, inputs, whole)
        one.replay.is_exact = replays
        found = list(one.effects(ScaledOutput()))
    assert one.copies == copies
    for layer, effects in found:
        assert effects.shape[1] == layer.num_heads
        for head in range(layer.num_heads):
            with torch.no_grad(), mh.ablate(model, (layer.number, head)):
                expected = outputs(model, inputs) - before
            assert bool((expected != 0).any())
            torch.testing.assert_close(effects[:, head], expected.flatten(1), rtol=0, atol=1e-12)
