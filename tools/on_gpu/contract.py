"""Each kernel against float64 (multihead.contract), then what users do on a GPU (tests/kernels/test_cuda.py)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from multihead import contract
from multihead.kernels.proven import code_of
from tools.on_gpu.worker import Cases

TESTS = "tests.kernels.test_cuda"
OF_THE_CONTRACT = "test_every_kernel_passes_the_contract"  # the test that runs the cases of `multihead.contract`


def cases(seconds: float) -> Cases:
    """Return every kernel with every call that it accepts, and the tests of users' ways."""
    device = torch.device("cuda")
    found: dict[str, Callable[[], dict[str, object]]] = {
        f"{kernel}: {call}": partial(check, kernel, call, device)
        for kernel in contract.kernels_on(device)
        for call in contract.CALLS
        if contract.accepts(kernel, call, device)
    }
    try:
        module = importlib.import_module(TESTS)
    except Exception as error:  # noqa: BLE001 - what the tests import may be missing or too old here
        return found | {TESTS: partial(_raise, error)}
    for name, function in vars(module).items():
        if name.startswith("test_") and name != OF_THE_CONTRACT:
            for label, arguments in expand(function):
                found[f"{name}{label}"] = partial(run_test, function, arguments)
    return found


def check(kernel: str, call: contract.Call, device: torch.device) -> dict[str, object]:
    """Check one call of the contract; return its kernel, the hash of the kernel's code, and its largest error."""
    path = contract.path_of(kernel)
    error = contract.check(kernel, call, device)  # as a part of the tolerance
    return {"kernel": kernel, "code": None if path is None else code_of(path.sources), "error": round(error, 3)}


def expand(function: Callable[..., object]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label and the arguments of each case of a test, from its `pytest.mark.parametrize` marks."""
    lists = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            given, values = mark.args
            names = [each.strip() for each in given.split(",")] if isinstance(given, str) else given
            values = [each if len(names) > 1 else (each,) for each in values]
            lists.append([dict(zip(names, each, strict=True)) for each in values])
    for chosen in product(*lists):
        arguments = {name: value for each in chosen for name, value in each.items()}
        label = ", ".join(map(str, arguments.values()))
        yield f"[{label}]" if label else "", arguments


def run_test(function: Callable[..., object], arguments: dict[str, Any]) -> dict[str, object]:
    """Run a test with the seed that pytest gives it here."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(**arguments)
    return {}


def _raise(error: Exception) -> dict[str, object]:
    raise error
