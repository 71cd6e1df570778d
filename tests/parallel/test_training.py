"""Split sequences and heads under DistributedDataParallel, FSDP2, torch.compile and torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import multihead as mh
from multihead import masks
from multihead.parallel import context_parallel, parallelize, shard, unshard
from tests.parallel.processes import Processes
from tests.parallel.whole import whole

MASK = masks.Causal() & masks.Window(5)


class Model(nn.Module):
    """Layers with a residual path."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(7)
        options: dict[str, Any] = {"num_kv_heads": 2, "rotary": mh.Rotary(), "sinks": True}
        self.layers = nn.ModuleList(mh.MultiHeadAttention(16, 4, **options) for _ in range(layers))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=MASK)
        return x


def data() -> tuple[Tensor, Tensor]:
    x, gradient = torch.randn(2, 4, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    return x, gradient


def in_one_process(layers: int = 2, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    model, (x, gradient) = Model(layers).to(dtype), (each.to(dtype) for each in data())
    output = model(x)
    (output * gradient).sum().backward()
    return {"output": output.detach()} | {key: each.grad for key, each in model.named_parameters()}  # type: ignore[misc]


def wrapped(group: Any, rank: int, way: str) -> dict[str, Tensor]:
    """Train on two halves of the batch, each split over two ranks; or on the whole batch, with heads split too."""
    names = ("cp", "tp") if way == "FSDP2 and heads" else ("dp", "cp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model, (x, gradient) = Model(), data()
    module: Any = model
    averaged = 4  # ranks over which gradients are averaged
    if way == "FSDP2 and heads":
        parallelize(model, mesh["tp"])
        averaged = 2
    else:
        samples = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
        x, gradient = x[samples], gradient[samples]
    if way == "DistributedDataParallel":
        module = DistributedDataParallel(model, process_group=group)
    else:
        over = mesh["cp"] if way == "FSDP2 and heads" else DeviceMesh.from_group(group, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
    part = shard(mesh["cp"], mask=MASK, x=x, gradient=gradient)
    with context_parallel(mesh["cp"], layout=part.layout):
        output = module(part["x"])
        ((output * part["gradient"]).sum() * averaged).backward()
    joined = unshard(mesh["cp"], output.detach(), layout=part.layout)
    if way != "FSDP2 and heads":
        halves = [torch.empty_like(joined) for _ in range(2)]
        dist.all_gather(halves, joined, group=mesh["dp"].get_group())
        joined = torch.cat(halves)
    return {"output": joined} | {key: whole(each.grad) for key, each in model.named_parameters()}


@pytest.mark.parametrize("way", ["DistributedDataParallel", "FSDP2", "FSDP2 and heads"])
@pytest.mark.filterwarnings("ignore")
def test_wrapped_models_train_as_in_one_process(four: Processes, way: str) -> None:
    expected = in_one_process()
    for found in four.results(wrapped, way):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def saved(group: Any, rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = parallelize(Model(), mesh["tp"])
    fully_shard(model, mesh=mesh["cp"])
    checkpoints.save(model.state_dict(), checkpoint_id=folder)


def loaded(group: Any, rank: int, folder: Path) -> Tensor:
    model, (x, _) = Model(), data()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parallelize(model, DeviceMesh.from_group(group, "cpu"))
    state = model.state_dict()
    checkpoints.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state)
    output: Tensor = model(x)
    return output.detach()


def test_a_checkpoint_of_fsdp2_and_heads_on_four_ranks_loads_on_two(four: Processes, tmp_path: Path) -> None:
    four.results(saved, tmp_path)
    for found in four.results(loaded, tmp_path, ranks=2):
        torch.testing.assert_close(found, in_one_process()["output"], rtol=1e-9, atol=1e-9)


def compiled(group: Any, rank: int) -> dict[str, Tensor]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, (x, gradient) = Model(), data()
    part = shard(group, layout="balanced", x=x, gradient=gradient)
    module: Any = torch.compile(model, backend="eager")  # split heads, below, go through AOTAutograd
    for _ in range(2):
        model.zero_grad()
        with context_parallel(group, strategy="ring", layout=part.layout):
            output = module(part["x"])
            (output * part["gradient"]).sum().backward()
    # Before, between and after the attention of a layer; equal layers share their graphs, and so do later steps.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    joined = unshard(group, output.detach(), layout=part.layout)
    return {"output": joined} | {key: each.grad for key, each in model.named_parameters()}  # type: ignore[misc]


def test_compiled_models_train_as_in_one_process(four: Processes) -> None:
    for found in four.results(compiled, ranks=2):
        torch.testing.assert_close(found, in_one_process(), rtol=1e-9, atol=1e-9)


def compiled_heads(group: Any, rank: int) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = parallelize(Model(1).float(), DeviceMesh.from_group(group, "cpu"))
    x, gradient = (each.float() for each in data())
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    (output * gradient).sum().backward()
    return {"output": output.detach()} | {key: whole(each.grad) for key, each in model.named_parameters()}


def test_split_heads_are_compiled_in_one_graph(four: Processes) -> None:
    """In float32, where attention is one operator: that of the reference kernel is a graph of hundreds."""
    for found in four.results(compiled_heads, ranks=2):
        torch.testing.assert_close(found, in_one_process(1, torch.float32), rtol=1e-4, atol=1e-5)


def in_one_graph(group: Any, rank: int) -> tuple[str, str]:
    torch._dynamo.reset()
    layer, x = mh.MultiHeadAttention(8, 2), torch.zeros(1, 4, 8)
    with context_parallel(group):
        try:
            torch.compile(layer, backend="eager", fullgraph=True)(x)
        except torch._dynamo.exc.Unsupported as error:
            return str(error), str(layer.explain(x))
    return "", ""


def test_a_split_sequence_in_one_graph_is_an_error_with_the_reason_that_explain_shows(four: Processes) -> None:
    for error, explained in four.results(in_one_graph, ranks=2):
        assert (
            "(reason: ranks exchange tensors in attention over a split sequence, so leave out fullgraph=True)" in error
        )
        assert "compile  outside of the graphs of torch.compile, so fullgraph=True raises an error" in explained
