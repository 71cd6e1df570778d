"""Spawn processes from any program: a script without a guard, `python -c`, standard input, a notebook, a command.

A forked process inherits OpenMP threads that do not exist in it. joblib's loky has an option that leaves out the
caller's main module, as `SpawnedProcess` does. This file imports nothing of the library, so that a process which needs
nothing else starts in a tenth of a second.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any


class SpawnedProcess(SpawnProcess):
    """A spawned process that does not import the caller's `__main__`, and that Ctrl-C does not reach.

    Python imports the main module in every spawned process, so a script without `if __name__ == "__main__"` would run
    again in each, and a program from standard input has no file to import. Counting does not need the main module. A
    terminal sends Ctrl-C to all its processes; only the process that started the others acts on it.
    """

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - the name in multiprocessing
        main = sys.modules["__main__"]
        # an empty main module, without a file or a name that could be imported
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            with _block_interrupts():
                return SpawnProcess._Popen(process)  # noqa: SLF001
        finally:
            sys.modules["__main__"] = main


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread, and so in the processes that this thread starts, which inherit the signal mask.

    Python's resource tracker unblocks SIGINT when it starts; the queues of a pool start the tracker before any process.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SpawningContext(SpawnContext):
    """Starts `SpawnedProcess`es for a pool, and stores them, so that they can be terminated while they compute.

    Attributes:
        processes: the processes that were started.
    """

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[SpawnedProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> SpawnedProcess:  # type: ignore[override]  # noqa: N802
        """Return a new process, which is not started."""
        self.processes.append(SpawnedProcess(*arguments, **options))
        return self.processes[-1]
