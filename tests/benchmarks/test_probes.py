"""The benchmark of statistics runs, on texts that are too short for meaningful numbers."""

from __future__ import annotations

import re
from functools import cache, partial

import pytest
from click.testing import CliRunner

from benchmarks.watching import probes
from benchmarks.watching.probes import SETS, main, risen, shares
from multihead.probes import PROBES
from multihead.probes.catalogue import needs_pictures


def test_every_statistic_is_timed() -> None:
    assert {name for name, probe in PROBES.items() if not needs_pictures(probe)} <= set(SETS)
    found = shares(40, SETS, absent=True, pairs=1)
    assert list(found) == list(SETS)


def test_both_tables_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    # One process is started; without the native kernel, statistics are measured above.
    once = cache(partial(risen, absent=False))
    monkeypatch.setattr(probes, "risen", lambda length, name, **_: once(length, name))
    result = CliRunner().invoke(main, ["--only", "pooled", "--length", "64", "--pairs", "1"], catch_exceptions=False)
    assert result.exit_code == 0
    number = r"-?\d+\.\d\d"
    assert re.search(rf"\n\| pooled_map \| {number} \| {number} \|\n", result.output)
    assert "| statistics | native, 64 | without, 64 |\n" in result.output
