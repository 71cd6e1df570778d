"""What seeing takes is counted: q and k as they are kept, and the weights that nobody held."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.observation.record import Record
from multihead.record.memory_use import memory_of


def seen(keep: Any = "cpu", dtype: torch.dtype = torch.float32) -> Record:
    layer = mh.MultiHeadAttention(embed_dim=16, num_heads=4, num_kv_heads=2).to(dtype)
    with mh.observe(layer, keep=keep) as record:
        layer(torch.randn(3, 10, 16, dtype=dtype))
    return record


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_q_and_k_are_counted_with_their_own_heads(dtype: torch.dtype, size: int) -> None:
    memory = memory_of(seen(dtype=dtype).layers)
    assert memory.kept == size * 3 * 10 * 4 * (4 + 2)  # texts, tokens, head_dim, heads of q and of k
    assert memory.weights == size * 3 * 4 * 10 * 10


def test_where_only_statistics_are_kept_there_is_no_q_and_no_k() -> None:
    memory = memory_of(seen("statistics").layers)
    assert memory.kept == 0
    assert memory.weights > 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say")
def test_the_peak_is_that_of_the_whole_process_in_bytes() -> None:
    peak = memory_of(seen().layers).peak
    assert peak is not None
    assert 50e6 < peak < 1e12  # torch alone takes more than the lower one


def test_where_the_system_does_not_say_there_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert memory_of(seen().layers).peak is None
