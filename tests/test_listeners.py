"""Listening to attention calls."""

from __future__ import annotations

import threading

import pytest
import torch

from multihead import functional, listeners
from multihead.call import AttentionCall
from multihead.functional import attention, attention_weights, explain, statistics

Q, K, V = torch.randn(3, 1, 2, 4, 8).unbind()


class Ear:
    """A listener that keeps what it hears."""

    def __init__(self, *wanted: str) -> None:
        self.wanted = frozenset(wanted)
        self.heard: list[AttentionCall] = []

    def hear(self, call: AttentionCall) -> None:
        self.heard.append(call)


def test_a_listener_hears_every_call_while_it_listens_and_none_after() -> None:
    ear = Ear()
    attention(Q, K, V)
    with listeners.listen(ear):
        first = attention(Q, K, V)
        second = attention(Q, K, V, kernel="reference")
    attention(Q, K, V)
    assert [call.attended.output is output for call, output in zip(ear.heard, (first, second), strict=True)] == [
        True
    ] * 2
    assert ear.heard[0].request.k is K


def test_looking_at_weights_and_statistics_is_no_call() -> None:
    ear = Ear()
    with listeners.listen(ear):
        attention_weights(Q, K)
        statistics(Q, K)
        explain(Q, K, V)
    assert ear.heard == []


def test_what_all_listeners_want_is_asked_for_at_once() -> None:
    outer, inner = Ear("entropy"), Ear("received", "entropy")
    with listeners.listen(outer):
        with listeners.listen(inner):
            assert listeners.wanted() == {"entropy", "received"}
            attention(Q, K, V)
        assert listeners.wanted() == {"entropy"}
    assert listeners.wanted() == frozenset()
    assert outer.heard[0] is inner.heard[0]
    assert outer.heard[0].request.wanted == {"entropy", "received"}


def test_a_listener_is_gone_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), listeners.listen(Ear("entropy")):
        raise ZeroDivisionError
    assert listeners.listeners() == ()


def test_another_thread_is_not_listened_to() -> None:
    ear = Ear()
    with listeners.listen(ear):
        thread = threading.Thread(target=attention, args=(Q, K, V))
        thread.start()
        thread.join()
    assert ear.heard == []


def test_listening_changes_no_bit_of_the_output() -> None:
    plain = attention(Q, K, V)
    with listeners.listen(Ear("entropy")):
        assert torch.equal(attention(Q, K, V), plain)


def test_a_poisoned_row_is_heard_as_it_is_returned() -> None:
    """The call that is published is the one that was asked for, NaN included, not the cleaned one."""
    ear, bad = Ear(), Q.clone()
    bad[0, 1, 2] = torch.nan
    with listeners.listen(ear):
        functional.attention(bad, K, V)
    assert ear.heard[0].request.q is bad
    assert bool(ear.heard[0].attended.logsumexp[0, 1, 2].isnan())
