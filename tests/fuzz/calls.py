"""Entry points that are functions: attention, its logsumexp, its weights and its statistics."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import MultiheadError
from multihead.scores.bias import RelativeBias
from tests import oracle
from tests.drawing import Sizes
from tests.fuzz.draw import Draw, Mismatch
from tests.fuzz.judge import Call, compare, judge, masked_cotangents, outside, sentence
from tests.fuzz.masks import drawn_mask, drawn_start
from tests.fuzz.memory import laid_out
from tests.fuzz.on_device import ELSEWHERE, there

SMALL = (1, 2, 3, 4, 5, 5, 6, 7, 8, 9)
EDGES = (11, 12, 13, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97)
FAR_EDGES = (127, 128, 129, 255, 256, 257, 300)
HEAD_DIMS = (1, 2, 3, 4, 4, 8, 8, 16, 17)
ELSEWHERE_DIMS = (8, 16, 16, 17, 24, 32, 64)  # compiled flex_attention takes those from 16 on
MOST_CELLS = 120_000
SINGLE = torch.float32
HALVES = (torch.bfloat16, torch.float16)
OUTER = (torch.nan, torch.inf, -torch.inf, -0.0, 1e-40, "max", "-max", "0.9 max", 1e30, -1e20)


def drawn_size(draw: Draw) -> Sizes:
    """Draw the sizes of a call: small ones, and some around the edges of tiles."""
    kv_heads = draw.size("kv heads", 1, 1, 2, 3)
    queries, keys = (drawn_length(draw, name) for name in ("queries", "keys"))
    if draw.has("square", 0.45):
        queries = keys
    head_dim = draw.size("head_dim", *(ELSEWHERE_DIMS if ELSEWHERE else HEAD_DIMS))
    if draw.has("wide heads", 0.06):
        head_dim = draw.size("wide head_dim", 31, 32, 33, 64, 65, 96, 128)
    batch = draw.size("batch", 1, 1, 1, 2, 2, 3)
    size = Sizes(
        batch=0 if draw.has("empty batch", 0.03) else batch,
        heads=kv_heads * draw.size("group", 1, 1, 2, 3, 4),
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=draw.size("value_dim", 1, 2, 3, 5, 8, 16, 33) if draw.has("value_dim", 0.3) else head_dim,
    )
    while size.batch * size.heads * size.queries * size.keys > MOST_CELLS:
        size = replace(size, batch=1, heads=1, kv_heads=1) if size.heads > 1 else replace(size, batch=1, queries=33)
    return size


def drawn_length(draw: Draw, name: str) -> int:
    if draw.has(f"no {name}", 0.02):
        return 0
    if draw.has(f"many {name}", 0.1):
        far = draw.has(f"very many {name}", 0.15)
        return draw.size(f"many {name}", *(FAR_EDGES if far else EDGES))
    return draw.size(name, *SMALL)


def drawn_dtype(draw: Draw) -> torch.dtype:
    if not draw.has("dtype", 0.45):
        return SINGLE
    return draw.pick("which dtype", torch.float64, torch.float64, *HALVES)


class Drawn:
    """The arguments of a call, and the call as the judge takes it.

    Attributes:
        size, dtype: of the call.
        mask, start: as they are given.
        options: bias, softcap, sinks and scale, as they are given.
        call: the same for the judge.
    """

    def __init__(self, draw: Draw, *, values: bool = True) -> None:
        self.draw, self.size, self.dtype = draw, drawn_size(draw), drawn_dtype(draw)
        size = self.size
        self.mask, self.start = drawn_mask(draw, size), drawn_start(draw, size)
        draw.notes |= {"size": size.cells, "kv_heads": size.kv_heads, "dims": (size.head_dim, size.value_dim)}
        draw.notes |= {"dtype": str(self.dtype).removeprefix("torch."), "mask": self.mask, "query_start": self.start}
        seen = oracle.shown(self.mask, size.cells, self.start)
        dense = self._bias(seen)
        self.call = self._call(seen, dense, values=values)
        self.options: dict[str, Any] = {
            "softcap": draw.feature("softcap", None, 0.5, 3.0, 30.0, share=0.1),
            "sinks": self.call.sinks,
            "scale": draw.feature("scale", None, 1.0, 0.3, 0.0, -0.5, 40.0, share=0.2),
        }
        self.call.softcap, self.call.scale = self.options["softcap"], self.options["scale"]
        self.options["bias"] = dense
        if dense is not None and size.queries and size.keys and draw.has("relative bias", 0.15):
            self._make_relative()
        self.options = {name: each for name, each in self.options.items() if each is not None}
        draw.notes |= {name: each for name, each in self.options.items() if not isinstance(each, Tensor)}

    def _call(self, seen: Tensor, bias: Tensor | None, *, values: bool) -> Call:
        draw, size = self.draw, self.size
        shapes = {
            "q": (size.batch, size.heads, size.queries, size.head_dim),
            "k": (size.batch, size.kv_heads, size.keys, size.head_dim),
            "v": (size.batch, size.kv_heads, size.keys, size.value_dim),
        }
        hidden = ~seen if bias is None else ~seen | (bias == -torch.inf)
        found = {}
        sharp = draw.feature("sharp", 1.0, 3.0, 10.0, 60.0, share=0.12)
        for name, shape in shapes.items():
            numbers = draw.normal(name, *shape) * (sharp if name in "qk" else 1.0)
            numbers = numbers.to(self.dtype)
            unread = ELSEWHERE and self.mask.translation_invariant  # there NaN is only kept from padding
            if not unread and draw.has(f"special {name}", 0.07):
                self._place(name, numbers, hidden)
            found[name] = laid_out(draw, name, numbers)
        sinks = None
        if draw.has("sinks", 0.1):
            sinks = draw.normal("sinks", size.heads).to(self.dtype)
            if draw.has("special sinks", 0.2) and size.heads:
                largest = torch.finfo(self.dtype).max
                ends = (0.88 * largest, -0.88 * largest, -torch.inf, torch.inf, torch.nan)
                sinks[0] = draw.pick("special sink", 1e4, -1e4, *ends)
            sinks = laid_out(draw, "sinks", sinks, share=0.2)
        return Call(found["q"], found["k"], found["v"] if values else None, seen, bias, sinks=sinks)

    def _place(self, name: str, numbers: Tensor, hidden: Tensor) -> None:
        """Place numbers from the ends of the range, in keys that nobody sees where there are some."""
        if not numbers.numel():
            return
        random = self.draw.stream(f"special {name}")
        value = special(random, numbers.dtype)
        rows = numbers.flatten(0, 2)
        places = list(range(len(rows)))
        if name != "q" and random.random() < 0.75:
            group = (self.size.kv_heads, self.size.heads // self.size.kv_heads)
            unseen = hidden.expand(self.size.cells).unflatten(1, group).all(3).all(2).flatten()
            places = unseen.nonzero().flatten().tolist() or places
        for place in random.sample(places, min(len(places), random.choice((1, 1, 2, 4)))):
            if random.random() < 0.5:
                rows[place] = value
            else:
                rows[place, random.randrange(numbers.shape[-1])] = value
        self.draw.notes[f"special {name}"] = value

    def _bias(self, seen: Tensor) -> Tensor | None:
        draw = self.draw
        if not draw.has("bias", 0.2):
            return None
        shape = [draw.pick(f"axis {axis} of bias", 1, n, n) for axis, n in enumerate(self.size.cells)]
        bias = draw.normal("bias", *shape).to(self.dtype)
        if draw.has("hiding bias", 0.3):
            bias = bias.masked_fill(draw.cells("hiding bias", shape, 0.4), -torch.inf)
        # flex_attention has room for biases up to 2.2e38.
        if not ELSEWHERE and draw.has("huge bias", 0.3) and bias.numel():
            random = draw.stream("huge bias")
            info = torch.finfo(self.dtype)
            value = random.choice((info.min, info.min, -0.88 * info.max, 0.88 * info.max, -1e4, 1e4))
            where = draw.cells("huge cells", shape, random.choice((0.1, 0.4, 1.0)))
            if random.random() < 0.4:
                where = where | draw.cells("huge rows", (*shape[:-1], 1), 0.4)
            bias = bias.masked_fill(where, value)
            draw.notes["huge bias"] = value
        if draw.has("special bias", 0.15) and bias.numel():
            value = draw.pick("special bias", torch.nan, torch.inf)
            hidden = ~seen if draw.pick("special bias is hidden", True, True, False) else torch.ones_like(seen)
            cells = hidden.double().sum_to_size(bias.shape) == hidden.numel() // bias.numel()
            bias = bias.masked_fill(cells & draw.cells("special cells", shape, 0.3), value)
            draw.notes["special bias"] = value
        return laid_out(draw, "bias", bias, share=0.25)

    def _make_relative(self) -> None:
        """Replace the bias by one of the distance."""
        size, draw = self.size, self.draw
        shape = [draw.pick(f"axis {axis} of relative bias", 1, n) for axis, n in enumerate(size.cells[:2])]
        values = draw.normal("relative bias", *shape, size.queries + size.keys - 1).to(self.dtype)
        place = torch.arange(size.keys) - torch.arange(size.queries)[:, None] + size.queries - 1
        self.options["bias"] = RelativeBias(values)
        self.call.bias = values[:, :, place]

    def given(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        found = {"mask": self.mask, **self.options}
        if self.start is not None:
            found["query_start"] = self.start
        if isinstance(self.mask, masks.Full) and self.draw.pick("mask is left out", True, False):
            del found["mask"]
        return found


def special(random: Random, dtype: torch.dtype) -> float:
    value = random.choice(OUTER)
    largest = torch.finfo(dtype).max
    if isinstance(value, str):
        return {"max": largest, "-max": -largest, "0.9 max": 0.9 * largest}[value]
    return value if not value < largest or value == torch.inf else max(min(value, largest), -largest)


def leaves_of(drawn: Drawn) -> dict[str, Tensor]:
    """Let some tensors of the call require a gradient, and return them by name."""
    call, draw = drawn.call, drawn.draw
    given = {"q": call.q, "k": call.k, "v": call.v, "sinks": call.sinks}
    relative = isinstance(drawn.options.get("bias"), RelativeBias)
    if not relative:
        given["bias"] = call.bias
    found = {}
    for name, tensor in given.items():
        if tensor is not None and draw.pick(f"gradient of {name}", True, True, True, False):
            found[name] = tensor.detach().requires_grad_()
            setattr(call, name, found[name])
            if name in drawn.options:
                drawn.options[name] = found[name]
    draw.notes["requires_grad"] = " ".join(found) or "none"
    return found


def with_kernel(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    """Name the kernel in a few cases."""
    if draw.has("kernel", 0.08):
        options["kernel"] = draw.pick("which kernel", "reference", "sdpa", "native")
        draw.notes["kernel"] = options["kernel"]
    return options


def run(draw: Draw, function: Any, *args: Any, **options: Any) -> Any:
    """Call a function; a kernel that was named may refuse."""
    try:
        return there(function)(*args, **options)
    except MultiheadError:
        if "kernel" in options:
            return None
        raise


def attention(draw: Draw) -> None:
    """Output, logsumexp and gradients of `attention` and `attention_with_logsumexp`."""
    drawn = Drawn(draw)
    call, both = drawn.call, draw.has("logsumexp", 0.4)
    leaves = leaves_of(drawn) if draw.has("gradients", 0.7) else {}
    options = with_kernel(draw, drawn.given())
    function = mh.attention_with_logsumexp if both else mh.attention
    result = run(draw, function, call.q, call.k, call.v, **options)
    if result is None:
        return
    output, logsumexp = result if both else (result, None)
    of_output, of_logsumexp = drawn_cotangents(draw, output, logsumexp)
    judged = judge(call, *((of_output, of_logsumexp) if leaves else ()))
    found = {"output": output.detach()} | ({} if logsumexp is None else {"logsumexp": logsumexp.detach()})
    cotangents = masked_cotangents(judged.rows, of_output, of_logsumexp) if leaves else None
    if leaves and cotangents is not None and output.requires_grad:
        found |= gradients(draw, leaves, output, logsumexp, cotangents)
    compare(call, judged, found, cotangents)


def drawn_cotangents(draw: Draw, output: Tensor, logsumexp: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a loss with respect to both results, or to one of them; expanded as those of a sum, at times."""
    of_output: Tensor | None = draw.normal("gradient of output", *output.shape).to(output.dtype)
    if draw.has("gradient of a sum", 0.2):
        of_output = torch.ones((), dtype=output.dtype).expand(output.shape)
    if logsumexp is None:
        return of_output, None
    of_logsumexp = draw.normal("gradient of logsumexp", *logsumexp.shape).to(logsumexp.dtype)
    which = draw.pick("which results have a gradient", "both", "both", "output", "logsumexp")
    return None if which == "logsumexp" else of_output, None if which == "output" else of_logsumexp


