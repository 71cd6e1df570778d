"""A file is believed only as far as it holds together: what is cut, foreign, newer or wrong is refused in words."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from multihead import masks
from multihead.errors import InputError, MultiheadError
from multihead.observation.record import Record
from tests.observation.recorded import Tokenizer, asked, ids, read, same

FILES = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = read(ids(2, 6), ids(1, 4))
    record.name_tokens(Tokenizer())
    record.save(target := tmp_path_factory.mktemp("good") / "run.safetensors")
    return target


def opened(file: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as known:
        return known.metadata(), {name: known.get_tensor(name).clone() for name in known.keys()}  # noqa: SIM118


def refusal(file: Path) -> str:
    with pytest.raises(InputError) as caught:
        Record.load(file)
    return str(caught.value).replace(repr(str(file)), "FILE")


def changed(good: Path, tmp_path: Path, change: Callable[[Any, dict[str, torch.Tensor]], None]) -> Path:
    metadata, tensors = opened(good)
    said = json.loads(metadata["record"])
    change(said, tensors)
    save_file(tensors, tmp_path / "run.safetensors", metadata | {"record": json.dumps(said)})
    return tmp_path / "run.safetensors"


class TestRefusals:
    def test_no_file(self, tmp_path: Path) -> None:
        assert refusal(tmp_path / "none") == "There is no file FILE. Check its name."

    def test_a_folder(self, tmp_path: Path) -> None:
        assert refusal(tmp_path) == "FILE is a folder. Give a file that Record.save wrote."

    @pytest.mark.parametrize("content", [b"entropy of heads\n" * 9, pickle.dumps({"q": [1] * 99}), b"PK\x03\x04" * 9])
    def test_a_file_of_another_kind(self, content: bytes, tmp_path: Path) -> None:
        (file := tmp_path / "notes").write_bytes(content)
        assert refusal(file) == "FILE is not a safetensors file. Give a file that Record.save wrote."

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (file := tmp_path / "empty.txt").touch()
        assert refusal(file) == "FILE is empty. Give a file that Record.save wrote."

    @pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9999])
    def test_a_file_that_is_cut(self, share: float, good: Path, tmp_path: Path) -> None:
        (file := tmp_path / "cut").write_bytes(good.read_bytes()[: int(share * good.stat().st_size)])
        assert refusal(file) == (
            "FILE is truncated or damaged: it starts as a safetensors file but does not continue as one. "
            "Copy it again, or save the record again."
        )

    def test_the_weights_of_a_model(self, tmp_path: Path) -> None:
        save_file({"q": torch.zeros(2)}, file := tmp_path / "model.safetensors", {"format": "pt"})
        assert refusal(file) == (
            "FILE is a safetensors file, but not a record of multihead. Give a file that Record.save wrote."
        )

    def test_a_newer_version(self, good: Path, tmp_path: Path) -> None:
        metadata, tensors = opened(good)
        save_file(tensors, file := tmp_path / "new.safetensors", metadata | {"version": "4"})
        assert refusal(file) == (
            "FILE was saved by a newer multihead: its format has version 4, and this one reads 3. "
            "Update multihead: pip install --upgrade multihead."
        )

    @pytest.mark.parametrize("version", ["", "0", "one", "-1", "1.0", "١"])
    def test_a_version_that_is_none(self, version: str, good: Path, tmp_path: Path) -> None:
        metadata, tensors = opened(good)
        save_file(tensors, file := tmp_path / "old.safetensors", metadata | {"version": version})
        assert refusal(file) == f"FILE is damaged: its version is {version!r}. Save the record again."

    def test_an_id_that_could_be_a_path(self, good: Path, tmp_path: Path) -> None:
        metadata, tensors = opened(good)
        save_file(tensors, file := tmp_path / "id.safetensors", metadata | {"id": "../../etc"})
        assert refusal(file) == "FILE is damaged: its id is not 32 hexadecimal digits. Save the record again."

    @pytest.mark.parametrize(
        ("change", "finding"),
        [
            (lambda said, tensors: said.update(title=3), "its title should be a text, and is an integer"),
            (lambda said, tensors: said.update(layers={}), "the layers should be a list, and is an object"),
            (
                lambda said, tensors: said["layers"][0].update(tables=[]),
                "the samples of layer 'layers.0' are inconsis",
            ),
            (lambda said, tensors: table(said).update(dtype="object"), "there is no dtype 'object'"),
            (lambda said, tensors: table(said).update(heads=0), "a number of heads is 0"),
            (
                lambda said, tensors: table(said).update(heads=True),
                "a number of heads should be an integer, and is true or false",
            ),
            (
                lambda said, tensors: table(said).update(kv_heads=3),
                "k has 3 heads and q has 4, and 4 is not a multiple",
            ),
            (lambda said, tensors: text(said).update(pieces=[]), "a sample has no calls"),
            (lambda said, tensors: segment(said).update(queries=7), "logsumexp is a torch.float32 tensor of shape"),
            (lambda said, tensors: segment(said).update(keys=7), "k has 6 keys of 7"),
            (lambda said, tensors: segment(said).update(scale="1"), "a scale is not a number"),
            (lambda said, tensors: segment(said).update(query_start=1 << 50), f"the position of a query is {1 << 50}"),
            (lambda said, tensors: segment(said).update(mask={"kind": 3}), "3 is not the name of a mask"),
            (lambda said, tensors: segment(said).update(mask=nested(99)), "it is nested too deep"),
            (lambda said, tensors: segment(said).update(mask=joining(1000)), "it combines more than 1,000 masks"),
            (lambda said, tensors: segment(said).update(keys=1 << 29), f"a number of keys is {1 << 29}"),
            (lambda said, tensors: segment(said).update(key_start=1 << 29), f"the index of a key is {1 << 29}"),
            (lambda said, tensors: table(said).update(head_dim=1 << 21), f"a width is {1 << 21}"),
            (lambda said, tensors: table(said).update(dtype="x" * 999), "there is no dtype 'xxxxx"),
            (lambda said, tensors: segment(said).update(mask={"kind": "Window"}), "A mask of the file cannot be read"),
            (
                lambda said, tensors: segment(said).update(bias={"kind": "Tensor", "tensor": "0.0.calls"}),
                "A bias of the",
            ),
            (lambda said, tensors: segment(said).update(sinks="0.0.calls"), "sinks is a torch.int64 tensor of shape"),
            (lambda said, tensors: segment(said).update(sinks=3), "its contents are inconsistent"),
            (lambda said, tensors: tensors.update({"0.0.q": tensors["0.0.q"].double()}), "q is a torch.float64 tensor"),
            (lambda said, tensors: tensors.pop("0.0.k"), "its contents are inconsistent"),
            (
                lambda said, tensors: tensors.update({"0.0.calls": torch.tensor([[0, 5, 0, 6], [0, 4, 0, 4]])}),
                "the calls of a sample",
            ),
            (lambda said, tensors: text(said).update(rows=[6, 6, 6]), "the rows of a text are 3 numbers"),
            (
                lambda said, tensors: text(said).update(rows=[5, 6, 6, 1]),
                "logsumexp is a torch.float32 tensor of shape",
            ),
            (
                lambda said, tensors: text(said).update(rows=[6, 99, 99, 1]),
                "the rows of statistics.received are not those of",
            ),
            (lambda said, tensors: text(said).update(rows=[-6, 6, 6, 1]), "a number of rows is -6"),
            (lambda said, tensors: table(said)["texts"].pop(), "the rows of calls are not those of the texts"),
            (lambda said, tensors: text(said).update(number=1), "two texts of a layer have the same number"),
            (lambda said, tensors: text(said).update(number=5), "the texts of a layer are not numbered from 0"),
            (lambda said, tensors: tensors.update(calls=torch.tensor([[0, 9, 0]])), "a call refers to a sample that"),
            (lambda said, tensors: said["texts"][0].update(tokens=["a"]), "the tokens of a text are not as many"),
            (
                lambda said, tensors: said["texts"][0].update(tokens=[1] * 6),
                "a token should be a text, and is an integer",
            ),
            (lambda said, tensors: text(said).update(text=2), "a text has 4 tokens, and its layer 6"),
            (lambda said, tensors: table(said).update(map_pool="sum"), "map_pool is 'sum'"),
        ],
    )
    def test_what_does_not_hold_together(
        self, change: Callable[[Any, Any], None], finding: str, good: Path, tmp_path: Path
    ) -> None:
        said = refusal(changed(good, tmp_path, change))
        assert len(said) < 400
        assert said.startswith("FILE is damaged: ")
        assert finding in said
        assert said.endswith("Save the record again.")

    def test_numbers_that_json_does_not_know(self, good: Path, tmp_path: Path) -> None:
        metadata, tensors = opened(good)
        wrong = re.sub(r'"scale":[0-9.]+', '"scale":NaN', metadata["record"])
        save_file(tensors, file := tmp_path / "nan.safetensors", metadata | {"record": wrong})
        assert refusal(file) == "FILE is damaged: NaN is not a number. Save the record again."


def table(said: Any) -> Any:
    return said["layers"][0]["tables"][0]


def text(said: Any) -> Any:
    return table(said)["texts"][0]


def segment(said: Any) -> Any:
    return text(said)["pieces"][0]


def nested(depth: int) -> dict[str, Any]:
    mask: dict[str, Any] = {"kind": "Causal"}
    for _ in range(depth):
        mask = {"kind": "And", "parts": [mask, {"kind": "Causal"}]}
    return mask


def joining(count: int) -> dict[str, Any]:
    return {"kind": "And", "parts": [{"kind": "Causal"}] * count}


def hide_padding_queries(said: Any, tensors: dict[str, torch.Tensor], heads: int) -> None:
    """Claim heads that take no byte, since they have no queries."""
    tensors.clear()
    said["texts"] = []
    for layer in said["layers"]:
        (one,) = layer["tables"]
        one.update(heads=heads, kv_heads=heads, kept=False, statistics={}, texts=one["texts"][:1])
        one["texts"][0].update(text=None, rows=[0, 0, 0, 1], maps={})
        one["texts"][0]["pieces"][0].update(queries=0, keys=0, mask={"kind": "Full"})
        tensors[f"{one['name']}.logsumexp"] = torch.zeros(heads, 0)
        tensors[one["calls"]] = torch.zeros(1, 4, dtype=torch.int64)
    tensors["calls"] = torch.zeros(0, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("heads", "finding"),
    [(1 << 40, f"a number of heads is {1 << 40}"), ((1 << 16) - 1, "its layers have more than 65,536 heads")],
)
def test_heads_that_take_no_byte_are_limited(heads: int, finding: str, good: Path, tmp_path: Path) -> None:
    file = changed(good, tmp_path, lambda said, tensors: hide_padding_queries(said, tensors, heads))
    assert file.stat().st_size < 3_000
    assert refusal(file) == f"FILE is damaged: {finding}. Save the record again."


def test_a_record_without_a_query_opens_and_makes_a_report(good: Path, tmp_path: Path) -> None:
    file = changed(good, tmp_path, lambda said, tensors: hide_padding_queries(said, tensors, 8))
    found = Record.load(file)
    assert len(found.table().rows) == 16
    found.report(tmp_path / "report.html")


def test_a_table_that_is_listed_twice_is_refused(good: Path, tmp_path: Path) -> None:
    file = changed(good, tmp_path, lambda said, _: said["layers"][0]["tables"].append(table(said)))
    assert refusal(file) == "FILE is damaged: '0.0' is listed twice. Save the record again."


def test_keys_of_which_a_file_holds_nothing_are_limited(good: Path, tmp_path: Path) -> None:
    def claim(said: Any, tensors: dict[str, torch.Tensor]) -> None:
        hide_padding_queries(said, tensors, 8)
        for layer in said["layers"]:
            layer["tables"][0]["texts"][0]["pieces"][0]["keys"] = 1 << 23

    file = changed(good, tmp_path, claim)
    assert refusal(file) == (
        "FILE is damaged: it stores no data for the 8,388,608 keys of a sample. Save the record again."
    )


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_no_file_can_be_called(name: str) -> None:
    assert refusal(Path(name)) == "FILE cannot be the name of a file. Choose another name."


def test_a_mask_nested_beyond_all_measure_is_refused_and_does_not_overflow(good: Path, tmp_path: Path) -> None:
    metadata, tensors = opened(good)
    deep = '{"kind":"And","parts":[' * 100_000
    save_file(tensors, file := tmp_path / "deep.safetensors", metadata | {"record": '{"layers":' + deep})
    assert refusal(file).startswith("FILE is damaged: ")


def test_a_file_of_a_version_that_kept_no_sinks_opens(good: Path, tmp_path: Path) -> None:
    def older(said: Any, tensors: dict[str, torch.Tensor]) -> None:
        for layer in said["layers"]:
            for one in layer["tables"][0]["texts"]:
                for each in one["pieces"]:
                    del each["sinks"]

    expected, found = Record.load(good), Record.load(changed(good, tmp_path, older))
    assert torch.equal(found.layers[0].sample().weights(), expected.layers[0].sample().weights())


def test_percentiles_of_a_file_of_version_1_are_read_from_its_bins(tmp_path: Path) -> None:
    texts = read(ids(2, 40))
    read(ids(2, 40), keep="summary").save(file := tmp_path / "sums.safetensors")
    metadata, tensors = opened(file)
    medians: list[dict[str, torch.Tensor]] = []
    for index, layer in enumerate(texts.layers):
        medians.append({})
        for name in layer.summary():
            # Version 1 had no bins of negative numbers.
            values = torch.cat([one.per_query[name].double().clamp(min=0) for one in layer.samples], 1)
            counted = torch.cat([one.measured()[name].counted for one in layer.samples], 1)
            place = (values / 1e-9).log().div(math.log(1.02)).ceil().clamp(0, 2094).long()
            bins = torch.zeros(len(values), 2095, dtype=torch.int64).scatter_add_(1, place, counted.long())
            tensors[f"{index}.{name}.bins"] = bins
            rows = zip(values, counted, strict=True)
            medians[-1][name] = torch.stack([v[c].quantile(0.5, interpolation="lower") for v, c in rows])
    said = json.loads(metadata["record"])
    for layer in said["layers"]:
        layer["samples"] = layer.pop("tables")
    metadata |= {"version": "1", "record": json.dumps(said)}
    save_file(tensors, file := tmp_path / "old.safetensors", metadata)
    for layer, other, expected in zip(Record.load(file).layers, texts.layers, medians, strict=True):
        torch.testing.assert_close(layer.summary(), other.summary())
        torch.testing.assert_close(layer.summary("median"), expected, rtol=0.02, atol=1e-8)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_of_version_2_opens_with_its_numbers(tmp_path: Path, *, mapped: bool) -> None:
    """Two padded texts, of which the first was continued by two steps of a cache; each had tensors of its own."""
    written = json.loads((Path(__file__).parent / "version_2.json").read_text(encoding="utf-8"))
    tensors = {
        name: torch.tensor(values, dtype=getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, values) in written["tensors"].items()
    }
    save_file(tensors, file := tmp_path / "run.safetensors", written["metadata"])
    record = Record.load(file, mapped=mapped)
    assert [(one.num_queries, one.num_keys, len(one.calls)) for one in record.layers[0].samples] == [
        (6, 6, 3),
        (4, 4, 3),
    ]
    assert [(one.num_queries, call) for one, call in record.calls] == [
        (length, call) for call in range(3) for length in (6, 4)
    ]
    for one in record.layers[0].samples:
        assert one.q is not None
        assert one.k is not None
        scores = (one.q.all_rows()[0] @ one.k.all_rows()[0].mT / 2).double()
        weights = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf).softmax(-1)
        torch.testing.assert_close(one.weights().double(), weights, atol=1e-6, rtol=0)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        torch.testing.assert_close(one.statistics["entropy"].double(), entropy, atol=1e-6, rtol=0)
        torch.testing.assert_close(one.statistics["received"].double(), weights.sum(-2), atol=1e-6, rtol=0)
    record.save(file)
    same(Record.load(file, mapped=mapped), record)


def test_tensors_stay_in_the_file(good: Path) -> None:
    one = Record.load(good).layers[0].sample()
    assert one.q is not None
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(good) in mapped.read_text(encoding="utf-8")
    before = good.read_bytes()
    one.q.all_rows().zero_()  # a private copy of the page is written, and not the file
    assert good.read_bytes() == before


class TestDamage:
    """Whatever is done to a file, it opens as a record or is refused in words, and nothing else happens."""

    @FILES
    @given(share=st.floats(0, 1))
    def test_a_cut(self, share: float, good: Path, tmp_path: Path) -> None:
        content = good.read_bytes()
        length = int(share * len(content))
        assert self.opens(content[:length], tmp_path) == (length == len(content))

    @FILES
    @given(places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), min_size=1, max_size=4), header=st.booleans())
    def test_turned_bits(self, places: list[tuple[float, int]], *, header: bool, good: Path, tmp_path: Path) -> None:
        content = bytearray(good.read_bytes())
        length = 8 + int.from_bytes(content[:8], "little") if header else len(content)
        for share, bit in places:
            content[min(int(share * length), length - 1)] ^= 1 << bit
        self.opens(bytes(content), tmp_path)

    @FILES
    @given(
        seed=st.integers(0, 2**32),
        value=st.sampled_from([None, -1, 0, 1, 1 << 62, 1.5, "", "calls", [], {}, True, [[]]]),
    )
    def test_another_value_somewhere(self, seed: int, value: object, good: Path, tmp_path: Path) -> None:
        metadata, tensors = opened(good)
        said = json.loads(metadata["record"])
        holder, key = random.Random(seed).choice(list(places_in(said)))
        holder[key] = copy.deepcopy(value)
        save_file(tensors, file := tmp_path / "run.safetensors", metadata | {"record": json.dumps(said)})
        self.opens_file(file)

    def opens(self, content: bytes, tmp_path: Path) -> bool:
        (file := tmp_path / "run.safetensors").write_bytes(content)
        return self.opens_file(file)

    def opens_file(self, file: Path) -> bool:
        """Whether a file opens, mapped and read alike; what opens is used, and raises no error but our own."""
        found = []
        for mapped in (True, False):
            try:
                record = Record.load(file, mapped=mapped)
            except InputError:
                found.append(False)
                continue
            found.append(True)
            try:
                for layer in record.layers:
                    layer.sample().weights(queries=slice(0, 2))
                    layer.sample().map(0, bins=2)
                record.table()
                for call in itertools.islice(record, 4):
                    call.weights(0)
            except MultiheadError:
                continue  # a record that opens and has no weights says so
        assert found[0] == found[1]
        return found[0]


def places_in(said: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in what was said that holds something."""
    pairs = said.items() if isinstance(said, dict) else enumerate(said)
    for key, value in list(pairs):
        yield said, key
        if isinstance(value, (dict, list)):
            yield from places_in(value)


