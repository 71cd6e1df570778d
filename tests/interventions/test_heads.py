"""Heads are named as tables and records name them, and what names none is one sentence that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ModelError, MultiheadError
from multihead.kernels import head_changes
from tests.families import batch_of, family
from tests.interventions.test_contexts import hooks, logits


class Model(nn.Module):
    """Two layers, with 4 and 2 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mh.MultiHeadAttention(8, 4), mh.MultiHeadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, mask=masks.Causal())
        output: Tensor = x + self.second(x, mask=masks.Causal())
        return output


def off(model: nn.Module, x: Tensor, heads: Any) -> Tensor:
    with mh.ablate(model, heads):
        return model(x)  # type: ignore[no-any-return]


def test_all_names_of_a_head_are_one() -> None:
    model, x = Model(), torch.randn(1, 5, 8)
    expected = off(model, x, [(0, 1), (1, 0)])
    assert not torch.equal(expected, model(x))
    for names in (
        ["L0 H1", "L1 H0"],
        ("l0h1", "L1  H0"),
        {"L0 H1", "L1 H0"},
        [("first", 1), ("second", 0)],
        [("L0", 1), ("L1", 0)],
        ["L0 H1", (0, 1), ("first", 1), "L1 H0", "L1 H0"],
        (each for each in ("L0 H1", "L1 H0")),
    ):
        assert torch.equal(off(model, x, names), expected)
    assert torch.equal(off(model, x, "L1"), off(model, x, [(1, 0), (1, 1)]))
    assert torch.equal(off(model, x, ["L1", "L1 H0"]), off(model, x, "L1"))


def test_heads_that_a_record_found() -> None:
    model, x = Model(), torch.randn(1, 40, 8)
    with mh.observe(model) as seen:
        model(x)
    kinds: list[Any] = [*seen.kinds(), *seen.kinds("broad")]
    found: list[list[Any]] = [list(seen.find(entropy=(0, None)))[:3], list(seen.nearest(0, 2, top=2)), kinds[:2]]
    for heads in found:
        assert heads
        assert torch.equal(off(model, x, heads), off(model, x, [(each.layer, each.head) for each in heads]))
        assert torch.equal(off(model, x, heads[0]), off(model, x, (heads[0].layer, heads[0].head)))
    with mh.scale_heads(model, {found[0][0]: 0.5}):
        scaled = model(x)
    with mh.scale_heads(model, {(found[0][0].layer, found[0][0].head): 0.5}):
        assert torch.equal(model(x), scaled)


def test_the_name_of_a_layer_in_a_part_of_the_model_is_that_in_the_whole() -> None:
    model, inputs = family("llama"), batch_of("llama")
    inner = model.model
    with torch.no_grad(), mh.observe(inner) as seen:
        inner(**inputs)
    head = next(each for each in seen.find(entropy=(0, None)) if (each.layer, each.head) == (1, 2))
    with mh.ablate(model, "L1 H2"):
        expected = logits(model, inputs)
    with mh.ablate(model, head):
        assert torch.equal(logits(model, inputs), expected)


def test_a_call_of_a_shared_layer_is_named_by_its_number() -> None:
    model, inputs = family("albert"), batch_of("albert")
    with torch.no_grad(), mh.observe(model) as seen:
        model(**inputs)
    names = [layer.name for layer in seen.layers]
    assert [name.rpartition("#")[2] for name in names[1:]] == ["2", "3"]
    for number, name in enumerate(names):
        with mh.ablate(model, (number, 1)):
            expected = logits(model, inputs)
        with mh.ablate(model, (name, 1)):
            assert torch.equal(logits(model, inputs), expected)


