"""What a call asks for and gives: values that cannot be changed afterwards."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from multihead.call import Attended, AttentionCall, Work
from multihead.functional import request_of


def test_a_request_holds_what_was_checked_and_resolved() -> None:
    q, k, v = torch.zeros(2, 4, 3, 16), torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 8)
    request = request_of(q, k, v, query_start="end", dropout=0.25)
    assert request.q is q
    assert request.scale == 0.25
    assert request.query_start == 2
    assert request.dropout == 0.25
    assert request.shape.value_dim == 8
    assert (request.bias, request.softcap, request.sinks, request.origin) == (None,) * 4
    assert request.wanted == frozenset()


def test_a_call_cannot_be_changed_after_it_ran() -> None:
    request = request_of(*torch.zeros(3, 1, 1, 2, 2).unbind())
    call = AttentionCall(request, Attended(torch.zeros(1), torch.zeros(1)))
    for value, name in ((request, "scale"), (call.attended, "output"), (call, "request"), (Work(1, 2), "cells")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, 1)


def test_each_call_has_statistics_of_its_own() -> None:
    first, second = (Attended(torch.zeros(1), torch.zeros(1)) for _ in range(2))
    first.statistics["entropy"] = torch.zeros(1)
    assert second.statistics == {}
