"""An output that a vector or a function of the user gives is that of attention that is written out, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ModelError
from tests.interventions.changed_layers import Change, unchanged
from tests.interventions.test_layers import WAYS, Causal, equal, texts
from tests.interventions.tiny_models import batch, double

VECTOR = torch.randn(2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def add(output: Tensor, _: Any) -> Tensor:
    return output + VECTOR


def project_out(output: Tensor, _: Any) -> Tensor:
    direction = VECTOR / VECTOR.norm()
    return output - (output @ direction)[..., None] * direction


def copy_head(_: Tensor, call: Any) -> Tensor:
    return call.outputs[:, 0]  # type: ignore[no-any-return]


def by_place(output: Tensor, call: Any) -> Tensor:
    assert (call.layer, call.layer_name, call.head) == (0, "layers.0", 2)
    return output * (call.positions + 1)[..., None]


def of_head_2(function: Callable[[Tensor], Tensor]) -> Change:
    """Change head 2 by a function of the outputs of all heads of a text: (heads, queries, value_dim)."""

    def change(outputs: Tensor) -> Tensor:
        return torch.cat([outputs[:2], function(outputs)[None], outputs[3:]])

    return change


GIVEN: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "a vector": (VECTOR, lambda outputs: VECTOR.expand_as(outputs[2])),
    "add a vector": (add, lambda outputs: add(outputs[2], None)),
    "project a direction out": (project_out, lambda outputs: project_out(outputs[2], None)),
    "copy another head": (copy_head, lambda outputs: outputs[0]),
    "by position": (by_place, lambda outputs: outputs[2] * torch.arange(1, outputs.shape[1] + 1)[:, None]),
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_given_replaces_the_output_however_the_texts_are_batched(way: str, name: str) -> None:
    model, batch = Causal(), texts()
    by, change = GIVEN[name]
    with torch.no_grad(), mh.ablate(model, "L0 H2", by=by):
        found = WAYS[way](model, batch)
    for each, text in zip(found, batch, strict=True):
        equal(each, model.by_hand(text, of_head_2(change), unchanged))


@pytest.mark.parametrize("way", ["alone", "left padding", "packed", "in steps"])
def test_it_replaces_the_output_at_some_positions_only(way: str) -> None:
    model, batch = Causal(), texts()

    def change(outputs: Tensor) -> Tensor:
        later = torch.arange(outputs.shape[1])[:, None] >= 2
        return torch.where(later, outputs[2] + VECTOR, outputs[2])

    with torch.no_grad(), mh.ablate(model, "L0 H2", by=add, positions=slice(2, None)):
        found = WAYS[way](model, batch)
    for each, text in zip(found, batch, strict=True):
        equal(each, model.by_hand(text, of_head_2(change), unchanged))


def test_a_function_knows_the_text_of_each_query_also_where_texts_are_one_row() -> None:
    model, batch = Causal(), texts()
    seen = []

    def look(output: Tensor, call: Any) -> Tensor:
        seen.append((call.texts.tolist(), call.positions.tolist(), tuple(call.outputs.shape)))
        return output

    with torch.no_grad(), mh.ablate(model, "L0 H2", by=look):
        found = WAYS["packed"](model, batch)
    assert seen == [([[0] * 7 + [1] * 4 + [2]], [[*range(7), *range(4), 0]], (1, 4, 12, 2))]
    for each, text in zip(found, batch, strict=True):
        equal(each, model.by_hand(text, unchanged, unchanged))


def test_gradients_are_those_of_the_attention_that_is_written_out_and_reach_the_vector() -> None:
    model, (x, *_) = Causal(), texts()
    found, expected = [], []
    for of, record in ((found, True), (expected, False)):
        vector = VECTOR.clone().requires_grad_()
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        if record:
            with mh.ablate(model, "L0 H2", by=lambda output, call: output * call.outputs[:, 1] + vector):  # noqa: B023
                model(leaf[None]).square().sum().backward()
        else:
            change = of_head_2(lambda outputs: outputs[2] * outputs[1] + vector)  # noqa: B023
            model.by_hand(leaf, change, unchanged).square().sum().backward()
        of += [vector.grad, leaf.grad, *(parameter.grad for parameter in model.parameters())]
    for one, other in zip(found, expected, strict=True):
        equal(one, other)


def test_checkpointing_recomputes_the_function_inside_the_context_and_is_refused_outside_of_it() -> None:
    model, (x, *_) = Causal(), texts()

    def run() -> Tensor:
        output: Tensor = checkpoint(model, leaf[None], use_reentrant=False)
        return output.square().sum()

    leaf = x.clone().requires_grad_()
    with mh.ablate(model, "L0 H2", by=add):
        run().backward()
    inside, leaf = leaf.grad, x.clone().requires_grad_()
    model.by_hand(leaf, of_head_2(lambda outputs: outputs[2] + VECTOR), unchanged).square().sum().backward()
    equal(inside, leaf.grad)
    with mh.ablate(model, "L0 H2", by=add):
        loss = run()
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"different number of tensors|different metadata"):
        loss.backward()


def test_a_cache_is_continued_with_the_same_function_and_not_with_another_one() -> None:
    layer, x = mh.MultiHeadAttention(8, 2).double(), torch.randn(1, 4, 8, dtype=torch.float64)
    cache = mh.KeyValueCache()
    with torch.no_grad():
        for step in x.split(2, 1):
            with mh.ablate(layer, "L0 H1", by=keep):
                layer(step, mask=masks.Causal(), cache=cache)
        with pytest.raises(ModelError) as error, mh.ablate(layer, "L0 H1", by=lambda output, _: output):
            layer(x[:, :1], mask=masks.Causal(), cache=cache)
    assert str(error.value) == (
        "The key/value cache was filled with heads switched off, and is continued with other heads switched off. Start "
        "with an empty cache, or give allow_mixed=True to mh.ablate or mh.scale_heads."
    )


def keep(output: Tensor, _: Any) -> Tensor:
    return output


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_hugging_face_model_generates_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, halves = double(name, monkeypatch), {"L0 H1": 0.5, "L1 H2": 0.5}
    inputs, options = batch(name, padding="left"), {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        with mh.scale_heads(model, halves, positions=slice(3, None)):
            expected = model(**inputs).logits, model.generate(**inputs, **options)
        with mh.ablate(model, list(halves), by=lambda output, _: output / 2, positions=slice(3, None)):
            found = model(**inputs).logits, model.generate(**inputs, **options)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_the_norm_of_the_output_is_that_of_the_given_one() -> None:
    layer, x = mh.MultiHeadAttention(8, 4).double(), torch.randn(1, 5, 8, dtype=torch.float64)
    with torch.no_grad(), mh.observe(layer, probes="output_norm") as seen, mh.ablate(layer, "L0 H2", by=VECTOR):
        layer(x)
    written = layer.out_proj.weight[:, 4:6] @ VECTOR
    equal(seen.layers[0].sample().statistics["output_norm"][2], written.norm().detach().expand(5))


def write(output: Tensor, _: Any) -> Tensor:
    return output.add_(1)


REFUSED: dict[str, tuple[Any, str]] = {
    "a vector of another size": (
        torch.zeros(3, dtype=torch.float64),
        (
            "by is a torch.float64 tensor of shape (3,) on cpu, and the heads of layers.0 write vectors of 2 numbers. "
            "Give a torch.float64 tensor of shape (2,) on cpu."
        ),
    ),
    "a vector of another dtype": (
        torch.zeros(2),
        (
            "by is a torch.float32 tensor of shape (2,) on cpu, and the heads of layers.0 write vectors of 2 numbers. "
            "Give a torch.float64 tensor of shape (2,) on cpu."
        ),
    ),
    "another shape": (
        lambda output, _: output[:, 1:],
        (
            "The function by returned a torch.float64 tensor of shape (1, 6, 2) on cpu for L0 H2. Return a "
            "torch.float64 tensor of shape (1, 7, 2) on cpu, as the output is."
        ),
    ),
    "another dtype": (
        lambda output, _: output.float(),
        (
            "The function by returned a torch.float32 tensor of shape (1, 7, 2) on cpu for L0 H2. Return a "
            "torch.float64 tensor of shape (1, 7, 2) on cpu, as the output is."
        ),
    ),
    "nothing": (
        lambda _, __: None,
        (
            "The function by returned an object of type NoneType for L0 H2. Return a torch.float64 tensor of shape "
            "(1, 7, 2) on cpu, as the output is."
        ),
    ),
    "a write": (write, "The function by wrote to an output of L0. Return a new tensor, such as output + vector."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    model, (x, *_) = Causal(), texts()
    by, sentence = REFUSED[name]
    with torch.no_grad(), pytest.raises(ArgumentError) as error, mh.ablate(model, "L0 H2", by=by):
        model(x[None])
    assert str(error.value) == sentence


def test_a_function_that_is_never_called_is_an_error() -> None:
    model = Causal()
    with (
        torch.no_grad(),
        pytest.raises(ModelError, match=r"^L1 H0 was never reached inside the context\."),
        mh.ablate(model, "L1 H0", by=add),
    ):
        nn.Identity()(torch.zeros(1))


def test_a_whole_model_may_be_changed_by_a_function_and_not_by_a_vector() -> None:
    model, (x, *_) = Causal(), texts()
    with torch.no_grad(), mh.ablate(model, ["L0", "L1"], by=keep) as change:
        equal(model(x[None])[0], model.by_hand(x, unchanged, unchanged))
    assert repr(change) == "<Intervention: L0 by what was given, L1 by what was given>"
    with pytest.raises(ArgumentError, match=r"^The heads are all heads of the model\. Leave some on\.$"):
        mh.ablate(model, ["L0", "L1"], by=VECTOR)
