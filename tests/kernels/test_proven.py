"""A kernel for a GPU that has run on none: it waits until it is asked for, and explain names the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.kernels import flex, proven, sdpa
from multihead.kernels.choose import KERNELS, Kernel
from multihead.kernels.proven import GpuPath, ProvenRow, code_of, hash_of_code
from tests.simulated_gpu.device import simulated_gpu, skip_where_not_simulated, to_gpu

SOURCES = ("kernels/flex.py",)
PLANTED = SimpleNamespace(
    HANDLES_NONFINITE=False,
    GPU_PATH=GpuPath("planted", SOURCES),
    refusal=lambda request, bounds: None if request.shape.device.type == "cuda" else "it needs CUDA",
    reads_int8=lambda request: False,
    attend=flex.attend,
    estimate_work=flex.estimate_work,
)
WAITS = "it has not yet run on hardware; MULTIHEAD_UNPROVEN=planted uses it, multihead doctor --gpu checks it"
ROW = ProvenRow("planted", code_of(SOURCES), "A card", "2.11.0", "3.6.0", "2026-11-28")


@pytest.fixture(autouse=True)
def _planted_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(proven.UNPROVEN_VARIABLE, raising=False)
    before = dict(KERNELS)
    KERNELS.clear()
    KERNELS.update({"planted": cast(Kernel, PLANTED), **before})
    yield
    KERNELS.clear()
    KERNELS.update(before)


@pytest.fixture
def q() -> Iterator[Any]:
    skip_where_not_simulated()
    with simulated_gpu(), torch.no_grad():
        yield to_gpu(torch.randn(1, 2, 20, 16).half())


def test_without_a_row_it_waits_and_the_next_kernel_computes_the_call(q: Any) -> None:
    told = mh.explain(q, q, q, mask=masks.Causal())
    assert (told.kernel, told.refusals["planted"], told.unproven) == ("sdpa", WAITS, None)
    assert f"refused  planted: {WAITS}" in str(told).splitlines()


@pytest.mark.parametrize("names", ["planted", "other, planted", "all"])
def test_the_environment_variable_asks_for_it(q: Any, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIHEAD_UNPROVEN", names)
    told = mh.explain(q, q, q, mask=masks.Causal())
    assert told.kernel == "planted"
    sentence = "planted has not yet run on hardware; multihead doctor --gpu checks it on your card"
    assert f"hardware {sentence}" in str(told).splitlines()
    right = mh.attention(q, q, q, mask=masks.Causal(), kernel="reference")
    torch.testing.assert_close(mh.attention(q, q, q, mask=masks.Causal()).cpu(), right.cpu(), atol=4e-3, rtol=4e-3)


def test_a_call_that_names_it_asks_for_it(q: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mh.explain(q, q, q, kernel="planted").kernel == "planted"
    monkeypatch.setenv("MULTIHEAD_UNPROVEN", "plante")
    assert mh.explain(q, q, q).kernel == "sdpa"


def test_with_a_row_of_its_code_it_is_the_default(q: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "rows", lambda: (ROW,))
    told = mh.explain(q, q, q, mask=masks.Window(3))
    assert (told.kernel, told.refusals, told.unproven) == ("planted", {}, None)
    monkeypatch.setattr(proven, "rows", lambda: (replace(ROW, code="0123456789abcdef"),))
    assert mh.explain(q, q, q, mask=masks.Window(3)).refusals["planted"] == WAITS


def test_on_the_cpu_nothing_waits() -> None:
    q = torch.randn(1, 2, 20, 16)
    assert mh.explain(q, q, q).refusals["planted"] == "it needs CUDA"


def test_a_graph_contains_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return x if proven.reason_to_wait(PLANTED.GPU_PATH) is None else -x

    assert torch.compile(choose, backend="eager", fullgraph=True)(torch.ones(1)).item() == -1


def test_kernels_that_ran_on_a_gpu_before_there_were_rows_need_none(q: Any) -> None:
    for kernel in (sdpa, flex):
        assert proven.reason_to_wait(kernel.GPU_PATH) is None
    assert mh.explain(q, q, q, mask=masks.Window(3)).kernel == "flex"


def test_the_table_has_rows_of_kernels_that_exist() -> None:
    paths = {kernel.GPU_PATH.name for kernel in KERNELS.values() if kernel.GPU_PATH is not None}
    assert {row.path for row in proven.rows()} <= paths
    assert all(name in KERNELS for name in paths)


def test_comments_docstrings_and_empty_lines_are_no_code() -> None:
    code = "def f(x):\n    return x + 1\n"
    noted = '# why\n\ndef f(x):\n    """Add\n\n    one."""\n    return x + 1  # 1\n'
    assert hash_of_code(noted) == hash_of_code(code)
    assert hash_of_code(code.replace("1", "2")) != hash_of_code(code)
    assert hash_of_code("x = '# no comment'\n") != hash_of_code("x = ''\n")
    assert len(code_of(SOURCES)) == 16
