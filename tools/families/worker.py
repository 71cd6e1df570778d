"""Compare model classes in a process of their own, which is ended where one takes too long or too much memory."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

from tools.families.comparison import Result, compare
from tools.families.packages import skip_checks

LIMIT = 120  # seconds that a class may take, including the import of its family
MEMORY = 16 << 30  # bytes of address space


class Worker:
    """A process that compares one model class after another."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def compare(self, family: str, name: str, mutation: str | None = None) -> dict[str, Any]:
        """Compare one class, and return its result as JSON values; a process that fails is replaced."""
        if self._process is None or not self._process.is_alive():
            self._start()
        try:
            self._pipe.send((family, name, mutation))
            if self._pipe.poll(LIMIT):
                found: dict[str, Any] = self._pipe.recv()
                return found
            reason = f"It took more than {LIMIT} seconds."
        except (EOFError, OSError):
            reason = "Its process ended."
        self.close()
        return Result(family, name, "not built", reason).record()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def _serve(pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import torch
    import transformers

    from tools.families import catalogue

    skip_checks()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    while True:
        try:
            family, name, mutation = pipe.recv()
        except EOFError:
            return
        kind = next(each for each in catalogue.model_classes(family) if each.__name__ == name)
        pipe.send(compare(family, kind, mutation).record())
