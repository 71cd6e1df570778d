"""Settings of every test: no network, threads that do not spin, one seed, no clock in property tests."""

from __future__ import annotations

import gc
import os
import re
import sys

# Without it, each of the processes that the tests start would compile every module of the library that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Read once, when huggingface_hub is imported: it must be set before anything else is.
os.environ["HF_HUB_OFFLINE"] = "1"
# Commands print in the language of the locale, and their tests expect English.
os.environ["LC_ALL"] = "C.UTF-8"
# GNU readline, which pytest imports, sets them for the processes of pytest-xdist: output would be cut to a terminal.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)
# Read once, when torch is imported: inductor does not compile six programs to find which vectors the compiler knows.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# Read once, when torch is imported: an OpenMP thread that waits does not spin on a core that another process needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.parallel.processes import Processes, forking_context, processes

ROOT = Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = False  # the tests themselves, for the next run
# Files of tests need not survive a power cut, and each would wait for the disk. tests/test_files.py asserts the calls.
os.fsync = lambda _: None  # type: ignore[assignment]

# A first call of torch in a process can take seconds, so a deadline would fail at random.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave out of every garbage collection the million objects that the modules and the tests are made of."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # a twentieth of all time was spent in collections of 700 objects
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have a process of pytest-xdist send one message per test that passes.

    It sends five, which cost both processes a quarter of a minute over all tests. A test that fails or is skipped, or
    whose fixture fails, is reported as ever.
    """
    for worker in config.pluginmanager.get_plugins():
        if type(worker).__name__ != "WorkerInteractor":
            continue
        send: Callable[..., None] = worker.sendevent

        def send_what_is_needed(name: str, send: Callable[..., None] = send, **event: Any) -> None:
            report = event.get("data") if name == "testreport" else None
            passed = isinstance(report, dict) and report["outcome"] == "passed" and report["when"] != "call"
            if name not in ("logstart", "logfinish") and not passed:
                send(name, **event)

        worker.sendevent = send_what_is_needed


# Tests whose processes fork from one that has imported what they need: it takes ten seconds of a core to start it and
# four of them. The first graph that torch.compile makes in a process takes six.
SHARED = {
    "ranks": re.compile(r"four: Processes|_imported_before"),
    "graphs": re.compile(r"torch\.(compile|export\.export|_dynamo)\b"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one process run all files that share what is expensive to start, and any other file."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Together(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _unit_of(super()._split_scope(nodeid))

    return Together(config, log)


@cache
def _unit_of(file: str) -> str:
    """Return the name of what a file shares with others, or the file."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" and path.is_relative_to(ROOT / "tests") else ""
    return next((name for name, pattern in SHARED.items() if pattern.search(text)), file)


# Without an accelerator torch.manual_seed formats the stack three times, for devices that are never initialised.
_seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    """Give each test the same random numbers, whichever tests ran before it."""
    _seed(0)


@pytest.fixture(autouse=True)
def _guards_are_not_timed() -> None:
    """Have Dynamo not time the guards of a graph for its log: it flushes the caches of the CPU first, 20 ms a graph."""
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture
def _imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have spawned processes fork from the one that all ranks fork from: their imports take seconds of two cores."""
    context = forking_context()
    monkeypatch.setattr("multiprocessing.get_context", lambda _: context)


@pytest.fixture(scope="session")
def four() -> Iterator[Processes]:
    """Four gloo processes, started once for all files that a process tests."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this build of PyTorch has no gloo")
    with processes() as started:
        yield started
