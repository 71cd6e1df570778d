"""Ask a GPU what only a GPU can answer: python3 tools/cuda.py --out DIR --seconds N [--parts questions,compile].

It needs python3 with torch 2.11 or newer, and neither an installation nor a network: its processes get PYTHONPATH of
this tree, before the folders that PYTHONPATH names already. The parts:

    questions  what PyTorch's own operators do, with torch alone
    compile    whether each kind of kernel compiles, and how long that takes
    contract   each kernel against float64, then tests/kernels/test_cuda.py, in 4 processes
    fuzz       random calls of every entry point against float64, in 4 processes; it needs hypothesis
    measure    host time, device time and wall time against PyTorch's attention

Each part runs in processes of its own with a time limit, because one illegal access ends a CUDA context: a case that
dies or hangs is a row of the result, and the cases after it run in a new process. DIR/result.json and DIR/table.txt
are written after every part, and after the contract proven.json, in DIR and in this tree, with a row for each kernel
that passed. The exit code is 0 if every case passed, 1 if one did not or was not reached, 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESERVE = 2.0  # seconds for writing the result
LEAST = 5.0  # seconds that a part needs to start at all
PATIENCE = 60.0  # seconds for examining the machine: the first import of torch reads gigabytes
GRACE = 3.0  # seconds after its limit in which a process may end by itself
POLL = 0.05
TABLE_LINES, COLUMNS = 30, 200
CONTRACT = "contract"  # name of the part after which proven.json is written
PROVEN = ROOT / "src" / "multihead" / "kernels" / "proven.json"
STARTING = "starting"  # name of the row of a process that ends before its first case
BAD = ("failed", "died", "hung")


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        name: its name in --parts.
        module: the module that defines its cases.
        seconds: its time limit; parts that end earlier leave their time to later ones.
        processes: number of processes that share its cases.
        case_seconds: time limit of a case, after which its process is killed.
        table_lines: largest number of lines of its rows in the table.
    """

    name: str
    module: str
    seconds: float
    processes: int = 1
    case_seconds: float = 45.0
    table_lines: int = 3


PARTS = (
    Part("questions", "tools.on_gpu.questions", 40, case_seconds=20, table_lines=10),
    Part("compile", "tools.on_gpu.compiling", 30, processes=4, table_lines=2),
    Part("contract", "tools.on_gpu.contract", 100, processes=4, table_lines=4),
    Part("fuzz", "tools.on_gpu.fuzzing", 60, case_seconds=90, table_lines=2),
    Part("measure", "tools.on_gpu.measuring", float("inf"), table_lines=6),
)


