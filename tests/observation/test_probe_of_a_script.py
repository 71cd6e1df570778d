"""A probe that a script defines is shown with its label, unit and number format wherever built-in statistics are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.kernels.parts import PartName
from multihead.layer.cache import KeyValueCache
from multihead.probes import Probe, Statistic
from tests.kernel_names import needs_native

OWN: PartName = ("offset_mass", 0)
OTHER_MASS = Probe("other_mass", lambda parts: 1 - parts[OWN], {OWN}, label="other keys", number_format="share")
DISTANCE_TO_LARGEST = Probe(
    "largest_position",
    lambda parts: parts["largest_key"].float(),
    {"largest_key"},
    label="position of the largest",
    unit="tokens",
    number_format=".1f",
)
PROBES = ("entropy", "self_mass", OTHER_MASS, DISTANCE_TO_LARGEST)


class Tiny(torch.nn.Module):
    """One layer of two heads over one-hot tokens: head 0 sees its own token alone, head 1 all that it may see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mh.MultiHeadAttention(8, 2, bias=False)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.zero_()

    def forward(self, length: Any) -> torch.Tensor:
        return self.layer(torch.eye(8)[:length][None], mask=masks.Causal())


def seen(**options: Any) -> mh.Record:
    model = Tiny().eval()
    with torch.no_grad(), mh.observe(model, probes=PROBES, **options) as record:
        model(4)
        model(3)
    return record


@pytest.mark.parametrize("keep", ["cpu", "statistics", "summary"])
def test_its_numbers_are_those_of_its_definition(keep: str) -> None:
    means = seen(keep=keep).layers[0].means()
    # Weights are even: 1 - 1/n of n visible keys. Of equal weights the first key is the largest.
    expected = sum(1 - 1 / n for n in (1, 2, 3, 4, 1, 2, 3)) / 7
    torch.testing.assert_close(means["other_mass"], torch.full((2,), expected, dtype=torch.float64))
    assert means["largest_position"].tolist() == [0, 0]


@needs_native
def test_the_kernel_measures_its_parts_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("The call was measured a second time.")

    monkeypatch.setattr("multihead.probes.statistics.measure_parts", refuse)
    assert set(seen().layers[0].means()) == {"entropy", "self_mass", "other_mass", "largest_position"}


def test_tables_show_its_label_unit_and_format() -> None:
    head, first, _, *chance = str(seen().table(sort="other_mass")).splitlines()
    assert "other keys (%)  position of the largest (tokens)  name" in head
    assert first.split()[-3:] == ["44", "0.0", "layer"]
    assert [line.split()[-2:] for line in chance] == [["44", "0.0"]]  # all weights are even


def test_a_notebook_shows_its_label_and_unit() -> None:
    assert "<th>other keys (%)</th>" in seen()._repr_html_()


def test_find_takes_its_name_and_shows_its_label() -> None:
    found = seen().find(other_mass=(0.4, None))
    assert [str(each) for each in found] == ["L0 H0: other keys 44 %", "L0 H1: other keys 44 %"]


def test_a_file_stores_how_it_is_shown(tmp_path: Path) -> None:
    record = seen()
    record.save(tmp_path / "run.safetensors")
    again = mh.Record.load(tmp_path / "run.safetensors")
    assert again.statistic("other_mass") == Statistic("other_mass", label="other keys", number_format="share")
    assert again.statistic("other_mass").unit == "%"
    assert again.statistic("largest_position").heading == "position of the largest (tokens)"
    assert str(again.table(kinds=False)) == str(record.table(kinds=False))
    assert set(again.statistics) == {"other_mass", "largest_position"}


def test_packed_texts_count_keys_from_their_own_first_one() -> None:
    layer = mh.MultiHeadAttention(8, 2, bias=False).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad(), mh.observe(layer, probes=(DISTANCE_TO_LARGEST, "largest_key")) as record:
        layer(x, mask=masks.Causal(), lengths=(5, 3))
    for sample in record.layers[0].samples:
        position = sample.statistics["largest_position"]
        assert torch.equal(position.long(), sample.statistics["largest_key"])
        assert bool((position <= torch.arange(sample.num_queries)).all())


