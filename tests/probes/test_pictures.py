"""Statistics of pictures equal dense float64 on hand-made grids: by `mh.statistics`, each `keep`, `Watch` and a census.

A row has a class token, two registers, a picture of 2 x 3 patches and one of 3 x 4 with a patch without a place.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.counting.tally import census_probes
from multihead.observation import picture_calls
from multihead.observation.places import LayerPlaces
from multihead.probes.catalogue import PICTURE_PROBES
from multihead.probes.places import NO_PICTURE, NO_PLACE, PlaceTable

NAMES = {each.name for each in PICTURE_PROBES} - {"words_mass"}
LENGTHS = (21, 9)  # the second text has the first picture alone
HEADS, DIM = 3, 4
Keep = Literal["cpu", "device", "statistics", "summary"]


def table() -> PlaceTable:
    """The places of one row of 21 keys."""
    keys = [(NO_PICTURE, -1, -1, -1, -1)] * 3
    for picture, (rows, columns) in enumerate(((2, 3), (3, 4))):
        keys += [(picture, row, column, rows, columns) for row in range(rows) for column in range(columns)]
    keys[14] = (NO_PLACE, -1, -1, -1, -1)
    picture, *cell = torch.tensor(keys).unbind(1)
    nothing = torch.full((len(keys), 4), torch.nan)
    return PlaceTable(picture, picture.clamp(min=-1) * 0, torch.arange(len(keys)), nothing, torch.stack(cell, 1))


def oracle(weights: Tensor) -> dict[str, Tensor]:
    """Compute the statistics of one text from weights, (heads, queries, keys), key by key."""
    places, (heads, queries, keys) = table(), weights.shape
    cells = [tuple(each[:2]) if each[0] >= 0 else None for each in places.cell.tolist()]
    picture = places.picture.tolist()
    steps = {
        (query, key): tuple(b - a for a, b in zip(cells[query], cells[key], strict=True))
        for query in range(queries)
        for key in range(keys)
        if cells[query] is not None and cells[key] is not None and picture[query] == picture[key]
    }
    found = {name: torch.zeros(heads, queries, dtype=torch.float64) for name in NAMES}
    for head in range(heads):
        total: dict[tuple[int, ...], float] = {}
        for pair, step in sorted(steps.items(), key=lambda item: item[1]):  # of equal steps the first counts
            total[step] = total.get(step, 0.0) + float(weights[head][pair])
        total.pop((0, 0))
        commonest = max(total, key=lambda step: round(total[step], 12))
        for query in range(queries):
            row = weights[head, query].tolist()
            own = {key: step for (at, key), step in steps.items() if at == query}
            mass = sum(row[key] for key in own) or 1.0
            distances = ((row[key], (step[0] ** 2 + step[1] ** 2) ** 0.5) for key, step in own.items())
            found["patch_distance"][head, query] = sum(weight * distance for weight, distance in distances) / mass
            near = (row[key] for key, step in own.items() if max(map(abs, step)) <= 1)
            found["neighbour_mass"][head, query] = sum(near)
            found["one_way_mass"][head, query] = sum(row[key] for key, step in own.items() if step == commonest)
            found["class_mass"][head, query] = sum(row[:3])
            found["picture_mass"][head, query] = sum(row[3:])
    return found


class Rows(nn.Module):
    """One layer that reads rows of tokens, (batch, tokens, 1, features), in place of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = mh.MultiHeadAttention(HEADS * DIM, HEADS, bias=False)

    def forward(self, pixel_values: Tensor, lengths: tuple[int, ...]) -> Tensor:
        output: Tensor = self.attention(pixel_values[:, :, 0], lengths=lengths)
        return output


def weights_of(model: Rows, tokens: Tensor) -> Tensor:
    """Compute the weights of one text, (tokens, features), without the library: (heads, queries, keys)."""
    q, k = (
        (tokens @ each.weight.T).unflatten(1, (HEADS, DIM)).transpose(0, 1)
        for each in (model.attention.q_proj, model.attention.k_proj)
    )
    return (q @ k.mT / DIM**0.5).softmax(-1)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> tuple[Rows, dict[str, Any], list[dict[str, Tensor]]]:
    """A model, the inputs of a padded batch of two texts, and the statistics of each text."""
    row = table()
    both = PlaceTable(*(torch.stack([each, each]) for each in row.columns))
    unpadded = torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]
    places = {"attention": LayerPlaces(both, unpadded, {0: "[CLS]", 1: "[REG 1]", 2: "[REG 2]"})}
    monkeypatch.setattr(picture_calls, "measure_places", lambda *_, **__: places)
    torch.manual_seed(0)
    model = Rows().double()
    tokens = 2 * torch.randn(2, LENGTHS[0], HEADS * DIM, dtype=torch.float64)
    inputs = {"pixel_values": tokens[:, :, None], "lengths": LENGTHS}
    with torch.no_grad():
        expected = [oracle(weights_of(model, each[:length])) for each, length in zip(tokens, LENGTHS, strict=True)]
    return model, inputs, expected


