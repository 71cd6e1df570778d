"""The peers hold the same weights and compute the same, nothing wrong is timed, and no measured row is lost."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import peers, peers_contest, peers_page
from benchmarks.measure import Ratio
from benchmarks.peers_cases import CASES, TOLERANCE, Case, Trial, trial
from benchmarks.peers_contender import CannotError, Contender, run_of
from benchmarks.peers_contest import Row, Standing
from benchmarks.peers_list import PEERS, Peer, peers_of
from benchmarks.peers_reference import difference, right
from benchmarks.peers_torch import multihead

TINY = [
    Case("full", "full", 2, 8),
    Case("ragged", "ragged", 3, 16, parts=(2, 16, 9)),
    Case("documents", "documents", 1, 16, parts=(5, 1, 10)),
    Case("window", "window", 1, 32, parts=(8,)),
    Case("cross", "cross", 2, 6, keys=10),
    Case("decoding", "decoding", 1, 1, keys=20),
    Case("causal", "causal", 2, 8),
    Case("training", "causal", 2, 8, training=True),
]
PARTNERS = [(case, peer, "fp32") for case in TINY for peer in peers_of(case)]
PARTNERS += [(case, peer, "bf16") for case, peer, _ in PARTNERS if case.name in ("full", "decoding", "training")]
AHEAD = Case("a case", "ragged", 1, 8, parts=(3,))
LEVEL = Case("another case", "full", 1, 8)
PERCENT = Case("percent", "full", 1, 8, overhead="%")
MICROSECONDS = Case("microseconds", "full", 1, 8, overhead="microseconds")


def standing(median: float, *, peer: str = "a peer", high: float = 9.0, beyond: float = 0.0) -> Standing:
    return Standing(peer, Ratio(median, 0.5, high, 7), beyond, 1e-7)


def row(case: Case, *standings: Standing, dtype: str = "fp32") -> Row:
    return Row(case.name, dtype, standings or (standing(2.0),), 1.5, 2e-7, commit="c0ffee")


def run_or_skip(peer: Peer, given: Trial) -> Callable[[], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others warn of when they are imported is theirs
        try:
            return run_of(given, peer.make(given))
        except CannotError as reason:
            if "not installed" in str(reason):
                pytest.skip(f"{peer.name}: {reason}")
            raise


@pytest.mark.parametrize("case", [each for each in TINY if not each.training], ids=lambda case: case.name)
def test_the_reference_is_attention_between_four_projections(case: Case) -> None:
    given = trial(case, "fp32", embed=32, heads=4)
    weights = [[tensor.double() for tensor in projection] for projection in given.weights]
    memory = given.x if given.memory is None else given.memory
    q, k, v = (
        torch.nn.functional.linear(x.double(), *projection).unflatten(2, (4, 8)).transpose(1, 2)
        for x, projection in zip((given.x, memory, memory), weights[:3], strict=True)
    )
    if given.held is not None:
        k, v = (torch.cat([held.double(), new], 2) for held, new in zip(given.held, (k, v), strict=True))
    shown = None if given.shown is None else given.shown.expand(-1, -1, case.queries, -1)
    merged = scaled_dot_product_attention(q, k, v, attn_mask=shown).transpose(1, 2).flatten(2)
    torch.testing.assert_close(right(given), torch.nn.functional.linear(merged, *weights[3]))


def test_of_a_long_row_every_eighth_query_is_compared() -> None:
    given = trial(Case("long", "window", 1, 4096, parts=(8,)), "fp32", embed=8, heads=1)
    expected = right(given)
    assert expected.shape == (1, 512, 8)
    found = torch.zeros(1, 4096, 8, dtype=torch.float64)
    found[:, ::8] = expected
    assert difference(given, found, expected) == 0


@pytest.mark.parametrize(("kind", "seen"), [("ragged", [2, 16, 9]), ("documents", [5, 1, 10]), ("window", [1, 8])])
def test_masks_show_what_the_case_says(kind: str, seen: list[int]) -> None:
    case = next(each for each in TINY if each.kind == kind)
    counts = trial(case, "fp32", embed=8, heads=1).shown.sum(-1).flatten()
    assert counts.unique().tolist() == (list(range(1, 9)) if kind == "window" else sorted(seen))


@pytest.mark.filterwarnings("ignore")  # what others warn of is theirs
@pytest.mark.parametrize(
    ("case", "peer", "dtype"),
    PARTNERS,
    ids=[f"{case.name}-{peer.name.replace(' ', '-')}-{dtype}" for case, peer, dtype in PARTNERS],
)
def test_a_peer_with_the_same_weights_computes_the_same(
    case: Case, peer: Peer, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the same, without a minute of compiling
    given = trial(case, dtype, embed=32, heads=4)
    with torch.no_grad():
        try:
            run = run_or_skip(peer, given)
        except CannotError as reason:
            assert (case.kind == "decoding" and "it keeps no keys" in str(reason)) or (  # noqa: PT017 - either is right
                case.training and "no backward pass" in str(reason)
            )
            return
        assert difference(given, run(), right(given)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_our_layer_computes_the_same(case: Case, dtype: str) -> None:
    given = trial(case, dtype, embed=32, heads=4)
    with torch.no_grad():
        run = run_of(given, multihead(given))
        assert difference(given, run(), right(given)) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peer", [peer for peer in PEERS if "decoding" in peer.kinds], ids=lambda peer: peer.name)
def test_a_cache_goes_on_from_step_to_step(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    given = trial(next(each for each in TINY if each.kind == "decoding"), "fp32", embed=32, heads=4)
    k, v = given.held
    with torch.no_grad():
        try:
            run = run_or_skip(peer, given)
        except CannotError:
            return
        for _ in range(3):
            expected = right(given)
            assert difference(given, run(), expected) < TOLERANCE["fp32"]
            new = (
                torch.nn.functional.linear(given.x, *projection).unflatten(2, (4, 8)).transpose(1, 2)
                for projection in (given.weights.k, given.weights.v)
            )
            k, v = (torch.cat(pair, 2) for pair in zip((k, v), new, strict=True))
            given = Trial(given.case, given.heads, given.weights, given.x, held=(k, v))


def test_every_case_has_a_name_of_its_own_and_rivals_that_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(len(peers_of(case)) == len(case.rivals) for case in CASES if case.rivals)


def test_a_wrong_contender_is_not_timed_and_the_reason_said() -> None:
    given = trial(TINY[0], "fp32", embed=32, heads=4)
    expected = right(given)
    found = peers_contest.checked("a peer", lambda _: Contender(lambda x: expected + 1), given, expected, 1e-5)
    largest = 1 / float(expected.abs().max())
    note = f"wrong: it differs from float64 by {largest:.1e} of the largest value, more than 1e-05"
    assert isinstance(found, Standing)
    assert (found.ratio, found.note) == (None, note)


def test_a_contender_that_cannot_or_fails_says_why_and_the_others_go_on() -> None:
    given = trial(TINY[0], "fp32", embed=32, heads=4)

    def cannot(_: Trial) -> Contender:
        raise CannotError("it has no cache")

    def fails(_: Trial) -> Contender:
        raise RuntimeError("no such thing\nand more")

    notes = [peers_contest.checked("a peer", make, given, right(given), 1e-5) for make in (cannot, fails)]
    assert notes == [
        Standing("a peer", note="cannot: it has no cache"),
        Standing("a peer", note="failed: RuntimeError: no such thing"),
    ]


@pytest.mark.parametrize(("budget", "rounds"), [(4.0, (7, 5, 3, 1)), (80.0, (10, 7, 3, 1)), (160.0, (20, 14, 4, 1))])
def test_ratios_are_those_of_the_same_round(
    budget: float, rounds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_contest, "seconds", lambda run: run())
    monkeypatch.setattr(peers_contest, "_times", lambda _, run: run)
    lasting = {"level": 2.0, "quick": 3.0, "slow": 6.0, "hopeless": 50.0}
    peers_of_ours = {name: (lambda taken=taken: taken) for name, taken in lasting.items()}
    pairs = peers_contest.raced(lambda: 2.0, peers_of_ours, budget=budget)
    assert pairs == {name: [(2.0, lasting[name])] * count for name, count in zip(lasting, rounds, strict=True)}


def test_a_standing_is_the_ratio_and_what_a_call_takes_longer() -> None:
    found = peers_contest.standing("a peer", [(2.0, 3.0), (4.0, 6.0)], error=1e-7, calls=20)
    assert found == Standing("a peer", Ratio(1.5, 1.5, 1.5, 2), -75_000.0, 1e-7)
    assert str(peers_contest.spread([1.0, 2.0, 3.0])) == "2.00 x (1.00-3.00)"
    assert peers_contest.spread([4.0]) == Ratio(4.0, 4.0, 4.0, 1)


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
        (PERCENT, standing(0.98), True),
        (PERCENT, standing(0.97), False),
        (MICROSECONDS, standing(0.5, beyond=39.0), True),
        (MICROSECONDS, standing(0.5, beyond=41.0), False),
    ],
)
def test_a_row_is_held_against_what_is_meant(case: Case, best: Standing, met: bool) -> None:
    assert peers_page.is_met(case, row(case, best)) is met
    assert peers_page.is_met(case, Row(case.name, "fp32", note="failed: a reason")) is None


def test_findings_are_told_in_their_units() -> None:
    assert peers_page.finding(LEVEL, standing(1.25, high=1.5)) == "1.25 x (0.50-1.50)"
    assert peers_page.finding(PERCENT, standing(0.8)) == "+25.0 %"
    assert peers_page.finding(MICROSECONDS, standing(0.8, beyond=38.4)) == "+38 microseconds a call"


def test_a_row_survives_being_written(tmp_path: Path) -> None:
    rows = [row(LEVEL, standing(1.1), Standing("absent", note="cannot: a reason")), Row("a", "bf16", note="failed: b")]
    journal = tmp_path / "rows.jsonl"
    cut_off = '{"case": "a third", "dty'
    journal.write_text("".join(json.dumps(each.to_dict()) + "\n" for each in rows) + cut_off, encoding="utf-8")
    assert peers.read(journal) == rows


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Two cases in float32, whose measuring is noted and takes no time; what is kept goes to a folder of this test."""
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
    monkeypatch.setattr(peers, "READMES", [tmp_path / "README.md"])
    table = f"before\n{peers_page.HEAD}| old | row | here |{peers_page.MARK}\nbehind"
    (tmp_path / "README.md").write_text(table, encoding="utf-8")
    return measured


