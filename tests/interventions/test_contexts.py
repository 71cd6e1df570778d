"""Contexts nest, end in any order, and leave a model as it was, whatever happened inside."""

from __future__ import annotations

import copy
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import multihead as mh
from multihead.compat import torch_nn
from multihead.errors import ArgumentError, ModelError
from multihead.kernels import head_changes
from multihead.tensors import tracing
from tests.families import batch_of, family, of_one_layer
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
    assert head_changes.active_changes == ()
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
    assert head_changes.active_changes == ()


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
    assert not tracing._replaced_compiler_stances


def test_a_compiled_hugging_face_model_runs_eagerly_inside() -> None:
    """Before and after it is one graph: neither the heads that are off nor what `mh.use` checks is in it."""
    model, inputs = of_one_layer(family("llama")), batch_of("llama", padding="right")
    kept, counter = inputs["attention_mask"].bool(), CompileCounter()
    with mh.use(model):
        whole = logits(model, inputs)
        with mh.ablate(model, "L0 H1"):
            expected = logits(model, inputs)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        before = logits(compiled, inputs)
        torch.testing.assert_close(before[kept], whole[kept], atol=5e-5, rtol=5e-5)
        with mh.ablate(compiled, "L0 H1"):
            assert torch.equal(logits(compiled, inputs), expected)
        assert torch.equal(logits(compiled, inputs), before)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_or_an_export_inside_is_an_error() -> None:
    layer, x = mh.MultiHeadAttention(8, num_heads=2).eval(), torch.randn(1, 3, 8)
    with pytest.raises(ModelError) as caught, mh.ablate(layer, "L0 H1"):
        torch.jit.trace(layer, x)
    assert str(caught.value) == TRACED
    with pytest.raises(Exception, match="is being traced"), mh.ablate(layer, "L0 H1"):
        torch.export.export(layer, (x,), strict=False)
    assert head_changes.active_changes == ()


@torch.no_grad()
@pytest.mark.parametrize("compiled_by", ["the context", "a part", "the module", "before"])
def test_whatever_is_compiled_runs_with_the_heads_off_inside_and_with_all_after(compiled_by: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), mh.MultiHeadAttention(8, num_heads=2), nn.Linear(8, 8))
    x = torch.randn(1, 3, 8)
    before = model(x)
    with mh.ablate(model, "L0 H1"):
        expected = model(x)
    run: Any = model
    if compiled_by == "a part":
        model[1] = torch.compile(model[1], backend="eager")
    elif compiled_by == "the module":
        model.compile(backend="eager")
    elif compiled_by == "before":
        run = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(run(x), before)
    with mh.ablate(model, "L0 H1"):
        if compiled_by == "the context":
            run = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(run(x), expected)
    torch.testing.assert_close(run(x), before)


def test_a_program_that_was_exported_before_is_not_reached_which_is_an_error() -> None:
    layer, x = mh.MultiHeadAttention(8, num_heads=2).eval(), torch.randn(1, 3, 8)
    program = torch.export.export(layer, (x,)).module()
    with pytest.raises(ModelError, match=re.escape("L0 H1 was never reached inside the context.")):  # noqa: SIM117
        with mh.ablate(layer, "L0 H1"):
            program(x)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "own", "torch"])
def test_outputs_before_and_after_are_equal_to_the_bit(name: str) -> None:
    if name in ("own", "torch"):
        kind = mh.MultiHeadAttention if name == "own" else torch_nn.MultiheadAttention
        model: Any = kind(8, num_heads=2).eval()
        x = torch.randn(2, 5, 8)
        inputs = {"x": x} if name == "own" else dict.fromkeys(("query", "key", "value"), x)
    else:
        model, inputs = family(name), batch_of(name, padding="left")

    def run() -> list[Tensor]:
        found = model(**inputs)
        found = [found if isinstance(found, Tensor) else found[0]]
        return found if name != "llama" else [*found, model.generate(**inputs, max_new_tokens=3, do_sample=False)]

    with torch.no_grad():
        before = run()
        means = mh.head_means(model, [inputs])
        for options in ({}, {"by": "mean", "reference": means}, {"positions": slice(1, None)}, {"samples": [1]}):
            with mh.ablate(model, "L0 H1", **options):
                changed = run()
            assert not torch.equal(changed[0], before[0])
            assert all(map(torch.equal, run(), before))
        with mh.scale_heads(model, {"L0 H0": 1.0}), mh.ablate(model, "L0 H1"):
            run()
        assert all(map(torch.equal, run(), before))
    assert head_changes.active_changes == ()


def test_a_factor_of_one_changes_nothing() -> None:
    model, inputs = family("llama"), batch_of("llama", padding="left")
    with mh.use(model):
        before = logits(model, inputs)
        with mh.scale_heads(model, {"L0": 1, "L1 H2": 1}):
            assert torch.equal(logits(model, inputs), before)


def test_a_context_that_cannot_begin_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = family("llama"), batch_of("llama")
    before, hooked = logits(model, inputs), hooks(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("multihead.interventions.ablate.guard_caches", "multihead.interventions.followed.apply_change"):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupt)
            intervention = mh.ablate(model, "L0 H1")
            with pytest.raises(KeyboardInterrupt):
                intervention.__enter__()
        assert (head_changes.active_changes, hooks(model)) == ((), hooked)
        assert torch.equal(logits(model, inputs), before)
        with intervention:  # it may be entered after all
            assert not torch.equal(logits(model, inputs), before)


def test_another_thread_has_all_heads() -> None:
    model, inputs = family("llama"), batch_of("llama", padding="left")
    with mh.use(model):
        before = logits(model, inputs)
        with mh.ablate(model, "L0 H1", positions=0), ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(logits, model, inputs).result(), before)
            assert not torch.equal(logits(model, inputs), before)
        with pytest.raises(ModelError, match=r"L0 H1 was never reached"):  # noqa: SIM117
            with mh.ablate(model, "L0 H1"), ThreadPoolExecutor(1) as pool:
                pool.submit(logits, model, inputs).result()
