"""The lowest versions that pyproject.toml allows, as `make lowest` installs them."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement

from tools import lowest


def test_every_range_of_the_package_has_its_lower_end(capsys: pytest.CaptureFixture[str]) -> None:
    lowest.main()
    lines = [Requirement(line) for line in capsys.readouterr().out.splitlines()]
    assert {"torch", "numpy", "click", "rich", "jinja2", "transformers", "safetensors"} <= {each.name for each in lines}
    assert all(re.fullmatch(r"==[0-9a-z.]+", str(each.specifier)) for each in lines)
    assert len({each.name.lower() for each in lines}) == len(lines)


@pytest.mark.parametrize("requirement", ["torch", "torch<3", "torch>=2.11,<3", "torch==2.11"])
def test_a_requirement_without_a_lower_end_is_refused(requirement: str) -> None:
    sentence = f"{requirement!r} is no range of the form name>=version. Write it so."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        lowest.lowest([requirement])
