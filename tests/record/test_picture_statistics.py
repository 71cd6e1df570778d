"""Heads of image models have distances in rows and columns, and the kinds that follow from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import multihead as mh
from multihead.observation.recorder import Keep
from multihead.record.texts import group_of_keys
from tests.picture_families import LANGUAGE_MODELS, random_pictures

SIDE = 6
TOKENS = SIDE * SIDE + 1


def planted() -> nn.Module:
    """A ViT whose heads read the left neighbour, the patch above, the 3 x 3 around, and always r2 c5."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 4 * TOKENS, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    model = hf.ViTModel(hf.ViTConfig(**sizes, image_size=4 * SIDE, patch_size=4)).eval()
    layer = model.layers[0].attention
    with torch.no_grad():
        model.embeddings.position_embeddings.zero_()
        model.embeddings.position_embeddings[0, :, :TOKENS] = 50 * torch.eye(TOKENS)
        for head in range(4):
            targets = torch.zeros(TOKENS, TOKENS)
            for patch in range(SIDE * SIDE):
                row, column = divmod(patch, SIDE)
                around = [(row + r, column + c) for r in (-1, 0, 1) for c in (-1, 0, 1)]
                wanted = ([(row, column - 1)], [(row - 1, column)], around, [(1, 4)])[head]
                inside = [r * SIDE + c + 1 for r, c in wanted if 0 <= r < SIDE and 0 <= c < SIDE]
                targets[inside or [0], patch + 1] = 1
            rows = slice(head * TOKENS, (head + 1) * TOKENS)
            layer.q_proj.weight[rows].mul_(1e-3)[:, :TOKENS] += targets
            layer.k_proj.weight[rows].mul_(1e-3)[:, :TOKENS] += torch.eye(TOKENS)
    return model


def seen_by(model: nn.Module, keep: Keep = "cpu") -> mh.Record:
    with torch.no_grad(), mh.observe(model, keep=keep) as seen:
        model(pixel_values=torch.randn(2, 3, 4 * SIDE, 4 * SIDE, generator=torch.Generator().manual_seed(0)))
    return seen


def distances() -> Tensor:
    """The distance between the centres of all patches, (patches, patches)."""
    cells = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij"), -1).view(-1, 2).double()
    return torch.cdist(cells, cells)


def test_planted_heads_have_the_kinds_of_a_picture(tmp_path: Path) -> None:
    model = planted()
    seen, *others = (seen_by(model, keep) for keep in ("cpu", "statistics", "summary"))
    seen.save(tmp_path / "planted.safetensors")
    for record in (seen, *others, mh.Record.load(tmp_path / "planted.safetensors")):
        (layer,) = record.layers
        assert layer.kinds == (("one_way",), ("one_way",), ("neighbours",), ("mixed",))
        means = layer.means()
        assert not means.keys() & {"mean_distance", "distance_spread", "previous_mass", "next_mass", "near_mass"}
        inner = [SIDE * row + column + 1 for row in range(1, SIDE) for column in range(1, SIDE)]
        for sample in layer.samples:
            assert torch.allclose(sample.statistics["patch_distance"][:2, inner], torch.ones(1), atol=0.02)
        assert means["one_way_mass"][:2].tolist() == pytest.approx([5 / 6, 5 / 6], abs=0.02)
        assert float(means["neighbour_mass"][2]) > 0.95
        assert float(means["patch_distance"][3]) == pytest.approx(float(distances()[10].mean()), abs=0.02)
    strongest = seen.image_received(0, 3).flatten().argmax()
    assert divmod(int(strongest), SIDE) == (1, 4)


def test_layers_with_words_and_pictures_compare_no_positions_in_a_text() -> None:
    torch.manual_seed(0)
    one = LANGUAGE_MODELS["LLaVA, two pictures"]()
    images = random_pictures(one.sizes)
    with torch.no_grad(), mh.observe(one.model, processor=one.processor) as seen:
        one.model(**one.process(images))
    for layer in (seen.layers[0], seen.layers[-1]):
        measured = layer.means()
        assert not measured.keys() & {"previous_mass", "next_mass", "near_mass", "mean_distance", "distance_spread"}
        assert measured.keys() >= {"self_mass", "patch_distance", "neighbour_mass", "one_way_mass", "picture_mass"}
    assert seen.layers[0].means().keys() >= {"class_mass"}
    read = seen.layers[-1].sample()
    groups, weights = group_of_keys(read.text), read.weights().double()
    for number, name in ((0, "picture_mass"), (2, "words_mass")):
        expected = weights[:, :, groups == number].sum(-1)
        assert torch.allclose(read.statistics[name].double(), expected, rtol=0, atol=1e-6)
    assert "class_mass" not in read.statistics
    assert len(seen.table().rows) == 20


def test_what_generate_reads_of_pictures_is_the_same_by_every_keep() -> None:
    tables = []
    for keep in ("cpu", "statistics", "summary"):
        torch.manual_seed(0)
        one = LANGUAGE_MODELS["LLaVA, two pictures"]()
        images = random_pictures(one.sizes)
        with torch.no_grad(), mh.observe(one.model, processor=one.processor, images=images, keep=keep) as seen:
            one.model.generate(**one.process(images), max_new_tokens=3, num_beams=2, pad_token_id=0)
        tables.append(seen.table().rows)
    for kept, *others in zip(*tables, strict=True):
        for other in others:
            assert other.keys() >= {"patch_distance", "one_way_mass_chance", "picture_mass"}
            numbers = {name: value for name, value in other.items() if not isinstance(value, str)}
            assert numbers == pytest.approx({name: kept[name] for name in numbers}, rel=1e-6, abs=1e-6)
            assert other["kind"] == kept["kind"]
