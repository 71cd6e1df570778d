"""The peers have the same weights and compute the same, nothing wrong is timed, and no measured row is lost."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import machine_line
from benchmarks.measure import Ratio
from benchmarks.pages import HEAD, PAGES, RESULTS, replace_table
from benchmarks.peers import __main__ as peers
from benchmarks.peers import page as peers_page
from benchmarks.peers import race
from benchmarks.peers.cases import CASES, TOLERANCE, Case, Trial, trial
from benchmarks.peers.contender import CannotError, Contender, run_of
from benchmarks.peers.pytorch import multihead
from benchmarks.peers.race import Row, Standing
from benchmarks.peers.reference import difference, right
from benchmarks.peers.registry import PEERS, Peer, peers_of
from benchmarks.resume import read_rows

TINY = [
    Case("full", "full", 2, 8),
    Case("ragged", "ragged", 3, 16, parts=(2, 16, 9)),
    Case("documents", "documents", 1, 16, parts=(5, 1, 10)),
    Case("window", "window", 1, 32, parts=(8,)),
    Case("cross", "cross", 2, 6, keys=10),
    Case("decoding", "decoding", 1, 1, keys=20),
    Case("causal", "causal", 2, 8),
    Case("training", "causal", 2, 8, training=True),
    Case("alone", "full", 2, 8, alone=True),
    Case("causal alone", "causal", 2, 8, alone=True),
]
PARTNERS = [(case, peer, "fp32") for case in TINY for peer in peers_of(case)]
PARTNERS += [(case, peer, "bf16") for case, peer, _ in PARTNERS if case.name in ("full", "decoding", "training")]
AHEAD = Case("a case", "ragged", 1, 8, parts=(3,))
LEVEL = Case("another case", "full", 1, 8)
AT_LEAST = Case("at least", "causal", 1, 8, alone=True, dtypes=("fp32",), least=2.0)
PERCENT = Case("percent", "full", 1, 8, overhead="%")
MICROSECONDS = Case("microseconds", "full", 1, 8, overhead="microseconds")


def standing(median: float, *, peer: str = "a peer", high: float = 9.0, beyond: float = 0.0) -> Standing:
    return Standing(peer, Ratio(median, 0.5, high, 7), beyond, 1e-7)


def row(case: Case, *standings: Standing, dtype: str = "fp32") -> Row:
    return Row(case.name, dtype, standings or (standing(2.0),), 1.5, 2e-7, commit="c0ffee")


def run_or_skip(peer: Peer, inputs: Trial) -> Callable[[], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other libraries at import
        try:
            return run_of(inputs, peer.make(inputs))
        except CannotError as reason:
            if "not installed" in str(reason):
                pytest.skip(f"{peer.name}: {reason}")
            raise


@pytest.mark.parametrize("case", [each for each in TINY if not each.training], ids=lambda case: case.name)
def test_the_reference_is_attention_alone_or_between_four_projections(case: Case) -> None:
    inputs = trial(case, "fp32", embed=32, heads=4)
    weights = [[tensor.double() for tensor in projection] for projection in inputs.weights]
    memory = inputs.x if inputs.memory is None else inputs.memory
    if inputs.alone is not None:
        q, k, v = (tensor.double().unflatten(2, (4, 8)).transpose(1, 2) for tensor in (inputs.x, *inputs.alone))
        merged = scaled_dot_product_attention(q, k, v, is_causal=case.kind == "causal").transpose(1, 2).flatten(2)
        torch.testing.assert_close(right(inputs), merged)
        return
    q, k, v = (
        torch.nn.functional.linear(x.double(), *projection).unflatten(2, (4, 8)).transpose(1, 2)
        for x, projection in zip((inputs.x, memory, memory), weights[:3], strict=True)
    )
    if inputs.held is not None:
        k, v = (torch.cat([held.double(), new], 2) for held, new in zip(inputs.held, (k, v), strict=True))
    shown = None if inputs.shown is None else inputs.shown.expand(-1, -1, case.queries, -1)
    merged = scaled_dot_product_attention(q, k, v, attn_mask=shown).transpose(1, 2).flatten(2)
    torch.testing.assert_close(right(inputs), torch.nn.functional.linear(merged, *weights[3]))


def test_every_eighth_query_of_a_long_sequence_is_compared() -> None:
    inputs = trial(Case("long", "window", 1, 4096, parts=(8,)), "fp32", embed=8, heads=1)
    expected = right(inputs)
    assert expected.shape == (1, 512, 8)
    found = torch.zeros(1, 4096, 8, dtype=torch.float64)
    found[:, ::8] = expected
    assert difference(inputs, found, expected) == 0


@pytest.mark.parametrize(("kind", "seen"), [("ragged", [2, 16, 9]), ("documents", [5, 1, 10]), ("window", [1, 8])])
def test_a_mask_shows_the_keys_of_its_case(kind: str, seen: list[int]) -> None:
    case = next(each for each in TINY if each.kind == kind)
    counts = trial(case, "fp32", embed=8, heads=1).shown.sum(-1).flatten()
    assert counts.unique().tolist() == (list(range(1, 9)) if kind == "window" else sorted(seen))


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
@pytest.mark.parametrize(
    ("case", "peer", "dtype"),
    PARTNERS,
    ids=[f"{case.name}-{peer.name.replace(' ', '-')}-{dtype}" for case, peer, dtype in PARTNERS],
)
def test_a_peer_with_the_same_weights_computes_the_same(
    case: Case, peer: Peer, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the same, without a minute of compiling
    inputs = trial(case, dtype, embed=32, heads=4)
    with torch.no_grad():
        try:
            run = run_or_skip(peer, inputs)
        except CannotError as reason:
            expected = {
                "it has no cache": case.kind == "decoding",
                "no backward pass": case.training,
                "only float32": dtype != "fp32",
            }
            assert any(holds and part in str(reason) for part, holds in expected.items())  # noqa: PT017 - each is right
            return
        assert difference(inputs, run(), right(inputs)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_our_layer_computes_the_same(case: Case, dtype: str) -> None:
    inputs = trial(case, dtype, embed=32, heads=4)
    with torch.no_grad():
        run = run_of(inputs, multihead(inputs))
        assert difference(inputs, run(), right(inputs)) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peer", [peer for peer in PEERS if "decoding" in peer.kinds], ids=lambda peer: peer.name)
def test_a_cache_grows_from_step_to_step(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    inputs = trial(next(each for each in TINY if each.kind == "decoding"), "fp32", embed=32, heads=4)
    k, v = inputs.held
    with torch.no_grad():
        try:
            run = run_or_skip(peer, inputs)
        except CannotError:
            return
        for _ in range(3):
            expected = right(inputs)
            assert difference(inputs, run(), expected) < TOLERANCE["fp32"]
            new = (
                torch.nn.functional.linear(inputs.x, *projection).unflatten(2, (4, 8)).transpose(1, 2)
                for projection in (inputs.weights.k, inputs.weights.v)
            )
            k, v = (torch.cat(pair, 2) for pair in zip((k, v), new, strict=True))
            inputs = Trial(inputs.case, inputs.heads, inputs.weights, inputs.x, held=(k, v))


def test_every_case_has_a_unique_name_and_existing_rivals() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(len(peers_of(case)) == len(case.rivals) for case in CASES if case.rivals)


def test_a_wrong_contender_is_reported_and_not_timed() -> None:
    inputs = trial(TINY[0], "fp32", embed=32, heads=4)
    expected = right(inputs)
    found = race.checked("a peer", lambda _: Contender(lambda x: expected + 1), inputs, expected, 1e-5)
    largest = 1 / float(expected.abs().max())
    note = f"wrong: it differs from float64 by {largest:.1e} of the largest value, more than 1e-05"
    assert isinstance(found, Standing)
    assert (found.ratio, found.note) == (None, note)


def test_a_contender_that_fails_is_reported_and_the_others_continue() -> None:
    inputs = trial(TINY[0], "fp32", embed=32, heads=4)

    def cannot(_: Trial) -> Contender:
        raise CannotError("it has no cache")

    def fails(_: Trial) -> Contender:
        raise RuntimeError("no such thing\nand more")

    notes = [race.checked("a peer", make, inputs, right(inputs), 1e-5) for make in (cannot, fails)]
    assert notes == [
        Standing("a peer", note="cannot: it has no cache"),
        Standing("a peer", note="failed: RuntimeError: no such thing"),
    ]


@pytest.mark.parametrize(("budget", "rounds"), [(4.0, (7, 5, 3, 1)), (80.0, (10, 7, 3, 1)), (160.0, (20, 14, 4, 1))])
def test_ratios_are_those_of_the_same_round(
    budget: float, rounds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "seconds", lambda run: run())
    monkeypatch.setattr(race, "_times", lambda _, run: run)
    lasting = {"level": 2.0, "quick": 3.0, "slow": 6.0, "hopeless": 50.0}
    peers_of_ours = {name: (lambda taken=taken: taken) for name, taken in lasting.items()}
    pairs = race.raced(lambda: 2.0, peers_of_ours, budget=budget)
    assert pairs == {name: [(2.0, lasting[name])] * count for name, count in zip(lasting, rounds, strict=True)}


def test_a_standing_is_the_ratio_and_the_difference_per_call() -> None:
    found = race.standing("a peer", [(2.0, 3.0), (4.0, 6.0)], error=1e-7, calls=20)
    assert found == Standing("a peer", Ratio(1.5, 1.5, 1.5, 2), -75_000.0, 1e-7)
    assert str(Ratio.of([1.0, 2.0, 3.0])) == "2.00 x (1.00-3.00)"
    assert Ratio.of([4.0]) == Ratio(4.0, 4.0, 4.0, 1)


def test_the_best_peer_is_the_one_with_the_smallest_ratio() -> None:
    quick, slow, absent = standing(1.1, peer="quick"), standing(3.0, peer="slow"), Standing("absent", note="cannot")
    assert row(LEVEL, slow, absent, quick).best == quick
    assert row(LEVEL, absent).best is None


@pytest.mark.parametrize(
    ("case", "best", "met"),
    [
        (LEVEL, standing(0.95, high=0.97), True),
        (LEVEL, standing(0.95, high=0.96), False),
        (AHEAD, standing(1.01, high=1.02), True),
        (AHEAD, standing(0.99, high=1.02), False),
        (AT_LEAST, standing(2.0, high=2.1), True),
        (AT_LEAST, standing(1.9, high=2.1), False),
        (PERCENT, standing(0.98), True),
        (PERCENT, standing(0.97), False),
        (MICROSECONDS, standing(0.5, beyond=39.0), True),
        (MICROSECONDS, standing(0.5, beyond=41.0), False),
    ],
)
def test_a_row_is_compared_with_its_target(case: Case, best: Standing, met: bool) -> None:
    assert peers_page.is_met(case, row(case, best)) is met
    assert peers_page.is_met(case, Row(case.name, "fp32", note="failed: a reason")) is None


def test_results_have_their_units() -> None:
    assert peers_page.finding(LEVEL, standing(1.25, high=1.5)) == "1.25 x (0.50-1.50)"
    assert peers_page.finding(PERCENT, standing(0.8)) == "+25.0 %"
    assert peers_page.finding(MICROSECONDS, standing(0.8, beyond=38.4)) == "+38 microseconds a call"


def test_a_stored_row_is_read_again(tmp_path: Path) -> None:
    rows = [row(LEVEL, standing(1.1), Standing("absent", note="cannot: a reason")), Row("a", "bf16", note="failed: b")]
    journal = tmp_path / "rows.jsonl"
    cut_off = '{"case": "a third", "dty'
    journal.write_text("".join(json.dumps(asdict(each)) + "\n" for each in rows) + cut_off, encoding="utf-8")
    assert read_rows(journal, Row.from_dict) == rows


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Two cases in float32 that are listed instead of measured; files are written to a folder of this test."""
    measured: list[str] = []

    def measure(case: Case, dtype: str, _seconds: float) -> Row:
        measured.append(f"{case.name}, {dtype}")
        return row(case, dtype=dtype)

    for module in (peers, peers_page):
        monkeypatch.setattr(module, "CASES", [AHEAD, LEVEL])
        monkeypatch.setattr(module, "DTYPES", {"fp32": torch.float32})
    monkeypatch.setattr(peers, "_measured", measure)
    monkeypatch.setattr(peers, "JOURNAL", tmp_path / "journals" / "peers.jsonl")
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(peers, "PAGES", [tmp_path / "measured.md"])
    table = f"before\n{HEAD}| old | row | here |{peers_page.MARK}\nbehind"
    (tmp_path / "measured.md").write_text(table, encoding="utf-8")
    return measured


