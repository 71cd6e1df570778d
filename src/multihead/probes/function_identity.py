"""Identify a Python function by what it computes, so that two probes with different functions differ.

The identity is a hash of the function's code, constants, default values, closure and of the global values that it
reads, without names of files and line numbers. The same function, defined twice, pickled or sent to another process of
the same Python version, has the same identity. Functions of this library and of installed packages are identified by
their names, so that the identity of a built-in probe depends neither on the Python version nor on line edits.
"""

from __future__ import annotations

import dis
import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
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
_NAMED_TYPES = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device)


class _UnknownValueError(Exception):
    """A function reads a value whose content cannot be described."""


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
    except (_UnknownValueError, RecursionError):
        return None
    return digest.hexdigest()


class _Description:
    """The description of a value as a sequence of strings; an object within itself is described by its depth."""

    def __init__(self) -> None:
        self.ids: list[int] = []  # of the objects around the one that is being described
        self.remaining = _MAX_VALUES

    def of_value(self, value: Any) -> Iterator[str]:
        """Yield the description of any value that a function may read."""
        self.remaining -= 1
        if not self.remaining:
            raise _UnknownValueError
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
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, _NAMED_TYPES):
            yield f"named {value.__qualname__}"
            yield from self.of_value(getattr(value, "__self__", None))
        elif isinstance(value, Tensor | np.ndarray):
            array = value.detach().cpu().contiguous() if isinstance(value, Tensor) else torch.from_numpy(value.copy())
            content = hashlib.blake2b(array.flatten().view(torch.uint8).numpy().tobytes(), digest_size=16)
            yield f"array {array.dtype} {tuple(array.shape)} {content.hexdigest()}"
        else:
            yield from self._of_object(value)

    def _of_object(self, value: Any) -> Iterator[str]:
        """Yield the description of a container, a callable object or another instance of a class."""
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, list | tuple):
            yield from self._of_all(*value)
        elif isinstance(value, set | frozenset):
            yield from sorted(" ".join(_Description().of_value(each)) for each in value)
        elif isinstance(value, Mapping):
            yield from self._of_all(*(part for pair in value.items() for part in pair))
        elif isinstance(value, MethodType):
            yield from self._of_all(value.__func__, value.__self__)
        elif isinstance(value, partial):
            yield from self._of_all(value.func, value.args, value.keywords)
        elif isinstance(value, itemgetter | attrgetter | methodcaller):
            yield from self._of_all(*value.__reduce__()[1:])
        elif hasattr(value, "__dict__"):
            yield from self._of_class(type(value))
            yield from self.of_value(dict(vars(value)))
        else:
            raise _UnknownValueError

    def _of_all(self, *values: Any) -> Iterator[str]:
        yield f"{len(values)} values"
        for each in values:
            yield from self.of_value(each)

    def _of_function(self, function: FunctionType) -> Iterator[str]:
        if function.__module__.startswith(_LIBRARY) or _is_installed(function.__code__.co_filename):
            yield f"function {function.__module__}.{function.__qualname__}"
        else:
            yield from self.of_value(function.__code__)
            names = dict.fromkeys(_global_names(function.__code__))
            read = {name: function.__globals__[name] for name in names if name in function.__globals__}
            yield from self.of_value(read)
        cells = [each.cell_contents for each in function.__closure__ or ()]
        yield from self._of_all(function.__defaults__, function.__kwdefaults__, cells)

    def _of_code(self, code: CodeType) -> Iterator[str]:
        numbers = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        yield f"code {numbers} {code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_names}"
        yield f"{code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} {code.co_freevars} {code.co_cellvars}"
        yield from self._of_all(*code.co_consts)

    def _of_class(self, kind: type) -> Iterator[str]:
        """Yield the name of a class, and what the classes of scripts among its bases define."""
        yield f"class {kind.__module__}.{kind.__qualname__}"
        for each in kind.__mro__:
            methods = {name: value for name, value in vars(each).items() if isinstance(value, FunctionType)}
            own = [
                value
                for value in methods.values()
                if not value.__module__.startswith(_LIBRARY) and not _is_installed(value.__code__.co_filename)
            ]
            yield from self._of_all(*own)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the global values that a function and the functions inside it read."""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _is_installed(file: str) -> bool:
    """Whether a source file belongs to Python or to an installed package."""
    path = Path(file)
    return path.is_relative_to(_STANDARD_LIBRARY) or not _FOLDERS_OF_PACKAGES.isdisjoint(path.parts)
