"""Run the notebooks of examples/ and store what they print, clean of everything that belongs to one machine.

A notebook X.ipynb and its twin X.zh.ipynb hold the same code, so the code runs once, in a fresh kernel, and both keep
the same outputs. What is stored is text and drawings as SVG: no binary blob, no path, no time of day.

    python -m tools.notebooks [examples/split.ipynb ...]
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 120  # the longest a cell may take
_KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
_LANGUAGE = {"language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}}
_SIGNATURE = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?")


def main(paths: list[str]) -> int:
    """Run the English notebooks named, or all, and store the outputs in each and in its twin."""
    for path in map(Path, paths) if paths else notebooks():
        executed = run(read(path))
        for each in (path, twin(path)):
            notebook = read(each)
            take_outputs(notebook, executed)
            write(clean(notebook), each)
        print(f"{path.name}: {len(code_cells(executed))} code cells ran.")
    return 0


def notebooks(folder: Path = EXAMPLES) -> list[Path]:
    """The English notebooks, in the order of their names."""
    return [path for path in sorted(folder.glob("*.ipynb")) if not path.name.endswith(".zh.ipynb")]


def twin(path: Path) -> Path:
    """The Chinese notebook of an English one.

    >>> twin(Path("split.ipynb")).name
    'split.zh.ipynb'
    """
    return path.with_suffix(".zh.ipynb")


def read(path: Path) -> Any:
    """Read a notebook; nbformat gives it as nested dicts."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def write(notebook: Any, path: Path) -> None:
    """Write a notebook."""
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


def _nodes(value: Any) -> Any:
    return nbformat.from_dict(value)  # type: ignore[no-untyped-call]


def code_cells(notebook: Any) -> list[Any]:
    """The cells that are run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(notebook: Any) -> Any:
    """Run a copy from top to bottom in a fresh kernel; an error in a cell is raised."""
    copy = _nodes(notebook)
    before = os.environ.copy()
    with tempfile.TemporaryDirectory() as folder:
        # The kernel would read the settings of whoever runs this, and write its history beside them.
        os.environ |= {"IPYTHONDIR": folder, "MPLCONFIGDIR": folder, "HF_HUB_OFFLINE": "1"}
        os.environ.pop("MPLBACKEND", None)
        try:
            # A kernel would warn that its port, which is open to this machine only, is not encrypted.
            quiet = ["--log-level=ERROR"]
            NotebookClient(
                copy, timeout=SECONDS, kernel_name="python3", record_timing=False, extra_arguments=quiet
            ).execute(cwd=str(ROOT))
        finally:
            os.environ.clear()
            os.environ.update(before)
    return copy


def take_outputs(notebook: Any, executed: Any) -> None:
    """Put the outputs of a run into a notebook with as many code cells."""
    for cell, ran in zip(code_cells(notebook), code_cells(executed), strict=True):
        cell.outputs, cell.execution_count = deepcopy(ran.outputs), ran.execution_count


def clean(notebook: Any) -> Any:
    """Keep of a notebook what is the same wherever it runs."""
    notebook.metadata = _nodes(_KERNEL | _LANGUAGE)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", _nodes({})
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                _clean_output(output)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Join what was printed in a row: a kernel sends it in as many pieces as its clock has it."""
    joined: list[Any] = []
    for output in outputs:
        before = joined[-1] if joined else None
        if before and "stream" == output.output_type == before.output_type and before.name == output.name:
            before.text += output.text
        else:
            joined.append(output)
    return joined


def _clean_output(output: Any) -> None:
    if output.output_type in ("display_data", "execute_result"):
        output.metadata = _nodes({})
        if "image/svg+xml" in output.data:  # "<Figure size 640x480 with 2 Axes>" says less than nothing beside it
            output.data = _nodes({"image/svg+xml": slim(output.data["image/svg+xml"])})


def slim(drawing: str) -> str:
    r"""Take from an SVG who drew it and what no eye sees: decimals after the second, and a line for every corner.

    >>> slim('<path d="M 1.23456 2\nL 3 4.5\nz\n" />')
    '<path d="M 1.23 2 L 3 4.5 z" />'
    """
    drawing = _SIGNATURE.sub("", drawing)
    drawing = re.sub(r"(\.\d\d)\d+", r"\1", drawing)
    drawing = re.sub(r'\s*\n"', '"', re.sub(r"\n(?=[LMQCz])", " ", drawing))
    return "\n".join(map(str.rstrip, drawing.splitlines()))


def printed(cell: Any) -> str:
    """What a cell printed and showed as text; drawings are left out."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif "image/svg+xml" not in output.get("data", {}):
            parts.append(output.get("data", {}).get("text/plain", "") + "\n")
    return "".join(parts)


def same_text(first: str, second: str) -> bool:
    """Whether two texts are the same, up to one unit in the last decimal shown.

    Another processor adds in another order, and the last digit may be rounded the other way. Whole numbers, shapes
    among them, are compared as they are.

    >>> same_text("entropy 1.250 of 3", "entropy 1.251 of 3"), same_text("entropy 1.250 of 3", "entropy 1.250 of 4")
    (True, False)
    """
    if _NUMBER.split(first) != _NUMBER.split(second):
        return False
    return all(
        ours is not None and theirs is not None and _close(ours, theirs)
        for ours, theirs in zip_longest(_NUMBER.findall(first), _NUMBER.findall(second))
    )


def _close(first: str, second: str) -> bool:
    decimals = {len(number.partition(".")[2]) for number in (first, second)}
    if len(decimals) > 1:
        return False
    places = decimals.pop()
    return first == second or (places > 0 and abs(float(first) - float(second)) < 1.5 * 10**-places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