@dataclass
class Worker:
    """A process that runs a share of the cases of a part, started again after a case that ended it.

    Attributes:
        part: the part.
        share: "i/n": every n-th case, from the i-th.
        out: the file of lines that the process writes.
        log: the file of its standard error.
        end: when the part ends, in seconds of time.monotonic().
    """

    part: Part
    share: str
    out: Path
    log: Path
    environment: Mapping[str, str]
    end: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] | None = None
    begun: str | None = None
    begun_at: float = 0.0
    read: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, after the cases that already have a row."""
        command = [sys.executable, "-m", "tools.on_gpu.worker", self.part.module, "--out", str(self.out)]
        command += ["--seconds", f"{max(self.end - time.monotonic(), 0):.1f}"]
        command += ["--share", self.share, "--skip", str(len(self.rows))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=dict(self.environment), stdout=log, stderr=log, start_new_session=True
            )
        self.begun, self.begun_at = None, time.monotonic()

    def poll(self) -> bool:
        """Read what the process wrote, kill it if a case hangs, restart it if one ended it; return whether it runs."""
        assert self.process is not None
        status = self.process.poll()  # before reading, so that the last lines of an ended process are read
        self._read_lines()
        now = time.monotonic()
        if status is None and now - self.begun_at <= self.part.case_seconds and now <= self.end + GRACE:
            return True
        state = "died" if status is not None else "hung" if now <= self.end + GRACE else "out of time"
        self.stop()
        self._read_lines()
        if self.begun is None and self.names is not None and status is not None:
            if status == 0 or len(self.rows) >= len(self.names) or now >= self.end:
                return False
            self.start()  # the process ended between two cases, as after an error that ends the CUDA context
            return True
        error = {
            "died": f"{_ending(status)}. {self._end_of_log()}",
            "hung": f"It took over {now - self.begun_at:.0f} s.",
        }
        found = {"state": state, "seconds": round(now - self.begun_at, 3), "error": error.get(state, "")}
        self.rows.append({"case": self.begun or STARTING, **found})
        if self.begun is None or now >= self.end - LEAST / 2 or len(self.rows) >= len(self.names or ()):
            return False
        self.start()
        return True

    def stop(self) -> None:
        """Kill the process and all that it started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _read_lines(self) -> None:
        if not self.out.exists():
            return
        with self.out.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the process was killed, or still writes it
                self.read += len(line)
                row = json.loads(line)
                if "cases" in row:
                    self.names = row["cases"]
                elif row["state"] == "begun":
                    self.begun = row["case"]
                else:
                    self.rows.append(row)
                    self.begun = None
                self.begun_at = time.monotonic()

    def _end_of_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-800:].strip() if self.log.exists() else ""


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"The process ended by {signal.Signals(-status).name}"
    return f"The process ended with exit code {status}"


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts, write the result after each of them, and return the exit code."""
    names = [part.name for part in parts]
    parser = argparse.ArgumentParser(prog="tools/cuda.py", description=__doc__, formatter_class=_Description)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the result; created if missing"
    )
    parser.add_argument(
        "--seconds", type=float, default=360.0, metavar="N", help="time of the whole run (default: 360)"
    )
    parser.add_argument(
        "--parts", default=",".join(names), help=f"with commas, in any order (default: {','.join(names)})"
    )
    given = parser.parse_args(arguments)
    chosen = [name.strip() for name in given.parts.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        parser.error(f"There is no part {unknown[0] if unknown else given.parts}. The parts are {', '.join(names)}.")
    given.out.mkdir(parents=True, exist_ok=True)
    return run(given.out, given.seconds, [part for part in parts if part.name in chosen])


class _Description(argparse.RawDescriptionHelpFormatter):
    """Help whose description keeps its lines."""


def run(out: Path, seconds: float, parts: Sequence[Part]) -> int:
    """Examine the machine and run parts within some seconds; write the result to a folder and return the exit code."""
    end = time.monotonic() + seconds
    machine = examine_machine()
    result: dict[str, Any] = {
        "machine": machine,
        "commit": commit(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "parts": {},
    }
    if machine["problem"] is not None:
        write(out, result, parts)
        print(f"Nothing was run, because a CUDA GPU is needed: {machine['problem']}", file=sys.stderr)
        return 2
    for part in parts:
        result["parts"][part.name] = run_part(part, out, end - RESERVE, environment_of(machine))
        write(out, result, parts)
        if part.name == CONTRACT:
            write_proven(out, result)
    print((out / "table.txt").read_text(encoding="utf-8"), end="")
    return int(any(each["state"] != "passed" for each in result["parts"].values()))


def write_proven(out: Path, result: Mapping[str, Any]) -> None:
    """Write the rows of the kernels that passed every call of the contract to proven.json, of the tree and of `out`."""
    known = json.loads(PROVEN.read_text(encoding="utf-8"))
    new = rows_of_kernels(result)
    rows = [row for row in known if row["path"] not in {each["path"] for each in new}] + new
    text = json.dumps(sorted(rows, key=lambda row: str(row["path"])), indent=1) + "\n"
    (out / PROVEN.name).write_text(text, encoding="utf-8")
    with suppress(OSError):  # a tree that cannot be written
        PROVEN.write_text(text, encoding="utf-8")


def rows_of_kernels(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each kernel all of whose calls passed, none of them left or lost."""
    part, machine = result["parts"][CONTRACT], result["machine"]
    codes = {row["kernel"]: row["code"] for row in part["rows"] if row.get("code")}
    states = [(row["case"], row["state"]) for row in part["rows"]] + [(name, "left") for name in part["left"]]
    found = []
    for kernel, code in codes.items():
        of_kernel = {state for case, state in states if case.startswith(f"{kernel}: ") or case == STARTING}
        if of_kernel == {"passed"}:
            of_machine = {"card": machine["card"], "torch": machine["torch"], "triton": machine.get("triton")}
            found.append({"path": kernel, "code": code, **of_machine, "date": str(result["date"])[:10]})
    return found


