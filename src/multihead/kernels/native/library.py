"""Load the native kernel's library, which defines the operators, and choose its instruction set.

This module imports torch only in functions, because it runs while torch itself is being imported (see
`multihead/__init__.py`).

The operators are registered as soon as torch is imported, by `import multihead` in either order, so that
`torch.export.load` and `torch.jit.load` find them before anything else of the library is used. The modules that
register them import no module of this package that imports torch at its top. Otherwise, if such a module were the first
to import torch, it would be needed before its own import is complete.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multihead.errors import ArgumentError, SlowPathWarning
from multihead.tensors.undo import Undo

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY_NAME = "libmultihead_native.so"
INSTRUCTION_SET_VARIABLE = "MULTIHEAD_CPU"
MEMORY_MAP_OF_PROCESS = Path("/proc/self/maps")  # on Linux, lists every file that this process has loaded


@dataclass(frozen=True)
class InstructionSet:
    """One build of the native kernel, for one instruction set.

    Attributes:
        name: its name, a value of the environment variable MULTIHEAD_CPU.
        index: its number in the library.
        compiled: whether this build of the library contains it.
        is_supported_by_cpu: whether it is compiled and this CPU can run it.
        for_tests: whether it is a slow emulation for tests, used only if chosen by name.
        tile: rows and columns of its register tiles, each computed whole or skipped; (0, 0) if not compiled.
    """

    name: str
    index: int
    compiled: bool
    is_supported_by_cpu: bool
    for_tests: bool
    tile: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _NativeLibrary:
    path: Path
    functions: Mapping[str, Callable[..., Any]]  # the names of _FUNCTION_SIGNATURES -> C functions
    instruction_sets: tuple[InstructionSet, ...]
    fastest_set: InstructionSet
    fastest_set_of_cpu: InstructionSet  # the fastest that the CPU supports; this build may lack it


_forced_instruction_set: ContextVar[InstructionSet | None] = ContextVar("forced", default=None)
forced_instruction_set = _forced_instruction_set.get
"""Return the instruction set of `using_instruction_set`, None outside of it."""


def reason_of_absence() -> str | None:
    """Return why the native library is missing, as the end of a sentence; None if it is loaded."""
    found = _library_or_reason()
    return found if isinstance(found, str) else None


# A compiler must not trace into the search for the library; see `tracing.constant_in_graphs`.
reason_of_absence._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def path_of_library() -> Path | None:
    """Return the path of the loaded library; None if it is missing."""
    found = _library_or_reason()
    return None if isinstance(found, str) else found.path


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets from narrowest to widest, then the one for tests; () if the library is missing."""
    found = _library_or_reason()
    return () if isinstance(found, str) else found.instruction_sets


def missing_faster_instruction_set() -> str | None:
    """Return a warning if this CPU has a faster instruction set that this build lacks; else None."""
    found = _library_or_reason()
    if isinstance(found, str) or found.fastest_set == found.fastest_set_of_cpu:
        return None
    return (
        f"The native kernel was compiled without {found.fastest_set_of_cpu.name}, the fastest instruction set of this "
        f"CPU, and uses {found.fastest_set.name}. Install multihead again on this machine, or with MULTIHEAD_SETS=all "
        "for any."
    )


def chosen_instruction_set() -> InstructionSet:
    """Return the instruction set in use: of `using_instruction_set`, else of MULTIHEAD_CPU, else the fastest.

    The environment variable is read at the first use. Raises an ArgumentError if the library is missing, or if the
    variable names an instruction set that does not run here.
    """
    return forced_instruction_set() or default_instruction_set()


@contextmanager
def using_instruction_set(name: str) -> Iterator[InstructionSet]:
    """Use an instruction set in this context and thread; raise an ArgumentError if it does not run here."""
    before, forced = forced_instruction_set(), _runnable_instruction_set(name, f"using received {name!r}")
    choose = _library().functions["choose_in_thread"]  # the operators cannot read a ContextVar
    with Undo() as undo:
        undo.set_variable(_forced_instruction_set, forced)
        undo.add_step(partial(choose, -1 if before is None else before.index))
        choose(forced.index)
        yield forced


