"""The house rules that no tool checks: imports without cycles, a first sentence in every file, public names, pins."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

from multihead.kernels.parts import PART_FAMILIES, PARTS
from multihead.kinds import KINDS
from multihead.probes.catalogue import PROBES
from tools import api

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "multihead"
PYTHON = sorted(
    path for folder in ("src", "tests", "tools", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
MODULES = [path for path in PYTHON if path.is_relative_to(SRC.parent)]
TARGETS = (
    "demo",
    "demo-long",
    "demo-census",
    "demo-image",
    "test",
    "fuzz",
    "browser",
    "pictures",
    "check",
    "docs",
    "bench",
    "bench-native",
    "cuda",
    "gpu-code",
    "gpu-compile",
    "families",
    "sanitize",
    "arm",
    "mutants",
    "lowest",
    "canary",
    "wheel",
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_module_imports_a_module_that_imports_it() -> None:
    """The layers of packages are those of pyproject.toml, which `make check` enforces; this holds within them, too."""
    graph = grimp.build_graph("multihead", "multihead_lab")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_the_page_of_the_architecture_lists_the_layers_of_pyproject() -> None:
    """The layers are told once, by the contract that is checked; the page adds what is in each."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = [
        set(re.findall(r"\w+", layer)) for each in contracts if each["id"] == "floors" for layer in each["layers"]
    ]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Source layout")[2]
    listed = re.findall(r"^\| `(\w+)(?:/[\w/]*|\.py)` \|", page.partition("\n## ")[0], re.MULTILINE)
    assert sorted(listed) == sorted(set().union(*layers))
    floors = [next(number for number, layer in enumerate(layers) if name in layer) for name in listed]
    assert floors == sorted(floors)


IMPORTED_BY_NAME = {
    "__init__.py": "a public name is imported when it is first used",
    "cli/__init__.py": "so is a command",
    "cli/model_options.py": "the user names the module",
    "observation/presentation.py": "a record is shown by its methods, whose functions are in the layers above it",
}


@cache
def nodes_of_library() -> list[tuple[str, list[ast.AST]]]:
    """Return the path of each file of the library within it, and all nodes of its syntax tree."""
    return [
        (path.relative_to(SRC).as_posix(), [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))])
        for path in sorted(SRC.rglob("*.py"))
    ]


def test_no_import_hides_in_a_string() -> None:
    """An import by a string passes the contracts of the layers, so each of them has a reason."""
    found = {
        file
        for file, nodes in nodes_of_library()
        for node in nodes
        if isinstance(node, (ast.Name, ast.Attribute))
        and (node.id if isinstance(node, ast.Name) else node.attr) in ("import_module", "__import__")
    }
    assert found == IMPORTED_BY_NAME.keys()


WHERE_STATISTICS_HAVE_NAMES = ("kernels/parts.py", "probes/", "kinds.py", "locale/")
NAMED_BY_STRING = {  # file -> the words, and why they name no statistic and no part there
    "contract.py": ({"logsumexp"}, "the second result of an attention call"),
    "counting/heads_table.py": ({"position"}, "a column of the file: where an example stands in its text"),
    "counting/merge.py": ({"position"}, "the same column"),
    "counting/shard.py": ({"position"}, "the same column"),
    "errors/moved.py": ({"offset_mass", "tokens_mass"}, "functions of multihead.probes"),
    "functional.py": ({"logsumexp"}, "an argument, named in an error"),
    "interventions/ablate.py": ({"position"}, "an option: means per text or per position"),
    "interventions/means.py": ({"position"}, "the same option"),
    "record/loading.py": ({"logsumexp"}, "a tensor of the file"),
    "viewer/census_page.py": ({"position"}, "the column about an example"),
}


def test_no_string_names_a_statistic_or_a_part() -> None:
    """What a statistic means is asked of its value; a name in a string would be a second home of that knowledge.

    A name is a whole string, or stands in quotes in a longer one; one with an underscore, and any `..._mass`, counts
    anywhere in a string. Docstrings may name statistics.
    """
    names = {*PROBES, *PARTS, *PART_FAMILIES, *(kind.statistic for kind in KINDS)}
    words = "|".join(names)
    snake = "|".join(name for name in names if "_" in name)
    named = re.compile(rf"^(?:{words})$|(?<=[\"'`])(?:{words})(?=[\"'`])|\b(?:{snake}|\w*_mass)\b")
    found = {}
    for file, nodes in nodes_of_library():
        statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        strings = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        words_of_file = {name for node in strings if id(node) not in statements for name in named.findall(node.value)}
        if words_of_file and not file.startswith(WHERE_STATISTICS_HAVE_NAMES):
            found[file] = words_of_file
    assert found == {file: words for file, (words, _) in NAMED_BY_STRING.items()}