HEADS_OF = 'Give for example "L17 H4", (17, 4), "L17" for a layer, a list of them, or what seen.find(...) returns.'
FACTOR = "Give a finite number."
BAD: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a layer too many": (
        lambda model: mh.ablate(model, "L2 H1"),
        ("There is no head L2 H1: the model has layers L0 to L1, and L1 has heads H0 to H1. The nearest is L1 H1."),
    ),
    "a head too many": (
        lambda model: mh.ablate(model, ["L0 H1", (0, 4)]),
        ("There is no head L0 H4: the model has layers L0 to L1, and L0 has heads H0 to H3. The nearest is L0 H3."),
    ),
    "a negative head": (
        lambda model: mh.ablate(model, (1, -1)),
        ("There is no head L1 H-1: the model has layers L0 to L1, and L1 has heads H0 to H1. The nearest is L1 H0."),
    ),
    "a whole layer too many": (
        lambda model: mh.ablate(model, "L7"),
        ("There is no head L7: the model has layers L0 to L1, and L1 has heads H0 to H1. The nearest is L1."),
    ),
    "a head of a named layer": (
        lambda model: mh.ablate(model, ("second", 2)),
        ("There is no head second H2: the model has layers L0 to L1, and L1 has heads H0 to H1. The nearest is L1 H1."),
    ),
    "a name of no layer": (
        lambda model: mh.ablate(model, ("third", 0)),
        "The model has no attention layers 'third'. Its layers are first, second.",
    ),
    "a word": (lambda model: mh.ablate(model, "head 3"), f"'head 3' is not the name of a head. {HEADS_OF}"),
    "a number": (lambda model: mh.ablate(model, 3), f"The heads are 3. {HEADS_OF}"),  # type: ignore[arg-type]
    "factors": (lambda model: mh.ablate(model, {"L0 H1": 0}), f"The heads are {{'L0 H1': 0}}. {HEADS_OF}"),
    "a head of three": (
        lambda model: mh.ablate(model, [(0, 1, 2)]),  # type: ignore[list-item]
        f"(0, 1, 2) is not the name of a head. {HEADS_OF}",
    ),
    "none": (lambda model: mh.ablate(model, []), f"No head is named. {HEADS_OF}"),
    "all": (lambda model: mh.ablate(model, ["L0", "L1"]), "The heads are all heads of the model. Leave some on."),
    "all by their numbers": (
        lambda model: mh.ablate(model, [(0, 0), (0, 1), "L0 H2", ("first", 3), "L1"]),
        "The heads are all heads of the model. Leave some on.",
    ),
    "all by their means": (
        lambda model: mh.ablate(model, ["L0", "L1"], by="mean", reference=[torch.randn(1, 4, 8)]),
        "The heads are all heads of the model. Leave some on.",
    ),
    "a factor of NaN": (
        lambda model: mh.scale_heads(model, {"L0 H1": float("nan")}),
        f"The factor of L0 H1 is nan. {FACTOR}",
    ),
    "an infinite factor": (
        lambda model: mh.scale_heads(model, {"L0 H1": 0.5, (1, 0): -float("inf")}),
        f"The factor of (1, 0) is -inf. {FACTOR}",
    ),
    "a word as factor": (
        lambda model: mh.scale_heads(model, {"L0 H1": "off"}),  # type: ignore[dict-item]
        f"The factor of L0 H1 is 'off'. {FACTOR}",
    ),
    "True as factor": (lambda model: mh.scale_heads(model, {"L0 H1": True}), f"The factor of L0 H1 is True. {FACTOR}"),
    "a list of factors": (
        lambda model: mh.scale_heads(model, ["L0 H1"]),  # type: ignore[arg-type]
        'factors is a list. Give a dict such as {"L17 H4": 0.5}.',
    ),
    "no factors": (lambda model: mh.scale_heads(model, {}), f"No head is named. {HEADS_OF}"),
    "two factors": (
        lambda model: mh.scale_heads(model, {"L0 H1": 0.5, (0, 1): 2}),
        "L0 H1 has the factors 0.5 and 2. Give it one.",
    ),
    "a factor of an unknown head": (
        lambda model: mh.scale_heads(model, {"L0 H1": 0.5, "L1 H5": 2}),
        ("There is no head L1 H5: the model has layers L0 to L1, and L1 has heads H0 to H1. The nearest is L1 H1."),
    ),
    "another way": (
        lambda model: mh.ablate(model, "L0 H1", by="noise"),  # type: ignore[arg-type]
        'by is \'noise\'. Give "zero", "mean", "resample", a vector, or a function of the output of a head.',
    ),
    "a reference for a function": (
        lambda model: mh.ablate(model, "L0 H1", by=lambda output, call: output, reference=[]),
        'reference was given with a vector or a function as by=. Use by="mean", or leave it out.',
    ),
    "no reference": (
        lambda model: mh.ablate(model, "L0 H1", by="mean"),
        (
            'by="mean" needs a reference. Give batches of the model\'s inputs as reference=, or what '
            "mh.head_means(model, batches) returns."
        ),
    ),
    "a reference for nothing": (
        lambda model: mh.ablate(model, "L0 H1", reference=[torch.randn(1, 4, 8)]),
        'reference was given with by="zero". Use by="mean", or leave it out.',
    ),
    "an empty reference": (
        lambda model: mh.ablate(model, "L0 H1", by="mean", reference=[]),
        "There are no batches. Give an iterable of the model's inputs.",
    ),
    "other means": (
        lambda model: mh.ablate(model, "L0 H1", by="mean", reference=[torch.randn(1, 4, 8)], mean_over="layer"),  # type: ignore[arg-type]
        'mean_over is \'layer\'. Give "text" or "position".',
    ),
    "means over texts for positions": (
        lambda model: mh.ablate(
            model, "L0 H1", by="mean", reference=mh.head_means(model, [torch.randn(1, 4, 8)]), mean_over="position"
        ),
        (
            "mean_over is 'position', and the reference has means over 'text'. Compute it with mh.head_means(model, "
            'batches, over="position").'
        ),
    ),
    "a position before the first": (
        lambda model: mh.ablate(model, "L0 H1", positions=-1),
        "positions is -1. Give an integer of at least 0.",
    ),
    "a position that is no integer": (
        lambda model: mh.ablate(model, "L0 H1", positions=1.5),  # type: ignore[arg-type]
        "positions is 1.5. Give an integer of at least 0.",
    ),
    "no position": (
        lambda model: mh.ablate(model, "L0 H1", positions=[]),
        "positions is empty. Give the index of at least one token, or None for all.",
    ),
    "a slice from the end": (
        lambda model: mh.ablate(model, "L0 H1", positions=slice(-3, None)),
        "positions is slice(-3, None, None). Give a slice from 0, such as slice(1, None).",
    ),
    "a slice without steps": (
        lambda model: mh.ablate(model, "L0 H1", positions=slice(0, 3, 0)),
        "positions is slice(0, 3, 0). Give a slice from 0, such as slice(1, None).",
    ),
    "no sample": (
        lambda model: mh.ablate(model, "L0 H1", samples=[]),
        "samples is empty. Give the index of at least one sample, or None for all.",
    ),
    "a sample that is none": (
        lambda model: mh.ablate(model, "L0 H1", samples=["a"]),  # type: ignore[list-item]
        "samples is 'a'. Give an integer of at least 0.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_given_wrongly_is_one_sentence_before_anything_runs(name: str) -> None:
    model, x = Model(), torch.randn(2, 5, 8)
    before, hooked = model(x), hooks(model)
    make, sentence = BAD[name]
    with pytest.raises(ArgumentError) as caught:
        make(model)
    assert str(caught.value) == sentence
    assert (head_changes.active_changes, hooks(model)) == ((), hooked)
    assert torch.equal(model(x), before)


def ragged(model: nn.Module) -> None:
    model.first(torch.randn(2, 5, 8), lengths=(5, 3))


def in_a_cache(model: nn.Module) -> None:
    cache = mh.KeyValueCache()
    for _ in range(2):
        model.first(torch.randn(2, 3, 8), mask=masks.Causal(), cache=cache)


MISSED = (
    "was never reached inside the context. The layers that ran are {}. Run the given model and not a copy of it, with "
    "inputs that reach these layers and have the positions and samples."
)
LATE: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any], str]] = {
    "resample with one text": (
        lambda model: mh.ablate(model, "L0 H1", by="resample"),
        lambda model: model(torch.randn(1, 5, 8)),
        'by="resample" takes the output of another text, and the batch has one. Give several texts.',
    ),
    "resample with unequal lengths": (
        lambda model: mh.ablate(model, "L0 H1", by="resample"),
        ragged,
        'by="resample" needs texts of equal length, and they have 3 to 5 tokens. Cut the texts to one length.',
    ),
    "resample while decoding": (
        lambda model: mh.ablate(model, "L0 H1", by="resample"),
        in_a_cache,
        (
            'by="resample" needs whole texts, and this call continues texts with a cache. Run the model on whole '
            'texts, or use by="mean".'
        ),
    ),
    "a text longer than the reference": (
        lambda model: mh.ablate(model, "L0 H1", by="mean", reference=[torch.randn(2, 4, 8)], mean_over="position"),
        lambda model: model(torch.randn(1, 5, 8)),
        (
            "The text has a token at position 4, and the texts of the reference have 4 tokens. Give longer texts as "
            'reference, or use mean_over="text".'
        ),
    ),
    "a reference of single tokens": (
        lambda model: mh.ablate(model, "L0 H1", by="mean", reference=[torch.randn(2, 1, 8)]),
        lambda model: model(torch.randn(1, 5, 8)),
        (
            "The texts of the reference have a single token, so there is no mean of later tokens. Give longer texts "
            "as reference."
        ),
    ),
    "means of another model": (
        lambda model: mh.ablate(
            model, "L0 H1", by="mean", reference=mh.head_means(Model().second, [torch.randn(2, 4, 8)])
        ),
        lambda model: model(torch.randn(1, 5, 8)),
        "The reference has no means of first. Compute them with mh.head_means on this model.",
    ),
    "means of other heads": (
        lambda model: mh.ablate(
            model,
            "L0 H1",
            by="mean",
            reference=mh.HeadMeans({"first": torch.zeros(2, 2, 4)}, {"first": torch.ones(2, dtype=torch.int64)}),
        ),
        lambda model: model(torch.randn(1, 5, 8)),
        (
            "The reference has means of 2 heads of 4 numbers for first, which has 4 heads of 2. Compute them with "
            "mh.head_means on this model."
        ),
    ),
    "a head that one layer has and another has not": (
        lambda model: mh.ablate(model, "L1 H3"),
        lambda model: model(torch.randn(1, 5, 8)),
        "second, which ran as L1, has heads H0 to H1, and no H3. The nearest is L1 H1.",
    ),
    "two factors by two names": (
        lambda model: mh.scale_heads(model, {"L0 H1": 0.5, ("first", 1): 2}),
        lambda model: model(torch.randn(1, 5, 8)),
        "L0 H1 has the factors 0.5 and 2. Give it one.",
    ),
    "a factor of a layer and of its head": (
        lambda model: mh.scale_heads(model, {"L1": 0.5, "L1 H1": 0}),
        lambda model: model(torch.randn(1, 5, 8)),
        "L1 H1 has the factors 0.5 and 0. Give it one.",
    ),
    "a layer that does not run": (
        lambda model: mh.ablate(model, ["L0 H1", "L1 H0"]),
        lambda model: model.first(torch.randn(1, 5, 8)),
        "L1 H0 " + MISSED.format("L0 first"),
    ),
    "a model that does not run": (
        lambda model: mh.ablate(model, ["L0 H1", "L1 H0"]),
        lambda _: None,
        "L0 H1, L1 H0 " + MISSED.format("none"),
    ),
    "a copy": (
        lambda model: mh.ablate(model, "L0 H1"),
        lambda _: Model()(torch.randn(1, 5, 8)),
        "L0 H1 " + MISSED.format("none"),
    ),
    "a position that no text has": (
        lambda model: mh.ablate(model, "L0 H1", positions=9),
        lambda model: model(torch.randn(1, 5, 8)),
        "L0 H1 " + MISSED.format("L0 first, L1 second"),
    ),
    "a sample that no batch has": (
        lambda model: mh.ablate(model, "L0 H1", samples=[2]),
        lambda model: model(torch.randn(2, 5, 8)),
        "L0 H1 " + MISSED.format("L0 first, L1 second"),
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_does_not_fit_the_call_is_one_sentence_and_changes_nothing(name: str) -> None:
    model, x = Model(), torch.randn(2, 5, 8)
    before, hooked = model(x), hooks(model)
    make, run, sentence = LATE[name]
    with pytest.raises(MultiheadError) as caught, make(model):
        run(model)
    assert str(caught.value) == sentence
    assert (head_changes.active_changes, hooks(model)) == ((), hooked)
    assert torch.equal(model(x), before)


def test_a_model_that_the_library_does_not_reach_is_an_error() -> None:
    with pytest.raises(ModelError) as caught:
        mh.ablate(nn.TransformerEncoderLayer(8, 2), "L0 H1")
    assert str(caught.value) == (
        "TransformerEncoderLayer has no attention layer of this library or of a Hugging Face model. Call "
        "multihead.compat.torch_nn.replace(model, inplace=True) for layers of torch.nn, or build the model with "
        "mh.MultiHeadAttention."
    )

    def observed(layer: nn.Module) -> None:
        with mh.observe(layer):
            pass

    layer = family("llama").model.layers[0]
    advice = "LlamaDecoderLayer is a part of a Hugging Face model: give the whole model, and name layers of it."
    for act in (lambda: mh.ablate(layer, "L0 H1"), lambda: mh.use(layer), lambda: observed(layer)):
        with pytest.raises(ModelError) as caught:
            act()
        assert str(caught.value).endswith(f". {advice}")
    with pytest.raises(ModelError, match="No attention layer of Linear ran"):
        mh.head_means(nn.Linear(2, 2), [torch.randn(1, 2)])


def test_a_family_outside_the_interface_is_an_error_that_changes_nothing() -> None:
    import transformers as hf

    config = hf.FunnelConfig(
        vocab_size=50, d_model=16, n_head=2, d_head=8, d_inner=16, block_sizes=[1, 1], num_decoder_layers=1
    )
    model, inputs = hf.FunnelModel(config).eval(), {"input_ids": torch.arange(8)[None]}
    before, hooked = logits(model, inputs), hooks(model)
    for make in (
        lambda: mh.ablate(model, "L0 H1"),
        lambda: mh.scale_heads(model, {"L0 H1": 2}),
        lambda: mh.head_means(model, [inputs]),
    ):
        with pytest.raises(ModelError) as caught, make():
            logits(model, inputs)
        assert str(caught.value) == (
            "FunnelModel computes attention where it cannot be replaced: encoder.blocks.0.0.attention (and 2 more). "
            "FunnelRelMultiheadAttention computes its weights itself, without transformers' AttentionInterface. Use a "
            "family that supports transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5."
        )
        assert (head_changes.active_changes, hooks(model)) == ((), hooked)
    assert torch.equal(logits(model, inputs), before)
