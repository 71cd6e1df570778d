"""A plan is written once, says all that decides the result, and is checked by every process."""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multihead import probes
from multihead.counting.corpus import FileVersion
from multihead.counting.plan import PLAN_FILE, Plan, identity_of_probe, model_id, read_plan, tokenizer_id
from multihead.errors import ArgumentError, InputError
from multihead.models.loading import LoadedModel, load
from tests.counting.tiny import bert, tokenizer
from tests.counting.written import flip_a_bit


@pytest.fixture
def plan(folder: Path) -> Plan:
    return read_plan(folder)


def test_it_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    assert plan.write_or_check(tmp_path) == plan == read_plan(tmp_path)
    assert plan.statistics["entropy"].heading == "entropy (nats)"


def test_the_plan_that_is_there_is_kept(plan: Plan, tmp_path: Path) -> None:
    plan.write_or_check(tmp_path)
    before = (tmp_path / PLAN_FILE).read_bytes()
    plan.write_or_check(tmp_path)
    assert (tmp_path / PLAN_FILE).read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == [PLAN_FILE]


def test_a_census_of_the_version_before_is_read_and_not_continued(plan: Plan, tmp_path: Path) -> None:
    old = replace(plan, version=1)
    left_out = "model", "device", "title", "versions", "special_tokens", "version"
    content = {name: value for name, value in asdict(old).items() if name not in left_out}
    written = json.dumps(content, sort_keys=True).encode()
    assert old.id == hashlib.blake2b(written, digest_size=16).hexdigest() != plan.id
    old.write_or_check(tmp_path)
    assert read_plan(tmp_path) == old
    with pytest.raises(ArgumentError, match=r"^The directory holds a census with another version, 1, not 2\. Give"):
        plan.write_or_check(tmp_path)


def test_the_name_of_the_model_and_its_device_do_not_change_the_result(plan: Plan) -> None:
    assert replace(plan, model="elsewhere", device="cuda", title="other").id == plan.id
    assert replace(plan, seed=1).id != plan.id


class TestFilesThatChanged:
    """A plan is not continued with them, as half of the shards would be of the old content."""

    @pytest.mark.parametrize(
        ("size", "version", "finding", "mend"),
        [
            (11, FileVersion("monday", "a"), "it has 11 bytes, not 10", ""),
            (10, FileVersion("monday", "b"), "its first or its last bytes differ", ""),
            (
                10,
                FileVersion("tuesday", "a"),
                "it was written at tuesday, not at monday",
                "; if its content is the same, restore its time with touch -d monday",
            ),
        ],
    )
    def test_by_size_content_or_time_are_an_error(
        self, plan: Plan, size: int, version: FileVersion, finding: str, mend: str
    ) -> None:
        before = replace(plan, files={"a.txt": 10}, versions={"a.txt": FileVersion("monday", "a")})
        after = replace(plan, files={"a.txt": size}, versions={"a.txt": version})
        sentence = (
            f"a.txt is not the file that the census in the directory was planned with: {finding}. "
            f"Give another directory with out=, or delete this one{mend}."
        )
        before.check_same_census(before)
        with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
            before.check_same_census(after)

    def test_what_is_unknown_in_one_of_the_plans_does_not_differ(self, plan: Plan) -> None:
        known = replace(plan, files={"a.txt": 10}, versions={"a.txt": FileVersion("monday", "a")})
        for size, versions in ((None, {}), (10, {}), (10, {"a.txt": FileVersion("", "a")})):
            unknown = replace(known, files={"a.txt": size}, versions=versions)
            known.check_same_census(unknown)
            unknown.check_same_census(known)

    def test_a_file_that_the_plan_lacks_is_an_error(self, plan: Plan) -> None:
        with pytest.raises(
            ArgumentError, match=r"^b\.txt is not the file .* planned with: the plan does not have it\. "
        ):
            plan.check_same_census(replace(plan, files={**plan.files, "b.txt": 1}))

    def test_a_plan_without_versions_has_the_same_id_and_is_read(self, plan: Plan, tmp_path: Path) -> None:
        old = replace(plan, versions={}, special_tokens=())
        assert old.id == plan.id
        assert old.write_or_check(tmp_path).versions == {}
        content = json.loads((tmp_path / PLAN_FILE).read_text(encoding="utf-8"))
        del content["versions"], content["special_tokens"], content["hash"]
        (tmp_path / PLAN_FILE).write_text(json.dumps(content), encoding="utf-8")
        assert read_plan(tmp_path) == old


def test_a_plan_that_was_changed_is_an_error(plan: Plan, tmp_path: Path) -> None:
    plan.write_or_check(tmp_path)
    content = json.loads((tmp_path / PLAN_FILE).read_text(encoding="utf-8"))
    (tmp_path / PLAN_FILE).write_text(json.dumps({**content, "seed": 5}), encoding="utf-8")
    sentence = f"'{tmp_path / PLAN_FILE}' was changed after it was written. Delete the directory and run again."
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        read_plan(tmp_path)


