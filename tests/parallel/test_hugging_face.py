"""Hugging Face models on our kernels compute a sequence over ranks as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ModelError
from multihead.layer.sharding import slice_to_rank
from multihead.observation.record import Record
from multihead.parallel import context_parallel, parallelize, shard, unshard
from tests.families import VOCABULARY, family
from tests.parallel.processes import Processes
from tests.parallel.test_observation import agree
from tests.parallel.whole import whole

LENGTH = 16
WAYS = (("ring", "balanced"), ("ring", "contiguous"), ("ulysses", "balanced"), ("gather", "balanced"))
FLOAT32 = ("gemma2", "gpt_oss")  # they convert to it, or multiply in it only
LENGTHS = masks.Lengths((LENGTH, 11))


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def trained(name: str, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Return the outputs of a model for tokens, the gradients of its parameters, and the model's own output."""
    model = family(name)
    model = model if name in FLOAT32 else model.double()
    with mh.use(model):
        found = model(**inputs)
        output = found[1] if "labels" in inputs else found[0]
        output.square().sum().backward()
    return output.detach(), {key: each.grad for key, each in model.named_parameters() if each.grad is not None}, found


def split(group: Any, rank: int, name: str, strategy: Any, layout: Any, padded: bool) -> dict[str, Tensor]:
    part = shard(group, layout=layout, input_ids=ids(), attention_mask=torch.ones_like(ids()))
    inputs: dict[str, Tensor] = {key: part[key] for key in ("input_ids", "attention_mask")}
    inputs["position_ids"] = part.position_ids
    mask = LENGTHS if padded else masks.Full()
    with context_parallel(group, strategy=strategy, layout=layout, mask=mask):
        output, gradients, _ = trained(name, **inputs)
    for each in gradients.values():
        dist.all_reduce(each, group=group)
    return {"output": unshard(group, output, layout=layout), **gradients}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "bert", "modernbert"])
def test_outputs_and_gradients_are_those_of_one_process(four: Processes, name: str) -> None:
    output, gradients, _ = trained(name, input_ids=ids())
    tolerance = 1e-3 if name in FLOAT32 else 1e-8
    # What a rank computes depends on the strategy and the order, not on the family: two families try all of them.
    for strategy, layout in WAYS if name in ("llama", "gemma2") else WAYS[::2]:
        for found in four.results(split, name, strategy, layout, False, ranks=2):
            expected = {"output": output, **gradients}
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_padding_is_a_mask_of_the_whole_text(four: Processes) -> None:
    attention_mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])).long()
    output = trained("llama", input_ids=ids(), attention_mask=attention_mask)[0]
    for found in four.results(split, "llama", "ring", "balanced", True, ranks=2):
        for sample, length in enumerate((LENGTH, 11)):
            torch.testing.assert_close(found["output"][sample, :length], output[sample, :length], rtol=1e-8, atol=1e-8)


def loss_of_shifted_labels(group: Any, rank: int) -> Tensor:
    part = shard(group, layout="balanced", input_ids=ids(), labels=ids(), attention_mask=torch.ones_like(ids()))
    with context_parallel(group, layout="balanced"):
        _, _, found = trained(
            "llama",
            input_ids=part["input_ids"],
            attention_mask=part["attention_mask"],
            position_ids=part.position_ids,
            labels=part["labels"],
            shift_labels=part["labels"],
        )
    total = found.loss.detach() * (part["labels"] != -100).sum()
    dist.all_reduce(total, group=group)
    return total


def test_the_loss_of_shifted_labels_is_that_of_one_process(four: Processes) -> None:
    expected = trained("llama", input_ids=ids(), labels=ids())[2].loss.detach() * 2 * (LENGTH - 1)
    for found in four.results(loss_of_shifted_labels, ranks=2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def refused(group: Any, rank: int, inputs: dict[str, Any]) -> None:
    model = family("llama")
    with mh.use(model), context_parallel(group):
        model(input_ids=ids()[:, :8], **inputs)


def test_local_padding_is_rejected(four: Processes) -> None:
    attention_mask = torch.ones(2, 8, dtype=torch.int64)
    attention_mask[1, 6:] = 0
    for found in four.run(refused, {"attention_mask": attention_mask}, ranks=2):
        assert type(found) is ModelError
        assert str(found) == (
            "attention_mask hides tokens of this rank, and in context_parallel masks are those of the whole sequence. "
            "Give attention_mask=torch.ones_like(input_ids), and context_parallel(..., mask=masks.Lengths(lengths))."
        )


def test_documents_that_a_model_reads_from_positions_are_rejected(four: Processes) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 12, 13, 14, 15]])  # of a balanced layout
    for found in four.run(refused, {"position_ids": positions, "use_cache": False}, ranks=2):
        assert type(found) is ModelError
        parts = ("Documents(<int64 tensor (2, 2)>)", "Causal()")  # in an order that depends on transformers
        assert str(found) in [
            f"The model's mask of this rank's tokens is {' & '.join(mask)}, which does not determine the mask of the "
            "whole sequence. Give attention_mask=torch.ones_like(input_ids), so that the model reads no documents from "
            "positions, and the documents to context_parallel(..., mask=masks.Documents(lengths))."
            for mask in (parts, parts[::-1])
        ]


def test_weights_of_a_model_are_rejected(four: Processes) -> None:
    for found in four.run(refused, {"output_attentions": True}, ranks=2):
        assert type(found) is ArgumentError
        assert str(found) == (
            "output_attentions=True cannot be used in context_parallel, where a rank has part of the tokens. Compute "
            "the weights outside, from all tokens."
        )


