"""A process that runs cases, one at a time, so that a crash or a hang ends the process and not the run."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.draw import Draw, Mismatch, described

HANG = 60.0  # seconds
PLACE = "MULTIHEAD_FUZZ_DEVICE"  # names the device of the calls, for `tests/fuzz/on_device.py`
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Case:
    """One case: an entry point, a seed, the features that are left out, and the largest size."""

    entry: str
    seed: int
    without: tuple[str, ...] = ()
    most: int | None = None
    told: bool = False  # whether its features are sent while they are drawn, so that they are known if it dies

    def command(self) -> str:
        """The line that runs this case again."""
        without = f' --without "{", ".join(self.without)}"' if self.without else ""
        most = "" if self.most is None else f" --most {self.most}"
        device = f" --device {os.environ[PLACE]}" if PLACE in os.environ else ""
        return f"python -m tests.fuzz --only '{self.entry}' --case {self.seed}{without}{most}{device}"


@dataclass
class Outcome:
    """How a case ended.

    Fields:
        failure: what is wrong, None if nothing is.
        used: its features.
        described: what the case is.
        trace: where an unexpected error was raised.
        seconds: how long it took.
    """

    failure: str | None = None
    used: list[str] = field(default_factory=list)
    described: str = ""
    trace: str = ""
    seconds: float = 0.0

    @property
    def shape(self) -> str:
        """The words of the failure without its numbers: the same for all failures of a kind."""
        line = (self.failure or "").split("\n")[0].split(":", 3)
        words = ":".join(line[:2]) if (self.failure or "").startswith("Mismatch") else ":".join(line)
        return re.sub(r"-?\d[\w.+-]*|\bnan\b|\binf\b", "#", words)[:120]


def outcome(case: Case, connection: Connection | None = None) -> Outcome:
    """Run a case in this process."""
    from tests.fuzz.entries import ENTRIES

    draw, began = Draw(case.seed, case.without, case.most), time.perf_counter()
    result = Outcome()
    if case.told and connection is not None:
        draw.tell = lambda: connection.send((list(draw.used), described(draw.notes)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "PyTorch could not compile")
            ENTRIES[case.entry].check(draw)
    except Mismatch as error:
        result.failure = f"Mismatch: {error}"
    except Exception as error:  # noqa: BLE001 - any error of a valid call is a failure
        result.failure = f"{type(error).__name__}: {error}"
        result.trace = traceback.format_exc()
    result.used, result.described = draw.used, described(draw.notes)
    result.seconds = time.perf_counter() - began
    return result


def serve(connection: Connection) -> None:
    """Run each case that is sent, and send how it ended."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            case = connection.recv()
            connection.send(outcome(case, connection))
        except (EOFError, ConnectionError):  # the run has ended
            os._exit(0)


class Worker:
    """A process that is started again whenever it has died."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))).strip(os.pathsep)
        self.context.set_forkserver_preload(["multihead", "tests.fuzz.entries"])
        self.process: multiprocessing.process.BaseProcess | None = None
        self.connection: Connection | None = None

    def run(self, case: Case) -> Outcome:
        """Run a case; a death or a hang is a failure."""
        if self.process is None:
            self.connection, end = self.context.Pipe()
            self.process = self.context.Process(target=serve, args=(end,), daemon=False)
            self.process.start()
            end.close()
        assert self.connection is not None
        began = time.perf_counter()
        used, about = [], ""
        try:
            self.connection.send(case)
            while self.connection.poll(HANG):
                received = self.connection.recv()
                if isinstance(received, Outcome):
                    return received
                used, about = received
            failure = f"Hang: more than {HANG:.0f} seconds"
        except (EOFError, ConnectionError):
            self.process.join(10)
            failure = f"Death: {_signal_name(self.process.exitcode)}"
        self.close()
        return Outcome(failure, used, about, seconds=time.perf_counter() - began)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.connection is not None:
            self.connection.close()
        self.process = self.connection = None


def _signal_name(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exit status {status}"
    return signal.Signals(-status).name
