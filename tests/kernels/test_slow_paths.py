"""No slow path where somebody forbids it."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.errors import SlowPathError, SlowPathWarning
from multihead.kernels.slow_paths import strict, warn_of_slow_path
from tests import oracle
from tests.kernel_names import needs_native

Q = torch.randn(1, 2, 4, 8, dtype=torch.float64)


@needs_native
def test_what_no_fast_kernel_takes_is_refused_with_their_reasons() -> None:
    with strict(), pytest.raises(SlowPathError) as refusal:
        mh.attention(Q, Q, Q, softcap=2.0)
    assert str(refusal.value) == (
        "The reference kernel would run, which holds queries x keys: native: it computes float32, bfloat16 and "
        "float16, and the tensors are float64; ragged: it needs CUDA, and the tensors are on cpu; "
        "sdpa: PyTorch's fused kernels have no softcap; "
        "flex: it needs CUDA, and the tensors are on cpu. "
        "Change what a faster kernel refuses, or leave mh.strict()."
    )


def test_fast_calls_run_and_so_does_a_kernel_that_is_named() -> None:
    seen = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    exact, capped = (oracle.attend(Q, Q, Q, seen, softcap=softcap).output for softcap in (None, 2.0))
    with strict():
        torch.testing.assert_close(mh.attention(Q, Q, Q), exact)
        torch.testing.assert_close(mh.attention(Q, Q, Q, softcap=2.0, kernel="reference"), capped)


def test_it_ends_with_its_context() -> None:
    with strict(), pytest.raises(SlowPathError):
        mh.attention(Q, Q, Q, softcap=2.0)
    assert mh.attention(Q, Q, Q, softcap=2.0).shape == Q.shape


def test_a_transform_that_needs_the_reference_kernel_is_refused() -> None:
    with strict(), pytest.raises(SlowPathError, match=r"the tensors of a torch\.func transform have none"):
        torch.func.vmap(lambda q: mh.attention(q, q, q))(torch.randn(2, 1, 2, 4, 8))


def test_it_holds_while_a_graph_is_made() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda q: mh.attention(q, q, q, softcap=2.0), backend="eager", fullgraph=True)
    with strict(), pytest.raises(Exception, match="The reference kernel would run"):
        compiled(Q)
    torch.compiler.reset()
    compiled(Q)


def test_elsewhere_a_slow_path_is_warned_of() -> None:
    with pytest.warns(SlowPathWarning) as told:
        warn_of_slow_path("It is slow.", "Do this.")
    assert str(told[0].message) == "It is slow. Do this."
    with strict(), pytest.raises(SlowPathError, match=r"^It is slow\. Do this\.$"):
        warn_of_slow_path("It is slow.", "Do this.")
