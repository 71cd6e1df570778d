"""The request and the result of a call, which cannot be changed afterwards, and the listeners that receive them."""

from __future__ import annotations

import threading
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from multihead import functional
from multihead.functional import attention, attention_weights, explain, request_of, statistics
from multihead.kernels.call import (
    AttentionCall,
    AttentionResult,
    WorkEstimate,
    listen,
    listeners,
)

Q, K, V = torch.randn(3, 1, 2, 4, 8).unbind()


def test_a_request_holds_what_was_checked_and_resolved() -> None:
    q, k, v = torch.zeros(2, 4, 3, 16), torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 8)
    request = request_of(q, k, v, query_start="end", dropout=0.25)
    assert request.q is q
    assert request.scale == 0.25
    assert request.query_start == 2
    assert request.dropout == 0.25
    assert request.shape.value_dim == 8
    assert (request.bias, request.softcap, request.sinks, request.origin) == (None,) * 4
    assert request.requested_statistics == frozenset()


def test_a_call_cannot_be_changed_after_it_ran() -> None:
    request = request_of(*torch.zeros(3, 1, 1, 2, 2).unbind())
    call = AttentionCall(request, AttentionResult(torch.zeros(1), torch.zeros(1)))
    for value, name in (
        (request, "scale"),
        (call.result, "output"),
        (call, "request"),
        (WorkEstimate(1, 2), "cells"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, 1)


def test_each_call_has_statistics_of_its_own() -> None:
    first, second = (AttentionResult(torch.zeros(1), torch.zeros(1)) for _ in range(2))
    first.statistics["entropy"] = torch.zeros(1)
    assert second.statistics == {}


def test_a_logsumexp_is_finished_once_when_it_is_read_with_its_gradient() -> None:
    written, finished = torch.tensor([1.0, torch.inf], requires_grad=True), []

    def finish(logsumexp: torch.Tensor) -> torch.Tensor:
        finished.append(logsumexp)
        return logsumexp.nan_to_num(torch.nan, torch.nan)

    result = AttentionResult(torch.zeros(1), written, finish=finish)
    assert finished == []
    with torch.no_grad():
        read = result.logsumexp
    assert result.logsumexp is read
    assert len(finished) == 1
    assert read.tolist()[0] == 1
    assert bool(read.isnan()[1])
    assert read.requires_grad


class Ear:
    """A listener that keeps what it hears."""

    def __init__(self, *wanted: str) -> None:
        self.requested_statistics = frozenset(wanted)
        self.heard: list[AttentionCall] = []

    def receive(self, call: AttentionCall) -> None:
        self.heard.append(call)


def test_a_listener_hears_every_call_while_it_listens_and_none_after() -> None:
    ear = Ear()
    attention(Q, K, V)
    with listen(ear):
        first = attention(Q, K, V)
        second = attention(Q, K, V, kernel="reference")
    attention(Q, K, V)
    assert [call.result.output is output for call, output in zip(ear.heard, (first, second), strict=True)] == [True] * 2
    assert ear.heard[0].request.k is K


def test_looking_at_weights_and_statistics_is_no_call() -> None:
    ear = Ear()
    with listen(ear):
        attention_weights(Q, K)
        statistics(Q, K)
        explain(Q, K, V)
    assert ear.heard == []


def wanted() -> frozenset[Any]:
    """Return the statistics that a request made now would ask of its kernel."""
    return request_of(Q, K, V).as_listeners_receive_it().requested_statistics


def test_what_all_listeners_want_is_asked_for_at_once() -> None:
    outer, inner = Ear("entropy"), Ear("received", "entropy")
    with listen(outer):
        with listen(inner):
            assert wanted() == {"entropy", "received"}
            attention(Q, K, V)
        assert wanted() == {"entropy"}
    assert wanted() == frozenset()
    assert outer.heard[0] is inner.heard[0]
    assert outer.heard[0].request.requested_statistics == {"entropy", "received"}


def test_a_listener_is_gone_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), listen(Ear("entropy")):
        raise ZeroDivisionError
    assert listeners() == ()


def test_another_thread_is_not_listened_to() -> None:
    ear = Ear()
    with listen(ear):
        thread = threading.Thread(target=attention, args=(Q, K, V))
        thread.start()
        thread.join()
    assert ear.heard == []


def test_listening_changes_no_bit_of_the_output() -> None:
    plain = attention(Q, K, V)
    with listen(Ear("entropy")):
        assert torch.equal(attention(Q, K, V), plain)


def test_a_poisoned_row_is_heard_as_it_is_returned() -> None:
    """The call that is published is the one that was asked for, NaN included, not the cleaned one."""
    ear, bad = Ear(), Q.clone()
    bad[0, 1, 2] = torch.nan
    with listen(ear):
        functional.attention(bad, K, V)
    assert ear.heard[0].request.q is bad
    assert bool(ear.heard[0].result.logsumexp[0, 1, 2].isnan())