def decoder(name: str, **options: Any) -> Any:
    """Make a tiny decoder whose norms are random, so that their gradients differ."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    others = {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 8, "initializer_range": 0.4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(hf, f"{name}Config")(**{**sizes, **others, **options}, pad_token_id=0)
        model = getattr(hf, f"{name}Model")(config)
        for key, each in model.named_parameters():
            if "norm" in key:
                torch.nn.init.normal_(each, mean=1, std=0.3)
    return model.eval()


SPLIT: dict[str, tuple[Callable[[], Any], int]] = {
    "llama": (partial(family, "llama"), 2),
    "fewer key/value heads than ranks": (partial(decoder, "Llama"), 4),
    "norms of heads": (partial(decoder, "Qwen3"), 2),
    "norms of heads, and fewer key/value heads than ranks": (partial(decoder, "Qwen3"), 4),
    "sinks": (partial(family, "gpt_oss"), 2),
    "one projection by heads": (partial(decoder, "GPTNeoX"), 2),
}


def made(name: str) -> Any:
    model = SPLIT[name][0]()
    return model if name == "sinks" else model.double()


def of_model(model: Any) -> dict[str, Tensor]:
    with mh.use(model):
        output = model(input_ids=ids())[0]
        output.square().sum().backward()
    gradients = {key: whole(each.grad) for key, each in model.named_parameters() if each.grad is not None}
    return {"output": output.detach(), **gradients}


def by_heads(group: Any, rank: int, name: str) -> dict[str, Tensor]:
    return of_model(parallelize(made(name), DeviceMesh.from_group(group, "cpu")))


@pytest.mark.parametrize("name", SPLIT)
def test_heads_are_split_over_ranks(four: Processes, name: str) -> None:
    tolerance = 1e-3 if name == "sinks" else 1e-8
    expected = of_model(made(name))
    for found in four.results(by_heads, name, ranks=SPLIT[name][1]):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


INSTEAD = "Split the sequence instead, with context_parallel."
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "columns of all queries first": (
        partial(family, "gpt2"),
        (
            "transformer.h.0.attn projects queries, keys and values together, by c_attn, and not head by head: a rank "
            f"cannot have the columns of its heads alone. {INSTEAD}"
        ),
    ),
    "a norm of all heads": (
        partial(decoder, "Olmo2"),
        f"layers.0.self_attn has q_norm.weight, which parallelize cannot split by heads. {INSTEAD}",
    ),
    "heads that do not divide": (
        partial(decoder, "Llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3),
        (
            "layers.0.self_attn has 6 heads and 3 key/value heads, which cannot be divided over 4 ranks. Use one of "
            "these numbers of ranks: 1, 3, 6."
        ),
    ),
    "other names": (
        lambda: torch.nn.Sequential(family("bert")),
        (
            "Sequential contains no MultiHeadAttention, and no attention layer of transformers with q_proj, k_proj, "
            "v_proj and o_proj. Split the layers of other libraries with "
            "torch.distributed.tensor.parallel.parallelize_module."
        ),
    ),
}


def heads_of(group: Any, rank: int, name: str) -> None:
    parallelize(REFUSED[name][0](), DeviceMesh.from_group(group, "cpu"))


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_cannot_be_split_are_rejected(four: Processes, name: str) -> None:
    for found in four.run(heads_of, name):
        assert type(found) is ArgumentError
        assert str(found) == REFUSED[name][1]


def of_other_heads(group: Any, rank: int) -> None:
    model = parallelize(decoder("Llama"), DeviceMesh.from_group(group, "cpu"))
    q = torch.zeros(2, 4, 8, 8)  # what view(batch, -1, num_heads, head_dim) makes of two heads of 16 tokens
    slice_to_rank(model.layers[0].self_attn, q, q[:, :2], q[:, :2], None)


def test_a_layer_that_returns_other_heads_is_an_error(four: Processes) -> None:
    for found in four.run(of_other_heads, ranks=2):
        assert type(found) is ModelError
        assert str(found) == (
            "LlamaAttention returns 4 heads and 2 key/value heads, and this rank has 2 of 4: the layer does not take "
            f"their number from its projections. {INSTEAD}"
        )


def observed(group: Any, rank: int, by: str) -> Record | None:
    model = made("fewer key/value heads than ranks" if by == "heads" else "llama")
    if by == "heads":
        parallelize(model, DeviceMesh.from_group(group, "cpu"))
        with mh.observe(model, special_ids=(3, 4)) as seen, torch.no_grad():
            model(input_ids=ids())
        return seen.reduce(group)
    part = shard(group, layout="balanced", input_ids=ids(), attention_mask=torch.ones_like(ids()))
    with mh.observe(model, special_ids=(3, 4)) as seen, torch.no_grad(), context_parallel(group, layout="balanced"):
        model(**part.tensors, position_ids=part.position_ids)
    return seen.reduce(group)


@pytest.mark.parametrize(("by", "ranks"), [("heads", 4), ("tokens", 2)])
def test_the_joined_record_is_that_of_one_process(four: Processes, by: str, ranks: int) -> None:
    model = made("fewer key/value heads than ranks" if by == "heads" else "llama")
    with mh.observe(model, special_ids=(3, 4)) as seen, torch.no_grad():
        model(input_ids=ids())
    agree(four.results(observed, by, ranks=ranks)[0], seen)