POSITION = Probe("place", lambda parts: parts["position"], {"position"})
NEAR_THREE = Probe(
    "three_mass",
    lambda parts: sum(torch.where(parts["position"] > -each, parts["offset_mass", each], 0) for each in (-1, -2, -3)),  # type: ignore[arg-type, return-value]
    {"position", *(("offset_mass", -each) for each in (1, 2, 3))},
)


def sharp(batch: int, length: int) -> tuple[mh.MultiHeadAttention, torch.Tensor]:
    layer = mh.MultiHeadAttention(8, 2, dtype=torch.float64).eval()
    return layer, 9 * torch.randn(batch, length, 8, dtype=torch.float64)


def three_before(sample: Any) -> torch.Tensor:
    """The weight on the three keys before each query, without the first key of the text: (heads, queries)."""
    key, position = torch.arange(sample.num_keys), sample.positions[:, None]
    return (sample.weights() * ((key < position) & (key >= position - 3) & (key > 0))).sum(-1)


@pytest.mark.parametrize("options", [{"lengths": (9, 5, 2)}, {"lengths": (9, 5, 2), "padding_side": "left"}, {}])
def test_a_probe_knows_the_position_of_a_query_in_its_own_text(options: dict[str, Any]) -> None:
    layer, x = sharp(3, 9)
    with torch.no_grad(), mh.observe(layer, probes=(POSITION, NEAR_THREE)) as record:
        layer(x, mask=masks.Causal(), **options)
    for sample in record.layers[0].samples:
        assert torch.equal(sample.statistics["place"][0].long(), sample.positions)
        torch.testing.assert_close(sample.statistics["three_mass"], three_before(sample), rtol=0, atol=1e-9)


@pytest.mark.parametrize("window", [None, 4])
def test_a_position_counts_the_keys_that_a_cache_has_dropped(window: int | None) -> None:
    layer, x = sharp(1, 12)
    cache = KeyValueCache(window=window)
    with torch.no_grad(), mh.observe(layer, probes=(POSITION, NEAR_THREE)) as record:
        for step in x.split([5, 1, 1, 3, 1, 1], 1):
            layer(step, mask=masks.Causal() & masks.Window(4), cache=cache)
    sample = record.layers[0].sample()
    assert sample.statistics["place"].tolist() == [list(range(12))] * 2
    torch.testing.assert_close(sample.statistics["three_mass"], three_before(sample), rtol=0, atol=1e-9)


def test_a_probe_of_a_script_has_a_chance_and_one_of_a_file_if_it_is_a_part(tmp_path: Path) -> None:
    model = Tiny().eval()
    with torch.no_grad(), mh.observe(model, probes=(*PROBES, mh.probes.offset_mass(-2))) as record:
        model(4)
    (profile,) = record.profiles()
    for name in ("other_mass", "offset_minus_2_mass"):  # all weights are even
        torch.testing.assert_close(profile.chance[name], profile.means[name])
    record.save(tmp_path / "run.safetensors")
    (again,) = mh.Record.load(tmp_path / "run.safetensors").profiles()
    assert "other_mass" not in again.chance
    assert torch.equal(again.chance["offset_minus_2_mass"], profile.chance["offset_minus_2_mass"])


def test_a_file_stores_the_tokens_that_a_probe_counts(tmp_path: Path) -> None:
    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = torch.nn.Embedding(9, 8), mh.MultiHeadAttention(8, 2)

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.layer(self.embed(input_ids), mask=masks.Causal())

    model = Reader().eval()
    with torch.no_grad(), mh.observe(model, probes=(mh.probes.tokens_mass("few", (2, 5)),)) as record:
        model(torch.arange(9)[None])
    record.save(tmp_path / "run.safetensors")
    again = mh.Record.load(tmp_path / "run.safetensors")
    assert again.statistics == record.statistics
    chance = [sum(token in (2, 5) for token in range(query + 1)) / (query + 1) for query in range(9)]
    for one in (record, again):
        assert one.profiles()[0].chance["few_mass"].tolist() == pytest.approx([sum(chance) / 9] * 2)
