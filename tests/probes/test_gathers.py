"""A few weights of each query are those of the whole map."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead.functional import attention_with_logsumexp, request_of
from multihead.probes.beside import Beside
from multihead.probes.gathers import at_offset, on_first
from multihead.probes.subject import Subject
from tests import oracle
from tests.drawing import Drawn, calls


@settings(max_examples=60)
@given(case=calls(), offset=st.integers(-4, 4), count=st.integers(1, 14), data=st.data())
def test_offsets_and_first_keys_are_cells_of_the_dense_map(
    case: Drawn, offset: int, count: int, data: st.DataObject
) -> None:
    q, k, size = case.q.double(), case.k.double(), case.size
    options = {name: value.double() if isinstance(value, Tensor) else value for name, value in case.options.items()}
    request = request_of(q, k, k, case.mask, query_start=case.query_start, **options)
    terms = {"mask": case.mask, "query_start": case.query_start, **options}
    _, logsumexp = attention_with_logsumexp(q, k, k, kernel="reference", **terms)
    seen = oracle.shown(case.mask, size.cells, case.query_start)
    p = oracle.attend(q, k, k, seen, **options).weights
    start = torch.tensor(oracle.positions_of_first(case.query_start, size.batch, size.queries, size.keys))
    key = torch.arange(size.keys)
    positions = (start[:, None] + torch.arange(size.queries))[:, None, :, None]
    first = torch.tensor(data.draw(st.lists(st.integers(-3, size.keys), min_size=size.batch, max_size=size.batch)))
    subject = Subject.of(request, logsumexp, Beside(first_key=first))
    empty = logsumexp == -torch.inf
    found = at_offset(subject, offset).masked_fill(empty, 0)
    assert oracle.difference(found, torch.where(key == positions + offset, p, 0).sum(-1)) <= 1e-12
    inside = (key >= first[:, None]) & (key < first[:, None] + count)
    found = on_first(subject, count).masked_fill(empty, 0)
    assert oracle.difference(found, torch.where(inside[:, None, None], p, 0).sum(-1)) <= 1e-12