def test_a_record_with_every_mask_and_bias_that_holds_a_tensor_survives_damage_too(tmp_path: Path) -> None:
    keep = masks.Causal() & masks.Keep(torch.rand(9, 9) < 0.5, "queries keys")
    asked(mask=keep | masks.Prefix(2), bias=torch.randn(1, 1, 9, 9)).save(file := tmp_path / "good.safetensors")
    metadata, tensors = opened(file)
    for seed in range(40):
        said = json.loads(metadata["record"])
        holder, key = random.Random(seed).choice([each for each in places_in(said) if each[1] != "title"])
        holder[key] = random.Random(seed).choice([None, -1, 1 << 62, "calls", "0.0.q", [], {"kind": "Keep"}])
        save_file(tensors, other := tmp_path / "run.safetensors", metadata | {"record": json.dumps(said)})
        TestDamage().opens_file(other)


def test_layers_of_a_record_without_numbers_are_numbered_by_their_place(good: Path, tmp_path: Path) -> None:
    def without_numbers(said: Any, tensors: dict[str, torch.Tensor]) -> None:
        for layer in said["layers"]:
            del layer["number"]

    assert [each.number for each in Record.load(changed(good, tmp_path, without_numbers)).layers] == [0, 1]


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (1, "FILE is damaged: two layers have the same number. Save the record again."),
        (-1, "FILE is damaged: a layer's number is -1. Save the record again."),
        ("0", "FILE is damaged: a layer's number should be an integer, and is a text. Save the record again."),
    ],
)
def test_a_number_that_is_none_is_refused(good: Path, tmp_path: Path, number: object, sentence: str) -> None:
    def renumbered(said: Any, tensors: dict[str, torch.Tensor]) -> None:
        said["layers"][0]["number"] = number

    assert refusal(changed(good, tmp_path, renumbered)) == sentence


