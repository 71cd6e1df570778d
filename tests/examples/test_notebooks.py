"""The notebooks run from top to bottom, print what is stored in them, and have the same code in both languages."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks import clean, code_cells, notebooks, printed, read, run, same_text, take_outputs
from tools.translations import translation

ENGLISH = notebooks()
# A missing translation is reported by tools/translations.py, as a warning.
TRANSLATED = [path for path in ENGLISH if translation(path).exists()]
ALL = [*ENGLISH, *map(translation, TRANSLATED)]
CHINESE_LETTER = re.compile(r"[\u4e00-\u9fff]")
OF_ONE_MACHINE = re.compile(r"model_id|/(?:home|work|tmp|root|Users)/|site-packages|[A-Z]:\\\\")


def name(path: Path) -> str:
    return path.name


def headings(notebook: Any) -> list[list[int]]:
    """How deep each heading is, markdown cell by markdown cell."""
    return [
        [len(marks) for marks in re.findall(r"^(#+) ", cell.source, flags=re.MULTILINE)]
        for cell in notebook.cells
        if cell.cell_type == "markdown"
    ]


@pytest.fixture(scope="module")
def executed() -> dict[Path, Any]:
    """Run all notebooks in one kernel, which imports packages once and forgets the names of each before the next."""
    from nbformat.v4 import new_code_cell

    joined = read(ENGLISH[0])
    notebook_of = {path: read(path) for path in ENGLISH}
    # What was imported is left out of the garbage collections of `%reset`, which take a second each.
    anew = "__import__('gc').freeze()\n%reset -f"
    joined.cells = [cell for each in notebook_of.values() for cell in (new_code_cell(anew), *each.cells)]
    cells = iter(run(joined).cells)
    for each in notebook_of.values():
        next(cells)
        each.cells = [next(cells) for _ in each.cells]
    return notebook_of


@pytest.mark.parametrize("path", ENGLISH, ids=name)
def test_a_notebook_runs_and_prints_what_it_holds(path: Path, executed: dict[Path, Any]) -> None:
    """A translation has the same code and, as the next test checks, the same outputs."""
    pairs = zip(code_cells(read(path)), code_cells(clean(executed[path])), strict=True)
    for number, (ours, ran) in enumerate(pairs):
        assert same_text(printed(ours), printed(ran)), (
            f"{path.name}: code cell {number} holds\n{printed(ours)}and prints\n{printed(ran)}"
            f"Run python -m tools.notebooks examples/{path.name}, and read what changed."
        )


@pytest.mark.parametrize("path", TRANSLATED, ids=name)
class TestTranslations:
    def test_the_code_and_what_it_gave_are_the_same_byte_for_byte(self, path: Path) -> None:
        assert code_cells(read(path)) == code_cells(read(translation(path)))

    def test_the_words_stand_in_the_same_places_under_the_same_headings(self, path: Path) -> None:
        english, chinese = read(path), read(translation(path))
        assert [cell.cell_type for cell in english.cells] == [cell.cell_type for cell in chinese.cells]
        assert headings(english) == headings(chinese)

    def test_each_speaks_its_own_language(self, path: Path) -> None:
        for cell in read(path).cells:
            assert not CHINESE_LETTER.search(cell.source)
        for cell in read(translation(path)).cells:
            assert cell.cell_type == "code" or CHINESE_LETTER.search(cell.source)


@pytest.mark.parametrize("path", ALL, ids=name)
class TestWhatIsStored:
    def test_it_is_short(self, path: Path) -> None:
        assert 6 <= len(read(path).cells) <= 12

    def test_it_holds_nothing_of_one_machine_and_is_small(self, path: Path) -> None:
        assert OF_ONE_MACHINE.findall(path.read_text(encoding="utf-8")) == []
        assert path.stat().st_size < 200_000

    def test_it_is_clean_already(self, path: Path) -> None:
        assert clean(read(path)) == read(path)

    def test_every_cell_was_run_once_in_order_and_without_complaint(self, path: Path) -> None:
        cells = code_cells(read(path))
        assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
        assert [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"] == []


def test_an_output_that_is_out_of_date_is_found_and_replaced() -> None:
    stored, aged = read(ENGLISH[0]), read(ENGLISH[0])
    cell = next(cell for cell in code_cells(aged) if printed(cell))
    cell.outputs[0].text = "something else"
    cells = list(zip(code_cells(stored), code_cells(aged), strict=True))
    assert [same_text(printed(ours), printed(theirs)) for ours, theirs in cells].count(False) == 1
    take_outputs(aged, stored)
    assert clean(aged) == stored


def test_what_is_printed_in_pieces_is_stored_as_one_in_each_notebook_that_takes_it() -> None:
    ran = read(TRANSLATED[0])
    cell = next(cell for cell in code_cells(ran) if cell.outputs and cell.outputs[0].output_type == "stream")
    whole, half = cell.outputs[0].text, len(cell.outputs[0].text) // 2
    cell.outputs.insert(1, deepcopy(cell.outputs[0]))
    cell.outputs[0].text, cell.outputs[1].text = whole[:half], whole[half:]
    for path in (TRANSLATED[0], translation(TRANSLATED[0])):
        taking = read(path)
        take_outputs(taking, ran)
        assert clean(taking) == read(path)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("0.3333 of 4", "0.3334 of 4", True),
        ("0.3333", "0.3335", False),
        ("(2, 3)", "(2, 4)", False),
        ("-0.02", "0.02", False),
        ("0.5", "0.50", False),
        ("1.5 heads", "1.5 tokens", False),
        ("True", "False", False),
        ("1 2", "1 2 3", False),
    ],
)
def test_only_the_last_decimal_may_be_rounded_the_other_way(first: str, second: str, same: bool) -> None:
    assert same_text(first, second) is same