def test_a_run_that_was_broken_off_goes_on(two_cases: list[str], tmp_path: Path) -> None:
    peers.compare(only="a case", seconds=1.0, resume=False, save=True)
    assert not (tmp_path / "results").exists()
    rows = peers.compare(only="", seconds=1.0, resume=True, save=True)
    assert two_cases == ["a case, fp32", "another case, fp32"]
    assert rows == [row(AHEAD), row(LEVEL)]
    (page,) = (tmp_path / "results").glob("*-peers.md")
    lines = page.read_text(encoding="utf-8").splitlines()
    meant = "upper quartile at least 0.97 x, median above 1 x"
    assert f"| a case | fp32 | a peer | 2.00 x (0.50-9.00) | {meant} | 1.5 ms | 2.0e-07 |" in lines
    assert "| another case | fp32 | a peer | 2.00 x (0.50-9.00) | 7 | 1.0e-07 |" in lines
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (
        f"before\n{peers_page.HEAD}| a case | 2.00 x (0.50-9.00), a peer |\n"
        f"| another case | 2.00 x (0.50-9.00), a peer |{peers_page.MARK}\nbehind"
    )


def test_a_whole_run_begins_anew_and_a_part_replaces_its_rows(two_cases: list[str], tmp_path: Path) -> None:
    for only in ("", "", "another"):
        peers.compare(only=only, seconds=1.0, resume=False, save=True)
    assert len(two_cases) == 5
    assert len(peers.read(tmp_path / "journals" / "peers.jsonl")) == 3


