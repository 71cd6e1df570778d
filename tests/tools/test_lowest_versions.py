"""The lowest versions that pyproject.toml allows, which `make lowest` installs."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement

from tools import lowest_versions


def test_every_dependency_has_its_lowest_version(capsys: pytest.CaptureFixture[str]) -> None:
    lowest_versions.main()
    lines = [Requirement(line) for line in capsys.readouterr().out.splitlines()]
    assert {"torch", "numpy", "click", "rich", "jinja2", "transformers", "safetensors"} <= {each.name for each in lines}
    assert all(re.fullmatch(r"==[0-9a-z.]+", str(each.specifier)) for each in lines)
    assert len({each.name.lower() for each in lines}) == len(lines)


@pytest.mark.parametrize("requirement", ["torch", "torch<3", "torch>=2.11,<3", "torch==2.11"])
def test_a_requirement_without_a_lowest_version_is_rejected(requirement: str) -> None:
    sentence = f"{requirement!r} is not of the form name>=version. Write it in that form."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        lowest_versions.lowest([requirement])
