"""Without an optional package the library works, and whatever needs the package names the extra that installs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from multihead.errors import MissingPackageError, MultiheadError
from multihead.errors.optional import require

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRE = re.compile(r'require\(([^)]*?)purpose=(?:(?!extra=).)*extra="(\w+)"', re.DOTALL)

# An import hook that blocks packages, in a new process: what this one has imported would hide what is imported.
BLOCKED = """
import sys

class Blocked:
    names = {names}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Blocked())
"""
EVERYTHING = {
    *("accelerate", "click", "gguf", "onnx", "pandas", "rich"),
    *("safetensors", "starlette", "transformers", "uvicorn"),
}  # but jinja2, which torch needs

LIBRARY = """
import torch, multihead as mh
q = torch.randn(1, 2, 6, 8)
output = mh.attention(q, q, q, mask=mh.masks.Causal())
right = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
layer = mh.MultiHeadAttention(16, 2)
with mh.observe(layer) as record:
    layer(torch.randn(1, 6, 16))
print(torch.allclose(output, right, atol=1e-5), "entropy" in str(record.table()))
"""


PACKAGE_OF_MODULE = {"PIL": "pillow"}  # modules whose package has another name


def run(code: str, *blocked: str, argv: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process in which some packages cannot be imported."""
    command = [sys.executable, "-c", BLOCKED.format(names=set(blocked)) + code, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def packages(extra: str) -> set[str]:
    """Return the packages that an extra installs, those of the extras inside it included."""
    found: set[str] = set()
    for line in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == "multihead":
            found = found.union(*(packages(each) for each in requirement.extras))
        else:
            found.add(requirement.name)
    return found


def test_the_core_needs_torch_and_numpy_alone() -> None:
    assert {Requirement(line).name for line in PROJECT["dependencies"]} == {"torch", "numpy"}


def test_all_installs_every_extra() -> None:
    (line,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(line).extras == set(PROJECT["optional-dependencies"]) - {"all"}


def test_an_error_names_an_extra_that_installs_its_packages() -> None:
    found = [
        (path.name, {PACKAGE_OF_MODULE.get(each, each) for each in re.findall(r'"(\w+)"', given)}, extra)
        for path in (ROOT / "src").rglob("*.py")
        for given, extra in REQUIRE.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 10
    assert [each for each in found if not each[1] <= packages(each[2])] == []


def test_a_missing_package_is_an_import_error_and_one_of_ours() -> None:
    with pytest.raises(MissingPackageError) as caught:
        require("no_such_package", purpose="This", extra="cli")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, MultiheadError)
    assert str(caught.value) == (
        'This needs no_such_package, which is not installed. Run pip install "multihead[cli]".'
    )


def test_several_missing_packages_are_named_together_and_installed_ones_are_not() -> None:
    with pytest.raises(MissingPackageError) as caught:
        require("torch", "no_such_package", "nor_this", "nor_that", purpose="This", extra=None)
    assert str(caught.value) == (
        "This needs no_such_package, nor_this and nor_that, which are not installed. "
        "Run pip install no_such_package nor_this nor_that."
    )


class TestTheCommandLine:
    MAIN = "from multihead.__main__ import main; main()"

    @pytest.mark.parametrize("word", ["--version", "--help", "doctor"])
    def test_without_click_it_is_one_sentence_and_exit_code_1(self, word: str) -> None:
        done = run(self.MAIN, "click", argv=(word,))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            'error: The command line needs click, which is not installed. Run pip install "multihead[cli]".\n'
        )

    def test_without_click_and_rich_both_are_named(self) -> None:
        done = run(self.MAIN, "click", "rich")
        assert done.stderr.startswith("error: The command line needs click and rich, which are not installed.")

    def test_with_its_own_extra_alone_it_shows_the_version(self) -> None:
        done = run(self.MAIN, *(EVERYTHING - packages("cli")), argv=("--version",))
        assert (done.returncode, done.stdout, done.stderr) == (0, f"multihead {PROJECT['version']}\n", "")

    @pytest.mark.parametrize(
        ("blocked", "arguments", "purpose", "extra"),
        [
            ("jinja2", ("lab", "--only", "parameters"), "The lab", "lab"),
            ("jinja2", ("look", "m", "--prompt", "a"), "Writing a page", "view"),
            ("safetensors", ("look", "m", "--prompt", "a", "--record", "r.safetensors"), "Saving a record", "view"),
            ("transformers", ("look", "m", "--prompt", "a"), "Loading a model", "hf"),
            ("uvicorn", ("view", "r.safetensors"), "The viewer", "view"),
        ],
    )
    def test_a_verb_names_the_missing_package_before_it_starts(
        self,
        blocked: str,
        arguments: tuple[str, ...],
        purpose: str,
        extra: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        done = run(self.MAIN, blocked, argv=arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f'error: {purpose} needs {blocked}, which is not installed. Run pip install "multihead[{extra}]".\n'
        )
        assert list(tmp_path.iterdir()) == []


PAGE = "from multihead.viewer.page import load_template; load_template('viewer/static/view/index.html')"
CALLS = {
    "onnx": ("mh.export.onnx.to_model(mh.MultiHeadAttention(8, 2))", "Writing a layer as ONNX", '"multihead[onnx]"'),
    "safetensors": ("mh.Record.load('run.safetensors')", "Opening a record", '"multihead[view]"'),
    "jinja2": (PAGE, "Writing a page", '"multihead[view]"'),
    "pandas": ("mh.Record().to_pandas()", "A DataFrame", "pandas"),
}

# Each call in a process of its own, forked from one that has imported the library alone, without any of the packages.
EACH_CALL = """
import os
import multihead as mh
mh.attention
for package, (call, *_) in {calls!r}.items():
    if not os.fork():
        Blocked.names = {{package}}
        try:
            exec(call)
        except mh.errors.MissingPackageError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_call_names_the_missing_package_and_without_any_attention_is_computed_and_observed() -> None:
    done = run(EACH_CALL.format(calls=CALLS) + LIBRARY, *EVERYTHING)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        *(
            f"{purpose} needs {package}, which is not installed. Run pip install {target}."
            for package, (_, purpose, target) in CALLS.items()
        ),
        "True True",
    ]
