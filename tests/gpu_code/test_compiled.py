"""The table of compiled kernels is that of the present code, and says what was asked of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multihead.kernels.proven import code_of
from multihead.kernels.triton.launch import CODE_ON_DEVICE
from tools import gpu_compile

TABLE = json.loads(gpu_compile.FILE.read_text(encoding="utf-8"))
MOST_INSTRUCTIONS = {("measure_queries", 64): 18.5, ("measure_queries", 128): 19.8}
MOST_INSTRUCTIONS |= {("sum_keys", 64): 11.5, ("sum_keys", 128): 13.0}


def rows(version: str, kind: gpu_compile.Kind) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = TABLE["triton"][version][str(kind)]
    return found


def test_the_kernels_have_not_changed_since_they_were_compiled() -> None:
    """If they have, `make gpu-compile` compiles them again."""
    assert TABLE["code"] == code_of(CODE_ON_DEVICE)


@pytest.mark.parametrize("version", gpu_compile.TRITONS)
def test_kernels_for_usual_heads_keep_their_numbers_in_registers(version: str) -> None:
    usual = ("logsumexp known", "logsumexp computed", "received", "a map of large cells", "a map of small cells")
    for kind in gpu_compile.kinds():
        if kind.name in usual and kind.head_dim in (64, 128) and gpu_compile.NAMES[kind.dtype] == "bf16":
            of_kind = rows(version, kind)
            assert of_kind.keys() == gpu_compile.targets_of(kind).keys(), str(kind)
            spilled = {name: of_kind[name]["spilled"] for name in ("sm_80", "sm_90", "sm_100")}
            assert not any(spilled.values()), f"{kind}: {spilled}"


@pytest.mark.parametrize("page", ["measured.md", "measured.zh.md"])
def test_the_docs_have_the_instructions_of_the_table(page: str) -> None:
    text = (gpu_compile.ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [row for row in gpu_compile.rows_of_docs() if row not in text] == []


@pytest.mark.parametrize("version", gpu_compile.TRITONS)
def test_a_score_takes_few_instructions_on_hopper(version: str) -> None:
    for kind in gpu_compile.kinds():
        most = MOST_INSTRUCTIONS.get((kind.kernel, kind.head_dim))
        if (
            most is not None
            and kind.name in ("logsumexp known", "received")
            and gpu_compile.NAMES[kind.dtype] == "bf16"
        ):
            assert rows(version, kind)["sm_90"]["instructions"] <= most, str(kind)
            assert rows(version, kind)["sm_90"]["matrix"] == "wgmma"
            assert rows(version, kind)["sm_90"]["asynchronous"]
