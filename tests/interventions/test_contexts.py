"""Contexts nest, end in any order, and leave a model as it was, whatever happened inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ArgumentError, ModelError
from multihead.kernels import head_changes
from multihead.tensors import tracing
from tests.families import batch_of, family
from tests.interventions.changed_eager import changed_eager, scaled
from tests.interventions.tiny_models import batch, double

TRACED = (
    "A layer whose heads are switched off is being traced, and a trace would keep them off. Trace, compile or export "
    "the model outside of the context."
)


def hooks(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_nested_contexts_end_in_any_order(*, first_ends_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("llama", monkeypatch), batch("llama")
    before = logits(model, inputs)
    with changed_eager(model, {0: scaled({1: 0.0, 2: 0.5}), 1: scaled({0: 0.0})}):
        both = logits(model, inputs)
    with changed_eager(model, {0: scaled({2: 0.5}), 1: scaled({0: 0.0})}):
        second_alone = logits(model, inputs)
    with changed_eager(model, {0: scaled({1: 0.0})}):
        first_alone = logits(model, inputs)
    first, second = mh.ablate(model, "L0 H1"), mh.scale_heads(model, {"L0 H2": 0.5, "L1 H0": 0})
    first.__enter__()
    second.__enter__()
    torch.testing.assert_close(logits(model, inputs), both, atol=1e-9, rtol=0)
    ends, stays = (first, second) if first_ends_first else (second, first)
    ends.__exit__(None, None, None)
    left = second_alone if first_ends_first else first_alone
    torch.testing.assert_close(logits(model, inputs), left, atol=1e-9, rtol=0)
    stays.__exit__(None, None, None)
    assert torch.equal(logits(model, inputs), before)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "t5", "albert", "vit"])
def test_after_an_exception_the_model_is_as_before(name: str, kind: type[BaseException]) -> None:
    model, inputs = family(name), batch_of(name)
    before, implementation, hooked = logits(model, inputs), model.config._attn_implementation, hooks(model)

    def fail(*_: object) -> None:
        raise kind

    inner = [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
    handle = inner.register_forward_hook(fail)
    with pytest.raises(kind), mh.ablate(model, "L0 H1"):
        logits(model, inputs)
    handle.remove()
    assert head_changes.active == ()
    assert model.config._attn_implementation == implementation
    assert hooks(model) == hooked
    assert torch.equal(logits(model, inputs), before)


def test_an_intervention_is_active_once_and_may_be_entered_again() -> None:
    layer, x = mh.MultiHeadAttention(8, num_heads=2), torch.randn(1, 3, 8)
    intervention = mh.ablate(layer, "L0 H1")
    with intervention:
        once = layer(x)
        with pytest.raises(ArgumentError) as caught, intervention:
            pass
    assert str(caught.value) == "This intervention is already active. Make another one with mh.ablate."
    with intervention:
        assert torch.equal(layer(x), once)
    assert head_changes.active == ()


def test_another_model_and_a_copy_are_not_changed() -> None:
    layer, x = mh.MultiHeadAttention(8, num_heads=2), torch.randn(1, 3, 8)
    other = copy.deepcopy(layer)
    before = layer(x)
    with mh.ablate(layer, "L0 H1"):
        assert torch.equal(other(x), before)
        assert not torch.equal(layer(x), before)


def test_compiled_models_run_eagerly_inside_and_compiled_again_after() -> None:
    layer, x = mh.MultiHeadAttention(8, num_heads=2), torch.randn(1, 3, 8)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    before = compiled(x)
    for model in (layer, compiled):
        with mh.ablate(layer, "L0 H1"):
            expected = layer(x)
        with mh.ablate(model, "L0 H1"):
            assert torch.equal(compiled(x), expected)
        assert not torch.equal(expected, before)
        assert torch.equal(compiled(x), before)
    assert not tracing._stances


def test_a_compiled_hugging_face_model_runs_eagerly_inside() -> None:
    model, inputs = family("llama"), batch_of("llama")
    with mh.use(model):
        with mh.ablate(model, "L0 H1"):
            expected = logits(model, inputs)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        before = logits(compiled, inputs)
        with mh.ablate(compiled, "L0 H1"):
            assert torch.equal(logits(compiled, inputs), expected)
        assert torch.equal(logits(compiled, inputs), before)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_or_an_export_inside_is_an_error() -> None:
    layer, x = mh.MultiHeadAttention(8, num_heads=2).eval(), torch.randn(1, 3, 8)
    with pytest.raises(ModelError) as caught, mh.ablate(layer, "L0 H1"):
        torch.jit.trace(layer, x)
    assert str(caught.value) == TRACED
    with pytest.raises(Exception, match="is being traced"), mh.ablate(layer, "L0 H1"):
        torch.export.export(layer, (x,), strict=False)
    assert head_changes.active == ()
