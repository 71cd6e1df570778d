"""Processes start from any program, and end as it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
from concurrent.futures import ProcessPoolExecutor
from multihead.counting.spawn import SpawningContext
print("main runs", flush=True)
with ProcessPoolExecutor(2, SpawningContext()) as pool:
    print(list(pool.map(abs, [-1, -2])))
"""


@pytest.mark.parametrize("way", ["script", "command", "standard input", "module"])
def test_the_main_module_runs_once_however_the_program_was_started(way: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    given = {"script": ["program.py"], "command": ["-c", PROGRAM], "standard input": [], "module": ["-m", "program"]}
    run = subprocess.run(
        [sys.executable, *given[way]],
        input=PROGRAM if way == "standard input" else "",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.stdout.splitlines(), run.stderr) == (["main runs", "[1, 2]"], "")


def test_an_interrupt_reaches_the_first_process_alone() -> None:
    """A terminal sends Ctrl-C to all processes; those that compute must not print a traceback each."""
    program = """
import signal, time
from concurrent.futures import ProcessPoolExecutor
from multihead.counting.spawn import SpawningContext
context = SpawningContext()
pool = ProcessPoolExecutor(1, context)
pool.submit(time.sleep, 60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
print("started", flush=True)
try:
    time.sleep(60)
finally:
    time.sleep(0.5)
    print(context.processes[0].is_alive())
    context.processes[0].terminate()
"""
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "started\n"
    time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    output, errors = run.communicate(timeout=60)
    assert output == "True\n"
    assert errors.count("KeyboardInterrupt") == 1