def examine_machine() -> dict[str, Any]:
    """Return what tools/on_gpu/machine.py prints; `problem` is a sentence if nothing can run, or None."""
    command = [sys.executable, "-m", "tools.on_gpu.machine"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment_of({}), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        problem = f"torch was not imported within {PATIENCE:.0f} s."
    except (ValueError, IndexError):
        problem = f"{_ending(done.returncode)}. {done.stderr[-300:].strip()}"
    return {"problem": problem, "missing": []}


def environment_of(machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of the processes: this tree, and stand-ins for packages that are missing."""
    paths = [
        ROOT,
        ROOT / "src",
        *(ROOT / "tools" / "on_gpu" / f"without_{name}" for name in machine.get("missing", ())),
    ]
    inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }


def run_part(part: Part, out: Path, end: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run the cases of a part until `end`, in seconds of time.monotonic(), at most; return its state and rows."""
    began = time.monotonic()
    if end - began < LEAST:
        return {"state": "not started", "seconds": 0.0, "rows": [], "left": ["all: no time was left"]}
    end = min(end, began + part.seconds)
    workers = []
    for index in range(part.processes):
        lines, log = (out / f"{part.name}.{index}.{suffix}" for suffix in ("jsonl", "log"))
        for file in (lines, log):
            file.unlink(missing_ok=True)
        workers.append(Worker(part, f"{index}/{part.processes}", lines, log, environment, end - GRACE))
    running = list(workers)
    try:
        for worker in workers:
            worker.start()
        while running:
            time.sleep(POLL)
            running = [worker for worker in running if worker.poll()]
    finally:
        for worker in workers:
            worker.stop()
    rows = [row for worker in workers for row in worker.rows]
    left = [name for worker in workers for name in (worker.names or ())[len(worker.rows) :]]
    return {
        "state": state_of(rows, left),
        "seconds": round(time.monotonic() - began, 1),
        "rows": rows,
        "left": left,
    }


def state_of(rows: Iterable[Mapping[str, Any]], left: Sequence[str]) -> str:
    """Return the worst state of the rows of a part; "out of time" if cases were left, "not here" if no case ran."""
    states = {row["state"] for row in rows}
    for state in (*BAD, "out of time"):
        if state in states:
            return state
    return "out of time" if left else "not here" if states == {"not here"} else "passed"


def commit() -> str:
    """Return the commit of this tree, with "-dirty" if files were changed, or "unknown" without git."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


# ---- the result


def write(out: Path, result: Mapping[str, Any], parts: Sequence[Part]) -> None:
    """Write result.json and table.txt, each complete at any time."""
    for name, text in (
        ("result.json", json.dumps(result, indent=1) + "\n"),
        ("table.txt", "\n".join(table(result, parts)) + "\n"),
    ):
        temporary = out / f"{name}.part"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out / name)


def table(result: Mapping[str, Any], parts: Sequence[Part]) -> list[str]:
    """Return at most 30 lines: the machine, then each part with its most important rows."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "transformers") if machine.get(name))
    lines = [f"{machine.get('card', 'no GPU')}; {versions or 'no torch'}; commit {result['commit']}; {result['date']}"]
    if machine["problem"] is not None:
        return [*lines, f"nothing was run: {machine['problem']}"]
    for part in parts:
        found = result["parts"].get(part.name)
        if found is None:
            continue
        counts = Counter(row["state"] for row in found["rows"])
        counted = ", ".join(f"{count} {state}" for state, count in counts.items())
        counted += f", {len(found['left'])} left" if found["left"] else ""
        lines.append(f"{part.name:<10}{found['state']:<12}{found['seconds']:6.1f} s  {counted}")
        lines += _important_rows(found["rows"], part.table_lines)
    return [line[:COLUMNS] for line in lines[:TABLE_LINES]]


def _important_rows(rows: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """Return a line for each of at most `count` rows: those that went wrong, then those with an answer."""
    wrong = [row for row in rows if row["state"] != "passed"]
    answered = [row for row in rows if row["state"] == "passed" and row.get("answer")]
    lines = [f"  {row['case']}: {row['state']}: {' '.join(str(row.get('error', '')).split())}" for row in wrong]
    groups: dict[str, list[str]] = {}
    for row in answered:
        groups.setdefault(row.get("group") or row["case"], []).append(str(row["answer"]))
    lines += [f"  {name}: {'; '.join(answers)}" for name, answers in groups.items()]
    if len(lines) > count:
        lines = [*lines[: count - 1], f"  and {len(lines) - count + 1} more lines in result.json"]
    return lines


if __name__ == "__main__":
    sys.exit(main())
