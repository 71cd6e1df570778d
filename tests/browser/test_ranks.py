"""The files that ranks saved, opened by `multihead view`: the page is that of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.observation.record import Record
from multihead.parallel import context_parallel, shard
from tests.browser.shown import DESKTOP, Shown
from tests.cli.test_view import Started
from tests.parallel.processes import Processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LENGTH, CAUSAL = 512, masks.Causal()  # two levels of the map
PLACE = "#a=L1H2"


def layers() -> torch.nn.ModuleList:
    torch.manual_seed(4)
    found = torch.nn.ModuleList(mh.MultiHeadAttention(32, 4, rotary=mh.Rotary()) for _ in range(2))
    with torch.no_grad():
        for layer in found:
            layer.q_proj.weight.mul_(3)
            layer.k_proj.weight.mul_(3)
    return found


def run(model: torch.nn.ModuleList, x: Tensor) -> Record:
    with mh.observe(model) as seen, torch.no_grad():
        for layer in model:
            x = x + layer(x, mask=CAUSAL)
    return seen


def text() -> Tensor:
    return torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(5))


def saved(group: Any, rank: int, folder: Path) -> None:
    part = shard(group, mask=CAUSAL, x=text())
    with context_parallel(group, layout=part.layout):
        seen = run(layers(), part["x"])
    seen.save(folder / f"run.{rank}.safetensors")


@pytest.fixture(scope="module")
def pages(browser: Browser, four: Processes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Shown]]:
    """The pages of the record of four ranks, and of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    four.results(saved, folder)
    run(layers(), text()).save(folder / "whole.safetensors")
    with ExitStack() as commands:
        found = []
        for name in ("run.*.safetensors", "whole.safetensors"):
            command = Started(str(folder / name), "--no-browser")
            commands.callback(command.end)
            found.append(Shown(browser.new_context(**DESKTOP), f"http://127.0.0.1:{command.port}{command.path}"))
        yield found
        for page in found:
            page.close()
            assert page.elsewhere == page.complaints == []


def test_all_heads_are_those_of_one_process(pages: list[Shown]) -> None:
    for page in pages:
        page.visit()
        page.page.wait_for_load_state("networkidle")  # the head beside the grid has its map
    of_ranks, whole = (page.text("#all").splitlines() for page in pages)
    assert of_ranks == whole
    assert "8 attention heads, as they read one text of 512 tokens." in of_ranks
    pictures = [page.at("#rows").screenshot() for page in pages]
    assert pictures[0] == pictures[1]


def test_a_map_has_the_weights_of_one_process(pages: list[Shown]) -> None:
    weights = run(layers(), text()).layers[1].weights(2)
    for page in pages:
        page.visit(PLACE)
    first, second = (page.at("#map").screenshot() for page in pages)
    assert first == second
    for query, key in ((131, 60), (300, 299), (511, 0)):  # of three ranks
        for page in pages:
            page.visit(f"{PLACE}&x={max(key - 10, 0)}&y={query - 20}&n=24&q={query}")
            page.point(query, key)
            assert page.weight() == pytest.approx(float(weights[query, key]), rel=1e-5)
    of_ranks, whole = (page.text("#one") for page in pages)
    assert of_ranks == whole
