"""What PyTorch hangs on modules works on the four projections: hooks, parametrizations, pruning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import multihead as mh
from tests.ecosystem.ways import EMBED, HEADS, LENGTHS, MEMORY_LENGTHS, PROJECTIONS, WAYS, inputs, layer, results


def noted(model: nn.Module) -> dict[str, list[str]]:
    """Hang all three kinds of hooks on every projection; what comes back fills as they fire."""
    fired: dict[str, list[str]] = {"before": [], "after": [], "backward": []}

    def note(kind: str, name: str) -> Callable[..., None]:
        return lambda *_: fired[kind].append(name)

    for name in PROJECTIONS:
        projection = model.get_submodule(name)
        projection.register_forward_pre_hook(note("before", name))
        projection.register_forward_hook(note("after", name))
        projection.register_full_backward_hook(note("backward", name))
    return fired


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_all_four_projections_fire_once_each(way: str) -> None:
    ours = layer()
    expected = results(ours, way, given := inputs(way))
    fired = noted(ours)
    found = results(ours, way, given)
    assert fired["before"] == fired["after"] == list(PROJECTIONS)
    assert sorted(fired["backward"]) == sorted(PROJECTIONS)
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []


@pytest.mark.parametrize("way", WAYS)
def test_what_a_hook_returns_is_what_goes_on(way: str) -> None:
    """A hook on v_proj that returns 0 leaves nothing but the bias of the output projection."""
    ours, given = layer(), inputs(way)
    ours.v_proj.register_forward_hook(lambda _module, _given, output: torch.zeros_like(output))
    output = ours(*given, **WAYS[way])
    assert ours.out_proj is not None
    real = torch.arange(output.shape[1]) < torch.tensor(LENGTHS)[:, None] if "padded" in way else slice(None)
    torch.testing.assert_close(output[real], ours.out_proj.bias.expand_as(output[real]))


def test_a_hook_on_the_output_projection_hears_the_merged_heads_of_tokens_alone() -> None:
    ours, (x,), heard = layer(), inputs("padded"), []
    assert ours.out_proj is not None
    ours.out_proj.register_forward_pre_hook(lambda _module, given: heard.append(given[0]))
    ours(x, lengths=LENGTHS)
    assert [tuple(each.shape) for each in heard] == [(1, sum(LENGTHS), EMBED)]


def test_a_hook_on_the_layer_hears_its_keywords() -> None:
    ours, (x, memory), heard = layer(), inputs("cross-attention"), []

    def note(_module: nn.Module, given: tuple[Tensor, ...], options: dict[str, Any], output: Tensor) -> None:
        heard.append((given, options, output))

    ours.register_forward_hook(note, with_kwargs=True)
    output = ours(x, memory, memory_lengths=MEMORY_LENGTHS)
    assert heard == [((x, memory), {"memory_lengths": MEMORY_LENGTHS}, output)]


@pytest.mark.parametrize(
    "hung", [parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_parametrized_layer_equals_a_plain_one_with_the_weights_it_makes(
    way: str, hung: Callable[[nn.Module], nn.Module]
) -> None:
    ours, given = layer(dtype=torch.float64).eval(), inputs(way, torch.float64)
    for name in PROJECTIONS:
        hung(ours.get_submodule(name))
    plain = mh.MultiHeadAttention(EMBED, HEADS, dtype=torch.float64).eval()
    made = {
        f"{name}.{part}": getattr(ours.get_submodule(name), part) for name in PROJECTIONS for part in ("weight", "bias")
    }
    plain.load_state_dict(made)
    expected, found = results(plain, way, given), results(ours, way, given)
    for name in ("output", "x", "q_proj.bias", "out_proj.bias"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)
    trained = [name for name in found if "parametrizations" in name]
    assert {name.split(".")[0] for name in trained} == set(PROJECTIONS)
    assert all(found[name].isfinite().all() and found[name].abs().max() > 0 for name in trained)
    for name in PROJECTIONS:
        parametrize.remove_parametrizations(ours.get_submodule(name), "weight")
    torch.testing.assert_close(results(ours, way, given)["output"], expected["output"], rtol=0, atol=1e-12)


def test_pruned_weights_count_as_zero_and_stay_so_in_training() -> None:
    ours, (x,) = layer(), inputs("padded")
    for name in PROJECTIONS:
        prune.l1_unstructured(ours.get_submodule(name), "weight", amount=0.5)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(x, lengths=LENGTHS).square().sum().backward()
    optimizer.step()
    for name in PROJECTIONS:
        projection = ours.get_submodule(name)
        prune.remove(projection, "weight")
        assert float((projection.weight == 0).float().mean()) == 0.5  # type: ignore[arg-type, union-attr]
