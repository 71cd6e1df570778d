"""Two functions have one identity if they compute the same from the same values, wherever they were defined."""

from __future__ import annotations

import enum
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from multihead.probes import PROBES
from multihead.probes.function_identity import identity_of_function

GLOBAL = """
FACTOR = {factor}
NAMES = {{"b", "a", "c"}}
def helper(x):
    return x * FACTOR
class Scaled:
    def __init__(self, by):
        self.by = by
    def __call__(self, parts):
        return parts["entropy"] * self.by
    def method(self, parts, power={power}):
        return [self.by ** power for each in parts if each in {{"a", "b"}}]
def closure(by):
    return lambda parts: by * helper(parts["entropy"])
def recursive(n):
    return recursive(n - 1) if n else {power}
tensor = torch.tensor([1.0, {power}])
sparse = tensor.to_sparse()
names = np.array(["a", "{power}"], dtype=object)
class Settings(enum.Enum):
    FACTOR = {factor}
class Numbers(list):
    pass
numbers = Numbers()
numbers.factor = {factor}
pattern = re.compile("x" * 300 + "{power}")
class Members:
    __slots__ = ("state",)
    factor = {factor}
    def __init__(self):
        self.state = {power}
    @staticmethod
    def static():
        return {power}
    @classmethod
    def of_class(cls):
        return {power}
    @property
    def by_property(self):
        return {power}
"""
KINDS: dict[str, Callable[[dict[str, Any]], Callable[..., object]]] = {
    "constant": lambda all_: all_["recursive"],
    "global value": lambda all_: all_["helper"],
    "closure": lambda all_: all_["closure"](all_["FACTOR"]),
    "global of a global": lambda all_: all_["closure"](1),
    "default value": lambda all_: all_["Scaled"].method,
    "state of an object": lambda all_: all_["Scaled"](all_["FACTOR"]),
    "bound method": lambda all_: all_["Scaled"](all_["FACTOR"]).method,
    "partial": lambda all_: partial(all_["helper"], all_["FACTOR"]),
    "tensor": lambda all_: partial(torch.mul, all_["tensor"]),
    "sparse tensor": lambda all_: partial(torch.mul, all_["sparse"]),
    "array of objects": lambda all_: partial(torch.mul, all_["names"]),
    "enumeration": lambda all_: partial(torch.mul, all_["Settings"].FACTOR),
    "attribute of a list": lambda all_: partial(torch.mul, all_["numbers"]),
    "pattern": lambda all_: partial(torch.mul, all_["pattern"]),
    "slot": lambda all_: partial(torch.mul, all_["Members"]()),
    **{
        name: lambda all_, name=name: partial(torch.mul, _only_member(all_["Members"], name))
        for name in ("factor", "static", "of_class", "by_property")
    },
    "module": lambda all_: _reads_module(all_["FACTOR"]),
}


def _only_member(kind: type, name: str) -> type:
    """A class of a script with one of the members."""
    return type("One", (), {"__module__": "script", name: vars(kind)[name]})


def _reads_module(factor: float) -> Callable[[Any], Any]:
    """A function that reads a value of a module of its own."""
    settings = ModuleType("settings")
    settings.FACTOR = factor  # type: ignore[attr-defined]
    return lambda parts: parts["entropy"] * settings.FACTOR


def defined(*, lines: int = 0, factor: float = 2.0, power: int = 2) -> dict[str, Any]:
    """Define the functions of a script, whose first line is further down."""
    names: dict[str, Any] = {"torch": torch, "np": np, "enum": enum, "re": re, "__name__": "script"}
    exec(compile("\n" * lines + GLOBAL.format(factor=factor, power=power), f"file-{lines}.py", "exec"), names)
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_is_defined_again_elsewhere_is_the_same_until_a_value_changes(kind: str) -> None:
    function = KINDS[kind]
    found = identity_of_function(function(defined()))
    assert found is not None
    assert identity_of_function(function(defined(lines=7))) == found
    assert identity_of_function(function(defined(factor=2.5, power=3))) != found


def test_other_code_is_another_function() -> None:
    functions: list[Callable[..., Any]] = [
        lambda x: x + 1,
        lambda x: x - 1,
        lambda x: x.exp(),
        lambda x: x.log(),
        lambda x: [each + 1 for each in x],
        lambda x: [each + 2 for each in x],
        lambda x: x + 1.0,
        torch.exp,
        torch.log,
        torch.Tensor.exp,
        itemgetter("a"),
        itemgetter("b"),
        partial(torch.add, 1),
        partial(torch.add, 2),
    ]
    assert len({identity_of_function(each) for each in functions} - {None}) == len(functions)


def test_another_process_finds_the_same_identity_whatever_the_order_of_its_sets() -> None:
    script = (
        "import torch\n"
        "from tests.probes.test_function_identity import KINDS, defined\n"
        "from multihead.probes.function_identity import identity_of_function\n"
        "print([identity_of_function(each(defined())) for each in KINDS.values()])"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == f"{[identity_of_function(each(defined())) for each in KINDS.values()]}\n"


def test_a_function_of_the_library_is_identified_by_its_name_so_that_no_edit_and_no_python_version_changes_it() -> None:
    function = PROBES["effective_keys"].of
    assert isinstance(function, FunctionType)
    edited = FunctionType((lambda parts: None).__code__, function.__globals__)
    edited.__module__, edited.__qualname__ = function.__module__, function.__qualname__
    assert identity_of_function(edited) == identity_of_function(function)


def test_a_value_that_cannot_be_described_leaves_a_function_without_an_identity() -> None:
    numbers = (each for each in range(3))
    assert identity_of_function(lambda _: next(numbers)) is None