def openmp_runtimes(maps: Path = MEMORY_MAP_OF_PROCESS) -> tuple[Path, ...] | None:
    """Return the OpenMP runtimes that this process has loaded; None where the operating system does not list them.

    Args:
        maps: file with the memory map of the process, in the format of Linux.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    # Address, permissions, offset, device and inode come before the path, which may contain spaces.
    loaded = {parts[5] for line in lines if len(parts := line.split(maxsplit=5)) == 6}
    return tuple(sorted(Path(path) for path in loaded if re.search(r"/lib(gomp|iomp5|omp)[-.][^/]*$", path)))


class RowSums(NamedTuple):
    """Sums of rows of numbers, float64: number, sum, sum of the squared deviations from the mean, and extremes.

    Attributes:
        number: (rows,), how many were added.
        total: (rows,).
        squares: (rows,).
        minimum: (rows,), inf without numbers.
        maximum: (rows,), -inf without numbers.
        text_totals: (rows, texts), the sum of number - level over the numbers of each text; 0 without levels.
        text_counts: (rows, texts), how many numbers of each text were added.
    """

    number: Tensor
    total: Tensor
    squares: Tensor
    minimum: Tensor
    maximum: Tensor
    text_totals: Tensor
    text_counts: Tensor


def sum_rows(
    values: Tensor,
    counted: Tensor,
    levels: Tensor,
    level_of_row: Tensor,
    ends: Tensor,
    first_bin: int,
    bins: Tensor,
) -> RowSums:
    """Sum the counted values of each row, and add them to the row's histogram in place.

    The second half of a histogram has the values from 0, whose bin is the exponent and the first 6 bits of the
    mantissa, as an integer, minus `first_bin`, clamped to the existing bins. The first half has the negative values in
    the reverse order, but those of the bin of 0 are in that one.

    Args:
        values: (rows, queries), float32.
        counted: (rows, queries), bool, True for the values to add.
        levels: (levels, queries), float32, what is subtracted from values in the sums of texts.
        level_of_row: (rows,), int64, the index of each row's levels; -1 for none.
        ends: (texts + 1,), int64, the first query of each text, and the number of queries.
        first_bin: the integer of the first bin, see above.
        bins: (rows, bins), int64, the number of values in each bin, an even number of bins.

    Raises:
        ArgumentError: the shapes, the dtypes or the indices do not fit each other, or a tensor is not contiguous.
    """
    import torch

    # The library receives addresses, so nothing but this check keeps it inside of the tensors.
    given = values, counted, levels, level_of_row, ends, bins
    dims = tuple(each.dim() for each in given)
    types = (torch.float32, torch.bool, torch.float32, torch.int64, torch.int64, torch.int64)
    fits = dims == (2, 2, 2, 1, 1, 2) and tuple(each.dtype for each in given) == types
    fits = fits and values.shape == counted.shape and len(values) == len(level_of_row) == len(bins)
    fits = fits and levels.shape[1] == values.shape[1] and bins.shape[1] > 0 and bins.shape[1] % 2 == 0
    edges = ends.tolist() if fits else []
    fits = bool(edges) and edges[0] == 0 and edges[-1] == values.shape[1] and edges == sorted(edges)
    fits = fits and max(level_of_row.tolist(), default=-1) < len(levels)
    if not (fits and all(each.is_cpu and each.is_contiguous() for each in given)):
        described = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in given)
        raise ArgumentError(
            "The values, which of them count, the levels, the level of each row, the ends of the texts and the "
            f"histograms are {described}.",
            "Give float32 and bool (rows, queries), float32 (levels, queries), int64 (rows,) below the number of "
            "levels, int64 (texts + 1,) from 0 to the number of queries, and int64 (rows, bins), an even number of "
            "bins, on the CPU, all contiguous.",
        )
    rows, texts = len(values), len(ends) - 1
    found = RowSums(*torch.empty(5, rows, dtype=torch.float64), *torch.empty(2, rows, texts, dtype=torch.float64))
    inputs = (each.data_ptr() for each in given[:-1])
    sizes = rows, values.shape[1], texts, first_bin, bins.shape[1]
    addresses = (each.data_ptr() for each in (*found, bins))
    _library().functions["sum_rows"](*inputs, *sizes, *addresses, torch.get_num_threads())
    return found


def _library() -> _NativeLibrary:
    found = _library_or_reason()
    if isinstance(found, str):
        raise ArgumentError(f"The native kernel cannot run: {found}.", "Leave kernel out to use another kernel.")
    return found


@cache
def _library_or_reason() -> _NativeLibrary | str:
    """Load the library, or return why it is missing."""
    return _load_library(Path(str(files("multihead.kernels.native").joinpath(LIBRARY_NAME))))


_text, _number, _pointer = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
# C function of the library -> its argument types and its return type.
_FUNCTION_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "instruction_set": ((_number,), _text),
    "compiled": ((_number,), _number),
    "runs": ((_number,), _number),
    "fastest": ((), _number),
    "fastest_of_cpu": ((), _number),
    "tile_rows": ((_number,), _number),
    "tile_columns": ((_number,), _number),
    "sum_rows": ((*(_pointer,) * 5, *(_number,) * 5, *(_pointer,) * 8, _number), None),
    "schema": ((_number,), _text),
    "torch_functions": ((), _text),
    "register": ((_pointer,), _number),
    "choose": ((_number,), None),
    "choose_in_thread": ((_number,), None),
}


def _load_library(path: Path) -> _NativeLibrary | str:
    # torch must be loaded before the library, so that the library uses torch's OpenMP runtime and threads and does not
    # start a second runtime.
    import torch

    if not path.is_file():
        return "its library was not built when multihead was installed, which takes GCC or Clang with OpenMP"
    try:
        library = ctypes.CDLL(str(path))  # ctypes.CDLL releases the GIL during calls
        call = {name: getattr(library, f"multihead_{name}") for name in _FUNCTION_SIGNATURES}
    except (OSError, AttributeError) as error:
        return f"its library does not load ({error})"
    for name, (arguments, result) in _FUNCTION_SIGNATURES.items():
        call[name].argtypes, call[name].restype = arguments, result
    schemas = Path(__file__).with_name("schemas.txt").read_text(encoding="utf-8").split("\n")
    if any(call["schema"](index) != line.encode() for index, line in enumerate(schemas) if line):
        return "its library is of another version of multihead; install multihead again"
    try:
        functions = _addresses_of_torch_functions(
            Path(torch.__file__).parent, call["torch_functions"]().decode().split()
        )
    except (OSError, AttributeError) as error:
        return f"its operators need functions that torch {torch.__version__} lacks ({error})"
    if not call["register"]((_pointer * len(functions))(*functions)):
        return f"its operators cannot be registered in torch {torch.__version__}"
    sets: list[InstructionSet] = []
    while (encoded := call["instruction_set"](len(sets))) is not None:
        index, name = len(sets), encoded.decode()
        compiled, runs = bool(call["compiled"](index)), bool(call["runs"](index))
        tile = call["tile_rows"](index), call["tile_columns"](index)
        sets.append(InstructionSet(name, index, compiled, runs, name.startswith("emulated"), tile))
        if runs and name == os.environ.get(INSTRUCTION_SET_VARIABLE):
            call["choose"](index)  # in case a program calls the operators before `chosen_instruction_set`
    return _NativeLibrary(
        path=path,
        functions=call,
        instruction_sets=tuple(sets),
        fastest_set=sets[call["fastest"]()],
        fastest_set_of_cpu=sets[call["fastest_of_cpu"]()],
    )


def _addresses_of_torch_functions(package: Path, names: list[str]) -> list[int | None]:
    """Return the addresses of functions in torch's shared library, None for a missing function."""
    file = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    loaded = ctypes.CDLL(str(package / "lib" / file))
    return [ctypes.cast(getattr(loaded, name), _pointer).value for name in names]


@cache
def default_instruction_set() -> InstructionSet:
    """Return the instruction set of this process: of MULTIHEAD_CPU, else the fastest."""
    library, name = _library(), os.environ.get(INSTRUCTION_SET_VARIABLE)
    if not name and (finding := missing_faster_instruction_set()) is not None:
        warnings.warn(finding, SlowPathWarning, stacklevel=2)
    found = library.fastest_set
    if name:
        found = _runnable_instruction_set(name, f"{INSTRUCTION_SET_VARIABLE} is {name!r}")
    library.functions["choose"](found.index)
    return found


def _runnable_instruction_set(name: str, finding: str) -> InstructionSet:
    """Return the instruction set with a name, or raise an error that begins with `finding`."""
    sets = {each.name: each for each in _library().instruction_sets}
    found = sets.get(name)
    if found is not None and found.is_supported_by_cpu:
        return found
    if found is None:
        finding += ", and there is no such instruction set"
    else:
        finding += ", which this CPU cannot run" if found.compiled else ", which this build does not contain"
    runnable = ", ".join(each.name for each in sets.values() if each.is_supported_by_cpu)
    raise ArgumentError(f"{finding}.", f"Give one that runs here: {runnable}.")