@pytest.mark.parametrize(
    ("statistics", "what"),
    [
        ([], "the labels of statistics should be an object, and is a list"),
        ({"late": "label"}, "the label of a statistic should be an object, and is a text"),
        ({"late": {"label": 3}}, "the label of a statistic should be a text, and is an integer"),
        ({"late": {"label": "a" * 101}}, "a label of a statistic has more than 100 characters"),
        ({"late": {"number_format": ".99f"}}, "The number format of late is '.99f'"),
        ({"late": {"of": "os.system"}}, "its contents are inconsistent"),
    ],
)
def test_a_label_of_a_statistic_that_is_none_is_refused(
    good: Path, tmp_path: Path, statistics: object, what: str
) -> None:
    file = changed(good, tmp_path, lambda said, _: said.update(statistics=statistics))
    assert refusal(file) == f"FILE is damaged: {what}. Save the record again."


def test_queries_that_count_by_an_unknown_rule_are_refused(good: Path, tmp_path: Path) -> None:
    file = changed(good, tmp_path, lambda said, _: said.update(statistics={"late": {}}, counted={"late": "some"}))
    assert refusal(file) == "FILE is damaged: The queries counted for late are 'some'. Save the record again."


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (["offset_mass", -4, None], "the part of offset_minus_5_mass belongs to offset_minus_4_mass"),
        (["offset_mass", "a", None], "There is no part ('offset_mass', 'a')"),
        (["entropy", 1, None], "There is no part ('entropy', 1)"),
        (["offset_mass"], "its contents are inconsistent"),
        ({}, "the part of a statistic should be a list, and is an object"),
    ],
)
def test_a_part_of_a_statistic_that_is_none_is_refused(good: Path, tmp_path: Path, part: object, what: str) -> None:
    name = "offset_minus_5_mass"
    file = changed(good, tmp_path, lambda said, _: said.update(statistics={name: {}}, parts={name: part}))
    assert refusal(file) == f"FILE is damaged: {what}. Save the record again."


def test_a_file_cannot_relabel_a_built_in_statistic(good: Path, tmp_path: Path) -> None:
    file = changed(good, tmp_path, lambda said, _: said.update(statistics={"entropy": {"label": "certainty"}}))
    assert Record.load(file).statistic("entropy").heading == "entropy (nats)"


@pytest.mark.parametrize(
    ("heads", "what"),
    [
        ([4], "an alignment head is 4"),
        ([1, 0], "the alignment heads of a layer are not in ascending order"),
        (1, "the alignment heads should be a list, and is an integer"),
    ],
)
def test_alignment_heads_that_do_not_exist_are_rejected(good: Path, tmp_path: Path, heads: object, what: str) -> None:
    def aligned(said: Any, tensors: dict[str, torch.Tensor]) -> None:
        said["layers"][0]["alignment"] = heads

    assert refusal(changed(good, tmp_path, aligned)) == f"FILE is damaged: {what}. Save the record again."