def test_an_interrupted_run_is_resumed(two_cases: list[str], tmp_path: Path) -> None:
    peers.compare(only="a case", seconds=1.0, resume=False, save=True)
    assert not (tmp_path / "results").exists()
    rows = peers.compare(only="", seconds=1.0, resume=True, save=True)
    assert two_cases == ["a case, fp32", "another case, fp32"]
    assert rows == [row(AHEAD), row(LEVEL)]
    (page,) = (tmp_path / "results").glob("*-peers.md")
    lines = page.read_text(encoding="utf-8").splitlines()
    target = "upper quartile at least 0.97 x, median above 1 x"
    assert f"| a case | fp32 | a peer | 2.00 x (0.50-9.00) | {target} | 1.5 ms | 2.0e-07 |" in lines
    assert "| another case | fp32 | a peer | 2.00 x (0.50-9.00) | 7 | 1.0e-07 |" in lines
    assert (tmp_path / "measured.md").read_text(encoding="utf-8") == (
        f"before\n{HEAD}| a case | 2.00 x (0.50-9.00), a peer |\n"
        f"| another case | 2.00 x (0.50-9.00), a peer |\n"
        f"| measured on | {machine_line(['c0ffee'])} |  |{peers_page.MARK}\nbehind"
    )


def test_a_whole_run_starts_a_new_journal_and_a_part_replaces_its_rows(two_cases: list[str], tmp_path: Path) -> None:
    for only in ("", "", "another"):
        peers.compare(only=only, seconds=1.0, resume=False, save=True)
    assert len(two_cases) == 5
    assert len(read_rows(tmp_path / "journals" / "peers.jsonl", Row.from_dict)) == 3


