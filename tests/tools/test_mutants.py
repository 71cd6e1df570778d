"""The list of broken lines stays valid, and the tool distinguishes caught mutants from others."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tools import mutants
from tools.mutant_lines import FUZZED, MUTANTS, Mutant
from tools.mutants import MutantError, Verdict


def test_the_text_of_each_mutant_occurs_in_its_file_exactly_once() -> None:
    for mutant in (*MUTANTS, *FUZZED):
        broken = mutants.mutated(mutant)
        assert broken != mutants.path_of(mutant).read_text(encoding="utf-8"), mutant
        assert mutant.native or compile(broken, mutant.file, "exec"), mutant


def test_the_tests_of_each_mutant_exist() -> None:
    for mutant in (*MUTANTS, *FUZZED):
        paths = [word for word in mutant.tests if word.startswith("tests/")]
        assert paths, mutant
        assert [path for path in paths if not (mutants.ROOT / path.split("::")[0]).is_file()] == []


def test_every_mutant_is_unique() -> None:
    assert len({(each.part, each.breaks) for each in MUTANTS}) == len(MUTANTS)
    assert len({(each.file, each.text) for each in MUTANTS}) == len(MUTANTS)


def test_a_text_that_does_not_occur_once_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "SOURCES", tmp_path)
    (tmp_path / "softcap.py").write_text("a = 1\nb = 1\n", encoding="utf-8")
    broken = Mutant("softcap", "", "softcap.py", " = 1", " = 2", ())
    sentence = r"^softcap\.py contains ' = 1' 2 times\. Change tools/mutant_lines\.py, so that it is once\.$"
    with pytest.raises(MutantError, match=sentence):
        mutants.mutated(broken)


def test_the_tests_import_the_broken_copy_and_fail() -> None:
    """One mutant from end to end; the unchanged copy passes, so it is the broken line that fails."""
    softcap = next(each for each in MUTANTS if each.part == "softcap")
    verdict = mutants.judged(softcap)
    assert verdict.outcome == "caught"
    assert verdict.test.startswith("tests/scores/test_terms.py::")
    same = softcap._replace(replacement=softcap.text)
    assert mutants.judged(same).outcome == "survived"


def test_tests_that_could_not_start_catch_nothing() -> None:
    softcap = next(each for each in MUTANTS if each.part == "softcap")
    verdict = mutants.judged(softcap._replace(tests=("no_such_file.py",)))  # whose folder imports nothing
    assert verdict.outcome == "no verdict"
    assert "no_such_file" in verdict.test


def test_mutants_are_chosen_by_part_file_or_breakage() -> None:
    assert {each.part for each in mutants.chosen("rotary")} == {"rotary"}
    assert {each.file for each in mutants.chosen("kernels/sdpa")} == {"kernels/sdpa.py"}
    assert mutants.chosen(None) == MUTANTS


def test_the_table_names_each_mutant_and_the_test_that_caught_it() -> None:
    console = Console(width=200, record=True, file=StringIO())
    caught, missed = MUTANTS[0], MUTANTS[1]
    rows = [
        (caught, Verdict("caught", "tests/layer/test_heads.py::test_it[1]", 2.4)),
        (missed, Verdict("survived", "", 1.0)),
    ]
    console.print(mutants.table_of(rows))
    text = console.export_text()
    assert caught.breaks in text
    assert "test_heads.py::test_it[1]" in text
    assert "survived" in text


def test_a_word_that_no_mutant_contains_is_rejected() -> None:
    result = CliRunner().invoke(mutants.main, ["--only", "nothing of the kind"])
    assert result.exit_code == 2
    assert "No mutant contains 'nothing of the kind'. The parts are: native kernel, sdpa kernel," in result.output


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(mutants.main, ["--help"])
    assert result.exit_code == 0
    assert "python -m tools.mutants --only rotary" in result.output


def test_a_mutant_that_survives_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {"caught": 0, "survived": 1, "no verdict": 1}
    for outcome, status in verdicts.items():
        monkeypatch.setattr(mutants, "judged", lambda _, outcome=outcome: Verdict(outcome, "", 0.0))
        assert CliRunner().invoke(mutants.main, ["--only", "softcap"]).exit_code == status


def test_other_tests_can_replace_those_of_the_mutants() -> None:
    listed = CliRunner().invoke(
        mutants.main, ["--list", "--only", "softcap", "--against", "tests/layer/test_heads.py -x"]
    )
    assert listed.exit_code == 0
    assert listed.output == "softcap: scores are not scaled back (tests/layer/test_heads.py -x)\n"


def test_the_fuzzer_is_timed_until_a_case_fails_that_passes_without_the_mutant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first failure is one of the library as it is, the second one that of the mutant."""
    (tmp_path / "tests" / "fuzz").mkdir(parents=True)
    (tmp_path / "tests" / "fuzz" / "__main__.py").write_text(
        "import sys\n"
        "if '--case' in sys.argv: sys.exit('17' in sys.argv)\n"
        "print('weights: Mismatch\\n  after: 1.5 s\\n  again: python -m tests.fuzz --only weights --case 17')\n"
        "print('layer: Mismatch\\n  after: 2.5 s\\n  again: python -m tests.fuzz --only layer --case 18')\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    softcap = next(each for each in MUTANTS if each.part == "softcap")
    assert mutants.fuzzed(softcap, 1, 10, 1.0) == mutants.Found(1, 2.5, "layer")
    console = Console(width=200, record=True, file=StringIO())
    assert mutants.fuzz_table([softcap], 3, 10, 1.0, console)
    assert "softcap: scores are not scaled back | 2 | 2 | layer" in console.export_text()