def mean_of(name: str, texts: list[dict[str, Tensor]]) -> Tensor:
    """The mean of a statistic over the queries that count: patches for distances, else all queries."""
    counted = table().picture >= 0 if "_mass" not in name or name[:3] in ("nei", "one") else table().picture < 9
    parts = [text[name][:, counted[: text[name].shape[1]]] for text in texts]
    return torch.cat(parts, 1).mean(1)


EVEN = [oracle(torch.full((1, length, length), 1 / length, dtype=torch.float64)) for length in LENGTHS]


def test_a_call_measures_what_its_context_places() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, HEADS, LENGTHS[0], DIM, dtype=torch.float64).unbind()
    context = mh.probes.ProbeContext().with_places(table().reshape(1, LENGTHS[0]))
    found = mh.statistics(q, k, probes=sorted(NAMES), context=context)
    expected = oracle((q @ k.mT / DIM**0.5).softmax(-1)[0])
    for name in NAMES:
        assert torch.allclose(found[name][0], expected[name], rtol=0, atol=1e-12), name
    for context in (mh.probes.ProbeContext(), mh.probes.ProbeContext().with_places(table().reshape(3, 7))):
        with pytest.raises(mh.errors.ProbeError, match="places"):
            mh.statistics(q, k, probes="patch_distance", context=context)


@pytest.mark.parametrize("keep", ["cpu", "device", "statistics", "summary"])
@pytest.mark.parametrize("names", [None, ("one_way_mass",), ("picture_mass", "mean_distance")])
def test_every_keep_has_them_with_chance(read: Any, keep: Keep, names: tuple[str, ...] | None) -> None:
    model, inputs, expected = read
    with torch.no_grad(), mh.observe(model, keep=keep, probes=names) as seen:
        model(**inputs)
        model(**inputs)
    (layer,) = seen.layers
    means, wanted = layer.means(), NAMES if names is None else NAMES & set(names)
    assert means.keys() >= wanted
    assert not means.keys() & (NAMES - wanted)
    assert ("mean_distance" in means) == (names is not None and "mean_distance" in names)
    assert ("self_mass" in means) == (names is None)
    row = seen.table().rows[0]
    for name in wanted:
        assert torch.allclose(means[name], mean_of(name, expected), rtol=0, atol=1e-12), name
        assert row[f"{name}_chance"] == pytest.approx(float(mean_of(name, EVEN)), abs=1e-7), name
        for number, sample in enumerate(layer.samples):
            assert torch.allclose(sample.statistics[name], expected[number % 2][name], rtol=0, atol=1e-12), name
    if keep != "summary":
        assert layer.sample(1).text.tokens[:4] == ["[CLS]", "[REG 1]", "[REG 2]", "r1 c1"]


def test_a_watch_has_them_and_their_kinds(read: Any) -> None:
    model, inputs, expected = read
    watch = mh.Watch(model, probes=("patch_distance", "class_mass"), kinds=["neighbours", "one_way"], every=1)
    for _ in range(2):
        with watch:
            model(**inputs)
    for name in ("patch_distance", "class_mass", "neighbour_mass", "one_way_mass"):
        mean = float(mean_of(name, expected).mean())
        assert watch.numbers[f"heads/{name}/L00/mean"] == pytest.approx(mean, abs=1e-6)
    assert len(watch.series.kinds(layer=0)) == 2
    assert watch.numbers["heads/kind/neighbours"] == watch.numbers["heads/kind/one_way"] == 0


def test_a_model_of_texts_and_a_census_have_none_and_say_so() -> None:
    model = mh.MultiHeadAttention(8, 2)
    for use in (partial(mh.Watch, model), lambda probes: mh.observe(model, probes=probes).__enter__()):
        with pytest.raises(mh.errors.ProbeError) as caught:
            use(probes="one_way_mass")
        finding = "one_way_mass needs pictures, which the model does not take as pixel_values. Leave it out."
        assert str(caught.value) == finding
    with pytest.raises(mh.errors.ProbeError) as caught:
        census_probes("words_mass")
    assert str(caught.value) == "words_mass needs pictures, and a census reads texts. Leave it out."