def test_without_saving_nothing_is_written(two_cases: list[str], tmp_path: Path) -> None:
    peers.compare(only="", seconds=1.0, resume=False, save=False)
    assert len(two_cases) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["measured.md"]


def test_a_page_without_the_mark_of_the_table_is_unchanged(two_cases: list[str]) -> None:
    assert replace_table("a page", peers_page.MARK, peers_page.table_lines([row(AHEAD)])) == "a page"
    assert peers_page.table_lines([row(AHEAD)])[1] == ("another case", "not measured")
    assert two_cases == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_of_results_shows_the_newest(path: Path) -> None:
    newest = max(RESULTS.glob("*-peers.md")).read_text(encoding="utf-8").splitlines()
    head = next(line for line in newest if line.startswith("| case | dtype | best peer |"))
    table = newest[newest.index(head) + 2 :]
    rows = [line.strip("| ").split(" | ") for line in table[: table.index("")]]
    shown = [f"{finding}, {best}" for _, _, best, finding, *_ in rows if best]
    page = path.read_text(encoding="utf-8")
    assert [each for each in shown if each not in page] == []
    assert all(f"| {case.name} |" in page for case in CASES)


def test_a_case_is_measured_only_in_its_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CASES", [LEVEL, AT_LEAST])
    monkeypatch.setattr(peers_page, "CASES", [LEVEL, AT_LEAST])
    monkeypatch.setattr(peers, "features", lambda: "avx512_bf16")
    assert peers.jobs() == [("fp32", LEVEL), ("fp32", AT_LEAST), ("bf16", LEVEL)]
    assert peers_page.table_lines([row(AT_LEAST)])[1] == ("at least", "2.00 x (0.50-9.00), a peer", "")
    assert peers_page.target(AT_LEAST) == "median at least 2 x"


def test_strict_counts_the_rows_that_miss_their_targets(two_cases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    peers.main.main(["--strict", "--no-save"], standalone_mode=False)
    monkeypatch.setattr(peers, "_measured", lambda case, *_: row(case, standing(0.5, high=0.6)))
    with pytest.raises(click.ClickException, match=r"^2 rows miss their targets\.$"):
        peers.main.main(["--strict", "--no-save"], standalone_mode=False)
    assert len(two_cases) == 2


def test_a_text_that_matches_no_case_is_rejected_with_the_list_of_cases(two_cases: list[str]) -> None:
    sentence = r"^No case's name or dtype contains 'nothing'\. There are: a case; another case; fp32\.$"
    with pytest.raises(click.UsageError, match=sentence):
        peers.compare(only="nothing", seconds=1.0, resume=False, save=False)
    assert two_cases == []


@pytest.mark.parametrize(("flags", "dtypes"), [("avx512_bf16", {"fp32", "bf16"}), ("avx2 fma", {"fp32"})])
def test_bfloat16_is_measured_if_the_cpu_supports_it(
    flags: str, dtypes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "features", lambda: flags)
    assert {dtype for dtype, _ in peers.jobs()} == dtypes