def test_a_plan_in_which_a_bit_was_flipped_is_an_error_or_equal(plan: Plan, tmp_path: Path) -> None:
    plan.write_or_check(tmp_path)
    file, draw = tmp_path / PLAN_FILE, random.Random(0)
    content = file.read_bytes()
    for _ in range(300):
        file.write_bytes(flip_a_bit(content, draw))
        try:
            assert read_plan(tmp_path) == plan
        except InputError:
            continue


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read: "),
        ("[]", "is no plan of this version of multihead. "),
        ('{"version": 1, "id": ""}', "is incomplete: "),
    ],
)
def test_another_file_in_its_place_is_an_error(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / PLAN_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=rf"{PLAN_FILE}' {re.escape(sentence)}"):
        read_plan(tmp_path)


def test_a_folder_without_a_plan_is_an_error(tmp_path: Path) -> None:
    sentence = f"'{tmp_path}' holds no census. Run multihead census with --out first."
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        read_plan(tmp_path)


class TestIds:
    def test_a_model_that_is_loaded_again_has_the_same_one(self, model: str) -> None:
        assert model_id(load(model)) == model_id(load(model))

    def test_one_changed_parameter_is_another_model(self) -> None:
        one = LoadedModel("", "", bert(), None)
        before = model_id(one)
        with torch.no_grad():
            one.model.encoder.layer[1].output.dense.bias[3] += 1e-3  # type: ignore[index, union-attr]
        assert model_id(one) != before

    def test_a_call_of_a_tokenizer_does_not_change_it(self) -> None:
        made = tokenizer()
        before = tokenizer_id(made)
        made(["w1", "w2 w3"], truncation=True, max_length=3, padding=True)
        assert tokenizer_id(made) == before
        made.add_tokens(["new"])
        assert tokenizer_id(made) != before


class TestProbes:
    def test_those_of_the_library_are_made_again_from_their_parts(self, plan: Plan) -> None:
        tokens = probes.tokens_mass("digits", (3, 4))
        chosen = (probes.PROBES["entropy"], probes.offset_mass(-5), probes.first_keys_mass(4), tokens)
        assert replace(plan, probes=tuple(identity_of_probe(each) for each in chosen)).built_in_probes() == chosen

    def test_one_of_the_same_name_with_other_parts_is_not(self, plan: Plan) -> None:
        mine = probes.Probe("offset_plus_2_mass", lambda parts: parts["entropy"], {"entropy"})
        with pytest.raises(ArgumentError, match=r"^The probe offset_plus_2_mass is defined in a script"):
            replace(plan, probes=(identity_of_probe(mine),)).built_in_probes()

    def test_one_of_the_library_is_described_as_before_functions_were_compared(self) -> None:
        for each in (*probes.PROBES.values(), probes.offset_mass(-5), probes.tokens_mass("digits", (3, 4))):
            assert "function" not in identity_of_probe(each)

    def test_a_census_is_not_continued_with_another_function(self, plan: Plan, tmp_path: Path) -> None:
        def planned(of: Any) -> Plan:
            mine = probes.Probe("mine", of, {("offset_mass", 0)})
            return replace(plan, probes=(*plan.probes, identity_of_probe(mine)))

        planned(lambda parts: 1 - parts["offset_mass", 0]).write_or_check(tmp_path)
        planned(lambda parts: 1 - parts["offset_mass", 0]).write_or_check(tmp_path)
        with pytest.raises(ArgumentError) as caught:
            planned(lambda parts: parts["offset_mass", 0]).write_or_check(tmp_path)
        assert str(caught.value) == (
            "The directory holds a census whose probe 'mine' has another function. "
            "Give another directory with out=, or delete this one."
        )

    @pytest.mark.parametrize("known_before", [True, False])
    def test_a_census_is_continued_with_a_warning_where_functions_cannot_be_compared(
        self, plan: Plan, tmp_path: Path, *, known_before: bool
    ) -> None:
        unknown = (each for each in ())
        mine = identity_of_probe(probes.Probe("mine", lambda parts: (parts, unknown), {"entropy"}))
        assert mine.pop("function") is None
        first = mine if not known_before else {**mine, "function": "a hash"}  # a census of before has no hash
        replace(plan, probes=(first,)).write_or_check(tmp_path)
        with pytest.warns(UserWarning, match=r"^The census in ") as said:
            replace(plan, probes=({**mine, "function": None},)).write_or_check(tmp_path)
        assert str(said[0].message) == (
            f"The census in {str(tmp_path)!r} is continued, and whether it was counted with the same function of mine "
            "is unknown, because a value that the function reads cannot be compared. If the function has changed, give "
            "another directory with out=."
        )
