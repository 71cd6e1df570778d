"""Frequencies of scaled rotary positions, against those of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from multihead.errors import ArgumentError
from multihead.rotary.scalings import Linear, Llama3, Yarn, frequencies_of

YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
CASES = {
    "linear": (Linear(4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (Yarn(8.0, 4096), {**YARN, "factor": 8.0}),
    "yarn with ends that are not rounded": (
        Yarn(8.0, 4096, truncate=False),
        {**YARN, "factor": 8.0, "truncate": False},
    ),
    "yarn with other ends": (
        Yarn(40.0, 4096, beta_fast=20.0, beta_slow=2.0),
        {**YARN, "factor": 40.0, "beta_fast": 20.0, "beta_slow": 2.0},
    ),
    "yarn with a gain": (Yarn(2.0, 4096, attention_factor=1.5), {**YARN, "factor": 2.0, "attention_factor": 1.5}),
    "yarn with the gain of DeepSeek": (
        Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.8),
        {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "yarn that stretches nothing": (Yarn(1.0, 4096), {**YARN, "factor": 1.0}),
    "yarn whose ends meet": (
        Yarn(8.0, 4096, beta_fast=8.0, beta_slow=8.0, truncate=False),
        {**YARN, "factor": 8.0, "beta_fast": 8.0, "beta_slow": 8.0, "truncate": False},
    ),
}


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_gain_are_those_of_transformers(case: str, base: float, head_dim: int) -> None:
    scaling, said = CASES[case]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={**said, "rope_theta": base},
    )
    theirs, gain = ROPE_INIT_FUNCTIONS[said["rope_type"]](config, torch.device("cpu"))
    ours = torch.tensor(scaling.frequencies(base, head_dim), dtype=torch.float64)
    # theirs are computed in float32 from a power of a large base
    torch.testing.assert_close(ours, theirs.double(), rtol=3e-6, atol=0)
    assert scaling.gain == pytest.approx(gain, rel=1e-15)


def test_frequencies_fall_by_the_same_share_from_pair_to_pair() -> None:
    found = frequencies_of(10_000.0, 64)
    assert len(found) == 32
    assert found[0] == 1.0
    assert all(low / high == pytest.approx(10_000 ** (-2 / 64), rel=1e-14) for high, low in pairwise(found))


def test_llama3_keeps_high_frequencies_and_divides_low_ones() -> None:
    plain, scaled = frequencies_of(500_000.0, 128), Llama3(8.0).frequencies(500_000.0, 128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
    assert all(low / 8 <= found <= low for found, low in zip(scaled, plain, strict=True))


def test_yarn_keeps_high_frequencies_and_divides_low_ones() -> None:
    plain, scaled = frequencies_of(10_000.0, 128), Yarn(16.0, 4096).frequencies(10_000.0, 128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 16


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: Linear(0), "factor is 0. Give a number above 0."),
        (lambda: Linear("2"), "factor is '2'. Give a number above 0."),  # type: ignore[arg-type]
        (lambda: Linear(True), "factor is True. Give a number above 0."),
        (lambda: Linear(float("nan")), "factor is nan. Give a number above 0."),
        (lambda: Linear(float("inf")), "factor is inf. Give a number above 0."),
        (lambda: Llama3(8.0, low_freq_factor=-1.0), "low_freq_factor is -1.0. Give a number above 0."),
        (
            lambda: Llama3(8.0, low_freq_factor=4.0),
            "low_freq_factor is 4.0 and high_freq_factor is 4.0. Give a low_freq_factor below high_freq_factor.",
        ),
        (lambda: Llama3(8.0, original_length=0), "original_length is 0. Give an integer of at least 1."),
        (lambda: Yarn(2.0, 4096.0), "original_length is 4096.0. Give an integer of at least 1."),  # type: ignore[arg-type]
        (lambda: Yarn(2.0, 4096, beta_slow=0), "beta_slow is 0. Give a number above 0."),
        (lambda: Yarn(2.0, 4096, attention_factor=0.0), "attention_factor is 0.0. Give a number above 0."),
        (
            lambda: Yarn(2.0, 4096, mscale=1.0),
            "mscale is 1.0 and mscale_all_dim is None. Give both, or attention_factor, or none of the three.",
        ),
    ],
)
def test_arguments_out_of_range_are_rejected(made: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        made()
