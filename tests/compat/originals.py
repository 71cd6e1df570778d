"""Independent implementations of the original classes: their parameters by name, their formula in einsum."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-10}
dtypes = st.sampled_from(list(BOUNDS))


def rule(q: Tensor, k: Tensor, v: Tensor, heads: int, shown: Tensor | None, fill: float) -> tuple[Tensor, Tensor]:
    """Attend with columns split into heads, filling hidden scores with a finite number, as the originals do."""
    query, key, value = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    scores = torch.einsum("bihc,bjhc->bhij", query, key) / math.sqrt(query.shape[-1])
    if shown is not None:
        scores = torch.where(shown, scores, torch.full_like(scores, fill))
    weights = torch.softmax(scores, -1)
    return torch.einsum("bhij,bjhc->bihc", weights, value).flatten(2), weights


class Book(nn.Module):
    """The formula of Dive into Deep Learning: lengths hide keys by a score of -1e6."""

    def __init__(
        self, key_size: int, query_size: int, value_size: int, num_hiddens: int, num_heads: int, dropout: float,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        assert dropout == 0
        self.num_heads = num_heads
        self.W_q = nn.Linear(query_size, num_hiddens, bias=bias)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=bias)
        self.W_v = nn.Linear(value_size, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.weights = torch.empty(0)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None) -> Tensor:
        shown = None
        if valid_lens is not None:
            limits = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
            shown = (torch.arange(keys.shape[1]) < limits[..., None])[:, None]
        q, k, v = self.W_q(queries), self.W_k(keys), self.W_v(values)
        joined, weights = rule(q, k, v, self.num_heads, shown, -1e6)
        self.weights = weights.flatten(0, 1)  # (batch * heads, queries, keys)
        return self.W_o(joined)


class Tutorial(nn.Module):
    """The formula of the (d_model, h) class: 0 in the mask hides a key by a score of -1e9."""

    def __init__(self, d_model: int, h: int, dropout: float = 0.0) -> None:
        super().__init__()
        assert dropout == 0
        self.h = h
        for name in ("W_q", "W_k", "W_v", "W_o"):
            self.add_module(name, nn.Linear(d_model, d_model))

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shown = None if mask is None else mask != 0
        joined, weights = rule(self.W_q(Q), self.W_k(K), self.W_v(V), self.h, shown, -1e9)
        return self.W_o(joined), weights


class Harvard(nn.Module):
    """The formula of the Annotated Transformer: copies of one linear, one mask for all heads."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.0) -> None:
        super().__init__()
        assert dropout == 0
        self.h = h
        one = nn.Linear(d_model, d_model)
        self.linears = nn.ModuleList([copy.deepcopy(one) for _ in range(4)])
        self.attn = torch.empty(0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        shown = None if mask is None else (mask != 0).unsqueeze(1)
        of_query, of_key, of_value, last = self.linears
        joined, self.attn = rule(of_query(query), of_key(key), of_value(value), self.h, shown, -1e9)
        return last(joined)


def assert_same_step(
    ours: nn.Module,
    theirs: nn.Module,
    call: Callable[[nn.Module, Sequence[Tensor]], tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
) -> None:
    """Compare outputs, weights, and the gradients of both with respect to every input and parameter."""
    bound = BOUNDS[inputs[0].dtype]
    found = []
    torch.manual_seed(7)
    cotangents: list[Tensor] = []
    for layer in (theirs, ours):
        given = [x.detach().clone().requires_grad_() for x in inputs]
        results = call(layer, given)
        cotangents = cotangents or [torch.randn_like(result) for result in results]
        parameters = dict(layer.named_parameters())
        loss = sum((result * y).sum() for result, y in zip(results, cotangents, strict=True))
        assert isinstance(loss, Tensor)
        gradients = torch.autograd.grad(loss, [*given, *parameters.values()])
        names = ("output", "weights", *(f"input {i}" for i in range(len(given))), *parameters)
        found.append(dict(zip(names, (*results, *gradients), strict=True)))
    expected, actual = found
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=bound, atol=bound, msg=lambda m, name=name: f"{name}: {m}")


def losses(model: nn.Module, step: Callable[[nn.Module], Tensor], steps: int = 25) -> list[float]:
    """Train a model by gradient descent and return its loss curve."""
    curve = []
    for _ in range(steps):
        model.zero_grad()
        loss = step(model)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.5 * parameter.grad)
        curve.append(loss.item())
    return curve
