"""Run the notebooks of examples/ and store their outputs, without anything that belongs to one machine.

A notebook X.ipynb and its translation X.zh.ipynb have the same code, so the code runs once, in a new kernel, and both
store the same outputs: text, tables, and drawings as SVG or as the picture of a widget; no path, no time of day, and
not the model of a widget, which ends with its kernel. `nbformat` and `nbclient` take seconds to import, so the
functions that need them import them.

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

from tools.translations import translation

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 120  # the longest a cell, or the start of a kernel, may take
_KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
_LANGUAGE = {"language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}}
_SIGNATURE = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_WIDGET = "application/vnd.jupyter.widget-view+json"
_MARK = re.compile(r'(data-multihead-static=")\w+')  # a random name
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?")


def main(paths: list[str]) -> int:
    """Run the given English notebooks, or all, and store the outputs in each and in its translation."""
    for path in map(Path, paths) if paths else notebooks():
        executed = run(read(path))
        for each in filter(Path.exists, (path, translation(path))):
            notebook = read(each)
            take_outputs(notebook, executed)
            write(clean(notebook), each)
        print(f"{path.name}: {len(code_cells(executed))} code cells ran.")
    return 0


def notebooks(folder: Path = EXAMPLES) -> list[Path]:
    """Return the English notebooks, sorted by name."""
    return [path for path in sorted(folder.glob("*.ipynb")) if not path.name.endswith(".zh.ipynb")]


def read(path: Path) -> Any:
    """Read a notebook as nested dicts."""
    import nbformat

    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def write(notebook: Any, path: Path) -> None:
    """Write a notebook."""
    import nbformat

    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


def _nodes(value: Any) -> Any:
    import nbformat

    return nbformat.from_dict(value)  # type: ignore[no-untyped-call]


def code_cells(notebook: Any) -> list[Any]:
    """Return the code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(notebook: Any) -> Any:
    """Run a copy from top to bottom in a new kernel; an error in a cell is raised."""
    from nbclient import NotebookClient

    copy = _nodes(notebook)
    before = os.environ.copy()
    with tempfile.TemporaryDirectory() as folder:
        # The kernel would read the user's settings, and write its history into their folder.
        os.environ |= {"IPYTHONDIR": folder, "MPLCONFIGDIR": folder, "HF_HUB_OFFLINE": "1"}
        os.environ.pop("MPLBACKEND", None)
        try:
            # A kernel warns that its port is not encrypted; only this machine can reach it. Matplotlib, whose folder is
            # empty, warns if it takes long to list the fonts.
            no_warning = "__import__('logging').getLogger('matplotlib.font_manager').setLevel('ERROR')"
            quiet = ["--log-level=ERROR", f"--IPKernelApp.exec_lines={no_warning}"]
            client = NotebookClient(
                copy,
                timeout=SECONDS,
                startup_timeout=SECONDS,
                kernel_name="python3",
                record_timing=False,
                extra_arguments=quiet,
            )
            client.execute(cwd=str(ROOT))
        finally:
            os.environ.clear()
            os.environ.update(before)
    return copy


def take_outputs(notebook: Any, executed: Any) -> None:
    """Copy the outputs of a run into a notebook with the same code cells."""
    for cell, ran in zip(code_cells(notebook), code_cells(executed), strict=True):
        cell.outputs, cell.execution_count = deepcopy(ran.outputs), ran.execution_count


def clean(notebook: Any) -> Any:
    """Remove from a notebook what depends on the machine or the run."""
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
    """Merge consecutive pieces of printed text: where a kernel splits them depends on timing."""
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
        if "image/svg+xml" in output.data:  # its text, <Figure size 640x480 with 2 Axes>, adds nothing
            output.data = _nodes({"image/svg+xml": slim(output.data["image/svg+xml"])})
        output.data.pop(_WIDGET, None)
        if "text/html" in output.data:
            output.data["text/html"] = _MARK.sub(r"\1", output.data["text/html"])


def slim(drawing: str) -> str:
    r"""Remove from an SVG its metadata, decimals after the second, and the line breaks inside paths.

    >>> slim('<path d="M 1.23456 2\nL 3 4.5\nz\n" />')
    '<path d="M 1.23 2 L 3 4.5 z" />'
    """
    drawing = _SIGNATURE.sub("", drawing)
    drawing = re.sub(r"(\.\d\d)\d+", r"\1", drawing)
    drawing = re.sub(r'\s*\n"', '"', re.sub(r"\n(?=[LMQCz])", " ", drawing))
    return "\n".join(map(str.rstrip, drawing.splitlines()))


def printed(cell: Any) -> str:
    """Return the text that a cell printed and displayed, without drawings."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif "image/svg+xml" not in output.get("data", {}):
            parts.append(output.get("data", {}).get("text/plain", "") + "\n")
    return "".join(parts)


def same_text(first: str, second: str) -> bool:
    """Compare two texts; numbers may differ by one unit in their last decimal.

    Another CPU adds in another order, so the last digit may be rounded differently. Integers must be equal.

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
