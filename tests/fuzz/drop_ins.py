"""Entry points: the drop-in classes, against the originals and their formulas in float64."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from multihead.compat import annotated, d2l
from multihead.compat.torch_nn import MultiheadAttention, from_torch
from tests import oracle
from tests.compat.originals import Book, Harvard, Tutorial
from tests.fuzz.draw import Draw, Mismatch, check_error
from tests.fuzz.on_device import CPU, moved, on_device

WIDTH = 12
SLACK = 8


def randomise(draw: Draw, module: nn.Module) -> None:
    generator = draw.generator("parameters")
    with torch.no_grad():
        for parameter in module.parameters():
            numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(numbers * (0.7 if parameter.dim() > 1 else 0.3))


def compare(name: str, ours: Tensor, exact: Tensor, plain: Tensor, size: float = 1.0) -> None:
    """Compare with the original in float64, by what it loses in the dtype; its NaN are left out.

    Args:
        name: of the result.
        ours: the result.
        exact: that of the original in float64.
        plain: that of the original.
        size: of the largest number that was rounded on the way.
    """
    if ours.shape != exact.shape:
        raise Mismatch(f"{name} has another shape: {tuple(ours.shape)} instead of {tuple(exact.shape)}")
    left_out = exact.isnan()
    exact, plain, ours = (torch.where(left_out, 0, each.detach()) for each in (exact, plain, ours))
    allowed = SLACK * (oracle.budget(exact.double(), plain) + 16 * size * torch.finfo(ours.dtype).eps)
    check_error(name, oracle.difference(ours, exact.double()), allowed)


def torch_nn(draw: Draw) -> None:
    """nn.MultiheadAttention and its drop-in: outputs, weights and gradients, with any mask and layout."""
    heads = draw.pick("heads", 1, 2, 3, 4)
    options: dict[str, Any] = {
        "bias": draw.feature("no bias", True, False, share=0.2),
        "add_bias_kv": draw.has("add_bias_kv", 0.15),
        "add_zero_attn": draw.has("add_zero_attn", 0.15),
        "batch_first": draw.has("batch_first", 0.6),
    }
    crossing = draw.has("crossing", 0.4)
    if crossing and draw.has("other widths", 0.4):
        options |= {"kdim": 5, "vdim": 7}
    theirs = nn.MultiheadAttention(WIDTH, heads, **options).eval()
    randomise(draw, theirs)
    dtype = draw.feature("dtype", torch.float32, torch.float64, share=0.3)
    theirs = theirs.to(dtype)
    ours = MultiheadAttention(WIDTH, heads, **options).to(dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    batch = draw.pick("batch", 1, 2, 3)
    queries = draw.size("queries", 1, 2, 3, 5, 8, 17, 33)
    keys = draw.size("keys", 1, 2, 4, 5, 8, 16, 33) if crossing else queries
    widths = {"query": WIDTH, "key": options.get("kdim", WIDTH), "value": options.get("vdim", WIDTH)}
    x = draw.normal("query", batch, queries, widths["query"]).to(dtype)
    given = {"query": x, "key": x, "value": x}
    if crossing:
        given["key"] = draw.normal("key", batch, keys, widths["key"]).to(dtype)
        given["value"] = draw.normal("value", batch, keys, widths["value"]).to(dtype)
    call, visible = _masks(draw, dtype, (batch, heads, queries, keys))
    call["need_weights"] = draw.has("need_weights", 0.6)
    call["average_attn_weights"] = draw.pick("averaged", True, False)
    draw.notes |= {"options": options, "sizes": (batch, heads, queries, keys), "call": sorted(call), "dtype": dtype}
    _compare_torch(draw, theirs, ours, given, call, visible, batch_first=bool(options["batch_first"]))
    if not crossing and draw.has("converted", 0.3):
        converted = from_torch(theirs)
        if "attn_mask" not in call and "key_padding_mask" not in call:
            exact = copy.deepcopy(theirs).double()(*_turned(given, torch.float64, options), need_weights=True)[0]
            plain = theirs(*_turned(given, dtype, options), need_weights=True)[0]
            turned = (each if options["batch_first"] else each.transpose(0, 1) for each in (exact, plain))
            compare("the output of from_torch", converted(x), *turned)


def _turned(given: dict[str, Tensor], dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    found = [each.to(dtype) for each in given.values()]
    return found if options["batch_first"] else [each.transpose(0, 1) for each in found]


def _masks(draw: Draw, dtype: torch.dtype, cells: tuple[int, int, int, int]) -> tuple[dict[str, Any], Tensor]:
    """The masks of a call, and (batch, queries) bool: the queries that see a key."""
    batch, heads, queries, keys = cells
    call: dict[str, Any] = {}
    hidden = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    if draw.has("attn_mask", 0.5):
        kind = draw.pick("kind of attn_mask", "causal", "2D", "3D", "float", "float 3D")
        shape = (batch * heads, queries, keys) if "3D" in kind else (queries, keys)
        drawn = draw.cells("attn_mask", shape, 0.35)
        if kind == "causal":
            drawn = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        call["attn_mask"] = drawn
        if "float" in kind:
            call["attn_mask"] = draw.normal("float attn_mask", *shape).to(dtype).masked_fill(drawn, -torch.inf)
        hidden = hidden | (drawn.view(batch, heads, queries, keys) if "3D" in kind else drawn)
        draw.notes["attn_mask"] = kind
    if draw.has("key_padding_mask", 0.4):
        drawn = draw.cells("key_padding_mask", (batch, keys), 0.3)
        call["key_padding_mask"] = drawn
        if call.get("attn_mask", drawn).dtype != torch.bool:
            call["key_padding_mask"] = torch.zeros(drawn.shape, dtype=dtype).masked_fill(drawn, -torch.inf)
        hidden = hidden | drawn[:, None, None]
    return call, ~hidden.all(-1).any(1)


def _compare_torch(
    draw: Draw,
    theirs: nn.MultiheadAttention,
    ours: nn.MultiheadAttention,
    given: dict[str, Tensor],
    call: dict[str, Any],
    visible: Tensor,
    *,
    batch_first: bool,
) -> None:
    results = []
    for module, dtype in (
        (ours, ours.out_proj.weight.dtype),
        (theirs, None),
        (copy.deepcopy(theirs).double(), torch.float64),
    ):
        kind = theirs.out_proj.weight.dtype if dtype is None else dtype
        leaves: dict[int, Tensor] = {}
        turned = []
        for each in given.values():  # one tensor that is given twice is one leaf
            leaf = leaves.setdefault(id(each), each.detach().to(kind).clone().requires_grad_())
            turned.append(leaf if batch_first else leaf.transpose(0, 1))
        converted = {n: e.to(kind) if isinstance(e, Tensor) and e.is_floating_point() else e for n, e in call.items()}
        if module is not ours:
            converted["need_weights"] = True
        every = bool(visible.all()) or bool(theirs.bias_k is not None) or theirs.add_zero_attn
        grads: tuple[Tensor, ...] = ()
        with on_device(module) if module is ours else nullcontext():
            output, weights = module(*turned, **converted)
            output = output if batch_first else output.transpose(0, 1)
            if every and not draw.pick("without gradients", True, False, False):
                of_output = draw.normal("gradient of output", *output.shape).to(output.dtype)
                grads = torch.autograd.grad(output, [*leaves.values(), *module.parameters()], of_output)
        results.append((output, weights, moved(grads, CPU)))
    (output, weights, grads), plain, exact = results
    compare("output", output, exact[0], plain[0])
    if call["need_weights"]:
        assert weights is not None
        compare("weights", weights, exact[1], plain[1])
    size = max((float(each.abs().max()) for each in exact[2] if each.numel()), default=1.0)
    for value, right, near in zip(grads, exact[2], plain[2], strict=True):
        compare("a gradient", value, right, near, max(1.0, size))


def tutorials(draw: Draw) -> None:
    """The classes of textbooks and tutorials: d2l, (d_model, h) and Harvard's."""
    kind = draw.pick("kind", "d2l", "tutorial", "harvard")
    heads, batch = draw.pick("heads", 1, 2, 3), draw.pick("batch", 1, 2, 3)
    queries, keys = draw.size("queries", 1, 2, 5, 8, 17), draw.size("keys", 1, 2, 5, 9, 16)
    draw.notes |= {"kind": kind, "sizes": (batch, heads, queries, keys)}
    x, memory = draw.normal("x", batch, queries, WIDTH), draw.normal("memory", batch, keys, WIDTH)
    mask: Tensor | None = None
    book: Any
    made: Any
    if kind == "d2l":
        book, made = (
            Book(WIDTH, WIDTH, WIDTH, WIDTH, heads, 0.0),
            d2l.MultiHeadAttention(WIDTH, WIDTH, WIDTH, WIDTH, heads, 0.0),
        )
        if draw.has("mask", 0.7):
            shape = draw.pick("lengths", (batch,), (batch, queries))
            mask = torch.randint(1, keys + 1, shape, generator=draw.generator("lengths"))
    else:
        tutorial = kind == "tutorial"
        book = Tutorial(WIDTH, heads) if tutorial else Harvard(heads, WIDTH)
        made = (
            annotated.MultiHeadAttention(WIDTH, heads, 0.0)
            if tutorial
            else annotated.MultiHeadedAttention(heads, WIDTH, 0.0)
        )
        if draw.has("mask", 0.7):
            shape = draw.pick("shape of mask", (1, queries, keys), (batch, queries, keys))
            shown = draw.cells("shown", shape, 0.6)
            shown[..., 0] = True
            mask = shown.to(draw.pick("dtype of mask", torch.bool, torch.int64, torch.float32))
            mask = mask[:, None] if tutorial else mask
    randomise(draw, book)
    made.load_state_dict(book.state_dict())
    exact = copy.deepcopy(book).double()(x, memory, memory, mask)
    plain = book(x.float(), memory.float(), memory.float(), mask)
    found = made(x.float(), memory.float(), memory.float(), mask)
    if isinstance(found, tuple):
        compare("weights", found[1], exact[1], plain[1])
        found, exact, plain = found[0], exact[0], plain[0]
    compare("output", found, exact, plain)
