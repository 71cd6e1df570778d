"""Rotated heads under autograd, the function transforms, torch.compile, export, autocast and without memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from multihead.rotary import Rotary
from tests.rotary.turning import BATCH, LENGTH, POSITIONS, ROTARIES, drawn, each, few

PLACES: dict[str, int | Tensor] = {"start": 2, "given": POSITIONS, "negative": POSITIONS - 5}


class TestGradients:
    # Positions give the angles, and a form says what is turned by them: each form has one kind, and one has each kind.
    @pytest.mark.parametrize(
        ("form", "positions"),
        [
            *zip(ROTARIES, itertools.cycle(PLACES), strict=False),
            *(("a part as neighbours", positions) for positions in PLACES),
        ],
    )
    def test_they_are_right_in_every_mode_of_autograd(self, form: str, positions: str) -> None:
        rotary, places = ROTARIES[form], PLACES[positions]
        x = drawn(length=LENGTH)[:, :1].detach().requires_grad_()
        function = lambda x: rotary.rotate(x, places)
        assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, x, fast_mode=True)  # a rotation is linear in x

    @each
    def test_the_gradient_of_a_rotation_is_the_rotation_backward(self, rotary: Rotary) -> None:
        x, cotangent = drawn().requires_grad_(), drawn()
        (found,) = torch.autograd.grad(rotary.rotate(x, 3), x, cotangent)
        backward = -torch.arange(3, 3 + LENGTH)[None]
        torch.testing.assert_close(found, rotary.rotate(cotangent, backward), rtol=0, atol=1e-13)

    @each
    def test_transforms_of_torch_func_agree_with_autograd(self, rotary: Rotary) -> None:
        x = drawn()
        expected = torch.autograd.grad(rotary.rotate(given := x.clone().requires_grad_(), 3).pow(3).sum(), given)[0]
        found = torch.func.grad(lambda x: rotary.rotate(x, 3).pow(3).sum())(x)
        torch.testing.assert_close(found, expected)
        samples = torch.func.vmap(lambda x: rotary.rotate(x[None], 3)[0])(x)
        torch.testing.assert_close(samples, rotary.rotate(x, 3))
        starts = torch.tensor([[3], [9]])
        rows = torch.func.vmap(lambda at: rotary.rotate(x, at[None] + torch.arange(LENGTH)))(starts)
        torch.testing.assert_close(rows[1], rotary.rotate(x, 9))
        _, tangent = torch.func.jvp(lambda x: rotary.rotate(x, 3), (x,), (x,))
        torch.testing.assert_close(tangent, rotary.rotate(x, 3))

    @each
    def test_tensors_of_a_transform_are_not_cached(self, rotary: Rotary) -> None:
        fresh = Rotary(base=rotary.base + 1, dim=rotary.dim, interleaved=rotary.interleaved, scaling=rotary.scaling)
        torch.func.grad(lambda x: fresh.rotate(x, 3).sum())(drawn())
        with torch.inference_mode():
            fresh.rotate(drawn(), 3)
            fresh.rotate(drawn(), POSITIONS)
        x = drawn().requires_grad_()
        (fresh.rotate(x, 3) + fresh.rotate(x, POSITIONS)).sum().backward()
        assert x.grad is not None

    @each
    @pytest.mark.parametrize("followed", [False, True], ids=["alone", "beside a gradient"])
    def test_a_tangent_passes(self, rotary: Rotary, followed: bool) -> None:
        x, direction = drawn().requires_grad_(followed), drawn()
        with forward_ad.dual_level():
            turned = forward_ad.unpack_dual(rotary.rotate(forward_ad.make_dual(x, direction), 3))
        torch.testing.assert_close(turned.tangent, rotary.rotate(direction, 3))


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_one_graph_serves_all_given_positions(self) -> None:
        """The other forms are exported with given positions below."""
        rotary = ROTARIES["yarn"]
        compiled = torch.compile(rotary.rotate, fullgraph=True, backend="eager", dynamic=True)
        compiled(drawn(torch.float32), POSITIONS)
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in (6, 9):
                x = drawn(torch.float32, length)
                positions = torch.randint(-4, 100, (BATCH, length))
                torch.testing.assert_close(compiled(x, positions), rotary.rotate(x, positions), rtol=0, atol=1e-6)

    @pytest.mark.parametrize(("name", "backend"), [("halves", "eager"), ("a part as neighbours", "aot_eager")])
    def test_one_graph_serves_all_starts_and_lengths(self, name: str, backend: str) -> None:
        rotary = ROTARIES[name]
        compiled = torch.compile(rotary.rotate, fullgraph=True, backend=backend, dynamic=True)
        compiled(drawn(torch.float32), 2)
        with torch.compiler.set_stance("fail_on_recompile"):
            for length, start in ((6, 3), (9, 40), (7, 5)):
                x = drawn(torch.float32, length)
                torch.testing.assert_close(compiled(x, start), rotary.rotate(x, start), rtol=0, atol=1e-6)

    @few
    def test_its_gradient_is_the_same(self, name: str) -> None:
        rotary = ROTARIES[name]
        x = drawn().requires_grad_()
        compiled = torch.compile(rotary.rotate, fullgraph=True, backend="aot_eager")
        (found,) = torch.autograd.grad(compiled(x, 3).pow(3).sum(), x)
        (expected,) = torch.autograd.grad(rotary.rotate(x, 3).pow(3).sum(), x)
        torch.testing.assert_close(found, expected)

    @few
    def test_it_is_exported(self, name: str) -> None:
        rotary = ROTARIES[name]

        class Turning(torch.nn.Module):
            def forward(self, x: Tensor, positions: Tensor) -> Tensor:
                return rotary.rotate(x, positions)

        x = drawn(torch.float32)
        length = torch.export.Dim("length", min=2)
        program = torch.export.export(Turning(), (x, POSITIONS), dynamic_shapes=({2: length}, {1: length}))
        x, positions = drawn(torch.float32, 9), torch.arange(9).expand(BATCH, 9)
        torch.testing.assert_close(program.module()(x, positions), rotary.rotate(x, 0), rtol=0, atol=1e-6)


@each
def test_tensors_without_memory_are_rotated(rotary: Rotary) -> None:
    x = drawn().to("meta")
    for positions in (3, POSITIONS.to("meta")):
        turned = rotary.rotate(x, positions)
        assert (turned.shape, turned.dtype, turned.device.type) == (x.shape, x.dtype, "meta")


@each
def test_autocast_changes_nothing(rotary: Rotary) -> None:
    x = drawn(torch.float32)
    expected = rotary.rotate(x, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotary.rotate(x, 3), expected)
        assert rotary.rotate(x.bfloat16(), 3).dtype == torch.bfloat16