def gradients(
    draw: Draw,
    leaves: dict[str, Tensor],
    output: Tensor,
    logsumexp: Tensor | None,
    cotangents: tuple[Tensor | None, Tensor | None],
) -> dict[str, Tensor]:
    """Differentiate, twice with one graph at times."""
    pairs = [
        (result, of_result)
        for result, of_result in zip((output, logsumexp), cotangents, strict=True)
        if result is not None and of_result is not None and result.requires_grad
    ]
    if not pairs:
        return {}
    results = [pair[0] for pair in pairs]
    of_results = [laid_out(draw, f"gradient {n}", pair[1], share=0.1, expand=False) for n, pair in enumerate(pairs)]
    again = draw.has("backward twice", 0.1)
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    if again:
        torch.autograd.grad(results, list(leaves.values()), of_results, retain_graph=True, **options)
    grads = torch.autograd.grad(results, list(leaves.values()), of_results, **options)
    return {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def weights(draw: Draw) -> None:
    """A tile of `attention_weights`, or the whole map."""
    drawn = Drawn(draw, values=False)
    call, options, size = drawn.call, drawn.given(), drawn.size
    judged = judge(call)
    place: list[Any] = [slice(None)] * 3
    if draw.has("tile", 0.4):
        random = draw.stream("tile")
        for axis, n in enumerate(size.cells[1:]):
            low, high = sorted((random.randint(0, n), random.randint(0, n)))
            if axis == 0 and low == high:
                low, high = 0, n  # no head is an error
            place[axis] = slice(low, high)
        if random.random() < 0.3 and size.heads:
            place[0] = random.randrange(size.heads)
        draw.notes["tile"] = place
        options |= {"heads": place[0], "queries": place[1], "keys": place[2]}
    found = there(mh.attention_weights)(call.q, call.k, **options)
    if isinstance(place[0], int):
        place[0] = slice(place[0], place[0] + 1)
    cut = (slice(None), *place)
    for part in (judged.exact, judged.band):
        part["weights"] = part["weights"][cut]
    if bool(((found > 1 + 1e-5) & judged.judged["weights"].expand(size.cells)[cut]).any()):
        raise Mismatch("a weight is above 1")
    exact = judged.judged["weights"] & ~judged.rows.large[..., None]  # scores of 1e20 are no numbers to subtract
    judged.judged["weights"] = exact.expand(size.cells)[cut]
    bad = judged.rows.nan.unsqueeze(-1).expand(size.cells)[cut] & judged.rows.visible[cut]
    if bool(bad.any()) and not bool(found[bad].isnan().all()):
        raise Mismatch("weights of a row that sees NaN or an infinity are numbers")
    compare_weights(call, judged.exact["weights"], judged.band["weights"], judged.judged["weights"], found)


def compare_weights(call: Call, exact: Tensor, band: Tensor, judged: Tensor, found: Tensor) -> None:
    """Weights are computed in float32 or better, whatever the dtype of the call."""
    if found.shape != exact.shape:
        raise Mismatch(f"weights have another shape: {tuple(found.shape)} instead of {tuple(exact.shape)}")
    wide = torch.float64 if call.dtype == torch.float64 else torch.float32
    info = torch.finfo(wide)
    if found.dtype != wide:
        raise Mismatch(f"weights are {found.dtype}")
    allowed = info.eps * band + info.tiny
    wrong = outside(found, exact, allowed, judged)
    if bool(wrong.any()):
        raise Mismatch(sentence("weights", found, exact, allowed, wrong))
