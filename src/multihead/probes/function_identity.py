"""Identify a Python function by what it computes, so that two probes with different functions differ.

The identity is a hash of the function's code, constants, default values, closure and of the global values that it
reads, without names of files and line numbers. The same function, defined twice, pickled or sent to another process of
the same Python version, has the same identity. Functions of this library and of installed packages are identified by
their names, so that the identity of a built-in probe depends neither on the Python version nor on line edits; those
without a name of their own, lambdas and functions inside functions, by their code.
"""

from __future__ import annotations

import dis
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cache, partial, partialmethod
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LIBRARY = "multihead."
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_FOLDERS_OF_PACKAGES = {"site-packages", "dist-packages"}
_MAX_VALUES = 100_000  # values that are described at most, such as the elements of lists that a function reads
# members of a class that say nothing about what it computes
_BOOKKEEPING = re.compile(
    "__(module|qualname|doc|dict|weakref|annotations|annotate(_func)?|slots|firstlineno|static_attributes|hash"
    "|parameters|orig_bases|match_args|abstractmethods|dataclass_(fields|params))__|_abc_impl"
)
_DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType)
_NAMED_TYPES = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
_PLAIN_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device),
    *(range, slice, bytearray, Decimal, Fraction, PurePath),
)


def identity_of_function(function: Callable[..., object]) -> str | None:
    """Return a hash of what a function computes, or None if it reads a value that cannot be hashed.

    >>> identity_of_function(lambda x: x + 1) == identity_of_function(lambda x: x + 1)
    True
    >>> identity_of_function(lambda x: x + 1) == identity_of_function(lambda x: x + 2)
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        for part in _Description().of_value(function):
            digest.update(part.encode() + b"\0")
    except Exception:  # noqa: BLE001 - a value of a script can raise any error where it is read
        return None
    return digest.hexdigest()


class _Description:
    """The description of a value as a sequence of strings; an object within itself is described by its depth."""

    def __init__(self) -> None:
        self.ids: list[int] = []  # of the objects around the one that is being described
        self.names: frozenset[str] = frozenset()  # that the function around it reads
        self.remaining = _MAX_VALUES

    def of_value(self, value: Any) -> Iterator[str]:
        """Yield the description of any value that a function may read."""
        self.remaining -= 1
        if not self.remaining:
            raise RecursionError
        if isinstance(value, (*_PLAIN_TYPES, np.generic)):
            yield f"{type(value).__name__} {value!r}"
            return
        if id(value) in self.ids:
            yield f"the value at depth {self.ids.index(id(value))}"
            return
        self.ids.append(id(value))
        yield from self._of_parts(value)
        self.ids.pop()

    def _of_parts(self, value: Any) -> Iterator[str]:
        """Yield the description of a value that is made of others, or that has a name."""
        if isinstance(value, CodeType):
            yield from self._of_code(value)
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, ModuleType):
            yield f"module {value.__name__}"
            if not _is_foreign(value.__name__):
                yield from self.of_value(
                    {name: vars(value)[name] for name in sorted(self.names) if name in vars(value)}
                )
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, _NAMED_TYPES):
            yield f"named {value.__qualname__}"
            yield from self.of_value(getattr(value, "__self__", None))
        elif isinstance(value, Tensor | np.ndarray):
            array = _as_array(value)
            yield f"array {value.dtype} {array.shape}"
            if array.dtype.kind in "biufcV":
                yield hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
            else:
                yield from self.of_value(array.tolist())
        else:
            yield from self._of_object(value)

    def _of_object(self, value: Any) -> Iterator[str]:
        """Yield the description of a container, a callable object or another instance of a class."""
        yield from self._of_class(type(value))
        if isinstance(value, Enum):
            yield from self._of_all(value.name, value.value)
        elif isinstance(value, list | tuple):
            yield from self._of_all(*value)
        elif isinstance(value, set | frozenset):
            yield from sorted(" ".join(_Description().of_value(each)) for each in value)
        elif isinstance(value, Mapping):
            yield from self._of_all(*(part for pair in value.items() for part in pair))
        elif isinstance(value, staticmethod | classmethod):
            yield from self.of_value(value.__func__)
        elif isinstance(value, property):
            yield from self._of_all(value.fget, value.fset, value.fdel)
        elif isinstance(value, MethodType):
            yield from self._of_all(value.__func__, value.__self__)
        elif isinstance(value, partial | partialmethod):
            yield from self._of_all(value.func, value.args, value.keywords)
        elif isinstance(value, re.Pattern):
            yield from self._of_all(value.pattern, value.flags)
        elif hasattr(value, "__dict__"):
            slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
            yield from self.of_value({name: getattr(value, name, None) for name in slots})
        else:
            reduced = value.__reduce_ex__(2)
            yield from self._of_all(*(list(each) if isinstance(each, Iterator) else each for each in reduced))
        own = getattr(value, "__dict__", None)  # also of a subclass of a container
        if own:
            yield from self.of_value(dict(own))

    def _of_all(self, *values: Any) -> Iterator[str]:
        yield f"{len(values)} values"
        for each in values:
            yield from self.of_value(each)

    def _of_function(self, function: FunctionType) -> Iterator[str]:
        around = self.names
        foreign = _is_foreign(function.__module__ or "") or _is_installed(function.__code__.co_filename)
        if foreign and "<" not in function.__qualname__:  # neither <lambda> nor <locals>
            yield f"function {function.__module__}.{function.__qualname__}"
        else:
            yield from self.of_value(function.__code__)
            self.names = around | frozenset(_names(function.__code__))
            names = dict.fromkeys(_global_names(function.__code__))
            read = {name: function.__globals__[name] for name in names if name in function.__globals__}
            yield from self.of_value(read)
        yield from self._of_all(
            function.__defaults__, function.__kwdefaults__, list(map(_content, function.__closure__ or ()))
        )
        self.names = around

    def _of_code(self, code: CodeType) -> Iterator[str]:
        numbers = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        yield f"code {numbers} {code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_names}"
        yield f"{code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} {code.co_freevars} {code.co_cellvars}"
        yield from self._of_all(*code.co_consts)

    def _of_class(self, kind: type) -> Iterator[str]:
        """Yield the name of a class, and what a class of a script and its bases define."""
        yield f"class {kind.__module__}.{kind.__qualname__}"
        if type(kind) is not type and not _is_foreign(type(kind).__module__):
            yield from self.of_value(type(kind))
        for each in kind.__mro__:
            if _is_foreign(each.__module__) or id(each) in self.ids[:-1]:
                continue
            members = {name: value for name, value in vars(each).items() if not _BOOKKEEPING.fullmatch(name)}
            members = {name: value for name, value in members.items() if not isinstance(value, _DESCRIPTORS)}
            self.ids.append(id(each))
            yield from self.of_value(members)
            self.ids.pop()


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the global values that a function and the functions inside it read."""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _names(code: CodeType) -> Iterator[str]:
    """Yield all names that a function and the functions inside it read, those of attributes included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _content(cell: CellType) -> object:
    """Return the content of a closure's cell; a cell without one raises an error only when it is read."""
    try:
        return cell.cell_contents
    except ValueError:
        return "an empty cell"


def _as_array(value: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a tensor of any layout as an array with the same bytes."""
    if isinstance(value, np.ndarray):
        return value
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    plain = dense.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy().reshape(*plain.shape, -1)


@cache
def _is_foreign(module: str) -> bool:
    """Whether a module belongs to this library, to Python, or to an installed package."""
    if module.startswith(_LIBRARY) or module in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and _is_installed(file)


def _is_installed(file: str) -> bool:
    """Whether a source file belongs to Python or to an installed package."""
    path = Path(file)
    return path.is_relative_to(_STANDARD_LIBRARY) or not _FOLDERS_OF_PACKAGES.isdisjoint(path.parts)
