"""Ray counts the same table."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

import multihead as mh
from multihead.counting.merge import HEADS_FILE, SHARDS_FILE
from multihead.counting.on_ray import LOCAL_RAY
from multihead.errors import InputError, MissingPackageError


@pytest.mark.skipif(
    "MULTIHEAD_RAY" not in os.environ, reason="Ray takes a quarter of a minute to start: set MULTIHEAD_RAY=1"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # those of Ray
def test_an_embedded_ray_writes_the_same_bytes(model: str, corpus: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    found = mh.census(model, corpus, out=tmp_path / "out", shard_bytes=1000, threads=1, ray=LOCAL_RAY, workers=2)
    assert (found.texts, found.problems) == (60, [])
    for name in (HEADS_FILE, SHARDS_FILE):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert not [name for name in os.environ if name.startswith("RAY_") and "ADDRESS" in name]


def test_without_ray_the_error_names_the_extra(
    model: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihead.errors.optional.find_spec", lambda name: None if name == "ray" else name)
    sentence = 'Running on Ray needs ray, which is not installed. Run pip install "multihead[ray]".'
    with pytest.raises(MissingPackageError, match=f"^{re.escape(sentence)}$"):
        mh.census(model, corpus, out=tmp_path / "out", ray=LOCAL_RAY)


def test_a_cluster_that_cannot_be_reached_is_an_error(
    model: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379")

    ray = ModuleType("ray")
    ray.__spec__ = ModuleSpec("ray", None)
    ray.init, ray.is_initialized = refuse, lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    sentence = (
        "Ray at 192.0.2.1:6379 cannot be used: Failed to connect to Ray cluster at 192.0.2.1:6379. "
        "Check the address, and that this machine may join the cluster (RAY_AUTH_MODE)."
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        mh.census(model, corpus, out=tmp_path / "out", ray="192.0.2.1:6379")
