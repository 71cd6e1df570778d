"""A record of a model whose heads are changed holds the patterns of the heads that ran, and what they wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from tests.interventions.changed_eager import changed_eager
from tests.interventions.changed_eager import scaled as scaled_eager
from tests.interventions.changed_layers import Change, attend_by_hand, parts_of, scaled
from tests.interventions.tiny_models import batch, double

LENGTHS = (6, 4)
PROBES = ("entropy", "previous_mass", "output_norm", "contribution")


class Model(nn.Module):
    """Two layers, the first with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mh.MultiHeadAttention(8, 4, num_kv_heads=2)
        self.second = mh.MultiHeadAttention(8, 2, head_gates=True)
        self.double().eval()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.6)

    def forward(self, x: Tensor, **padding: Any) -> Tensor:
        x = x + self.first(x, mask=masks.Causal(), **padding)
        output: Tensor = x + self.second(x, mask=masks.Causal(), **padding)
        return output


def replaced(head: int, rows: Tensor) -> Change:
    """Replace a head by the first row at the first token, and by the second at all others."""

    def change(output: Tensor) -> Tensor:
        new = output.clone()
        new[head, :1], new[head, 1:] = rows[0], rows[1]
        return new

    return change


def norms(layer: Any, x: Tensor, change: Change) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of a text, and each head's output_norm and contribution before a factor: (heads, queries)."""
    _, weights, output = attend_by_hand(layer, x, change, causal=True)
    parts = parts_of(layer)
    gates = torch.ones(parts.heads) if layer.head_gates is None else layer.head_gates
    matrices = layer.out_proj.weight.unflatten(1, (parts.heads, -1)).transpose(0, 1) * gates[:, None, None]
    values = parts.v(x).unflatten(-1, (parts.kv_heads, -1)).transpose(0, 1)
    values = values.repeat_interleave(parts.heads // parts.kv_heads, 0) @ matrices.mT
    return weights, (output @ matrices.mT).norm(dim=-1), (weights @ values.norm(dim=-1)[..., None])[..., 0]


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_patterns_are_those_of_the_heads_that_ran_and_norms_are_those_of_what_they_wrote(padding_side: str) -> None:
    model = Model()
    texts = [torch.randn(length, 8, dtype=torch.float64) for length in LENGTHS]
    x = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_side=padding_side)
    padding = {"lengths": LENGTHS, "padding_side": padding_side}
    rows = torch.randn(2, 4, dtype=torch.float64)
    means = mh.head_means(model, [{"x": x, **padding}])
    means.vectors["second"][:, 1] = rows
    with (
        torch.no_grad(),
        mh.observe(model, probes=PROBES) as seen,
        mh.scale_heads(model, {"L0 H0": 0, "L0 H3": -2}, positions=slice(1, None)),
        mh.ablate(model, "L1 H1", by="mean", reference=means),
    ):
        model(x, **padding)
    first, second = scaled({0: 0, 3: -2}, slice(1, None)), replaced(1, rows)
    for index, text in enumerate(texts):
        for number, (layer, change) in enumerate(((model.first, first), (model.second, second))):
            sample = seen.layers[number].sample(index)
            weights, written, own = norms(layer, text, change)
            torch.testing.assert_close(sample.weights(), weights, atol=1e-9, rtol=0)
            torch.testing.assert_close(sample.statistics["output_norm"], written, atol=1e-9, rtol=0)
            entropy = -torch.xlogy(weights, weights).sum(-1)
            torch.testing.assert_close(sample.statistics["entropy"], entropy, atol=1e-9, rtol=0)
            if number == 0:
                own[0, 1:] *= 0
                own[3, 1:] *= 2
            else:
                own[1] = written[1]  # of another vector no part belongs to a key
            torch.testing.assert_close(sample.statistics["contribution"], own, atol=1e-9, rtol=0)
            text = text + attend_by_hand(layer, text, change, causal=True)[0]  # noqa: PLW2901


@pytest.mark.parametrize("keep", ["statistics", "summary"])
def test_statistics_and_summaries_are_those_of_a_whole_record(keep: Any) -> None:
    model, x = Model(), torch.randn(2, 6, 8, dtype=torch.float64)
    found = []
    for each in ("cpu", keep):
        with (
            torch.no_grad(),
            mh.observe(model, probes=PROBES, keep=each) as seen,
            mh.ablate(model, ["L0 H2", "L1 H0"], positions=[0, 3]),
            mh.scale_heads(model, {"L0 H2": 3.0}),
        ):
            model(x)
        found.append(seen)
    whole, kept = found
    for one, other in zip(whole.layers, kept.layers, strict=True):
        for name, value in one.summary("mean").items():
            torch.testing.assert_close(other.summary("mean")[name], value, atol=1e-9, rtol=0)
    sample = whole.layers[0].sample(0)
    for name in ("output_norm", "contribution"):
        own = sample.statistics[name]
        assert (own[2] == 0).tolist() == [True, False, False, True, False, False]
    assert bool((sample.statistics["output_norm"] <= sample.statistics["contribution"] + 1e-9).all())


def test_an_observer_changes_nothing_and_may_begin_before_or_after() -> None:
    model, x = Model(), torch.randn(2, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        with mh.ablate(model, "L0 H1"):
            expected = model(x)
            with mh.observe(model) as within:
                torch.testing.assert_close(model(x), expected, atol=1e-12, rtol=0)
            assert torch.equal(model(x), expected)
        with mh.observe(model) as around, mh.ablate(model, "L0 H1"):
            model(x)
    for one, other in zip(within.layers, around.layers, strict=True):
        assert torch.equal(one.sample().weights(), other.sample().weights())


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_patterns_of_a_hugging_face_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double(name, monkeypatch), batch(name)
    with torch.no_grad(), mh.observe(model) as seen, mh.scale_heads(model, {"L0 H1": 0, "L0 H2": 3}):
        model(**inputs)
    with torch.no_grad(), changed_eager(model, {0: scaled_eager({1: 0, 2: 3})}) as changed:
        model(**inputs)
    with torch.no_grad(), changed_eager(model, {}) as plain:
        model(**inputs)
    for index, layer in enumerate(seen.layers):
        found = torch.stack([layer.sample(row).weights() for row in range(2)])
        torch.testing.assert_close(found, changed.weights[index], atol=1e-9, rtol=0)
    assert not torch.allclose(changed.weights[1], plain.weights[1])


def test_of_observed_heads_the_ones_that_are_off_are_named_by_the_record() -> None:
    model, x = Model(), torch.randn(1, 6, 8, dtype=torch.float64)
    with torch.no_grad(), mh.observe(model, probes=PROBES) as seen, mh.ablate(model, ["L0 H1", "L1 H0"]):
        model(x)
    off = {(each.layer, each.head) for each in seen.find(output_norm=(None, 0.0))}
    assert off == {(0, 1), (1, 0)}
