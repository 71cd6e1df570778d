"""Saving and copying: a layer comes back with every bit, and its parameters keep their names."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import multihead as mh
from tests.ecosystem.ways import EMBED, HEADS, WAYS, inputs, layer

NAMES = [f"{name}.{part}" for name in ("q_proj", "k_proj", "v_proj", "out_proj") for part in ("weight", "bias")]
Way = Callable[[nn.Module, Path], nn.Module]


def by_torch(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)  # type: ignore[no-any-return]


def by_state_dict(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model.state_dict(), folder / "state.pt")
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    made.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return made


def by_safetensors_file(model: nn.Module, folder: Path) -> nn.Module:
    save_file(model.state_dict(), folder / "state.safetensors")
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    made.load_state_dict(load_file(folder / "state.safetensors"))
    return made


def by_safetensors_model(model: nn.Module, folder: Path) -> nn.Module:
    save_model(model, str(folder / "model.safetensors"))
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    assert load_model(made, folder / "model.safetensors") == (set(), [])
    return made


COPIES: dict[str, Way] = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "torch.save": by_torch,
    "state_dict": by_state_dict,
    "save_file": by_safetensors_file,
    "save_model": by_safetensors_model,
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_gives_bit_for_bit_the_same(copied: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ours = layer(num_kv_heads=2, dropout=0.1, dtype=dtype).eval()
    again = COPIES[copied](ours, tmp_path)
    for way, options in WAYS.items():
        given = inputs(way, dtype)
        assert torch.equal(again(*given, **options), ours(*given, **options))
    assert again.extra_repr() == ours.extra_repr()


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_a_layer_of_its_own(copied: str, tmp_path: Path) -> None:
    ours, (x,) = layer(), inputs("causal")
    again = COPIES[copied](ours, tmp_path)
    before = ours(x)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert torch.equal(ours(x), before)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_a_layer_that_has_run_and_was_watched_can_be_copied(copied: str, tmp_path: Path) -> None:
    ours, (x,) = layer(), inputs("padded")
    with mh.observe(ours):
        ours(x, **WAYS["padded"]).sum().backward()
    assert torch.equal(COPIES[copied](ours, tmp_path)(x), ours(x))


def test_the_names_of_the_parameters_are_these() -> None:
    """They are what checkpoints are written with: who changes one must read the old ones too."""
    assert list(mh.MultiHeadAttention(EMBED, HEADS).state_dict()) == NAMES
    assert list(mh.MultiHeadAttention(EMBED, HEADS, bias=False).state_dict()) == NAMES[::2]
    assert list(mh.MultiHeadAttention(EMBED, HEADS, output_projection=False).state_dict()) == NAMES[:6]


def test_the_names_of_a_drop_ins_parameters_are_those_of_pytorchs_layer() -> None:
    for options in ({}, {"bias": False}, {"kdim": 10, "vdim": 11}, {"add_bias_kv": True}):
        ours = mh.compat.torch_nn.MultiheadAttention(EMBED, HEADS, **options)
        assert list(ours.state_dict()) == list(nn.MultiheadAttention(EMBED, HEADS, **options).state_dict())


def test_two_layers_that_share_their_weights_are_saved_once_and_share_them_again(tmp_path: Path) -> None:
    first, second = layer(), layer()
    second.k_proj = first.k_proj
    model = nn.ModuleList([first, second])
    again = by_safetensors_model(model, tmp_path)
    assert torch.equal(again[1].k_proj.weight, first.k_proj.weight)  # type: ignore[index]
    assert again[0].k_proj is again[1].k_proj  # type: ignore[index]