def test_what_is_not_saved_leaves_nothing_behind(two_cases: list[str], tmp_path: Path) -> None:
    peers.compare(only="", seconds=1.0, resume=False, save=False)
    assert len(two_cases) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_page_without_a_place_for_the_table_stays(two_cases: list[str]) -> None:
    assert peers_page.retold("a page", [row(AHEAD)]) == "a page"
    assert peers_page.told([row(AHEAD)])[1] == ("another case", "not measured")
    assert two_cases == []


@pytest.mark.parametrize("readme", peers.READMES, ids=lambda path: path.name)
def test_the_readme_shows_the_newest_results(readme: Path) -> None:
    newest = max(peers.RESULTS.glob("*-peers.md")).read_text(encoding="utf-8").splitlines()
    head = next(line for line in newest if line.startswith("| case | dtype | best peer |"))
    table = newest[newest.index(head) + 2 :]
    rows = [line.strip("| ").split(" | ") for line in table[: table.index("")]]
    told = [f"{finding}, {best}" for _, _, best, finding, *_ in rows if best]
    page = readme.read_text(encoding="utf-8")
    assert [each for each in told if each not in page] == []
    assert all(f"| {case.name} |" in page for case in CASES)


def test_strict_counts_the_rows_that_are_not_what_is_meant(
    two_cases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.main.main(["--strict", "--no-save"], standalone_mode=False)
    monkeypatch.setattr(peers, "_measured", lambda case, *_: row(case, standing(0.5, high=0.6)))
    with pytest.raises(click.ClickException, match=r"^2 rows are not what is meant\.$"):
        peers.main.main(["--strict", "--no-save"], standalone_mode=False)
    assert len(two_cases) == 2


def test_a_text_that_fits_no_case_is_refused_with_those_there_are(two_cases: list[str]) -> None:
    sentence = r"^No case's name or dtype holds 'nothing'\. There are: a case; another case; fp32\.$"
    with pytest.raises(click.UsageError, match=sentence):
        peers.compare(only="nothing", seconds=1.0, resume=False, save=False)
    assert two_cases == []


@pytest.mark.parametrize(("flags", "dtypes"), [("avx512_bf16", {"fp32", "bf16"}), ("avx2 fma", {"fp32"})])
def test_bfloat16_is_measured_where_the_cpu_has_it(
    flags: str, dtypes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "features", lambda: flags)
    assert {dtype for dtype, _ in peers.jobs()} == dtypes
