"""Load the native kernel's library, choose its instruction set, and run its passes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from struct import Struct

# Before the library is loaded, torch must be: the library then finds torch's OpenMP runtime in the process and shares
# its threads, instead of bringing another runtime along.
import torch

from multihead.errors import ArgumentError
from multihead.tracing import constant_in_graphs

NAME = "libmultihead_native.so"
ENVIRONMENT = "MULTIHEAD_CPU"

# The fields of `struct Call` in csrc/call.h, in its order.
ADDRESSES = tuple(
    """
    q k v start stop seen bias sinks
    output logsumexp
    entropy squares largest_weight largest_key mean_distance distance_spread at_offsets on_given_key on_special_keys
    query_start offsets given_key special_keys
    of_output of_logsumexp delta dq dk dv dbias
    received pooled
    """.split()  # noqa: SIM905 - the lines are those of csrc/call.h
)
COUNTS = tuple(
    """
    batch heads kv_heads queries keys head_dim value_dim
    q_batch q_head q_row k_batch k_head k_row v_batch v_head v_row output_batch output_head output_row
    bounds_batch bounds_head seen_batch seen_head seen_row seen_key bias_batch bias_head bias_row bias_key
    of_output_batch of_output_head of_output_row dq_batch dq_head dq_row dk_batch dk_head dk_row
    dv_batch dv_head dv_row dbias_batch dbias_head dbias_row dbias_key
    dtype instruction_set threads num_offsets seed first_row pool_rows pool_keys
    """.split()  # noqa: SIM905 - the lines are those of csrc/call.h
)
REALS = ("scale", "softcap", "dropout")
FIELDS = (*ADDRESSES, *COUNTS, *REALS)

_pack = Struct(f"{len(ADDRESSES)}Q{len(COUNTS)}q{len(REALS)}d").pack
_EMPTY: list[float] = [0] * len(FIELDS)
AT = {name: index for index, name in enumerate(FIELDS)}  # where each field stands
_INSTRUCTION_SET, _THREADS = AT["instruction_set"], AT["threads"]

# The passes, as csrc/call.h numbers them.
FORWARD, BACKWARD, RECEIVED = 0, 1, 2

_DONE, _NO_MEMORY, _BAD_BOUNDS, _TOO_MANY_OFFSETS = 0, 1, 2, 4
_MOST_OFFSETS = 8


@dataclass(frozen=True)
class InstructionSet:
    """One form of the native kernel.

    Fields:
        name: what MULTIHEAD_CPU calls it.
        index: what the library calls it.
        compiled: whether this build of the library has it.
        runs: whether it is compiled and this CPU can run it.
        for_tests: whether it is slow and never chosen unasked.
    """

    name: str
    index: int
    compiled: bool
    runs: bool
    for_tests: bool


@dataclass(frozen=True)
class _Library:
    path: Path
    run: Callable[[bytes, int], int]
    workspace: Callable[[bytes, int], int]
    sets: tuple[InstructionSet, ...]


_forced: ContextVar[InstructionSet | None] = ContextVar("forced", default=None)


@constant_in_graphs  # a compiler must not trace into the search for the library
def absence() -> str | None:
    """Say why there is no native library here, in words that follow "refuses:"; None where there is one."""
    found = _found()
    return found if isinstance(found, str) else None


def path() -> Path | None:
    """Return the file the library was loaded from, or None where there is none."""
    found = _found()
    return None if isinstance(found, str) else found.path


def instruction_sets() -> tuple[InstructionSet, ...]:
    """List the forms of the kernel, the widest last but for the one for tests; empty where there is no library."""
    found = _found()
    return () if isinstance(found, str) else found.sets


def chosen() -> InstructionSet:
    """Return the instruction set that a call in this context uses.

    It is the one that `using` forces, else the one that the environment variable MULTIHEAD_CPU names (it is read when
    it is first needed), else the widest that runs here.

    Raises:
        ArgumentError: there is no library, or MULTIHEAD_CPU names a set that does not run here.
    """
    return _forced.get() or _unforced()


@contextmanager
def using(name: str) -> Iterator[InstructionSet]:
    """Use one instruction set in this context, and in no other thread.

    Raises:
        ArgumentError: there is no such set, or it does not run here.
    """
    token = _forced.set(_runnable(name, f"using is given {name!r}"))
    try:
        yield chosen()
    finally:
        _forced.reset(token)


def blank() -> list[float]:
    """Return the fields of a call in their order, all 0 but for the instruction set and the threads.

    Raises:
        ArgumentError: there is no library, or MULTIHEAD_CPU names a set that does not run here.
    """
    values = _EMPTY.copy()
    values[_INSTRUCTION_SET], values[_THREADS] = chosen().index, torch.get_num_threads()
    return values


def run(pass_: int, values: list[float]) -> None:
    """Run one pass over an attention; other Python threads go on meanwhile.

    Args:
        pass_: FORWARD, BACKWARD or RECEIVED.
        values: one for each of FIELDS, in their order, integers but for the REALS; see `blank`. The memory behind
            addresses must stay until the call is over.

    Raises:
        ArgumentError: there is no library, or the call does not fit it: some query's bounds lie outside the keys, or
            there are more offsets than it measures at once.
        MemoryError: there is no memory for the workspace.
    """
    status = _library().run(_pack(*values), pass_)
    if status == _DONE:
        return
    if status == _NO_MEMORY:
        raise MemoryError(f"There is no memory for the native kernel's workspace of {workspace(pass_, values)} bytes.")
    if status == _BAD_BOUNDS:
        keys = values[AT["keys"]]
        raise ArgumentError(f"The bounds of some query lie outside the {keys} keys.", f"Give bounds from 0 to {keys}.")
    if status == _TOO_MANY_OFFSETS:
        raise ArgumentError(
            f"at_offsets is asked for {values[AT['num_offsets']]} offsets.", f"Give at most {_MOST_OFFSETS} at once."
        )
    raise _no_such_pass(pass_, values)


def workspace(pass_: int, values: list[float]) -> int:
    """Return how many bytes a pass holds while it runs, beside what it is given.

    Args:
        pass_: FORWARD, BACKWARD or RECEIVED.
        values: as for `run`; no address is followed, only whether it is 0 matters.

    Raises:
        ArgumentError: there is no library, or no such pass or instruction set.
    """
    held = _library().workspace(_pack(*values), pass_)
    if held < 0:
        raise _no_such_pass(pass_, values)
    return held


def _no_such_pass(pass_: int, values: list[float]) -> ArgumentError:
    index = values[AT["instruction_set"]]
    return ArgumentError(
        f"The native kernel has no pass {pass_} for instruction set {index} here.",
        f"Give pass 0, 1 or 2, and a set that runs here: {_running()}.",
    )


def _library() -> _Library:
    found = _found()
    if isinstance(found, str):
        raise ArgumentError(f"The native kernel cannot run: {found}.", "Leave kernel out to have another one chosen.")
    return found


@cache
def _found() -> _Library | str:
    """Load the library, or say why there is none."""
    return _loaded(Path(str(files("multihead.kernels.native").joinpath(NAME))))


def _loaded(path: Path) -> _Library | str:
    if not path.is_file():
        return "its library was not built when multihead was installed, which takes GCC or Clang with OpenMP"
    try:
        library = ctypes.CDLL(str(path))  # its calls release the GIL
        layout, name = library.multihead_layout, library.multihead_instruction_set
        compiled, runs = library.multihead_compiled, library.multihead_runs
        run, held = library.multihead_run, library.multihead_workspace
    except (OSError, AttributeError) as error:
        return f"its library does not load ({error})"
    layout.argtypes, layout.restype = (), ctypes.c_char_p
    name.argtypes, name.restype = (ctypes.c_int64,), ctypes.c_char_p
    for function in (compiled, runs):
        function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_int64
    for function in (run, held):
        function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_int64), ctypes.c_int64
    if layout().decode().split() != list(FIELDS):
        return "its library is of another version of multihead; install multihead again"
    sets: list[InstructionSet] = []
    while (each := name(len(sets))) is not None:
        index, word = len(sets), each.decode()
        sets.append(InstructionSet(word, index, bool(compiled(index)), bool(runs(index)), word == "emulated"))
    return _Library(path, run, held, tuple(sets))


@cache
def _unforced() -> InstructionSet:
    """Choose for everybody, once."""
    _library()
    asked = os.environ.get(ENVIRONMENT)
    if asked:
        return _runnable(asked, f"{ENVIRONMENT} is {asked!r}")
    return [each for each in instruction_sets() if each.runs and not each.for_tests][-1]


def _runnable(name: str, finding: str) -> InstructionSet:
    """Return the instruction set of a name, or refuse it in words."""
    _library()
    for each in instruction_sets():
        if each.name == name:
            if each.runs:
                return each
            finding += ", which this CPU cannot run" if each.compiled else ", which this build has not"
            break
    else:
        finding += ", and there is no such instruction set"
    raise ArgumentError(f"{finding}.", f"Give one that runs here: {_running()}.")


def _running() -> str:
    return ", ".join(each.name for each in instruction_sets() if each.runs)