def test_the_first_line_of_every_file_says_what_it_is_for() -> None:
    opening = re.compile(r'r?"""\S.*[.:?!]("""|\n)')
    assert [name(path) for path in PYTHON if not opening.match(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=name)
def test_every_folder_is_a_package(folder: Path) -> None:
    assert (folder / "__init__.py").exists(), f"{name(folder)} has no __init__.py, so it would not be installed."


@pytest.mark.parametrize("module_name", api.MODULES)
class TestTheFace:
    def test_its_export_list_is_sorted_and_free_of_doubles(self, module_name: str) -> None:
        exported = list(importlib.import_module(module_name).__all__)
        assert exported == sorted(set(exported))

    def test_every_exported_name_exists(self, module_name: str) -> None:
        module = importlib.import_module(module_name)
        assert [each for each in module.__all__ if not hasattr(module, each)] == []

    def test_every_public_name_is_exported(self, module_name: str) -> None:
        module = importlib.import_module(module_name)
        if not hasattr(module, "__path__"):
            return  # a module, not a package: it has helpers of its own
        public = {
            each
            for each, value in vars(module).items()
            if not each.startswith("_") and getattr(value, "__module__", "").startswith("multihead")
        }
        assert public - set(module.__all__) == set()

    def test_every_exported_function_and_class_shows_an_example(self, module_name: str) -> None:
        module = importlib.import_module(module_name)
        without = [
            each
            for each in module.__all__
            if callable(value := getattr(module, each))
            and not (isinstance(value, type) and issubclass(value, Exception))
            and ">>> " not in (value.__doc__ or "")
        ]
        assert without == []


def test_the_stub_of_the_package_has_the_names_of_the_package() -> None:
    stub = ast.parse((SRC / "__init__.pyi").read_text(encoding="utf-8"))
    named = {
        alias.name: f"{node.module}.{alias.name}" if node.module == "multihead" else node.module
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    package = importlib.import_module("multihead")
    assert sorted(named) == package.__all__
    assert {each: module for each, module in named.items() if each in package._MODULES} == package._MODULES


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class TestNothingIsImportedUntilItIsUsed:
    def test_the_package_imports_no_torch(self) -> None:
        assert in_a_new_process("import sys, multihead; print('torch' in sys.modules)") == "False"

    @pytest.mark.parametrize("option", ["--version", "--help"])
    def test_the_command_line_imports_no_torch(self, option: str) -> None:
        code = f"import sys; from multihead.cli import main\ntry: main([{option!r}])\nexcept SystemExit: pass\n"
        assert in_a_new_process(code + "print('torch' in sys.modules)").endswith("False")

    def test_a_name_that_is_not_there_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match=r"^module 'multihead' has no attribute 'atention'$"):
            importlib.import_module("multihead").atention  # noqa: B018

    # tests/ecosystem/test_export.py has a compiled function be the first to use it.


def requirements() -> list[Requirement]:
    """Everything that pyproject.toml asks for: at run time, in the extras, for building and for developing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lists = [
        project["build-system"]["requires"],
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    ]
    asked = [Requirement(line) for each in lists for line in each if isinstance(line, str)]  # no include-group
    return [requirement for requirement in asked if requirement.name != "multihead"]


def pins() -> dict[str, str]:
    """The exact version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {package.lower().replace("_", "-"): version for package, version in found.items()}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_everything_asked_for_is_pinned_within_its_range(requirement: Requirement) -> None:
    version = pins().get(requirement.name)
    assert version is not None, f"{requirement.name} is not in constraints.txt. Add the version that was tested."
    assert version in requirement.specifier, f"constraints.txt has {requirement.name} {version}, outside {requirement}."


@pytest.mark.parametrize("page", ["docs/install.md", "docs/install.zh.md"])
def test_the_page_about_installing_lists_every_extra_with_its_packages(page: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        extra: [re.sub(r"multihead\[(\w+)\]|>=.*", r"\1", line) for line in lines]
        for extra, lines in project["optional-dependencies"].items()
        if extra != "all"
    }
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    listed = {extra: re.split(r", |、", packages.replace("`", "")) for extra, packages in rows if extra in extras}
    assert listed == extras
    assert set(re.findall(r"\w+", project["optional-dependencies"]["all"][0])) == {"multihead", *extras}


def test_make_alone_lists_every_habit_in_one_line_each() -> None:
    # `make test` runs this test, so what that make hands down to its children is taken away.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
    listing = subprocess.run(
        ["make"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert sorted(line.split()[1] for line in listing.splitlines()) == sorted((*TARGETS, "help"))


def test_each_path_that_contributing_names_exists_and_contains_what_its_row_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| you want to ... |") : text.index("## Every day")]
    paths = re.findall(r"`([\w./]+/[\w./]*)`", table)
    assert len(paths) > 40
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"CONTRIBUTING.md names {missing}, which do not exist. Name what took their place."
    for word, path in re.findall(r"`([^`/]+)`(?: and [^|`]*`[^`]*`)? in `([\w./]+)`", table):
        assert word in (ROOT / path).read_text(encoding="utf-8"), f"{path} does not contain {word!r}. Change the row."


def test_the_citation_has_the_version_and_the_license_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    fields = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE))
    assert (fields["cff-version"], fields["version"]) == ("1.2.0", project["version"])
    assert fields["license"] == project["license"]


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_stays_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= 150, f"Move a part of {page} to docs/."


SCRIPTS = sorted(path for path in (ROOT / "src").rglob("*.js"))
STYLES = sorted(path for path in (ROOT / "src").rglob("*.css"))


def test_the_first_line_of_every_script_and_style_says_what_it_is_for() -> None:
    opening = re.compile(r"// [A-Z\"].*|/\* [A-Z\"].*")
    assert [name(path) for path in (*SCRIPTS, *STYLES) if not opening.match(path.read_text(encoding="utf-8"))] == []


def test_no_line_of_a_script_or_style_is_longer_than_those_of_python() -> None:
    """The formatter breaks code, and neither comments nor strings."""
    lines = [
        f"{name(path)}:{number}"
        for path in (*SCRIPTS, *STYLES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert lines == []
