"""torch.export: a layer with its mask becomes a program for any batch and length, and gives what it gave."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from multihead import attention, masks
from tests.ecosystem.ways import EMBED, layer

SIZES = ((3, 7), (2, 2), (5, 13), (8, 31))  # (batch, length)
MASKS: dict[str, Callable[[Tensor], masks.Mask]] = {
    "full": lambda _: masks.Full(),
    "causal": lambda _: masks.Causal(),
    "window": lambda _: masks.Causal() & masks.Window(3),
    "lengths": masks.Lengths,
    "causal lengths": lambda lengths: masks.Causal() & masks.Lengths(lengths),
    "prefix": lambda lengths: masks.Causal() | masks.Prefix(lengths),
}


class Masked(nn.Module):
    """A layer with its mask inside; the lengths come from outside."""

    def __init__(self, mask: Callable[[Tensor], masks.Mask]) -> None:
        super().__init__()
        self.attend, self.mask = layer(num_kv_heads=2), mask

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.attend(x, mask=self.mask(lengths))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Blocked(masks.Mask):
    """A mask of one's own."""

    size: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries // self.size == keys // self.size


class Padded(nn.Module):
    """A layer that leaves padding out."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = layer()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.attend(x, lengths=lengths, mask=masks.Causal())  # type: ignore[no-any-return]


class Crossing(nn.Module):
    """Cross-attention to a padded memory."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = layer()

    def forward(self, x: Tensor, memory: Tensor, memory_lengths: Tensor) -> Tensor:
        return self.attend(x, memory, memory_lengths=memory_lengths)  # type: ignore[no-any-return]


def given(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, EMBED), torch.randint(0, length + 1, (batch,))


def exported(model: nn.Module) -> ExportedProgram:
    """Export a model of x and lengths, for any batch and length."""
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=512)
    shapes = {"x": {0: batch, 1: length}, "lengths": {0: batch}}
    return torch.export.export(model, given(3, 7), dynamic_shapes=shapes)


def assert_same(program: ExportedProgram, model: nn.Module) -> None:
    again = program.module()
    for size in SIZES:
        inputs = given(*size)
        torch.testing.assert_close(again(*inputs), model(*inputs))


@pytest.mark.parametrize("name", MASKS)
def test_a_layer_with_its_mask_inside_is_exported_for_any_batch_and_length(name: str) -> None:
    model = Masked(MASKS[name]).eval()
    assert_same(exported(model), model)


def test_cross_attention_is_exported_with_two_lengths_of_its_own() -> None:
    model = Crossing().eval()
    batch, queries, keys = Dim("batch", min=2, max=64), Dim("queries", min=2, max=512), Dim("keys", min=2, max=512)
    shapes = {"x": {0: batch, 1: queries}, "memory": {0: batch, 1: keys}, "memory_lengths": {0: batch}}
    x, memory, lengths = torch.randn(3, 7, EMBED), *given(3, 9)
    again = torch.export.export(model, (x, memory, lengths), dynamic_shapes=shapes).module()
    for count, keys_here in SIZES:
        x, (memory, lengths) = torch.randn(count, 5, EMBED), given(count, keys_here)
        torch.testing.assert_close(again(x, memory, lengths), model(x, memory, lengths))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_layer_that_leaves_padding_out_is_exported_for_any_batch_and_lengths_and_loaded_in_a_new_process(
    tmp_path: Path,
) -> None:
    """A trace is loaded there, too.

    Their operators are registered without anything of multihead being used, here where torch is imported first. Then a
    compiled function may be the first to use it, and all names are there.
    """
    model, (x, _) = Padded().eval(), given(*SIZES[0])
    program = exported(model)
    assert_same(program, model)
    torch.export.save(program, tmp_path / "program.pt2")
    traced: Any = torch.jit.trace(lambda x: attention(x, x, x), (x[:, None],), check_trace=False)
    torch.jit.save(traced, str(tmp_path / "trace.pt"))
    torch.save([(*inputs, model(*inputs)) for inputs in (given(*size) for size in SIZES)], tmp_path / "calls.pt")
    code = """
        import torch, multihead
        program, calls = torch.export.load("program.pt2").module(), torch.load("calls.pt")
        for x, lengths, expected in calls:
            torch.testing.assert_close(program(x, lengths), expected)
        print(torch.jit.load("trace.pt")(calls[0][0][:, None]).shape)

        import pickle, multihead as mh
        q = torch.randn(1, 2, 4, 8)
        print("attention" in vars(mh))
        call = torch.compile(lambda q: mh.attention(q, q, q, mask=mh.masks.Causal()), backend="eager", fullgraph=True)
        print(torch.allclose(call(q), mh.attention(q, q, q, mask=mh.masks.Causal()), atol=1e-6))
        print(set(dir(mh)) == {*mh.__all__, "__version__"})
        print(type(pickle.loads(pickle.dumps(mh.MultiHeadAttention(8, 2)))))
    """
    assert in_a_new_process(dedent(code), tmp_path).splitlines() == [
        *(f"torch.Size({[3, 1, 7, EMBED]})", "False", "True", "True"),
        "<class 'multihead.layer.attention.MultiHeadAttention'>",
    ]


def test_operators_are_registered_where_torch_is_imported_last(tmp_path: Path) -> None:
    found = in_a_new_process("import multihead.masks, torch\nprint(torch.ops.multihead.attention)", tmp_path)
    assert found == "multihead.attention\n"


def in_a_new_process(code: str, folder: Path) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


KEPT = torch.rand(7, 7) > 0.3
GIVEN: dict[str, masks.Mask] = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "and": masks.Causal() & masks.Window(3),
    "or": masks.Causal() | masks.Prefix(2),
    "lengths": masks.Lengths((7, 4, 0)),
    "own": Blocked(2),
    "own and": Blocked(2) & masks.Causal(),
    "tensor": masks.Keep(KEPT, "queries keys"),
    "and tensor": masks.Causal() & masks.Lengths(torch.tensor([7, 4, 1])),
}


# A strict export reads masks as torch.compile does, under which test_compile.py calls those of the package.
@pytest.mark.parametrize(
    ("name", "strict"), [*((name, False) for name in GIVEN), ("own and", True), ("and tensor", True)]
)
def test_a_mask_is_an_argument_of_a_program(name: str, strict: bool) -> None:
    attend, mask, x = layer(), GIVEN[name], torch.randn(3, 7, EMBED)
    program = torch.export.export(attend, (x,), {"mask": mask}, strict=strict).module()
    torch.testing.assert_close(program(x, mask=mask), attend(x, mask=mask))


def test_tensors_of_a_mask_are_inputs_of_the_program_and_all_else_is_constant() -> None:
    attend, x = layer(), torch.randn(3, 7, EMBED)
    made = masks.Causal() & masks.Lengths(torch.tensor([7, 4, 1]))
    program = torch.export.export(attend, (x,), {"mask": made}, strict=False).module()
    other = masks.Causal() & masks.Lengths(torch.tensor([2, 0, 5]))
    torch.testing.assert_close(program(x, mask=other), attend(x, mask=other))
    with pytest.raises(ValueError, match="tree spec"):
        program(x, mask=masks.Window(2) & masks.Lengths(torch.tensor([2, 0, 5])))


def test_a_program_holds_the_attention_as_one_operator_and_the_parameters_by_their_names() -> None:
    program = exported(Masked(MASKS["causal"]).eval())
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("multihead" in call for call in calls) == 1
    names = [
        f"attend.{name}.{part}" for name in ("q_proj", "k_proj", "v_proj", "out_proj") for part in ("weight", "bias")
    ]
    assert list(program.state_dict) == names
